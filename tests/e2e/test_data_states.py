"""States of a run as start states: `trainer data states`, and slime's rollout and sessions that begin in them."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from cuaenv.client import Action, AsyncEnvClient, Click, Done, State
from envd.base.config import CheckpointsConfig
from envd.episodes.checkpoints.store import CheckpointStore
from tests.support import counting
from tests.support.areal import ScriptedEngine as ArealEngine
from tests.support.areal import group_of
from tests.support.counting import PARAMS, SAY, TASK, turn_in
from tests.support.server import FakeServer, serve_fake
from tests.support.slime import Processor, Sample, ScriptedEngine, Tokenizer, stand_in_args, stand_in_slime
from trainer.adapters.areal.group import ArealConfig, play_group
from trainer.adapters.session import SessionSettings, session
from trainer.agent.starts import start_of, state_of
from trainer.cli.app import app
from trainer.config import InputError
from trainer.slime import job as registry
from trainer.slime.hooks import generate, keep_informative
from trainer.slime.play.samples import facts_of, is_void
from trainer.tokens.chat import Chat

COUNT = Click(819, 100)
#: The same, as the agent says it.
SAID = Click(640, 125)
AGENT = {**counting.AGENT, "max_turns": 6}


@asynccontextmanager
async def host(directory: Path) -> AsyncIterator[FakeServer]:
    store = CheckpointStore(directory / "checkpoints", settings=CheckpointsConfig(), reserve_bytes=0)
    async with serve_fake(size=2, capacity=6, checkpoints=store) as server:
        yield server


async def failed_run(server: FakeServer) -> None:
    """Leave three states of a run: after two steps, when the agent ended too early, and a failure with no step left."""
    async with AsyncEnvClient(server.address, run="sweep") as client:
        async with client.reset(TASK, checkpoint_on=["failure"]) as episode:
            await episode.step(COUNT, COUNT)
            await episode.step(COUNT)
            await episode.checkpoint("before the end")
            await episode.step(Done())
            assert (await episode.evaluate()).score == 0
        async with client.reset(TASK, max_steps=1, checkpoint_on=["failure"]) as episode:
            await episode.step(COUNT)
            assert (await episode.evaluate()).score == 0
        async with asyncio.timeout(30):
            while len(await client.list_checkpoints()) < 3:
                await asyncio.sleep(0.01)


async def states(server: FakeServer, file: Path, *options: str) -> list[dict[str, Any]]:
    """Return the rows that the command writes."""
    command = ["data", "states", "--envd", server.address, "--out", str(file), *options]
    result = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


async def test_states_are_selected_by_run_task_label_reason_and_score(tmp_path: Path) -> None:
    file = tmp_path / "states.jsonl"
    async with host(tmp_path) as server:
        await failed_run(server)

        async def steps(*options: str) -> list[int]:
            rows = await states(server, file, *options)
            assert {row["label"] for row in rows} == {TASK}
            return sorted(row["metadata"]["checkpoint"]["step_count"] for row in rows)

        assert await steps() == [1, 2, 3]
        assert await steps("--run", "sweep", "--task", TASK) == [1, 2, 3]
        assert await steps("--label", "before *") == [2]
        assert await steps("--reason", "failure") == [1, 3]
        assert await steps("--reason", "request", "--reason", "failure") == [1, 2, 3]
        async with AsyncEnvClient(server.address) as client, client.reset(TASK) as episode:
            await episode.step(COUNT, COUNT, COUNT, COUNT, COUNT)
            await episode.checkpoint("solved")
        assert await steps("--max-score", "0.5") == [1, 2, 3]
        (labelled,) = await states(server, file, "--label", "before *")
        damaged = tmp_path / "checkpoints" / labelled["metadata"]["checkpoint"]["checkpoint_id"] / "screen.zst"
        damaged.write_bytes(b"")
        assert await steps("--max-score", "0.5") == [1, 3]
        (row,) = await states(server, file, "--min-score", "0.5", "--label", "*")
        assert (row["metadata"]["state_score"], row["metadata"]["checkpoint"]["label"]) == (1.0, "solved")
        table = tmp_path / "states.parquet"
        command = ["data", "states", "--envd", server.address, "--out", str(table)]
        assert (await asyncio.to_thread(CliRunner().invoke, app, command)).exit_code == 0
        read = pq.read_table(table).to_pylist()
        assert {type(start_of(each["metadata"], TASK)).__name__ for each in read} == {"Checkpoint"}


async def test_a_selection_of_nothing_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "states.jsonl"
    async with host(tmp_path) as server:
        await failed_run(server)
        for options, text in (
            (("--run", "none"), "no checkpoint fits"),
            (("--label", "after *"), "no checkpoint fits"),
            (("--reason", "luck"), "luck is not one of steps, branch_point"),
            (("--min-score", "0.5"), "none has that score"),
            (("--out", "states.txt"), "unknown format"),
        ):
            command = ["data", "states", "--envd", server.address, "--out", str(file), *options]
            result = await asyncio.to_thread(CliRunner().invoke, app, command)
            assert (result.exit_code > 0, text in result.stderr) == (True, True), result.stderr
    assert not file.exists()


def job_of(server: FakeServer, *, members: int, **envd: Any) -> Any:
    """Return slime's arguments."""
    return stand_in_args(
        {"hosts": [server.address], "engine_timeout_s": 20.0, "engine_retries": 1, "agent": AGENT, **envd},
        n_samples_per_prompt=members,
    )


