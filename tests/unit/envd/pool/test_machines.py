"""Reservations, and the machines that fill them with forks of a caller's own state."""

import asyncio

import pytest

from envd.base.errors import Draining, HypervisorError, MachineLost
from envd.pool.leased import Admission, FrozenDesktop, LeasedMachine
from envd.pool.pool import Pool
from tests.support.clock import begun, cancelled_after, run_ready, run_turns
from tests.support.pool_world import PoolWorld

POOL = {"capacity": 4, "size": 1, "max_idle_s": 1e9, "expected_memory_mib": 256}


def counts(pool: Pool) -> tuple[int, int, int]:
    s = pool.statistics()
    return s.idle_count, s.leased_count, s.reserved_count


def template(pool: Pool) -> FrozenDesktop:
    assert pool.template is not None
    return pool.template


async def test_a_group_leases_one_ready_machine_and_fills_reservations_with_forks_of_it(world: PoolWorld) -> None:
    pool = await world.started()
    admission = await pool.acquire(1, reserved=3, timeout_s=1.0)
    await run_ready()
    assert counts(pool) == (0, 1, 3)
    (first,) = admission.machines
    frozen = await pool.freeze(first)
    others = [await pool.fork(reservation, frozen) for reservation in admission.reservations]
    assert counts(pool) == (0, 4, 0)
    assert all(other.frozen is frozen and other.desktop.is_asleep for other in others)
    assert len(world.hypervisor.machines) == 4
    await pool.release([first, *others])
    await run_ready()
    assert counts(pool) == (1, 0, 0)
    await frozen.snapshot.discard()


async def test_idle_machines_are_evicted_for_reservations(world: PoolWorld) -> None:
    pool = await world.started(size=4)
    assert counts(pool) == (4, 0, 0)
    admission = await pool.acquire(1, reserved=2, timeout_s=1.0)
    await run_ready()
    assert counts(pool) == (1, 1, 2)
    assert world.hypervisor.peak_count == 4
    await pool.release(admission.reservations)
    await run_ready()
    assert counts(pool) == (3, 1, 0), "released reservations are replaced by spare machines"


@pytest.mark.parametrize(("method", "capacity"), [("fork", 2), ("load", 4)])
async def test_a_failed_fork_keeps_its_reservation_for_a_retry(world: PoolWorld, method: str, capacity: int) -> None:
    pool = await world.started(capacity=capacity)
    (reservation,) = (await pool.acquire(0, reserved=1, timeout_s=1.0)).reservations
    world.hypervisor.errors[method] = [HypervisorError("no more sockets")]
    with pytest.raises(HypervisorError, match="no more sockets"):
        await pool.fork(reservation, template(pool))
    await run_ready()
    assert pool.statistics().reserved_count == 1
    assert pool.statistics().healthy, "only the caller gets the error"
    machine = await pool.fork(reservation, template(pool))
    assert machine.machine_id in world.hypervisor.machines
    with pytest.raises(RuntimeError, match="has a machine, or was released"):
        await pool.fork(reservation, template(pool))


async def test_releasing_a_reservation_destroys_its_machine(world: PoolWorld) -> None:
    pool = await world.started(size=0)
    admission = await pool.acquire(0, reserved=2, timeout_s=1.0)
    forks = [await pool.fork(reservation, template(pool)) for reservation in admission.reservations]
    await pool.release(admission.reservations)
    assert all(fork.machine_id not in world.hypervisor.machines for fork in forks)
    await pool.release([*admission.reservations, *forks])
    assert counts(pool)[1:] == (0, 0)
    with pytest.raises(RuntimeError, match="has a machine, or was released"):
        await pool.fork(admission.reservations[0], template(pool))


async def test_releasing_a_reservation_ends_its_fork(world: PoolWorld) -> None:
    pool = await world.started(size=0)
    (reservation,) = (await pool.acquire(0, reserved=1, timeout_s=1.0)).reservations
    for turns in range(15):
        forking = asyncio.create_task(pool.fork(reservation, template(pool)))
        await run_turns(turns)
        was_done = forking.done()
        await pool.release([reservation])
        await asyncio.gather(forking, return_exceptions=True)
        assert was_done or isinstance(forking.exception(), MachineLost | RuntimeError), (
            f"released after {turns} iterations"
        )
        await run_ready()
        assert len(world.hypervisor.machines) == counts(pool)[0], f"released after {turns} iterations"
        (reservation,) = (await pool.acquire(0, reserved=1, timeout_s=1.0)).reservations


