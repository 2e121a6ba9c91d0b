"""Load suites from files, and reject invalid files."""

import json
from pathlib import Path
from typing import Any

import pytest

from envd.base.errors import ConfigError, TaskNotFound
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.formats.files import read_tasks

GOOD = """
suite: mine
tasks:
  - name: first
    level: 1
    instruction: Do it.
    checker: {kind: file_absent, path: /home/user/a.txt}
"""


def write(directory: Path, text: str, name: str = "mine.yaml") -> Path:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        TaskCatalogue.load([path], include_builtin=False)
    return str(raised.value)


def test_built_in_suites_are_loaded_before_others(tmp_path: Path) -> None:
    catalogue = TaskCatalogue.load([write(tmp_path, GOOD)])
    assert catalogue.get("mine/first").level == 1
    assert catalogue.list()[-1].task_id == "mine/first"
    assert catalogue.list()[0].task_id.startswith("desktop/")
    assert "tasks in desktop, mine" in repr(catalogue)


def test_a_directory_loads_its_yaml_files_in_order(tmp_path: Path) -> None:
    write(tmp_path, GOOD.replace("mine", "b"), "b.yaml")
    write(tmp_path, GOOD.replace("mine", "a"), "a.yaml")
    write(tmp_path, "not a suite", "README.txt")
    catalogue = TaskCatalogue.load([tmp_path], include_builtin=False)
    assert [task.task_id for task in catalogue.list()] == ["a/first", "b/first"]


def test_a_task_with_a_problem_is_left_out_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = GOOD.split("tasks:")[1].replace("first", "second").replace("level: 1", "level: 1\n    colour: red")
    catalogue = TaskCatalogue.load([write(tmp_path, GOOD + bad.strip("\n"))], include_builtin=False)
    assert [task.task_id for task in catalogue.list()] == ["mine/first"]
    assert "task mine/second: colour: " in caplog.text
    with pytest.raises(TaskNotFound, match=r"'mine/second' is left out: colour: .*envd tasks lint"):
        catalogue.get("mine/second")
    assert catalogue.with_tasks([]).problems == catalogue.problems


OSWORLD: dict[str, Any] = {
    "id": "a", "instruction": "Do it.", "evaluator": {"func": "infeasible"}, "config": [],
}  # fmt: skip


def test_one_file_of_a_fork_of_osworld_does_not_cost_the_others(tmp_path: Path) -> None:
    directory = tmp_path / "evaluation_examples" / "examples" / "os"
    directory.mkdir(parents=True)
    (tmp_path / "evaluation_examples" / "settings.txt").write_text("x")
    upload = {"local_path": "evaluation_examples/settings.txt", "path": "/home/user/settings.txt"}
    contents: dict[str, Any] = {
        "good": OSWORLD,
        "uploads": OSWORLD | {"config": [{"type": "upload_file", "parameters": {"files": [upload]}}]},
        "unknown-key": OSWORLD | {"difficulty": "hard"},
        "no-evaluator": {"id": "b", "instruction": "Do it."},
        "list": [],
        "twice": OSWORLD | {"id": "good"},
        "outside": OSWORLD
        | {"config": [{"type": "upload_file", "parameters": {"files": [upload | {"local_path": "../../../a"}]}}]},
    }
    for name, content in contents.items():
        renamed = {**content, "id": content.get("id") if name == "twice" else name} if content else content
        (directory / f"{name}.json").write_text(json.dumps(renamed))
    catalogue = TaskCatalogue.load([directory], include_builtin=False)
    assert [task.task_id for task in catalogue.list()] == ["imported/good", "imported/uploads"]
    assert len(catalogue.problems) == 5
    index = write(tmp_path / "evaluation_examples", json.dumps({"os": ["good", "unknown-key", "gone"]}), "all.json")
    assert len(TaskCatalogue.load([index], include_builtin=False)) == 1


def test_a_wrong_field_is_named_with_its_file_and_task(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace("file_absent", "file_absnt").replace("level: 1", "level: 9"))
    message = refusal(path)
    assert f"{path}:5: task mine/first: level: must be at most 5" in message
    assert f"{path}:7: task mine/first: checker: unknown kind 'file_absnt'; did you mean file_absent?" in message


def test_an_unknown_key_has_a_suggestion_at_any_depth(tmp_path: Path) -> None:
    text = """
suite: mine
tasks:
  - name: first
    instruction: x
    level: 1
    parameter: {}
    user: {fact: []}
    setup:
      - {kind: launch, argv: [a], window: {clas: x}}
      - {kind: download, files: [{url: "https://example.org/a", path: /a, sha: x}]}
    checker:
      kind: all
      checks:
        - {kind: window, window: {titles: x}}
        - {kind: weighted, checks: [{weight: 1, checks: {}, check: {kind: unchanged, paths: [/a], excepted: [/b]}}]}
"""
    found = {str(each).partition("task mine/first: ")[2] for each in read_tasks(write(tmp_path, text))}
    inner = "checker.all.checks[1].weighted.checks[0]"
    assert found == {
        "parameter: unknown key; did you mean parameters?",
        "user.fact: unknown key; did you mean facts?",
        "setup[0].launch.window.clas: unknown key; did you mean class?",
        "setup[1].download.files[0].sha: unknown key; did you mean sha256?",
        "checker.all.checks[0].window.window.titles: unknown key; did you mean title?",
        f"{inner}.checks: unknown key; did you mean check?",
        f"{inner}.check.unchanged.excepted: unknown key; did you mean except?",
    }


