"""Guests run during calls that need it, and are paused while an agent thinks."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from envd.base.config import SettlePolicy
from envd.base.errors import GuestError, GuestUnresponsive, LossUndecided, MachineLost
from envd.desktop.observation import A11yFormat, Encoding, ObservationOptions
from envd.episodes.progress import EpisodeState
from envd.episodes.service import EpisodeService
from envd.hypervisor.machine import MachineState
from tests.support.clock import begun, run_ready
from tests.support.episode_world import NO_PIXELS, PLAIN, TASK, World, running_world

WITH_TREE = ObservationOptions(encoding=Encoding.NONE, a11y_format=A11yFormat.OSWORLD_XML)
WITH_TERMINAL = ObservationOptions(encoding=Encoding.NONE, include_terminal=True)


async def test_a_machine_runs_only_during_steps(world: World) -> None:
    episode_id = await world.open(task_id=PLAIN.task_id)
    machine, desktop = world.machine(episode_id), world.desktop(episode_id)
    states = [machine.state]
    for index in range(2):
        desktop.gates["act"].clear()
        step = await begun(world.service.step(world.step_command(episode_id, index)))
        states.append(machine.state)
        desktop.gates["act"].set()
        assert "resume" in (await step).timings_ms
        states.append(machine.state)
    still, runs = MachineState.PAUSED, MachineState.RUNNING
    assert states == [still, runs, still, runs, still]
    assert machine.calls == ["resume", "pause"] * 2
    assert desktop.calls.count("wake") == 1


@pytest.mark.parametrize(
    ("options", "refresh", "settle", "resumes"),
    [
        (NO_PIXELS, False, None, False),
        (NO_PIXELS, True, None, True),
        (NO_PIXELS, False, SettlePolicy(), True),
        (WITH_TREE, False, None, True),
        (WITH_TERMINAL, False, None, True),
    ],
    ids=["plain", "refresh", "settle", "tree", "terminal"],
)
async def test_only_an_observe_that_needs_the_guest_resumes_it(
    world: World, options: ObservationOptions, refresh: bool, settle: SettlePolicy | None, resumes: bool
) -> None:
    episode_id = await world.open(task_id=PLAIN.task_id)
    observation = await world.service.observe(episode_id, options, refresh=refresh, settle=settle)
    assert ("resume" in observation.timings_ms) is resumes
    await run_ready()
    assert world.machine(episode_id).calls == ["resume", "pause"] * resumes
    assert world.desktop(episode_id).is_asleep is not resumes


async def test_checkers_and_guest_access_resume_the_guest(world: World) -> None:
    episode_id = await world.open(task_id=PLAIN.task_id)
    machine = world.machine(episode_id)
    for call in (
        world.service.write_file(episode_id, "/a", b"x"),
        world.service.read_file(episode_id, "/a", max_bytes=1),
        world.service.run_command(episode_id, ["true"], timeout_s=60.0),
        world.service.evaluate(episode_id, request_id="e", fingerprint=b""),
    ):
        await call
        await run_ready()
        assert machine.calls == ["resume", "pause"]
        assert machine.state is MachineState.PAUSED
        machine.calls.clear()


async def test_an_observe_during_a_step_neither_pauses_it_nor_is_paused(world: World, episode_id: str) -> None:
    machine, desktop = world.machine(episode_id), world.desktop(episode_id)
    machine.calls.clear()
    desktop.gates["act"].clear()
    desktop.gates["observe"].clear()
    step = asyncio.create_task(world.service.step(world.step_command(episode_id, 0)))
    look = await begun(world.service.observe(episode_id, WITH_TREE))
    desktop.gates["act"].set()
    await run_ready()
    assert machine.state is MachineState.RUNNING
    desktop.gates["observe"].set()
    await asyncio.gather(step, look)
    assert machine.calls == ["resume", "pause"]


async def test_a_cancelled_observe_leaves_the_machine_paused(world: World, episode_id: str) -> None:
    world.desktop(episode_id).gates["observe"].clear()
    look = await begun(world.service.observe(episode_id, WITH_TREE))
    assert world.machine(episode_id).state is MachineState.RUNNING
    look.cancel()
    await run_ready()
    assert world.machine(episode_id).state is MachineState.PAUSED


async def test_a_failed_step_leaves_the_machine_paused_until_it_is_destroyed(world: World, episode_id: str) -> None:
    machine = world.machine(episode_id)
    world.hypervisor.destroy_gate.clear()
    world.desktop(episode_id).errors["settle"] = GuestUnresponsive("no update within 30 s")
    with pytest.raises(LossUndecided):
        await world.service.step(world.step_command(episode_id, 0))
    assert machine.state is MachineState.PAUSED
    world.hypervisor.destroy_gate.set()


# -- guests that do not resume ---------------------------------------------------------------------------------


async def test_a_guest_that_does_not_resume_for_a_step_voids_the_episode(world: World) -> None:
    episode_id = await world.open(task_id=PLAIN.task_id)
    world.desktop(episode_id).errors["wake"] = GuestUnresponsive("no answer within 30 s")
    with pytest.raises(GuestUnresponsive):
        await world.service.step(world.step_command(episode_id, 0))
    assert world.state(episode_id) == (EpisodeState.FAILED, "GUEST_UNRESPONSIVE")


@pytest.mark.parametrize(
    "call",
    [
        lambda service, episode_id: service.observe(episode_id, WITH_TREE),
        lambda service, episode_id: service.read_file(episode_id, "/a", max_bytes=1),
        lambda service, episode_id: service.evaluate(episode_id, request_id="e", fingerprint=b""),
    ],
    ids=["observe", "read_file", "evaluate"],
)
async def test_a_guest_that_does_not_resume_for_another_call_voids_the_episode(
    world: World, call: Callable[[EpisodeService, str], Awaitable[object]]
) -> None:
    episode_id = await world.open(task_id=PLAIN.task_id)
    # A guest error in these calls normally leaves the episode unharmed; a failed resume must not be treated like that.
    world.desktop(episode_id).errors["wake"] = GuestError("date: no such command")
    with pytest.raises(MachineLost, match="GUEST_ERROR: date: no such command"):
        await call(world.service, episode_id)
    assert world.state(episode_id) == (EpisodeState.FAILED, "GUEST_ERROR")
    assert world.tasks.checks == 0


# -- pools whose guests always run ------------------------------------------------------------------------------


@pytest.mark.parametrize("task_id", [PLAIN.task_id, TASK.task_id])
async def test_with_always_running_guests_run_from_the_reset_on(task_id: str) -> None:
    async with running_world(always_running=True) as world:
        result = await world.reset(task_id=task_id, group_size=2)
        (copy,) = (await world.fork(result.episodes[0].episode_id)).episodes
        machines = [world.machine(info.episode_id) for info in (*result.episodes, copy)]
        assert [machine.state for machine in machines] == [MachineState.RUNNING] * 3
        timings_ms = (await world.service.step(world.step_command(copy.episode_id, 0))).timings_ms
        assert "resume" not in timings_ms
        assert machines[2].state is MachineState.RUNNING
        (pool,) = world.service.list_pools()
        assert pool.always_running
        await run_ready()
        world.check_no_leaks()
