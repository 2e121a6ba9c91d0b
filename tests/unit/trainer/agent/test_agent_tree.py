"""Members of a tree without machines: who starts, waits and continues."""

import asyncio
import gc
import random
import weakref
from collections.abc import Callable, Sequence
from typing import cast

import pytest

from cuaenv.client import NotForkable, Unavailable
from trainer.agent.groups import Fork, Groups, OpenOne, Tree


class Machine:
    """An episode's part that trees use."""

    def __init__(self) -> None:
        self.is_closed = False
        self._callbacks: list[Callable[[], None]] = []

    def when_closed(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def begin_close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        for callback in self._callbacks:
            callback()


class Hall:
    """Opens, forks and counts episodes."""

    def __init__(self) -> None:
        self.tree: Tree[str] = Tree()
        self.copies: list[Machine] = []
        self.begun: list[Machine] = []
        self.may_copy = asyncio.Event()
        self.may_copy.set()
        self.refusal: Exception | None = None

    @property
    def begun_count(self) -> int:
        return len(self.begun)

    @property
    def held_count(self) -> int:
        return sum(not machine.is_closed for machine in self.copies)

    async def _open_one(self) -> Machine:
        if self.refusal:
            raise self.refusal
        self.begun.append(Machine())
        return self.begun[-1]

    async def _copy(self, count: int) -> Sequence[Machine]:
        await self.may_copy.wait()
        if self.refusal:
            raise self.refusal
        machines = [Machine() for _ in range(count)]
        self.copies += machines
        return machines

    async def live(self, stay: asyncio.Event | None = None, *, fails: bool = False) -> str | None:
        machine, story = await self.tree.member(cast(OpenOne, self._open_one))
        try:
            if stay is not None:
                await stay.wait()
            if fails:
                raise RuntimeError("a member failed")
            return story
        finally:
            machine.begin_close()

    async def branch(self, *, most: int = 1, story: str = "so far") -> None:
        await self.tree.branch(cast(Fork, self._copy), most=most, context=story)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def hall() -> Hall:
    return Hall()


async def test_the_first_member_starts_and_the_others_continue_from_its_branch_points(hall: Hall) -> None:
    stay = asyncio.Event()
    members = [asyncio.create_task(hall.live(stay)) for _ in range(4)]
    await settled()
    assert (hall.begun_count, hall.tree.running_count, hall.tree.waiting_count) == (1, 1, 3)
    await hall.branch(most=2)
    await settled()
    assert (hall.tree.running_count, hall.tree.waiting_count) == (3, 1)
    await hall.branch(most=2, story="later")
    stay.set()
    assert await asyncio.gather(*members) == [None, "so far", "so far", "later"]
    assert (hall.begun_count, hall.tree.running_count) == (1, 0)


async def test_a_branch_point_without_waiting_members_forks_nothing(hall: Hall) -> None:
    stay = asyncio.Event()
    only = asyncio.create_task(hall.live(stay))
    await settled()
    await hall.branch()
    stay.set()
    await only
    assert hall.copies == []


async def test_waiting_members_start_from_the_beginning_if_no_member_runs(hall: Hall) -> None:
    assert await asyncio.gather(*(hall.live() for _ in range(3))) == [None] * 3
    assert (hall.begun_count, hall.tree.running_count) == (3, 0)


async def test_a_failing_member_spares_the_others(hall: Hall) -> None:
    results = await asyncio.gather(hall.live(fails=True), hall.live(), return_exceptions=True)
    assert isinstance(results[0], RuntimeError)
    assert results[1] is None


async def test_forks_outlive_their_parent(hall: Hall) -> None:
    first_stays, stay = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(hall.live(first_stays))
    others = [asyncio.create_task(hall.live(stay)) for _ in range(2)]
    await settled()
    await hall.branch(most=2)
    first_stays.set()
    await first
    assert hall.held_count == 2
    stay.set()
    await asyncio.gather(*others)
    assert (hall.held_count, len(hall.copies), hall.tree.running_count) == (0, 2, 0)


async def test_members_keep_waiting_if_a_fork_fails(hall: Hall) -> None:
    stay = asyncio.Event()
    members = [asyncio.create_task(hall.live(stay)) for _ in range(3)]
    await settled()
    hall.refusal = NotForkable("a dialog is open")
    await hall.branch(most=2)
    assert (hall.tree.running_count, hall.tree.waiting_count) == (1, 2)
    hall.refusal = None
    await hall.branch(most=2)
    stay.set()
    assert await asyncio.gather(*members) == [None, "so far", "so far"]


async def test_a_member_cancelled_while_waiting_takes_no_fork(hall: Hall) -> None:
    stay = asyncio.Event()
    members = [asyncio.create_task(hall.live(stay)) for _ in range(3)]
    await settled()
    members[1].cancel()
    await settled()
    await hall.branch(most=2)
    stay.set()
    results = await asyncio.gather(*members, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    assert (results[0], results[2]) == (None, "so far")
    assert (len(hall.copies), hall.tree.running_count) == (1, 0)


async def test_a_member_cancelled_during_its_fork_leaves_no_machine(hall: Hall) -> None:
    stay = asyncio.Event()
    members = [asyncio.create_task(hall.live(stay)) for _ in range(2)]
    await settled()
    hall.may_copy.clear()
    branching = asyncio.create_task(hall.branch())
    await settled()
    members[1].cancel()
    await settled()
    hall.may_copy.set()
    await branching
    await settled()
    assert (len(hall.copies), hall.held_count, hall.tree.running_count) == (1, 0, 1)
    stay.set()
    await members[0]
    assert hall.tree.running_count == 0


async def test_a_member_cancelled_when_its_fork_arrives_leaves_no_machine(hall: Hall) -> None:
    stay = asyncio.Event()
    members = [asyncio.create_task(hall.live(stay)) for _ in range(2)]
    await settled()
    branching = asyncio.create_task(hall.branch())
    async with asyncio.timeout(60):
        while not hall.copies:
            await asyncio.sleep(0)
    members[1].cancel()
    await branching
    await settled()
    assert (len(hall.copies), hall.held_count, hall.tree.running_count) == (1, 0, 1)
    stay.set()
    await members[0]


async def test_a_member_whose_parent_is_cancelled_during_the_fork_starts_from_the_beginning(hall: Hall) -> None:
    member_waits = asyncio.Event()

    async def first() -> None:
        machine, _ = await hall.tree.member(cast(OpenOne, hall._open_one))
        try:
            await member_waits.wait()
            await hall.branch()
        finally:
            machine.begin_close()

    hall.may_copy.clear()
    trunk = asyncio.create_task(first())
    await settled()
    other = asyncio.create_task(hall.live())
    await settled()
    member_waits.set()
    await settled()
    trunk.cancel()
    await asyncio.wait({trunk})
    assert await other is None
    assert (hall.begun_count, hall.copies, hall.tree.running_count) == (2, [], 0)


async def test_a_member_that_cannot_start_lets_another_try(hall: Hall) -> None:
    hall.refusal = Unavailable("no host")
    results = await asyncio.gather(hall.live(), hall.live(), return_exceptions=True)
    assert [type(result) for result in results] == [Unavailable] * 2
    assert (hall.begun_count, hall.tree.running_count, hall.tree.waiting_count) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(20))
async def test_random_cancellations_leave_no_machine_and_no_member(hall: Hall, seed: int) -> None:
    rng = random.Random(seed)

    async def play() -> None:
        machine, _ = await hall.tree.member(cast(OpenOne, hall._open_one))
        try:
            for _ in range(rng.randint(0, 4)):
                await asyncio.sleep(0)
                await hall.branch(most=rng.randint(1, 2))
        finally:
            machine.begin_close()

    members = [asyncio.create_task(play()) for _ in range(20)]
    for task in rng.sample(members, 10):
        for _ in range(rng.randint(0, 3)):
            await asyncio.sleep(0)
        task.cancel()
    async with asyncio.timeout(60):
        results = await asyncio.gather(*members, return_exceptions=True)
    assert [result for result in results if not isinstance(result, asyncio.CancelledError | None)] == []
    assert (hall.held_count, hall.tree.running_count, hall.tree.waiting_count) == (0, 0, 0)
    assert all(machine.is_closed for machine in hall.begun)


def test_a_group_has_one_tree_while_it_has_members() -> None:
    groups = Groups()
    tree = groups.tree(("g", 1))
    assert groups.tree(("g", 1)) is tree
    assert groups.tree(("g", 2)) is not tree
    left = weakref.ref(tree)
    del tree
    gc.collect()
    assert left() is None, "trees of ended groups are released"
