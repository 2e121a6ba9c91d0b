"""Templates: booted once, tested, stored, shared, and rebuilt if they are wrong."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from envd.base.errors import Draining, GuestUnresponsive, HypervisorError, HypervisorUnavailable, PoolExhausted
from envd.pool.pool import Pool
from envd.pool.settings import PoolSettings
from envd.pool.template import TemplateCache
from tests.support.clock import ManualClock, run_ready
from tests.support.stubs import IMAGE, StubDesktop, StubHypervisor

MakePool = Callable[..., Pool]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def hypervisor() -> StubHypervisor:
    return StubHypervisor()


@pytest.fixture
def templates(hypervisor: StubHypervisor) -> TemplateCache:
    return TemplateCache(hypervisor)


@pytest.fixture
async def make_pool(
    clock: ManualClock, hypervisor: StubHypervisor, templates: TemplateCache
) -> AsyncIterator[MakePool]:
    async with AsyncExitStack() as stack:

        def make(name: str = "desktop", *, capacity: int = 2, memory_mib: int = 1024) -> Pool:
            settings = PoolSettings(
                name=name, capacity=capacity, size=capacity, max_starting=capacity, memory_mib=memory_mib
            )
            pool = Pool(
                settings,
                hypervisor=hypervisor,
                image=IMAGE,
                templates=templates,
                make_desktop=hypervisor.desktop,
                clock=clock,
            )
            stack.push_async_callback(pool.close)
            return pool

        yield make
    assert hypervisor.machines == {}, "a closed pool leaves nothing"
    assert all(snapshot.discarded for snapshot in hypervisor.snapshots), "closed pools discard their templates"


async def started(*pools: Pool) -> None:
    for pool in pools:
        await pool.start()
    for _ in range(3):
        await run_ready()


def template_of(pool: Pool) -> str:
    """Return the template's digest; empty while there is none."""
    return pool.statistics().template_digest


def idle_count(pool: Pool) -> int:
    return pool.statistics().idle_count


async def test_a_template_is_booted_once_and_its_test_fork_is_the_first_machine(
    make_pool: MakePool, hypervisor: StubHypervisor
) -> None:
    pool = make_pool()
    await started(pool)
    assert (hypervisor.counts["create"], hypervisor.counts["freeze"], hypervisor.counts["fork"]) == (1, 1, 2)
    assert idle_count(pool) == 2
    assert pool.template is not None
    assert pool.statistics().template_digest == pool.template.snapshot.digest
    granted = await pool.lease(2, timeout_s=1.0)
    assert {machine.frozen for machine in granted.machines} == {pool.template}
    assert all(machine.desktop.is_asleep for machine in granted.machines), "the test fork too"
    assert hypervisor.peak_count == 2


async def test_building_a_template_stays_within_capacity(make_pool: MakePool) -> None:
    pool = make_pool(capacity=1)
    most = 0

    def count() -> None:
        nonlocal most
        s = pool.statistics()
        most = max(most, s.idle_count + s.starting_count + s.dying_count)

    pool.changes.listen(count)
    await started(pool)
    assert (idle_count(pool), most) == (1, 1)


async def test_leases_wait_and_nothing_is_forked_while_the_template_boots(
    make_pool: MakePool, hypervisor: StubHypervisor
) -> None:
    hypervisor.ready_gate.clear()
    pool = make_pool()
    await started(pool)
    waiting = asyncio.create_task(pool.lease(1, timeout_s=60.0))
    reserving = asyncio.create_task(pool.lease(0, reserved=2, timeout_s=60.0))
    await run_ready()
    assert not waiting.done()
    assert not reserving.done(), "the booting machine counts against capacity"
    assert (pool.statistics().starting_count, hypervisor.counts["fork"]) == (1, 0)
    hypervisor.ready_gate.set()
    granted = await waiting
    await pool.release(granted.machines)
    assert len((await reserving).reservations) == 2
    assert hypervisor.peak_count <= 2


