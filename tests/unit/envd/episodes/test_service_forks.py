"""Forking an episode: copies start in its present state, all or none, and it continues."""

import asyncio
import random
from dataclasses import replace

import pytest

from cuaenv.actions import Done, TypeText
from cuaenv.region import Region
from envd.base.errors import (
    Draining,
    EnvdError,
    EpisodeEnded,
    EpisodeNotFound,
    GroupTooLarge,
    GuestUnresponsive,
    HypervisorError,
    InvalidRequest,
    LossUndecided,
    MachineLost,
    NotForkable,
    PoolExhausted,
    SetupFailed,
    StepIndexMismatch,
)
from envd.desktop.observation import A11yFormat, Encoding, ObservationOptions
from envd.drawn.backend import CAPABILITIES
from envd.episodes.progress import EpisodeState
from envd.episodes.types import OpenedGroup
from envd.hypervisor.machine import MachineState
from tests.support.clock import begun, run_ready, run_turns
from tests.support.episode_world import CAPACITY, FROZEN, PLAIN, TASK, World, running_world
from tests.support.stubs import StubDesktop


async def opened(world: World, *, step_count: int = 1) -> str:
    """Open an episode and perform `step_count` steps."""
    episode_id = await world.open(run="night-1", max_steps=4)
    for index in range(step_count):
        await world.service.step(world.step_command(episode_id, index))
    return episode_id


@pytest.fixture
async def parent_id(world: World) -> str:
    return await opened(world)


async def test_copies_start_in_their_parents_state(world: World) -> None:
    parent_id = await opened(world, step_count=2)
    result = await world.fork(parent_id, 2, fork_count=2)
    parent = world.info(parent_id)
    (state,) = world.captured()
    for info, observation in zip(result.episodes, result.observations, strict=True):
        assert (info.spec.parent_episode_id, info.spec.group_id) == (parent_id, parent.spec.group_id)
        assert (info.spec.task_id, info.spec.run) == (parent.spec.task_id, "night-1")
        assert (info.spec.max_steps, info.progress.step_count) == (4, 2)
        assert (info.progress.state, info.spec.origin.template_digest) == (EpisodeState.ACTIVE, state.digest)
        assert info.spec.origin.overlay_parent == state.disk_digest
        assert info.spec.origin.first_frame_id == world.machine(parent_id).frame_id
        assert observation.frame.frame_id == info.spec.origin.first_frame_id
        assert world.machine(info.episode_id).snapshot is state
        assert world.machine(info.episode_id).calls == [], "no copy has run"
    assert parent.progress.state is EpisodeState.ACTIVE
    assert result.timings_ms == {"acquire": 0.0, "pause": 2.0, "copy": 5.0, "start": 0.0, "total": 0.0}
    assert set(world.metrics.opened[-1]) == {f"fork_{phase}" for phase in result.timings_ms}
    await run_ready()
    assert state.discarded


async def test_copies_and_their_parent_are_independent(world: World, parent_id: str) -> None:
    ids = [parent_id, *(info.episode_id for info in (await world.fork(parent_id, 1, fork_count=2)).episodes)]
    texts = [TypeText(text=episode_id) for episode_id in ids]
    results = await asyncio.gather(
        *(world.service.step(world.step_command(i, 1, text)) for i, text in zip(ids, texts, strict=True))
    )
    assert [result.episode.progress.step_count for result in results] == [2, 2, 2]
    assert len({result.observation.frame.frame_id for result in results}) == 3
    assert [world.desktop(i).actions[-1] for i in ids] == texts


async def test_a_copy_has_its_own_lease_and_ledgers(world: World, parent_id: str) -> None:
    (copy,) = (await world.fork(parent_id, 1, lease_ttl_s=60.0)).episodes
    command = world.step_command(parent_id, 1)
    await world.service.step(command)
    other = await world.service.step(replace(command, episode_id=copy.episode_id))
    assert not other.replayed
    assert (await world.service.evaluate(parent_id, request_id="e", fingerprint=b"")).score == 1.0
    assert world.state(copy.episode_id) == (EpisodeState.ACTIVE, "")
    await world.service.close(parent_id)
    assert world.state(copy.episode_id) == (EpisodeState.ACTIVE, ""), "the copy outlives its parent"
    await world.clock.advance(60.0)
    assert world.service.list_episodes() == []


