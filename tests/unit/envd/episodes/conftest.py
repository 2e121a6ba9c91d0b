"""One world of episodes for all tests of the service."""

from collections.abc import AsyncIterator

import pytest

from tests.support.episode_world import World, running_world


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """Run a service on stub machines."""
    async with running_world() as world:
        yield world


@pytest.fixture
async def episode_id(world: World) -> str:
    """Open an episode."""
    return await world.open()
