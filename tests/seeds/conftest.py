"""Tests with the unmodified clients of other systems, from checkouts in the directory `SEEDS`."""

import os

import pytest

from tests.support.proofs import deselect_proof


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect these tests without the checkouts, with a message."""
    deselect_proof(
        config,
        items,
        marker="seeds",
        can_run=bool(os.environ.get("SEEDS")),
        message="other systems' unmodified clients. Run: make compat-proof SEEDS=DIR; see docs/evidence/clients.md",
    )
