"""When a leased machine's guest runs, and when it is paused."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta

import pytest

from cuaenv.actions import Wait
from envd.base.errors import GuestError, GuestUnresponsive, HypervisorError, MachineLost, NotForkable
from envd.hypervisor.machine import Firmware, GuestOs, MachineSpec
from envd.pool.leased import FrozenDesktop, LeasedMachine, freeze
from tests.support.clock import begun, cancelled_after, run_ready, run_turns
from tests.support.stubs import IMAGE, StubDesktop, StubHypervisor, StubMachine, StubSnapshot, blank_view

WAIT = Wait(timedelta(seconds=0.0))


@pytest.fixture
def hypervisor() -> StubHypervisor:
    return StubHypervisor()


@pytest.fixture
async def machine(hypervisor: StubHypervisor) -> StubMachine:
    spec = MachineSpec(machine_id="template", image=IMAGE)
    return await hypervisor.fork(StubSnapshot(spec, frame_id="frozen", notes={}, hypervisor=hypervisor), "fork")


def lease(
    machine: StubMachine, hypervisor: StubHypervisor, *, always_running: bool = False, linger_s: float = 0.0
) -> LeasedMachine:
    view = blank_view(64, 48, frame_id="frozen")
    assert machine.snapshot is not None
    return LeasedMachine(
        machine=machine,
        desktop=hypervisor.desktop(machine, view=view),
        frozen=FrozenDesktop(snapshot=machine.snapshot, view=view),
        always_running=always_running,
        linger_s=linger_s,
    )


@pytest.fixture
def leased(machine: StubMachine, hypervisor: StubHypervisor) -> LeasedMachine:
    return lease(machine, hypervisor)


def desktop_of(leased: LeasedMachine) -> StubDesktop:
    assert isinstance(leased.desktop, StubDesktop)
    return leased.desktop


async def use(leased: LeasedMachine) -> None:
    async with leased.running():
        pass


def runs(machine: StubMachine) -> bool:
    return not machine.paused


def asleep(leased: LeasedMachine) -> bool:
    return leased.desktop.is_asleep


async def test_a_guest_runs_only_inside_the_block_and_wakes_once(leased: LeasedMachine, machine: StubMachine) -> None:
    assert asleep(leased)
    for _ in range(2):
        async with leased.running() as resume_ms:
            assert runs(machine)
            assert not asleep(leased)
            assert resume_ms > 0
        await run_ready()
        assert not runs(machine)
    assert desktop_of(leased).calls == ["wake"]
    assert machine.calls == ["resume", "pause"] * 2


@pytest.mark.parametrize(("firmware", "wake"), [(Firmware.UEFI, "wake windows"), (Firmware.DIRECT_KERNEL, "wake")])
async def test_a_desktop_wakes_by_its_kernel_whatever_system_tasks_find(
    hypervisor: StubHypervisor, firmware: Firmware, wake: str
) -> None:
    spec = MachineSpec(machine_id="template", image=replace(IMAGE, os=GuestOs.WINDOWS, firmware=firmware))
    machine = await hypervisor.fork(StubSnapshot(spec, frame_id="frozen", notes={}, hypervisor=hypervisor), "fork")
    leased = lease(machine, hypervisor)
    async with leased.running():
        assert desktop_of(leased).calls == [wake]


async def test_a_guest_used_again_at_once_keeps_running(machine: StubMachine, hypervisor: StubHypervisor) -> None:
    leased = lease(machine, hypervisor, linger_s=2.0)
    for _ in range(3):
        await use(leased)
        await run_ready()
        assert runs(machine)
    async with asyncio.timeout(60):
        while runs(machine):
            await asyncio.sleep(0.01)
    assert machine.calls == ["resume", "pause"]


async def test_a_running_guest_is_paused_on_demand(machine: StubMachine, hypervisor: StubHypervisor) -> None:
    leased = lease(machine, hypervisor, linger_s=3600.0)
    await use(leased)
    async with leased.paused():
        assert not runs(machine)
    assert not runs(machine)
    await leased._pausing.cancel()


async def test_nested_uses_resume_and_pause_once(leased: LeasedMachine, machine: StubMachine) -> None:
    async with leased.running():
        async with leased.running() as resume_ms:
            assert resume_ms == 0
        assert runs(machine)
    await run_ready()
    assert machine.calls == ["resume", "pause"]


async def test_concurrent_users_share_one_wake_and_the_last_one_pauses(
    leased: LeasedMachine, machine: StubMachine
) -> None:
    desktop = desktop_of(leased)
    desktop.gates["wake"].clear()
    inside = 0

    async def use(turns: int) -> None:
        nonlocal inside
        async with leased.running():
            inside += 1
            await desktop.act(WAIT)
            await run_turns(turns)
            assert runs(machine)

    users = [asyncio.create_task(use(turns)) for turns in (1, 20, 40)]
    await run_ready()
    assert inside == 0, "no user enters before the guest is awake"
    desktop.gates["wake"].set()
    await asyncio.gather(*users)
    assert not runs(machine)
    assert desktop.calls.count("wake") == 1
    assert machine.calls == ["resume", "pause"]


async def test_a_user_who_arrives_while_the_last_one_leaves_finds_the_guest_running(
    leased: LeasedMachine, machine: StubMachine
) -> None:
    for turns in range(12):
        await use(leased)

        async def act_after(turns: int) -> None:
            await run_turns(turns)
            async with leased.running():
                await leased.desktop.act(WAIT)

        await asyncio.gather(act_after(0), act_after(turns))
        assert not runs(machine), f"{turns} turns apart"


async def test_an_always_running_machine_is_paused_only_until_its_first_use(
    machine: StubMachine, hypervisor: StubHypervisor
) -> None:
    leased = lease(machine, hypervisor, always_running=True)
    assert not runs(machine)
    await use(leased)
    assert machine.calls == ["resume"]
    async with leased.running() as resume_ms:
        assert resume_ms == 0
    assert machine.calls == ["resume"]


@pytest.mark.parametrize("always_running", [False, True])
@pytest.mark.parametrize("error", [GuestUnresponsive("no answer within 30 s"), GuestError("exit 1")])
async def test_a_desktop_that_does_not_wake_up_fails_every_use(
    machine: StubMachine, hypervisor: StubHypervisor, error: Exception, always_running: bool
) -> None:
    leased = lease(machine, hypervisor, always_running=always_running)
    desktop_of(leased).errors["wake"] = error
    with pytest.raises(type(error), match=str(error)):
        await use(leased)
    await run_ready()
    assert not runs(machine)
    with pytest.raises(GuestUnresponsive, match=f"did not wake up before: {error}"):
        await use(leased)
    assert desktop_of(leased).calls == ["wake"]


async def test_the_next_user_repeats_a_cancelled_wake(leased: LeasedMachine, machine: StubMachine) -> None:
    desktop = desktop_of(leased)
    desktop.gates["wake"].clear()
    user = await begun(use(leased))
    user.cancel()
    await asyncio.gather(user, return_exceptions=True)
    assert user.cancelled()
    assert not runs(machine)
    desktop.gates["wake"].set()
    await use(leased)
    assert not asleep(leased)


async def test_a_user_cancelled_at_any_await_leaves_the_machine_paused(
    leased: LeasedMachine, machine: StubMachine
) -> None:
    async def use() -> None:
        async with leased.running():
            await asyncio.sleep(0)

    for turns in range(20):
        await cancelled_after(turns, use())
        assert not runs(machine), f"cancelled after {turns} iterations"
        assert repr(leased) == "<LeasedMachine fork paused | 0 users>"


async def test_only_the_next_user_waits_for_the_pause(leased: LeasedMachine, machine: StubMachine) -> None:
    machine.pause_gate.clear()
    await use(leased)
    await run_ready()
    assert machine.calls == ["resume", "pause"]
    async with AsyncExitStack() as stack:
        entering = await begun(stack.enter_async_context(leased.running()))
        assert not entering.done(), "it is paused first"
        machine.pause_gate.set()
        await entering
        assert runs(machine)


async def test_leaving_a_lost_machine_does_not_fail(leased: LeasedMachine, machine: StubMachine) -> None:
    async with leased.running():
        machine.die()
    with pytest.raises(MachineLost):
        await use(leased)


async def test_an_error_inside_the_block_is_raised_unchanged(leased: LeasedMachine, machine: StubMachine) -> None:
    async def use() -> None:
        async with leased.running():
            machine.die()
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        await use()


async def test_a_machine_that_cannot_be_paused_is_logged_and_its_result_kept(
    leased: LeasedMachine, machine: StubMachine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse() -> None:
        raise HypervisorError("the monitor does not answer")

    monkeypatch.setattr(machine, "pause", refuse)
    await use(leased)
    await run_ready()
    assert "machine fork: not paused after use" in caplog.text


# Freezing


async def test_machine_and_screen_are_frozen_at_one_instant(
    leased: LeasedMachine, machine: StubMachine, hypervisor: StubHypervisor
) -> None:
    hypervisor.gates["capture"].clear()
    async with leased.running():
        await leased.desktop.act(WAIT)
        freezing = await begun(freeze(leased, hypervisor=hypervisor))
        assert not runs(machine)
        hypervisor.gates["capture"].set()
        frozen = await freezing
        assert runs(machine), "it keeps running"
    assert frozen.view.frame.frame_id == "fork/1"
    assert isinstance(frozen.snapshot, StubSnapshot)
    assert frozen.snapshot.frame_id == "fork/1"


async def test_a_paused_machine_is_still_paused_after_freezing(
    leased: LeasedMachine, machine: StubMachine, hypervisor: StubHypervisor
) -> None:
    frozen = await freeze(leased, hypervisor=hypervisor)
    assert not runs(machine)
    assert "resume" not in machine.calls
    assert frozen.view is leased.frozen.view, "it has not run, so it shows its template's view"


async def test_a_machine_does_not_run_while_it_is_frozen(
    leased: LeasedMachine, machine: StubMachine, hypervisor: StubHypervisor
) -> None:
    hypervisor.gates["capture"].clear()
    freezing = await begun(freeze(leased, hypervisor=hypervisor))
    async with AsyncExitStack() as stack:
        entering = await begun(stack.enter_async_context(leased.running()))
        assert not runs(machine)
        assert not entering.done()
        hypervisor.gates["capture"].set()
        await freezing
        await entering
        assert runs(machine)
    await run_ready()
    assert machine.calls == ["pause", "resume", "pause"], "it is not resumed before it is woken"


async def test_a_failed_freeze_leaves_the_machine_unchanged(
    leased: LeasedMachine, machine: StubMachine, hypervisor: StubHypervisor
) -> None:
    hypervisor.errors["capture"] = [NotForkable("a second disk")]
    async with leased.running():
        with pytest.raises(NotForkable, match="a second disk"):
            await freeze(leased, hypervisor=hypervisor)
        assert runs(machine)
        await leased.desktop.act(WAIT)


async def test_a_freeze_cancelled_at_any_await_leaves_no_snapshot_and_the_machine_unchanged(
    leased: LeasedMachine, machine: StubMachine, hypervisor: StubHypervisor
) -> None:
    async with leased.running():
        for turns in range(20):
            freezing = await cancelled_after(turns, freeze(leased, hypervisor=hypervisor))
            assert runs(machine)
            if not freezing.cancelled():
                break
            assert all(snapshot.discarded for snapshot in hypervisor.snapshots[1:]), f"after {turns} iterations"
        else:
            pytest.fail("it never completed")
