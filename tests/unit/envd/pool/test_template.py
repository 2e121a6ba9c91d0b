"""Templates: booted once, tested, stored, shared, and rebuilt if they are wrong."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cuaenv.results import CommandResult
from envd.base.errors import (
    Draining,
    GuestUnresponsive,
    HypervisorError,
    HypervisorUnavailable,
    PoolExhausted,
    PoolFailing,
)
from envd.pool.backoff import BreakerState
from envd.pool.pool import Pool
from envd.pool.room import HostRoom
from tests.support.clock import begun, run_ready
from tests.support.pool_world import PoolWorld, start
from tests.support.stubs import StubDesktop


def template_of(pool: Pool) -> str:
    """Return the template's digest; empty while there is none."""
    return pool.statistics().template_digest


def idle_count(pool: Pool) -> int:
    return pool.statistics().idle_count


async def test_a_template_is_booted_once_and_its_test_fork_is_the_first_machine(world: PoolWorld) -> None:
    pool = await world.started()
    assert (world.hypervisor.counts["create"], world.hypervisor.counts["freeze"], world.hypervisor.counts["fork"]) == (
        1,
        1,
        2,
    )
    assert idle_count(pool) == 2
    assert pool.template is not None
    assert pool.statistics().template_digest == pool.template.snapshot.digest
    admission = await pool.acquire(2, timeout_s=1.0)
    assert {machine.frozen for machine in admission.machines} == {pool.template}
    assert all(machine.desktop.is_asleep for machine in admission.machines), "the test fork too"
    assert world.hypervisor.peak_count == 2


