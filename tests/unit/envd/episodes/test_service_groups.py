"""Groups start in one state: the template's, or the state after the task's setup, which runs once."""

import asyncio
from dataclasses import replace

import pytest

from cuaenv.region import Region
from envd.base.config import SettlePolicy
from envd.base.errors import (
    Draining,
    HypervisorError,
    HypervisorUnavailable,
    InvalidRequest,
    MachineLost,
    NotForkable,
    SetupFailed,
)
from envd.desktop.observation import A11yFormat, Encoding, Keyframe, ObservationOptions, SettleResult
from envd.drawn.backend import CAPABILITIES
from envd.episodes.progress import AutomaticCheckpoints
from envd.episodes.types import OpenedGroup
from envd.hypervisor.machine import MachineState
from envd.tasks.model import Task
from envd.tasks.perturbations import PerturbationDraw
from tests.support.clock import begun, run_ready, run_turns
from tests.support.episode_world import FROZEN, NO_PIXELS, PERTURBED, PLAIN, TASK, World, running_world
from tests.support.stubs import StubDesktop

WITH_TREE = ObservationOptions(encoding=Encoding.NONE, a11y_format=A11yFormat.OSWORLD_XML)


def check_that_all_began_alike(result: OpenedGroup) -> None:
    origins = {info.spec.origin for info in result.episodes}
    frames = {observation.frame.frame_id for observation in result.observations}
    assert len(origins) == 1
    assert frames == {origin.first_frame_id for origin in origins}


async def test_a_task_without_setup_starts_in_the_templates_state_and_no_guest_runs(world: World) -> None:
    result = await world.reset(task_id=PLAIN.task_id, group_size=3)
    check_that_all_began_alike(result)
    template = world.hypervisor.snapshots[0]
    assert result.episodes[0].spec.origin.template_digest == template.digest
    assert result.episodes[0].spec.origin.overlay_parent == template.disk_digest
    assert result.observations[0].settle is not None
    assert result.observations[0].settle.settled
    assert set(result.timings_ms) == {"acquire", "observe", "total"}
    assert world.tasks.setups == 0
    assert world.captured() == []
    for info in result.episodes:
        assert world.machine(info.episode_id).calls == [], "the guest has not run"
        assert world.desktop(info.episode_id).calls == []


async def test_a_frame_is_encoded_once_for_a_group(world: World) -> None:
    result = await world.reset(task_id=PLAIN.task_id, group_size=3, observe=ObservationOptions())
    frames = [observation.frame for observation in result.observations]
    assert isinstance(frames[0].content, Keyframe)
    assert frames[0].content.data.startswith(b"\x89PNG")
    assert all(frame is frames[0] for frame in frames)


async def test_a_setup_runs_once_for_a_group_and_all_start_in_the_resulting_state(world: World) -> None:
    result = await world.reset(group_size=3)
    check_that_all_began_alike(result)
    (state,) = world.captured()
    assert world.service.list_episodes() == list(result.episodes)
    assert len({info.spec.group_id for info in result.episodes}) == world.tasks.setups == 1
    assert result.observations[2].frame.frame_id == "start of suite/name, setup 1"
    assert result.episodes[0].spec.origin.template_digest == state.digest
    assert result.episodes[0].spec.origin.overlay_parent == state.disk_digest
    assert set(result.timings_ms) == {"acquire", "setup", "settle", "freeze", "fork", "observe", "total"}
    first, *others = [world.machine(info.episode_id) for info in result.episodes]
    assert first.snapshot is world.hypervisor.snapshots[0]
    assert all(machine.snapshot is state for machine in others)
    assert all(machine.calls == [] for machine in others), "none of the others has run"
    assert world.hypervisor.peak_count <= 3, "a group as large as the pool fits, although all machines were ready"
    await run_ready()
    assert state.discarded, "no more forks are made from it"


async def test_a_group_of_one_is_not_frozen_and_is_paused_when_observed(world: World) -> None:
    result = await world.reset()
    check_that_all_began_alike(result)
    assert world.captured() == []
    assert result.episodes[0].spec.origin.template_digest == world.hypervisor.snapshots[0].digest
    machine = world.machine(result.episodes[0].episode_id)
    assert (machine.state, machine.calls) == (MachineState.PAUSED, ["resume", "pause"])


