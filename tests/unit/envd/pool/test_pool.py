"""The pool through its public methods, on machines that tests can delay and break."""

import asyncio
import itertools

import pytest

from envd.base.errors import Draining, GuestUnresponsive, HypervisorError, PoolExhausted
from envd.pool.leased import LeasedMachine
from envd.pool.pool import MachinePool
from tests.support.clock import begun, run_ready, run_turns
from tests.support.pool_world import PoolWorld, start
from tests.support.stubs import StubDesktop


async def lease(pool: MachinePool, count: int = 1, *, timeout_s: float = 1.0) -> tuple[LeasedMachine, ...]:
    admission = await pool.acquire(count, timeout_s=timeout_s)
    assert admission.reservations == ()
    return admission.machines


def counts(pool: MachinePool) -> tuple[int, int, int, int, int]:
    s = pool.statistics()
    return s.idle_count, s.leased_count, s.starting_count, s.dying_count, s.waiting_count


def stub_desktop(machine: LeasedMachine) -> StubDesktop:
    assert isinstance(machine.desktop, StubDesktop)
    return machine.desktop


def stall_at_reading(world: PoolWorld, monkeypatch: pytest.MonkeyPatch, number: int, *, duration_s: float) -> None:
    """Let time pass before one of the next readings of the clock, which are numbered from 0."""
    numbers, read = itertools.count(), world.clock.monotonic

    def monotonic() -> float:
        if next(numbers) == number:
            world.clock.stall(duration_s)
        return read()

    monkeypatch.setattr(world.clock, "monotonic", monotonic)


@pytest.fixture
async def pool(world: PoolWorld) -> MachinePool:
    """Start a pool of one machine."""
    return await world.started(capacity=1)


async def test_machines_are_forked_ahead_of_demand(world: PoolWorld) -> None:
    pool = await world.started(capacity=4, size=3)
    assert counts(pool) == (3, 0, 0, 0, 0)
    assert len(world.hypervisor.machines) == 3
    assert world.hypervisor.counts["create"] == 1
    assert all(machine.paused and machine.calls == [] for machine in world.hypervisor.forks), "none has run"


async def test_machine_ids_are_short_lower_case_and_prefixed_with_the_pool_name(world: PoolWorld) -> None:
    await world.started(capacity=4)
    assert len(world.hypervisor.machines) == 4
    for machine_id in world.hypervisor.machines:
        assert machine_id.startswith("desktop-")
        assert machine_id == machine_id.lower()
        assert len(machine_id) <= 32


async def test_no_more_machines_start_at_once_than_the_settings_say(world: PoolWorld) -> None:
    pool = await world.started(capacity=6, max_starting=2, size=0, max_idle_s=0.0)
    world.hypervisor.gates["fork"].clear()
    waiter = await begun(lease(pool, 6, timeout_s=60.0))
    assert pool.statistics().starting_count == 2
    world.hypervisor.gates["fork"].set()
    assert len(await waiter) == 6


async def test_a_machine_is_used_once_then_destroyed_and_replaced(world: PoolWorld, pool: MachinePool) -> None:
    (first,) = await lease(pool, 1, timeout_s=1.0)
    await pool.release([first])
    assert first.machine_id not in world.hypervisor.machines
    assert stub_desktop(first).closed
    (second,) = await lease(pool, 1, timeout_s=1.0)
    assert second.machine_id != first.machine_id
    assert len(world.hypervisor.forks) == 2


async def test_release_is_idempotent_and_a_dying_machine_counts_until_it_is_gone(
    world: PoolWorld, pool: MachinePool
) -> None:
    machines = await lease(pool, 1, timeout_s=1.0)
    world.hypervisor.destroy_gate.clear()
    releasing = await begun(pool.release(machines))
    assert counts(pool) == (0, 0, 0, 1, 0)
    assert not releasing.done()
    releasing.cancel()
    await asyncio.gather(releasing, return_exceptions=True)
    world.hypervisor.destroy_gate.set()
    await run_ready()
    assert machines[0].machine_id not in world.hypervisor.machines
    await pool.release(machines)
    await run_ready()
    assert counts(pool) == (1, 0, 0, 0, 0)
    assert world.hypervisor.peak_count == 1


