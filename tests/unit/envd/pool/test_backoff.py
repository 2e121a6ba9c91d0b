"""Pauses after failures, and a pool whose machines do not start: it refuses groups, and recovers by itself."""

import asyncio

import pytest

from envd.base.errors import HypervisorError, PoolFailing
from envd.pool.backoff import Backoff, BreakerState
from envd.pool.leased import Admission
from envd.pool.pool import Pool
from tests.support.clock import run_ready
from tests.support.pool_world import PoolWorld, start

POOL = {"size": 1, "failing_after": 3, "backoff_min_s": 1.0, "backoff_max_s": 60.0}

ALWAYS = 1000


def break_forks(world: PoolWorld, count: int = ALWAYS) -> None:
    world.hypervisor.errors["fork"] = [HypervisorError("no space left in /var/lib/envd")] * count


async def failing(world: PoolWorld, pool: Pool) -> Pool:
    """Start a pool, then fail its machines until its breaker opens: three times, with pauses of 1 and 2 s."""
    await start(pool)
    break_forks(world)
    waiting = ask(pool, pool.settings.resident)
    await world.clock.advance(3.0)
    with pytest.raises(PoolFailing):
        await waiting
    return pool


def breaker(pool: Pool) -> BreakerState:
    return pool.statistics().breaker


def ask(pool: Pool, count: int = 1) -> asyncio.Task[Admission]:
    return asyncio.create_task(pool.acquire(count, timeout_s=600.0))


async def test_a_failing_pool_refuses_queued_and_new_groups_with_reason_and_retry_time(world: PoolWorld) -> None:
    pool = await world.started(size=0)
    await pool.acquire(1, timeout_s=0.0)
    break_forks(world)
    waiting = [ask(pool), ask(pool, 2)]
    await world.clock.advance(2.9)
    assert not any(task.done() for task in waiting)
    await world.clock.advance(0.1)
    for task in waiting:
        with pytest.raises(PoolFailing, match=r"3 failures .* 4 s: .*no space left"):
            await task
    await world.clock.advance(1.0)
    with pytest.raises(PoolFailing, match="no space left") as caught:
        await pool.acquire(1, timeout_s=600.0)
    assert caught.value.retry_after_s == pytest.approx(3.0)
    assert "3 failures in a row, so resets are refused until a machine starts" in pool.statistics().problem
    assert "no space left in /var/lib/envd" in pool.statistics().problem
    assert not pool.statistics().healthy
    assert pool.statistics().waiting_count == 0


async def test_an_unreachable_hypervisor_is_reported_as_the_pools_problem(world: PoolWorld) -> None:
    pool = await world.started(capacity=4, size=1)
    world.hypervisor.problem = "libvirt cannot be reached"
    assert (pool.statistics().healthy, pool.statistics().problem) == (False, "libvirt cannot be reached")
    assert len((await pool.acquire(1, timeout_s=0.0)).machines) == 1, "ready machines can be used"
    world.hypervisor.problem = ""
    assert (pool.statistics().healthy, pool.statistics().problem) == (True, "")


async def test_one_machine_at_a_time_tries_without_demand_and_a_success_closes_the_breaker(world: PoolWorld) -> None:
    pool = await failing(world, world.make(capacity=4, size=0))
    assert breaker(pool) is BreakerState.OPEN
    world.hypervisor.errors["fork"].clear()
    world.hypervisor.gates["fork"].clear()
    before = world.hypervisor.counts["fork"]
    await world.clock.advance(4.0)
    assert (breaker(pool), world.hypervisor.counts["fork"] - before) == (BreakerState.HALF_OPEN, 1)
    with pytest.raises(PoolFailing) as caught:
        await pool.acquire(2, timeout_s=600.0)
    assert 1.0 <= caught.value.retry_after_s <= 60.0
    await world.clock.advance(300.0)
    assert world.hypervisor.counts["fork"] - before == 1, "one at a time"
    world.hypervisor.gates["fork"].set()
    await run_ready()
    assert breaker(pool) is BreakerState.CLOSED
    assert (pool.statistics().healthy, pool.statistics().problem) == (True, "")
    assert len((await pool.acquire(4, timeout_s=60.0)).machines) == 4


