"""What the proof on AReaL's real code shares."""

from importlib.util import find_spec

import pytest

#: The environment of all other tests has neither, and needs none.
CAN_RUN = find_spec("areal") is not None and find_spec("torch") is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without AReaL the proof cannot run: deselected and said so, never counted as passed."""
    proof = [item for item in items if item.get_closest_marker("areal")]
    if CAN_RUN or not proof:
        return
    items[:] = [item for item in items if item not in proof]
    config.hook.pytest_deselected(items=proof)
    print(f"\nNOT RUN: {len(proof)} tests on AReaL's real code. Run: make areal-proof")
