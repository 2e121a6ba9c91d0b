"""One world of pools for all tests of the pool."""

from collections.abc import AsyncIterator

import pytest

from tests.support.pool_world import PoolWorld


@pytest.fixture
async def world(request: pytest.FixtureRequest) -> AsyncIterator[PoolWorld]:
    """Create a world whose pools have the settings that the test's module names in `POOL`."""
    async with PoolWorld(getattr(request.module, "POOL", None)) as world:
        yield world