async def test_equal_pools_share_one_template(make_pool: MakePool, hypervisor: StubHypervisor) -> None:
    one, other = make_pool("one"), make_pool("other")
    await started(one, other)
    assert hypervisor.counts["create"] == 1
    assert hypervisor.counts["find_template"] == 1
    assert (idle_count(one), idle_count(other)) == (2, 2)
    assert one.template is other.template
    await one.close()
    assert not hypervisor.snapshots[0].discarded, "the other still forks from it"
    await other.close()
    assert hypervisor.snapshots[0].discarded


async def test_pools_that_differ_have_a_template_each(make_pool: MakePool, hypervisor: StubHypervisor) -> None:
    one, other = make_pool("one"), make_pool("other", memory_mib=2048)
    await started(one, other)
    assert hypervisor.counts["create"] == 2
    assert one.template is not other.template


async def test_another_pool_builds_the_template_when_the_first_one_closes(
    make_pool: MakePool, hypervisor: StubHypervisor
) -> None:
    hypervisor.ready_gate.clear()
    one, other = make_pool("one"), make_pool("other")
    await started(one, other)
    await one.close()
    hypervisor.ready_gate.set()
    await run_ready()
    await run_ready()
    assert idle_count(other) == 2


async def test_a_stored_template_is_tested_and_reused(make_pool: MakePool, hypervisor: StubHypervisor) -> None:
    first = make_pool()
    await started(first)
    await first.close()
    (stored,) = hypervisor.stored.values()
    second = make_pool()
    await started(second)
    assert hypervisor.counts["create"] == 1
    assert idle_count(second) == 2
    assert second.template is not None
    assert second.template.snapshot.digest == stored.digest
    assert second.statistics().template_boot_total == 0


