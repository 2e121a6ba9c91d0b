"""The built-in suites under attack: every mutant that is not equivalent is killed, and nothing changed since."""

import json
import random
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from envd.authoring.attack.mutants import playable
from envd.authoring.attack.report import read_passed, read_verdicts
from envd.base.config import Config
from envd.cli.tasks_verify import not_attacked
from envd.daemon.suites import load_tasks, with_suites
from envd.drawn.suite import DRAWN
from envd.tasks.basis import judged_digest
from envd.tasks.model import Task
from tests.support.program import run_program


def real_tasks(*suites: str) -> tuple[Task, ...]:
    return load_tasks(with_suites(Config(), suites)).list()


async def attack(directory: Path, *arguments: str) -> tuple[int, list[str]]:
    # In a process of its own: libvirt's embedded driver has one root in a process.
    command = ["tasks", "attack", "--out", str(directory), "--state-dir", str(directory / "state"), "--json"]
    done = await run_program(sys.executable, "-m", "envd", *command, *arguments)
    assert done.status in {0, 1}, done.out + done.err
    report = json.loads(done.out)
    assert "open" in report, report
    return done.status, [f"{each['task_id']}: {each['mutant']}" for each in report["open"]]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("suite", ["drawn", "long", "escape"])
async def test_no_mutant_of_a_drawn_suite_survives(tmp_path: Path, suite: str) -> None:
    assert await attack(tmp_path, f"{suite}/", "--hypervisor", "fake", "--jobs", "8") == (0, [])


@pytest.mark.long
@pytest.mark.vm
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("suite", ["desktop", "tools"])
async def test_no_mutant_of_some_tasks_on_real_machines_survives(short_dir: Path, suite: str) -> None:
    # All mutants of both suites take hours. Their digests say that tasks and checkers are as when they were played.
    ids = [task.task_id for task in real_tasks(f"{suite}/") if task.task_id.startswith(f"{suite}/")]
    assert await attack(short_dir, *random.sample(ids, 3), "--jobs", "3") == (0, [])


def test_no_drawn_task_changed_since_its_attack() -> None:
    tasks = [task for task_id in DRAWN.by_id if (task := DRAWN.variant(task_id))]
    passed = {task_id.partition("/")[0] for task_id in read_passed(files("envd.authoring.attack") / "passed.yaml")}
    assert {task.task_id.partition("/")[0] for task in tasks} <= passed
    assert not_attacked(tasks, runs_guests=False) == ()


def test_no_task_on_real_machines_changed_since_its_attack() -> None:
    tasks = real_tasks("tools/")
    assert {"desktop", "tools"} <= {task.task_id.partition("/")[0] for task in tasks}
    assert not_attacked(tasks, runs_guests=True) == ()


def test_each_verdict_is_about_a_mutant_of_a_task_as_it_is() -> None:
    suites = ("desktop", "tools", "windows")
    digests = {
        mutant.digest(judged_digest(task))
        for task in real_tasks("tools/", "windows")
        if task.oracle and task.checker
        for mutant in playable(task, runs_guests=True)
    }
    verdicts = read_verdicts(files("envd.authoring.attack") / "verdicts.yaml")
    ours = {digest for digest, verdict in verdicts.items() if verdict.task.partition("/")[0] in suites}
    assert len(ours) > 100
    assert ours <= digests
