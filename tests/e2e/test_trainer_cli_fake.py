"""The `trainer` command as its users run it: processes, signals and exit statuses, on drawn desktops."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from lxml import html

from cuaenv.client import AsyncEnvClient, Click, Done
from tests.support.command import run_app
from tests.support.program import run_program
from tests.support.scripted_model import ScriptedModel, say_steps, served
from tests.support.server import serve_fake
from trainer.agent.settings import AgentSettings
from trainer.cli.app import app

GRAMMAR = AgentSettings().make_grammar()
DO_NOTHING = say_steps([[Done()]], GRAMMAR)
ENABLE = say_steps([[Click(822, 167)], [Done()]], GRAMMAR)


async def run(*words: str, stdin: str = "", **variables: str) -> tuple[int, str, str]:
    """Return the exit status, standard output and standard error."""
    environment = {**os.environ, "COLUMNS": "200", **variables}
    done = await run_program(sys.executable, "-m", "trainer", *words, stdin=stdin.encode(), env=environment)
    return done.status, done.out, done.err


async def run_here(*words: str, **variables: str) -> tuple[int, str, str]:
    """Do the same in this process, which saves the start of a program."""
    done = await asyncio.to_thread(run_app, app, *words, COLUMNS="200", **variables)
    return done.status, done.out, done.err


@asynccontextmanager
async def desktops() -> AsyncIterator[tuple[str, AsyncEnvClient, dict[str, str]]]:
    """A daemon's address, a client of it, and the instructions of its tasks."""
    async with serve_fake(size=2) as server, AsyncEnvClient(server.address) as client:
        tasks = await client.list_tasks(timeout=timedelta(seconds=60))
        yield server.address, client, {task.task_id: task.instruction for task in tasks}


async def test_before_and_after_are_one_command(tmp_path: Path) -> None:
    async with desktops() as (address, _, instructions):
        lazy = ScriptedModel({instructions["fake/enable"]: DO_NOTHING, instructions["fake/save-note"]: DO_NOTHING})
        able = ScriptedModel({instructions["fake/enable"]: ENABLE, instructions["fake/save-note"]: DO_NOTHING})
        async with served(lazy) as before, served(able) as after:
            where = ["--envd", address, "--before", before, "--after", after, "--out", str(tmp_path)]
            what = ["--task", "fake/enable", "--task", "fake/save-note"]
            status, out, err = await run_here("eval", *where, *what, "--json", TRAINER_API_KEY="canary")
            again, table, _ = await run_here("eval", *where, *what)
    assert status == 0, err
    printed = json.loads(out)
    row = printed["comparison"]["rows"][0]
    assert (row["before"], row["after"], row["gained"], row["lost"]) == (0.0, 0.5, 1, 0)
    assert printed["comparison"]["warnings"] == []
    assert again == 0
    assert "+50.0" in table
    # Nothing was played a second time, and the key is in nothing that was written or said.
    assert (lazy.asked_count, able.asked_count) == (2, 3)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"canary" in one for one in [*written, out.encode(), err.encode()])
    for report in printed["reports"]:
        page = html.parse(report).getroot()
        assert all((Path(report).parent / image.get("src")).is_file() for image in page.iter("img"))


async def test_the_exit_status_says_whether_attempts_were_lost(tmp_path: Path) -> None:
    async with desktops() as (address, _, instructions):
        knows_one = ScriptedModel({instructions["fake/enable"]: ENABLE})
        knows_none = ScriptedModel({})
        async with served(knows_one) as some_url, served(knows_none) as none_url:
            some = ["eval", "--endpoint", some_url, "--envd", address, "--task", "fake/enable"]
            complete, _, _ = await run_here(*some, "--out", str(tmp_path / "complete"))
            partial, _, _ = await run_here(*some, "--task", "fake/save-note", "--out", str(tmp_path / "partial"))
            none = ["eval", "--endpoint", none_url, "--envd", address, "--task", "fake/enable"]
            lost, table, _ = await run_here(*none, "--task", "fake/save-note", "--out", str(tmp_path / "lost"))
    assert (complete, partial, lost) == (0, 3, 1)
    assert "ModelFailed 2" in table