async def test_a_fork_cancelled_at_any_await_keeps_its_reservation_and_no_machine(world: PoolWorld) -> None:
    pool = await world.started(size=0)
    (reservation,) = (await pool.acquire(0, reserved=1, timeout_s=1.0)).reservations
    for turns in range(20):
        forking = await cancelled_after(turns, pool.fork(reservation, template(pool)))
        await run_ready()
        if not forking.cancelled():
            break
        assert counts(pool)[1:] == (0, 1), f"cancelled after {turns} iterations"
        assert len(world.hypervisor.machines) == counts(pool)[0] + 1, "one waits for the next attempt"
    else:
        pytest.fail("it never came to its end")
    await pool.release([reservation])


async def test_a_lease_cancelled_at_any_await_returns_machines_and_reservations(world: PoolWorld) -> None:
    pool = await world.started(size=2)
    for turns in range(30):
        held = await pool.acquire(2, reserved=2, timeout_s=1.0)
        waiter = asyncio.create_task(pool.acquire(1, reserved=2, timeout_s=60.0))
        releasing = asyncio.create_task(pool.release([*held.machines, *held.reservations]))
        await run_turns(turns)
        waiter.cancel()
        await asyncio.gather(waiter, releasing, return_exceptions=True)
        if not waiter.cancelled():
            admission: Admission = waiter.result()
            await pool.release([*admission.machines, *admission.reservations])
        await run_ready()
        assert counts(pool) == (2, 0, 0), f"cancelled after {turns} iterations"
    assert world.hypervisor.peak_count <= 4


async def test_reservations_can_be_filled_until_the_pool_closes(world: PoolWorld) -> None:
    pool = await world.started()
    admission = await pool.acquire(0, reserved=2, timeout_s=1.0)
    frozen = template(pool)
    pool.drain()
    await pool.fork(admission.reservations[0], frozen)
    assert counts(pool) == (0, 1, 1)
    assert len(world.hypervisor.machines) == 2
    world.hypervisor.gates["load"].clear()
    forking = await begun(pool.fork(admission.reservations[1], frozen))
    await pool.close()
    assert world.hypervisor.machines == {}
    with pytest.raises(Draining):
        await forking
    with pytest.raises(Draining):
        await pool.fork(admission.reservations[1], frozen)


async def test_a_fork_for_a_reservation_does_not_count_as_a_spare_machine(world: PoolWorld) -> None:
    pool = await world.started()
    (reservation,) = (await pool.acquire(0, reserved=1, timeout_s=1.0)).reservations
    world.hypervisor.gates["fork"].clear()
    forking = await begun(pool.fork(reservation, template(pool)))
    await pool.acquire(1, timeout_s=1.0)
    assert pool.statistics().starting_count == 2
    world.hypervisor.gates["fork"].set()
    await forking
    await run_ready()
    assert counts(pool) == (1, 2, 0)


async def test_forks_for_reservations_count_against_max_starting(world: PoolWorld) -> None:
    pool = await world.started(size=0, max_starting=2)
    admission = await pool.acquire(0, reserved=4, timeout_s=1.0)
    before = world.hypervisor.counts["fork"]
    world.hypervisor.gates["fork"].clear()
    forking = [asyncio.create_task(pool.fork(reservation, template(pool))) for reservation in admission.reservations]
    await run_ready()
    assert world.hypervisor.counts["fork"] - before == 2
    world.hypervisor.gates["fork"].set()
    await asyncio.gather(*forking)


# Machines that wait for a state


async def test_a_reservation_gets_a_ready_machine_which_only_loads_its_state(world: PoolWorld) -> None:
    pool = await world.started(size=3, capacity=8)
    ready = set(world.hypervisor.machines)
    world.hypervisor.gates["fork"].clear()
    admission = await pool.acquire(1, reserved=2, timeout_s=1.0)
    frozen = await pool.freeze(admission.machines[0])
    forks = [await pool.fork(reservation, frozen) for reservation in admission.reservations]
    used = {machine.machine_id for machine in (*admission.machines, *forks)}
    assert len(used & ready) >= 2, "all but at most one, whose state had been loaded to test the template"
    world.hypervisor.gates["fork"].set()
    await run_ready()
    assert counts(pool) == (3, 3, 0), "others are started in their place"
    assert all(world.hypervisor.machines[fork.machine_id].snapshot is frozen.snapshot for fork in forks)
    await frozen.snapshot.discard()


