"""A pool whose machines do not start: it refuses groups, tries one machine at a time, and recovers by itself."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from envd.base.errors import HypervisorError, PoolExhausted, PoolFailing
from envd.pool.backoff import Backoff, BreakerState
from envd.pool.leased import MachineLease
from envd.pool.pool import Pool
from envd.pool.settings import PoolSettings
from tests.support.clock import ManualClock, run_ready
from tests.support.stubs import IMAGE, StubHypervisor

MakePool = Callable[..., Pool]
ALWAYS = 1000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def hypervisor() -> StubHypervisor:
    return StubHypervisor()


@pytest.fixture
async def make_pool(clock: ManualClock, hypervisor: StubHypervisor) -> AsyncIterator[MakePool]:
    async with AsyncExitStack() as stack:

        def make(*, capacity: int = 2, idle_target: int = 1, failing_after: int = 3) -> Pool:
            settings = PoolSettings(
                name="desktop",
                capacity=capacity,
                size=idle_target,
                max_starting=capacity,
                failing_after=failing_after,
                backoff_min_s=1.0,
                backoff_max_s=60.0,
            )
            pool = Pool(settings, hypervisor=hypervisor, image=IMAGE, make_desktop=hypervisor.desktop, clock=clock)
            stack.push_async_callback(pool.close)
            return pool

        yield make
    assert hypervisor.machines == {}, "a closed pool leaves nothing"


async def started(pool: Pool) -> Pool:
    await pool.start()
    for _ in range(3):
        await run_ready()
    return pool


def break_forks(hypervisor: StubHypervisor, count: int = ALWAYS) -> None:
    hypervisor.errors["fork"] = [HypervisorError("no space left in /var/lib/envd")] * count


async def failing(pool: Pool, hypervisor: StubHypervisor, clock: ManualClock) -> Pool:
    """Start a pool, then fail its machines until its breaker opens: three times, with pauses of 1 and 2 s."""
    await started(pool)
    break_forks(hypervisor)
    waiting = ask(pool, pool.capacity)
    await clock.advance(3.0)
    with pytest.raises(PoolFailing):
        await waiting
    return pool


def breaker(pool: Pool) -> BreakerState:
    return pool.statistics().breaker


def ask(pool: Pool, count: int = 1) -> asyncio.Task[MachineLease]:
    return asyncio.create_task(pool.lease(count, timeout_s=600.0))


async def test_groups_wait_until_too_many_starts_have_failed_in_a_row(
    make_pool: MakePool, hypervisor: StubHypervisor, clock: ManualClock
) -> None:
    pool = await started(make_pool(idle_target=0))
    await pool.lease(1, timeout_s=0.0)
    break_forks(hypervisor, 2)
    waiting = ask(pool)
    await clock.advance(2.9)
    assert not pool.statistics().healthy
    assert (breaker(pool), waiting.done()) == (BreakerState.CLOSED, False)
    await clock.advance(0.1)
    assert len((await waiting).machines) == 1
    assert pool.statistics().healthy


async def test_a_failing_pool_refuses_queued_and_new_groups_with_reason_and_retry_time(
    make_pool: MakePool, hypervisor: StubHypervisor, clock: ManualClock
) -> None:
    pool = await started(make_pool(idle_target=0))
    await pool.lease(1, timeout_s=0.0)
    break_forks(hypervisor)
    waiting = [ask(pool), ask(pool, 2)]
    await clock.advance(2.9)
    assert not any(task.done() for task in waiting)
    await clock.advance(0.1)
    for task in waiting:
        with pytest.raises(
            PoolFailing, match=r"after 3 failures in a row, and the next one tries in 4 s: .*no space left"
        ):
            await task
    await clock.advance(1.0)
    with pytest.raises(PoolFailing, match="no space left") as caught:
        await pool.lease(1, timeout_s=600.0)
    assert caught.value.retry_after_s == pytest.approx(3.0)
    assert "3 failures in a row, so resets are refused until a machine starts" in pool.statistics().problem
    assert "no space left in /var/lib/envd" in pool.statistics().problem
    assert not pool.statistics().healthy
    assert pool.statistics().waiting_count == 0


async def test_an_unreachable_hypervisor_is_reported_as_the_pools_problem(
    make_pool: MakePool, hypervisor: StubHypervisor
) -> None:
    pool = await started(make_pool(capacity=4, idle_target=1))
    hypervisor.problem = "libvirt cannot be reached"
    assert (pool.statistics().healthy, pool.statistics().problem) == (False, "libvirt cannot be reached")
    assert len((await pool.lease(1, timeout_s=0.0)).machines) == 1, "ready machines can be used"
    hypervisor.problem = ""
    assert (pool.statistics().healthy, pool.statistics().problem) == (True, "")


async def test_one_machine_at_a_time_tries_without_demand_and_a_success_closes_the_breaker(
    make_pool: MakePool, hypervisor: StubHypervisor, clock: ManualClock
) -> None:
    pool = await failing(make_pool(capacity=4, idle_target=0), hypervisor, clock)
    assert breaker(pool) is BreakerState.OPEN
    hypervisor.errors["fork"].clear()
    hypervisor.gates["fork"].clear()
    before = hypervisor.counts["fork"]
    await clock.advance(4.0)
    assert (breaker(pool), hypervisor.counts["fork"] - before) == (BreakerState.HALF_OPEN, 1)
    with pytest.raises(PoolFailing, match="one tries now") as caught:
        await pool.lease(2, timeout_s=600.0)
    assert 1.0 <= caught.value.retry_after_s <= 60.0
    await clock.advance(300.0)
    assert hypervisor.counts["fork"] - before == 1, "one at a time"
    hypervisor.gates["fork"].set()
    await run_ready()
    assert breaker(pool) is BreakerState.CLOSED
    assert (pool.statistics().healthy, pool.statistics().problem) == (True, "")
    assert len((await pool.lease(4, timeout_s=60.0)).machines) == 4


async def test_a_failed_try_reopens_the_breaker_for_twice_as_long(
    make_pool: MakePool, hypervisor: StubHypervisor, clock: ManualClock
) -> None:
    pool = await failing(make_pool(), hypervisor, clock)
    before = hypervisor.counts["fork"]
    await clock.advance(4.0)
    assert (breaker(pool), hypervisor.counts["fork"] - before) == (BreakerState.OPEN, 1)
    await clock.advance(7.9)
    assert hypervisor.counts["fork"] - before == 1
    await clock.advance(0.1)
    assert hypervisor.counts["fork"] - before == 2


async def test_a_failing_pool_still_leases_ready_machines(
    make_pool: MakePool, hypervisor: StubHypervisor, clock: ManualClock
) -> None:
    pool = await started(make_pool(capacity=3, idle_target=2))
    held = await pool.lease(1, timeout_s=0.0)
    await run_ready()
    break_forks(hypervisor)
    await pool.release(held.machines)
    second = await pool.lease(1, timeout_s=0.0)
    await clock.advance(3.0)
    assert breaker(pool) is BreakerState.OPEN
    assert len((await pool.lease(1, timeout_s=600.0)).machines) == 1
    with pytest.raises(PoolFailing):
        await pool.lease(1, timeout_s=600.0)
    await pool.release(second.machines)


async def test_machines_kept_for_a_refused_group_go_to_a_smaller_one(
    make_pool: MakePool, hypervisor: StubHypervisor, clock: ManualClock
) -> None:
    pool = await started(make_pool(capacity=3, idle_target=1))
    break_forks(hypervisor)
    large, small = ask(pool, 3), ask(pool)
    await clock.advance(2.9)
    assert not small.done()
    await clock.advance(0.1)
    with pytest.raises(PoolFailing):
        await large
    assert len((await small).machines) == 1


async def test_a_template_that_cannot_be_built_fails_the_pool(
    make_pool: MakePool, hypervisor: StubHypervisor, clock: ManualClock
) -> None:
    hypervisor.errors["create"] = [HypervisorError("KVM is not there")] * 3
    pool = await started(make_pool())
    waiting = ask(pool)
    await clock.advance(3.0)
    with pytest.raises(PoolFailing, match="template not built: KVM is not there"):
        await waiting
    await clock.advance(4.0)
    assert (breaker(pool), pool.statistics().idle_count) == (BreakerState.CLOSED, 1)


async def test_machines_that_die_unused_fail_the_pool(
    make_pool: MakePool, hypervisor: StubHypervisor, clock: ManualClock
) -> None:
    pool = await started(make_pool(failing_after=1))
    hypervisor.forks[-1].die("QEMU was killed by signal 9")
    await run_ready()
    with pytest.raises(PoolFailing, match="died while idle: QEMU was killed by signal 9"):
        await pool.lease(1, timeout_s=600.0)


async def test_machines_that_start_and_always_die_unused_eventually_fail_the_pool(
    make_pool: MakePool, hypervisor: StubHypervisor, clock: ManualClock
) -> None:
    pool = await started(make_pool(capacity=1, failing_after=3))
    for pause_s in (1.0, 2.0, 4.0):
        assert breaker(pool) is BreakerState.CLOSED
        hypervisor.forks[-1].die()
        await run_ready()
        before = hypervisor.counts["fork"]
        await clock.advance(pause_s - 0.1)
        assert hypervisor.counts["fork"] == before
        if pause_s < 4.0:
            await clock.advance(0.1)
            assert pool.statistics().idle_count == 1
    assert breaker(pool) is BreakerState.OPEN
    with pytest.raises(PoolFailing, match="after 3 failures in a row"):
        await pool.lease(1, timeout_s=600.0)


async def test_leased_machines_that_die_do_not_fail_the_pool(make_pool: MakePool, hypervisor: StubHypervisor) -> None:
    pool = await started(make_pool(failing_after=1))
    for _ in range(5):
        await pool.lease(1, timeout_s=600.0)
        hypervisor.forks[-1].die()
        await run_ready()
        await run_ready()
    assert breaker(pool) is BreakerState.CLOSED


async def test_a_full_pool_is_not_failing(make_pool: MakePool, clock: ManualClock) -> None:
    pool = await started(make_pool(capacity=1, failing_after=1))
    await pool.lease(1, timeout_s=0.0)
    waiting = asyncio.create_task(pool.lease(1, timeout_s=30.0))
    await clock.advance(30.0)
    with pytest.raises(PoolExhausted):
        await waiting


def test_the_breaker_counts_failures_in_a_row() -> None:
    backoff = Backoff(min_s=1.0, max_s=60.0, failing_after=2)
    backoff.failed(0.0, "x")
    backoff.failed(0.5, "machines that boot together fail together")
    assert (backoff.breaker(0.5), backoff.failure_count) == (BreakerState.CLOSED, 1)
    backoff.failed(1.0, "x")
    assert backoff.breaker(1.0) is BreakerState.OPEN
    assert backoff.breaker(3.0) is BreakerState.HALF_OPEN
    backoff.succeeded()
    assert backoff.breaker(3.0) is BreakerState.CLOSED
