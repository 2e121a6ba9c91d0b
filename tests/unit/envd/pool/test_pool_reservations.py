"""Reservations for forks of a caller's own state, and the host's memory as a bound on all machines."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from envd.base.errors import Draining, GroupTooLarge, HypervisorError, MachineLost, PoolExhausted
from envd.pool.frozen import FrozenDesktop
from envd.pool.leased import LeasedMachine, MachineLease, Reservation
from envd.pool.memory import HostMemory
from envd.pool.pool import Pool
from envd.pool.settings import PoolSettings
from tests.support.clock import ManualClock, run_ready
from tests.support.stubs import IMAGE, StubHypervisor

MakePool = Callable[..., Pool]
MIB = 1 << 20


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def hypervisor() -> StubHypervisor:
    return StubHypervisor()


@pytest.fixture
async def make_pool(clock: ManualClock, hypervisor: StubHypervisor) -> AsyncIterator[MakePool]:
    async with AsyncExitStack() as stack:

        def make(*, capacity: int = 4, idle_target: int = 1, memory: HostMemory | None = None) -> Pool:
            settings = PoolSettings(
                name="desktop",
                capacity=capacity,
                size=idle_target,
                max_starting=capacity,
                max_idle_s=1e9,
                expected_memory_mib=256,
            )
            pool = Pool(
                settings,
                hypervisor=hypervisor,
                image=IMAGE,
                memory=memory,
                make_desktop=hypervisor.desktop,
                clock=clock,
            )
            stack.push_async_callback(pool.close)
            return pool

        yield make
    assert hypervisor.machines == {}, "a closed pool leaves nothing"


async def started(pool: Pool) -> Pool:
    await pool.start()
    for _ in range(3):
        await run_ready()
    return pool


def counts(pool: Pool) -> tuple[int, int, int]:
    s = pool.statistics()
    return s.idle_count, s.leased_count, s.reserved_count


def template(pool: Pool) -> FrozenDesktop:
    assert pool.template is not None
    return pool.template


async def test_a_group_leases_one_ready_machine_and_fills_reservations_with_forks_of_it(
    make_pool: MakePool, hypervisor: StubHypervisor
) -> None:
    pool = await started(make_pool())
    granted = await pool.lease(1, reserved=3, timeout_s=1.0)
    await run_ready()
    assert counts(pool) == (0, 1, 3)
    (first,) = granted.machines
    frozen = await pool.freeze(first)
    others = [await pool.fork(reservation, frozen) for reservation in granted.reservations]
    assert counts(pool) == (0, 4, 0)
    assert all(other.frozen is frozen and other.desktop.is_asleep for other in others)
    assert len(hypervisor.machines) == 4
    await pool.release([first, *others])
    await run_ready()
    assert counts(pool) == (1, 0, 0)
    await frozen.snapshot.discard()


async def test_idle_machines_are_evicted_for_reservations(make_pool: MakePool, hypervisor: StubHypervisor) -> None:
    pool = await started(make_pool(idle_target=4))
    assert counts(pool) == (4, 0, 0)
    granted = await pool.lease(1, reserved=2, timeout_s=1.0)
    await run_ready()
    assert counts(pool) == (1, 1, 2)
    assert hypervisor.peak_count == 4
    await pool.release(granted.reservations)
    await run_ready()
    assert counts(pool) == (3, 1, 0), "released reservations are replaced by spare machines"


async def test_reservations_alone_are_granted_up_to_capacity(make_pool: MakePool) -> None:
    pool = await started(make_pool())
    granted = await pool.lease(0, reserved=4, timeout_s=1.0)
    assert (granted.machines, len(granted.reservations)) == ((), 4)
    with pytest.raises(GroupTooLarge, match="never a group of 5"):
        await pool.lease(1, reserved=4, timeout_s=1.0)
    with pytest.raises(PoolExhausted, match="4 reserved"):
        await pool.lease(1, timeout_s=0.0)


async def test_a_failed_fork_keeps_its_reservation_for_a_retry(make_pool: MakePool, hypervisor: StubHypervisor) -> None:
    pool = await started(make_pool(capacity=2))
    (reservation,) = (await pool.lease(0, reserved=1, timeout_s=1.0)).reservations
    hypervisor.errors["fork"] = [HypervisorError("no more sockets")]
    with pytest.raises(HypervisorError, match="no more sockets"):
        await pool.fork(reservation, template(pool))
    await run_ready()
    assert pool.statistics().reserved_count == 1
    assert pool.statistics().healthy, "only the caller gets the error"
    machine = await pool.fork(reservation, template(pool))
    assert machine.machine_id in hypervisor.machines
    with pytest.raises(RuntimeError, match="has a machine, or was released"):
        await pool.fork(reservation, template(pool))


async def test_releasing_a_reservation_destroys_its_machine(make_pool: MakePool, hypervisor: StubHypervisor) -> None:
    pool = await started(make_pool(idle_target=0))
    granted = await pool.lease(0, reserved=2, timeout_s=1.0)
    forks = [await pool.fork(reservation, template(pool)) for reservation in granted.reservations]
    await pool.release(granted.reservations)
    assert all(fork.machine_id not in hypervisor.machines for fork in forks)
    await pool.release([*granted.reservations, *forks])
    assert counts(pool)[1:] == (0, 0)
    with pytest.raises(RuntimeError, match="has a machine, or was released"):
        await pool.fork(granted.reservations[0], template(pool))


async def test_releasing_a_reservation_ends_its_fork(make_pool: MakePool, hypervisor: StubHypervisor) -> None:
    pool = await started(make_pool(idle_target=0))
    (reservation,) = (await pool.lease(0, reserved=1, timeout_s=1.0)).reservations
    for turns in range(15):
        forking = asyncio.create_task(pool.fork(reservation, template(pool)))
        for _ in range(turns):
            await asyncio.sleep(0)
        was_done = forking.done()
        await pool.release([reservation])
        await asyncio.gather(forking, return_exceptions=True)
        assert was_done or isinstance(forking.exception(), MachineLost | RuntimeError), (
            f"released after {turns} iterations"
        )
        await run_ready()
        assert len(hypervisor.machines) == counts(pool)[0], f"released after {turns} iterations"
        (reservation,) = (await pool.lease(0, reserved=1, timeout_s=1.0)).reservations


async def test_a_fork_cancelled_at_any_await_keeps_its_reservation_and_no_machine(
    make_pool: MakePool, hypervisor: StubHypervisor
) -> None:
    pool = await started(make_pool(idle_target=0))
    (reservation,) = (await pool.lease(0, reserved=1, timeout_s=1.0)).reservations
    for turns in range(20):
        forking = asyncio.create_task(pool.fork(reservation, template(pool)))
        for _ in range(turns):
            await asyncio.sleep(0)
        forking.cancel()
        await asyncio.gather(forking, return_exceptions=True)
        await run_ready()
        if not forking.cancelled():
            break
        assert counts(pool)[1:] == (0, 1), f"cancelled after {turns} iterations"
        assert len(hypervisor.machines) == counts(pool)[0] + 1, "one waits for the next attempt"
    else:
        pytest.fail("it never came to its end")
    await pool.release([reservation])


async def test_a_lease_cancelled_at_any_await_returns_machines_and_reservations(
    make_pool: MakePool, hypervisor: StubHypervisor
) -> None:
    pool = await started(make_pool(idle_target=2))
    for turns in range(30):
        held = await pool.lease(2, reserved=2, timeout_s=1.0)
        waiter = asyncio.create_task(pool.lease(1, reserved=2, timeout_s=60.0))
        releasing = asyncio.create_task(pool.release([*held.machines, *held.reservations]))
        for _ in range(turns):
            await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.gather(waiter, releasing, return_exceptions=True)
        if not waiter.cancelled():
            granted: MachineLease = waiter.result()
            await pool.release([*granted.machines, *granted.reservations])
        await run_ready()
        assert counts(pool) == (2, 0, 0), f"cancelled after {turns} iterations"
    assert hypervisor.peak_count <= 4


async def test_granted_reservations_can_be_filled_until_the_pool_closes(
    make_pool: MakePool, hypervisor: StubHypervisor
) -> None:
    pool = await started(make_pool())
    granted = await pool.lease(0, reserved=2, timeout_s=1.0)
    frozen = template(pool)
    pool.drain()
    await pool.fork(granted.reservations[0], frozen)
    assert counts(pool) == (0, 1, 1)
    assert len(hypervisor.machines) == 2
    hypervisor.gates["load"].clear()
    forking = asyncio.create_task(pool.fork(granted.reservations[1], frozen))
    await run_ready()
    await pool.close()
    assert hypervisor.machines == {}
    with pytest.raises(Draining):
        await forking
    with pytest.raises(Draining):
        await pool.fork(granted.reservations[1], frozen)


async def test_a_fork_for_a_reservation_does_not_count_as_a_spare_machine(
    make_pool: MakePool, hypervisor: StubHypervisor
) -> None:
    pool = await started(make_pool())
    (reservation,) = (await pool.lease(0, reserved=1, timeout_s=1.0)).reservations
    hypervisor.gates["fork"].clear()
    forking = asyncio.create_task(pool.fork(reservation, template(pool)))
    await run_ready()
    await pool.lease(1, timeout_s=1.0)
    assert pool.statistics().starting_count == 2
    hypervisor.gates["fork"].set()
    await forking
    await run_ready()
    assert counts(pool) == (1, 2, 0)


async def test_forks_for_reservations_count_against_max_starting(
    make_pool: MakePool, hypervisor: StubHypervisor, clock: ManualClock
) -> None:
    settings = PoolSettings(name="desktop", capacity=4, size=0, max_starting=2)
    pool = Pool(settings, hypervisor=hypervisor, image=IMAGE, make_desktop=hypervisor.desktop, clock=clock)
    await started(pool)
    granted = await pool.lease(0, reserved=4, timeout_s=1.0)
    before = hypervisor.counts["fork"]
    hypervisor.gates["fork"].clear()
    forking = [asyncio.create_task(pool.fork(reservation, template(pool))) for reservation in granted.reservations]
    await run_ready()
    assert hypervisor.counts["fork"] - before == 2
    hypervisor.gates["fork"].set()
    await asyncio.gather(*forking)
    await pool.close()


async def test_a_dead_machine_of_a_reservation_frees_its_capacity(
    make_pool: MakePool, hypervisor: StubHypervisor
) -> None:
    pool = await started(make_pool(capacity=1))
    (reservation,) = (await pool.lease(0, reserved=1, timeout_s=1.0)).reservations
    await pool.fork(reservation, template(pool))
    hypervisor.forks[-1].die()
    await run_ready()
    assert counts(pool) == (1, 0, 0)


async def test_a_reservation_names_its_pool() -> None:
    assert repr(Reservation("desktop")) == "<Reservation of 'desktop'>"


# Machines that wait for a state


async def test_a_reservation_gets_a_ready_machine_which_only_loads_its_state(
    make_pool: MakePool, hypervisor: StubHypervisor
) -> None:
    pool = await started(make_pool(idle_target=3, capacity=8))
    ready = set(hypervisor.machines)
    hypervisor.gates["fork"].clear()
    granted = await pool.lease(1, reserved=2, timeout_s=1.0)
    frozen = await pool.freeze(granted.machines[0])
    forks = [await pool.fork(reservation, frozen) for reservation in granted.reservations]
    used = {machine.machine_id for machine in (*granted.machines, *forks)}
    assert len(used & ready) >= 2, "all but at most one, whose state had been loaded to test the template"
    hypervisor.gates["fork"].set()
    await run_ready()
    assert counts(pool) == (3, 3, 0), "others are started in their place"
    assert all(hypervisor.machines[fork.machine_id].snapshot is frozen.snapshot for fork in forks)


async def test_spare_machines_start_after_a_fork_that_is_waited_for_unless_a_group_is_queued(
    make_pool: MakePool, hypervisor: StubHypervisor
) -> None:
    # The first ready machine has loaded the template to test it, so it cannot load another state.
    pool = await started(make_pool(idle_target=3, capacity=8))
    granted = await pool.lease(0, reserved=2, timeout_s=1.0)
    before = len(hypervisor.machines)
    await run_ready()
    assert len(hypervisor.machines) == before
    await pool.fork(granted.reservations[0], template(pool))
    await run_ready()
    assert len(hypervisor.machines) == before, "one is not filled yet"
    (machine, *_) = (await pool.lease(2, timeout_s=1.0)).machines
    assert machine.machine_id in hypervisor.machines
    await pool.fork(granted.reservations[1], template(pool))
    await run_ready()
    assert counts(pool) == (3, 4, 0)


async def test_ready_machines_are_left_to_the_groups_in_the_queue(
    make_pool: MakePool, hypervisor: StubHypervisor
) -> None:
    pool = await started(make_pool(idle_target=2, capacity=6))
    ready = set(hypervisor.machines)
    large = asyncio.create_task(pool.lease(3, timeout_s=60.0))
    await asyncio.sleep(0)
    (reservation,) = (await pool.lease(0, reserved=1, timeout_s=1.0)).reservations
    fork = await pool.fork(reservation, template(pool))
    assert fork.machine_id not in ready
    assert ready <= {machine.machine_id for machine in (await large).machines}


async def test_a_machine_that_dies_while_it_waits_is_replaced_before_its_reservation_is_used(
    make_pool: MakePool, hypervisor: StubHypervisor
) -> None:
    pool = await started(make_pool(idle_target=0))
    (reservation,) = (await pool.lease(0, reserved=1, timeout_s=1.0)).reservations
    await run_ready()
    first = hypervisor.forks[-1]
    first.die()
    hypervisor.destroy_gate.clear()
    await run_ready()
    forking = asyncio.create_task(pool.fork(reservation, template(pool)))
    await run_ready()
    assert not forking.done()
    hypervisor.destroy_gate.set()
    fork = await forking
    assert fork.machine_id != first.machine_id
    assert counts(pool)[1:] == (1, 0)


async def test_a_failed_load_keeps_the_reservation_for_a_retry(make_pool: MakePool, hypervisor: StubHypervisor) -> None:
    pool = await started(make_pool())
    (reservation,) = (await pool.lease(0, reserved=1, timeout_s=1.0)).reservations
    hypervisor.errors["load"] = [HypervisorError("the state could not be loaded")]
    with pytest.raises(HypervisorError, match="could not be loaded"):
        await pool.fork(reservation, template(pool))
    await run_ready()
    assert pool.statistics().reserved_count == 1
    machine = await pool.fork(reservation, template(pool))
    assert machine.machine_id in hypervisor.machines


async def test_machines_of_reservations_are_not_started_during_a_pause_after_a_failure(
    make_pool: MakePool, hypervisor: StubHypervisor, clock: ManualClock
) -> None:
    pool = await started(make_pool(idle_target=0))
    hypervisor.errors["fork"] = [HypervisorError("no more sockets")]
    (reservation,) = (await pool.lease(0, reserved=1, timeout_s=1.0)).reservations
    await run_ready()
    before = hypervisor.counts["fork"]
    await run_ready()
    assert hypervisor.counts["fork"] == before
    assert "no more sockets" in pool.statistics().problem
    await clock.advance(pool.settings.backoff_min_s)
    await run_ready()
    assert hypervisor.counts["fork"] == before + 1
    await pool.fork(reservation, template(pool))


async def test_a_lease_does_not_wait_for_the_state_but_its_first_use_does(
    make_pool: MakePool, hypervisor: StubHypervisor
) -> None:
    pool = await started(make_pool(idle_target=4))
    hypervisor.gates["load"].clear()
    machines = (await pool.lease(4, timeout_s=1.0)).machines
    waiting = next(machine for machine in machines if not hypervisor.machines[machine.machine_id].is_loaded)
    using = asyncio.create_task(use(waiting))
    freezing = asyncio.create_task(pool.freeze(machines[-1]))
    await run_ready()
    assert not using.done()
    assert hypervisor.machines[waiting.machine_id].calls == []
    hypervisor.gates["load"].set()
    await using
    await (await freezing).snapshot.discard()
    assert hypervisor.machines[waiting.machine_id].is_loaded


async def test_a_machine_whose_state_does_not_load_is_lost_at_its_first_use(
    make_pool: MakePool, hypervisor: StubHypervisor
) -> None:
    pool = await started(make_pool(idle_target=4))
    hypervisor.errors["load"] = [HypervisorError("no such file")] * 4
    machines = (await pool.lease(4, timeout_s=1.0)).machines
    waiting = next(machine for machine in machines if not hypervisor.machines[machine.machine_id].is_loaded)
    with pytest.raises(MachineLost, match="its state could not be loaded: no such file"):
        await use(waiting)
    await pool.release(machines)


async def use(machine: LeasedMachine) -> None:
    async with machine.running():
        pass


# Memory


class Host:
    """A host whose memory the test sets."""

    def __init__(self, available_mib: int) -> None:
        self.available_mib = available_mib
        self.memory = HostMemory(reserve_bytes=1024 * MIB, read=lambda: self.available_mib * MIB)


async def test_a_host_host_is_short_gets_no_more_machines_and_reports_it(
    make_pool: MakePool, hypervisor: StubHypervisor, clock: ManualClock
) -> None:
    host = Host(1024 + 2 * 256)
    pool = await started(make_pool(idle_target=4, memory=host.memory))
    assert counts(pool) == (2, 0, 0)
    s = pool.statistics()
    assert s.healthy
    assert s.boot_failure_total == 0
    assert "the host's memory is short: 1536 MiB are available" in s.problem
    host.available_mib += 2 * 256
    await clock.advance(1.0)
    assert counts(pool) == (4, 0, 0)
    assert pool.statistics().problem == ""


async def test_a_timeout_reports_a_memory_shortage(make_pool: MakePool, clock: ManualClock) -> None:
    pool = await started(make_pool(idle_target=0, memory=Host(1024 + 2 * 256).memory))
    await pool.lease(1, timeout_s=1.0)
    waiter = asyncio.create_task(pool.lease(2, timeout_s=30.0))
    await clock.advance(30.0)
    with pytest.raises(PoolExhausted, match="the host's memory is short"):
        await waiter


async def test_reservations_hold_memory_like_machines(make_pool: MakePool, clock: ManualClock) -> None:
    host = Host(1024 + 3 * 256)
    pool = await started(make_pool(idle_target=0, memory=host.memory))
    granted = await pool.lease(0, reserved=2, timeout_s=1.0)
    waiter = asyncio.create_task(pool.lease(0, reserved=2, timeout_s=60.0))
    await clock.advance(5.0)
    assert not waiter.done()
    await pool.release(granted.reservations)
    assert len((await waiter).reservations) == 2


async def test_the_template_is_not_booted_without_memory_for_a_machine(
    make_pool: MakePool, hypervisor: StubHypervisor, clock: ManualClock
) -> None:
    host = Host(1024)
    pool = await started(make_pool(memory=host.memory))
    await clock.advance(30.0)
    assert hypervisor.made == []
    assert "the host's memory is short" in pool.statistics().problem
    host.available_mib = 4096
    await clock.advance(1.0)
    assert counts(pool) == (1, 0, 0)
    assert pool.statistics().problem == ""


async def test_a_drained_pool_no_longer_waits_for_memory(make_pool: MakePool, clock: ManualClock) -> None:
    host = Host(1024 + 256)
    pool = await started(make_pool(idle_target=2, memory=host.memory))
    assert pool.statistics().problem
    pool.drain()
    await clock.advance(60.0)
    assert pool.statistics().problem == ""


async def test_pools_leave_each_other_the_expected_growth_of_their_machines(
    hypervisor: StubHypervisor, clock: ManualClock
) -> None:
    host = Host(1024 + 3 * 256)
    pools = [
        Pool(
            PoolSettings(name=name, capacity=2, size=2, max_starting=2),
            hypervisor=hypervisor,
            image=IMAGE,
            memory=host.memory,
            make_desktop=hypervisor.desktop,
            clock=clock,
        )
        for name in ("one", "other")
    ]
    for pool in pools:
        await started(pool)
    assert sum(pool.statistics().idle_count for pool in pools) == 3
    await pools[0].close()
    await clock.advance(1.0)
    assert pools[1].statistics().idle_count == 2
    await pools[1].close()