async def test_a_failed_try_reopens_the_breaker_for_twice_as_long(world: PoolWorld) -> None:
    pool = await failing(world, world.make())
    before = world.hypervisor.counts["fork"]
    await world.clock.advance(4.0)
    assert (breaker(pool), world.hypervisor.counts["fork"] - before) == (BreakerState.OPEN, 1)
    await world.clock.advance(7.9)
    assert world.hypervisor.counts["fork"] - before == 1
    await world.clock.advance(0.1)
    assert world.hypervisor.counts["fork"] - before == 2


async def test_a_failing_pool_still_leases_ready_machines(world: PoolWorld) -> None:
    pool = await world.started(capacity=3, size=2)
    held = await pool.acquire(1, timeout_s=0.0)
    await run_ready()
    break_forks(world)
    await pool.release(held.machines)
    second = await pool.acquire(1, timeout_s=0.0)
    await world.clock.advance(3.0)
    assert breaker(pool) is BreakerState.OPEN
    assert len((await pool.acquire(1, timeout_s=600.0)).machines) == 1
    with pytest.raises(PoolFailing):
        await pool.acquire(1, timeout_s=600.0)
    await pool.release(second.machines)


async def test_machines_kept_for_a_refused_group_go_to_a_smaller_one(world: PoolWorld) -> None:
    pool = await world.started(capacity=3, size=1)
    break_forks(world)
    large, small = ask(pool, 3), ask(pool)
    await world.clock.advance(2.9)
    assert not small.done()
    await world.clock.advance(0.1)
    with pytest.raises(PoolFailing):
        await large
    assert len((await small).machines) == 1


async def test_a_template_that_cannot_be_built_fails_the_pool(world: PoolWorld) -> None:
    world.hypervisor.errors["create"] = [HypervisorError("KVM is not there")] * 3
    pool = await world.started()
    waiting = ask(pool)
    await world.clock.advance(3.0)
    with pytest.raises(PoolFailing, match=r"template.*KVM is not there"):
        await waiting
    await world.clock.advance(4.0)
    assert (breaker(pool), pool.statistics().idle_count) == (BreakerState.CLOSED, 1)


async def test_machines_that_start_and_always_die_unused_eventually_fail_the_pool(world: PoolWorld) -> None:
    pool = await world.started(capacity=1, failing_after=3)
    for pause_s in (1.0, 2.0, 4.0):
        assert breaker(pool) is BreakerState.CLOSED
        world.hypervisor.forks[-1].die()
        await run_ready()
        before = world.hypervisor.counts["fork"]
        await world.clock.advance(pause_s - 0.1)
        assert world.hypervisor.counts["fork"] == before
        if pause_s < 4.0:
            await world.clock.advance(0.1)
            assert pool.statistics().idle_count == 1
    assert breaker(pool) is BreakerState.OPEN
    with pytest.raises(PoolFailing, match="3 failures"):
        await pool.acquire(1, timeout_s=600.0)


def test_the_breaker_counts_failures_in_a_row() -> None:
    backoff = Backoff(min_s=1.0, max_s=60.0, failing_after=2)
    backoff.failed(0.0, "x")
    backoff.failed(0.5, "machines that boot together fail together")
    assert (backoff.breaker(0.5), backoff.failure_count) == (BreakerState.CLOSED, 1)
    backoff.failed(1.0, "x")
    assert backoff.breaker(1.0) is BreakerState.OPEN
    assert backoff.breaker(3.0) is BreakerState.HALF_OPEN
    assert [backoff.starting_limit(now_s, limit=4) for now_s in (2.9, 3.0)] == [0, 1]
    assert [backoff.retry_at_s(now_s) for now_s in (2.9, 3.0)] == [3.0, None]
    backoff.succeeded()
    assert (backoff.breaker(3.0), backoff.problem, backoff.starting_limit(3.0, limit=4)) == (BreakerState.CLOSED, "", 4)


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(min_s=1.0, max_s=5.0, failing_after=6)
    now_s, pauses = 0.0, []
    for _ in range(5):
        backoff.failed(now_s, "no space")
        retry_at_s = backoff.retry_at_s(now_s)
        assert retry_at_s is not None
        pauses.append(retry_at_s - now_s)
        now_s = retry_at_s
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]
    for attempt in range(5000):  # a week of failures does not overflow
        backoff.failed(attempt * 100.0, "no space")
    assert backoff.retry_at_s(499_900.0) == 499_905.0
