"""Rollbacks, scores and automatic checkpoints through the service, on drawn desktops."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from cuaenv.client import (
    AskUser,
    AsyncEnvClient,
    AsyncEpisode,
    BadRequest,
    Checkpoint,
    CheckpointNotFound,
    CheckpointUnusable,
    Click,
    Conflict,
    Done,
    EvaluatorFailed,
    HumanInControl,
    KeyDown,
    KeyUp,
    MachineLost,
    Observation,
    Perturb,
    SampleVoid,
    State,
    TypeText,
    View,
)
from cuaenv.client.observation import read_observation
from envd.base import errors
from envd.base.config import CheckpointsConfig
from envd.base.errors import RequestIdReused
from envd.base.store.store import EpisodeRow
from envd.episodes.checkpoints.store import CheckpointStore
from envd.episodes.progress import EpisodeState, Progress
from envd.episodes.recording.library import Library
from envd.episodes.recording.recorder import Recorder
from envd.episodes.recording.writer import RecordingDirectory
from envd.episodes.types import ResetCommand, RollbackCommand, StepCommand
from envd.hypervisor.machine import MachineState
from envd.tasks import perturbations
from envd.tasks.text import ScoreResult
from envd.tasks.user import Exchange
from tests.support.callers import Tokens
from tests.support.clock import until
from tests.support.faulty import FakeHost, Faults
from tests.support.server import FakeServer, served_client, with_user

TASK = "fake/save-note"
EDITOR, SAVE = Click(379, 311), Click(82, 86)
LINE = TypeText("Hello, fake desktop!")


@asynccontextmanager
async def served(directory: Path, **options: Any) -> AsyncIterator[tuple[FakeServer, AsyncEnvClient]]:
    """Serve with checkpoints in a directory; afterwards no state and no unfinished checkpoint is left."""
    store = CheckpointStore(
        directory / "checkpoints", settings=options.pop("settings", CheckpointsConfig()), reserve_bytes=0
    )
    async with served_client(**{"checkpoints": store, "size": 1, "capacity": 3, **options}) as (server, client):
        yield server, client
    assert server.hypervisor.host.captures == {}
    assert not list(directory.glob("checkpoints/part-*"))


def machines_of(server: FakeServer) -> set[str]:
    return set(server.service.machine_ids().values())


async def until_queued(episode: Any, count: int) -> None:
    """Wait until `count` calls wait for an episode's lock. A rollback reads its checkpoint before it waits."""
    await until(lambda: len(episode.lock._waiters or ()) == count)


async def stored(client: AsyncEnvClient, *, count: int) -> list[Checkpoint]:
    """Return the checkpoints when there are as many: automatic ones are stored in the background."""
    async with asyncio.timeout(30):
        while len(found := await client.list_checkpoints()) < count:
            await asyncio.sleep(0.01)
    return found


async def test_an_episode_goes_back_and_does_otherwise(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, client), client.reset(TASK) as episode:
        await episode.step(EDITOR)
        checkpoint = await episode.checkpoint()
        frames = [(await episode.step(TypeText(text))).observation.frame_id for text in ("one", "two")]
        (before,) = machines_of(server)
        seen = await episode.rollback(checkpoint)
        assert seen.frame_id == checkpoint.frame_id
        assert (episode.epoch, episode.step_count, episode.state) == (2, 1, State.ACTIVE)
        (after,) = machines_of(server)
        assert after != before
        assert (await episode.step(TypeText("one"))).observation.frame_id == frames[0]
        assert (await episode.step(TypeText("2"))).observation.frame_id != frames[1]
        assert (await episode.rollback(checkpoint)).frame_id == checkpoint.frame_id
        (listed,) = await client.list_episodes()
        assert (listed.episode_id, listed.epoch, listed.step_count) == (episode.episode_id, 3, 1)
        await episode.step(LINE, SAVE, Done())
        assert (await episode.evaluate()).score == 1


async def answer_to(episode: AsyncEpisode, question: str) -> str:
    (result,) = (await episode.step(AskUser(question))).tool_results
    assert result is not None
    return result.output


