"""Training data from a daemon's tasks: oracles played over gRPC on fake desktops, joined and exported."""

import asyncio
import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from cuaenv.client import Click, Done, PressKeys, Task
from envd.api.server import ApiServer
from envd.base.telemetry.metrics import Metrics
from envd.cli.app import app as envd_app
from envd.tasks.catalogue import TaskCatalogue
from tests.support.server import serve_fake, served_client
from tests.support.stub_episodes import TASKS, StubEpisodes
from trainer.agent.settings import AgentSettings
from trainer.cli.app import app
from trainer.data.dataset import join
from trainer.data.oracles import Oracle, read_oracles
from trainer.data.prompts import prompt_rows
from trainer.data.record import record
from trainer.data.sft import sft_row
from trainer.data.transcripts import Unusable, is_trained, transcript_of, unparsable_turns
from trainer.replay.reader import ReadResult
from trainer.replay.trajectory import StoredTrajectory

SETTINGS = AgentSettings(max_turns=8, reset_timeout_s=60.0, step_timeout_s=60.0)


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> list[Oracle]:
    printed = CliRunner().invoke(envd_app, ["tasks", "oracles", "--hypervisor", "fake", "--suite", "fake"]).stdout
    path = tmp_path_factory.mktemp("oracles") / "oracles.jsonl"
    path.write_text(printed)
    return read_oracles(path)


async def recorded(oracle: Oracle, settings: AgentSettings = SETTINGS) -> list[StoredTrajectory]:
    async with served_client(size=1) as (_, client):
        tasks = {task.task_id: task for task in await client.list_tasks()}
        return await record(client, tasks[oracle.task_id], oracle, settings=settings, patience_s=())


def of(oracles: list[Oracle], task_id: str) -> Oracle:
    return next(oracle for oracle in oracles if oracle.task_id == task_id)


async def test_every_oracle_becomes_a_conversation_that_the_grammar_parses(oracles: list[Oracle]) -> None:
    async with served_client(size=2) as (_, client):
        tasks = {task.task_id: task for task in await client.list_tasks()}
        trajectories = [
            trajectory
            for oracle in oracles
            for trajectory in await record(client, tasks[oracle.task_id], oracle, settings=SETTINGS, patience_s=())
        ]
    assert {trajectory.task_id for trajectory in trajectories} == set(tasks)
    for trajectory in trajectories:
        assert trajectory.reward == 1.0
        steps = of(oracles, trajectory.task_id).steps
        conversation = transcript_of(trajectory)
        assert sum(map(is_trained, conversation.messages)) == len(steps)
        assert len(conversation.images) == len(steps)
        assert unparsable_turns(conversation, SETTINGS.make_grammar()) == {}
        again = StoredTrajectory.from_row(json.loads(json.dumps(trajectory.as_row())))
        assert again == trajectory
    result = ReadResult(trajectories=tuple(trajectories), failed_count=0, surplus_count=0, problems=())
    joined = join({"oracles": result}, grammar=SETTINGS.make_grammar(), share=0)
    assert len(joined.items) == len(oracles)
    assert {item.metadata["os"] for item in joined.items} == {"linux"}


async def test_each_turn_is_trained_in_the_row_in_which_it_was_sampled(oracles: list[Oracle]) -> None:
    settings = AgentSettings(max_turns=8, images_per_row=2, images_kept=1)
    chunks = await recorded(of(oracles, "fake/save-note"), settings)
    assert [chunk.task_id for chunk in chunks] == ["fake/save-note_chunk0", "fake/save-note_chunk1"]
    trained = [turn["content"] for chunk in chunks for turn in transcript_of(chunk).messages if is_trained(turn)]
    assert len(trained) == len(set(trained)) == 4
    rows = [sft_row(chunk) for chunk in chunks]
    assert [sum(message["step_loss_mask"] for message in row["messages"]) for row in rows if row] == [2, 2]


async def test_an_oracle_that_does_not_solve_its_task_is_not_recorded(oracles: list[Oracle]) -> None:
    wrong = Oracle(task_id="fake/enable", steps=((Click(10, 10),), (Done(),)))
    with pytest.raises(Unusable, match=r"fake/enable: the oracle scored 0 in 2 turns \(done\)"):
        await recorded(wrong)


async def test_an_oracle_without_an_end_is_reported() -> None:
    with pytest.raises(Unusable, match=r"fake/enable.*no more steps"):
        await recorded(Oracle(task_id="fake/enable", steps=((Click(822, 167),),)))


async def test_waits_for_the_screen_are_played_and_not_trained() -> None:
    nothing_then_done = Oracle(task_id="fake/enable", steps=((Click(822, 167),), (PressKeys(["shift"]),), (Done(),)))
    async with served_client(size=1) as (_, client):
        [task] = [task for task in await client.list_tasks() if task.task_id == "fake/enable"]
        [trajectory] = await record(client, task, nothing_then_done, settings=SETTINGS, patience_s=(0.01, 0.02))
    turns = [turn for turn in transcript_of(trajectory).messages if turn["role"] == "assistant"]
    assert list(map(is_trained, turns)) == [True, True, False, False, True]


