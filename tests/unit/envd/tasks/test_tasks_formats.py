"""Task formats of others: each yields the same model, or a problem with its location."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from envd.hypervisor.machine import GuestOs
from envd.integrations.osworld.tasks import OsworldEvaluator, OsworldSetup
from envd.tasks.catalogue import TaskCatalogue, TaskFile
from envd.tasks.formats.entries import Problem
from envd.tasks.formats.files import files_in, read_tasks
from envd.tasks.formats.rows import read_row
from envd.tasks.model import Task

INSTRUCTION = "Open Notepad, write the line Good morning and save it as C:\\Users\\user\\morning.txt."
PATH = "C:\\Users\\user\\morning.txt"

GRADED = {
    "prompt": INSTRUCTION,
    "target": json.dumps(
        {"text": "Good morning", "output_path": PATH, "checker": "exact_match", "task_type": "notepad", "difficulty": 3}
    ),
    "messages": [{"role": "user", "content": INSTRUCTION}],
}
NAME = read_row(GRADED)[0]

OSWORLD: dict[str, Any] = {
    "id": NAME,
    "snapshot": "notepad",
    "instruction": INSTRUCTION,
    "source": "",
    "config": [],
    "trajectory": "trajectories/",
    "related_apps": ["notepad"],
    "evaluator": {
        "func": "exact_match",
        "result": {"type": "vm_file", "path": PATH, "dest": "morning.txt"},
        "expected": {"type": "rule", "rules": {"expected": "Good morning"}},
    },
    "proxy": False,
}


def parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def as_osworld_json(directory: Path) -> Path:
    path = directory / f"{NAME}.json"
    path.write_text(json.dumps(OSWORLD), encoding="utf-8")
    return path


def as_slime_parquet(directory: Path) -> Path:
    row = {"prompt": "", "images": [b"png"], "metadata": {"task_config": OSWORLD, "replay": True}}
    return parquet(directory / "slime.parquet", [row])


def as_graded_parquet(directory: Path) -> Path:
    return parquet(directory / "graded.parquet", [GRADED])


def as_indexed_examples(directory: Path) -> Path:
    (directory / "examples" / "windows_os").mkdir(parents=True)
    (directory / "examples" / "windows_os" / f"{NAME}.json").write_text(json.dumps(OSWORLD), encoding="utf-8")
    index = directory / "test_all.json"
    index.write_text(json.dumps({"windows_os": [NAME]}), encoding="utf-8")
    return index


def as_rows(directory: Path, row: Mapping[str, Any]) -> Path:
    path = directory / "rows.json"
    path.write_text(json.dumps([row]), encoding="utf-8")
    return path


def only_task(path: Path) -> Task:
    [task] = TaskCatalogue.load([TaskFile(path, suite="morning")], include_builtin=False).list()
    return task


def problems(path: Path) -> list[Problem]:
    return [each for each in read_tasks(path) if isinstance(each, Problem)]


def test_one_task_is_the_same_from_all_four_formats(tmp_path: Path) -> None:
    tasks = [
        only_task(write(tmp_path))
        for write in (as_osworld_json, as_slime_parquet, as_graded_parquet, as_indexed_examples)
    ]
    assert all(task == tasks[0] for task in tasks)
    assert tasks[0] == Task.model_validate(
        {
            "task_id": f"morning/{NAME}",
            "instruction": INSTRUCTION,
            "level": 3,
            "tags": ["notepad"],
            "os": "windows",
            "checker": {"kind": "exact_match", "path": PATH, "text": "Good morning"},
        }
    )


@pytest.mark.parametrize(
    "row",
    [
        {"task_config": OSWORLD},
        {"task_config": json.dumps(OSWORLD)},
        {"metadata": {"task_config": OSWORLD}},
        {"metadata": {"task_config": json.dumps(OSWORLD)}},
        {"metadata": json.dumps({"task_config": OSWORLD})},
        {"metadata": {"metadata": {"task_config": json.dumps(OSWORLD)}}},
        {"metadata": json.dumps({"metadata": {"task_config": OSWORLD}}), "task_config": None},
        OSWORLD,
    ],
    ids=["object", "text", "metadata", "text-in-metadata", "text-metadata", "nested", "nested-in-text", "itself"],
)
def test_a_task_config_is_found_as_text_or_object_direct_or_nested(tmp_path: Path, row: dict[str, Any]) -> None:
    rows = as_rows(tmp_path, row)
    expected = only_task(as_osworld_json(tmp_path))
    assert only_task(rows) == expected
    if "id" not in row:
        assert only_task(parquet(tmp_path / "rows.parquet", [row])) == expected


def test_tables_have_null_fields_of_other_rows_own_tasks_and_a_default_suite(tmp_path: Path) -> None:
    sleeping = {**OSWORLD, "id": "other", "config": [{"type": "sleep", "parameters": {"seconds": 0.5}}]}
    fetch = {"files": [{"url": "https://files.example.org/a.txt", "path": PATH}]}
    opening = {**OSWORLD, "config": [{"type": "download", "parameters": fetch}]}
    path = parquet(tmp_path / "rows.parquet", [{"task_config": sleeping}, {"task_config": opening}])
    verbs = [task.setup[0] for task in TaskCatalogue.load([path], include_builtin=False).list()]
    assert [verb.steps for verb in verbs if isinstance(verb, OsworldSetup)] == [
        tuple(sleeping["config"]),
        tuple(opening["config"]),
    ]
    fields = {"instruction": "Do it.", "level": 2, "checker": {"kind": "file_absent", "path": "/home/user/a"}}
    task = {"name": "gone", **fields}
    path = parquet(tmp_path / "own.parquet", [{"task": json.dumps(task), "split": "train"}])
    assert only_task(path) == Task.model_validate({"task_id": "morning/gone", **fields})
    path = as_graded_parquet(tmp_path)
    assert [task.task_id for task in TaskCatalogue.load([path], include_builtin=False).list()] == [f"imported/{NAME}"]


def test_a_graded_row_is_named_by_its_content_alone() -> None:
    other = {**GRADED, "prompt": "Another one."}
    assert read_row(dict(reversed(GRADED.items())))[0] == NAME
    assert read_row(other)[0] != NAME
    assert read_row({**GRADED, "prompt": None})[0] == NAME


def test_the_operating_system_follows_from_the_row_or_from_the_paths() -> None:
    linux = {**OSWORLD, "evaluator": {"func": "infeasible"}, "instruction": "Print it."}
    assert read_row({"task_config": linux})[1]()["os"] is GuestOs.LINUX
    assert read_row({"task_config": linux, "env_config": {"os_type": "Windows"}})[1]()["os"] is GuestOs.WINDOWS
    assert read_row({"task_config": OSWORLD})[1]()["os"] is GuestOs.WINDOWS


@pytest.mark.parametrize("path", ["/home/user/d/a.txt", "~/d/a.txt", "d/a.txt"])
def test_relative_upload_paths_start_in_the_users_home(tmp_path: Path, path: str) -> None:
    (tmp_path / "a.txt").write_text("x")
    linux = {**OSWORLD, "evaluator": {"func": "infeasible"}, "instruction": "Read it."}
    config = [{"type": "upload_file", "parameters": {"files": [{"local_path": "a.txt", "path": path}]}}]
    rows = as_rows(tmp_path, {**linux, "config": config})
    [verb] = only_task(rows).setup
    assert verb.model_dump()["files"][0]["path"] == "/home/user/d/a.txt"


def test_osworlds_setup_stays_in_its_form_except_for_files_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    launch = {"type": "launch", "parameters": {"command": "soffice --calc 'my file.ods'", "shell": False}}
    upload = {"type": "upload_file", "parameters": {"files": [{"local_path": "a.txt", "path": "/home/user/a.txt"}]}}
    linux = {**OSWORLD, "evaluator": {"func": "infeasible"}, "instruction": "Run it."}
    config = [launch, {"type": "sleep", "parameters": {"seconds": 1}}, upload, launch]
    rows = as_rows(tmp_path, {**linux, "config": config})
    before, uploading, after = only_task(rows).setup
    assert isinstance(before, OsworldSetup)
    assert isinstance(after, OsworldSetup)
    assert before.steps == tuple(config[:2])
    assert uploading.kind == "upload_file"
    assert after.steps == (launch,)


def test_an_infeasible_task_has_no_checker_and_others_stay_osworlds(tmp_path: Path) -> None:
    row = as_rows(tmp_path, {**OSWORLD, "evaluator": {"func": "infeasible"}})
    task = only_task(row)
    assert task.infeasible
    assert task.checker is None
    evaluator = {
        "func": ["check_include_exclude", "exact_match"],
        "conj": "or",
        "result": [{"type": "vm_command_line", "command": "true"}, {"type": "vm_file", "path": "/a", "dest": "a"}],
        "expected": [{"type": "rule", "rules": {"include": ["a"]}}, None],
    }
    noted = {**evaluator, "_note": "by hand"}
    rows = as_rows(tmp_path, {**OSWORLD, "evaluator": noted})
    checker = only_task(rows).checker
    assert isinstance(checker, OsworldEvaluator)
    assert checker.to_osworld() == evaluator | {"postconfig": []}


def osworld_problems(tmp_path: Path, **changes: object) -> list[Problem]:
    path = tmp_path / "task.json"
    path.write_text(json.dumps({**OSWORLD, **changes}, indent=2), encoding="utf-8")
    return problems(path)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"type": "tidy_desktop", "parameters": {}}, "unknown setup verb 'tidy_desktop'"),
        ({"type": "act"}, "unknown setup verb 'act'"),
        ({"type": "replay"}, "unknown setup verb 'replay'"),
        ({"type": "googledrive", "parameters": {}}, "googledrive needs the internet and an account's credentials"),
        ({"type": "login", "parameters": {}}, "login needs the internet and an account's credentials"),
        ({"type": "proxy", "parameters": {}}, "proxy needs the internet"),
        ({"type": "sleep", "parameters": {"seconds": 1}, "when": "now"}, "a setup entry has a type"),
    ],
)
def test_an_unsupported_setup_entry_is_located(tmp_path: Path, entry: dict[str, Any], words: str) -> None:
    [problem] = osworld_problems(tmp_path, config=[{"type": "sleep", "parameters": {"seconds": 1}}, entry])
    assert words in problem.message
    assert problem.field.startswith("config[1]")
    assert problem.task_id == f"imported/{NAME}"
    assert problem.where.startswith(f"{tmp_path}/task.json:1")


def test_an_unknown_field_or_malformed_download_of_a_task_is_located(tmp_path: Path) -> None:
    [problem] = osworld_problems(tmp_path, surprise=1)
    assert problem.field == "surprise"
    assert problem.where == f"{tmp_path}/task.json:{len(json.dumps(OSWORLD, indent=2).splitlines())}"
    [problem] = osworld_problems(tmp_path, config=[{"type": "download", "parameters": {"files": [{"url": "x"}]}}])
    assert "a download has files" in problem.message


def test_an_index_names_only_files_below_its_examples(tmp_path: Path) -> None:
    index = as_indexed_examples(tmp_path)
    (tmp_path / "secret.json").write_text(json.dumps(OSWORLD), encoding="utf-8")
    index.write_text(json.dumps({"windows_os": [NAME, "gone"], "..": ["secret"]}, indent=1), encoding="utf-8")
    gone, outside = problems(index)
    assert (gone.field, gone.where) == ("windows_os[1]", f"{index}:4")
    assert outside.field == "..[0]"


def test_an_unreadable_line_is_reported_by_number_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps({"task_config": OSWORLD})
    path.write_text(f"{good}\n{{\n{good.replace(NAME, 'other')}\n", encoding="utf-8")
    first, second, third = read_tasks(path)
    assert isinstance(first, Task)
    assert isinstance(second, Problem)
    assert second.where == f"{path}: row 2"
    assert isinstance(third, Task)


@pytest.mark.parametrize("local_path", ["../secret.txt", "/etc/passwd", "gone.txt"])
def test_a_file_to_upload_must_be_below_the_task_files_directory(tmp_path: Path, local_path: str) -> None:
    (tmp_path / "secret.txt").write_text("x")
    directory = tmp_path / "tasks"
    directory.mkdir()
    (directory / "notes.txt").write_text("x")
    verb = {"kind": "upload_file", "files": [{"local_path": "notes.txt", "path": "/home/user/notes.txt"}]}
    task = {"name": "n", "instruction": "i", "level": 1, "infeasible": True, "setup": [verb]}
    suite = {"version": 1, "suite": "s", "tasks": [task]}
    path = directory / "suite.json"
    path.write_text(json.dumps(suite))
    assert only_task(path).setup[0].model_dump()["files"][0]["local_path"] == str(directory / "notes.txt")
    path.write_text(json.dumps(suite).replace('"notes.txt"', json.dumps(local_path)))
    [problem] = problems(path)
    assert problem.field == "setup[0].files[0].local_path"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", b"{", "cannot be read"),
        ("a.json", b'{"suite": "s", "suite": "t"}', "duplicate key 'suite'"),
        ("a.json", b'[{"x": NaN}]', "NaN is not JSON"),
        ("a.json", b"{}", "is not a task file"),
        ("a.json", b'{"a": 1}', "is not a task file"),
        ("a.jsonl", b'{"a": 1}\n2\n', "no task, task_config or target among the columns a"),
        ("a.parquet", b"PAR1", "cannot be read as Parquet"),
        ("a.yaml", b"version: 2\nsuite: s\ntasks: []", "version: unknown version 2; this release reads 1"),
        ("a.yaml", b"version: true\nsuite: s\ntasks: []", "version: unknown version True"),
        ("a.yaml", b"suite: s\ntasks: [{name: n, task_id: x/y}]", "task_id: derived from suite and name"),
    ],
)
def test_a_file_that_is_not_a_task_file_is_rejected(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    messages = [str(problem) for problem in problems(path)]
    assert messages
    assert messages[0].startswith(str(path))
    assert words in messages[0]


@pytest.mark.parametrize(("name", "text"), [("a.yaml", "suite: a\ntasks: []\n"), ("a.json", "[]"), ("a.jsonl", "")])
def test_a_file_without_tasks_is_a_problem(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    (problem,) = read_tasks(path)
    assert isinstance(problem, Problem)
    assert problem.where.startswith(str(path))


def test_a_directory_without_task_files_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (problem,) = [found for path in files_in(tmp_path) for found in read_tasks(path)]
    assert isinstance(problem, Problem)
    assert "has no task files (.yaml, .yml" in problem.message


def test_a_wrong_type_is_named_in_words_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("suite: a\ntasks: [{name: b, instruction: c, level: 1, infeasible: true, tags: 3, setup: 3}]\n")
    problems = {found.field: found.message for found in read_tasks(path) if isinstance(found, Problem)}
    assert problems == {"tags": "must be a list", "setup": "must be a list"}
