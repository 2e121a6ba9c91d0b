"""Tests with OSWorld's published runner and agents, from a checkout in the directory `OSWORLD`."""

import os

import pytest

from tests.support.proofs import deselect_proof


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect these tests without the checkout and its environment, with a message."""
    deselect_proof(
        config,
        items,
        marker="osworld_agents",
        can_run=all(os.environ.get(name) for name in ("OSWORLD", "OSWORLD_AGENTS_PYTHON")),
        message="OSWorld's published agents. Run: make osworld-agents-proof OSWORLD=DIR; see docs/osworld.md",
    )
