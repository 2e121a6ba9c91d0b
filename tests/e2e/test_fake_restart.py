"""Restarts after a daemon was killed: with machines that died with it, and with machines that outlived it."""

import asyncio
import random
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from cuaenv import client as wire
from cuaenv.action_codec import from_proto
from cuaenv.actions import Action, AskUser, Click, Done, Fail, KeyDown, KeyUp, TypeText, Wait
from cuaenv.client import AsyncEnvClient
from cuaenv.v1 import env_pb2, env_pb2_grpc
from envd.base.clock import Clock
from envd.base.errors import (
    EpisodeNotFound,
    EvaluatorFailed,
    HumanInControl,
    MachineLost,
    RequestIdReused,
    StepIndexMismatch,
    StoreError,
)
from envd.base.store.store import AnswerRow, EpisodeRow, MachineRow, SqliteStore
from envd.desktop.observation import Encoding, Keyframe, ObservationOptions
from envd.episodes.progress import AutomaticCheckpoints, CheckpointTrigger, EpisodeState, Progress
from envd.episodes.recovery import load_persisted
from envd.episodes.types import ForkCommand, ResetCommand, StepCommand, StepOutcome
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.user import Exchange
from tests.support.faulty import FakeHost
from tests.support.server import FakeServer, load_fake_tasks, serve_fake, with_user

TASK = "fake/count-to-five"
COUNT = Click(819, 100)
NOTHING = ObservationOptions(encoding=Encoding.NONE)
PIXELS = ObservationOptions(encoding=Encoding.PNG)


@dataclass
class OffsetClock(Clock):
    """The host's clock plus an offset that tests advance."""

    offset_s: float = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.offset_s

    def now(self):  # type: ignore[no-untyped-def]
        return super().now() + timedelta(seconds=self.offset_s)


@dataclass(kw_only=True)
class Home:
    """A host and the database of the daemons that run on it one after another."""

    database: Path
    machines_outlive_daemons: bool
    host: FakeHost = field(default_factory=FakeHost)
    clock: OffsetClock = field(default_factory=OffsetClock)

    @asynccontextmanager
    async def daemon(self) -> AsyncIterator[FakeServer]:
        """Run a daemon until it is killed or the block ends."""
        if not self.machines_outlive_daemons:
            self.host = FakeHost()
        async with serve_fake(size=2, host=self.host, database=self.database, clock=self.clock) as server:
            yield server


@pytest.fixture
def embed(tmp_path: Path) -> Home:
    return Home(database=tmp_path / "envd.db", machines_outlive_daemons=False)


@pytest.fixture
def system(tmp_path: Path) -> Home:
    return Home(database=tmp_path / "envd.db", machines_outlive_daemons=True)