def test_a_list_without_items_is_reported_and_one_with_wrong_items_by_these_alone(tmp_path: Path) -> None:
    for checks, problem in (
        ("[]", "checker.all.checks: must have at least 1 item, not 0"),
        ("[{kind: file_text}]", "checker.all.checks[0].file_text.path: is missing"),
    ):
        text = GOOD.replace("{kind: file_absent, path: /home/user/a.txt}", f"{{kind: all, checks: {checks}}}")
        assert text != GOOD
        assert [str(each).partition("task mine/first: ")[2] for each in read_tasks(write(tmp_path, text))] == [problem]


def test_an_id_that_cannot_be_one_is_reported_with_the_keys_of_the_file(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, GOOD.replace("suite: mine", "suite: My Tasks")))
    assert "suite, name: My Tasks/first is not SUITE/NAME of a-z 0-9 _ -, each beginning with a letter" in message


def test_a_wrong_oracle_is_named_by_step_and_action(tmp_path: Path) -> None:
    oracle = "    oracle: [[{press: enter}], [{clack: {}}]]\n    checker"
    message = refusal(write(tmp_path, GOOD.replace("    checker", oracle)))
    assert "oracle[1][0]: action: unknown action 'clack'" in message


def test_of_two_tasks_with_one_id_the_first_is_served(tmp_path: Path) -> None:
    first, second = write(tmp_path, GOOD, "1.yaml"), write(tmp_path, GOOD, "2.yaml")
    catalogue = TaskCatalogue.load([tmp_path], include_builtin=False)
    assert list(map(str, catalogue.problems)) == [
        f"{second}: task mine/first: duplicate id, already in {first}; rename one of them"
    ]
    both = write(tmp_path, GOOD + GOOD.partition("tasks:\n")[2], "3.yaml")
    [problem] = TaskCatalogue.load([both], include_builtin=False).problems
    assert problem.message == "duplicate id, twice in this file; rename one of them"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("suite: [", "cannot be read"),
        ("- a", "row 1: not an object"),
        ("suite: a", "a suite has the keys suite, tasks"),
        ("suite: a\ntasks: []\nmore: 1", "a suite has the keys suite, tasks"),
        ("suite: 1\ntasks: []", "suite must be text"),
        ("suite: a\ntasks: {}", "and tasks a list"),
        ("suite: a\ntasks: [1]", "tasks[0]: a task is a mapping with a name"),
        ("suite: a\ntasks: [{level: 1}]", "tasks[0]: a task is a mapping with a name"),
        ("suite: !!python/object/apply:os.getcwd []\ntasks: []", "cannot be read"),
    ],
)
def test_a_file_that_is_not_a_suite_is_rejected(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    message = refusal(path)
    assert message.startswith(str(path))
    assert words in message


def test_a_missing_or_binary_file_is_rejected(tmp_path: Path) -> None:
    assert "missing.yaml: cannot be read" in refusal(tmp_path / "missing.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "binary.yaml: cannot be read" in refusal(binary)


def test_finding_an_unknown_id_compares_no_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = TaskCatalogue.load()
    monkeypatch.setattr("difflib.get_close_matches", None)
    assert catalogue.find("desktop/delete-lime") is None
    assert catalogue.find("desktop/delete-line?seed=x") is None
    found = catalogue.find("desktop/delete-line?seed=3")
    assert found is not None
    assert found.task_id == "desktop/delete-line?seed=3"


def test_an_unknown_id_is_compared_with_few_and_short_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, list[str]]] = []

    def get_close_matches(word: str, possibilities: list[str], **_: object) -> list[str]:
        compared.append((word, possibilities))
        return []

    plain = TaskCatalogue.load().list()[0]
    many = [plain.model_copy(update={"task_id": f"many/{number:04}{'x' * number}"}) for number in range(1000)]
    monkeypatch.setattr("difflib.get_close_matches", get_close_matches)
    catalogue = TaskCatalogue(many)
    for task_id in ("many/0500" + "y" * 200, "many/0010", "a", "z"):
        with pytest.raises(TaskNotFound):
            catalogue.get(f"{task_id}-")
    assert len(compared) == 4
    for word, possibilities in compared:
        assert len(word) <= 64
        assert len(possibilities) <= 16
        assert all(len(candidate) <= 64 for candidate in possibilities)