@pytest.mark.parametrize("task", [PLAIN, TASK], ids=lambda task: task.task_id)
async def test_each_guest_is_queried_for_more_than_pixels_and_the_frame_is_shared(world: World, task: Task) -> None:
    result = await world.reset(task_id=task.task_id, group_size=2, observe=WITH_TREE)
    check_that_all_began_alike(result)
    for info in result.episodes:
        assert world.desktop(info.episode_id).calls[-1] == "observe"
        assert not world.desktop(info.episode_id).is_asleep
        assert world.machine(info.episode_id).state is MachineState.PAUSED


# -- cached states ---------------------------------------------------------------------------------------


async def test_the_start_of_a_task_with_freeze_setup_is_cached_and_setup_is_skipped(world: World) -> None:
    task_id = FROZEN[0].task_id
    first = await world.reset(task_id=task_id)
    await world.service.close(first.episodes[0].episode_id)
    second = await world.reset(task_id=task_id, group_size=3)
    check_that_all_began_alike(second)
    assert world.tasks.setups == 1
    assert len(world.captured()) == 1
    assert second.episodes[0].spec.origin == first.episodes[0].spec.origin
    assert second.observations[0].frame.frame_id == first.observations[0].frame.frame_id
    assert set(second.timings_ms) == {"acquire", "fork", "observe", "total"}
    assert second.observations[0].settle is not None
    assert second.observations[0].settle.settle_ms == 0.0


async def test_the_least_recently_used_start_is_evicted() -> None:
    async with running_world(task_templates=2) as world:
        for number in (0, 1, 0, 2):
            await world.service.close(await world.open(task_id=FROZEN[number].task_id))
        await run_ready()
        assert world.tasks.setups == 3
        assert [state.discarded for state in world.captured()] == [False, True, False]
        await world.open(task_id=FROZEN[0].task_id)
        assert world.tasks.setups == 3
        await world.open(task_id=FROZEN[1].task_id)
        assert world.tasks.setups == 4
        await run_ready()
        world.check_no_leaks()


async def test_an_evicted_start_is_discarded_after_its_last_fork() -> None:
    async with running_world(task_templates=1) as world:
        await world.service.close(await world.open(task_id=FROZEN[0].task_id))
        await run_ready()
        gate = world.hypervisor.gates["load"]
        gate.clear()
        forking = await begun(world.reset(task_id=FROZEN[0].task_id))
        del world.hypervisor.gates["load"]  # Later loads do not wait.
        await world.open(task_id=FROZEN[1].task_id)
        await run_ready()
        assert [state.discarded for state in world.captured()] == [False, False]
        gate.set()
        assert len((await forking).episodes) == 1
        await run_ready()
        assert [state.discarded for state in world.captured()] == [True, False]


async def test_no_start_is_cached_if_the_pool_disables_it() -> None:
    async with running_world(task_templates=0) as world:
        await world.open(task_id=FROZEN[0].task_id)
        await world.open(task_id=FROZEN[0].task_id)
        assert world.tasks.setups == 2
        assert world.captured() == []


async def test_two_concurrent_resets_cache_one_start(world: World) -> None:
    world.tasks.setup_gate.clear()
    resets = [asyncio.create_task(world.reset(task_id=FROZEN[0].task_id)) for _ in range(2)]
    await run_ready()
    world.tasks.setup_gate.set()
    await asyncio.gather(*resets)
    await run_ready()
    assert [state.discarded for state in world.captured()] == [False, True]


@pytest.mark.parametrize(
    ("method", "error", "is_evicted"),
    [
        ("load", HypervisorError("memory file is gone"), True),
        ("fork", HypervisorUnavailable("libvirt cannot be reached", retry_after_s=5.0), False),
    ],
)
async def test_a_cached_start_that_cannot_be_forked_is_evicted_unless_the_hypervisor_is_unreachable(
    world: World, method: str, error: Exception, is_evicted: bool
) -> None:
    await world.service.close(await world.open(task_id=FROZEN[0].task_id))
    await run_ready()
    command = world.reset_command(task_id=FROZEN[0].task_id, group_size=2)
    world.hypervisor.errors[method] = [error]
    with pytest.raises(type(error)):
        await world.service.reset(command)
    await run_ready()
    assert world.captured()[0].discarded is is_evicted
    world.check_no_leaks()
    await world.service.reset(command)
    assert world.tasks.setups == 1 + is_evicted