#: A value of each field that differs from the one before: of an active episode, and of one that has ended.
BEFORE = {
    "step_count": 1,
    "asked": (Exchange("Which room?", "The room."),),
    "people_actions": (Click(1, 2),),
    "perturbations": ("theme",),
    "last_checkpoint_id": "ckpt-0",
}
CHANGED = Progress(
    step_count=3,
    asked=(Exchange("Which date?", "The date."),),
    people_actions=(Click(3, 4),),
    perturbations=("background",),
    last_checkpoint_id="ckpt-1",
    state=EpisodeState.TERMINATED,
    end_reason="AGENT_DONE",
    cause="SESSION_ENDED",
    last_action=Done("done"),
    score=ScoreResult(score=1.0, checks=(), timings_ms={}),
    evaluator_error="a checker failed",
)


@pytest.mark.parametrize("way", ["rollback", "fork", "reset"])
async def test_a_stored_state_has_the_progress_that_the_episode_had(tmp_path: Path, way: str) -> None:
    progress = Progress(**BEFORE)  # type: ignore[arg-type]
    async with AsyncExitStack() as stack:
        server, client = await stack.enter_async_context(served(tmp_path))
        episode = await stack.enter_async_context(client.reset(TASK))
        found = server.service._registry.get(episode.episode_id)
        found.progress, episode.step_count = progress, progress.step_count
        if way == "fork":
            (episode,) = await stack.enter_async_context(client.fork(episode, count=1))
        else:
            checkpoint = await episode.checkpoint()
            progress = replace(progress, last_checkpoint_id=checkpoint.checkpoint_id)
            assert [
                each.name for each in fields(Progress) if getattr(CHANGED, each.name) == getattr(progress, each.name)
            ] == []
            # No episode with a cause, which its guest or its machine ended, is rolled back.
            found.progress = replace(CHANGED, cause="") if way == "rollback" else CHANGED
            episode.step_count = found.progress.step_count
            if way == "rollback":
                await episode.rollback(checkpoint)
            else:
                episode = await stack.enter_async_context(client.reset(checkpoint))
        assert server.service._registry.get(episode.episode_id).progress == progress


@pytest.mark.parametrize("field", [each.name for each in fields(Progress)])
async def test_the_next_daemon_knows_the_progress_of_an_episode(tmp_path: Path, field: str) -> None:
    options: dict[str, Any] = {"host": FakeHost(), "database": tmp_path / "envd.db"}
    async with AsyncExitStack() as stack:
        server, client = await stack.enter_async_context(served(tmp_path, **options))
        episode = await stack.enter_async_context(client.reset(TASK))
        found = server.service._registry.get(episode.episode_id)
        found.progress = progress = replace(found.progress, **{field: getattr(CHANGED, field)})
        server.service.journal.save(found)
        await server.store.rows(EpisodeRow)  # type: ignore[union-attr]
        await server.kill()
        server, _ = await stack.enter_async_context(served(tmp_path, listen=server.address, **options))
        assert server.service._registry.get(episode.episode_id).progress == progress
        await episode.close()  # while its server runs


async def test_what_was_asked_before_a_rollback_can_be_asked_again(tmp_path: Path) -> None:
    async with served(tmp_path, extra_tasks=[with_user()]) as (_, client), client.reset("fake/with-user") as episode:
        assert await answer_to(episode, "Which room?") == "The room."
        checkpoint = await episode.checkpoint()
        assert await answer_to(episode, "Which date?") == "The date."
        assert "no more than 2 questions" in (await episode.step(AskUser("Which?"))).action_errors[0]
        await episode.rollback(checkpoint)
        assert await answer_to(episode, "Which date?") == "The date."


async def test_a_fork_has_the_progress_of_its_parent_when_that_was_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        served(tmp_path, extra_tasks=[with_user()]) as (server, client),
        client.reset("fake/with-user") as episode,
    ):
        original = type(server.pool).fork

        async def ask_meanwhile(*args: Any) -> Any:
            await answer_to(episode, "Which room?")
            return await original(*args)

        monkeypatch.setattr(type(server.pool), "fork", ask_meanwhile)
        async with client.fork(episode, count=1) as (copy,):
            forked, parent = (server.service._registry.get(each.episode_id).progress for each in (copy, episode))
        assert (forked.step_count, forked.asked) == (0, ())
        assert (parent.step_count, len(parent.asked)) == (1, 1)