async def test_a_copy_can_be_forked_again(world: World, parent_id: str) -> None:
    (copy,) = (await world.fork(parent_id, 1)).episodes
    (second,) = (await world.fork(copy.episode_id, 1)).episodes
    assert second.spec.parent_episode_id == copy.episode_id
    assert second.spec.group_id == world.info(parent_id).spec.group_id
    assert second.spec.origin.first_frame_id == copy.spec.origin.first_frame_id


async def test_a_fork_waits_for_the_running_step(world: World, parent_id: str) -> None:
    desktop = world.desktop(parent_id)
    desktop.gates["act"].clear()
    step = await begun(world.service.step(world.step_command(parent_id, 1)))
    fork = await begun(world.fork(parent_id, 2))
    assert world.captured() == []
    desktop.gates["act"].set()
    await step
    assert (await fork).episodes[0].progress.step_count == 2


async def test_the_parent_is_paused_only_while_it_is_frozen(world: World, parent_id: str) -> None:
    world.hypervisor.gates["fork"].clear()
    fork = await begun(world.fork(parent_id, 1))
    assert len(world.captured()) == 1
    assert (await world.service.step(world.step_command(parent_id, 1))).episode.progress.step_count == 2
    world.hypervisor.gates["fork"].set()
    assert (await fork).episodes[0].progress.step_count == 1, "the parent's step count when it was frozen"


# -- retries ----------------------------------------------------------------------------------------------------


async def test_a_retried_fork_joins_then_replays(world: World, parent_id: str) -> None:
    world.hypervisor.gates["capture"].clear()
    command = world.fork_command(parent_id, 1, fork_count=2)
    caller = await begun(world.service.fork(command))
    caller.cancel()
    retry = await begun(world.service.fork(command))
    assert caller.cancelled()
    world.hypervisor.gates["capture"].set()
    first = await retry
    await world.service.step(world.step_command(parent_id, 1))
    assert await world.service.fork(command) == first
    assert len(world.service.list_episodes()) == 3
    assert len(world.captured()) == 1


# -- refusals: nothing was changed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"step_index": 0}, StepIndexMismatch, "expected step_index 1, got 0"),
        ({"step_index": 2}, StepIndexMismatch, "expected step_index 1, got 2"),
        ({"fork_count": 0}, InvalidRequest, "fork_count"),
        ({"fork_count": CAPACITY + 1}, GroupTooLarge, "never a group of 4"),
        # Its own machine is one of them: the copies would wait for it until their deadline.
        ({"fork_count": CAPACITY}, GroupTooLarge, "never a group of 3 in addition to the 1 that it retains"),
        ({"lease_ttl_s": 9.0}, InvalidRequest, "lease_ttl"),
        ({"episode_id": "ep-unknown"}, EpisodeNotFound, "not found"),
        (
            {"observe": ObservationOptions(region=Region(x_px=0, y_px=0, width_px=1281, height_px=1))},
            InvalidRequest,
            "1281x1",
        ),
    ],
)
async def test_a_wrong_fork_is_refused_and_touches_nothing(
    world: World, fields: dict[str, object], error: type[Exception], message: str, parent_id: str
) -> None:
    calls = list(world.machine(parent_id).calls)
    with pytest.raises(error, match=message):
        await world.service.fork(replace(world.fork_command(parent_id, 1), **fields))  # type: ignore[arg-type]
    assert world.machine(parent_id).calls == calls, "the parent was not paused"
    assert world.state(parent_id) == (EpisodeState.ACTIVE, "")
    assert world.captured() == []


async def test_an_ended_closed_or_lost_episode_is_not_forked(world: World) -> None:
    ended_id, closed_id, lost_id = [await opened(world) for _ in range(3)]
    await world.service.step(world.step_command(ended_id, 1, Done()))
    await world.service.close(closed_id)
    world.kill(lost_id)
    await run_ready()
    with pytest.raises(EpisodeEnded, match=r"step 2 \(AGENT_DONE\)"):
        await world.fork(ended_id, 2)
    with pytest.raises(EpisodeNotFound, match="closed"):
        await world.fork(closed_id, 1)
    with pytest.raises(MachineLost, match="MACHINE_LOST"):
        await world.fork(lost_id, 1)
    assert world.captured() == []


