"""Bundles of CUA-Gym: loading, archives for the guest, and the score that their `check.sh` prints."""

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cuaenv.results import CommandResult
from envd.base.errors import GuestError
from envd.integrations.cua_gym.bundle import CHECK_PARTS, SETUP_COMMANDS, CuaGymCheck, CuaGymSetup, judge_check
from envd.integrations.cua_gym.reader import read_bundles
from envd.tasks.archives import MAX_ARCHIVE_BYTES, archive
from envd.tasks.catalogue import TaskCatalogue, TaskFile
from envd.tasks.formats.entries import Problem
from envd.tasks.formats.files import read_tasks
from envd.tasks.model import Task

SCORE = b'{"overall_score": 0.5, "subscores": {"total": 0.5}, "errors": []}\n'


def make_bundle(directory: Path, name: str = "Report_001") -> Path:
    bundle = directory / name
    for folder in ("exec/context", "hidden/seed", "gt"):
        (bundle / folder).mkdir(parents=True)
    for path, text in {
        "meta.json": '{"driver": "uda-gym"}',
        "instruction.md": "Write the total of the report.\n",
        "exec/context/report.csv": "a,3\nb,4\n",
        "hidden/seed/state.json": "{}",
        "setup.sh": "set -euo pipefail\n",
        "gt/total.txt": "7",
        "check.sh": "echo '{\"overall_score\": 1}'\n",
    }.items():
        (bundle / path).write_text(text, encoding="utf-8")
    return bundle


def problems_of(directory: Path) -> list[str]:
    return [each.message for each in read_bundles(directory) if isinstance(each, Problem)]


def test_a_directory_of_bundles_is_a_suite(tmp_path: Path) -> None:
    make_bundle(tmp_path)
    make_bundle(tmp_path, "second")
    (tmp_path / "notes").mkdir()
    tasks = TaskCatalogue.load([TaskFile(tmp_path, read=read_bundles)], include_builtin=False)
    assert [task.task_id for task in tasks.list()] == ["cua-gym/report_001", "cua-gym/second"]
    task = tasks.get("cua-gym/report_001")
    bundle = str(tmp_path / "Report_001")
    assert task.instruction == "Write the total of the report."
    assert task.setup == (CuaGymSetup(kind="cua_gym", bundle=bundle),)
    assert task.checker == CuaGymCheck(kind="cua_gym", bundle=bundle)
    assert task.needs == ()
    one = list(read_bundles(tmp_path / "second"))
    assert [each.task_id for each in one if isinstance(each, Task)] == ["cua-gym/second"]


def test_the_agents_files_the_hidden_ones_and_the_truth_travel_apart(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)

    def names(parts: object) -> set[str]:
        with tarfile.open(fileobj=io.BytesIO(archive(bundle, parts))) as tar:  # type: ignore[arg-type]
            assert all(each.uid == 0 for each in tar.getmembers())
            return {each.name for each in tar.getmembers() if each.isfile()}

    visible, hidden = (names(parts) for _, parts in SETUP_COMMANDS)
    assert visible == {"context/report.csv"}
    assert hidden == {"hidden/seed/state.json", "setup.sh"}
    assert names(CHECK_PARTS) == {"gt/total.txt", "check.sh"}


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda bundle: (bundle / "check.sh").unlink(), "the bundle lacks check.sh"),
        (lambda bundle: (bundle / "meta.json").write_text("{"), "meta.json is not JSON"),
        (lambda bundle: (bundle / "meta.json").write_text('{"driver": "other"}'), "the driver uda-gym"),
        (lambda bundle: (bundle / "instruction.md").write_text(" "), "at least 1 character"),
        (lambda bundle: (bundle / "instruction.md").write_bytes(b"\xff"), "instruction.md cannot be read"),
        (lambda bundle: (bundle / "gt" / "link").symlink_to("/etc/passwd"), "gt/link is a link"),
        (lambda bundle: os.mkfifo(bundle / "exec" / "pipe"), "exec/pipe is a link or no ordinary file"),
        (lambda bundle: os.truncate(bundle / "gt" / "total.txt", MAX_ARCHIVE_BYTES + 1), "more than 16 MiB"),
    ],
)
def test_a_wrong_bundle_is_a_problem_by_cause(tmp_path: Path, spoil: Callable[[Path], object], problem: str) -> None:
    spoil(make_bundle(tmp_path))
    (found,) = problems_of(tmp_path)
    assert problem in found


def test_a_directory_without_bundles_is_a_problem(tmp_path: Path) -> None:
    assert "has no bundle" in problems_of(tmp_path)[0]
    assert "no such directory" in problems_of(tmp_path / "missing")[0]


@pytest.mark.parametrize(
    ("file", "text", "needs"),
    [
        ("setup.sh", "echo $CUA_GYM_ADMIN_TOKEN", ("cua-gym-hub",)),
        ("setup.sh", "xdg-open https://cua-gym-wandb.xlang.ai/", ("cua-gym-hub",)),
        ("setup.sh", "pip install openpyxl", ("internet",)),
        ("setup.sh", "curl -s https://example.org/data", ("internet",)),
        ("setup.sh", "curl -s http://127.0.0.1:8000/state", ()),
        ("harness_env.tsv", "MAIL_API_KEY\n", ("mail_api_key",)),
    ],
)
def test_a_bundle_needs_what_its_files_use(tmp_path: Path, file: str, text: str, needs: tuple[str, ...]) -> None:
    (make_bundle(tmp_path) / file).write_text(text, encoding="utf-8")
    (task,) = read_bundles(tmp_path)
    assert isinstance(task, Task)
    assert task.needs == needs


def test_only_the_loader_of_bundles_may_name_a_directory_of_the_host(tmp_path: Path) -> None:
    file = tmp_path / "suite.yaml"
    file.write_text(
        "suite: mine\ntasks:\n  - {name: a, level: 1, instruction: x, checker: {kind: cua_gym, bundle: /root}}\n",
        encoding="utf-8",
    )
    (problem,) = read_tasks(file)
    assert isinstance(problem, Problem)
    assert "load its tasks by `--tasks cua-gym:DIR`" in problem.message


def test_the_last_object_is_the_score() -> None:
    outcome = judge_check(CommandResult(exit_code=0, stdout=b'{"overall_score": 1}\nchecked\n' + SCORE, stderr=b""))
    assert outcome.score == 0.5
    assert "subscores" in outcome.evidence


@pytest.mark.parametrize(
    ("exit_code", "stdout", "message"),
    [
        (3, SCORE, "check.sh failed with exit code 3"),
        (0, b"", "printed no JSON object"),
        (0, b"{broken\n", "printed no JSON object"),
        (0, b'{"score": 1}\n', "no overall_score of 0 to 1"),
        (0, b'{"overall_score": 1.5}\n', "no overall_score of 0 to 1"),
        (0, b'{"overall_score": true}\n', "no overall_score of 0 to 1"),
        (0, b'{"overall_score": NaN}\n', "no overall_score of 0 to 1"),
    ],
)
def test_a_check_that_fails_or_prints_no_score_is_an_error(exit_code: int, stdout: bytes, message: str) -> None:
    with pytest.raises(GuestError, match=message):
        judge_check(CommandResult(exit_code=exit_code, stdout=stdout, stderr=b"boom"))
