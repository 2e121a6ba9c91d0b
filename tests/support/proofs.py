"""Tests on other projects' packages, which need an environment of their own."""

from functools import cache

import pytest


@cache
def marker_names(item: pytest.Item) -> frozenset[str]:
    """Return the names of a test's markers, once: a search for each marker took a tenth of the collection."""
    return frozenset(marker.name for marker in item.iter_markers())


def deselect_proof(
    config: pytest.Config, items: list[pytest.Item], *, marker: str, can_run: bool, message: str
) -> None:
    """Deselect the tests with a marker unless they can run, and say so: they never count as passed.

    Args:
        config: Of the run.
        items: Collected tests; changed in place.
        marker: Of the proof's tests.
        can_run: Whether this environment has what they need.
        message: What they test and how to run them, after their number.
    """
    proof = [item for item in items if marker in marker_names(item)]
    if can_run or not proof:
        return
    items[:] = [item for item in items if marker not in marker_names(item)]
    config.hook.pytest_deselected(items=proof)
    print(f"\nNOT RUN: {len(proof)} tests on {message}")