async def test_state_that_a_connection_cannot_discover_is_stored_with_the_template(
    make_pool: MakePool, hypervisor: StubHypervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = StubDesktop.view
    types, home = False, "/home/agent"

    async def view_with_home(desktop: StubDesktop) -> object:
        view = await look(desktop)
        return replace(view, guestd_types=types, home=home)

    monkeypatch.setattr(StubDesktop, "view", view_with_home)
    first = make_pool()
    await started(first)
    await first.close()
    types, home = True, ""
    second = make_pool()
    await started(second)
    assert second.template is not None
    assert (second.template.view.guestd_types, second.template.view.home) == (False, "/home/agent")


async def test_a_corrupt_template_is_an_error_and_a_new_one_is_booted(
    make_pool: MakePool, hypervisor: StubHypervisor, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_pool()
    await started(first)
    await first.close()
    hypervisor.corrupt.update(hypervisor.stored)
    second = make_pool()
    await started(second)
    assert hypervisor.counts["create"] == 2
    assert idle_count(second) == 2
    assert second.statistics().healthy
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "memory is not what was stored" in record.getMessage()


async def test_a_stored_template_that_shows_another_frame_is_never_used(
    make_pool: MakePool, hypervisor: StubHypervisor, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_pool()
    await started(first)
    await first.close()
    (stored,) = hypervisor.stored.values()
    stored.frame_id = "something else"
    second = make_pool()
    await started(second)
    assert hypervisor.counts["create"] == 2
    assert second.template is not None
    assert second.template.snapshot.digest != stored.digest
    assert [snapshot.discarded for snapshot in hypervisor.snapshots] == [True, True, False]
    assert {machine.snapshot for machine in hypervisor.machines.values()} == {second.template.snapshot}
    assert any("shows frame something else" in r.getMessage() for r in caplog.records if r.levelname == "ERROR")


async def test_a_new_template_that_shows_another_frame_is_retried_later(
    make_pool: MakePool, hypervisor: StubHypervisor, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze = hypervisor.freeze

    async def spoil(*args: object, **kwargs: object) -> object:
        snapshot = await freeze(*args, **kwargs)  # type: ignore[arg-type]
        snapshot.frame_id = "garbage"
        return snapshot

    pool = make_pool()
    with monkeypatch.context() as patch:
        patch.setattr(hypervisor, "freeze", spoil)
        await started(pool)
    assert "shows frame garbage" in pool.statistics().problem
    assert hypervisor.machines == {}
    hypervisor.stored.clear()
    await clock.advance(1.0)
    assert idle_count(pool) == 2
    assert pool.statistics().healthy


@pytest.mark.parametrize("method", ["create", "freeze", "fork", "find_template"])
async def test_building_a_template_is_retried_with_growing_pauses(
    make_pool: MakePool, hypervisor: StubHypervisor, clock: ManualClock, method: str
) -> None:
    # An error of a stored template is not a failure of the pool; an unexpected error is.
    error = OSError("no space left") if method == "find_template" else HypervisorError("no space left")
    hypervisor.errors[method] = [error] * 2
    pool = make_pool(capacity=1)
    await started(pool)
    if method == "fork":  # the frozen template is stored, fails its test, and a new one is booted
        hypervisor.stored.clear()
    assert "template not built: no space left" in pool.statistics().problem
    assert not pool.statistics().healthy
    assert hypervisor.machines == {}
    waiter = asyncio.create_task(pool.lease(1, timeout_s=1.5))
    await clock.advance(1.0)
    assert pool.statistics().idle_count == 0
    if method == "fork":
        hypervisor.stored.clear()
    await clock.advance(0.5)
    with pytest.raises(PoolExhausted, match="template not built: no space left"):
        await waiter
    await clock.advance(1.5)
    assert idle_count(pool) == 1
    assert pool.statistics().healthy


async def test_an_unreachable_hypervisor_does_not_condemn_a_stored_template(
    make_pool: MakePool, hypervisor: StubHypervisor, clock: ManualClock
) -> None:
    pool = make_pool("one", capacity=1)
    await started(pool)
    await pool.close()
    hypervisor.errors["fork"] = [HypervisorUnavailable("libvirt cannot be reached", retry_after_s=5.0)]
    pool = make_pool("other", capacity=1)
    await started(pool)
    assert "libvirt cannot be reached" in pool.statistics().problem
    await clock.advance(1.0)
    assert idle_count(pool) == 1
    assert hypervisor.counts["create"] == 1, "the stored one is used"


async def test_a_guest_that_does_not_become_ready_leaves_no_machine_behind(
    make_pool: MakePool, hypervisor: StubHypervisor, clock: ManualClock
) -> None:
    hypervisor.ready_gate.clear()
    pool = make_pool(capacity=1)
    await started(pool)
    hypervisor.made[0].die("QEMU was killed by signal 9")
    await run_ready()
    assert hypervisor.machines == {}
    assert "QEMU was killed by signal 9" in pool.statistics().problem
    hypervisor.ready_gate.set()
    await clock.advance(1.0)
    assert idle_count(pool) == 1


async def test_draining_cancels_the_template_boot_and_refuses_all_groups(
    make_pool: MakePool, hypervisor: StubHypervisor, clock: ManualClock
) -> None:
    hypervisor.ready_gate.clear()
    pool = make_pool()
    await started(pool)
    waiter = asyncio.create_task(pool.lease(1, timeout_s=60.0))
    await run_ready()
    pool.drain()
    await run_ready()
    assert hypervisor.machines == {}
    with pytest.raises(Draining):
        await waiter
    hypervisor.ready_gate.set()
    await clock.advance(600.0)
    assert hypervisor.counts["create"] == 1, "nothing more is booted"


async def test_draining_during_the_test_of_a_stored_template_keeps_the_template(
    make_pool: MakePool, hypervisor: StubHypervisor, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_pool()
    await started(first)
    await first.close()
    hypervisor.gates["fork"].clear()
    second = make_pool()
    await started(second)
    assert second.statistics().starting_count == 1
    second.drain()
    await run_ready()
    assert (hypervisor.machines, hypervisor.counts["create"]) == ({}, 1)
    assert caplog.records == [] or max(record.levelno for record in caplog.records) < logging.WARNING


@pytest.mark.parametrize("gate", ["find_template", "create", "freeze", "fork"])
async def test_closing_ends_a_template_build_at_any_stage(
    make_pool: MakePool, hypervisor: StubHypervisor, gate: str, caplog: pytest.LogCaptureFixture
) -> None:
    hypervisor.gates[gate].clear()
    pool = make_pool()
    await started(pool)
    await pool.close()
    assert hypervisor.machines == {}
    assert all(snapshot.discarded for snapshot in hypervisor.snapshots)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_closing_during_the_test_of_a_template_leaves_nothing(
    make_pool: MakePool, hypervisor: StubHypervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def silent(desktop: StubDesktop) -> object:
        if desktop.machine.snapshot is not None:
            await asyncio.Event().wait()
        return await StubDesktop.view(desktop)

    look = StubDesktop.view
    monkeypatch.setattr(
        StubDesktop, "view", lambda desktop: silent(desktop) if desktop.machine.snapshot else look(desktop)
    )
    pool = make_pool()
    await started(pool)
    assert [machine.snapshot is not None for machine in hypervisor.machines.values()] == [True]
    await pool.close()
    assert hypervisor.machines == {}
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_display_that_fails_in_the_template_test_causes_a_new_boot(
    make_pool: MakePool, hypervisor: StubHypervisor, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(desktop: StubDesktop) -> object:
        raise GuestUnresponsive(f"the display of {desktop.machine.machine_id} does not answer")

    pool = make_pool(capacity=1)
    with monkeypatch.context() as patch:
        patch.setattr(StubDesktop, "view", silent)
        await started(pool)
    assert "does not answer" in pool.statistics().problem
    assert hypervisor.machines == {}
    await clock.advance(1.0)
    assert idle_count(pool) == 1


async def test_a_removed_template_is_rebuilt_when_a_fork_of_it_fails(
    make_pool: MakePool, hypervisor: StubHypervisor, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool()
    await started(pool)
    old = template_of(pool)
    granted = await pool.lease(1, timeout_s=1.0)
    hypervisor.stored.clear()
    hypervisor.removed.add(old)
    hypervisor.ready_gate.clear()
    await run_ready()
    hypervisor.made[-1].die("killed")
    await clock.advance(1.0)
    assert "the template was removed; creating another one" in pool.statistics().problem
    assert template_of(pool) == ""
    assert not granted.machines[0].lost.is_set(), "leased machines stay"
    hypervisor.ready_gate.set()
    await run_ready()
    assert template_of(pool) not in {"", old}
    assert (idle_count(pool), pool.statistics().problem) == (1, "")
    assert ["the template was removed" in r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == [True]
    await pool.release(granted.machines)
    await run_ready()
    assert [machine.snapshot.digest for machine in hypervisor.machines.values() if machine.snapshot] == [
        template_of(pool)
    ] * 2


async def test_a_removed_template_is_noticed_without_forks_and_rebuilt_once_for_all_pools(
    make_pool: MakePool, hypervisor: StubHypervisor, clock: ManualClock
) -> None:
    one, other = make_pool("one"), make_pool("other")
    await started(one, other)
    old = template_of(one)
    hypervisor.stored.clear()
    hypervisor.removed.add(old)
    await clock.advance(one.settings.measure_interval_s)
    await clock.advance(1.0)
    assert one.template is other.template
    assert template_of(one) not in {"", old}
    assert (idle_count(one), idle_count(other), hypervisor.counts["create"]) == (2, 2, 2)
    assert [snapshot.discarded for snapshot in hypervisor.snapshots if snapshot.digest == old] == [True]


async def test_a_full_pool_rebuilds_its_template_once_there_is_room(
    make_pool: MakePool, hypervisor: StubHypervisor, clock: ManualClock
) -> None:
    pool = make_pool(capacity=1)
    await started(pool)
    granted = await pool.lease(1, timeout_s=1.0)
    hypervisor.stored.clear()
    hypervisor.removed.add(template_of(pool))
    await clock.advance(pool.settings.measure_interval_s)
    assert (template_of(pool), hypervisor.counts["create"], len(hypervisor.machines)) == ("", 1, 1)
    await pool.release(granted.machines)
    await run_ready()
    assert template_of(pool)
    assert (idle_count(pool), hypervisor.peak_count) == (1, 1)
