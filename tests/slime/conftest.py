"""Fixtures of the tests on slime's real code: slime from `SLIME_HOME`, a tiny model, a daemon with drawn desktops."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.proofs import deselect_proof
from tests.support.slime_fixtures import *  # noqa: F403 -- fixtures
from tests.support.slime_job import use_slime

SLIME_HOME = os.environ.get("SLIME_HOME", "")
#: The environment of the other tests has no torch.
CAN_RUN = bool(SLIME_HOME) and find_spec("torch") is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect these tests without slime, with a message."""
    deselect_proof(
        config,
        items,
        marker="slime",
        can_run=CAN_RUN,
        message="slime's real code. Set SLIME_HOME to a checkout, and: make slime-proof",
    )


@pytest.fixture(scope="session", autouse=True)
def real_slime() -> None:
    """Make `import slime` find the checkout; no hub is contacted."""
    if CAN_RUN:
        os.environ["HF_HUB_OFFLINE"] = "1"
        use_slime(Path(SLIME_HOME))