async def test_a_cached_start_whose_forks_die_is_evicted_and_the_setup_runs_again(world: World) -> None:
    await world.service.close(await world.open(task_id=FROZEN[0].task_id))
    await run_ready()
    world.hypervisor.errors["load"] = [MachineLost("QEMU died")]
    await world.open(task_id=FROZEN[0].task_id)
    assert world.tasks.setups == 2
    await run_ready()
    assert [state.discarded for state in world.captured()] == [True, False]


async def test_a_start_that_did_not_settle_is_not_cached(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def move_on(desktop: StubDesktop, policy: SettlePolicy) -> SettleResult:
        return SettleResult(settled=False, settle_ms=5000.0, change_count=9)

    monkeypatch.setattr(StubDesktop, "settle", move_on)
    result = await world.reset(task_id=FROZEN[0].task_id, group_size=2)
    assert [seen.settle and seen.settle.settled for seen in result.observations] == [False, False]
    await run_ready()
    assert world.captured()[0].discarded


# -- failures ---------------------------------------------------------------------------------------------------


async def test_a_state_that_cannot_be_frozen_keeps_nothing(world: World) -> None:
    world.hypervisor.errors["capture"] = [HypervisorError("no space left")]
    command = world.reset_command(group_size=3)
    with pytest.raises(HypervisorError, match="no space left"):
        await world.service.reset(command)
    await run_ready()
    world.check_no_leaks()
    assert world.metrics.recorded_failures == [("reset", "HYPERVISOR_ERROR")]
    assert len((await world.service.reset(command)).episodes) == 3


async def test_a_setup_whose_state_cannot_be_forked_is_a_failed_setup(world: World) -> None:
    world.hypervisor.errors["capture"] = [NotForkable("a USB device is passed through")]
    with pytest.raises(SetupFailed, match=r"suite/name: machine desktop-\w+: a USB device"):
        await world.reset(group_size=2)


async def test_if_one_fork_of_a_group_fails_nothing_is_kept(world: World) -> None:
    world.hypervisor.gates["capture"].clear()
    reset = await begun(world.reset(group_size=3))
    world.hypervisor.errors["load"] = [HypervisorError("QEMU did not start")]
    world.hypervisor.gates["capture"].set()
    with pytest.raises(HypervisorError, match="QEMU did not start"):
        await reset
    await run_ready()
    assert world.captured()[0].discarded


async def test_a_machine_lost_while_it_is_frozen_is_replaced_once(world: World) -> None:
    world.hypervisor.gates["capture"].clear()
    reset = await begun(world.reset(group_size=2))
    next(machine for machine in world.hypervisor.machines.values() if machine.calls).die()
    world.hypervisor.gates["capture"].set()
    assert len((await reset).episodes) == 2
    assert world.tasks.setups == 2


@pytest.mark.parametrize("task", [PLAIN, TASK, FROZEN[0]], ids=lambda task: task.task_id)
async def test_a_region_off_the_screen_is_refused_before_the_setup(world: World, task: Task) -> None:
    options = ObservationOptions(region=Region(x_px=0, y_px=0, width_px=1281, height_px=1))
    with pytest.raises(InvalidRequest, match=r"region: 1281x1 at \(0, 0\) is not within the screen of 1280x800"):
        await world.reset(task_id=task.task_id, group_size=2, observe=options)
    assert world.tasks.setups == 0
    assert world.captured() == []


@pytest.mark.parametrize("task_id", [TASK.task_id, FROZEN[0].task_id])
async def test_a_group_cancelled_at_any_await_keeps_nothing(task_id: str) -> None:
    outcomes = set()
    for turns in range(120):
        async with running_world() as world:
            reset = asyncio.create_task(world.reset(task_id=task_id, group_size=2, observe=NO_PIXELS))
            await run_turns(turns)
            await world.service.drain(0.0)
            (result,) = await asyncio.gather(reset, return_exceptions=True)
            outcomes.add(type(result))
            await run_ready()
            assert world.hypervisor.machines == {}, f"cut short after {turns} turns of the loop"
            assert world.pool.statistics().reserved_count == 0
            assert len([s for s in world.captured() if not s.discarded]) == len(world.service._context.states)
    assert outcomes == {Draining, OpenedGroup}, "some resets were cancelled, some completed"


# -- perturbed worlds ------------------------------------------------------------------------------------


async def test_a_perturbed_reset_runs_its_own_setup_and_says_what_was_perturbed(world: World) -> None:
    task_id = FROZEN[0].task_id
    clean = await world.reset(task_id=task_id)
    await world.service.close(clean.episodes[0].episode_id)
    perturbed = await world.reset(
        task_id=task_id, group_size=2, perturb=PerturbationDraw(seed=4, kinds=("update", "theme"))
    )
    check_that_all_began_alike(perturbed)
    assert world.tasks.setups == 2, "the cached state is that of the clean world"
    assert [info.progress.perturbations for info in perturbed.episodes] == [("update",)] * 2
    assert clean.episodes[0].progress.perturbations == ()
    fork = await world.fork(perturbed.episodes[0].episode_id, 0)
    assert fork.episodes[0].progress.perturbations == ("update",)


async def test_a_task_without_setup_gets_one_if_its_world_is_perturbed(world: World) -> None:
    result = await world.reset(task_id=PLAIN.task_id, perturb=PerturbationDraw(seed=4))
    assert world.tasks.setups == 1
    assert len(result.episodes[0].progress.perturbations) == 1


async def test_a_task_perturbs_each_reset_differently_and_its_retry_and_group_equally(world: World) -> None:
    result = await world.reset(task_id=PERTURBED.task_id, group_size=2, request_id="first")
    kinds = {info.progress.perturbations for info in result.episodes}
    assert len(kinds) == 1
    assert len(kinds.pop()) == 2
    assert (await world.reset(task_id=PERTURBED.task_id, group_size=2, request_id="first")) == result
    for info in result.episodes:
        await world.service.close(info.episode_id)
    drawn = set()
    for number in range(12):
        (episode,) = (await world.reset(task_id=PERTURBED.task_id, request_id=f"r{number}")).episodes
        drawn.add(episode.progress.perturbations)
        await world.service.close(episode.episode_id)
    assert drawn == {("background", "theme"), ("background", "update"), ("theme", "update")}
    other = PerturbationDraw(seed=1, kinds=("notification",))
    (episode,) = (await world.reset(task_id=PERTURBED.task_id, perturb=other)).episodes
    assert episode.progress.perturbations == ("notification",)


async def test_an_unknown_perturbation_takes_no_machine(world: World) -> None:
    with pytest.raises(InvalidRequest, match="tornado: unknown"):
        await world.reset(perturb=PerturbationDraw(seed=4, kinds=("tornado",)))
    assert world.tasks.setups == 0


@pytest.fixture
def uncopied(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Return a world whose machines cannot be copied."""
    monkeypatch.setattr(world.hypervisor, "capabilities", replace(CAPABILITIES, not_forkable="no copies"))
    return world


async def test_where_machines_cannot_be_copied_each_member_runs_the_setup(uncopied: World) -> None:
    world = uncopied
    result = await world.reset(group_size=3)
    assert world.tasks.setups == 3
    assert world.captured() == []
    template = world.hypervisor.snapshots[0]
    assert {info.spec.origin.template_digest for info in result.episodes} == {template.digest}
    assert {info.spec.origin.is_new_session for info in result.episodes} == {True}
    assert all(observation.settle is not None for observation in result.observations)
    assert set(result.timings_ms) == {"acquire", "setup", "settle", "observe", "total"}
    for info in result.episodes:
        assert world.machine(info.episode_id).state is MachineState.PAUSED


async def test_where_machines_cannot_be_copied_a_state_after_setup_is_not_kept(uncopied: World) -> None:
    for _ in range(2):
        await uncopied.open(task_id=FROZEN[0].task_id)
    assert uncopied.tasks.setups == 2
    assert uncopied.captured() == []


async def test_automatic_checkpoints_are_refused_before_any_machine_is_leased(uncopied: World) -> None:
    with pytest.raises(NotForkable, match="no copies"):
        await uncopied.reset(automatic=AutomaticCheckpoints(every_steps=1))
    assert uncopied.tasks.setups == 0
