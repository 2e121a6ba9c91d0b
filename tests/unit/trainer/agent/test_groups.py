"""Slots of a group: opened together, kept for a while, closed separately."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any, cast

import pytest

from cuaenv.client import GroupTooLarge, Unavailable
from trainer.agent.groups import Groups, OpenGroup


class Slot:
    """An episode's part that groups use."""

    def __init__(self) -> None:
        self.is_closed = False

    def begin_close(self) -> None:
        self.is_closed = True


class Hall:
    """Opens groups and keeps their slots."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.may_open = asyncio.Event()
        self.may_open.set()
        self.groups: list[list[Slot]] = []
        self.cancelled_count = 0
        self._error = error

    async def open_group(self, size: int) -> Sequence[Slot]:
        try:
            await self.may_open.wait()
        except asyncio.CancelledError:
            self.cancelled_count += 1
            raise
        if self._error is not None and size > 1:
            raise self._error
        self.groups.append([Slot() for _ in range(size)])
        return self.groups[-1]

    @property
    def open_count(self) -> int:
        return sum(not slot.is_closed for group in self.groups for slot in group)

    def member(self, groups: Groups, *, size: int = 2, key: str = "g", wait_s: float = 20.0) -> Any:
        return groups.member(key, size=size, open_group=cast(OpenGroup, self.open_group), wait_s=wait_s)


async def until_open(hall: Hall, count: int) -> None:
    async with asyncio.timeout(60):
        while hall.open_count != count:
            await asyncio.sleep(0)


async def test_members_share_one_group_and_have_separate_slots() -> None:
    hall, groups = Hall(), Groups()
    slots = await asyncio.gather(*(hall.member(groups, size=3) for _ in range(3)))
    assert hall.groups == [slots]
    assert "0 with free slots" in repr(groups)


async def test_members_come_one_after_the_other() -> None:
    hall, groups = Hall(), Groups()
    slots = [await hall.member(groups, size=3) for _ in range(3)]
    assert hall.groups == [slots]
    assert hall.open_count == 3


async def test_other_keys_are_other_groups() -> None:
    hall, groups = Hall(), Groups()
    await hall.member(groups, key="a")
    await hall.member(groups, key="b")
    assert len(hall.groups) == 2


async def test_a_member_of_a_full_group_opens_another() -> None:
    hall, groups = Hall(), Groups()
    for _ in range(3):
        await hall.member(groups)
    assert [len(group) for group in hall.groups] == [2, 2]


async def test_a_free_slot_is_released_after_the_wait_and_a_later_member_opens_another_group() -> None:
    hall, groups = Hall(), Groups()
    taken = await hall.member(groups, wait_s=0.0)
    ((_, free),) = hall.groups
    await until_open(hall, 1)
    assert (free.is_closed, taken.is_closed) == (True, False)
    await hall.member(groups)
    assert len(hall.groups) == 2


async def test_every_member_gets_the_error_of_opening() -> None:
    hall, groups = Hall(error=Unavailable("no host")), Groups()
    hall.may_open.clear()
    members = [asyncio.create_task(hall.member(groups)) for _ in range(2)]
    await asyncio.sleep(0)
    hall.may_open.set()
    errors = await asyncio.gather(*members, return_exceptions=True)
    assert [(type(error), str(error)) for error in errors] == [(Unavailable, "no host")] * 2
    assert errors[0] is not errors[1], "each has a traceback of its own"
    assert "0 with free slots" in repr(groups)


async def test_members_of_a_too_large_group_open_episodes_alone() -> None:
    hall, groups = Hall(error=GroupTooLarge("2 of 1")), Groups()
    await asyncio.gather(hall.member(groups), hall.member(groups))
    assert [len(group) for group in hall.groups] == [1, 1]


async def test_a_cancelled_member_leaves_the_group_open_without_its_slot() -> None:
    hall, groups = Hall(), Groups()
    hall.may_open.clear()
    came = asyncio.create_task(hall.member(groups))
    other = asyncio.create_task(hall.member(groups))
    await asyncio.sleep(0)
    came.cancel()
    await asyncio.wait({came})
    hall.may_open.set()
    assert await other is hall.groups[0][1]
    assert [slot.is_closed for slot in hall.groups[0]] == [True, False]
    assert hall.cancelled_count == 0


async def test_a_member_cancelled_when_its_group_opens_leaves_no_episode() -> None:
    hall, groups = Hall(), Groups()
    came = asyncio.create_task(hall.member(groups, size=1))
    async with asyncio.timeout(60):
        while not hall.groups:
            await asyncio.sleep(0)
    came.cancel()
    await asyncio.wait({came})
    assert (came.cancelled(), hall.open_count) == (True, 0)


async def test_a_group_without_members_is_not_opened() -> None:
    hall, groups = Hall(), Groups()
    hall.may_open.clear()
    came = asyncio.create_task(hall.member(groups))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    came.cancel()
    await asyncio.wait({came})
    await asyncio.sleep(0)
    assert (hall.cancelled_count, hall.groups) == (1, [])
    hall.may_open.set()
    await hall.member(groups)
    assert len(hall.groups) == 1


@pytest.mark.parametrize("seed", range(20))
async def test_random_cancellations_leave_only_the_slots_of_members_that_got_them(seed: int) -> None:
    rng = random.Random(seed)
    hall, groups = Hall(), Groups()
    hall.may_open.clear()
    members = [
        asyncio.create_task(hall.member(groups, size=rng.randint(1, 3), key=rng.choice("abc"), wait_s=0.0))
        for _ in range(30)
    ]
    for number, task in enumerate(rng.sample(members, 15)):
        for _ in range(rng.randint(0, 3)):
            await asyncio.sleep(0)
        if number == 7:
            hall.may_open.set()
        task.cancel()
    results = await asyncio.gather(*members, return_exceptions=True)
    got = [result for result in results if isinstance(result, Slot)]
    assert [result for result in results if not isinstance(result, Slot | asyncio.CancelledError)] == []
    await until_open(hall, len(got))
    assert not any(slot.is_closed for slot in got)
