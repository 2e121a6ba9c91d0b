"""Slots of a group: opened together, kept for a while, closed separately."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import pytest

from cuaenv.client import GroupTooLarge, Unavailable
from trainer.agent.forks import Forks, OpenGroup


class Slot:
    """An episode's part that groups use."""

    def __init__(self) -> None:
        self.closed_count = 0

    async def close(self) -> None:
        self.closed_count += 1


class Hall:
    """Opens and counts groups."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.may_open = asyncio.Event()
        self.may_open.set()
        self.groups: list[list[Slot]] = []
        self.open_count = 0
        self.cancelled_count = 0
        self._error = error

    @asynccontextmanager
    async def open_group(self, size: int) -> AsyncIterator[Sequence[Slot]]:
        try:
            await self.may_open.wait()
        except asyncio.CancelledError:
            self.cancelled_count += 1
            raise
        if self._error is not None and size > 1:
            raise self._error
        slots = [Slot() for _ in range(size)]
        self.groups.append(slots)
        self.open_count += 1
        try:
            yield slots
        finally:
            self.open_count -= 1

    def member(self, forks: Forks, *, size: int = 2, key: str = "g", wait_s: float = 20.0) -> Any:
        return forks.member(key, size=size, open_group=cast(OpenGroup, self.open_group), wait_s=wait_s)


async def settle(hall: Hall, forks: Forks) -> None:
    """Wait until no group is open."""
    async with asyncio.timeout(60):
        while hall.open_count or "0 open" not in repr(forks):
            await asyncio.sleep(0)


async def test_members_share_one_group_and_have_separate_slots() -> None:
    hall, forks = Hall(), Forks()
    async with AsyncExitStack() as stack:
        slots = [await stack.enter_async_context(hall.member(forks, size=3)) for _ in range(3)]
        assert hall.groups == [slots]
    await settle(hall, forks)


async def test_other_keys_are_other_groups() -> None:
    hall, forks = Hall(), Forks()
    async with hall.member(forks, key="a"), hall.member(forks, key="b"):
        assert len(hall.groups) == 2


async def test_a_member_of_a_full_group_opens_another() -> None:
    hall, forks = Hall(), Forks()
    async with hall.member(forks), hall.member(forks), hall.member(forks):
        assert [len(group) for group in hall.groups] == [2, 2]


async def test_a_member_that_ends_releases_only_its_slot() -> None:
    hall, forks = Hall(), Forks()
    async with hall.member(forks) as stays:
        async with hall.member(forks) as goes:
            pass
        assert (goes.closed_count, stays.closed_count) == (1, 0)
        assert hall.open_count == 1
    await settle(hall, forks)


async def test_a_free_slot_is_released_after_the_wait() -> None:
    hall, forks = Hall(), Forks()
    async with hall.member(forks, wait_s=0.0) as taken:
        ((_, free),) = hall.groups
        async with asyncio.timeout(60):
            while not free.closed_count:
                await asyncio.sleep(0)
        assert taken.closed_count == 0
    await settle(hall, forks)


async def test_every_member_gets_the_error_of_opening() -> None:
    hall, forks = Hall(error=Unavailable("no host")), Forks()
    hall.may_open.clear()

    async def come() -> None:
        async with hall.member(forks):
            pass

    members = [asyncio.create_task(come()) for _ in range(2)]
    await asyncio.sleep(0)
    hall.may_open.set()
    assert [type(error) for error in await asyncio.gather(*members, return_exceptions=True)] == [Unavailable] * 2
    await settle(hall, forks)


async def test_members_of_a_too_large_group_open_episodes_alone() -> None:
    hall, forks = Hall(error=GroupTooLarge("2 of 1")), Forks()
    async with hall.member(forks), hall.member(forks):
        assert [len(group) for group in hall.groups] == [1, 1]
    await settle(hall, forks)


async def test_a_cancelled_member_leaves_the_group_open() -> None:
    hall, forks = Hall(), Forks()
    hall.may_open.clear()
    came = asyncio.create_task(hall.member(forks).__aenter__())
    other = asyncio.create_task(hall.member(forks).__aenter__())
    await asyncio.sleep(0)
    came.cancel()
    await asyncio.wait({came})
    hall.may_open.set()
    assert isinstance(await other, Slot)
    assert hall.cancelled_count == 0


async def test_a_group_without_members_is_not_opened() -> None:
    hall, forks = Hall(), Forks()
    hall.may_open.clear()
    came = asyncio.create_task(hall.member(forks).__aenter__())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    came.cancel()
    await asyncio.wait({came})
    await settle(hall, forks)
    assert (hall.cancelled_count, hall.groups) == (1, [])
    hall.may_open.set()
    async with hall.member(forks, wait_s=0.0):
        assert len(hall.groups) == 1
    await settle(hall, forks)


async def test_an_error_of_a_member_spares_the_others() -> None:
    hall, forks = Hall(), Forks()
    async with hall.member(forks) as stays:
        with pytest.raises(ZeroDivisionError):
            async with hall.member(forks):
                raise ZeroDivisionError
        assert stays.closed_count == 0
    await settle(hall, forks)