async def rolled_out(
    server: FakeServer, row: dict[str, Any], *, members: int, plan: Sequence[Sequence[Action]], **envd: Any
) -> Any:
    """Run a group of slime's samples of a row."""
    args = job_of(server, members=members, **envd)
    samples = [Sample(group_index=1, index=index, metadata=dict(row["metadata"])) for index in range(members)]
    engine = ScriptedEngine(lambda prompt: SAY(plan[turn_in(prompt) - 1]))
    with stand_in_slime(engine):
        await asyncio.gather(*(generate(args, sample, PARAMS) for sample in samples))
    return samples


async def test_a_group_starts_in_the_state_in_which_an_episode_failed(tmp_path: Path) -> None:
    async with host(tmp_path) as server:
        await failed_run(server)
        rows = await states(server, tmp_path / "states.jsonl", "--reason", "failure")
        for row in rows:
            taken = row["metadata"]["checkpoint"]["step_count"]
            rest = 5 - {1: 1, 3: 3}[taken]
            samples = await rolled_out(server, row, members=3, plan=[[SAID]] * rest + [[Done()]])
            assert [(sample.status.name, sample.reward) for sample in samples] == [("COMPLETED", 1.0)] * 3
            assert {facts_of(sample)["turns"] for sample in samples} == {rest + 1}
            assert len({facts_of(sample)["origin"] for sample in samples}) == 1
            # From the task's beginning the same replies are not sufficient.
            (control,) = await rolled_out(
                server, {"metadata": {"task_id": TASK}}, members=1, plan=[[SAID]] * rest + [[Done()]]
            )
            assert control.reward == 0.0


async def test_a_success_from_a_checkpoint_is_replayed_only_to_groups_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_jobs", {})
    options: dict[str, Any] = {"members": 2, "replay": {"seed": 2}}
    beginning, give_up = {"metadata": {"task_id": TASK}}, [[Done()]]
    async with host(tmp_path) as server:
        await failed_run(server)
        (row,) = await states(server, tmp_path / "states.jsonl", "--label", "before *")
        near = await rolled_out(server, row, plan=[[SAID], [SAID], [Done()]], **options)
        assert [sample.reward for sample in near] == [1.0, 1.0]
        args = job_of(server, **options)
        for start, is_replayed in ((beginning, False), (row, True)):
            group = await rolled_out(server, start, plan=give_up, **options)
            with stand_in_slime(ScriptedEngine(lambda _: "")):
                assert keep_informative(args, group).keep == is_replayed
            assert ["replay" in facts_of(sample) for sample in group] == [False, is_replayed]