async def test_a_step_that_ends_while_a_fork_waits_for_capacity_makes_its_index_stale(world: World) -> None:
    parent_id = await opened(world)
    others = [await world.open() for _ in range(CAPACITY - 1)]
    fork = await begun(world.fork(parent_id, 1))
    await world.service.step(world.step_command(parent_id, 1))
    await world.service.close(others[0])
    with pytest.raises(StepIndexMismatch):
        await fork
    assert world.captured() == []


async def test_a_full_pool_rejects_forks_at_their_deadline(world: World, parent_id: str) -> None:
    for _ in range(CAPACITY - 1):
        await world.open(lease_ttl_s=3600.0)
    fork = asyncio.create_task(world.fork(parent_id, 1, timeout_s=30.0))
    await world.clock.advance(30.0)
    with pytest.raises(PoolExhausted):
        await fork
    assert world.captured() == []
    assert world.state(parent_id) == (EpisodeState.ACTIVE, "")


async def test_the_parents_lease_does_not_expire_while_its_fork_waits(world: World) -> None:
    parent_id = await world.open(lease_ttl_s=10.0)
    others = [await world.open(lease_ttl_s=3600.0) for _ in range(CAPACITY - 1)]
    fork = asyncio.create_task(world.fork(parent_id, timeout_s=300.0))
    await world.clock.advance(100.0)
    await world.service.close(others[0])
    assert len((await fork).episodes) == 1


async def test_a_draining_daemon_refuses_forks(world: World, parent_id: str) -> None:
    draining = await begun(world.service.drain(60.0))
    with pytest.raises(Draining):
        await world.fork(parent_id, 1)
    await world.service.close(parent_id)
    await draining


# -- failures: nothing is kept ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [NotForkable("a USB device is passed through"), HypervisorError("no space left")], ids=lambda e: e.reason
)
async def test_a_parent_that_cannot_be_frozen_continues(world: World, error: EnvdError, parent_id: str) -> None:
    world.hypervisor.errors["capture"] = [error]
    command = world.fork_command(parent_id, 1)
    with pytest.raises(type(error)):
        await world.service.fork(command)
    assert world.state(parent_id) == (EpisodeState.ACTIVE, "")
    assert world.machine(parent_id).state is MachineState.PAUSED
    assert world.metrics.recorded_failures == [("fork", error.reason)]
    await run_ready()
    world.check_no_leaks()
    assert len((await world.service.fork(command)).episodes) == 1
    await world.service.step(world.step_command(parent_id, 1))


@pytest.mark.parametrize(
    ("cause", "error"),
    [(HypervisorError("QEMU did not start"), HypervisorError), (MachineLost("QEMU did not start"), SetupFailed)],
)
async def test_if_one_copy_fails_no_copy_is_kept_and_the_parent_continues(
    world: World, cause: EnvdError, error: type[EnvdError], parent_id: str
) -> None:
    world.hypervisor.gates["capture"].clear()
    fork = await begun(world.fork(parent_id, 1, fork_count=2))
    world.hypervisor.errors["load"] = [cause]
    world.hypervisor.gates["capture"].set()
    of_parent = f"fork of episode {parent_id}: " if error is SetupFailed else ""
    with pytest.raises(error, match=f"{of_parent}QEMU did not start"):
        await fork
    await run_ready()
    assert [info.episode_id for info in world.service.list_episodes()] == [parent_id]
    assert world.captured()[0].discarded
    assert world.state(parent_id) == (EpisodeState.ACTIVE, "")


async def test_if_a_copys_guest_does_not_resume_no_copy_is_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def sleep_on(desktop: StubDesktop, *, windows: bool) -> None:
        raise GuestUnresponsive("no answer within 30 s")

    parent_id = await opened(world)
    monkeypatch.setattr(StubDesktop, "wake", sleep_on)
    options = ObservationOptions(encoding=Encoding.NONE, a11y_format=A11yFormat.OSWORLD_XML)
    with pytest.raises(SetupFailed, match=rf"fork of episode {parent_id}: machine desktop-\w+: no answer"):
        await world.fork(parent_id, 1, fork_count=2, observe=options)
    assert world.state(parent_id) == (EpisodeState.ACTIVE, "")


async def test_a_parent_lost_while_it_is_frozen_is_void(world: World, parent_id: str) -> None:
    world.hypervisor.gates["capture"].clear()
    fork = await begun(world.fork(parent_id, 1))
    world.kill(parent_id)
    world.hypervisor.gates["capture"].set()
    with pytest.raises(MachineLost):
        await fork
    await run_ready()
    assert world.state(parent_id) == (EpisodeState.FAILED, "MACHINE_LOST")