async def test_a_group_that_times_out_unblocks_those_behind_it(world: PoolWorld) -> None:
    pool = await world.started(capacity=2)
    await lease(pool, 1, timeout_s=1.0)
    large = asyncio.create_task(lease(pool, 2, timeout_s=5.0))
    small = await begun(lease(pool, 1, timeout_s=60.0))
    assert not small.done(), "one machine is idle, but it is kept for the group ahead"
    await world.clock.advance(5.0)
    with pytest.raises(PoolExhausted):
        await large
    assert len(await small) == 1


async def test_a_group_times_out_while_the_one_ahead_is_being_cancelled(world: PoolWorld) -> None:
    pool = await world.started(capacity=2)
    for machine in world.hypervisor.forks:
        machine.die()
    first = await begun(lease(pool, 1, timeout_s=60.0))
    # It enters the queue, gets the turn and times out before `first` has left.
    second = asyncio.create_task(lease(pool, 1, timeout_s=0.0))
    first.cancel()
    with pytest.raises(PoolExhausted, match="position 1 of 1 in the queue"):
        await second
    assert first.cancelled()


async def test_a_late_group_that_is_being_cancelled_is_not_refused(world: PoolWorld) -> None:
    pool = await world.started(capacity=1)
    held = await lease(pool)
    first, second = [await begun(lease(pool, 1, timeout_s=5.0)) for _ in range(2)]
    first.cancel()
    world.clock.stall(5.0)
    pool.set_parked(0, size_bytes=0)
    with pytest.raises(PoolExhausted, match="position 1 of 1 in the queue"):
        await second
    assert first.cancelled()
    await pool.release(held)


async def test_a_lease_with_a_zero_timeout_gets_ready_machines(world: PoolWorld) -> None:
    pool = await world.started(capacity=1, queue_limit=0)
    assert len(await lease(pool, 1, timeout_s=0.0)) == 1


async def test_a_waiter_cancelled_while_being_admitted_gives_its_machine_to_the_next(world: PoolWorld) -> None:
    pool = await world.started(capacity=1)
    world.hypervisor.gates["fork"].clear()
    await pool.release(await lease(pool))
    first = asyncio.create_task(lease(pool, 1, timeout_s=60.0))
    second = await begun(lease(pool, 1, timeout_s=60.0))

    def cancel_once_admitted() -> None:
        if pool.statistics().leased_count:
            first.cancel()

    # The pool admits the waiter before the waiter has run again.
    pool.changes.listen(cancel_once_admitted)
    world.hypervisor.gates["fork"].set()
    await run_ready()
    assert first.cancelled()
    assert len(await second) == 1
    assert pool.statistics().held_by_run == {"": 1}
    assert len(world.hypervisor.forks) == 2, "a machine that was never used becomes idle again"


async def test_a_machine_that_dies_idle_is_destroyed_and_replaced_after_a_pause(world: PoolWorld) -> None:
    pool = await world.started(capacity=1, backoff_min_s=2.0)
    (machine,) = world.hypervisor.forks
    machine.die("QEMU was killed by signal 9")
    await run_ready()
    assert world.hypervisor.machines == {}
    assert counts(pool) == (0, 0, 0, 0, 0)
    assert "died while idle: QEMU was killed by signal 9" in pool.statistics().problem
    await world.clock.advance(2.0)
    assert counts(pool) == (1, 0, 0, 0, 0)
    assert pool.statistics().healthy
    assert pool.statistics().lost_total == 1


async def test_a_machine_that_just_died_is_not_leased(world: PoolWorld) -> None:
    pool = await world.started(capacity=2, size=2)
    dead = world.hypervisor.forks[0]
    dead.die()
    (machine,) = await lease(pool, 1, timeout_s=0.0)
    assert machine.machine_id != dead.machine_id


async def test_a_machine_that_dies_leased_is_destroyed_and_replaced_at_once(
    world: PoolWorld, pool: MachinePool
) -> None:
    machines = await lease(pool, 1, timeout_s=1.0)
    world.hypervisor.forks[0].die()
    await run_ready()
    assert counts(pool) == (1, 0, 0, 0, 0)
    assert pool.statistics().healthy, "a leased machine that dies is not a problem of the pool"
    await pool.release(machines)
    assert counts(pool) == (1, 0, 0, 0, 0)


