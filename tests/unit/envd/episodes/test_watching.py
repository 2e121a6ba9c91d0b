"""An episode's screen is yielded at once and on change, at a limited rate, until the episode is closed."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from envd.base.errors import MachineLost
from envd.episodes.stepping import frames_of
from tests.support.clock import ManualClock, begun, run_ready


def stub(**fields: object) -> Any:
    return SimpleNamespace(**fields)


def machine_of(*frames: object) -> Any:
    desktop = stub(frame=AsyncMock(side_effect=frames), changed=asyncio.Event())
    return stub(desktop=desktop, lost=asyncio.Event())


class Watch:
    """One watched episode; its frames are numbers."""

    def __init__(self, *frames: object) -> None:
        self.clock = ManualClock()
        self.episode = stub(closed=asyncio.Event(), machine=machine_of(*frames))
        self.registry = stub(lose=AsyncMock(return_value=MachineLost("void")))
        self.frames: AsyncGenerator[Any, None] = frames_of(
            self.episode, max_rate_hz=4.0, registry=self.registry, clock=self.clock
        )


async def test_a_changed_screen_is_yielded_at_the_limited_rate_until_the_end() -> None:
    watch = Watch(1, 2)
    assert await anext(watch.frames) == 1
    following = await begun(anext(watch.frames))
    await watch.clock.advance(60.0)
    assert not following.done(), "nothing has changed"
    watch.episode.machine.desktop.changed.set()
    assert await following == 2
    following = await begun(anext(watch.frames))
    await watch.clock.advance(0.24)
    assert not following.done()
    watch.episode.closed.set()
    await run_ready()
    assert isinstance(following.exception(), StopAsyncIteration)


async def test_quick_changes_are_0_25_s_apart() -> None:
    watch = Watch(1, 2)
    watch.episode.machine.desktop.changed.set()
    assert await anext(watch.frames) == 1
    following = await begun(anext(watch.frames))
    await watch.clock.advance(0.24)
    assert not following.done()
    await watch.clock.advance(0.02)
    assert await following == 2


async def test_a_lost_machine_is_an_error_unless_the_episode_was_closed_or_has_another() -> None:
    lost = MachineLost("QEMU exited")
    watch = Watch(lost)
    with pytest.raises(MachineLost, match="void"):
        await anext(watch.frames)
    watch.registry.lose.assert_awaited_once_with(watch.episode, lost)

    watch = Watch()
    watch.episode.machine.desktop.frame = AsyncMock(side_effect=lambda: roll_back(watch, lost))
    assert await anext(watch.frames) == "after the rollback"

    watch = Watch()
    watch.episode.machine.desktop.frame = AsyncMock(side_effect=lambda: close(watch, lost))
    with pytest.raises(StopAsyncIteration):
        await anext(watch.frames)
    watch.registry.lose.assert_not_awaited()


def roll_back(watch: Watch, error: Exception) -> None:
    watch.episode.machine = machine_of("after the rollback")
    raise error


def close(watch: Watch, error: Exception) -> None:
    watch.episode.closed.set()
    raise error
