"""What the proof on AReaL's real code shares."""

from importlib.util import find_spec

import pytest

from tests.support.proofs import deselect_proof

#: The environment of all other tests has neither, and needs none.
CAN_RUN = find_spec("areal") is not None and find_spec("torch") is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the proof, with a message, if AReaL is missing: it never counts as passed."""
    deselect_proof(config, items, marker="areal", can_run=CAN_RUN, message="AReaL's real code. Run: make areal-proof")