@pytest.fixture(params=["embed", "system"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Home:
    return Home(database=tmp_path / "envd.db", machines_outlive_daemons=request.param == "system")


def reset_command(request_id: str = "reset", **fields: object) -> ResetCommand:
    command = ResetCommand(request_id=request_id, task_id=TASK, observe=NOTHING, fingerprint=b"f")
    return replace(command, **fields)  # type: ignore[arg-type]


def step_command(episode_id: str, index: int, *actions: Action, **fields: object) -> StepCommand:
    command = StepCommand(
        request_id=f"step-{index}",
        episode_id=episode_id,
        step_index=index,
        actions=actions or (COUNT,),
        observe=NOTHING,
        fingerprint=b"f",
    )
    return replace(command, **fields)  # type: ignore[arg-type]


async def open_one(server: FakeServer, **fields: object) -> str:
    command = replace(reset_command(), **fields)  # type: ignore[arg-type]
    return (await server.service.reset(command)).episodes[0].episode_id


async def clicks(server: FakeServer, episode_id: str) -> bytes:
    return await server.service.read_file(episode_id, "/home/user/clicks.txt", max_bytes=99)


def state_of(server: FakeServer, episode_id: str) -> tuple[EpisodeState, str]:
    (info,) = [info for info in server.service.list_episodes() if info.episode_id == episode_id]
    return info.progress.state, info.progress.end_reason


# -- machines that die with their daemon ---------------------------------------------------------------------------


async def test_a_recorded_step_is_replayed_without_pixels_and_not_performed_again(embed: Home) -> None:
    async with embed.daemon() as server:
        episode_id = await open_one(server)
        command = step_command(episode_id, 0, observe=PIXELS)
        first = await server.service.step(command)
        await server.kill()
    async with embed.daemon() as server:
        again = await server.service.step(command)
        assert again.replayed
        assert again.observation.frame.content is None
        assert again.observation.frame.frame_id == first.observation.frame.frame_id
        assert (again.outcomes, again.episode.progress.step_count) == (first.outcomes, 1)
        assert [m.input_count for m in server.hypervisor.machines.values()] == [0] * len(server.hypervisor.machines)
        with pytest.raises(RequestIdReused):
            await server.service.step(replace(command, fingerprint=b"another"))


async def test_a_lost_episode_reports_the_restart_until_its_lease_expires(embed: Home) -> None:
    async with embed.daemon() as server:
        episode_id = await open_one(server, lease_ttl_s=10.0)
        await server.kill()
    async with embed.daemon() as server:
        for _ in range(2):  # later calls raise it again
            with pytest.raises(MachineLost, match="restarted"):
                await server.service.step(step_command(episode_id, 0))
        with pytest.raises(MachineLost, match="restarted"):
            await server.service.observe(episode_id, NOTHING)
        with pytest.raises(MachineLost, match="restarted"):
            await server.service.evaluate(episode_id, request_id="e", fingerprint=b"f")
        assert state_of(server, episode_id) == (EpisodeState.FAILED, "MACHINE_LOST")
        embed.clock.offset_s += 11
        server.service._registry.changes.notify()
        async with asyncio.timeout(60):
            while server.service.list_episodes():
                await asyncio.sleep(0.01)
        with pytest.raises(EpisodeNotFound, match="lease expired"):
            await server.service.step(step_command(episode_id, 0))


async def test_a_lost_episode_that_is_closed_is_removed(embed: Home) -> None:
    async with embed.daemon() as server:
        episode_id = await open_one(server)
        await server.service.step(step_command(episode_id, 0))
        await server.kill()
    async with embed.daemon() as server:
        await server.service.close(episode_id)
        await server.kill()
    async with embed.daemon() as server:
        with pytest.raises(EpisodeNotFound, match="never opened"):
            await server.service.step(step_command(episode_id, 0))
        assert server.store is not None
        assert await server.store.rows(EpisodeRow) == []
        assert [answer.kind for answer in await server.store.rows(AnswerRow)] == []


async def test_a_step_running_when_the_daemon_died_is_lost_and_not_performed_again(either: Home) -> None:
    async with either.daemon() as server:
        episode_id = await open_one(server)
        command = step_command(episode_id, 0, COUNT, Wait(timedelta(seconds=60)))
        stepping = asyncio.create_task(server.service.step(command))
        async with asyncio.timeout(60):
            while not any(m.input_count for m in server.hypervisor.machines.values()):
                await asyncio.sleep(0.01)
        await server.kill()
        with pytest.raises(MachineLost):
            await stepping
    async with either.daemon() as server:
        with pytest.raises(MachineLost, match="step step-0"):
            await server.service.step(command)
        assert [m.input_count for m in server.hypervisor.machines.values()] == [0] * len(server.hypervisor.machines)
        assert state_of(server, episode_id) == (EpisodeState.FAILED, "MACHINE_LOST")


async def test_a_recorded_score_outlives_its_machine(embed: Home) -> None:
    async with embed.daemon() as server:
        episode_id = await open_one(server)
        for index in range(5):
            await server.service.step(step_command(episode_id, index))
        await server.service.step(step_command(episode_id, 5, Done()))
        first = await server.service.evaluate(episode_id, request_id="e", fingerprint=b"f")
        assert first.score == 1.0
        await server.kill()
    async with embed.daemon() as server:
        again = await server.service.evaluate(episode_id, request_id="e", fingerprint=b"f")
        assert (again.score, again.checks, again.cached) == (1.0, first.checks, True)
        other = await server.service.evaluate(episode_id, request_id="another", fingerprint=b"f")
        assert (other.score, other.cached) == (1.0, True)
        assert state_of(server, episode_id) == (EpisodeState.TERMINATED, "AGENT_DONE")


async def test_a_broken_checker_is_recorded_and_never_becomes_a_score(embed: Home) -> None:
    async with embed.daemon() as server:

        async def broken(*_: object, **__: object) -> object:
            raise EvaluatorFailed("a checker failed")

        server.service._evaluating._run_checkers = broken  # type: ignore[assignment]
        episode_id = await open_one(server)
        with pytest.raises(EvaluatorFailed):
            await server.service.evaluate(episode_id, request_id="e", fingerprint=b"f")
        await server.kill()
    async with embed.daemon() as server:
        with pytest.raises(EvaluatorFailed):
            await server.service.evaluate(episode_id, request_id="e2", fingerprint=b"f")


async def test_a_reset_whose_episodes_are_lost_opens_new_ones(embed: Home) -> None:
    async with embed.daemon() as server:
        first = await server.service.reset(reset_command(group_size=2))
        await server.kill()
    async with embed.daemon() as server:
        again = await server.service.reset(reset_command(group_size=2))
        assert len(again.episodes) == 2
        assert not {e.episode_id for e in first.episodes} & {e.episode_id for e in again.episodes}
        await server.service.step(step_command(again.episodes[0].episode_id, 0))


# -- machines that outlive their daemon ------------------------------------------------------------------------------


async def test_an_episode_continues_where_it_was(system: Home) -> None:
    async with system.daemon() as server:
        episode_id = await open_one(server, run="night-1")
        for index in range(2):
            await server.service.step(step_command(episode_id, index))
        (before,) = server.service.list_episodes()
        await server.kill()
        assert len(system.host.machines) >= 1
    async with system.daemon() as server:
        (after,) = server.service.list_episodes()
        assert replace(after, expire_time=before.expire_time) == before
        assert abs(after.expire_time - before.expire_time) < timedelta(minutes=1)
        with pytest.raises(StepIndexMismatch):
            await server.service.step(step_command(episode_id, 1, request_id="stale"))
        result = await server.service.step(step_command(episode_id, 2))
        assert result.episode.progress.step_count == 3
        assert await clicks(server, episode_id) == b"3\n"
        for index in (3, 4):
            await server.service.step(step_command(episode_id, index))
        await server.service.step(step_command(episode_id, 5, Done()))
        assert (await server.service.evaluate(episode_id, request_id="e", fingerprint=b"f")).score == 1.0
        await server.service.close(episode_id)
        assert server.pool.statistics().leased_count == 0
    assert system.host.machines == {}


async def test_how_the_agent_ended_an_episode_is_known_to_the_checkers_after_a_restart(system: Home) -> None:
    async with system.daemon() as server:
        episode_id = await open_one(server, task_id="fake/no-printer")
        await server.service.step(step_command(episode_id, 0, Fail("there is no printer")))
        await server.kill()
    async with system.daemon() as server:
        assert (await server.service.evaluate(episode_id, request_id="e", fingerprint=b"f")).score == 1.0


async def test_a_machine_that_outlived_two_daemons_is_unchanged(system: Home) -> None:
    async with system.daemon() as server:
        episode_id = await open_one(server)
        await server.kill()
    async with system.daemon() as server:
        await server.service.step(step_command(episode_id, 0))
        await server.kill()
    async with system.daemon() as server:
        await server.service.step(step_command(episode_id, 1))
        assert await clicks(server, episode_id) == b"2\n"


async def test_a_recorded_response_gets_its_pixels_back_while_the_screen_shows_them(system: Home) -> None:
    async with system.daemon() as server:
        reset = reset_command(observe=PIXELS)
        opened = await server.service.reset(reset)
        episode_id = opened.episodes[0].episode_id
        await server.kill()
    async with system.daemon() as server:
        again = await server.service.reset(reset)
        assert again == opened, "the machine is in the same state"
        commands = [step_command(episode_id, index, observe=PIXELS) for index in range(2)]
        seen = [await server.service.step(command) for command in commands]
        await server.kill()
    async with system.daemon() as server:
        older, newest = [await server.service.step(command) for command in commands]
        assert isinstance(newest.observation.frame.content, Keyframe)
        assert newest.observation == seen[1].observation
        assert older.observation.frame.content is None, "the screen has changed since"
        assert (older.replayed, newest.replayed) == (True, True)


async def test_an_episode_with_held_inputs_is_void_after_a_restart(system: Home) -> None:
    async with system.daemon() as server:
        held, released = [await open_one(server, request_id=f"r{number}") for number in range(2)]
        await server.service.step(step_command(held, 0, KeyDown(key="shift")))
        await server.service.step(step_command(released, 0, KeyDown(key="shift"), KeyUp(key="shift")))
        await server.kill()
    async with system.daemon() as server:
        with pytest.raises(MachineLost, match="held"):
            await server.service.step(step_command(held, 1))
        await server.service.step(step_command(released, 1, TypeText(text="a")))


async def test_the_pointer_keeps_its_position_over_a_restart(system: Home) -> None:
    async with system.daemon() as server:
        episode_id = await open_one(server)
        await server.service.step(step_command(episode_id, 0))
        await server.kill()
    async with system.daemon() as server:
        await server.service.step(step_command(episode_id, 1, Click()))  # at the pointer's position
        assert await clicks(server, episode_id) == b"2\n"


async def test_a_lease_that_expired_while_no_daemon_ran_is_closed_with_its_machine(system: Home) -> None:
    async with system.daemon() as server:
        short = await open_one(server, request_id="r1", lease_ttl_s=10.0)
        kept = await open_one(server, request_id="r2", lease_ttl_s=10.0)
        await server.service.keep_alive([kept], 300.0)
        assert server.store is not None
        await server.store.rows(EpisodeRow)  # pending writes are flushed
        machine_ids = {e: server.service._registry.get(e).machine.machine_id for e in (short, kept)}
        await server.kill()
    system.clock.offset_s += 60
    async with system.daemon() as server:
        with pytest.raises(EpisodeNotFound, match="lease expired"):
            await server.service.step(step_command(short, 0))
        await server.service.step(step_command(kept, 0))
        assert machine_ids[short] not in system.host.machines
        assert machine_ids[kept] in system.host.machines


async def test_only_machines_of_episodes_are_adopted(system: Home) -> None:
    async with system.daemon() as server:
        episode_id = await open_one(server)
        machine_id = server.service._registry.get(episode_id).machine.machine_id
        held_id = await open_one(server, request_id="another")
        await server.service.step(step_command(held_id, 0, KeyDown(key="shift")))
        async with asyncio.timeout(60):
            while len(server.hypervisor.machines) < 3:
                await asyncio.sleep(0.01)
        await server.kill()
        left = set(system.host.machines)
        assert len(left) > 2, "idle machines are left, too"
    async with system.daemon() as server:
        assert set(system.host.machines) & left == {machine_id}, "the machine of a void episode is not adopted"


async def test_forks_of_an_episode_continue_after_a_restart(system: Home) -> None:
    async with system.daemon() as server:
        episode_id = await open_one(server)
        await server.service.step(step_command(episode_id, 0))
        fork = ForkCommand(request_id="fork", episode_id=episode_id, step_index=1, observe=NOTHING, timeout_s=30.0)
        copy_id = (await server.service.fork(fork)).episodes[0].episode_id
        await server.service.step(step_command(copy_id, 1))
        await server.kill()
    async with system.daemon() as server:
        replayed = await server.service.fork(fork)
        assert [info.episode_id for info in replayed.episodes] == [copy_id], "the fork is not repeated"
        await server.service.step(step_command(copy_id, 2))
        assert (await clicks(server, episode_id), await clicks(server, copy_id)) == (b"1\n", b"3\n")
        assert server.hypervisor.host.captures != {}, "the copy is based on a capture"
        await server.service.close(copy_id)
        assert server.hypervisor.host.captures == {}


async def test_a_machine_lost_with_the_host_voids_only_its_episode(system: Home) -> None:
    async with system.daemon() as server:
        dead, alive = [await open_one(server, request_id=f"r{number}") for number in range(2)]
        machine_id = server.service._registry.get(dead).machine.machine_id
        await server.kill()
    system.host.machines[machine_id].kill("killed by the kernel")
    async with system.daemon() as server:
        with pytest.raises(MachineLost, match="restarted"):
            await server.service.step(step_command(dead, 0))
        await server.service.step(step_command(alive, 0))


async def test_a_client_continues_after_the_restart_and_each_click_is_performed_once(
    system: Home, tmp_path: Path
) -> None:
    listen = f"unix:{tmp_path}/envd.sock"
    view = wire.View(encoding="none")
    async with AsyncEnvClient(listen) as client, AsyncExitStack() as stack:
        async with serve_fake(host=system.host, database=system.database, listen=listen) as server:
            episode = await stack.enter_async_context(client.reset(TASK, view=view))
            await episode.step(wire.Click(x=819, y=100))
            await server.kill()
        waiting = asyncio.create_task(episode.step(wire.Click(x=819, y=100)))
        await asyncio.sleep(0.2)
        async with serve_fake(host=system.host, database=system.database, listen=listen) as server:
            assert (await asyncio.wait_for(waiting, 60)).step_count == 2
            assert await episode.read_file("/home/user/clicks.txt") == b"2\n"
            await stack.aclose()


@pytest.mark.parametrize("seed", range(4))
async def test_a_daemon_killed_at_any_moment_never_repeats_or_loses_a_click(system: Home, seed: int) -> None:
    moments = random.Random(seed)
    episode_id, index, lost_count = "", 0, 0
    for _ in range(5):
        async with system.daemon() as server:
            if not episode_id:
                index = 0
                episode_id = await open_one(server, request_id=f"reset-{lost_count}", max_steps=100)
            # Resend the step without a response, as a client would.
            call = asyncio.create_task(step_until_killed(server, episode_id, index))
            await asyncio.sleep(moments.uniform(0.0, 0.5))
            await server.kill()
            index = max(index, await call)
        async with system.daemon() as server:
            try:
                result = await server.service.step(step_command(episode_id, index))
            except MachineLost as error:
                assert f"restarted during step step-{index}" in str(error)  # noqa: PT017
                await server.service.close(episode_id)
                episode_id, lost_count = "", lost_count + 1
            else:
                index += 1
                assert result.episode.progress.step_count == index
                assert await clicks(server, episode_id) == b"%d\n" % index
            await server.kill()


async def step_until_killed(server: FakeServer, episode_id: str, index: int) -> int:
    """Step until the daemon is killed; return the index of the first step without a response."""
    while True:
        try:
            await server.service.step(step_command(episode_id, index))
        except (MachineLost, StoreError, EpisodeNotFound):
            return index
        if server.is_killed:  # a killed daemon's response is not delivered
            return index
        index += 1


async def test_a_recorded_step_in_any_coordinate_space_is_replayed_over_the_wire(embed: Home) -> None:
    async def step(server: FakeServer, episode_id: str, request_id: str, index: int) -> env_pb2.StepResponse:
        async with grpc.aio.insecure_channel(server.address) as channel:
            click = env_pb2.Action(click=env_pb2.Click(at=env_pb2.Point(x=640, y=125), count=1))
            request = env_pb2.StepRequest(
                request_id=request_id,
                episode_id=episode_id,
                step_index=index,
                actions=[click],
                coordinate_space=env_pb2.Size(width_px=1000, height_px=1000),
            )
            return await env_pb2_grpc.CUAEnvStub(channel).Step(request)  # type: ignore[no-any-return,misc]

    async with embed.daemon() as server:
        episode_id = await open_one(server)
        first = await step(server, episode_id, "r1", 0)
        assert first.observation.frame.WhichOneof("content") is not None
        await server.kill()
    async with embed.daemon() as server:
        again = await step(server, episode_id, "r1", 0)
        assert again.replayed
        assert again.observation.frame.WhichOneof("content") is None
        assert again.observation.frame.frame_id == first.observation.frame.frame_id
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await step(server, episode_id, "r2", 1)
        assert caught.value.code() is grpc.StatusCode.DATA_LOSS
        assert "the daemon restarted" in (caught.value.details() or "")


# -- order of writes --------------------------------------------------------------------------------------------


async def test_a_response_is_written_before_it_is_sent(embed: Home) -> None:
    async with embed.daemon() as server:
        episode_id = await open_one(server)
        assert server.store is not None
        order: list[str] = []
        commit = server.store.commit

        async def slow(*statements: object) -> None:
            await commit(*statements)  # type: ignore[arg-type]
            await asyncio.sleep(0.05)
            order.append("written")

        server.store.commit = slow  # type: ignore[method-assign, assignment]
        await server.service.step(step_command(episode_id, 0))
        order.append("answered")
        assert order == ["written", "written", "answered"], "that it began, and its response"


async def test_a_step_that_cannot_be_recorded_is_not_started(embed: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    async with embed.daemon() as server:
        episode_id = await open_one(server)
        store = server.store
        assert store is not None

        async def full(*_: object) -> None:
            raise StoreError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(store, "commit", full)
            with pytest.raises(StoreError):
                await server.service.step(step_command(episode_id, 0))
            with pytest.raises(StoreError):
                await server.service.reset(reset_command("another"))
            assert [info.episode_id for info in server.service.list_episodes()] == [episode_id]
        result = await server.service.step(step_command(episode_id, 0))
        assert not result.replayed
        assert await clicks(server, episode_id) == b"1\n", "once the disk has space, the step happens exactly once"


async def test_an_outcome_that_cannot_be_recorded_voids_the_episode_at_a_restart(
    system: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with system.daemon() as server:
        episode_id = await open_one(server)
        store = server.store
        assert store is not None
        commit, count = store.commit, 0

        async def second_fails(*statements: object) -> None:
            nonlocal count
            count += 1
            if count == 2:
                raise StoreError("the disk is full")
            await commit(*statements)  # type: ignore[arg-type]

        monkeypatch.setattr(store, "commit", second_fails)
        result: StepOutcome = await server.service.step(step_command(episode_id, 0))
        assert result.episode.progress.step_count == 1
        await server.kill()
    async with system.daemon() as server:
        with pytest.raises(MachineLost, match="step step-0"):
            await server.service.step(step_command(episode_id, 0))


async def test_only_responses_that_may_be_replayed_are_kept_in_the_database(embed: Home) -> None:
    async with embed.daemon() as server:
        episode_id = await open_one(server, max_steps=100)
        for index in range(12):
            await server.service.step(step_command(episode_id, index))
        assert server.store is not None
        steps = [answer.request_id for answer in await server.store.rows(AnswerRow) if answer.kind == "step"]
        # Eight, and the one that the next request drops.
        assert sorted(steps) == sorted(f"step-{index}" for index in range(3, 12))
        embed.clock.offset_s += 601
        await server.service.step(step_command(episode_id, 12))
        left = [answer.request_id for answer in await server.store.rows(AnswerRow) if answer.kind == "step"]
        assert left == ["step-12"]


async def test_a_machine_is_recorded_before_it_is_created(embed: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    async with embed.daemon() as server:
        assert server.store is not None
        store: SqliteStore = server.store
        fork, write, known = server.hypervisor.fork, store._write, []

        def known_machines() -> set[str]:
            # Another process sees only committed rows.
            with closing(sqlite3.connect(embed.database)) as other:
                return {machine_id for (machine_id,) in other.execute("SELECT machine_id FROM machines")}

        def write_slowly(jobs: list[Any]) -> None:
            time.sleep(0.05)
            write(jobs)

        async def checked_fork(snapshot, machine_id):  # type: ignore[no-untyped-def]
            known.append(machine_id in known_machines())
            return await fork(snapshot, machine_id)

        monkeypatch.setattr(server.hypervisor, "fork", checked_fork)
        monkeypatch.setattr(store, "_write", write_slowly)
        episode_id = await open_one(server)
        async with asyncio.timeout(60):
            while server.pool.statistics().idle_count < 2:
                await asyncio.sleep(0.01)
        assert known != []
        assert all(known)
        await server.service.close(episode_id)
        assert known_machines() >= set(server.hypervisor.machines)
    later = SqliteStore(embed.database)
    assert await later.rows(MachineRow) == [], "destroyed machines have no row"
    await later.aclose()


async def test_what_a_person_did_survives_a_restart_and_the_agent_observes_it_first(system: Home) -> None:
    async with system.daemon() as server:
        episode_id = await open_one(server)
        server.service.take_control(episode_id, control_id="page", holder="")
        await server.service.act(episode_id, control_id="page", actions=[COUNT])
        await server.service.release_control(episode_id, control_id="page")
        await server.kill()
    async with system.daemon() as server, grpc.aio.insecure_channel(server.address) as channel:
        with pytest.raises(HumanInControl, match="a person has acted since the last observation"):
            await server.service.step(step_command(episode_id, 0))
        stub = env_pb2_grpc.CUAEnvStub(channel)
        observed = await stub.Observe(env_pb2.ObserveRequest(episode_id=episode_id), timeout=60)  # type: ignore[misc]
        assert [from_proto(action) for action in observed.human_actions] == [COUNT]
        await server.service.step(step_command(episode_id, 0))
        assert (await clicks(server, episode_id)).strip() == b"2"
        observed = await stub.Observe(env_pb2.ObserveRequest(episode_id=episode_id), timeout=60)  # type: ignore[misc]
        assert not observed.human_actions


# -- databases of earlier releases ---------------------------------------------------------------------------------

STORED = Path(__file__).parents[1] / "support" / "stored"


@dataclass(frozen=True, slots=True)
class Earlier:
    """A database that a daemon of an earlier release left when it was killed."""

    path: Path
    clock: OffsetClock
    """Shows the time of the kill."""
    ids: dict[str, str]
    """Ids of episodes by what they are."""


@pytest.fixture(params=["0.2.0", "0.3.0"])
def earlier(request: pytest.FixtureRequest, tmp_path: Path) -> Earlier:
    path = tmp_path / "envd.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((STORED / request.param / "database.sql").read_text())
        (killed_s,) = connection.execute("SELECT max(time_s) FROM answers").fetchone()
        rows = {str(row[0]): str(row) for row in connection.execute("SELECT * FROM episodes")}
    marks = {"forked": "AGENT_FAIL", "scored": "AGENT_DONE", "unscored": "cannot be read", "lost": "killed by a test"}
    found = {name: episode_id for name, mark in marks.items() for episode_id, text in rows.items() if mark in text}
    (found["asking"],) = rows.keys() - found.values()
    return Earlier(path, OffsetClock(offset_s=killed_s - time.time()), found)


async def test_episodes_of_an_earlier_release_have_their_spec_and_their_progress(earlier: Earlier) -> None:
    store = SqliteStore(earlier.path)
    tasks = TaskCatalogue([*load_fake_tasks().list(), with_user()])
    state = await load_persisted(store, clock=earlier.clock, pools=["fake"], tasks=tasks)
    await store.aclose()
    found = {decision.row.episode_id: decision for decision in state.decisions}
    asking, forked, scored, unscored, lost = (
        found[earlier.ids[name]] for name in ("asking", "forked", "scored", "unscored", "lost")
    )
    outcomes = [each.outcome for each in (asking, forked, scored, unscored, lost)]
    assert outcomes == ["resume", "resume", "resume", "resume", "lost"]
    assert asking.stored is not None
    assert forked.stored is not None
    assert scored.stored is not None
    assert unscored.stored is not None
    assert lost.stored is not None
    spec, progress = asking.stored.spec, asking.stored.progress
    assert (spec.task_id, spec.pool, spec.run, spec.max_steps) == ("fake/with-user", "fake", "run-1", 9)
    assert spec.automatic == AutomaticCheckpoints(every_steps=3, on=frozenset([CheckpointTrigger.DONE]))
    assert (spec.settle.quiet_ms, len(spec.origin.template_digest), asking.row.epoch) == (20, 64, 2)
    assert progress == Progress(
        step_count=1,
        asked=(Exchange("Which room?", "The room."),),
        perturbations=("theme",),
        last_checkpoint_id=progress.last_checkpoint_id,
    )
    assert progress.last_checkpoint_id.startswith("ckpt-")
    assert (forked.stored.spec.parent_episode_id, forked.stored.spec.group_id) == (spec.episode_id, spec.group_id)
    assert (forked.stored.progress.step_count, forked.stored.progress.end_reason) == (3, "AGENT_FAIL")
    assert forked.stored.progress.last_action == Fail("it cannot be done")
    assert scored.stored.progress.last_action == Done("42")
    assert scored.stored.progress.score is not None
    assert (scored.stored.progress.score.score, len(scored.stored.progress.score.checks)) == (0.0, 1)
    assert unscored.stored.progress.evaluator_error == "the note cannot be read"
    assert (lost.stored.progress.state, lost.stored.progress.end_reason) == (EpisodeState.FAILED, "MACHINE_LOST")
    assert "killed by a test" in lost.stored.progress.cause


async def test_responses_of_an_earlier_release_are_replayed(earlier: Earlier) -> None:
    options: dict[str, Any] = {"database": earlier.path, "clock": earlier.clock, "extra_tasks": [with_user()]}
    async with serve_fake(**options) as server:
        assert len(server.service.list_episodes()) == 5
        command = StepCommand(
            request_id="step-0",
            episode_id=earlier.ids["asking"],
            step_index=0,
            actions=(AskUser("Which room?"),),
            observe=NOTHING,
            fingerprint=b"f",
        )
        step = await server.service.step(command)
        assert (step.replayed, step.outcomes[0].output) == (True, "The room.")
        info = step.episode
        assert (info.progress.step_count, info.spec.max_steps, info.tools) == (1, 9, ("ask_user",))
        assert (info.progress.state, info.progress.perturbations) == (EpisodeState.ACTIVE, ("theme",))
        score = await server.service.evaluate(earlier.ids["scored"], request_id="evaluate", fingerprint=b"f")
        assert (score.cached, score.score, score.episode.progress.end_reason) == (True, 0.0, "AGENT_DONE")
        # A fork or reset whose machines are lost is not replayed, but its other responses are all read.
        assert len(await server.store.rows(AnswerRow)) == 6  # type: ignore[union-attr]
        with pytest.raises(EvaluatorFailed, match="the note cannot be read"):
            await server.service.evaluate(earlier.ids["unscored"], request_id="again", fingerprint=b"f")
        with pytest.raises(MachineLost, match="killed by a test"):
            await server.service.step(replace(command, request_id="next", episode_id=earlier.ids["lost"]))
