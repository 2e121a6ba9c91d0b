"""`envd suite lock` records what scores depend on, and `envd suite check` names what changed."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_cli_tasks import SOLVABLE
from tests.support.command import run_envd

EASIER = ("equals: it", "contains: i")


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.yaml"
    path.write_text(SOLVABLE, encoding="utf-8")
    return path


def suite(tasks: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    lock = [
        "--file",
        str(tasks.parent / "mine.lock"),
        "--tasks",
        str(tasks),
        "--cache-dir",
        str(tasks.parent / "cache"),
    ]
    done = run_envd("suite", *arguments, *lock, "--hypervisor", "fake", "--json")
    return done.status, json.loads(done.out) if done.out else {}, done.err


def test_an_unchanged_suite_passes(tasks: Path) -> None:
    status, locked, _ = suite(tasks, "lock", "mine")
    assert (status, locked["tasks"], len(locked["digest"])) == (0, 2, 64)
    assert suite(tasks, "check", "mine")[:2] == (0, {"file": locked["file"], "suite": "mine", "changes": []})


def test_each_change_is_named(tasks: Path) -> None:
    suite(tasks, "lock", "mine")
    renamed = SOLVABLE.replace(*EASIER).replace("name: box", "name: tick")
    tasks.write_text(renamed, encoding="utf-8")
    lock = tasks.parent / "mine.lock"
    content = json.loads(lock.read_text(encoding="utf-8"))
    lock.write_text(json.dumps(content | {"packages": {"gedit": "43.2"}, "screen": "800x600"}), encoding="utf-8")
    status, found, _ = suite(tasks, "check", "mine")
    assert status == 1
    assert [change.split(" -> ")[0].rsplit(" ", 1)[0] for change in found["changes"]] == [
        *("tasks mine/box:", "tasks mine/note:", "tasks mine/tick:", "packages gedit:", "screen:")
    ]
    assert "packages gedit: 43.2 -> absent" in found["changes"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "No such file or directory; `envd suite lock` writes it"),
        ("{", "is damaged"),
        ("[]", "is not of this version"),
        ('{"format": 99}', "is not of this version"),
    ],
)
def test_a_lock_that_cannot_be_read_is_refused(tasks: Path, text: str | None, expected: str) -> None:
    if text is not None:
        (tasks.parent / "mine.lock").write_text(text, encoding="utf-8")
    status, _, err = suite(tasks, "check", "mine")
    assert status == 2
    assert expected in err


def test_an_unknown_suite_is_refused(tasks: Path) -> None:
    status, _, err = suite(tasks, "lock", "mien")
    assert (status, "mien" in err) == (1, True)
    assert not (tasks.parent / "mine.lock").exists()
