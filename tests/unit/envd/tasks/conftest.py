"""One desktop in memory for the tests of setups and checkers."""

import pytest

from tests.support.memory_desktop import MemoryDesktop


@pytest.fixture
def desktop() -> MemoryDesktop:
    """Create a desktop with an empty home directory and no windows."""
    return MemoryDesktop()
