"""The built-in suites under attack: every mutant that is not equivalent is killed, and nothing changed since."""

import json
from importlib.resources import files
from pathlib import Path

import pytest

from envd.base.config import Config
from envd.bench.attack.report import read_passed
from envd.cli.tasks_verify import not_attacked
from envd.daemon.suites import load_tasks, with_suites
from envd.tasks.suites.drawn import DRAWN
from tests.support.command import run_envd


def attack(suite: str, tmp_path: Path, *arguments: str) -> tuple[int, list[str]]:
    command = ["tasks", "attack", f"{suite}/", "--out", str(tmp_path), "--state-dir", str(tmp_path / "state"), "--json"]
    done = run_envd(*command, *arguments)
    assert done.out, done.err
    return done.status, [f"{each['task_id']}: {each['mutant']}" for each in json.loads(done.out)["open"]]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("suite", ["drawn", "long", "escape"])
def test_no_mutant_of_a_drawn_suite_survives(tmp_path: Path, suite: str) -> None:
    assert attack(suite, tmp_path, "--hypervisor", "fake", "--jobs", "8") == (0, [])


@pytest.mark.long
@pytest.mark.vm
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("suite", ["desktop", "tools"])
def test_no_mutant_of_a_suite_on_real_machines_survives(tmp_path: Path, suite: str) -> None:
    assert attack(suite, tmp_path, "--jobs", "3") == (0, [])


def test_no_drawn_task_changed_since_its_attack() -> None:
    tasks = [task for task_id in DRAWN.by_id if (task := DRAWN.variant(task_id))]
    passed = {task_id.partition("/")[0] for task_id in read_passed(files("envd.bench.attack") / "passed.yaml")}
    assert {task.task_id.partition("/")[0] for task in tasks} <= passed
    assert not_attacked(tasks, runs_guests=False) == ()


def test_no_task_on_real_machines_changed_since_its_attack() -> None:
    tasks = load_tasks(with_suites(Config(), ["tools/"])).list()
    assert {"desktop", "tools"} <= {task.task_id.partition("/")[0] for task in tasks}
    assert not_attacked(tasks, runs_guests=True) == ()
