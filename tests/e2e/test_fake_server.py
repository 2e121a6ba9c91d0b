"""End to end over a real socket: client, gRPC, episodes, pool and drawn desktops."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from cuaenv import client as wire
from cuaenv.client import AsyncEnvClient, AsyncEpisode
from cuaenv.v1 import env_pb2, env_pb2_grpc
from envd.base.clock import Clock
from envd.base.config import LimitsConfig
from envd.episodes.progress import EpisodeState
from envd.hypervisor.machine import MachineState
from envd.tasks.model import Task
from envd.tasks.oracle import split_step, without_target
from envd.tasks.verbs import Execute, WriteFile
from tests.support.callers import connected
from tests.support.clock import ManualClock, until
from tests.support.faulty import Faults, FaultyMachine
from tests.support.server import FakeServer, load_fake_tasks, serve_fake, served_client

TASKS = {task.task_id: task for task in load_fake_tasks().list()}
COUNT = wire.Click(x=819, y=100)
NOTHING = wire.View(encoding="none")
CLICKS_PATH = "/home/user/clicks.txt"


async def play(client: AsyncEnvClient, task_id: str, steps: Sequence[Sequence[wire.Action]]) -> float:
    async with client.reset(task_id, view=NOTHING) as episode:
        for step in steps:
            result = await episode.step(*step)
            assert result.action_errors == ("",) * len(step)
        return (await episode.evaluate()).score


@asynccontextmanager
async def one_episode(
    task_id: str, *, faults: Faults | None = None, clock: Clock | None = None, **options: Any
) -> AsyncIterator[tuple[FakeServer, AsyncEpisode]]:
    """Open an episode on the only idle machine."""
    async with (
        served_client(size=1, faults=faults, clock=clock) as (server, client),
        client.reset(task_id, **options) as episode,
    ):
        yield server, episode


def leased_machine(server: FakeServer) -> FaultyMachine:
    """Return the only machine that received input."""
    (machine,) = [machine for machine in server.hypervisor.machines.values() if machine.input_count]
    return machine


@pytest.mark.parametrize("task_id", TASKS)
async def test_the_oracle_scores_one_and_no_action_scores_zero(task_id: str) -> None:
    async with served_client(size=2) as (server, client):
        steps = [tuple(map(without_target, split_step(step)[0])) for step in TASKS[task_id].oracle]
        assert await play(client, task_id, steps) == 1.0
        assert await play(client, task_id, ()) == 0.0
    assert server.hypervisor.machines == {}


async def test_the_first_frame_shows_the_desktop_and_a_step_shows_its_effect() -> None:
    view = wire.View(cursor="hidden", a11y_tree=True)
    async with one_episode("fake/count-to-five", view=view) as (_, episode):
        before = episode.observation
        assert before.image.size == (1280, 800)
        assert before.image.getpixel((819, 84)) == (140, 140, 140), "the edge of the button"
        after = (await episode.step(COUNT)).observation
        assert (before.rgb_HWC != after.rgb_HWC).any()
        assert "Clicks: 1" in (after.a11y_tree or "")


async def test_two_thousand_typed_characters_arrive_unchanged() -> None:
    text = ("The quick brown fox\tjumps over 13 lazy dogs: €, é!\n" * 40)[:2000]
    async with one_episode("fake/save-note", view=NOTHING) as (_, episode):
        await episode.step(wire.TypeText(text), wire.PressKeys(["ctrl", "s"]))
        assert await episode.read_file("/home/user/note.txt") == text.encode()


async def test_a_step_retried_while_it_runs_acts_once() -> None:
    retry = wire.RetryPolicy(attempt_timeout=timedelta(milliseconds=100), first_pause=timedelta(milliseconds=1))
    slow = wire.Settle(min=timedelta(milliseconds=600), max=timedelta(seconds=2))
    async with (
        serve_fake(size=1) as server,
        AsyncEnvClient(server.address, retry=retry) as hasty,
        hasty.reset("fake/count-to-five", view=NOTHING) as episode,
    ):
        for count in range(1, 4):
            result = await episode.step(COUNT, settle=slow)
            assert result.step_count == count
        assert await episode.read_file(CLICKS_PATH) == b"3\n"


async def test_a_machine_lost_on_input_is_machine_lost() -> None:
    async with one_episode("fake/save-note", faults=Faults(die_after_inputs=20)) as (_, episode):
        with pytest.raises(wire.MachineLost, match="21"):
            await episode.step(*[COUNT] * 20)


async def test_the_machine_of_a_vanished_client_is_reclaimed() -> None:
    clock = ManualClock()
    async with serve_fake(size=1, clock=clock) as server:
        client = AsyncEnvClient(server.address, keep_alive_interval=timedelta(hours=1))
        opening = client.reset("fake/count-to-five", lease_ttl=timedelta(seconds=10))
        episode = await opening.__aenter__()
        await episode.step(COUNT)
        machine_id = leased_machine(server).machine_id
        # From here on the client sends nothing: no Close, no KeepAlive.
        await client.aclose()
        await clock.advance(10.0)
        await until(lambda: machine_id not in server.hypervisor.machines)
        await until(lambda: server.pool.statistics().idle_count == 1)
        async with connected(server.address) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Observe(env_pb2.ObserveRequest(episode_id=episode.episode_id), timeout=60)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        await opening.__aexit__(None, None, None)


async def test_a_client_that_pauses_for_long_keeps_its_machine() -> None:
    clock, ttl = ManualClock(), timedelta(seconds=10)

    def is_renewed() -> bool:
        return [info.expire_time - clock.now() for info in server.service.list_episodes()] == [ttl]

    async with (
        serve_fake(size=1, clock=clock) as server,
        AsyncEnvClient(server.address, keep_alive_interval=timedelta(milliseconds=50)) as client,
        client.reset("fake/count-to-five", lease_ttl=ttl) as episode,
    ):
        for _ in range(3):
            await clock.advance(8.0)
            await until(is_renewed)
        assert (await episode.step(COUNT)).step_count == 1


async def test_a_group_starts_from_the_same_picture_on_separate_machines() -> None:
    async with served_client(size=4) as (server, client), client.reset_group("fake/count-to-five", size=4) as episodes:
        assert len({episode.group_id for episode in episodes}) == 1
        assert len({episode.observation.frame_id for episode in episodes}) == 1
        counts = range(2, 6)
        await asyncio.gather(*(episode.step(*[COUNT] * count) for count, episode in zip(counts, episodes, strict=True)))
        evaluations = await asyncio.gather(*(episode.evaluate() for episode in episodes))
        assert [evaluation.score for evaluation in evaluations] == [0.0, 0.0, 0.0, 1.0]
    assert server.hypervisor.machines == {}


NOTED = Task(
    task_id="fake/noted",
    instruction="Count to five.",
    level=1,
    setup=(
        Execute(kind="execute", argv=("sh", "-c", "echo once >>/home/user/setups.txt")),
        WriteFile(kind="write_file", path="/home/user/a.txt", text="a"),
    ),
    checker=TASKS["fake/count-to-five"].checker,
)


@pytest.mark.parametrize("freeze_setup", [False, True])
async def test_a_groups_setup_runs_once_and_all_members_start_in_its_state(freeze_setup: bool) -> None:
    task = NOTED.model_copy(update={"freeze_setup": freeze_setup})
    async with served_client(size=3, extra_tasks=[task]) as (server, client):
        origins = []
        for _ in range(2):
            async with client.reset_group(task.task_id, size=3, view=NOTHING) as episodes:
                setups = await asyncio.gather(*(episode.read_file("/home/user/setups.txt") for episode in episodes))
                assert setups == [b"once\n"] * 3
                assert len({episode.origin for episode in episodes}) == 1
                origins.append(episodes[0].origin)
        assert (origins[0] == origins[1]) is freeze_setup, "both groups start in the kept state"
    assert server.hypervisor.machines == {}


async def test_forks_of_an_active_episode_are_independent() -> None:
    async with (
        served_client(size=2, capacity=6) as (server, client),
        client.reset("fake/count-to-five", view=wire.View(cursor="hidden")) as parent,
    ):
        before = (await parent.step(*[COUNT] * 2)).observation
        async with client.fork(parent, count=3) as copies:
            assert {copy.observation.frame_id for copy in copies} == {before.frame_id}
            assert all((copy.observation.rgb_HWC == before.rgb_HWC).all() for copy in copies)
            assert {copy.origin.first_frame_id for copy in copies} == {before.frame_id}
            await asyncio.gather(*(copy.step(*[COUNT] * n) for n, copy in enumerate(copies, start=1)))
            counts = await asyncio.gather(*(episode.read_file(CLICKS_PATH) for episode in (parent, *copies)))
            assert counts == [b"2\n", b"3\n", b"4\n", b"5\n"]
            async with client.fork(copies[1], count=1) as grandchildren:
                await grandchildren[0].step(COUNT)
                assert (await grandchildren[0].evaluate()).score == 1.0
            assert [(await copy.evaluate()).score for copy in copies] == [0.0, 0.0, 1.0]
        await parent.step(*[COUNT] * 3)
        assert (await parent.evaluate()).score == 1.0
    assert server.hypervisor.machines == {}


async def test_half_typed_text_continues_in_every_fork() -> None:
    async with served_client(size=1, capacity=4) as (_, client), client.reset("fake/save-note", view=NOTHING) as parent:
        await parent.step(wire.TypeText("Hello, "))
        async with client.fork(parent, count=2) as copies:
            for text, copy in zip(("Anna", "Bert"), copies, strict=True):
                await copy.step(wire.TypeText(text), wire.PressKeys(["ctrl", "s"]))
            assert [await copy.read_file("/home/user/note.txt") for copy in copies] == [b"Hello, Anna", b"Hello, Bert"]


async def test_a_machine_that_cannot_be_forked_reports_why_and_continues() -> None:
    async with served_client(size=1) as (server, client), client.reset("fake/count-to-five", view=NOTHING) as episode:
        await episode.step(COUNT)
        leased_machine(server).inject(unforkable="a USB stick")
        with pytest.raises(wire.NotForkable, match="USB"):
            async with client.fork(episode, count=1):
                pass
        assert (await episode.step(COUNT)).step_count == 2
        assert await episode.read_file(CLICKS_PATH) == b"2\n"


async def test_a_machine_is_paused_between_steps() -> None:
    async with one_episode("fake/count-to-five") as (server, episode):
        first = episode.observation
        assert {machine.state for machine in server.hypervisor.machines.values()} == {MachineState.PAUSED}
        assert (await episode.observe()).frame_id == first.frame_id
        stepping = asyncio.create_task(episode.step(COUNT, wire.Wait(timedelta(milliseconds=200))))
        await until(lambda: any(m.state is MachineState.RUNNING for m in server.hypervisor.machines.values()))
        timings_ms = (await stepping).timings_ms
        assert timings_ms["resume"] > 0
        assert {machine.state for machine in server.hypervisor.machines.values()} == {MachineState.PAUSED}


async def test_a_screen_that_never_settles_is_reported_and_bounded() -> None:
    # A stall of the event loop for the quiet time would make the screen look settled.
    settle = wire.Settle(quiet=timedelta(seconds=2), max=timedelta(seconds=2))
    async with one_episode("fake/count-to-five") as (server, episode):
        await episode.step(COUNT)
        leased_machine(server).inject(animation_interval_s=0.02)
        observation = (await episode.step(COUNT, settle=settle)).observation
        assert observation.settled is False


@pytest.mark.parametrize("starved", [False, True])
async def test_a_hung_guest_ends_its_episode_even_if_its_screen_is_quiet(
    starved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envd.desktop.freezing._TIMEOUT_S", 1.0)
    limits = LimitsConfig(heartbeat_interval_s=0.0, hang_timeout_s=2.0, evaluate_timeout_s=5.0)
    async with served_client(size=1, limits=limits) as (server, client), client.reset("fake/count-to-five") as episode:
        await episode.step(COUNT)
        leased_machine(server).inject(agent_silent=True, starved=starved)
        if starved:
            for call in (episode.step(COUNT), episode.step(COUNT), episode.evaluate()):
                with pytest.raises(wire.LossUndecided):
                    await call
            return
        step = await episode.step(COUNT)
        assert (step.state, step.guest_end_cause) == (wire.State.TERMINATED, "UNRESPONSIVE")
        assert step.observation.frame_id == episode.observation.frame_id
        with pytest.raises(wire.GuestEnded):
            await episode.step(COUNT)
        evaluation = await episode.evaluate()
        assert (evaluation.score, evaluation.guest_end_cause) == (0.0, "UNRESPONSIVE")


async def test_a_guest_that_responded_recently_is_not_probed() -> None:
    limits = LimitsConfig(heartbeat_interval_s=60.0, hang_timeout_s=0.2)
    async with served_client(size=1, limits=limits) as (server, client), client.reset("fake/count-to-five") as episode:
        await episode.step(COUNT)
        leased_machine(server).inject(agent_silent=True)
        assert not (await episode.step(COUNT)).errors


async def test_callers_of_machines_that_do_not_boot_wait_no_longer_than_their_timeout() -> None:
    async with (
        serve_fake(size=1, faults=Faults(create_error="no memory left")) as server,
        connected(server.address) as stub,
        AsyncEnvClient(server.address) as client,
    ):
        request = env_pb2.ResetRequest(
            request_id=str(uuid.uuid4()), task_id="fake/save-note", ready_timeout=Duration(seconds=1)
        )
        with pytest.raises(grpc.aio.AioRpcError) as exhausted:
            await stub.Reset(request, timeout=60)
        assert exhausted.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        (pool,) = await client.list_pools()
        assert "no memory left" in pool.problem
    assert server.hypervisor.machines == {}


async def test_leaving_the_server_destroys_the_machines_of_open_episodes(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with (
        serve_fake(size=2, listen=f"unix:{path}") as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub: Any = env_pb2_grpc.CUAEnvStub(channel)
        await stub.Reset(env_pb2.ResetRequest(request_id=str(uuid.uuid4()), task_id="fake/save-note"), timeout=60)
        [episode] = server.service.list_episodes()
        assert episode.progress.state is EpisodeState.ACTIVE
        assert server.hypervisor.live_machine_ids
    assert server.hypervisor.machines == {}
    with pytest.raises((FileNotFoundError, ConnectionRefusedError)):
        await asyncio.open_unix_connection(path)
