"""Tasks of OpenComputer: loading, what reaches the guest and when, and the score."""

import io
import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from cuaenv.results import CommandResult
from envd.base.errors import ConfigError, GuestError
from envd.cli.tasks import images_that_run, unmet_needs
from envd.daemon.judging.workers import JudgeWorkers
from envd.images.catalogue import Image
from envd.integrations.open_computer.reader import read_repository
from envd.integrations.open_computer.verifiers import OpenComputerCheck, VerifierCheck, judge_checks, parts
from envd.tasks.archives import archive
from envd.tasks.catalogue import TaskCatalogue, TaskFile
from envd.tasks.formats.entries import Problem
from envd.tasks.formats.files import read_tasks
from envd.tasks.model import Task
from tests.opencomputer import mutants
from tests.support.open_computer import CHECKS, make_repository


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_repository(tmp_path)


def change(root: Path, **fields: object) -> None:
    file = root / "task_generator/tasks/notes_total/task.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def only(root: Path) -> Task:
    (found,) = read_repository(root)
    assert isinstance(found, Task), found
    return found


def printed(outputs: Mapping[str, Any], exit_code: int = 0) -> CommandResult:
    return CommandResult(exit_code=exit_code, stdout=json.dumps(outputs).encode(), stderr=b"")


def output(printed: str, exit_code: int | None = 0, stderr: str = "") -> dict[str, Any]:
    return {"exit_code": exit_code, "stdout": printed, "stderr": stderr}


def test_a_checkout_is_a_suite_of_its_tasks_as_they_are(root: Path) -> None:
    catalogue = TaskCatalogue.load([TaskFile(root, read=read_repository)], include_builtin=False)
    (task,) = catalogue.list()
    assert (task.task_id, task.domain, task.level, task.needs) == ("opencomputer/notes_total", "notes", 2, ("notes",))
    assert task.instruction == "Write the total of /home/user/Documents/report.csv into total.txt."
    assert task.freeze_setup
    assert isinstance(task.checker, OpenComputerCheck)
    assert [check.command for check in task.checker.checks] == ["check-file-exists total.txt", "total", "total"]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"id": "other"}, "is not a task"),
        ({"task": " "}, "at least 1 character"),
        ({"app": "../notes"}, "has no verifier"),
        ({"app": "paint"}, "'paint' has no verifier verifiers/paint/paint.py"),
        ({"verification": [{"key": "a"}]}, "a check has a command"),
        ({"verification": [{"command": "a 'b", "key": "a"}]}, "a check has a command"),
        ({"verification": [{"command": "a"}]}, "give key or eval"),
        ({"verification": [{"command": "a", "eval": "result["}]}, "not a Python expression"),
        ({"verification": []}, "at least 1 item"),
        ({"env": {"files": [{"filename": "../../x", "sandbox_path": "/home/user/x"}]}}, "leads outside"),
        ({"env": {"files": [{"filename": "/etc/passwd", "sandbox_path": "/home/user/x"}]}}, "leads outside"),
        ({"env": {"files": [{"filename": "x", "sandbox_path": "/etc/passwd"}]}}, "leads outside"),
        ({"env": {"files": [{"filename": "x", "sandbox_path": "/home/user/../etc/passwd"}]}}, "without '..'"),
        ({"env": {"files": [{"filename": "x"}]}}, "is not a file with filename and sandbox_path"),
    ],
)
def test_a_wrong_task_is_a_problem_that_names_its_cause(root: Path, fields: dict[str, object], problem: str) -> None:
    change(root, **fields)
    found = next(iter(read_repository(root)))
    assert isinstance(found, Problem)
    assert problem in found.message
    assert found.where.endswith("notes_total/task.json")


def test_a_link_or_a_part_of_a_checkout_is_a_problem(root: Path, tmp_path: Path) -> None:
    (root / "task_generator/tasks/notes_total/env/link").symlink_to("/etc/passwd")
    (found,) = read_repository(root)
    assert isinstance(found, Problem)
    assert "env/link is a link" in found.message
    (root / "computer_env/backends/base.py").unlink()
    with pytest.raises(ConfigError, match=r"lacks computer_env/backends/base.py; name a whole checkout"):
        TaskCatalogue.load([TaskFile(root, read=read_repository)], include_builtin=False)
    with pytest.raises(ConfigError, match=r"lacks evaluation/apps, .*; name a whole checkout"):
        TaskCatalogue.load([TaskFile(tmp_path / "docs", read=read_repository)], include_builtin=False)


def test_other_task_files_cannot_name_directories_of_the_host(tmp_path: Path) -> None:
    for part in ("setup", "checker"):
        value = {"kind": "opencomputer", "root": "/", "task": "x"}
        full = {**value, "app": "x", "checks": [{"command": "a", "key": "b"}]}
        task = {"name": "a", "level": 1, "instruction": "x", "checker": {"kind": "file_absent", "path": "/home/user/x"}}
        task |= {"setup": [value]} if part == "setup" else {"checker": full}
        file = tmp_path / f"{part}.json"
        file.write_text(json.dumps({"suite": "s", "tasks": [task]}))
        (found,) = read_tasks(file)
        assert isinstance(found, Problem)
        assert "opencomputer is for a loader alone" in found.message


def spoil_inputs(root: Path) -> None:
    (root / "task_generator/tasks/notes_total/env/report.csv").unlink()


