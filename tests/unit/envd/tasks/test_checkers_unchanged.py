"""What must be unchanged: the real scripts on real files, and how a task records its start."""

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cuaenv.results import CommandResult
from envd.base.errors import EvaluatorFailed, SetupFailed
from envd.tasks.checkers import unchanged
from envd.tasks.evaluate import evaluate, remember_start
from envd.tasks.model import Task
from envd.tasks.setup import run_setup
from tests.support.memory_desktop import MemoryDesktop


class LocalDesktop(MemoryDesktop):
    """Runs commands on this host."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        as_root: bool = False,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """See `Desktop`."""
        self.ran.append(tuple(argv))
        pipe = asyncio.subprocess.PIPE
        done = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, stderr=pipe, env=env)
        stdout, stderr = await asyncio.wait_for(done.communicate(stdin), timeout_s)
        return CommandResult(exit_code=done.returncode or 0, stdout=stdout, stderr=stderr)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a home directory with two files, a directory and a link."""
    monkeypatch.setattr(unchanged, "_DIRECTORY", str(tmp_path / "records"))
    home = tmp_path / "home"
    (home / "Documents").mkdir(parents=True)
    (home / "Documents" / "diary.txt").write_text("Monday")
    (home / "Documents" / "with\\back\nline.txt").write_text("odd")
    (home / ".cache").mkdir()
    (home / "link").symlink_to("Documents/diary.txt")
    return home


def task(home: Path, **fields: Any) -> Task:
    checker = {"kind": "unchanged", "paths": [str(home)], "except": [f"{home}/.cache"], **fields}
    return Task.model_validate({"task_id": "s/t", "instruction": "i", "level": 1, "checker": checker})


async def score(one: Task, desktop: LocalDesktop) -> tuple[float, str]:
    evaluation = await evaluate(one, desktop, last_action=None, timeout_s=60.0)
    return evaluation.score, evaluation.checks[0].evidence


def replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "content": (lambda home: (home / "Documents" / "diary.txt").write_text("Sunday"), "Documents/diary.txt"),
    "size": (lambda home: (home / "Documents" / "diary.txt").write_text(""), "Documents/diary.txt"),
    "mode": (lambda home: (home / "Documents" / "diary.txt").chmod(0o600), "Documents/diary.txt"),
    "file gone": (lambda home: (home / "Documents" / "diary.txt").unlink(), "Documents/diary.txt"),
    "directory gone": (lambda home: shutil.rmtree(home / "Documents"), "Documents"),
    "link": (lambda home: replace_by_link(home / "link"), "link"),
    "link for a file": (lambda home: replace_by_link(home / "Documents" / "diary.txt"), "Documents/diary.txt"),
    "all gone": (shutil.rmtree, "home"),
}


@pytest.mark.parametrize("new_files", ["refuse", "ignore"])
@pytest.mark.parametrize("name", CHANGES)
async def test_each_change_is_found_and_named(home: Path, name: str, new_files: str) -> None:
    change, where = CHANGES[name]
    one, desktop = task(home, new_files=new_files), LocalDesktop()
    await remember_start(one, desktop)
    assert await score(one, desktop) == (1.0, "nothing else changed")
    change(home)
    found, evidence = await score(one, desktop)
    assert found == 0.0
    assert where in evidence


@pytest.mark.parametrize(("new_files", "expected"), [("refuse", 0.0), ("ignore", 1.0)])
async def test_new_files_count_unless_ignored(home: Path, new_files: str, expected: float) -> None:
    one, desktop = task(home, new_files=new_files), LocalDesktop()
    await remember_start(one, desktop)
    (home / "Documents" / "new.txt").write_text("x")
    # It would take hours to read, and is not read.
    with (home / "Documents" / "huge").open("wb") as file:
        os.truncate(file.fileno(), 1 << 43)
    assert (await score(one, desktop))[0] == expected


async def test_exceptions_may_change(home: Path) -> None:
    one, desktop = task(home), LocalDesktop()
    await remember_start(one, desktop)
    (home / ".cache" / "thumbnail").write_text("x")
    assert (await score(one, desktop))[0] == 1.0
    starred = task(home, **{"except": [f"{home}/Doc*"]})
    await remember_start(starred, desktop)
    (home / "Documents" / "diary.txt").unlink()
    assert (await score(starred, desktop))[0] == 1.0


async def test_a_path_that_was_absent_stays_absent(home: Path) -> None:
    one, desktop = task(home, paths=[f"{home}/not-there"]), LocalDesktop()
    await remember_start(one, desktop)
    assert (await score(one, desktop))[0] == 1.0
    (home / "not-there").mkdir()
    assert (await score(one, desktop))[0] == 0.0


async def test_outputs_of_commands_are_compared(home: Path) -> None:
    setting = home / "setting"
    setting.write_text("dark")
    one, desktop = task(home, paths=[], outputs=[["cat", str(setting)], ["true"]]), LocalDesktop()
    await remember_start(one, desktop)
    assert (await score(one, desktop))[0] == 1.0
    setting.write_text("light")
    found, evidence = await score(one, desktop)
    assert found == 0.0
    assert str(setting) in evidence
    assert "true" not in evidence


async def test_a_start_must_have_been_recorded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EvaluatorFailed, match="its start was not recorded"):
        await score(task(home), LocalDesktop())
    monkeypatch.setattr(unchanged, "_DIRECTORY", "/dev/null/records")
    with pytest.raises(SetupFailed, match="the start cannot be recorded"):
        await remember_start(task(home), LocalDesktop())


async def test_a_task_without_setup_verbs_has_its_start_recorded(home: Path) -> None:
    one, desktop = task(home), LocalDesktop()
    assert one.has_start
    await run_setup(one, desktop, timeout_s=60.0)
    assert (await score(one, desktop))[0] == 1.0


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(ValidationError, match="give paths, outputs or both"):
        task(Path("/home/user"), paths=[])
