"""States for OSWorld's metric functions: what is made without its environment, how they are played and counted."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from envd.base.errors import GuestError
from envd.integrations.osworld.workers import OsworldWorkers, WorkerJob
from tests.osworld.feed import grouped, in_turn, play, table, wrong_states
from tests.osworld.stage import Staged, states_of_task
from tests.osworld.states import MAKERS, State, Unsupported, Wanted, other, states_of

TEXT = {
    "func": "compare_text_file",
    "result": {"type": "vm_file", "path": "/home/user/log.txt", "dest": "log.txt"},
    "expected": {"type": "cloud_file", "path": "https://example.org/gold", "dest": "gold.txt"},
    "options": {"ignore_blanks": True},
}
#: A rule of each function whose states need no library of OSWorld's environment.
RULES: Mapping[str, Mapping[str, Any]] = {
    "compare_text_file": {},
    "diff_text_file": {},
    "compare_config": {"expected": "project"},
    "file_contains": {"expected": ["CPU", "%idle"]},
    "check_line_number": {"expected": "31"},
    "compare_result_files": {},
    "compare_csv": {},
    "check_json_settings": {"expected": {"editor.wordWrapColumn": 50, "files.trim": True}},
    "check_json_keybindings": {"expected": {"key": "ctrl+f", "command": "-list.find"}},
    "check_json": {"expect": [{"key": ["a", "b"], "method": "re", "ref": "\\bsmart\\b"}]},
    "check_thunderbird_prefs": {"expect": {"mail.text": {"method": "re.S", "ref": "Ada.+Lab"}}},
    "check_thunderbird_filter": {"expect": [{"action": "Forward", "actionValue": "a@b", "condition": ["ALL"]}]},
    "check_thunderbird_folder": {},
    "run_sqlite3": {"sql": "select 1"},
    "check_qt_max_volume": {"expected_qt_max_volume": 200},
    "check_config_status": {"key": ["history-item", '"x"'], "value": "1"},
    "find_default_font": {"font_name": "Times New Roman"},
    "is_expected_bookmarks": {"type": "bookmark_bar_folders_names", "names": ["Favorites"]},
    "check_enabled_experiments": {"type": "names", "names": ["a", "b"]},
    "is_cookie_deleted": {"type": "domains", "domains": [".example.net"]},
    "compare_htmls": {},
}


@pytest.mark.parametrize("function", RULES)
def test_each_state_differs_from_the_goal_and_has_a_name_of_its_own(function: str) -> None:
    states = states_of(Wanted(function, [dict(RULES[function])], {}, "result.txt"))
    goal = [state for state in states if state.kind == "right"]
    wrong = [state for state in states if state.kind not in {"gold", "right"}]
    assert len(goal) == 1
    assert len(wrong) >= 3
    assert goal[0].content not in [state.content for state in wrong]
    assert len({state.name for state in wrong}) == len(wrong)
    assert {state.kind for state in wrong} <= {"almost", "damage", "early", "hedged", "lazy", "planted"}


def test_the_settings_of_the_goal_are_those_of_the_rule_and_others_remain() -> None:
    wanted = Wanted("check_json_settings", [dict(RULES["check_json_settings"])], {}, "settings.json")
    states = {(state.kind, state.name): state.content for state in states_of(wanted)}
    goal = json.loads(states["right", "the goal"])
    assert goal == {"editor.fontSize": 14, "files.autoSave": "off", "editor.wordWrapColumn": 50, "files.trim": True}
    changed = json.loads(states["almost", "another value"])
    assert (changed["editor.wordWrapColumn"], changed["files.trim"]) == (51, False)
    assert json.loads(states["damage", "all other settings deleted"]) == wanted.rule["expected"]
    assert states["lazy", "an empty file with the right name"] == b""


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, False), (3, 4), ("abx.", "aby."), ("", "x"), ({"a": 1}, {"a": 2}), ([1, "ab"], [1, "ax"]), (None, "x")],
)
def test_another_value_differs_in_one_place(value: object, expected: object) -> None:
    assert other(value) == expected


def test_a_rule_without_states_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="no maker for unknown"):
        states_of(Wanted("unknown", [{}], {}, "x"))
    with pytest.raises(Unsupported, match="a pattern"):
        states_of(Wanted("check_json", [{"expect": [{"key": ["a"], "method": "re", "ref": "[0-9]{3}"}]}], {}, "x"))


def test_a_task_has_its_options_and_files_in_place_of_those_of_a_guest(tmp_path: Path) -> None:
    right, *wrong = states_of_task({"evaluator": TEXT}, Staged(tmp_path))
    assert right["kind"] == "right"
    assert right["evaluator"]["options"] == [{"ignore_blanks": True}]
    assert right["evaluator"]["result"] == [{"type": "cloud_file", "path": "log.txt", "dest": "log.txt"}]
    assert right["files"]["log.txt"] == right["files"]["gold.txt"]
    for state in wrong:
        assert state["files"]["log.txt"] != state["files"]["gold.txt"] == right["files"]["gold.txt"]
        assert (tmp_path / state["files"]["log.txt"]).is_file()


def test_a_result_that_has_the_name_of_the_expected_file_is_compared_with_itself(tmp_path: Path) -> None:
    evaluator = {**TEXT, "expected": {**cast("dict[str, Any]", TEXT["expected"]), "dest": "log.txt"}}
    wrong = next(
        state
        for state in states_of_task({"evaluator": evaluator}, Staged(tmp_path))
        if state["name"].startswith("an empty")
    )
    assert list(wrong["files"]) == ["log.txt"]
    assert (tmp_path / wrong["files"]["log.txt"]).read_bytes() == b""


def test_one_result_is_wrong_at_a_time(tmp_path: Path) -> None:
    settings = {"type": "vm_file", "path": "/s.json", "dest": "s.json"}
    rule = {"type": "rule", "rules": RULES["check_json_settings"]}
    evaluator = {
        "func": ["compare_text_file", "check_json_settings"],
        "conj": "or",
        "result": [TEXT["result"], settings],
        "expected": [TEXT["expected"], rule],
    }
    right, *wrong = states_of_task({"evaluator": evaluator}, Staged(tmp_path))
    assert right["evaluator"]["conj"] == "or"
    for state in wrong:
        changed = {name for name in ("log.txt", "s.json") if state["files"][name] != right["files"][name]}
        assert changed == {"log.txt" if state["function"] == "compare_text_file" else "s.json"}


def test_the_results_that_one_function_scores_are_numbered(tmp_path: Path) -> None:
    results = [{**cast("dict[str, Any]", TEXT["result"]), "path": path, "dest": path[1:]} for path in ("/a", "/b")]
    evaluator = {**TEXT, "func": ["compare_text_file"] * 2, "result": results, "expected": [TEXT["expected"]] * 2}
    right, *wrong = states_of_task({"evaluator": {**evaluator, "options": [{}, {}]}}, Staged(tmp_path))
    for state in wrong:
        assert state["files"]["a" if state["result"] == 1 else "b"] != right["files"]["a"]
    keys = {(state["kind"], state["name"], state["result"]) for state in wrong}
    assert len(keys) == len(wrong) == 2 * len({key[:2] for key in keys})


def test_all_files_but_the_first_are_emptied_for_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MAKERS, "many", lambda _: iter([State("gold", "", b"1"), State("right", "the goal", b"1")]))
    files = {"type": "vm_file", "multi": True, "path": ["/a", "/b"], "dest": ["a", "b"]}
    expected = {"type": "cloud_file", "multi": True, "path": ["x", "y"], "dest": ["c", "d"], "gives": [0, 1]}
    evaluator = {"func": "many", "result": files, "expected": expected}
    states = list(states_of_task({"evaluator": evaluator}, Staged(tmp_path)))
    emptied = next(state for state in states if state["kind"] == "damage")
    assert [(tmp_path / emptied["files"][name]).read_bytes() for name in "abcd"] == [b"1", b"", b"1", b"1"]
    # Without `gives`, OSWorld's getter returns the first file alone.
    assert emptied["evaluator"]["result"][0]["gives"] == [0]
    assert emptied["evaluator"]["expected"][0]["gives"] == [0, 1]


@pytest.mark.parametrize("is_input", [True, False])
def test_damage_needs_a_document_of_the_start(is_input: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [State("right", "the goal", b"1"), State("damage", "a table deleted", b"2"), State("almost", "x", b"3")]
    monkeypatch.setitem(MAKERS, "one", lambda _: iter(states))
    config = [{"type": "download", "parameters": {"files": [{"url": "u", "path": "/a.docx" if is_input else "/b"}]}}]
    evaluator = {"func": "one", "result": {"type": "vm_file", "path": "/a.docx", "dest": "a.docx"}}
    found = states_of_task({"evaluator": evaluator, "config": config}, Staged(tmp_path))
    assert ("damage" in {state["kind"] for state in found}) is is_input


def test_a_value_is_given_as_a_rule_and_tasks_take_turns(tmp_path: Path) -> None:
    rule = {"type": "rule", "rules": RULES["is_cookie_deleted"]}
    evaluator = {"func": "is_cookie_deleted", "result": {"type": "cookie_data", "dest": "Cookies"}, "expected": rule}
    state = list(states_of_task({"evaluator": evaluator}, Staged(tmp_path)))[-1]
    assert state["files"] == {}
    assert state["evaluator"]["result"] == [{"type": "rule", "rules": []}]
    tasks = {"a": "f", "b": "f", "c": "f", "d": "g"}
    states = [line(task, kind, 1, function=tasks[task]) for task in tasks for kind in ("right", "almost")]
    played = in_turn(states)
    assert len(played) == 8
    assert {state["function"] for state in played[:4]} == {"f", "g"}
    assert [state["task"] for state in played[::2]] == [state["task"] for state in played[1::2]]


@pytest.mark.parametrize(
    ("evaluator", "problem"),
    [
        ({**TEXT, "result": {"type": "audio_in_slide"}}, "a result of audio_in_slide"),
        ({"func": "check_include_exclude", "result": {"type": "vm_command_line"}}, "no wrong state"),
    ],
)
def test_a_task_without_states_is_named(evaluator: Mapping[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=problem):
        list(states_of_task({"evaluator": evaluator}, Staged(tmp_path)))


def line(
    task: str, kind: str, score: float | None, *, name: str = "x", function: str = "f", result: int = 1
) -> dict[str, Any]:
    return {"task": task, "function": function, "kind": kind, "name": name, "result": result, "score": score}


class Evaluators:
    """Scores 1 for the file `right`, and does not end for `endless`."""

    def __init__(self) -> None:
        self.jobs: list[WorkerJob] = []

    async def run(self, job: WorkerJob) -> Mapping[str, Any]:
        self.jobs.append(job)
        if job.files["r"].name == "endless":
            raise GuestError("exceeded its limit of 120 s")
        return {"score": float(job.files["r"].name == "right")}


async def test_an_interrupted_audit_continues_and_a_failure_has_no_score(tmp_path: Path) -> None:
    states = [
        {**line("a", kind, 1, name=name), "evaluator": {"func": []}, "files": {"r": name}}
        for kind, name in (("right", "right"), ("almost", "wrong"), ("planted", "endless"))
    ]
    (tmp_path / "states.json").write_text(json.dumps({"states": states, "left_out": {}}))
    (tmp_path / "verdicts.jsonl").write_text(json.dumps(line("a", "almost", 0.0, name="wrong")) + "\n")
    evaluators = Evaluators()
    for _ in range(2):
        await asyncio.wait_for(play(cast("OsworldWorkers", evaluators), tmp_path, 2), 5)
    assert len(evaluators.jobs) == 2
    lines = [json.loads(each) for each in (tmp_path / "verdicts.jsonl").read_text().splitlines()]
    assert {each["name"]: each["score"] for each in lines} == {"right": 1.0, "wrong": 0.0, "endless": None}
    assert next(each["reason"] for each in lines if each["name"] == "endless") == "exceeded its limit of 120 s"


def test_functions_are_counted_where_the_right_state_scores_1() -> None:
    verdicts = [
        line("a", "right", 1), line("a", "damage", 1), line("a", "damage", 0.5, name="y"),
        line("b", "right", 1, function="g"), line("b", "damage", None, function="g"),
        line("b", "damage", 0.9996, function="g", name="y"),
        line("c", "right", 0, function="h"), line("c", "damage", 1, function="h"),
    ]  # fmt: skip
    wrong = list(wrong_states(verdicts))
    assert {each["task"] for each in wrong} == {"a", "b"}
    assert list(table(wrong)) == ["| `damage` | 2 | 4 | 1 | 1 | 1 of 2 | 50% (9% to 91%) |"]
    lines = [json.loads(each) for each in grouped(wrong)]
    assert lines[0] == {"function": "f", "kind": "damage", "name": "x", "scores": {"a": 1}}
    assert [each["scores"] for each in lines] == [{"a": 1}, {"a": 0.5}, {"b": None}, {"b": 0.999}]


def test_no_verdict_takes_the_place_of_another() -> None:
    both = [line("chrome/1-2", "lazy", 0), line("chrome/1-2", "lazy", 1, result=2)]
    lines = [json.loads(each) for each in grouped(both)]
    assert {each["name"]: each["scores"] for each in lines} == {"x": {"chrome/1": 0}, "x, result 2": {"chrome/1": 1}}
    with pytest.raises(ValueError, match="task chrome/1: two verdicts on f: x"):
        list(grouped([*both, line("chrome/1-3", "lazy", 1)]))
