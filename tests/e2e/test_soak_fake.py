"""`make soak` on fake desktops, as a command: a minute passes, and Ctrl-C ends one early with a report."""

import time
from pathlib import Path

import pytest

from tests.support.soak import SoakProcess, SoakRun

pytestmark = pytest.mark.timeout(360)

ZEROS = ("duplicated_actions", "lost_actions", "fake_zero_rewards", "leftovers", "unexplained_errors")


@pytest.mark.long
def test_an_interrupted_soak_prints_its_report(tmp_path: Path) -> None:
    interrupted = SoakProcess(tmp_path, "--minutes", "60", "--seed", "ci")
    # Progress is printed every ten seconds; the second line reports episodes.
    while not any(" episodes, " in line and " 0 episodes" not in line for line in interrupted.log.splitlines()):
        assert interrupted.status is None
        time.sleep(0.2)
    interrupted.interrupt()
    report = interrupted.report()
    assert interrupted.status == 0, interrupted.log[-4000:]
    assert {name: report[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert report["conditions"]["played_s"] < 3600


def test_a_minute_of_random_episodes_under_faults_passes(soak: SoakRun) -> None:
    report = soak.report()
    assert [report["problems"], report["unexplained"]] == [{"actions": [], "rewards": [], "leftovers": []}, []]
    assert {name: report[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0), soak.log[-4000:]
    assert soak.status == 0
    assert report["passed"] is True
    assert (
        min(report["episodes"], report["steps"], report["counters_read"], report["scores"], report["faults"]["total"])
        > 0
    )
    assert report["faults"]["hostile_guests"] > 0
    assert min(report["checkpoints"], report["rollbacks"]) > 0
    assert report["longest_stall_ms"] >= 0
    calls = report["conditions"]["neighbour_calls"]
    assert min(calls["lists"], calls["exports"], calls["imports"], calls["unread"]) > 0
    assert report["conditions"]["seed"] == "ci"
    assert report["conditions"]["played_s"] >= 60