async def test_a_rollback_to_a_state_of_another_episode_names_the_perturbations_of_its_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(perturbations._KINDS, "theme", (lambda _: [], True))
    async with (
        served(tmp_path) as (_, client),
        client.reset(TASK, perturb=Perturb(seed=1, kinds=("theme",))) as other,
        client.reset(TASK) as episode,
    ):
        await episode.rollback(await other.checkpoint())
        assert episode.perturbations == ("theme",)


async def test_an_episode_that_ended_or_was_scored_is_active_again(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client), client.reset(TASK, max_steps=2) as episode:
        await episode.step(EDITOR, LINE)
        checkpoint = await episode.checkpoint()
        await episode.step(Done())
        assert (await episode.evaluate()).score == 0
        await episode.rollback(checkpoint)
        assert (episode.state, episode.end_reason) == (State.ACTIVE, "")
        result = await episode.step(SAVE)
        assert (result.state, result.end_reason) == (State.TRUNCATED, "MAX_STEPS")
        assert (await episode.evaluate()).score == 1
        await episode.rollback(checkpoint)
        assert (await episode.evaluate()).score == 0


async def test_while_a_person_controls_an_episode_only_that_person_rolls_it_back(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, client):
        service = server.service
        directory = RecordingDirectory(tmp_path / "recordings", limit_bytes=1 << 30, min_free_bytes=0)
        recorder = Recorder(service, directory, max_rate_hz=10, on_failed=lambda _: None)
        async with client.reset(TASK) as episode:
            id_ = episode.episode_id
            checkpoint = await episode.checkpoint()
            service.take_control(id_, control_id="page-1", holder="")
            await service.act(id_, control_id="page-1", actions=[EDITOR, TypeText("gone")])
            with pytest.raises(HumanInControl, match="a person controls it"):
                await episode.rollback(checkpoint)
            back = RollbackCommand(request_id="back", episode_id=id_, checkpoint_id=checkpoint.checkpoint_id)
            with pytest.raises(errors.HumanInControl, match="you do not control it"):
                await service.rollback(replace(back, control_id="page-2"))
            assert (await service.rollback(replace(back, control_id="page-1"))).episode.epoch == 2
            # It is still controlled, so its guest runs.
            (machine,) = machines_of(server)
            async with asyncio.timeout(30):
                while server.hypervisor.machines[machine].state is not MachineState.RUNNING:
                    await asyncio.sleep(0.01)
            await service.act(id_, control_id="page-1", actions=[EDITOR, TypeText("kept"), SAVE])
            await service.release_control(id_, control_id="page-1")
            with pytest.raises(Conflict):
                await episode.step(LINE)
            assert await episode.read_file("/home/user/note.txt") == b"kept"
        await recorder.aclose()
    recording = Library(tmp_path / "recordings").read(id_)
    assert [(len(step["performed"]), step.get("rolled_back", False)) for step in recording.steps] == [
        (2, True),
        (3, False),
    ]


async def test_held_keys_are_held_again(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client), client.reset(TASK) as episode:
        await episode.step(EDITOR, KeyDown("shift"))
        checkpoint = await episode.checkpoint()
        await episode.step(KeyUp("shift"), TypeText("x"))
        await episode.rollback(checkpoint)
        await episode.step(TypeText("a"), KeyUp("shift"), SAVE)
        assert await episode.read_file("/home/user/note.txt") == b"A"


async def test_checkpoints_after_a_rollback_descend_from_where_it_went(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client), client.reset(TASK) as episode:
        first = await episode.checkpoint()
        await episode.step(EDITOR)
        second = await episode.checkpoint()
        await episode.rollback(first)
        third = await episode.checkpoint()
        async with client.fork(episode, count=1) as (copy,):
            fourth = await copy.checkpoint()
        assert [each.parent_checkpoint_id for each in (first, second, third, fourth)] == [
            "",
            first.checkpoint_id,
            first.checkpoint_id,
            third.checkpoint_id,
        ]
        assert [each.epoch for each in (first, second, third, fourth)] == [1, 1, 2, 1]


