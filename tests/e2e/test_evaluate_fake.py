"""Evaluations over real gRPC to drawn desktops, with a stand-in for a model's server on a socket."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lxml import html
from PIL import Image

import cuaenv.client.leases
from cuaenv.client import Action, AsyncEnvClient, Click, Done, Fail, PressKeys, Task, TypeText
from envd.base.config import SettlePolicy
from tests.support.command import CommandOutput, run_envd
from tests.support.faulty import Faults
from tests.support.scripted_model import ScriptedModel, say_steps, served
from tests.support.server import serve_fake
from trainer.agent.prompts import prompt_hash
from trainer.agent.settings import AgentSettings
from trainer.evaluate.chat import ChatConversation, Sampling
from trainer.evaluate.endpoint import open_endpoint
from trainer.evaluate.play import EvaluationStopped, evaluate
from trainer.evaluate.replay import Replay
from trainer.evaluate.report import write_report
from trainer.evaluate.results import Results, ResultsFile, Run
from trainer.evaluate.statistics import wilson
from trainer.evaluate.summary import summarise

HOSTILE = "<script>alert(1)</script><img src=x>"
SETTINGS = AgentSettings(max_turns=4, reset_timeout_s=60.0, step_timeout_s=60.0, evaluate_timeout_s=60.0)
SOLUTIONS: Mapping[str, Sequence[Sequence[Action]]] = {
    "fake/save-note": [[Click(379, 311)], [TypeText("Hello, fake desktop!")], [Click(82, 86)], [Done()]],
    "fake/count-to-five": [[Click(819, 100, count=3), Click(819, 100, count=2)], [Done()]],
    "fake/enable": [[Click(822, 167)], [Done()]],
    "fake/no-printer": [[Fail("there is no printer")]],
    "fake/unicode-note": [[PressKeys(["ctrl", "a"])], [Done()]],
}


def model_of(tasks: Sequence[Task]) -> ScriptedModel:
    """A model that solves all tasks but the Unicode note."""
    grammar = SETTINGS.make_grammar()
    replies = {task.instruction: say_steps(SOLUTIONS[task.task_id], grammar) for task in tasks}
    for task in tasks:
        if task.task_id == "fake/unicode-note":
            replies[task.instruction].insert(0, HOSTILE)
    return ScriptedModel(replies)


def size_of(picture: Path) -> tuple[int, int]:
    with Image.open(picture) as image:
        image.load()
        return image.size


def no_news(done: int, total: int, stage: str) -> None:
    pass


RUN = Run(label="scripted <b>model</b>", settings={}, prompt_hash=prompt_hash(SETTINGS))


async def run_evaluation(
    client: AsyncEnvClient,
    url: str,
    tasks: Sequence[Task],
    path: Path,
    *,
    seeds: int = 1,
    concurrency: int = 2,
    report: Any = no_news,
    settings: AgentSettings = SETTINGS,
) -> Results:
    async with open_endpoint(url) as endpoint:

        def new_conversation(seed: int) -> ChatConversation:
            return ChatConversation(endpoint, model="scripted", sampling=Sampling(), seed=seed)

        with ResultsFile(path, RUN) as file:
            await evaluate(
                client,
                tasks,
                new_conversation,
                file=file,
                settings=settings,
                seeds=seeds,
                concurrency=concurrency,
                report=report,
            )
    return Results.read(path)


async def all_given_back(client: AsyncEnvClient) -> None:
    """A reset that was called off may still be under way, and is closed as soon as it is answered."""
    async with asyncio.timeout(60):
        while (await client.list_pools())[0].leased_count:
            await asyncio.sleep(0.05)


async def all_tasks(client: AsyncEnvClient) -> list[Task]:
    return [task for task in await client.list_tasks(timeout=timedelta(seconds=60)) if task.task_id in SOLUTIONS]


async def test_an_evaluation_scores_and_reports_what_the_model_did(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    async with serve_fake(size=2) as server, AsyncEnvClient(server.address) as client:
        tasks = await all_tasks(client)
        async with served(model_of(tasks)) as url:
            results = await run_evaluation(client, url, tasks, path)
        assert (await client.list_pools())[0].leased_count == 0
    scores = {attempt.task_id: attempt.score for attempt in results.attempts}
    assert scores == {task_id: float(task_id != "fake/unicode-note") for task_id in SOLUTIONS}
    digests = {attempt.basis_digest for attempt in results.attempts}
    assert {len(digest) for digest in digests} == {64}
    assert len(digests) == len(SOLUTIONS)
    rates = {row.group: row.success.mean for row in summarise(results).rows if row.success}
    assert rates["all"] == 0.8
    assert rates["feasible"] == 0.75
    assert rates["infeasible"] == 1.0
    write_report(results, tmp_path / "run.html")
    page = html.parse(str(tmp_path / "run.html")).getroot()
    assert [heading.text for heading in page.iter("h1")] == ["Evaluation of scripted <b>model</b>"]
    assert not list(page.iter("script"))
    pictures = [image.get("src") for image in page.iter("img")]
    assert len(pictures) >= 2 * len(SOLUTIONS)
    for picture in pictures:
        # 1280x800 in at most 1,003,520 pixels, both sides multiples of 32.
        assert size_of(tmp_path / picture) == (1248, 768)
    assert "Hello, fake desktop!" in page.text_content()
    assert HOSTILE in page.text_content()


async def test_each_score_is_that_of_the_locked_suite(tmp_path: Path) -> None:
    path, lock = tmp_path / "run.jsonl", tmp_path / "fake.lock"
    async with serve_fake(size=2, settle=SettlePolicy()) as server, AsyncEnvClient(server.address) as client:
        tasks = await all_tasks(client)
        async with served(model_of(tasks)) as url:
            await run_evaluation(client, url, tasks, path)

    def suite(*words: str) -> CommandOutput:
        places = ("--file", str(lock), "--cache-dir", str(tmp_path / "cache"))
        return run_envd("suite", *words, *places, "--hypervisor", "fake", "--json")

    assert suite("lock", "fake").status == 0
    checked = suite("check", "fake", "--results", str(path))
    assert (checked.status, json.loads(checked.out)["changes"]) == (0, [])
    locked = json.loads(lock.read_text(encoding="utf-8"))
    task_id = tasks[0].task_id
    before, locked["scores"][task_id] = locked["scores"][task_id], "0" * 64
    lock.write_text(json.dumps(locked), encoding="utf-8")
    checked = suite("check", "fake", "--results", str(path))
    assert checked.status == 1
    assert json.loads(checked.out)["changes"] == [f"scores {task_id}: {'0' * 64} -> {before}"]
    assert "have no score of suite drawn" in suite("check", "drawn", "--results", str(path)).err
    path.write_text("{", encoding="utf-8")
    assert "give a file of `trainer eval`" in suite("check", "fake", "--results", str(path)).err


async def test_a_replay_keeps_the_pictures_that_the_model_saw(tmp_path: Path) -> None:
    async with serve_fake(size=1) as server, AsyncEnvClient(server.address) as client:
        tasks = [task for task in await all_tasks(client) if task.task_id == "fake/save-note"]
        async with served(model_of(tasks)) as url:
            results = await run_evaluation(client, url, tasks, tmp_path / "run.jsonl")
    directory = tmp_path / results.attempts[0].replay
    replay = Replay.model_validate_json((directory / "replay.json").read_bytes())
    assert [turn.actions for turn in replay.turns][1] == ["type 'Hello, fake desktop!'"]
    assert len({(directory / turn.image).read_bytes() for turn in replay.turns}) == len(replay.turns)
    assert replay.last_image
    assert results.attempts[0].checks[0].score == 1.0


async def test_an_interrupted_evaluation_continues_and_repeats_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    async with serve_fake(size=2) as server, AsyncEnvClient(server.address) as client:
        tasks = await all_tasks(client)
        model = model_of(tasks)
        async with served(model) as url:
            enough = asyncio.Event()

            def report(stage: str, done: float, total: int | None = None) -> None:
                if done >= 2:
                    enough.set()

            running = asyncio.create_task(run_evaluation(client, url, tasks, path, concurrency=1, report=report))
            await asyncio.wait_for(enough.wait(), 60)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            kept = {attempt.key: attempt.episode_id for attempt in Results.read(path).attempts}
            assert 2 <= len(kept) < len(tasks)
            await all_given_back(client)
            results = await run_evaluation(client, url, tasks, path)
            asked_count = model.asked_count
            await run_evaluation(client, url, tasks, path)
            assert model.asked_count == asked_count
    assert len(results.attempts) == len(tasks)
    assert kept.items() <= {attempt.key: attempt.episode_id for attempt in results.attempts}.items()


@pytest.mark.parametrize("full_from_turn", [0, 1])
async def test_a_full_context_is_an_error_before_the_first_reply_and_a_truncation_after_it(
    tmp_path: Path, full_from_turn: int
) -> None:
    async with serve_fake(size=1) as server, AsyncEnvClient(server.address) as client:
        tasks = [task for task in await all_tasks(client) if task.task_id == "fake/save-note"]
        model = model_of(tasks)
        model.context_full_from_turn = full_from_turn
        async with served(model) as url:
            results = await run_evaluation(client, url, tasks, tmp_path / "run.jsonl")
    (attempt,) = results.attempts
    if full_from_turn == 0:
        assert (attempt.score, attempt.outcome, attempt.reason) == (None, "failed", "no_reply_total")
        assert "--max-model-len" in attempt.error
    else:
        assert (attempt.score, attempt.outcome, attempt.reason) == (0.0, "truncated", "total")


async def test_lost_machines_are_errors_and_not_zeros(tmp_path: Path) -> None:
    faults = Faults(die_after_inputs=0)
    async with serve_fake(size=2, faults=faults) as server, AsyncEnvClient(server.address) as client:
        tasks = await all_tasks(client)
        async with served(model_of(tasks)) as url:
            results = await run_evaluation(client, url, tasks, tmp_path / "run.jsonl")
    by_task = {attempt.task_id: attempt for attempt in results.attempts}
    assert by_task.pop("fake/no-printer").score == 1.0
    assert {(attempt.score, attempt.outcome, attempt.reason) for attempt in by_task.values()} == {
        (None, "failed", "MachineLost")
    }
    assert summarise(results).rows[0].success == wilson(1, 1)


async def test_a_killed_daemon_loses_no_result_and_the_next_one_finishes_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuaenv.client.leases, "_CLOSE_TIMEOUT", timedelta(seconds=1))
    path = tmp_path / "run.jsonl"
    async with serve_fake(size=1, database=tmp_path / "books") as server, AsyncEnvClient(server.address) as client:
        tasks = (await all_tasks(client))[:3]
        model = model_of(tasks)
        async with served(model) as url:
            # The first task takes two replies, the second one three; the daemon is gone during the second one.

            async def kill() -> None:
                if model.asked_count == 4:
                    await server.kill()

            class Hasty(AgentSettings):
                """Gives a daemon time until it is gone: then each call takes all the time that it has."""

                @property
                def step_timeout(self) -> timedelta:
                    return timedelta(seconds=1 if server.is_killed else 60)

                evaluate_timeout = step_timeout

                @property
                def reset_timeout(self) -> timedelta:
                    # Of both attempts at a task, also if the daemon is gone at the second.
                    return timedelta(seconds=1 if server.is_killed else 15 if model.asked_count else 60)

            model.before_reply = kill
            cut = await run_evaluation(client, url, tasks, path, concurrency=1, settings=Hasty(max_turns=4))
    assert [attempt.score for attempt in cut.attempts if not attempt.is_error] == [1.0]
    assert [attempt.outcome for attempt in cut.attempts] == ["terminated", "failed", "failed"]
    async with serve_fake(size=2) as server, AsyncEnvClient(server.address) as client, served(model_of(tasks)) as url:
        results = await run_evaluation(client, url, tasks, path)
    assert [attempt.is_error for attempt in results.attempts] == [False] * len(tasks)
    assert cut.attempts[0] == results.attempts[0]


async def test_a_refusing_model_stops_the_evaluation_early(tmp_path: Path) -> None:
    async with serve_fake(size=2) as server, AsyncEnvClient(server.address) as client:
        tasks = await all_tasks(client)
        async with served(ScriptedModel({})) as url:
            with pytest.raises(EvaluationStopped, match=r"8 consecutive attempts were lost.*no reply was written"):
                await run_evaluation(client, url, tasks, tmp_path / "run.jsonl", seeds=5)


async def test_each_seed_is_a_separate_attempt(tmp_path: Path) -> None:
    async with serve_fake(size=2) as server, AsyncEnvClient(server.address) as client:
        tasks = [task for task in await all_tasks(client) if task.task_id == "fake/enable"]
        async with served(model_of(tasks)) as url:
            results = await run_evaluation(client, url, tasks, tmp_path / "run.jsonl", seeds=3)
    assert [attempt.key for attempt in results.attempts] == [("fake/enable", seed) for seed in range(3)]