async def test_spare_machines_start_after_a_fork_that_is_waited_for_unless_a_group_is_queued(world: PoolWorld) -> None:
    # The first ready machine has loaded the template to test it, so it cannot load another state.
    pool = await world.started(size=3, capacity=8)
    admission = await pool.acquire(0, reserved=2, timeout_s=1.0)
    before = len(world.hypervisor.machines)
    await run_ready()
    assert len(world.hypervisor.machines) == before
    await pool.fork(admission.reservations[0], template(pool))
    await run_ready()
    assert len(world.hypervisor.machines) == before, "one is not filled yet"
    (machine, *_) = (await pool.acquire(2, timeout_s=1.0)).machines
    assert machine.machine_id in world.hypervisor.machines
    await pool.fork(admission.reservations[1], template(pool))
    await run_ready()
    assert counts(pool) == (3, 4, 0)


async def test_ready_machines_are_left_to_the_groups_in_the_queue(world: PoolWorld) -> None:
    pool = await world.started(size=2, capacity=6)
    ready = set(world.hypervisor.machines)
    large = asyncio.create_task(pool.acquire(3, timeout_s=60.0))
    await asyncio.sleep(0)
    (reservation,) = (await pool.acquire(0, reserved=1, timeout_s=1.0)).reservations
    fork = await pool.fork(reservation, template(pool))
    assert fork.machine_id not in ready
    assert ready <= {machine.machine_id for machine in (await large).machines}


async def test_a_machine_that_dies_while_it_waits_is_replaced_before_its_reservation_is_used(world: PoolWorld) -> None:
    pool = await world.started(size=0)
    (reservation,) = (await pool.acquire(0, reserved=1, timeout_s=1.0)).reservations
    await run_ready()
    first = world.hypervisor.forks[-1]
    first.die()
    world.hypervisor.destroy_gate.clear()
    await run_ready()
    forking = await begun(pool.fork(reservation, template(pool)))
    assert not forking.done()
    world.hypervisor.destroy_gate.set()
    fork = await forking
    assert fork.machine_id != first.machine_id
    assert counts(pool)[1:] == (1, 0)


async def test_machines_of_reservations_are_not_started_during_a_pause_after_a_failure(world: PoolWorld) -> None:
    pool = await world.started(size=0)
    world.hypervisor.errors["fork"] = [HypervisorError("no more sockets")]
    (reservation,) = (await pool.acquire(0, reserved=1, timeout_s=1.0)).reservations
    await run_ready()
    before = world.hypervisor.counts["fork"]
    await run_ready()
    assert world.hypervisor.counts["fork"] == before
    assert "no more sockets" in pool.statistics().problem
    await world.clock.advance(pool.settings.backoff_min_s)
    await run_ready()
    assert world.hypervisor.counts["fork"] == before + 1
    await pool.fork(reservation, template(pool))


async def test_a_lease_does_not_wait_for_the_state_but_its_first_use_does(world: PoolWorld) -> None:
    pool = await world.started(size=4)
    world.hypervisor.gates["load"].clear()
    machines = (await pool.acquire(4, timeout_s=1.0)).machines
    waiting = next(machine for machine in machines if not world.hypervisor.machines[machine.machine_id].is_loaded)
    using = asyncio.create_task(use(waiting))
    freezing = await begun(pool.freeze(machines[-1]))
    assert not using.done()
    assert world.hypervisor.machines[waiting.machine_id].calls == []
    world.hypervisor.gates["load"].set()
    await using
    await (await freezing).snapshot.discard()
    assert world.hypervisor.machines[waiting.machine_id].is_loaded


async def test_a_machine_whose_state_does_not_load_is_lost_at_its_first_use(world: PoolWorld) -> None:
    pool = await world.started(size=4)
    world.hypervisor.errors["load"] = [HypervisorError("no such file")] * 4
    machines = (await pool.acquire(4, timeout_s=1.0)).machines
    waiting = next(machine for machine in machines if not world.hypervisor.machines[machine.machine_id].is_loaded)
    with pytest.raises(MachineLost, match=r"state .*no such file"):
        await use(waiting)
    await pool.release(machines)


async def use(machine: LeasedMachine) -> None:
    async with machine.running():
        pass