@pytest.mark.parametrize("reading", range(20))
async def test_a_pause_may_end_between_any_two_readings_of_the_clock(
    world: PoolWorld, monkeypatch: pytest.MonkeyPatch, reading: int
) -> None:
    pool = await world.started(capacity=1, backoff_min_s=2.0)
    world.hypervisor.forks[0].die()
    await world.clock.advance(1.999)
    assert counts(pool) == (0, 0, 0, 0, 0)
    stall_at_reading(world, monkeypatch, reading, duration_s=0.001)
    waiter = await begun(lease(pool, timeout_s=600.0))
    await world.clock.advance(0.001)
    assert counts(pool) == (0, 1, 0, 0, 0)
    await pool.release(await waiter)


async def test_failed_starts_are_retried_with_growing_pauses(world: PoolWorld) -> None:
    world.hypervisor.errors["create"] = [HypervisorError("no space left in /var/lib/envd")] * 3
    pool = await world.started(capacity=1, backoff_min_s=1.0)
    assert world.hypervisor.counts["create"] == 1
    assert not pool.statistics().healthy
    assert "no space left in /var/lib/envd" in pool.statistics().problem
    assert "no space left" in repr(pool)
    await world.clock.advance(0.9)
    assert world.hypervisor.counts["create"] == 1
    await world.clock.advance(0.1)
    assert world.hypervisor.counts["create"] == 2
    await world.clock.advance(1.9)
    assert world.hypervisor.counts["create"] == 2
    await world.clock.advance(0.1)
    assert world.hypervisor.counts["create"] == 3
    await world.clock.advance(4.0)
    assert counts(pool) == (1, 0, 0, 0, 0)
    s = pool.statistics()
    assert s.healthy
    assert (s.boot_failure_total, s.booted_total, s.template_boot_total) == (3, 1, 1)