async def test_areal_starts_a_group_in_the_state_of_its_row(tmp_path: Path) -> None:
    config = ArealConfig.from_mapping({"group_size": 2, "agent": {**AGENT, "max_turns": 3}, "hosts": ["unused:1"]})
    plan: list[list[Action]] = [[SAID], [SAID], [Done()]]
    engine = ArealEngine(lambda prompt: SAY(plan[prompt.count("assistant\n") - 1]))
    async with host(tmp_path) as server:
        await failed_run(server)
        (row,) = await states(server, tmp_path / "states.jsonl", "--label", "before *")
        data: dict[str, Any] = {"task_id": TASK, "metadata": row["metadata"]}
        async with AsyncEnvClient(server.address) as client:
            chat = Chat(Tokenizer(), Processor())
            result = await group_of(client, data, engine, chat=chat, config=config)
            # Three of the five clicks were made before the checkpoint.
            assert (result.metrics["reward"], result.metrics["turns"]) == ([1.0, 1.0], [3.0, 3.0])
            data["metadata"] = {"checkpoint": {**row["metadata"]["checkpoint"], "task_id": "fake/other"}}
            with pytest.raises(InputError, match="is a checkpoint of fake/other"):
                await play_group(client, data, engine.ask, chat=chat, config=config)


async def test_a_state_that_is_gone_or_of_another_host_is_void_and_never_zero(tmp_path: Path) -> None:
    async with host(tmp_path) as server:
        await failed_run(server)
        (row,) = await states(server, tmp_path / "states.jsonl", "--reason", "request")
        async with AsyncEnvClient(server.address) as client:
            (checkpoint,) = [each for each in await client.list_checkpoints() if not each.trigger]
            await client.delete_checkpoint(checkpoint)
        foreign = {**row["metadata"]["checkpoint"], "host": "127.0.0.1:1"}
        for changed, reason in ((row["metadata"]["checkpoint"], "CheckpointNotFound"), (foreign, "Unavailable")):
            metadata = {**row["metadata"], "checkpoint": changed}
            (sample,) = await rolled_out(server, {"metadata": metadata}, members=1, plan=[[Done()]])
            assert is_void(sample)
            assert (sample.status.name, sample.loss_mask, facts_of(sample)["void"]) == ("FAILED", [0], reason)
            assert "raw_reward" not in sample.metadata


async def test_a_session_starts_in_the_state_of_a_row(tmp_path: Path) -> None:
    async with host(tmp_path) as server:
        await failed_run(server)
        (row,) = await states(server, tmp_path / "states.jsonl", "--label", "before*")
        settings = SessionSettings.connect(server.address, max_steps=1)
        async with session(row, settings=settings) as opened:
            assert (await opened.step(COUNT, COUNT)).state is State.TRUNCATED
            assert (await opened.score()).value == 1.0


async def test_a_malformed_state_is_void_without_an_episode(tmp_path: Path) -> None:
    async with host(tmp_path) as server:
        await failed_run(server)
        async with AsyncEnvClient(server.address) as client:
            checkpoint = (await client.list_checkpoints())[0]
        assert start_of({"checkpoint": json.loads(json.dumps(state_of(checkpoint)))}, TASK) == checkpoint
        assert start_of({}, TASK) == start_of({"checkpoint": None}, TASK) == TASK
        for state, text in (
            ("ckpt-1", "is not one of `trainer data states`"),
            ({"checkpoint_id": "ckpt-1"}, "is not one of `trainer data states`"),
            ({**state_of(checkpoint), "task_id": "fake/save-note"}, "is a checkpoint of fake/save-note"),
        ):
            row = {"metadata": {"task_id": TASK, "checkpoint": state}}
            (sample,) = await rolled_out(server, row, members=1, plan=[], halt={"above": {}})
            assert (is_void(sample), facts_of(sample)["void"]) == (True, "UnplayableRow")
            assert text in facts_of(sample)["error"]