async def test_calls_of_an_old_epoch_do_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client), client.reset(TASK) as episode:
        checkpoint = await episode.checkpoint()
        await episode.rollback(checkpoint)
        episode.epoch = 1
        for refused in (
            episode.step(EDITOR),
            episode.checkpoint(),
            episode.evaluate(),
            episode.rollback(checkpoint),
            client.fork(episode, count=1).__aenter__(),
        ):
            with pytest.raises(Conflict, match="now in epoch 2 at step 0"):
                await refused
        episode.epoch = 3
        with pytest.raises(Conflict):
            await episode.step(EDITOR)
        # 0 is a client that does not know epochs.
        episode.epoch = 0
        assert (await episode.step(EDITOR)).step_count == 1
        assert episode.epoch == 2


async def test_of_two_rollbacks_at_once_one_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, client), client.reset(TASK) as episode:
        await episode.step(EDITOR)
        checkpoint = await episode.checkpoint()
        results = await asyncio.gather(*(episode.rollback(checkpoint) for _ in range(2)), return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["Conflict", "Observation"]
        assert episode.epoch == 2
        assert len(machines_of(server)) == 1


async def test_an_evaluation_behind_a_rollback_does_not_score_the_next_attempt(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, client), client.reset(TASK) as episode:
        checkpoint = await episode.checkpoint()
        (found,) = server.service.episodes
        async with found.lock:
            rollback = asyncio.create_task(episode.rollback(checkpoint))
            await until_queued(found, 1)
            evaluation = asyncio.create_task(episode.evaluate())
            await until(lambda: len(found.requests) == 3)
        await rollback
        with pytest.raises(Conflict, match="now in epoch 2 at step 0"):
            await evaluation
        assert (await episode.step(EDITOR)).step_count == 1


async def test_a_rollback_waits_for_a_step_and_refuses_those_behind_it(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, client), client.reset(TASK) as episode:
        checkpoint = await episode.checkpoint()
        (found,) = server.service.episodes
        async with found.lock:
            step = asyncio.create_task(episode.step(EDITOR))
            await until_queued(found, 1)
            rollback = asyncio.create_task(episode.rollback(checkpoint))
            await until_queued(found, 2)
            late = asyncio.create_task(episode.step(EDITOR))
            await until_queued(found, 3)
        assert (await step).step_count == 1
        assert (await rollback).frame_id == checkpoint.frame_id
        with pytest.raises(Conflict):
            await late
        assert (found.epoch, found.progress.step_count) == (2, 0)


async def test_responses_are_read_in_the_order_of_their_arrival(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, may_end = threading.Event(), threading.Event()

    def read_slowly(*arguments: Any) -> Observation:
        reading.set()
        assert may_end.wait(30)
        return read_observation(*arguments)

    async with served(tmp_path) as (server, client), client.reset(TASK) as episode:
        checkpoint = await episode.checkpoint()
        (found,) = server.service.episodes
        async with asyncio.timeout(30):
            with monkeypatch.context() as patched:
                patched.setattr("cuaenv.client.host.read_observation", read_slowly)
                step = asyncio.create_task(episode.step(EDITOR, LINE))
                while not reading.is_set():
                    await asyncio.sleep(0.01)
            rollback = asyncio.create_task(episode.rollback(checkpoint))
            while found.epoch == 1:
                await asyncio.sleep(0.01)
            await asyncio.wait({rollback}, timeout=0.3)
            may_end.set()
            stepped, went_back = await step, await rollback
        assert (stepped.step_count, stepped.observation.frame_id == checkpoint.frame_id) == (1, False)
        assert (episode.epoch, episode.step_count, episode.observation) == (2, 0, went_back)
        assert went_back.frame_id == checkpoint.frame_id


async def test_calls_that_are_overtaken_fail_and_harm_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, client), client.reset(TASK) as episode:
        checkpoint = await episode.checkpoint()
        shown: list[str] = []

        async def watch() -> None:
            async with aclosing(episode.frames(max_rate_hz=60)) as frames:
                async for frame in frames:
                    shown.append(frame.frame_id)

        watching = asyncio.create_task(watch())
        (found,) = server.service.episodes
        old = found.machine
        old.machine.faults = replace(server.hypervisor.faults, agent_silent=True)  # type: ignore[attr-defined]
        command = asyncio.create_task(episode.run_command(["sleep", "60"], as_root=True))
        await until(lambda: old._user_count == 1 and bool(shown))
        await episode.rollback(checkpoint)
        with pytest.raises(Conflict):
            await command
        await episode.step(EDITOR)
        assert (found.epoch, found.progress.step_count, found.progress.state.value) == (2, 1, "active")
        await until(lambda: episode.observation.frame_id in shown)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_repeated_request_rolls_back_once(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, client), client.reset(TASK) as episode:
        checkpoint = await episode.checkpoint()
        command = RollbackCommand(
            request_id="r",
            episode_id=episode.episode_id,
            checkpoint_id=checkpoint.checkpoint_id,
            epoch=1,
            fingerprint=b"1",
        )
        rollback = server.service.rollback
        first, again = await asyncio.gather(rollback(command), rollback(command))
        assert first == again
        assert await rollback(command) == first
        assert first.episode.epoch == 2
        with pytest.raises(RequestIdReused):
            await rollback(replace(command, fingerprint=b"2"))


async def test_a_full_pool_rolls_all_its_episodes_back(tmp_path: Path) -> None:
    async with served(tmp_path, capacity=6, size=1) as (server, client), client.reset_group(TASK, size=6) as episodes:
        checkpoints = await asyncio.gather(*(episode.checkpoint() for episode in episodes))
        seen = await asyncio.gather(
            *(episode.rollback(each) for episode, each in zip(episodes, checkpoints, strict=True))
        )
        assert {each.frame_id for each in seen} == {checkpoints[0].frame_id}
        assert len(machines_of(server)) == 6
        await asyncio.gather(*(episode.step(EDITOR) for episode in episodes))


async def test_a_rollback_that_fails_changes_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client), client.reset(TASK) as episode:
        checkpoint = await episode.checkpoint()
        await episode.step(EDITOR)
        async with client.reset("fake/count-to-five") as other:
            foreign = await other.checkpoint()
        with pytest.raises(BadRequest, match="fake/count-to-five"):
            await episode.rollback(foreign)
        with pytest.raises(CheckpointNotFound):
            await episode.rollback(replace(checkpoint, checkpoint_id="ckpt-0"))
        with pytest.raises(BadRequest, match="checkpoint_id"):
            await episode.rollback(replace(checkpoint, checkpoint_id=""))
        path = tmp_path / "checkpoints" / checkpoint.checkpoint_id / "screen.zst"
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        with pytest.raises(CheckpointUnusable, match="is damaged"):
            await episode.rollback(checkpoint)
        path.write_bytes(data)
        with pytest.raises(BadRequest, match="region"):
            await episode.rollback(checkpoint, view=View(region=(0, 0, 9000, 1)))
        assert (episode.epoch, episode.step_count) == (1, 1)
        assert (await episode.step(LINE)).step_count == 2
        assert (await episode.rollback(checkpoint)).frame_id == checkpoint.frame_id