async def test_a_guest_that_does_not_become_ready_is_destroyed_and_replaced(
    world: PoolWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = world.make(capacity=1)
    with monkeypatch.context() as patch:

        async def not_ready(_: StubDesktop, *, timeout_s: float) -> None:
            raise GuestUnresponsive(f"no answer within {timeout_s:g} s")

        patch.setattr(StubDesktop, "wait_ready", not_ready)
        await start(pool)
    assert world.hypervisor.machines == {}
    assert "no answer within 600 s; its console ended with: Out of memory" in pool.statistics().problem
    await world.clock.advance(1.0)
    assert counts(pool) == (1, 0, 0, 0, 0)
    assert pool.statistics().healthy


async def test_a_surplus_machine_ages_out(world: PoolWorld) -> None:
    pool = await world.started(capacity=3, size=1, max_idle_s=100.0)
    held = await lease(pool, 1, timeout_s=1.0)
    world.hypervisor.gates["fork"].clear()
    waiter = await begun(lease(pool, 2, timeout_s=60.0))
    waiter.cancel()
    world.hypervisor.gates["fork"].set()
    await run_ready()
    assert counts(pool) == (2, 1, 0, 0, 0)
    await world.clock.advance(99.0)
    assert counts(pool) == (2, 1, 0, 0, 0)
    await world.clock.advance(1.0)
    assert counts(pool) == (1, 1, 0, 0, 0)
    await pool.release(held)


@pytest.mark.parametrize("reading", range(20))
async def test_a_surplus_machine_may_age_out_between_any_two_readings_of_the_clock(
    world: PoolWorld, monkeypatch: pytest.MonkeyPatch, reading: int
) -> None:
    pool = await world.started(size=1, max_idle_s=100.0)
    world.hypervisor.gates["fork"].clear()
    waiter = await begun(lease(pool, 2, timeout_s=60.0))
    waiter.cancel()
    world.hypervisor.gates["fork"].set()
    await world.clock.advance(99.999)
    assert counts(pool) == (2, 0, 0, 0, 0)
    stall_at_reading(world, monkeypatch, reading, duration_s=0.001)
    pool.set_parked(0, size_bytes=0)  # any change
    await world.clock.advance(0.001)
    assert counts(pool) == (1, 0, 0, 0, 0)


async def test_destroying_is_retried_and_its_failure_reported(world: PoolWorld, pool: MachinePool) -> None:
    machines = await lease(pool, 1, timeout_s=1.0)
    world.hypervisor.forks[0].destroy_errors = [HypervisorError("domain is busy")] * 2
    releasing = await begun(pool.release(machines))
    assert counts(pool) == (0, 0, 0, 1, 0)
    assert "could not be destroyed: domain is busy" in pool.statistics().problem
    await world.clock.advance(1.0)
    assert not releasing.done()
    await world.clock.advance(2.0)
    await releasing
    await run_ready()
    assert counts(pool) == (1, 0, 0, 0, 0)
    assert pool.statistics().healthy


async def test_draining_keeps_leased_machines_and_refuses_all_groups(world: PoolWorld) -> None:
    pool = await world.started(capacity=2)
    (machine,) = await lease(pool, 1, timeout_s=1.0)
    waiter = await begun(lease(pool, 2, timeout_s=60.0))
    pool.drain()
    with pytest.raises(Draining):
        await waiter
    with pytest.raises(Draining):
        await lease(pool, 1, timeout_s=1.0)
    assert world.metrics.refused_runs == [("", "draining")] * 2
    await run_ready()
    assert list(world.hypervisor.machines) == [machine.machine_id]
    await pool.release([machine])
    await run_ready()
    assert world.hypervisor.machines == {}, "no machine is replaced"


async def test_closing_destroys_machines_in_any_state(world: PoolWorld) -> None:
    pool = await world.started(capacity=3, size=2)
    await lease(pool, 1, timeout_s=1.0)
    world.hypervisor.gates["fork"].clear()
    await lease(pool, 1, timeout_s=1.0)
    waiter = await begun(lease(pool, 2, timeout_s=60.0))
    await pool.close()
    await pool.close()
    assert world.hypervisor.machines == {}
    assert counts(pool) == (0, 0, 0, 0, 0)
    with pytest.raises(Draining):
        await waiter


async def test_closing_at_any_await_of_a_boot_leaves_nothing(world: PoolWorld) -> None:
    made = set()
    for turns in range(60):
        world.hypervisor.stored.clear()
        pool = world.make(capacity=2)
        await pool.start()
        await run_turns(turns)
        await pool.close()
        made.add(len(world.hypervisor.made))
        assert world.hypervisor.machines == {}, f"closed after {turns} iterations"
        assert all(snapshot.discarded for snapshot in world.hypervisor.snapshots), f"closed after {turns} iterations"
    assert len(made) > 10, "most pools closed after a machine existed"


async def test_closing_continues_when_its_caller_is_cancelled(world: PoolWorld) -> None:
    pool = await world.started(capacity=2)
    world.hypervisor.destroy_gate.clear()
    closing = await begun(pool.close())
    closing.cancel()
    await run_ready()
    assert len(world.hypervisor.machines) == 2
    world.hypervisor.destroy_gate.set()
    await pool.close()
    assert world.hypervisor.machines == {}


async def test_closing_gives_up_on_a_machine_that_cannot_be_destroyed(
    world: PoolWorld, caplog: pytest.LogCaptureFixture, pool: MachinePool
) -> None:
    (machine,) = world.hypervisor.forks
    machine.destroy_errors = [HypervisorError("domain is busy")] * 3
    await pool.close()
    assert f"machine {machine.machine_id}: left behind" in caplog.text
    await machine.destroy()


async def test_memory_is_measured_at_each_interval(world: PoolWorld) -> None:
    pool = await world.started(capacity=2, measure_interval_s=15.0)
    assert pool.statistics().memory_bytes == 2 << 20, "new machines are measured at once"
    for machine in world.hypervisor.forks:
        machine.private_dirty_bytes = 8 << 20
    await world.clock.advance(15.0)
    assert pool.statistics().memory_bytes == 16 << 20
    assert pool.statistics().pss_bytes == 3 << 20
