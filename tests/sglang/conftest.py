"""Fixtures of the tests on SGLang's real server: tiny models, a daemon with drawn desktops, slime's code."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import stand_ins
from tests.support.proofs import deselect_proof
from tests.support.sglang_process import SglangProcess
from tests.support.slime_fixtures import *  # noqa: F403 -- fixtures
from tests.support.slime_job import use_slime

SLIME_HOME = os.environ.get("SLIME_HOME", "")
CAN_RUN = bool(SLIME_HOME) and find_spec("sglang") is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect these tests without SGLang, with a message."""
    deselect_proof(
        config,
        items,
        marker="sglang",
        can_run=CAN_RUN,
        message="SGLang. Set SLIME_HOME to a checkout of slime, and: make sglang-proof",
    )


@pytest.fixture(scope="session", autouse=True)
def real_slime() -> None:
    """Make `import slime` find the checkout; no hub is contacted."""
    if CAN_RUN:
        os.environ["HF_HUB_OFFLINE"] = "1"
        use_slime(Path(SLIME_HOME))
        # SGLang runs in processes of its own; slime needs only a few of its names here.
        stand_ins.install(replacing=True)


@pytest.fixture(scope="session")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangProcess]:
    """SGLang as it is installed."""
    with SglangProcess(checkpoint, tmp_path_factory.mktemp("engine") / "log") as server:
        yield server