@pytest.mark.parametrize(
    ("spoil", "needs"),
    [
        (spoil_inputs, ("notes", "input-files")),
        (
            lambda root: change(root, verification=[{"command": "a", "judge": "llm", "prompt": "ok?"}]),
            ("notes", "llm-judge"),
        ),
        (lambda root: change(root, app="chrome", task="Open example.org"), ("chrome", "internet")),
        (lambda root: change(root, app="chrome", task="Open http://localhost/a.org"), ("chrome",)),
        (lambda root: change(root, task="Link the word to https://example.org"), ("notes",)),
    ],
)
def test_lint_says_what_a_task_lacks(root: Path, spoil: Callable[[Path], None], needs: tuple[str, ...]) -> None:
    spoil(root)
    task = only(root)
    assert task.needs == needs
    image = Image(name="office", digest="0" * 64, disk="d", disk_sha256="0", provides=("notes", "chrome"))
    problems = [each.message for each in unmet_needs([task], [image])]
    lacking = [need for need in needs if need not in image.provides]
    assert [message.partition(",")[0] for message in problems] == [f"cannot run: it needs {each}" for each in lacking]
    assert images_that_run([task], [image]) == ({} if lacking else {"office": [task]})


def test_lint_names_the_image_to_build(root: Path) -> None:
    change(root, app="chrome")
    (problem,) = unmet_needs([only(root)], [])
    assert "build it with `envd image build office`" in problem.message


def test_the_verifiers_reach_the_guest_only_to_check(root: Path) -> None:
    def names(*, with_verifier: bool) -> set[str]:
        content = archive(root, parts("notes_total", "notes", with_verifier=with_verifier), extra={"driver.py": b"#"})
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            assert all(each.uid == 0 for each in tar.getmembers())
            return {each.name for each in tar.getmembers() if each.isfile()}

    setup, check = names(with_verifier=False), names(with_verifier=True)
    assert {"driver.py", "computer_env/backends/base.py", "evaluation/apps/registry.py"} < setup & check
    assert setup - check == {"task_generator/tasks/notes_total/env/report.csv"}
    assert check - setup == {"verifiers/notes/notes.py"}
    assert not OpenComputerCheck.runs_before_start


RIGHT = {"check-file-exists total.txt": output('{"exists": true}'), "total": output('{"total": 7}')}


def test_the_score_is_the_share_of_checks_that_pass_and_each_is_reported(root: Path) -> None:
    checks = tuple(map(VerifierCheck.model_validate, CHECKS))
    assert judge_checks(printed(RIGHT), checks).score == 1.0
    outcome = judge_checks(printed({**RIGHT, "total": output('{"total": 6}')}), checks)
    assert outcome.score == pytest.approx(1 / 3)
    assert [(part.name, part.score) for part in outcome.parts] == [("total.txt exists", 1), ("total", 0), ("total", 0)]
    assert '{"total": 6}' in outcome.parts[1].evidence


def test_an_error_that_a_verifier_prints_fails_its_checks(root: Path) -> None:
    checks = tuple(map(VerifierCheck.model_validate, CHECKS))
    missing = output('{"error": "no file"}', exit_code=1)
    outcome = judge_checks(printed({**RIGHT, "total": missing}), checks)
    assert outcome.score == pytest.approx(1 / 3)
    assert "KeyError('total')" in outcome.parts[2].evidence


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (
            output("Traceback", exit_code=1, stderr="ImportError: no module"),
            "printed no JSON, exit code 1: 'ImportError",
        ),
        (output(""), "printed no JSON"),
        (output("", exit_code=None), "did not end in time"),
        (output("[1]"), "printed no object"),
    ],
)
def test_a_verifier_that_crashes_or_hangs_is_an_error_and_no_score(broken: dict[str, Any], problem: str) -> None:
    check = VerifierCheck(command="total", key="total", expected=7)
    with pytest.raises(GuestError, match=problem):
        judge_checks(printed({"total": broken}), [check])


def test_checks_that_did_not_run_are_an_error(root: Path) -> None:
    check = VerifierCheck(command="total", key="total", expected=7)
    with pytest.raises(GuestError, match="exit code 90"):
        judge_checks(printed({}, exit_code=90), [check])
    with pytest.raises(GuestError, match="malformed output"):
        judge_checks(printed({}), [check])
    with pytest.raises(GuestError, match="nonsense"):
        judge_checks(printed(RIGHT), [VerifierCheck(command="total", eval="nonsense > 1")])


async def test_expressions_are_evaluated_in_the_sandbox_and_each_check_arrives(root: Path) -> None:
    workers = JudgeWorkers(limit=1)
    checks = (
        *map(VerifierCheck.model_validate, CHECKS),
        VerifierCheck(command="total", eval="__import__('os').fork() is None"),
    )
    try:
        outcome = await workers(judge_checks, printed(RIGHT), checks)
    finally:
        await workers.aclose()
    assert [part.score for part in outcome.parts] == [1, 1, 1, 0]
    assert outcome.score == 0.75
    assert outcome.evidence == "3 of 4 checks passed"


def test_the_program_that_prints_wrong_solutions_explains_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["mutants", "--help"])
    with pytest.raises(SystemExit) as ended:
        mutants.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: mutants [-h]")
    monkeypatch.setattr("sys.argv", ["mutants"])
    mutants.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) > 30
    assert all(line["task_id"].startswith("opencomputer/") and line["steps"][-1] == ["done"] for line in lines)
