"""Each program of docs/examples runs against drawn desktops.

`grpo_trl.py` runs with TRL in tests/adapters/rl, those of `own` in test_packages.py.
"""

import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from PIL import Image

from cuaenv.client import AsyncEnvClient, Click, Done
from envd.base.config import CheckpointsConfig
from envd.episodes.checkpoints.store import CheckpointStore
from tests.support.program import run_program
from tests.support.scripted_model import ScriptedModel, say_steps, served
from tests.support.server import serve_fake
from trainer.agent.settings import AgentSettings

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
IN_OTHER_TESTS = {"grpo_trl.py"}
RUN_HERE = {
    "act.py",
    "group_and_branch.py",
    "go_back.py",
    "evaluate_model.py",
    "batch.py",
    "gymnasium_loop.py",
    "train_slime.sh",
}


@pytest.fixture
async def target(tmp_path: Path) -> AsyncIterator[str]:
    store = CheckpointStore(tmp_path / "checkpoints", settings=CheckpointsConfig(), reserve_bytes=0)
    async with serve_fake(size=4, capacity=8, checkpoints=store) as server:
        yield server.address


async def run(name: str, target: str, directory: Path, *words: str) -> str:
    """Run an example in a directory; return its output."""
    environment = {**os.environ, "ENVD_TARGET": target, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    directory.mkdir(exist_ok=True)
    command = [sys.executable] if name.endswith(".py") else ["bash"]
    done = await run_program(*command, EXAMPLES / name, *words, cwd=directory, env=environment)
    assert done.status == 0, done.err
    return done.out


def test_every_example_is_short_and_run_by_a_test() -> None:
    programs = {
        path.name: len(path.read_text().splitlines()) for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")
    }
    assert programs.keys() == RUN_HERE | IN_OTHER_TESTS
    assert max(programs.values()) <= 60


async def test_acting(target: str, tmp_path: Path) -> None:
    assert (await run("act.py", target, tmp_path)).endswith("score: 1.0\n")
    with Image.open(tmp_path / "before.png") as before, Image.open(tmp_path / "after.png") as after:
        assert before.tobytes() != after.tobytes()


async def test_groups_and_branches(target: str, tmp_path: Path) -> None:
    assert await run("group_and_branch.py", target, tmp_path) == (
        "same first frame: True\nbranch: 1\nparent: 0\nother member: 0\n"
    )


async def test_going_back_to_a_checkpoint(target: str, tmp_path: Path) -> None:
    lines = (await run("go_back.py", target, tmp_path)).splitlines()
    assert lines == [f"attempt {number}: step 2, score {int(number == 0)}" for number in range(4)]


async def test_a_batch_continues_after_an_interruption(target: str, tmp_path: Path) -> None:
    await run("batch.py", target, tmp_path)
    results = tmp_path / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert len({row["task"] for row in rows}) == len(rows) > 3
    assert {row["score"] for row in rows} == {0.0}
    results.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    await run("batch.py", target, tmp_path)
    assert sorted(json.loads(line)["task"] for line in results.read_text().splitlines()) == sorted(
        row["task"] for row in rows
    )


async def test_the_loop_of_gymnasium(target: str, tmp_path: Path) -> None:
    assert "reward: " in await run("gymnasium_loop.py", target, tmp_path)


@pytest.mark.parametrize(
    "stage", [*(pytest.param(name, marks=pytest.mark.long) for name in ("smoke-env", "smoke-text")), "full"]
)
async def test_the_dry_run_of_slime(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    monkeypatch.setenv("DRY_RUN", "1")
    assert target in await run("train_slime.sh", target, tmp_path, stage)


async def test_the_first_stage_of_slime_plays_a_drawn_desktop(target: str, tmp_path: Path) -> None:
    assert "score 0.00 after 1 turn" in await run("train_slime.sh", target, tmp_path)


@pytest.mark.parametrize(
    "model_name", [(), pytest.param(("scripted",), marks=pytest.mark.long)], ids=["served", "named"]
)
async def test_the_evaluation_of_a_model(target: str, tmp_path: Path, model_name: tuple[str, ...]) -> None:
    async with AsyncEnvClient(target) as client:
        tasks = await client.list_tasks(task_ids=["fake/enable", "fake/save-note"])
    solution = say_steps([[Click(x=822, y=167)], [Done()]], AgentSettings().make_grammar())
    model = ScriptedModel({task.instruction: solution for task in tasks})
    async with served(model) as url:
        report = json.loads(await run("evaluate_model.py", target, tmp_path, url, *model_name))
    row = report["runs"][0]["rows"][0]
    assert (row["task_count"], row["success"]["mean"]) == (2, 0.5)
    assert model.asked_count == 4


@pytest.mark.long
async def test_the_evaluation_of_the_built_in_stand_in(target: str, tmp_path: Path) -> None:
    report = json.loads(await run("evaluate_model.py", target, tmp_path))
    assert (report["runs"][0]["label"], report["runs"][0]["rows"][0]["success"]["mean"]) == ("null", 0)


@pytest.mark.long
async def test_wrong_arguments_of_the_evaluation_show_its_usage(target: str, tmp_path: Path) -> None:
    done = await run_program(sys.executable, EXAMPLES / "evaluate_model.py", "--help", cwd=tmp_path)
    assert done.status == 1
    assert "Usage: evaluate_model.py" in done.err
