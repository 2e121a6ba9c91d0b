"""`trainer eval` as its users run it: real gRPC to drawn desktops, and a stand-in for a model's server on a socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp.web
import pytest
from lxml import html
from PIL import Image

import trainer.client.episode
from envd.hypervisor.fake import Faults
from envd.testing.server import serve_fake
from trainer.agent.coordinates import CoordinateSpace, in_picture
from trainer.agent.prompts import prompt_hash
from trainer.agent.settings import AgentSettings
from trainer.client import Action, AsyncEnvClient, Click, Done, Fail, PressKeys, Task, TypeText
from trainer.evaluate.chat import ChatConversation, Sampling
from trainer.evaluate.endpoint import Endpoint, open_endpoint
from trainer.evaluate.play import EvaluationStopped, evaluate
from trainer.evaluate.replay import Replay
from trainer.evaluate.report import write_report
from trainer.evaluate.results import Results, ResultsFile, Run
from trainer.evaluate.statistics import wilson
from trainer.evaluate.summary import summarise

SETTINGS = AgentSettings(max_turns=4, reset_timeout_s=2.0, step_timeout_s=5.0, evaluate_timeout_s=5.0)
#: The drawn desktop is 1280x800; the model is shown it in units of a thousand.
SPACE = CoordinateSpace.of("normalised", image_px=(1, 1), screen_px=(1280, 800))

SOLUTIONS: Mapping[str, Sequence[Sequence[Action]]] = {
    "fake/save-note": [[Click(379, 311)], [TypeText("Hello, fake desktop!")], [Click(82, 86)], [Done()]],
    "fake/count-to-five": [[Click(819, 100, count=3), Click(819, 100, count=2)], [Done()]],
    "fake/enable": [[Click(822, 167)], [Done()]],
    "fake/no-printer": [[Fail("there is no printer")]],
    "fake/unicode-note": [[PressKeys(["ctrl", "a"])], [Done()]],
}


def said(actions: Sequence[Action]) -> str:
    return SETTINGS.make_grammar().render([in_picture(action, SPACE) for action in actions])


async def nothing() -> None:
    pass


class Model:
    """Plays each task's solution; knows the task by its instruction, and the turn by how often it spoke."""

    def __init__(self, tasks: Sequence[Task], solutions: Mapping[str, Sequence[Sequence[Action]]]) -> None:
        self._replies = {
            task.instruction: [said(actions) for actions in solutions.get(task.task_id, [[Done()]])] for task in tasks
        }
        self.asked_count = 0
        self.fails = False
        self.before_reply: Callable[[], Awaitable[None]] = nothing

    async def complete(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        self.asked_count += 1
        if self.fails:
            return aiohttp.web.Response(status=400, text="no such model")
        await self.before_reply()
        body = await request.json()
        told = json.dumps(body["messages"], ensure_ascii=False)
        replies = next(
            value for key, value in self._replies.items() if json.dumps(key, ensure_ascii=False)[1:-1] in told
        )
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        text = replies[min(turn, len(replies) - 1)]
        return aiohttp.web.json_response({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})


@asynccontextmanager
async def served(model: Model) -> AsyncIterator[Endpoint]:
    async def models(request: aiohttp.web.Request) -> aiohttp.web.Response:
        return aiohttp.web.json_response({"data": [{"id": "scripted"}]})

    app = aiohttp.web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", model.complete)
    app.router.add_get("/v1/models", models)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    try:
        await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
        async with open_endpoint(f"http://127.0.0.1:{runner.addresses[0][1]}/v1") as endpoint:
            yield endpoint
    finally:
        await runner.cleanup()


def size_of(picture: Path) -> tuple[int, int]:
    with Image.open(picture) as image:
        image.load()
        return image.size


def no_news(done: int, total: int, stage: str) -> None:
    pass


RUN = Run(label="scripted <b>model</b>", settings={}, prompt_hash=prompt_hash(SETTINGS))


async def run_evaluation(
    client: AsyncEnvClient,
    endpoint: Endpoint,
    tasks: Sequence[Task],
    path: Path,
    *,
    seeds: int = 1,
    concurrency: int = 2,
    report: Any = no_news,
) -> Results:
    def converse(seed: int) -> ChatConversation:
        return ChatConversation(endpoint, model="scripted", sampling=Sampling(), seed=seed)

    with ResultsFile(path, RUN) as file:
        await evaluate(
            client,
            tasks,
            converse,
            file=file,
            settings=SETTINGS,
            seeds=seeds,
            concurrency=concurrency,
            report=report,
        )
    return Results.read(path)


async def all_tasks(client: AsyncEnvClient) -> list[Task]:
    return [task for task in await client.list_tasks(timeout=timedelta(seconds=10)) if task.task_id in SOLUTIONS]


async def test_an_evaluation_scores_what_the_model_did_and_shows_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    async with serve_fake(size=2) as server, AsyncEnvClient(server.address) as client:
        tasks = await all_tasks(client)
        async with served(Model(tasks, SOLUTIONS)) as endpoint:
            results = await run_evaluation(client, endpoint, tasks, path)
        assert (await client.list_pools())[0].leased_count == 0
    scores = {attempt.task_id: attempt.score for attempt in results.attempts}
    assert scores == {task_id: float(task_id != "fake/unicode-note") for task_id in SOLUTIONS}
    rates = {row.group: row.success.mean for row in summarise(results).rows if row.success}
    assert rates["all"] == 0.8
    assert rates["feasible"] == 0.75
    assert rates["infeasible"] == 1.0
    page = html.parse(str(write_report(path))).getroot()
    assert [heading.text for heading in page.iter("h1")] == ["scripted <b>model</b>"]
    assert not list(page.iter("script"))
    pictures = [image.get("src") for image in page.iter("img")]
    assert len(pictures) >= 2 * len(SOLUTIONS)
    for picture in pictures:
        # 1280x800 in at most 1,003,520 pixels, both sides multiples of 32.
        assert size_of(tmp_path / picture) == (1248, 768)
    assert "Hello, fake desktop!" in page.text_content()


async def test_what_the_model_saw_is_what_the_replay_keeps(tmp_path: Path) -> None:
    async with serve_fake(size=1) as server, AsyncEnvClient(server.address) as client:
        tasks = [task for task in await all_tasks(client) if task.task_id == "fake/save-note"]
        async with served(Model(tasks, SOLUTIONS)) as endpoint:
            results = await run_evaluation(client, endpoint, tasks, tmp_path / "run.jsonl")
    directory = tmp_path / results.attempts[0].replay
    replay = Replay.model_validate_json((directory / "replay.json").read_bytes())
    assert [turn.actions for turn in replay.turns][1] == ["TypeText text='Hello, fake desktop!'"]
    assert len({(directory / turn.image).read_bytes() for turn in replay.turns}) == len(replay.turns)
    assert replay.last_image
    assert results.attempts[0].checks[0].score == 1.0


async def test_an_evaluation_that_was_cut_short_goes_on_and_repeats_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    async with serve_fake(size=2) as server, AsyncEnvClient(server.address) as client:
        tasks = await all_tasks(client)
        model = Model(tasks, SOLUTIONS)
        async with served(model) as endpoint:
            enough = asyncio.Event()

            def report(done: int, total: int, stage: str) -> None:
                if done >= 2:
                    enough.set()

            running = asyncio.create_task(run_evaluation(client, endpoint, tasks, path, concurrency=1, report=report))
            await asyncio.wait_for(enough.wait(), 30)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            kept = {attempt.key: attempt.episode_id for attempt in Results.read(path).attempts}
            assert 2 <= len(kept) < len(tasks)
            assert (await client.list_pools())[0].leased_count == 0
            results = await run_evaluation(client, endpoint, tasks, path)
            asked_count = model.asked_count
            await run_evaluation(client, endpoint, tasks, path)
            assert model.asked_count == asked_count
    assert len(results.attempts) == len(tasks)
    assert kept.items() <= {attempt.key: attempt.episode_id for attempt in results.attempts}.items()


async def test_machines_that_are_lost_are_errors_and_no_zeros(tmp_path: Path) -> None:
    faults = Faults(die_after_inputs=0)
    async with serve_fake(size=2, faults=faults) as server, AsyncEnvClient(server.address) as client:
        tasks = await all_tasks(client)
        async with served(Model(tasks, SOLUTIONS)) as endpoint:
            results = await run_evaluation(client, endpoint, tasks, tmp_path / "run.jsonl")
    by_task = {attempt.task_id: attempt for attempt in results.attempts}
    assert by_task.pop("fake/no-printer").score == 1.0
    assert {(attempt.score, attempt.outcome, attempt.reason) for attempt in by_task.values()} == {
        (None, "failed", "MachineLost")
    }
    assert summarise(results).rows[0].success == wilson(1, 1)


async def test_a_killed_daemon_costs_no_result_and_the_next_one_finishes_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.client.episode, "_CLOSE_TIMEOUT", timedelta(seconds=1))
    path = tmp_path / "run.jsonl"
    async with serve_fake(size=1, database=tmp_path / "books") as server, AsyncEnvClient(server.address) as client:
        tasks = (await all_tasks(client))[:3]
        model = Model(tasks, SOLUTIONS)
        async with served(model) as endpoint:
            # The first task takes two replies, the second one three; the daemon is gone amid the second one.
            model.before_reply = lambda: server.kill() if model.asked_count == 4 else nothing()
            cut = await run_evaluation(client, endpoint, tasks, path, concurrency=1)
    assert [attempt.score for attempt in cut.attempts if not attempt.is_error] == [1.0]
    assert {attempt.reason for attempt in cut.attempts if attempt.is_error} <= {"Unavailable", "DeadlineExceeded"}
    async with (
        serve_fake(size=2) as server,
        AsyncEnvClient(server.address) as client,
        served(Model(tasks, SOLUTIONS)) as endpoint,
    ):
        results = await run_evaluation(client, endpoint, tasks, path)
    assert [attempt.is_error for attempt in results.attempts] == [False] * len(tasks)
    assert cut.attempts[0] == results.attempts[0]


async def test_a_model_that_refuses_stops_the_evaluation_before_all_is_lost(tmp_path: Path) -> None:
    async with serve_fake(size=2) as server, AsyncEnvClient(server.address) as client:
        tasks = await all_tasks(client)
        model = Model(tasks, SOLUTIONS)
        model.fails = True
        async with served(model) as endpoint:
            with pytest.raises(EvaluationStopped, match=r"8 attempts in a row were lost.*no such model"):
                await run_evaluation(client, endpoint, tasks, tmp_path / "run.jsonl", seeds=5)


async def test_seeds_are_attempts_of_their_own(tmp_path: Path) -> None:
    async with serve_fake(size=2) as server, AsyncEnvClient(server.address) as client:
        tasks = [task for task in await all_tasks(client) if task.task_id == "fake/enable"]
        async with served(Model(tasks, SOLUTIONS)) as endpoint:
            results = await run_evaluation(client, endpoint, tasks, tmp_path / "run.jsonl", seeds=3)
    assert [attempt.key for attempt in results.attempts] == [("fake/enable", seed) for seed in range(3)]
