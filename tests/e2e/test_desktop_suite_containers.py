"""Tasks of the desktop suite in containers, through the whole daemon: an oracle scores 1, and doing nothing 0."""

import json
import tempfile

import pytest

from tests.support.command import run_envd
from tests.support.containers import desktop_image

pytestmark = [pytest.mark.native, pytest.mark.timeout(600)]

#: A file written by typing, a chord of three keys, a mouse drag, and a program started from the panel.
TASKS = ("desktop/type-unicode", "desktop/new-folder", "desktop/drag-into-folder", "desktop/open-calculator")


def test_oracles_score_one_and_nothing_scores_zero() -> None:
    desktop_image()
    with tempfile.TemporaryDirectory(prefix="envd-oci-", dir="/var/tmp") as state_dir:
        done = run_envd("tasks", "verify", *TASKS, "--hypervisor", "oci:", "--state-dir", state_dir, "--json")
    report = json.loads(done.out)
    assert report["accelerator"] == "native"
    assert (report["oracle_ok"], report["null_ok"], report["failures"]) == (len(TASKS), len(TASKS), []), done.err