async def test_without_another_machine_the_episode_continues(tmp_path: Path) -> None:
    async with served(tmp_path, size=1, capacity=1) as (server, client), client.reset(TASK) as episode:
        checkpoint = await episode.checkpoint()
        server.hypervisor.faults = replace(server.hypervisor.faults, fork_error="no memory")
        with pytest.raises(SampleVoid, match="no memory"):
            await episode.rollback(checkpoint)
        server.hypervisor.faults = Faults()
        assert (await episode.step(EDITOR)).step_count == 1
        assert (await episode.rollback(checkpoint)).frame_id == checkpoint.frame_id
        assert server.pool.statistics().leased_count == 1


async def test_a_void_episode_and_one_without_guest_are_not_rolled_back(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, client), client.reset(TASK) as episode:
        checkpoint = await episode.checkpoint()
        (found,) = server.service.episodes
        found.machine.machine.kill("killed by a test")  # type: ignore[attr-defined]
        with pytest.raises(MachineLost):
            await episode.rollback(checkpoint)
        async with client.reset(checkpoint) as copy:
            assert copy.observation.frame_id == checkpoint.frame_id


@asynccontextmanager
async def killed_daemons(directory: Path) -> AsyncIterator[Callable[[], Any]]:
    """Yield a function that serves on one host and database, as after each kill."""
    host = FakeHost()
    yield lambda: served_client(
        host=host,
        database=directory / "envd.sqlite",
        checkpoints=CheckpointStore(directory / "checkpoints", settings=CheckpointsConfig(), reserve_bytes=0),
        size=1,
        capacity=3,
    )
    assert host.machines == {}