async def test_an_interrupted_evaluation_closes_its_episodes_and_keeps_its_results(tmp_path: Path) -> None:
    async with desktops() as (address, client, instructions):
        model = ScriptedModel({instructions["fake/enable"]: ENABLE, instructions["fake/save-note"]: DO_NOTHING})
        second = asyncio.Event()

        async def stall() -> None:
            if model.asked_count > 2:
                second.set()
                await asyncio.sleep(600)

        model.before_reply = stall
        async with served(model) as url:
            file = tmp_path / "run.toml"
            file.write_text('concurrency = 1\nselect.task_ids = ["fake/enable", "fake/save-note"]\n')
            words = ["eval", str(file), "--envd", address, "--endpoint", url, "--out", str(tmp_path)]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "trainer", *words, stderr=asyncio.subprocess.PIPE
            )
            await asyncio.wait_for(second.wait(), 60)
            process.send_signal(signal.SIGINT)
            _, err = await process.communicate()
            assert process.returncode == 130
            assert err.decode().splitlines()[-1] == "interrupted; repeat the command to continue"
            assert (await client.list_pools())[0].leased_count == 0
    lines = (tmp_path / "scripted.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["run", "attempt"]


@pytest.mark.long
async def test_two_evaluations_share_a_daemon_by_their_labels(tmp_path: Path) -> None:
    runs: set[str] = set()
    async with serve_fake(size=1, capacity=1) as server, AsyncEnvClient(server.address) as client:
        instructions = {task.task_id: task.instruction for task in await client.list_tasks()}
        model = ScriptedModel({instructions["fake/enable"]: ENABLE, instructions["fake/save-note"]: DO_NOTHING})

        async def note_runs() -> None:
            runs.update(episode.spec.run for episode in server.service.list_episodes())

        model.before_reply = note_runs

        async def play(name: str, url: str) -> tuple[int, str, str]:
            file = tmp_path / f"{name}.toml"
            file.write_text(f'run = "{name}"\nconcurrency = 2\nreport = false\nendpoint = "{url}"\n')
            what = ["--task", "fake/enable", "--task", "fake/save-note", "--out", str(tmp_path / name), "--json"]
            return await run("eval", str(file), "--envd", server.address, *what)

        async with served(model) as url:
            results = await asyncio.gather(play("mine", url), play("yours", url))
    assert runs == {"mine", "yours"}
    for status, out, err in results:
        assert status == 0, err
        assert json.loads(out)["runs"][0]["rows"][0]["success"]["mean"] == 0.5


async def test_an_episode_is_played_by_hand(tmp_path: Path) -> None:
    async with desktops() as (address, client, _):
        # The picture is a little smaller than the screen: 1248x768 of 1280x800.
        typed = "help\nclick 801 160\nwave\nclick 5000 5000\ndone\n"
        status, out, err = await run(
            "play", "fake/enable", "--envd", address, "--out", str(tmp_path), "--json", stdin=typed
        )
        assert (await client.list_pools())[0].leased_count == 0
    assert status == 0, err
    played = json.loads(out)
    assert (played["score"], played["turn_count"], played["parsed_count"]) == (1.0, 3, 3)
    assert "'wave' is not a command" in err
    assert "outside the picture" in err
    assert "click 822,167" in html.parse(played["page"]).getroot().text_content()


@pytest.mark.long
async def test_the_null_player_scores_0_and_a_person_who_leaves_has_no_score(tmp_path: Path) -> None:
    async with desktops() as (address, client, _):
        file = tmp_path / "run.toml"
        file.write_text("report = false\n")
        where = [str(file), "--envd", address, "--out", str(tmp_path)]
        null = await run("play", "fake/enable", "--by", "null", *where)
        left = await run("play", "fake/enable", *where, stdin="click 3 3\n")
        assert (await client.list_pools())[0].leased_count == 0
    assert null[0] == 0
    assert null[1].startswith("score 0.00 after 1 turn (done)\n  0.00 file_text /home/user/checkbox.txt: ")
    assert left[:2] == (0, "stopped: aborted\n")


@pytest.mark.long
async def test_an_oracle_is_played_in_the_models_grammar(tmp_path: Path) -> None:
    oracles = tmp_path / "oracles.jsonl"
    oracles.write_text(
        json.dumps({"task_id": "fake/enable", "steps": [[{"click": {"x": 822, "y": 167}}], [{"done": ""}]]}) + "\n"
    )
    async with desktops() as (address, _, _instructions):
        where = ["--envd", address, "--out", str(tmp_path)]
        status, out, err = await run("play", "fake/enable", "--by", "oracle", "--oracles", str(oracles), *where)
        missing, _, why = await run("play", "fake/save-note", "--by", "oracle", "--oracles", str(oracles), *where)
    assert (status, out.splitlines()[0]) == (0, "score 1.00 after 2 turns (done)"), err
    assert "left_click" in err
    assert (missing, "has none for fake/save-note" in why) == (2, True)
    assert (await run("play", "fake/enable", "--by", "oracle"))[0] == 2


@pytest.mark.long
async def test_a_model_can_be_watched(tmp_path: Path) -> None:
    async with (
        desktops() as (address, _, instructions),
        served(ScriptedModel({instructions["fake/enable"]: ENABLE})) as url,
    ):
        status, out, err = await run(
            "play", "fake/enable", "--by", "model", "--endpoint", url, "--envd", address, "--out", str(tmp_path)
        )
    assert (status, out.splitlines()[0]) == (0, "score 1.00 after 2 turns (done)")
    assert '"terminate"' in err


async def test_a_task_that_is_not_served_is_reported_in_one_line() -> None:
    async with desktops() as (address, _, _):
        status, out, err = await run_here("play", "fake/enabl", "--by", "null", ENVD_TARGET=address)
    assert (status, out) == (1, "")
    assert err == "error: the daemon does not serve fake/enabl; did you mean fake/enable?\n"
