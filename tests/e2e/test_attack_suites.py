"""The built-in suites under attack: every mutant that is not equivalent is killed, and nothing changed since."""

import json
from pathlib import Path

import pytest

from envd.cli.tasks_verify import not_attacked
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.suites.drawn import DRAWN
from tests.support.command import run_envd


def attack(suite: str, tmp_path: Path, *arguments: str) -> tuple[int, list[str]]:
    command = ["tasks", "attack", f"{suite}/", "--out", str(tmp_path), "--state-dir", str(tmp_path / "state"), "--json"]
    done = run_envd(*command, *arguments)
    assert done.out, done.err
    return done.status, [f"{each['task_id']}: {each['mutant']}" for each in json.loads(done.out)["open"]]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_mutant_of_the_drawn_suite_survives(tmp_path: Path) -> None:
    assert attack("drawn", tmp_path, "--hypervisor", "fake", "--jobs", "8") == (0, [])


@pytest.mark.long
@pytest.mark.vm
@pytest.mark.timeout(6 * 3600)
def test_no_mutant_of_the_desktop_suite_survives(tmp_path: Path) -> None:
    assert attack("desktop", tmp_path, "--jobs", "3") == (0, [])


def test_no_drawn_task_changed_since_its_attack() -> None:
    tasks = [DRAWN.variant(task_id) for task_id in DRAWN.by_id]
    assert not_attacked([task for task in tasks if task], runs_guests=False) == ()


def test_no_desktop_task_changed_since_its_attack() -> None:
    assert not_attacked(TaskCatalogue.load().list(), runs_guests=True) == ()