async def test_a_rollback_is_done_once_over_a_kill_of_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cuaenv.client.leases._CLOSE_TIMEOUT", timedelta(seconds=1))
    async with killed_daemons(tmp_path) as serve:
        async with serve() as (server, client):
            episode = await client.open(TASK)
            await episode.step(EDITOR)
            checkpoint = await episode.checkpoint()
            await episode.step(LINE)
            done = RollbackCommand(
                request_id="done", episode_id=episode.episode_id, checkpoint_id=checkpoint.checkpoint_id, epoch=1
            )
            result = await server.service.rollback(done)
            machines = machines_of(server)
            await server.kill()
        async with serve() as (server, _):
            (info,) = server.service.list_episodes()
            assert (info.epoch, info.progress.step_count, info.progress.state.value) == (2, 1, "active")
            assert machines_of(server) == machines
            again = await server.service.rollback(done)
            assert (again.episode.epoch, again.observation.frame.frame_id) == (2, checkpoint.frame_id)
            assert again.timings_ms == result.timings_ms
            # Killed before the response was stored: the episode is where it was, and a retry rolls it back.
            step = StepCommand(
                request_id="s", episode_id=info.episode_id, step_index=1, actions=(LINE,), epoch=2, fingerprint=b""
            )
            await server.service.step(step)
            entered = asyncio.Event()

            async def never(*_: object) -> None:
                entered.set()
                await asyncio.Event().wait()

            server.service.journal.answered = never
            undone = replace(done, request_id="undone", epoch=2)
            rollback = asyncio.create_task(server.service.rollback(undone))
            await entered.wait()
            await server.kill()
            rollback.cancel()
        async with serve() as (server, _):
            (info,) = server.service.list_episodes()
            assert (info.epoch, info.progress.step_count, info.progress.state.value) == (2, 2, "active")
            assert (await server.service.rollback(undone)).episode.epoch == 3
            assert len(machines_of(server)) == 1
            await server.service.close(info.episode_id)


async def test_a_recording_marks_the_steps_that_were_taken_back(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, client):
        directory = RecordingDirectory(tmp_path / "recordings", limit_bytes=1 << 30, min_free_bytes=0)
        recorder = Recorder(server.service, directory, max_rate_hz=10, on_failed=lambda _: None)
        async with client.reset(TASK) as episode:
            await episode.step(EDITOR)
            checkpoint = await episode.checkpoint()
            await episode.step(TypeText("a mistake"))
            await episode.rollback(checkpoint)
            await episode.step(LINE)
        await recorder.aclose()
    recording = Library(tmp_path / "recordings").read(episode.episode_id)
    assert [(step["index"], step.get("rolled_back", False)) for step in recording.steps] == [
        (0, False),
        (1, True),
        (1, False),
    ]


async def test_a_checkpoint_is_scored_while_its_episode_continues(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, client):
        async with client.reset(TASK) as episode:
            await episode.step(EDITOR, LINE)
            before = await episode.checkpoint()
            await episode.step(SAVE)
            after = await episode.checkpoint()
            scores = [(await client.evaluate(each)).score for each in (before, after, before)]
            assert scores == [0, 1, 0]
            assert not (await episode.step(EDITOR)).done
        assert (await client.evaluate(after)).score == 1
        assert machines_of(server) == set()
        with pytest.raises(CheckpointNotFound):
            await client.evaluate(replace(after, checkpoint_id="ckpt-0"))


