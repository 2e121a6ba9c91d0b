"""How users share a pool's machines: by run, under quotas, in a bounded queue that explains itself."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from envd.base.config import RunShare
from envd.base.errors import EnvdError, GroupTooLarge, PoolExhausted
from envd.base.telemetry.metrics import Metrics
from envd.pool.leased import Admission
from envd.pool.planner import Demand
from envd.pool.pool import MachinePool
from envd.pool.queue import AdmissionQueue, QueueEntry, Turnover, WaitingGroup, queue_report
from envd.pool.status import PoolStatus
from tests.support.clock import run_ready
from tests.support.pool_world import PoolWorld
from tests.support.stub_episodes import pool_info


class Users:
    """Waiting and admitted groups."""

    def __init__(self, pool: MachinePool) -> None:
        self.pool = pool
        self.waiting: list[tuple[str, asyncio.Task[Admission]]] = []

    async def ask(
        self, run: str, count: int = 1, *, reserved: int = 0, timeout_s: float = 600.0
    ) -> asyncio.Task[Admission]:
        task = asyncio.create_task(self.pool.acquire(count, reserved=reserved, run=run, timeout_s=timeout_s))
        self.waiting.append((run, task))
        await run_ready()
        return task

    async def release(self, task: asyncio.Task[Admission]) -> None:
        admission = task.result()
        await self.pool.release([*admission.machines, *admission.reservations])
        for _ in range(3):
            await run_ready()

    def served(self) -> list[str]:
        """Return the runs that were served, in order of arrival."""
        return [run for run, task in self.waiting if task.done()]

    async def aclose(self) -> None:
        for _, task in self.waiting:
            task.cancel()
        await asyncio.gather(*(task for _, task in self.waiting), return_exceptions=True)


@pytest.fixture
async def users(world: PoolWorld) -> AsyncIterator["MakeUsers"]:
    """Return a function that starts a pool with these settings and returns its users."""
    made: list[Users] = []

    async def use(**settings: Any) -> Users:
        made.append(Users(await world.started(**settings)))
        return made[-1]

    yield use
    for user in made:
        await user.aclose()


MakeUsers = Callable[..., Awaitable[Users]]


def held(pool: MachinePool) -> Mapping[str, int]:
    return pool.statistics().held_by_run


async def test_a_returned_machine_goes_to_the_run_that_holds_the_fewest(users: MakeUsers) -> None:
    they = await users(capacity=3)
    first = [await they.ask("a"), await they.ask("a"), await they.ask("b")]
    waiting = [await they.ask("a"), await they.ask("b")]
    assert they.pool.statistics().waiting_by_run == {"a": 1, "b": 1}
    await they.release(first[0])
    assert [task.done() for task in waiting] == [True, False], "both hold one, and a arrived first"
    await they.release(first[1])
    assert held(they.pool) == {"a": 1, "b": 2}
    assert waiting[1].done()


async def test_weights_decide_how_many_machines_each_run_holds(users: MakeUsers) -> None:
    they = await users(capacity=6, shares={"a": RunShare(weight=2.0)})
    held_before = await they.ask("x", 6)
    for _ in range(6):
        await they.ask("a")
        await they.ask("b")
    await they.release(held_before)
    assert held(they.pool) == {"a": 4, "b": 2}


async def test_a_quota_limits_only_its_own_run(users: MakeUsers) -> None:
    they = await users(capacity=4, shares={"a": RunShare(quota=2)})
    first = await they.ask("a", 2)
    second = await they.ask("a", 1, reserved=1)
    other = [await they.ask("b"), await they.ask("b")]
    assert they.served() == ["a", "b", "b"]
    await they.release(other[0])
    assert not second.done()
    await they.release(first)
    assert second.done()
    assert held(they.pool) == {"a": 2, "b": 1}


async def test_a_group_above_its_quota_is_refused_at_once(world: PoolWorld) -> None:
    pool = await world.started(capacity=4, shares={"a": RunShare(quota=2)})
    with pytest.raises(GroupTooLarge, match=r"'a' .* 2 .*'desktop'.* 3"):
        await pool.acquire(1, reserved=2, run="a", timeout_s=60.0)
    with pytest.raises(GroupTooLarge, match=r"of 2 .* 1"):
        await pool.acquire(0, reserved=2, run="a", retained_count=1, timeout_s=60.0)
    with pytest.raises(GroupTooLarge, match=r"at most 4 .* of 5"):
        await pool.acquire(5, run="b", timeout_s=60.0)
    with pytest.raises(GroupTooLarge, match=r"at most 4 .* of 4 in addition to the 1"):
        await pool.acquire(0, reserved=4, run="b", retained_count=1, timeout_s=60.0)
    assert world.metrics.refused_runs == [*[("a", "over_quota")] * 2, *[("b", "too_large")] * 2]


async def test_a_large_group_is_served_despite_endless_small_ones(users: MakeUsers) -> None:
    they = await users(capacity=4)
    flood = [await they.ask("flood") for _ in range(12)]
    large = await they.ask("large", 1, reserved=3)
    served_before = len(they.served())
    while not large.done():
        oldest = next(task for task in flood if task.done())
        flood.remove(oldest)
        await they.release(oldest)
        flood.append(await they.ask("flood"))
        assert len(they.served()) - served_before <= 4 + 1, "as many as it wants, and itself"
    assert held(they.pool) == {"large": 4}


RUNS = {"main": RunShare(weight=2.0), "sweep": RunShare(weight=0.5, quota=8), "tests": RunShare(quota=3)}


@pytest.mark.parametrize("seed", range(2))
async def test_hundreds_of_mixed_groups_are_served_in_order_within_their_quotas(world: PoolWorld, seed: int) -> None:
    """Groups of up to the whole pool, some of whose callers leave, on machines that die now and then."""
    dice, capacity = random.Random(seed), 16
    pool = await world.started(capacity=capacity, size=4, max_starting=1 + 3 * seed, shares=RUNS, queue_limit=1000)
    most_held: Counter[str] = Counter()
    served: dict[str, list[int]] = {run: [] for run in (*RUNS, "")}

    async def use(run: str, number: int) -> None:
        count = dice.choice([size for size in (1, 1, 1, 2, 4, 8, 16) if size <= (share(run).quota or capacity)])
        ready = dice.randint(0, count)
        admission = await pool.acquire(ready, reserved=count - ready, run=run, timeout_s=1e6)
        served[run].append(number)
        try:
            await world.clock.sleep(dice.randint(1, 12))
        finally:
            await pool.release([*admission.machines, *admission.reservations])

    def share(run: str) -> RunShare:
        return RUNS.get(run, RunShare())

    def note_held() -> None:
        for run, count in held(pool).items():
            most_held[run] = max(most_held[run], count)

    pool.changes.listen(note_held)
    users: list[asyncio.Task[None]] = []
    for number in range(150):
        users.append(asyncio.create_task(use(dice.choice([*served]), number)))
        await world.clock.advance(dice.choice([0.0, 1.0, 3.0]))
        if dice.random() < 0.05:
            dice.choice(users).cancel()
        if dice.random() < 0.05 and world.hypervisor.machines:
            dice.choice(list(world.hypervisor.machines.values())).die()
        assert pool.statistics().leased_count + pool.statistics().reserved_count <= capacity
    for _ in range(100):
        await world.clock.advance(30.0)
    assert all(user.done() for user in users)
    results = await asyncio.gather(*users, return_exceptions=True)
    assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
    assert sum(map(len, served.values())) > 120
    assert all(numbers == sorted(numbers) for numbers in served.values())
    assert held(pool) == {}
    assert all(most_held[run] <= (share(run).quota or capacity) for run in served)


async def test_reservations_and_their_machines_count_for_their_run(world: PoolWorld, users: MakeUsers) -> None:
    pool = await world.started(capacity=4)
    admission = await pool.acquire(1, reserved=2, run="a", timeout_s=1.0)
    assert held(pool) == {"a": 3}
    frozen = await pool.freeze(admission.machines[0])
    machine = await pool.fork(admission.reservations[0], frozen)
    assert held(pool) == {"a": 3}
    await pool.release([machine])
    assert held(pool) == {"a": 2}
    await pool.release(admission.reservations)
    assert held(pool) == {"a": 1}
    await pool.release(admission.machines)
    assert held(pool) == {}
    await frozen.snapshot.discard()


async def test_a_leased_machine_that_dies_no_longer_counts_for_its_run(world: PoolWorld) -> None:
    pool = await world.started(capacity=2, shares={"a": RunShare(quota=1)})
    admission = await pool.acquire(run="a", timeout_s=1.0)
    admission.machines[0].machine.lost.set()
    await run_ready()
    assert held(pool) == {}
    assert len((await pool.acquire(run="a", timeout_s=60.0)).machines) == 1


async def test_a_cancelled_group_loses_its_turn(users: MakeUsers) -> None:
    they = await users(capacity=4)
    await they.ask("b", 3)
    large = await they.ask("a", 2)
    small = await they.ask("b")
    assert not small.done(), "the idle machine is kept for the large group"
    large.cancel()
    await run_ready()
    assert small.done()
    assert held(they.pool) == {"b": 4}


# Refusals


async def refusal(waiting: asyncio.Task[Admission]) -> EnvdError:
    with pytest.raises(EnvdError) as caught:
        await waiting
    return caught.value


async def test_a_full_queue_reports_its_length_and_when_to_retry(world: PoolWorld, users: MakeUsers) -> None:
    they = await users(capacity=1, queue_limit=3)
    for _ in range(4):
        await they.ask("a")
    with pytest.raises(PoolExhausted, match="limit of 3") as caught:
        await they.pool.acquire(run="b", timeout_s=60.0)
    assert 1.0 <= caught.value.retry_after_s <= 120.0
    assert world.metrics.refused_runs == [("b", "queue_full")]
    assert sum(they.pool.statistics().waiting_by_run.values()) == 3


async def test_a_timeout_reports_position_waiting_time_and_busy_machines(world: PoolWorld, users: MakeUsers) -> None:
    they = await users(capacity=2)
    await they.ask("a", 1, reserved=1)
    await they.ask("a")
    late = await they.ask("a", timeout_s=30.0)
    sooner = await they.ask("b", timeout_s=30.0)
    await world.clock.advance(30.0)
    first, second = await refusal(sooner), await refusal(late)
    assert "within 30.0 s: position 1 of 3 in the queue, 2 of 2 machines busy" in str(first), "b holds nothing"
    assert "position 3 of 3 in the queue, 2 of 2 machines busy" in str(second)
    assert isinstance(first, PoolExhausted)
    assert isinstance(second, PoolExhausted)
    assert 1.0 <= first.retry_after_s <= second.retry_after_s <= 120.0
    assert sorted(world.metrics.refused_runs) == [("a", "too_late"), ("b", "too_late")]


async def test_a_timeout_reports_an_exhausted_quota(world: PoolWorld, users: MakeUsers) -> None:
    they = await users(capacity=4, shares={"a": RunShare(quota=2)})
    await they.ask("a", 2)
    late = await they.ask("a", timeout_s=30.0)
    await world.clock.advance(30.0)
    assert "run 'a' holds 2 of its quota of 2" in str(await refusal(late))


async def test_retry_after_follows_the_rate_of_returned_machines(world: PoolWorld, users: MakeUsers) -> None:
    they = await users(capacity=2)
    await they.ask("a")
    for _ in range(6):
        task = await they.ask("a")
        await world.clock.advance(20.0)
        await they.release(task)
    await they.ask("a")
    late = await they.ask("b", timeout_s=0.0)
    error = await refusal(late)
    assert isinstance(error, PoolExhausted)
    assert error.retry_after_s == pytest.approx(20.0)


async def test_waits_and_machines_are_counted_by_run(world: PoolWorld, users: MakeUsers) -> None:
    they = await users(capacity=2)
    first = await they.ask("a", 1, reserved=1)
    await they.ask("b", 2)
    await world.clock.advance(5.0)
    await they.release(first)
    assert world.metrics.admitted_runs == [("a", 2, 0.0), ("b", 2, 5.0)]


# -- why groups wait --------------------------------------------------------------------------------------------


STATUS = pool_info(4)
SHARES = {"small": RunShare(quota=2)}


async def report(*groups: tuple[str, int], held: dict[str, int], status: PoolStatus) -> tuple[QueueEntry, ...]:
    queue = AdmissionQueue("desktop", limit=9, shares=SHARES, resident=4, turnover=Turnover(), metrics=Metrics())
    for index, (run, count) in enumerate(groups):
        demand = Demand(idle=count, run=run)
        queue.enter(WaitingGroup(demand=demand, owner=f"token-{run}", enter_s=float(index), deadline_s=60.0))
    return queue_report(queue, held=held, shares=SHARES, status=status, now_s=10.0)


async def test_groups_come_in_the_order_of_their_turns_with_their_reasons() -> None:
    status = replace(STATUS, leased_count=4, template_digest="t")
    small, big, other = "small", "big", "other"
    found = await report((small, 1), (big, 2), (other, 1), held={small: 2, big: 2}, status=status)
    assert [(one.position, one.run, one.owner) for one in found] == [
        (1, other, "token-other"),
        (2, big, "token-big"),
        (3, small, "token-small"),
    ]
    assert found[0].reason.startswith("next: 4 of 4 machines busy, ")
    assert found[1].reason == "behind 1 group that wants 1 machine"
    assert found[2].reason == "run 'small' holds 2 of its quota of 2"
    assert (found[2].waited_s, found[2].left_s) == (10.0, 50.0)


async def test_the_numbers_of_the_first_group_are_of_machines_and_add_up() -> None:
    status = replace(
        STATUS, capacity=300, resident=16, leased_count=9, idle_count=1, starting_count=2, template_digest="t"
    )
    (only,) = await report(("a", 8), held={}, status=status)
    assert only.reason == "next: 9 of 16 machines busy, 1 idle, 2 starting, 4 free, 1 more needed"


async def test_a_pool_that_cannot_start_machines_is_the_reason() -> None:
    failing = replace(STATUS, healthy=False, problem="libvirtd does not answer")
    (only,) = await report(("a", 1), held={}, status=failing)
    assert only.reason == "libvirtd does not answer"
    (only,) = await report(("a", 1), held={}, status=STATUS)
    assert only.reason == "the pool's template is not ready yet"
    short = replace(STATUS, template_digest="t", problem="waits for memory")
    (only,) = await report(("a", 1), held={}, status=short)
    assert only.reason.endswith("; waits for memory")


# -- when to retry ----------------------------------------------------------------------------------------------


def returned(*times_s: float) -> Turnover:
    turnover = Turnover()
    for at_s in times_s:
        turnover.returned(at_s)
    return turnover


@pytest.mark.parametrize(
    ("times_s", "now_s", "interval_s"),
    [
        pytest.param([0.0, 10.0, 20.0, 30.0], 30.0, 10.0, id="the rate of returns"),
        pytest.param([0.0, 10.0, 20.0], 60.0, 30.0, id="the time since the newest counts"),
        pytest.param([0.0, 10.0], 611.0, None, id="old returns do not count"),
        pytest.param([*range(100), *range(100, 260, 5)], 255.0, 5.0, id="only the newest count"),
    ],
)
def test_the_interval_of_returns(times_s: list[float], now_s: float, interval_s: float | None) -> None:
    assert returned(*times_s).interval_s(now_s) == interval_s


@pytest.mark.parametrize(
    ("times_s", "machine_count", "start_s", "retry_after_s"),
    [
        pytest.param([], 4, 2.0, 4.0, id="no return yet: a start each"),
        pytest.param([30.0], 8, 2.0, 6.0, id="one return has no rate"),
        pytest.param([0.0, 10.0, 20.0, 30.0], 3, 2.0, 32.0, id="the rate of returns"),
        pytest.param([0.0, 30.0], 50, 2.0, 120.0, id="at most 2 minutes"),
        pytest.param([30.0] * 9, 1, 0.0, 1.0, id="at least a second"),
    ],
)
def test_the_time_to_retry_is_estimated_within_bounds(
    times_s: list[float], machine_count: int, start_s: float, retry_after_s: float
) -> None:
    estimate_s = returned(*times_s).retry_after_s(30.0, machine_count=machine_count, start_s=start_s, resident=4)
    assert estimate_s == retry_after_s
