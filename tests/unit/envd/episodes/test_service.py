"""The public behaviour of the episode service, on stub machines: no sockets, no guests, no real time."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cuaenv.actions import Done, PressKeys, TypeText
from cuaenv.region import Region
from cuaenv.results import UnrecordedRequest
from envd.base.clock import LoopLag
from envd.base.config import LimitsConfig, SettlePolicy
from envd.base.errors import (
    AccessDenied,
    Draining,
    EnvdError,
    EpisodeEnded,
    EpisodeNotFound,
    EvaluatorFailed,
    GroupTooLarge,
    GuestEnded,
    GuestError,
    GuestUnresponsive,
    HypervisorError,
    HypervisorUnavailable,
    InvalidRequest,
    LossUndecided,
    MachineLost,
    ObjectNotFound,
    PoolExhausted,
    PoolNotFound,
    RequestIdReused,
    SetupFailed,
    StepIndexMismatch,
    TaskNotFound,
    TokenQuotaReached,
)
from envd.base.losses import Loss, LossOwner, Silence
from envd.desktop.display.frames import Frame
from envd.desktop.observation import A11yFormat, Observation, ObservationOptions
from envd.episodes.episode import MAX_CALL_S
from envd.episodes.progress import EpisodeState
from envd.episodes.resetting import choose_pool
from envd.hypervisor.machine import DiskImage, GuestOs
from envd.pool.pool import MachinePool
from envd.pool.settings import PoolHost, PoolParameters
from tests.support.clock import begun, run_ready, run_turns
from tests.support.episode_world import CAPACITY, TASK, World
from tests.support.stubs import StubHypervisor

# -- reset ------------------------------------------------------------------------------------------------------


async def test_a_reset_opens_an_episode_and_returns_its_timings(world: World) -> None:
    result = await world.reset(run="night-1")
    (info,) = result.episodes
    assert (info.progress.state, info.progress.step_count) == (EpisodeState.ACTIVE, 0)
    assert (info.spec.max_steps, info.spec.run, info.spec.pool) == (5, "night-1", "desktop")
    assert result.instruction == "Do it."
    assert result.observations[0].settle is not None
    assert set(result.timings_ms) == {"acquire", "setup", "settle", "observe", "total"}
    assert world.service.list_episodes() == [info]
    assert world.desktop(info.episode_id).calls == ["wake", "run", "settle", "view"]


async def test_a_retried_reset_joins_then_replays_even_if_its_first_caller_was_cancelled(world: World) -> None:
    world.tasks.setup_gate.clear()
    command = world.reset_command()
    caller = await begun(world.service.reset(command))
    retry = await begun(world.service.reset(command))
    caller.cancel()
    await run_ready()
    late = await begun(world.service.reset(command))
    world.tasks.setup_gate.set()
    result = await retry
    assert result == await late == await world.service.reset(command)
    assert [e.episode_id for e in world.service.list_episodes()] == [result.episodes[0].episode_id]
    assert world.tasks.setups == 1


async def test_a_failed_setup_keeps_no_machine_and_can_be_retried(world: World) -> None:
    world.tasks.setup_errors = [SetupFailed("setup[0] launch failed: no such program")]
    command = world.reset_command(group_size=2)
    with pytest.raises(SetupFailed, match="no such program"):
        await world.service.reset(command)
    assert len(world.hypervisor.made) >= 2
    assert world.service.list_episodes() == []
    await run_ready()
    world.check_no_leaks()
    assert world.metrics.recorded_failures == [("reset", "SETUP_FAILED")]
    assert len((await world.service.reset(command)).episodes) == 2


@pytest.mark.parametrize("method", ["wake", "settle", "view"])
async def test_a_guest_failure_before_the_first_observation_is_a_failed_setup(world: World, method: str) -> None:
    for desktop in world.hypervisor.desktops:
        desktop.errors[method] = GuestUnresponsive("no frame within 5 s")
    with pytest.raises(SetupFailed, match=r"suite/name: machine desktop-\w+: no frame within 5 s"):
        await world.reset()


async def test_a_second_lost_machine_is_an_error(world: World) -> None:
    world.tasks.lose_in_setup = 2
    with pytest.raises(MachineLost, match="first step"):
        await world.reset()
    await run_ready()
    assert world.service.list_episodes() == []


async def test_a_full_pool_rejects_resets_at_their_deadline(world: World) -> None:
    await world.reset(group_size=3)
    waiting = asyncio.create_task(world.reset(timeout_s=30.0))
    await world.clock.advance(30.0)
    with pytest.raises(PoolExhausted, match="position 1 of 1"):
        await waiting


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"task_id": "suite/nome"}, TaskNotFound, "did you mean suite/name"),
        ({"pool": "windows"}, PoolNotFound, "pool 'windows': not found"),
        ({"group_size": 4}, GroupTooLarge, "never a group of 4"),
        ({"group_size": 0}, InvalidRequest, "group_size"),
        ({"lease_ttl_s": 9.0}, InvalidRequest, r"lease_ttl: 9 s is outside \[10 s, 3600 s\]"),
        ({"lease_ttl_s": 3601.0}, InvalidRequest, "lease_ttl"),
        ({"max_steps": 0}, InvalidRequest, "max_steps"),
    ],
)
async def test_a_wrong_reset_is_refused_and_keeps_no_machine(
    world: World, fields: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await world.reset(**fields)
    await run_ready()
    world.check_no_leaks()
    assert world.pool.statistics().idle_count == CAPACITY


def make_pool(
    name: str, *, image: str = "desktop", os: GuestOs = GuestOs.LINUX, provides: frozenset[str] = frozenset()
) -> MachinePool:
    disk = DiskImage(name=image, digest="0" * 64, disk=Path("/nowhere"), os=os, provides=provides)
    return MachinePool(
        PoolParameters(name=name, capacity=1, size=0), image=disk, host=PoolHost(hypervisor=StubHypervisor())
    )


def test_the_pool_is_the_requested_one_or_the_tasks_own_or_the_only_one_that_fits() -> None:
    small, large = make_pool("small"), make_pool("large")
    windows = make_pool("windows", image="win11", os=GuestOs.WINDOWS)
    pools = {pool.name: pool for pool in (small, large, windows)}
    assert choose_pool(TASK, "large", pools) is large
    assert choose_pool(TASK.model_copy(update={"pool": "small"}), "", pools) is small
    assert choose_pool(TASK.model_copy(update={"pool": "small"}), "large", pools) is large
    assert choose_pool(TASK.model_copy(update={"os": GuestOs.WINDOWS}), "", pools) is windows
    assert choose_pool(TASK, "", {"small": small, "windows": windows}) is small
    with pytest.raises(InvalidRequest, match="large, small"):
        choose_pool(TASK, "", pools)
    with pytest.raises(InvalidRequest, match=r"'windows' .*suite/name .*linux"):
        choose_pool(TASK, "windows", pools)
    with pytest.raises(PoolNotFound, match=r"'ubuntu'.*large, small, windows"):
        choose_pool(TASK.model_copy(update={"image": "ubuntu"}), "", pools)


def test_a_task_runs_only_in_a_pool_that_provides_what_it_needs() -> None:
    task = TASK.model_copy(update={"needs": ("office", "mail")})
    plain, half = make_pool("plain"), make_pool("half", image="half", provides=frozenset({"office"}))
    full = make_pool("full", image="full", provides=frozenset({"mail", "office", "web"}))
    assert choose_pool(task, "", {"plain": plain, "half": half, "full": full}) is full
    assert choose_pool(task, "full", {"plain": plain, "full": full}) is full
    with pytest.raises(SetupFailed, match=r"pool half: .*mail"):
        choose_pool(task, "half", {"half": half, "full": full})
    with pytest.raises(SetupFailed, match=r"pool plain: .*office, mail"):
        choose_pool(task, "", {"plain": plain, "half": half})
    with pytest.raises(PoolNotFound):
        choose_pool(task, "", {})


# -- step -------------------------------------------------------------------------------------------------------


async def test_a_step_acts_in_order_then_settles_then_observes(world: World, episode_id: str) -> None:
    actions = (TypeText(text="a"), PressKeys(keys=("ctrl", "s")))
    result = await world.service.step(world.step_command(episode_id, 0, *actions))
    desktop = world.desktop(episode_id)
    assert desktop.actions == list(actions)
    assert desktop.calls[-4:] == ["act", "act", "settle", "observe"]
    assert desktop.upcoming[-1] == ObservationOptions(), "the frame is encoded while the screen settles"
    assert len(result.outcomes) == 2
    assert result.episode.progress.step_count == 1
    assert result.observation.settle is not None
    assert not result.replayed
    assert set(result.timings_ms) == {"queue", "resume", "input", "settle", "observe", "total"}
    assert len(world.metrics.steps) == 1


async def test_a_step_names_what_the_web_recording_did_not_have_since_the_step_before(
    world: World, episode_id: str
) -> None:
    missing = UnrecordedRequest(kind="not_recorded", method="GET", url="https://example.org/")
    world.desktop(episode_id).unrecorded = (missing,)
    command = world.step_command(episode_id, 0)
    assert (await world.service.step(command)).unrecorded == (missing,)
    assert (await world.service.step(command)).unrecorded == (missing,), "a retry returns the same response"
    assert (await world.service.step(world.step_command(episode_id, 1))).unrecorded == ()


async def test_a_retried_step_joins_the_running_one_then_replays(world: World, episode_id: str) -> None:
    desktop = world.desktop(episode_id)
    desktop.gates["act"].clear()
    command = world.step_command(episode_id, 0)
    first = await begun(world.service.step(command))
    first.cancel()
    await run_ready()
    assert first.cancelled()
    retry = await begun(world.service.step(command))
    desktop.gates["act"].set()
    result = await retry
    assert result.episode.progress.step_count == 1
    assert await world.service.step(command) == replace(result, replayed=True)
    assert len(desktop.actions) == 1


@pytest.mark.parametrize("method", ["reset", "step", "fork"])
async def test_a_request_id_with_another_body_is_refused(world: World, episode_id: str, method: str) -> None:
    commands: dict[str, Any] = {
        "reset": world.reset_command(),
        "step": world.step_command(episode_id, 0),
        "fork": world.fork_command(episode_id),
    }
    call = getattr(world.service, method)
    await call(replace(commands[method], fingerprint=b"a"))
    with pytest.raises(RequestIdReused):
        await call(replace(commands[method], fingerprint=b"b"))


async def test_steps_of_an_episode_run_one_at_a_time_in_the_order_of_arrival(world: World, episode_id: str) -> None:
    desktop = world.desktop(episode_id)
    desktop.gates["act"].clear()
    texts = [TypeText(text=str(i)) for i in range(3)]
    steps = [
        asyncio.create_task(world.service.step(world.step_command(episode_id, i, text))) for i, text in enumerate(texts)
    ]
    await run_ready()
    assert desktop.calls.count("act") == 1
    desktop.gates["act"].set()
    assert [(await step).episode.progress.step_count for step in steps] == [1, 2, 3]
    assert desktop.actions == texts


async def test_a_step_with_the_wrong_index_does_nothing_and_can_be_resent(world: World, episode_id: str) -> None:
    early = world.step_command(episode_id, 1)
    with pytest.raises(StepIndexMismatch, match="0, got 1"):
        await world.service.step(early)
    assert world.desktop(episode_id).actions == []
    await world.service.step(world.step_command(episode_id, 0))
    assert (await world.service.step(early)).episode.progress.step_count == 2


async def test_done_ends_the_episode_and_later_actions_are_not_performed(world: World, episode_id: str) -> None:
    actions = (TypeText(text="a"), Done(answer="42"), TypeText(text="b"))
    result = await world.service.step(world.step_command(episode_id, 0, *actions))
    assert len(result.outcomes) == 2
    assert world.desktop(episode_id).actions == [TypeText(text="a")]
    assert result.episode == world.info(episode_id)
    assert world.state(episode_id) == (EpisodeState.TERMINATED, "AGENT_DONE")
    with pytest.raises(EpisodeEnded, match=r"step 1 \(AGENT_DONE\)"):
        await world.service.step(world.step_command(episode_id, 1))
    assert world.metrics.ends == ["terminated"]


async def test_the_step_limit_truncates(world: World) -> None:
    episode_id = await world.open(max_steps=2)
    await world.service.step(world.step_command(episode_id, 0))
    result = await world.service.step(world.step_command(episode_id, 1))
    assert (result.episode.progress.state, result.episode.progress.end_reason) == (EpisodeState.TRUNCATED, "MAX_STEPS")
    with pytest.raises(EpisodeEnded, match="MAX_STEPS"):
        await world.service.step(world.step_command(episode_id, 2))


async def test_the_agents_mistakes_are_in_the_result(world: World, episode_id: str) -> None:
    world.desktop(episode_id).action_error = "no key is named 'hyper'"
    result = await world.service.step(world.step_command(episode_id, 0))
    assert result.outcomes[0].error == "no key is named 'hyper'"
    assert result.episode.progress.state is EpisodeState.ACTIVE


async def test_a_region_off_the_screen_is_refused_before_any_action(world: World, episode_id: str) -> None:
    options = ObservationOptions(region=Region(x_px=0, y_px=0, width_px=1281, height_px=1))
    with pytest.raises(InvalidRequest, match="1281x1"):
        await world.service.step(world.step_command(episode_id, 0, observe=options))
    assert world.desktop(episode_id).actions == []
    assert world.state(episode_id) == (EpisodeState.ACTIVE, "")


async def test_a_machine_killed_during_a_step_is_machine_lost_in_all_later_calls(world: World, episode_id: str) -> None:
    world.desktop(episode_id).gates["act"].clear()
    command = world.step_command(episode_id, 0)
    step = await begun(world.service.step(command))
    world.kill(episode_id)
    with pytest.raises(MachineLost, match="signal 9"):
        await step
    with pytest.raises(MachineLost):
        await world.service.step(command)
    with pytest.raises(MachineLost, match="MACHINE_LOST"):
        await world.service.step(world.step_command(episode_id, 1))
    with pytest.raises(MachineLost):
        await world.service.observe(episode_id, ObservationOptions())
    with pytest.raises(MachineLost):
        await world.service.evaluate(episode_id, request_id="e", fingerprint=b"")
    assert world.tasks.checks == 0
    assert world.state(episode_id) == (EpisodeState.FAILED, "MACHINE_LOST")
    await run_ready()
    world.check_no_leaks()
    assert world.metrics.ends == ["failed"]
    assert world.metrics.recorded_failures[0] == ("step", "MACHINE_LOST")
    await world.service.close(episode_id)
    with pytest.raises(EpisodeNotFound, match="closed"):
        await world.service.step(world.step_command(episode_id, 1))


async def test_a_machine_that_dies_at_the_very_end_of_a_step_voids_it(
    world: World, episode_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    desktop = world.desktop(episode_id)
    observe = desktop.observe

    async def last(options: ObservationOptions, *, refresh: bool = False, since: Frame | None = None) -> Observation:
        observation = await observe(options, refresh=refresh, since=since)
        world.kill(episode_id)
        await run_ready()
        return observation

    monkeypatch.setattr(desktop, "observe", last)
    with pytest.raises(MachineLost, match="signal 9"):
        await world.service.step(world.step_command(episode_id, 0))
    assert world.state(episode_id) == (EpisodeState.FAILED, "MACHINE_LOST")


async def test_a_guest_failure_without_evidence_voids_the_episode(world: World, episode_id: str) -> None:
    world.desktop(episode_id).errors["settle"] = GuestUnresponsive("no update within 30 s")
    world.machine(episode_id).silence = Silence(run_state="")
    with pytest.raises(LossUndecided, match="QEMU does not answer"):
        await world.service.step(world.step_command(episode_id, 0))
    assert world.state(episode_id) == (EpisodeState.FAILED, "LOSS_UNDECIDED")
    with pytest.raises(LossUndecided, match=r"LOSS_UNDECIDED: .*QEMU does not answer"):
        await world.service.step(world.step_command(episode_id, 1))
    with pytest.raises(LossUndecided):
        await world.service.evaluate(episode_id, request_id="e", fingerprint=b"")
    assert world.tasks.checks == 0


QEMU_FAILED = HypervisorError("its QEMU monitor failed")


@pytest.mark.parametrize(
    ("failure", "silence", "error"),
    [
        (QEMU_FAILED, Silence(run_state=""), LossUndecided),
        (QEMU_FAILED, Silence(run_state="running", agent_answers=True), LossUndecided),
        # A libvirtd that is away says nothing about the machine.
        (HypervisorUnavailable("libvirtd is away", retry_after_s=1), Silence(run_state=""), HypervisorUnavailable),
    ],
)
async def test_a_failure_of_the_hypervisor_without_evidence_is_never_the_guests(
    world: World, episode_id: str, failure: EnvdError, silence: Silence, error: type[EnvdError]
) -> None:
    world.desktop(episode_id).errors["settle"] = failure
    world.machine(episode_id).silence = silence
    with pytest.raises(error):
        await world.service.step(world.step_command(episode_id, 0))
    assert world.state(episode_id) == (EpisodeState.FAILED, error.reason)


# -- a guest that ends itself ---------------------------------------------------------------------------------------

POWER_OFF = Loss(LossOwner.GUEST, "QEMU reports guest-shutdown", "POWER_OFF")


async def test_a_step_in_which_the_guest_powers_off_ends_the_episode_and_scores_0(
    world: World, episode_id: str
) -> None:
    world.desktop(episode_id).gates["act"].clear()
    command = world.step_command(episode_id, 0)
    step = await begun(world.service.step(command))
    machine_id = world.machine(episode_id).machine_id
    world.machine(episode_id).end(POWER_OFF)
    result = await step
    assert world.state(episode_id) == (EpisodeState.TERMINATED, "GUEST_ENDED")
    assert (result.episode.progress.guest_end_cause, result.episode.progress.step_count) == ("POWER_OFF", 1)
    assert ["POWER_OFF" in outcome.error for outcome in result.outcomes] == [True]
    assert (await world.service.step(command)).replayed
    for call in (
        world.service.step(world.step_command(episode_id, 1)),
        world.service.observe(episode_id, ObservationOptions()),
        world.service.read_file(episode_id, "/a", max_bytes=1),
    ):
        with pytest.raises(GuestEnded, match="POWER_OFF"):
            await call
    evaluated = await world.service.evaluate(episode_id, request_id="e", fingerprint=b"")
    assert (evaluated.score, world.tasks.checks) == (0.0, 0)
    assert evaluated.checks[0].evidence == "the guest ended itself: POWER_OFF"
    assert world.metrics.ends == ["terminated"]
    await run_ready()
    assert machine_id not in world.hypervisor.machines


@pytest.mark.parametrize(("actions", "end_reason"), [((), "GUEST_ENDED"), ((Done(),), "AGENT_DONE")])
async def test_a_guest_that_powers_off_between_calls_is_scored_0(
    world: World, episode_id: str, actions: tuple[Done, ...], end_reason: str
) -> None:
    for action in actions:
        await world.service.step(world.step_command(episode_id, 0, action))
    world.machine(episode_id).end(POWER_OFF)
    await run_ready()
    assert world.state(episode_id) == (EpisodeState.TERMINATED, end_reason)
    with pytest.raises(EpisodeEnded if actions else GuestEnded):
        await world.service.step(world.step_command(episode_id, len(actions)))
    evaluated = await world.service.evaluate(episode_id, request_id="e", fingerprint=b"")
    assert (evaluated.score, evaluated.episode.progress.guest_end_cause) == (0.0, "POWER_OFF")


async def test_a_guest_that_powers_off_while_it_is_evaluated_is_scored_0(world: World, episode_id: str) -> None:
    world.tasks.check_gate.clear()
    evaluating = await begun(world.service.evaluate(episode_id, request_id="e", fingerprint=b""))
    world.machine(episode_id).end(POWER_OFF)
    world.tasks.check_gate.set()
    assert (await evaluating).score == 0


async def test_a_session_that_ends_is_evaluated_on_what_is_left(world: World, episode_id: str) -> None:
    world.desktop(episode_id).errors["settle"] = GuestUnresponsive("no update within 30 s")
    world.machine(episode_id).silence = Silence(run_state="running", agent_answers=True)
    result = await world.service.step(world.step_command(episode_id, 0))
    found = result.episode.progress
    assert (found.end_reason, found.guest_end_cause) == ("GUEST_ENDED", "SESSION_ENDED")
    evaluated = await world.service.evaluate(episode_id, request_id="e", fingerprint=b"")
    assert (evaluated.score, world.tasks.checks) == (world.tasks.score, 1)


def failed(cause: Exception) -> EvaluatorFailed:
    failure = EvaluatorFailed(f"check 'window' failed: {cause}")
    failure.__cause__ = cause
    return failure


def blocked() -> EvaluatorFailed:
    return failed(GuestError("cannot open display"))


async def test_a_checker_that_the_ended_session_cannot_answer_scores_0(world: World, episode_id: str) -> None:
    world.machine(episode_id).silence = Silence(run_state="running", agent_answers=False)
    world.tasks.check_error = failed(GuestUnresponsive("no answer within 60 s"))
    evaluated = await world.service.evaluate(episode_id, request_id="e", fingerprint=b"")
    assert (evaluated.score, evaluated.episode.progress.guest_end_cause) == (0.0, "UNRESPONSIVE")


@pytest.mark.parametrize("before", [[], [blocked(), None]], ids=["the first check", "the second one"])
async def test_a_checker_that_the_hosts_full_disk_stops_voids_the_episode_as_lost(
    world: World, episode_id: str, before: list[Exception | None]
) -> None:
    world.machine(episode_id).silence = Silence(run_state="io-error")
    world.tasks.check_errors = before
    world.tasks.check_error = failed(GuestUnresponsive("no answer within 60 s"))
    for _ in range(2):
        with pytest.raises(MachineLost, match="disk is full"):
            await world.service.evaluate(episode_id, request_id="e", fingerprint=b"")


@pytest.mark.parametrize(
    ("errors", "score", "cause"), [([blocked(), None, blocked()], 0, "UNCHECKABLE"), ([blocked(), None, None], 1, "")]
)
async def test_what_the_agent_made_uncheckable_scores_0_if_checked_twice(
    world: World, episode_id: str, errors: list[Exception | None], score: float, cause: str
) -> None:
    world.tasks.check_errors = errors
    evaluated = await world.service.evaluate(episode_id, request_id="e", fingerprint=b"")
    assert (evaluated.score, evaluated.episode.progress.guest_end_cause, world.tasks.checks) == (score, cause, 3)
    if cause:
        assert "at the task's start the checkers work" in evaluated.checks[0].evidence
    assert world.pool.statistics().leased_count == 1


async def test_a_fault_of_the_host_in_the_second_check_gives_no_score(world: World, episode_id: str) -> None:
    world.tasks.check_errors = [blocked(), None, EvaluatorFailed("the suite's file is gone")]
    with pytest.raises(EvaluatorFailed, match="file is gone"):
        await world.service.evaluate(episode_id, request_id="e", fingerprint=b"")
    assert (world.state(episode_id)[1], world.tasks.checks) == ("EVALUATED", 3)


@pytest.mark.parametrize("is_compared", [False, True], ids=["while it is compared", "while it is checked again"])
async def test_a_guest_that_powers_off_when_its_check_has_failed_is_scored_0(
    world: World, episode_id: str, is_compared: bool
) -> None:
    world.tasks.check_errors = [blocked()]
    world.tasks.setup_gate.clear()
    evaluating = await begun(world.service.evaluate(episode_id, request_id="e", fingerprint=b""))
    if is_compared:
        world.desktop(episode_id).gates["run"].clear()
        world.tasks.setup_gate.set()
        await run_ready()
    world.machine(episode_id).end(POWER_OFF)
    await run_ready()
    world.tasks.setup_gate.set()
    world.desktop(episode_id).gates["run"].set()
    evaluated = await evaluating
    assert (evaluated.score, evaluated.episode.progress.guest_end_cause) == (0.0, "POWER_OFF")
    assert world.tasks.checks == 2 + is_compared


async def test_a_checker_that_fails_at_the_start_too_gives_no_score(world: World, episode_id: str) -> None:
    world.tasks.check_error = blocked()
    with pytest.raises(EvaluatorFailed, match="cannot open display"):
        await world.service.evaluate(episode_id, request_id="e", fingerprint=b"")
    assert world.tasks.checks == 2


async def test_a_failed_check_that_no_machine_is_free_to_compare_gives_no_score(world: World) -> None:
    episodes = (await world.reset(group_size=world.pool.settings.capacity)).episodes
    world.tasks.check_errors = [blocked()]
    evaluating = await begun(world.service.evaluate(episodes[0].episode_id, request_id="e", fingerprint=b""))
    await world.clock.advance(121)
    with pytest.raises(EvaluatorFailed, match="cannot open display"):
        await evaluating
    assert world.tasks.checks == 1


async def test_the_comparison_waits_for_a_machine_and_its_setup_has_the_whole_limit(world: World) -> None:
    episodes = (await world.reset(group_size=world.pool.settings.capacity)).episodes
    world.tasks.check_errors = [blocked(), None, blocked()]
    evaluating = await begun(world.service.evaluate(episodes[0].episode_id, request_id="e", fingerprint=b""))
    await world.clock.advance(100)
    assert world.tasks.setups == 1
    world.tasks.setup_gate.clear()
    await world.service.close(episodes[1].episode_id)
    await run_ready()
    await world.clock.advance(250)
    world.tasks.setup_gate.set()
    evaluated = await evaluating
    assert (evaluated.score, evaluated.episode.progress.guest_end_cause) == (0, "UNCHECKABLE")
    assert world.tasks.setup_limits_s[1] == pytest.approx(LimitsConfig().setup_timeout_s)


@pytest.mark.parametrize("cause", [TimeoutError(), EOFError(), RuntimeError("judge_file_text: KeyError('x')")])
async def test_an_evaluation_that_is_late_or_whose_judge_ends_is_compared_like_one_that_fails(
    world: World, episode_id: str, cause: Exception
) -> None:
    world.tasks.check_errors = [failed(cause), None, failed(cause)]
    evaluated = await world.service.evaluate(episode_id, request_id="e", fingerprint=b"")
    assert (evaluated.score, evaluated.episode.progress.guest_end_cause) == (0, "UNCHECKABLE")


async def test_the_machine_of_a_comparison_counts_for_its_owner_who_may_be_at_the_limit(world: World) -> None:
    episode_id = await world.open(owner="a", max_machines=1)
    world.tasks.check_errors = [blocked(), None, blocked()]
    world.tasks.setup_gate.clear()
    evaluating = await begun(world.service.evaluate(episode_id, request_id="e", fingerprint=b""))
    with pytest.raises(TokenQuotaReached, match="2 are in use"):
        await world.reset(owner="a", max_machines=2)
    world.tasks.setup_gate.set()
    assert (await evaluating).score == 0
    await world.open(owner="a", max_machines=2)


async def test_a_host_that_loses_an_ended_session_voids_it(world: World, episode_id: str) -> None:
    world.desktop(episode_id).errors["settle"] = GuestUnresponsive("no update within 30 s")
    world.machine(episode_id).silence = Silence(run_state="running", agent_answers=True)
    await world.service.step(world.step_command(episode_id, 0))
    world.kill(episode_id)
    await run_ready()
    with pytest.raises(MachineLost):
        await world.service.evaluate(episode_id, request_id="e", fingerprint=b"")


async def test_pipelined_steps_behind_a_lost_machine_are_machine_lost_too(world: World, episode_id: str) -> None:
    world.desktop(episode_id).gates["act"].clear()
    steps = [asyncio.create_task(world.service.step(world.step_command(episode_id, i))) for i in range(3)]
    await run_ready()
    world.kill(episode_id)
    results = await asyncio.gather(*steps, return_exceptions=True)
    assert [type(result) for result in results] == [MachineLost] * 3


# -- observe ----------------------------------------------------------------------------------------------------


async def test_observing_changes_nothing_and_asks_the_guest_only_for_a_refresh(
    world: World, episode_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, desktop, refreshes = world.service.list_episodes(), world.desktop(episode_id), list[bool]()
    observe = desktop.observe

    async def noted(options: ObservationOptions, *, refresh: bool = False, since: Frame | None = None) -> Observation:
        refreshes.append(refresh)
        return await observe(options, refresh=refresh, since=since)

    monkeypatch.setattr(desktop, "observe", noted)
    await world.clock.advance(5.0)
    observation = await world.service.observe(episode_id, ObservationOptions(), settle=SettlePolicy(), refresh=True)
    assert observation.settle is not None
    assert (await world.service.observe(episode_id, ObservationOptions())).settle is None
    assert (world.service.list_episodes(), refreshes) == (before, [True, False])


async def test_an_unavailable_observation_does_not_end_the_episode(world: World, episode_id: str) -> None:
    world.desktop(episode_id).errors["observe"] = GuestUnresponsive("no tree within 10 s")
    with pytest.raises(GuestUnresponsive):
        await world.service.observe(episode_id, ObservationOptions(a11y_format=A11yFormat.OSWORLD_XML))
    assert world.state(episode_id) == (EpisodeState.ACTIVE, "")


# -- evaluate ---------------------------------------------------------------------------------------------------


async def test_evaluate_scores_once_and_ends_the_episode(world: World, episode_id: str) -> None:
    first = await world.service.evaluate(episode_id, request_id="e1", fingerprint=b"")
    again = await world.service.evaluate(episode_id, request_id="e1", fingerprint=b"")
    other = await world.service.evaluate(episode_id, request_id="e2", fingerprint=b"")
    assert (first.score, first.cached) == (1.0, False)
    assert first.checks[0].evidence == "seen"
    assert first.episode.progress.end_reason == "EVALUATED"
    assert set(first.timings_ms) == {"queue", "resume", "evaluate", "total"}
    assert again == other == replace(first, cached=True)
    assert world.tasks.checks == 1
    with pytest.raises(EpisodeEnded, match="EVALUATED"):
        await world.service.step(world.step_command(episode_id, 0))
    assert world.metrics.ends == ["truncated"]


async def test_a_retried_evaluate_joins(world: World, episode_id: str) -> None:
    world.tasks.check_gate.clear()
    calls = [
        asyncio.create_task(world.service.evaluate(episode_id, request_id=r, fingerprint=b"")) for r in ("e", "e", "f")
    ]
    await run_ready()
    world.tasks.check_gate.set()
    assert [(await call).score for call in calls] == [1.0] * 3
    assert world.tasks.checks == 1


async def test_evaluate_waits_for_the_running_step_and_sees_its_end_state(world: World, episode_id: str) -> None:
    desktop = world.desktop(episode_id)
    desktop.gates["settle"].clear()
    done = Done(answer="42")
    step = await begun(world.service.step(world.step_command(episode_id, 0, done)))
    score = await begun(world.service.evaluate(episode_id, request_id="e", fingerprint=b""))
    assert world.tasks.checks == 0
    desktop.gates["settle"].set()
    await step
    assert (await score).episode == world.info(episode_id)
    assert world.tasks.last_action == done
    assert world.state(episode_id) == (EpisodeState.TERMINATED, "AGENT_DONE")


@pytest.mark.parametrize(
    ("error", "check_count"), [(EvaluatorFailed("no such file in the suite"), 1), (KeyError("path"), 2)]
)
async def test_a_failed_checker_is_an_error_in_all_later_calls(
    world: World, error: Exception, check_count: int, episode_id: str
) -> None:
    world.tasks.check_error = error
    for request_id in ("e1", "e1", "e2"):
        with pytest.raises(EvaluatorFailed):
            await world.service.evaluate(episode_id, request_id=request_id, fingerprint=b"")
    assert world.tasks.checks == check_count
    assert world.metrics.recorded_failures == [("evaluate", "EVALUATOR_FAILED")]


async def test_a_machine_killed_during_evaluate_never_yields_a_score(world: World, episode_id: str) -> None:
    world.tasks.check_gate.clear()
    world.tasks.score = 0.0  # what a checker makes of files that are gone
    score = await begun(world.service.evaluate(episode_id, request_id="e", fingerprint=b""))
    world.kill(episode_id)
    world.tasks.check_gate.set()
    with pytest.raises(MachineLost, match="lost during Evaluate"):
        await score
    with pytest.raises(MachineLost):
        await world.service.evaluate(episode_id, request_id="e2", fingerprint=b"")
    assert world.state(episode_id) == (EpisodeState.FAILED, "MACHINE_LOST")


async def test_a_score_outside_its_range_is_an_error(world: World, episode_id: str) -> None:
    world.tasks.score = float("nan")
    with pytest.raises(EvaluatorFailed, match="score nan"):
        await world.service.evaluate(episode_id, request_id="e", fingerprint=b"")


async def test_a_score_remains_valid_when_the_machine_dies_later(world: World, episode_id: str) -> None:
    await world.service.evaluate(episode_id, request_id="e1", fingerprint=b"")
    world.kill(episode_id)
    await run_ready()
    assert (await world.service.evaluate(episode_id, request_id="e2", fingerprint=b"")).score == 1.0
    assert world.state(episode_id) == (EpisodeState.TRUNCATED, "EVALUATED")
    await world.service.close(episode_id)


# -- close and leases -------------------------------------------------------------------------------------------


async def test_close_destroys_the_machine_and_is_idempotent(world: World, episode_id: str) -> None:
    machine_id = world.desktop(episode_id).machine.machine_id
    await world.service.close(episode_id)
    assert machine_id not in world.hypervisor.machines
    await world.service.close(episode_id)
    await world.service.close("ep-unknown")
    with pytest.raises(EpisodeNotFound, match=f"{episode_id}: closed at 2030-01-01T00:00:00"):
        await world.service.observe(episode_id, ObservationOptions())
    with pytest.raises(EpisodeNotFound, match="ep-unknown"):
        await world.service.observe("ep-unknown", ObservationOptions())
    assert world.metrics.ends == ["truncated"]


async def test_close_continues_when_its_caller_is_cancelled_and_a_retry_joins_it(world: World, episode_id: str) -> None:
    machine_id = world.desktop(episode_id).machine.machine_id
    world.hypervisor.destroy_gate.clear()
    first = await begun(world.service.close(episode_id))
    first.cancel()
    retry = await begun(world.service.close(episode_id))
    assert not retry.done()
    world.hypervisor.destroy_gate.set()
    await retry
    assert machine_id not in world.hypervisor.machines


async def test_close_cancels_running_calls(world: World, episode_id: str) -> None:
    desktop = world.desktop(episode_id)
    desktop.gates["act"].clear()
    desktop.gates["observe"].clear()
    step = asyncio.create_task(world.service.step(world.step_command(episode_id, 0)))
    queued = asyncio.create_task(world.service.step(world.step_command(episode_id, 1)))
    look = await begun(world.service.observe(episode_id, ObservationOptions()))
    await world.service.close(episode_id)
    for call in (step, queued, look):
        with pytest.raises(EpisodeNotFound, match="closed"):
            await call
    await run_ready()
    world.check_no_leaks()
    assert world.metrics.recorded_failures == [], "closing is not a failure"


async def test_an_unused_lease_expires_and_the_machine_is_reclaimed(world: World) -> None:
    episode_id = await world.open(lease_ttl_s=60.0)
    await world.clock.advance(59.0)
    assert len(world.service.list_episodes()) == 1
    await world.clock.advance(1.0)
    assert world.service.list_episodes() == []
    with pytest.raises(EpisodeNotFound, match="lease expired"):
        await world.service.step(world.step_command(episode_id, 0))
    world.check_no_leaks()
    assert world.metrics.ends == ["truncated"]


async def test_steps_and_keep_alive_and_evaluate_renew_the_lease_and_observe_does_not(world: World) -> None:
    episode_id = await world.open(lease_ttl_s=60.0)
    await world.clock.advance(50.0)
    await world.service.step(world.step_command(episode_id, 0))
    await world.clock.advance(50.0)
    await world.service.keep_alive([episode_id], None)
    await world.clock.advance(50.0)
    await world.service.evaluate(episode_id, request_id="e", fingerprint=b"")
    await world.clock.advance(50.0)
    await world.service.observe(episode_id, ObservationOptions())
    assert len(world.service.list_episodes()) == 1
    await world.clock.advance(10.0)
    assert world.service.list_episodes() == []


async def test_keep_alive_omits_closed_episodes_and_can_change_the_ttl(world: World, episode_id: str) -> None:
    begin = world.clock.now()
    (info,) = await world.service.keep_alive(["ep-unknown", episode_id], 20.0)
    assert (info.expire_time - begin).total_seconds() == 20.0
    await world.clock.advance(20.0)
    assert world.service.list_episodes() == []
    with pytest.raises(InvalidRequest, match="lease_ttl"):
        await world.service.keep_alive([], 5.0)


async def test_a_lease_never_expires_while_a_step_runs(world: World) -> None:
    episode_id = await world.open(lease_ttl_s=10.0)
    desktop = world.desktop(episode_id)
    desktop.gates["act"].clear()
    caller = await begun(world.service.step(world.step_command(episode_id, 0)))
    caller.cancel()
    await world.clock.advance(1000.0)
    assert len(world.service.list_episodes()) == 1
    desktop.gates["act"].set()
    await world.clock.advance(9.0)
    assert len(world.service.list_episodes()) == 1
    await world.clock.advance(1.0)
    assert world.service.list_episodes() == []


async def test_a_step_that_does_not_end_loses_its_machine_after_a_bounded_time(world: World) -> None:
    episode_id = await world.open(lease_ttl_s=10.0)
    world.desktop(episode_id).gates["act"].clear()
    caller = asyncio.create_task(world.service.step(world.step_command(episode_id, 0)))
    await world.clock.advance(10.0 + MAX_CALL_S - 1.0)
    assert not caller.done()
    await world.clock.advance(1.0)
    assert world.service.list_episodes() == []
    with pytest.raises(EpisodeNotFound, match="lease expired"):
        await caller


async def test_a_stall_of_the_daemon_does_not_expire_leases(world: World) -> None:
    episode_id = await world.open(lease_ttl_s=15.0)
    lag = LoopLag(monotonic=world.clock.monotonic)
    world.service.extend_leases_by(lag)
    measuring = asyncio.create_task(lag.run())
    await world.clock.advance(0.0)
    # The reaper wakes first after the stall, and calls that waited come later.
    world.clock.stall(25.0)
    await run_ready()
    assert len(world.service.list_episodes()) == 1
    await world.service.keep_alive([episode_id], None)
    await world.clock.advance(14.0)
    assert len(world.service.list_episodes()) == 1
    measuring.cancel()


async def test_the_lease_starts_when_the_reset_is_complete(world: World) -> None:
    world.tasks.setup_gate.clear()
    reset = asyncio.create_task(world.reset(lease_ttl_s=10.0))
    await world.clock.advance(100.0)
    world.tasks.setup_gate.set()
    (info,) = (await reset).episodes
    assert (info.expire_time - world.clock.now()).total_seconds() == 10.0


async def test_a_machine_killed_between_calls_fails_its_episode_until_the_lease_expires(world: World) -> None:
    episode_id = await world.open(lease_ttl_s=10.0)
    world.kill(episode_id)
    await run_ready()
    assert world.state(episode_id) == (EpisodeState.FAILED, "MACHINE_LOST")
    assert world.pool.statistics().idle_count == CAPACITY
    await world.clock.advance(9.0)
    assert world.state(episode_id) == (EpisodeState.FAILED, "MACHINE_LOST")
    await world.clock.advance(1.0)
    assert world.service.list_episodes() == []


# -- pools ------------------------------------------------------------------------------------------------------


async def test_pools_are_listed_with_their_present_state(world: World) -> None:
    await world.reset(group_size=2)
    (info,) = world.service.list_pools()
    assert (info.name, info.image, info.os, info.accelerator) == ("desktop", "desktop", "linux", "fake")
    assert (info.capacity, info.idle_count, info.leased_count) == (3, 1, 2)
    assert info.healthy


async def test_watching_pools_yields_at_once_then_newest_states_only(world: World) -> None:
    watch = world.service.watch_pools()
    assert (await anext(watch))[0].idle_count == 3
    upcoming = asyncio.ensure_future(anext(watch))
    await run_ready()
    assert not upcoming.done(), "no pool has changed"
    await world.reset(group_size=2)
    assert (await upcoming)[0].waiting_count in {0, 2}
    await world.reset()
    await run_ready()
    assert (await anext(watch))[0].leased_count == 3, "a slow reader gets the newest state"
    await world.service.aclose()
    assert [pools[0].capacity async for pools in watch] in ([], [CAPACITY]), "the watch ends with the service"


# -- guest access -----------------------------------------------------------------------------------------------


async def test_guest_files_and_commands_work_if_the_pool_allows_them(world: World, episode_id: str) -> None:
    await world.service.write_file(episode_id, "/home/user/a", b"\xff\x00")
    assert await world.service.read_file(episode_id, "/home/user/a", max_bytes=10) == b"\xff\x00"
    with pytest.raises(ObjectNotFound, match="no file '/home/user/b'"):
        await world.service.read_file(episode_id, "/home/user/b", max_bytes=10)
    result = await world.service.run_command(episode_id, ["uname", "-a"], timeout_s=60.0)
    assert (result.exit_code, result.stdout) == (0, b"uname -a")


async def test_guest_access_is_denied_if_the_pool_does_not_allow_it(world: World, episode_id: str) -> None:
    world.pool.settings = world.pool.settings.model_copy(update={"allow_guest_access": False})
    for call in (
        world.service.read_file(episode_id, "/a", max_bytes=1),
        world.service.write_file(episode_id, "/a", b""),
        world.service.run_command(episode_id, ["true"], timeout_s=60.0),
    ):
        with pytest.raises(AccessDenied, match="set allow_guest_access"):
            await call


# -- draining ---------------------------------------------------------------------------------------------------


async def test_draining_lets_running_episodes_finish(world: World, episode_id: str) -> None:
    draining = await begun(world.service.drain(60.0))
    with pytest.raises(Draining):
        await world.reset()
    await world.service.step(world.step_command(episode_id, 0))
    assert (await world.service.evaluate(episode_id, request_id="e", fingerprint=b"")).score == 1.0
    assert not draining.done()
    await world.service.close(episode_id)
    await run_ready()
    assert draining.done()
    assert world.hypervisor.machines == {}


async def test_draining_closes_the_remaining_episodes_at_the_end(world: World, episode_id: str) -> None:
    waiting = asyncio.create_task(world.reset(group_size=3))
    draining = asyncio.create_task(world.service.drain(60.0))
    with pytest.raises(Draining):
        await waiting
    await world.clock.advance(59.0)
    assert len(world.service.list_episodes()) == 1
    await world.clock.advance(1.0)
    await draining
    with pytest.raises(EpisodeNotFound, match="stopping"):
        await world.service.step(world.step_command(episode_id, 0))
    assert world.metrics.ends == ["truncated"]


async def test_failed_episodes_do_not_hold_up_a_drain(world: World) -> None:
    first, second = await world.open(), await world.open()
    world.kill(first)
    await run_ready()
    draining = await begun(world.service.drain(60.0))
    assert not draining.done()
    world.kill(second)
    await run_ready()
    assert draining.done()


async def test_a_reset_still_in_setup_when_the_drain_ends_raises_draining(world: World) -> None:
    world.tasks.setup_gate.clear()
    reset = await begun(world.reset())
    await world.service.drain(0.0)
    with pytest.raises(Draining):
        await reset
    await run_ready()
    assert world.hypervisor.machines == {}


async def test_closing_the_service_is_idempotent_and_continues_when_cancelled(world: World) -> None:
    await world.reset(group_size=2)
    world.hypervisor.destroy_gate.clear()
    closing = await begun(world.service.aclose())
    closing.cancel()
    await run_ready()
    world.hypervisor.destroy_gate.set()
    await world.service.aclose()
    assert world.hypervisor.machines == {}
    assert repr(world.service).startswith("<EpisodeService closed, 0 episodes")


# -- everything at once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
async def test_a_hundred_random_cancellations_and_kills_leak_nothing(world: World, seed: int) -> None:
    dice = random.Random(seed)

    async def episode() -> None:
        result = await world.reset(group_size=dice.randint(1, CAPACITY), lease_ttl_s=30.0, timeout_s=120.0)
        for info in result.episodes:
            await world.service.step(world.step_command(info.episode_id, 0))
            await world.service.evaluate(info.episode_id, request_id="e", fingerprint=b"")
            await world.service.close(info.episode_id)

    async def nap() -> None:
        await run_turns(dice.randint(0, 30))

    callers: list[asyncio.Task[None]] = []
    for _ in range(100):
        callers.append(asyncio.create_task(episode()))
        await nap()
        dice.choice(callers).cancel()
        if dice.random() < 0.1 and world.hypervisor.machines:
            dice.choice(list(world.hypervisor.machines.values())).die("QEMU was killed by signal 9")
        if dice.random() < 0.1:
            world.tasks.setup_errors.append(SetupFailed("by chance"))
        assert len(world.hypervisor.machines) <= CAPACITY
    await world.clock.advance(20.0)
    # Resets without a caller have ended, so the next ones run, until episodes without a caller hold all machines.
    await run_turns(5_000)
    world.check_no_leaks()
    await world.clock.advance(600.0)
    await asyncio.gather(*callers, return_exceptions=True)
    assert world.service.list_episodes() == [], "the leases of open episodes have expired"
    world.check_no_leaks()
    assert world.pool.statistics().idle_count == CAPACITY
    assert world.hypervisor.peak_count <= CAPACITY