async def test_a_score_is_computed_once_per_request_and_never_from_a_lost_machine(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, client), client.reset(TASK) as episode:
        checkpoint = await episode.checkpoint()
        command = ResetCommand(request_id="r", task_id="", checkpoint_id=checkpoint.checkpoint_id, fingerprint=b"1")
        first, joined = await asyncio.gather(server.service.score(command), server.service.score(command))
        again = await server.service.score(command)
        assert (first.score, joined, again.cached) == (0, first, True)
        with pytest.raises(RequestIdReused):
            await server.service.score(replace(command, fingerprint=b"2"))
        server.hypervisor.faults = replace(server.hypervisor.faults, die_after_commands=0)
        async with client.reset("fake/count-to-five"):
            pass  # takes the ready machine, which has no such fault
        with pytest.raises(EvaluatorFailed):
            await client.evaluate(checkpoint)


async def test_checkpoints_are_stored_by_themselves(tmp_path: Path) -> None:
    async with (
        served(tmp_path, capacity=6) as (_, client),
        client.reset(
            TASK, checkpoint_every=2, checkpoint_on=["branch_point", "done", "failure"], max_steps=20
        ) as episode,
    ):
        for _ in range(4):
            result = await episode.step(EDITOR)
        assert "checkpoint" in result.timings_ms
        found = await stored(client, count=2)
        assert [(each.step_count, each.trigger) for each in found] == [(2, "steps"), (4, "steps")]
        async with client.fork(episode, count=1) as (copy,):
            (branch,) = [each for each in await stored(client, count=3) if each.trigger == "branch_point"]
            assert (branch.step_count, branch.frame_id) == (4, copy.observation.frame_id)
            # Forks inherit it.
            await copy.step(Done())
            (done,) = [each for each in await stored(client, count=4) if each.trigger == "done"]
            assert (done.episode_id, done.step_count) == (copy.episode_id, 5)
        await episode.step(TypeText("a mistake"))
        shown = episode.observation.frame_id
        assert (await episode.evaluate()).score == 0
        (failure,) = [each for each in await stored(client, count=5) if each.trigger == "failure"]
        assert failure.frame_id == shown
        async with client.reset(failure) as again:
            assert again.observation.frame_id == shown


async def test_a_success_is_not_stored_as_a_failure(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client), client.reset(TASK, checkpoint_on=["failure"]) as episode:
        await episode.step(EDITOR, LINE, SAVE)
        assert (await episode.evaluate()).score == 1
    async with served(tmp_path) as (_, client):
        assert await client.list_checkpoints() == []


async def test_a_store_without_space_fails_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = CheckpointsConfig(limit_gib=1e-6)
    async with served(tmp_path, settings=settings) as (_, client), client.reset(TASK, checkpoint_every=1) as episode:
        assert not (await episode.step(EDITOR)).done
        async with asyncio.timeout(30):
            while "no automatic checkpoint" not in caplog.text:
                await asyncio.sleep(0.01)
        assert not (await episode.step(EDITOR)).done
        assert await client.list_checkpoints() == []


async def test_unknown_occasions_are_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client):
        with pytest.raises(ValueError, match="later"):
            await client.open(TASK, checkpoint_on=["later"])  # type: ignore[list-item]
        with pytest.raises(BadRequest, match="checkpoint_every_steps"):
            await client.open(TASK, checkpoint_every=-1)


async def test_other_tokens_cannot_roll_back_to_or_score_a_checkpoint(tmp_path: Path) -> None:
    tokens = Tokens.create(tmp_path / "tokens")
    async with served(tmp_path, security=tokens.security()) as (server, _):
        alice, bob, admin = (
            AsyncEnvClient(server.address, token=each.secret) for each in (tokens.alice, tokens.bob, tokens.admin)
        )
        async with alice, bob, admin, alice.reset(TASK) as episode, bob.reset(TASK) as other:
            checkpoint = await episode.checkpoint()
            with pytest.raises(CheckpointNotFound):
                await other.rollback(checkpoint)
            with pytest.raises(CheckpointNotFound):
                await bob.evaluate(checkpoint)
            assert (await admin.evaluate(checkpoint)).score == 0
            assert (await episode.rollback(checkpoint)).frame_id == checkpoint.frame_id