async def test_a_parent_whose_display_is_silent_is_void(world: World, parent_id: str) -> None:
    world.desktop(parent_id).errors["view"] = GuestUnresponsive("no frame within 20 s")
    with pytest.raises(LossUndecided):
        await world.fork(parent_id, 1)
    assert world.state(parent_id) == (EpisodeState.FAILED, "LOSS_UNDECIDED")


@pytest.mark.parametrize("gate", ["capture", "fork"])
async def test_closing_the_parent_ends_its_fork(world: World, gate: str, parent_id: str) -> None:
    world.hypervisor.gates[gate].clear()
    fork = await begun(world.fork(parent_id, 1, fork_count=2))
    closing = await begun(world.service.close(parent_id))
    world.hypervisor.gates[gate].set()
    with pytest.raises(EpisodeNotFound, match="closed"):
        await fork
    await closing
    await run_ready()
    assert world.service.list_episodes() == []


async def test_a_fork_cancelled_at_any_await_keeps_nothing() -> None:
    outcomes = set()
    for turns in range(120):
        async with running_world() as world:
            parent_id = await world.open()
            fork = asyncio.create_task(world.fork(parent_id, fork_count=2))
            await run_turns(turns)
            await world.service.drain(0.0)
            (result,) = await asyncio.gather(fork, return_exceptions=True)
            outcomes.add(type(result))
            await run_ready()
            assert world.hypervisor.machines == {}, f"cut short after {turns} turns of the loop"
            assert world.pool.statistics().reserved_count == 0
            assert all(state.discarded for state in world.captured())
    assert OpenedGroup in outcomes
    assert outcomes - {OpenedGroup} <= {EpisodeNotFound, Draining}
    assert len(outcomes) > 1, "some forks were cancelled, some completed"


@pytest.mark.parametrize("seed", range(4))
async def test_random_forks_cancellations_and_kills_leak_nothing(seed: int) -> None:
    dice = random.Random(seed)
    async with running_world(capacity=5, task_templates=1) as world:

        async def family() -> None:
            task = dice.choice((TASK, PLAIN, *FROZEN))
            command = {"task_id": task.task_id, "lease_ttl_s": 30.0, "timeout_s": 60.0}
            result = await world.reset(group_size=dice.randint(1, 2), **command)
            parent_id = result.episodes[0].episode_id
            if dice.random() < 0.5:
                await world.service.step(world.step_command(parent_id, 0))
            forked = await world.fork(
                parent_id, world.info(parent_id).progress.step_count, fork_count=dice.randint(1, 3), timeout_s=20.0
            )
            for info in (*forked.episodes, *result.episodes):
                await world.service.step(world.step_command(info.episode_id, info.progress.step_count))
                await world.service.close(info.episode_id)

        callers: list[asyncio.Task[None]] = []
        for _ in range(100):
            callers.append(asyncio.create_task(family()))
            await run_turns(dice.randint(0, 40))
            if dice.random() < 0.3:
                dice.choice(callers).cancel()
            if dice.random() < 0.1 and world.hypervisor.machines:
                dice.choice(list(world.hypervisor.machines.values())).die("QEMU was killed by signal 9")
            if dice.random() < 0.1:
                world.hypervisor.errors[dice.choice(("capture", "fork"))].append(HypervisorError("no space left"))
            assert len(world.hypervisor.machines) <= 5
            if dice.random() < 0.2:
                await world.clock.advance(10.0)
        await world.clock.advance(1200.0)
        await asyncio.gather(*callers, return_exceptions=True)
        assert world.service.list_episodes() == [], "the leases of open episodes have expired"
        world.check_no_leaks()
        assert world.hypervisor.peak_count <= 5


async def test_a_fork_where_machines_cannot_be_copied_is_refused_without_waiting_for_a_machine(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode_id = await opened(world)
    monkeypatch.setattr(world.hypervisor, "capabilities", replace(CAPABILITIES, not_forkable="no copies"))
    leases = world.hypervisor.counts["capture"]
    with pytest.raises(NotForkable, match="no copies"):
        await world.service.fork(world.fork_command(episode_id, 1))
    assert world.hypervisor.counts["capture"] == leases
    assert world.info(episode_id).progress.state is EpisodeState.ACTIVE