async def test_a_daemons_tasks_become_rows_that_slime_reads(tmp_path: Path) -> None:
    async with served_client(size=1) as (_, client):
        tasks = await client.list_tasks()
    [level_three] = [task for task in tasks if task.level == 3]
    more = Task(task_id="fake/another", instruction="Something else.", level=3, suite="fake")
    rows = prompt_rows([*tasks, more], seed=1)
    assert {row["label"] for split in rows.values() for row in split} == {task.task_id for task in [*tasks, more]}
    for name, split in rows.items():
        assert {row["metadata"]["level"] for row in split} == {1, 2, 3}
        for row in split:
            assert row["metadata"]["split"] == name
            assert row["metadata"]["task_id"] == row["label"]
            assert [message["role"] for message in row["prompt"]] == ["user"]
    assert level_three.tags == ("mouse", "window")


async def test_the_commands_produce_files_for_slime(tmp_path: Path, oracles: list[Oracle]) -> None:
    printed = CliRunner().invoke(envd_app, ["tasks", "oracles", "--hypervisor", "fake", "--suite", "fake"]).stdout
    (tmp_path / "oracles.jsonl").write_text(printed + '{"task_id": "fake/gone", "steps": [[{"done": ""}]]}\n')
    recorded_file, sft_file = tmp_path / "recorded.jsonl", tmp_path / "sft.parquet"

    async with serve_fake(size=2) as server:

        async def run(*command: str) -> tuple[int, str, str]:
            result = await asyncio.to_thread(CliRunner().invoke, app, ["data", *command])
            return result.exit_code, result.stdout, result.stderr

        at = ["--envd", server.address]
        status, out, err = await run(
            "record",
            str(tmp_path / "oracles.jsonl"),
            *at,
            "--no-patience",
            "--concurrency",
            "2",
            "--out",
            str(recorded_file),
        )
        assert (status, out) == (1, f"{len(oracles)} trajectories in {recorded_file}, 1 failed\n"), err
        assert "fake/gone: the daemon does not serve it" in err
        status, out, err = await run("prompts", *at, "--out", str(tmp_path))
        assert (status, "train" in out, "held_out" in out) == (0, True, True), err
        assert "level 3 has a single task" in err
        status, out, err = await run("prompts", *at, "--held-out", "0", "--parquet", "--out", str(tmp_path))
        assert status == 0, err
        status, out, err = await run("prompts", *at, "--held-out", "0", "--out", str(tmp_path))
        assert (status, (tmp_path / "held_out.jsonl").exists()) == (0, False), "its tasks are in train now"
        status, out, err = await run("prompts", *at, "--suite", "nope", "--out", str(tmp_path))
        assert (status, out) == (2, "")
        assert "suite nope: the daemon has no tasks of it; it serves fake" in err
        status, out, err = await run("record", os.devnull, *at, "--out", str(tmp_path / "none.jsonl"))
        assert (status, (tmp_path / "none.jsonl").exists()) == (1, False)
        assert "no oracles; write it with `envd tasks oracles`" in err
        status, out, err = await run("export-sft", str(recorded_file), "--out", str(sft_file), "--json")
        assert status == 0, err
    assert pq.read_table(tmp_path / "train.parquet").to_pylist()[0]["metadata"]["suite"] == "fake"
    rows = pq.read_table(sft_file).to_pylist()
    assert json.loads(out)["replies trained"] == sum(len(oracle.steps) for oracle in oracles)
    for row in rows:
        places = sum(message["content"].count("<image>") for message in row["messages"])
        assert places == len(row["images"])
        assert all(image.startswith("data:image/png;base64,") for image in row["images"])


async def test_prompts_leave_out_tasks_that_the_host_cannot_run(tmp_path: Path) -> None:
    (*_, listed) = TASKS.list()
    tasks = [
        listed.model_copy(update={"task_id": f"osworld/{name}", "instruction": f"Do {name}."}) for name in "abcdefgh"
    ]
    obstacles = {f"osworld/{name}": ("assets: 1 files are not fetched",) for name in "abcd"}
    catalogue = TaskCatalogue(tasks, find_obstacles=lambda task_id: obstacles.get(task_id, ()))
    async with StubEpisodes(tasks=catalogue) as episodes:
        server = ApiServer(episodes, listen="127.0.0.1:0", metrics=Metrics())
        await server.start()
        command = ["data", "prompts", "--envd", server.address, "--suite", "osworld", "--out", str(tmp_path), "--json"]
        results = [
            await asyncio.to_thread(CliRunner().invoke, app, [*command, *options])
            for options in ([], ["--include-unrunnable"])
        ]
        await server.stop()
    for result, count in zip(results, (4, 8), strict=True):
        assert result.exit_code == 0, result.stderr
        assert sum(split["rows"] for split in json.loads(result.stdout)["written"].values()) == count
        assert ("left out 4 tasks that the daemon's host cannot run (assets 4)" in result.stderr) == (count == 4)
