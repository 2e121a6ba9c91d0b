"""End to end over a real socket: client, gRPC, episodes, pool and drawn desktops."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from cuaenv import client as wire
from cuaenv.client import AsyncEnvClient, AsyncEpisode
from envd.base.config import LimitsConfig
from envd.tasks.model import Task
from envd.tasks.oracle import split_step, without_target
from envd.tasks.verbs import Execute, WriteSetupFile
from tests.support.faulty import FaultyMachine
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
async def one_episode(task_id: str, **options: Any) -> AsyncIterator[tuple[FakeServer, AsyncEpisode]]:
    """Open an episode on the only idle machine."""
    async with served_client(size=1) as (server, client), client.reset(task_id, **options) as episode:
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


NOTED = Task(
    task_id="fake/noted",
    instruction="Count to five.",
    level=1,
    setup=(
        Execute(kind="execute", argv=("sh", "-c", "echo once >>/home/user/setups.txt")),
        WriteSetupFile(kind="write_file", path="/home/user/a.txt", text="a"),
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