async def test_a_template_has_the_keyboard_layout_of_its_pool(
    world: PoolWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[Sequence[str]] = []

    async def run(_desktop: StubDesktop, argv: Sequence[str], *, timeout_s: float) -> CommandResult:
        commands.append(argv)
        return CommandResult(exit_code=int("xx" in argv), stdout=b"", stderr=b"Error loading new keyboard description")

    monkeypatch.setattr(StubDesktop, "run", run)
    await world.started("german", keyboard_layout="de")
    await world.started("american")
    assert commands == [["setxkbmap", "-layout", "de"]]
    assert len(world.hypervisor.snapshots) == 2
    pool = await world.started("unknown", keyboard_layout="xx")
    assert "keyboard layout xx: setxkbmap failed in the guest: Error loading" in pool.statistics().problem


async def test_building_a_template_stays_within_capacity(world: PoolWorld) -> None:
    pool = world.make(capacity=1)
    most = 0

    def count() -> None:
        nonlocal most
        s = pool.statistics()
        most = max(most, s.idle_count + s.starting_count + s.dying_count)

    pool.changes.listen(count)
    await start(pool)
    assert (idle_count(pool), most) == (1, 1)


async def test_leases_wait_and_nothing_is_forked_while_the_template_boots(world: PoolWorld) -> None:
    world.hypervisor.ready_gate.clear()
    pool = await world.started()
    waiting = asyncio.create_task(pool.acquire(1, timeout_s=60.0))
    reserving = await begun(pool.acquire(0, reserved=2, timeout_s=60.0))
    assert not waiting.done()
    assert not reserving.done(), "the booting machine counts against capacity"
    assert (pool.statistics().starting_count, world.hypervisor.counts["fork"]) == (1, 0)
    world.hypervisor.ready_gate.set()
    admission = await waiting
    await pool.release(admission.machines)
    assert len((await reserving).reservations) == 2
    assert world.hypervisor.peak_count <= 2


async def test_equal_pools_share_one_template(world: PoolWorld) -> None:
    one, other = world.make("one"), world.make("other")
    await start(one, other)
    assert world.hypervisor.counts["create"] == 1
    assert world.hypervisor.counts["find_template"] == 1
    assert (idle_count(one), idle_count(other)) == (2, 2)
    assert one.template is other.template
    await one.close()
    assert not world.hypervisor.snapshots[0].discarded, "the other still forks from it"
    await other.close()
    assert world.hypervisor.snapshots[0].discarded


async def test_pools_that_differ_have_a_template_each(world: PoolWorld) -> None:
    one, other = world.make("one"), world.make("other", memory_mib=2048)
    await start(one, other)
    assert world.hypervisor.counts["create"] == 2
    assert one.template is not other.template


async def test_another_pool_builds_the_template_when_the_first_one_closes(world: PoolWorld) -> None:
    world.hypervisor.ready_gate.clear()
    one, other = world.make("one"), world.make("other")
    await start(one, other)
    await one.close()
    world.hypervisor.ready_gate.set()
    await run_ready()
    await run_ready()
    assert idle_count(other) == 2


async def test_a_stored_template_is_tested_and_reused(world: PoolWorld) -> None:
    first = await world.started()
    await first.close()
    (stored,) = world.hypervisor.stored.values()
    second = await world.started()
    assert world.hypervisor.counts["create"] == 1
    assert idle_count(second) == 2
    assert second.template is not None
    assert second.template.snapshot.digest == stored.digest
    assert second.statistics().template_boot_total == 0


async def test_state_that_a_connection_cannot_discover_is_stored_with_the_template(
    world: PoolWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = StubDesktop.view
    types, home = False, "/home/agent"

    async def view_with_home(desktop: StubDesktop) -> object:
        view = await look(desktop)
        return replace(view, guestd_types=types, home=home)

    monkeypatch.setattr(StubDesktop, "view", view_with_home)
    first = await world.started()
    await first.close()
    types, home = True, ""
    second = await world.started()
    assert second.template is not None
    assert (second.template.view.guestd_types, second.template.view.home) == (False, "/home/agent")


async def test_a_corrupt_template_is_an_error_and_a_new_one_is_booted(
    world: PoolWorld, caplog: pytest.LogCaptureFixture
) -> None:
    first = await world.started()
    await first.close()
    world.hypervisor.corrupt.update(world.hypervisor.stored)
    second = await world.started()
    assert world.hypervisor.counts["create"] == 2
    assert idle_count(second) == 2
    assert second.statistics().healthy
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "memory is not what was stored" in record.getMessage()


async def test_a_stored_template_that_shows_another_frame_is_never_used(
    world: PoolWorld, caplog: pytest.LogCaptureFixture
) -> None:
    first = await world.started()
    await first.close()
    (stored,) = world.hypervisor.stored.values()
    stored.frame_id = "something else"
    second = await world.started()
    assert world.hypervisor.counts["create"] == 2
    assert second.template is not None
    assert second.template.snapshot.digest != stored.digest
    assert [snapshot.discarded for snapshot in world.hypervisor.snapshots] == [True, True, False]
    assert {machine.snapshot for machine in world.hypervisor.machines.values()} == {second.template.snapshot}
    assert any("shows frame something else" in r.getMessage() for r in caplog.records if r.levelname == "ERROR")


async def test_a_new_template_that_shows_another_frame_is_retried_later(
    world: PoolWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze = world.hypervisor.freeze

    async def spoil(*args: object, **kwargs: object) -> object:
        snapshot = await freeze(*args, **kwargs)  # type: ignore[arg-type]
        snapshot.frame_id = "garbage"
        return snapshot

    pool = world.make()
    with monkeypatch.context() as patch:
        patch.setattr(world.hypervisor, "freeze", spoil)
        await start(pool)
    assert "shows frame garbage" in pool.statistics().problem
    assert world.hypervisor.machines == {}
    world.hypervisor.stored.clear()
    await world.clock.advance(1.0)
    assert idle_count(pool) == 2
    assert pool.statistics().healthy


@pytest.mark.parametrize("method", ["create", "freeze", "fork", "find_template"])
async def test_building_a_template_is_retried_with_growing_pauses(world: PoolWorld, method: str) -> None:
    # An error of a stored template is not a failure of the pool; an unexpected error is.
    error = OSError("no space left") if method == "find_template" else HypervisorError("no space left")
    world.hypervisor.errors[method] = [error] * 2
    pool = await world.started(capacity=1)
    if method == "fork":  # the frozen template is stored, fails its test, and a new one is booted
        world.hypervisor.stored.clear()
    assert "template not built: no space left" in pool.statistics().problem
    assert not pool.statistics().healthy
    assert world.hypervisor.machines == {}
    waiter = asyncio.create_task(pool.acquire(1, timeout_s=1.5))
    await world.clock.advance(1.0)
    assert pool.statistics().idle_count == 0
    if method == "fork":
        world.hypervisor.stored.clear()
    await world.clock.advance(0.5)
    with pytest.raises(PoolExhausted, match=r"template.*no space left"):
        await waiter
    await world.clock.advance(1.5)
    assert idle_count(pool) == 1
    assert pool.statistics().healthy


async def test_a_failure_to_read_the_hosts_memory_is_retried_too(world: PoolWorld) -> None:
    readings: list[Exception] = [OSError("no claims")]

    def read() -> int:
        if readings:
            raise readings.pop()
        return 64 << 30

    pool = world.make(capacity=1, room=HostRoom(memory_reserve_bytes=0, read_memory=read))
    await start(pool)
    assert "template not built: no claims" in pool.statistics().problem
    await world.clock.advance(1.0)
    assert idle_count(pool) == 1


async def test_an_unreachable_hypervisor_does_not_condemn_a_stored_template(world: PoolWorld) -> None:
    pool = await world.started("one", capacity=1)
    await pool.close()
    world.hypervisor.errors["fork"] = [HypervisorUnavailable("libvirt cannot be reached", retry_after_s=5.0)]
    pool = await world.started("other", capacity=1)
    assert "libvirt cannot be reached" in pool.statistics().problem
    await world.clock.advance(1.0)
    assert idle_count(pool) == 1
    assert world.hypervisor.counts["create"] == 1, "the stored one is used"


async def test_a_guest_that_does_not_become_ready_leaves_no_machine_behind(world: PoolWorld) -> None:
    world.hypervisor.ready_gate.clear()
    pool = await world.started(capacity=1)
    world.hypervisor.made[0].die("QEMU was killed by signal 9")
    await run_ready()
    assert world.hypervisor.machines == {}
    assert "QEMU was killed by signal 9" in pool.statistics().problem
    world.hypervisor.ready_gate.set()
    await world.clock.advance(1.0)
    assert idle_count(pool) == 1


async def test_draining_cancels_the_template_boot_and_refuses_all_groups(world: PoolWorld) -> None:
    world.hypervisor.ready_gate.clear()
    pool = await world.started()
    waiter = await begun(pool.acquire(1, timeout_s=60.0))
    pool.drain()
    await run_ready()
    assert world.hypervisor.machines == {}
    with pytest.raises(Draining):
        await waiter
    world.hypervisor.ready_gate.set()
    await world.clock.advance(600.0)
    assert world.hypervisor.counts["create"] == 1, "nothing more is booted"


async def test_draining_during_the_test_of_a_stored_template_keeps_the_template(
    world: PoolWorld, caplog: pytest.LogCaptureFixture
) -> None:
    first = await world.started()
    await first.close()
    world.hypervisor.gates["fork"].clear()
    second = await world.started()
    assert second.statistics().starting_count == 1
    second.drain()
    await run_ready()
    assert (world.hypervisor.machines, world.hypervisor.counts["create"]) == ({}, 1)
    assert caplog.records == [] or max(record.levelno for record in caplog.records) < logging.WARNING


@pytest.mark.parametrize("gate", ["find_template", "create", "freeze", "fork"])
async def test_closing_ends_a_template_build_at_any_stage(
    world: PoolWorld, gate: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.hypervisor.gates[gate].clear()
    pool = await world.started()
    await pool.close()
    assert world.hypervisor.machines == {}
    assert all(snapshot.discarded for snapshot in world.hypervisor.snapshots)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_template_whose_boot_used_all_of_its_time_makes_the_pool_refuse_groups_at_once(
    world: PoolWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def never_ready(_: StubDesktop, *, timeout_s: float) -> None:
        await world.clock.sleep(timeout_s)
        raise GuestUnresponsive("its session did not come up")

    pool = world.make(capacity=1, boot_timeout_s=300.0)
    with monkeypatch.context() as patch:
        patch.setattr(StubDesktop, "wait_ready", never_ready)
        await start(pool)
        waiting = await begun(pool.acquire(1, timeout_s=3600.0))
        await world.clock.advance(300.0)
        with pytest.raises(PoolFailing, match="its session did not come up"):
            await waiting
        assert pool.statistics().breaker is not BreakerState.CLOSED
        assert pool.statistics().problem.startswith("1 failure, so resets are refused until a machine starts")
        assert [r.levelname for r in caplog.records if "FAILING: no machine starts" in r.message] == ["ERROR"]
    await world.clock.advance(1.0)
    assert idle_count(pool) == 1
    assert pool.statistics().breaker is BreakerState.CLOSED
    assert "a machine has started; resets are served again" in caplog.text


async def test_a_removed_template_is_rebuilt_when_a_fork_of_it_fails(
    world: PoolWorld, caplog: pytest.LogCaptureFixture
) -> None:
    pool = await world.started()
    old = template_of(pool)
    admission = await pool.acquire(1, timeout_s=1.0)
    world.hypervisor.stored.clear()
    world.hypervisor.removed.add(old)
    world.hypervisor.ready_gate.clear()
    await run_ready()
    world.hypervisor.made[-1].die("killed")
    await world.clock.advance(1.0)
    assert "the template was removed; creating another one" in pool.statistics().problem
    assert template_of(pool) == ""
    assert not admission.machines[0].lost.is_set(), "leased machines stay"
    world.hypervisor.ready_gate.set()
    await run_ready()
    assert template_of(pool) not in {"", old}
    assert (idle_count(pool), pool.statistics().problem) == (1, "")
    assert ["the template was removed" in r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == [True]
    await pool.release(admission.machines)
    await run_ready()
    assert [machine.snapshot.digest for machine in world.hypervisor.machines.values() if machine.snapshot] == [
        template_of(pool)
    ] * 2


async def test_a_removed_template_is_noticed_without_forks_and_rebuilt_once_for_all_pools(world: PoolWorld) -> None:
    one, other = world.make("one"), world.make("other")
    await start(one, other)
    old = template_of(one)
    world.hypervisor.stored.clear()
    world.hypervisor.removed.add(old)
    await world.clock.advance(one.settings.measure_interval_s)
    await world.clock.advance(1.0)
    assert one.template is other.template
    assert template_of(one) not in {"", old}
    assert (idle_count(one), idle_count(other), world.hypervisor.counts["create"]) == (2, 2, 2)
    assert [snapshot.discarded for snapshot in world.hypervisor.snapshots if snapshot.digest == old] == [True]


async def test_a_full_pool_rebuilds_its_template_once_there_is_room(world: PoolWorld) -> None:
    pool = await world.started(capacity=1)
    admission = await pool.acquire(1, timeout_s=1.0)
    world.hypervisor.stored.clear()
    world.hypervisor.removed.add(template_of(pool))
    await world.clock.advance(pool.settings.measure_interval_s)
    assert (template_of(pool), world.hypervisor.counts["create"], len(world.hypervisor.machines)) == ("", 1, 1)
    await pool.release(admission.machines)
    await run_ready()
    assert template_of(pool)
    assert (idle_count(pool), world.hypervisor.peak_count) == (1, 1)
