"""The environment in deploy/upstream/verifiers, played by verifiers' own runner on the daemon that it starts."""

import asyncio
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf

from tests.adapters.verifiers.test_verifiers import GIVE_UP, StreamingModel
from tests.support.scripted_model import say_steps, served
from trainer.agent.settings import AgentSettings
from trainer.data.oracles import read_oracles

# Warnings of the framework are not ours.
pytestmark = pytest.mark.filterwarnings("default")
PATCH = Path(__file__).parents[3] / "deploy" / "upstream" / "verifiers" / "drawn-desktop.patch"
TASK = "drawn/press?seed=0"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package's module, as the patch writes it."""
    command = ["git", "apply", "--include=environments/*", str(PATCH)]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.syspath_prepend(str(tmp_path / "environments" / "drawn_desktop"))
    return importlib.import_module("drawn_desktop.taskset")


def oracle_replies(tmp_path: Path) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "envd",
        "tasks",
        "oracles",
        "--hypervisor",
        "fake",
        "--suite",
        "drawn",
        "--seeds",
        "0:1",
    ]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    [line] = [line for line in printed.splitlines() if json.loads(line)["task_id"] == TASK]
    (tmp_path / "oracle.jsonl").write_text(line + "\n")
    [oracle] = read_oracles(tmp_path / "oracle.jsonl")
    return say_steps([list(step) for step in oracle.steps], AgentSettings().make_grammar(), screen_px=(1280, 800))


@pytest.mark.parametrize(("is_solved", "reward"), [(True, 1.0), (False, 0.0)])
async def test_it_starts_a_daemon_and_scores_what_is_on_the_desktop(
    package: Any, tmp_path: Path, is_solved: bool, reward: float
) -> None:
    replies = oracle_replies(tmp_path) if is_solved else GIVE_UP
    model = StreamingModel({"": replies})
    async with served(model) as url:
        taskset = package.DrawnDesktopConfig(id="drawn_desktop", tasks=[TASK])
        env = package.DrawnDesktopEnv(package.DesktopEnvConfig(taskset=taskset, group_size=2))
        client = vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY")
        context = vf.ModelContext(model="scripted", client=client, sampling=vf.SamplingConfig())
        async with env.serving():
            (task,) = list(env.taskset)
            episodes = await asyncio.gather(*(env.run_slot(slot, context) for slot in env.slots(task, 2)))
            daemon = env._daemon
    assert [episode.errors for episode in episodes] == [[], []]
    played = [(episode.traces[0].reward, episode.traces[0].metrics["turns"]) for episode in episodes]
    assert played == [(reward, len(replies))] * 2
    assert daemon.returncode is not None


def test_its_tasks_are_variants_that_need_no_daemon_to_be_listed(package: Any) -> None:
    tasks = list(package.DrawnDesktopTaskset(package.DrawnDesktopConfig(id="drawn_desktop", variants=2)))
    assert len(tasks) == 2 * len(package.TASKS)
    assert tasks[0].data.task_id == TASK
