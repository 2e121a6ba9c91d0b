"""Valid tasks, and what is rejected before any machine boots."""

from typing import Any

import pytest
from pydantic import ValidationError

from cuaenv.actions import Done, Fail, PressKeys, TypeText
from envd.tasks.checker_union import leaves
from envd.tasks.checkers.files import FileText
from envd.tasks.checkers.session import AgentAnswer
from envd.tasks.model import Task
from envd.tasks.oracle import parse_action
from envd.tasks.verbs import Launch, WriteSetupFile

FILE = {"kind": "file_text", "path": "/home/user/a.txt", "equals": "x"}


def task(**fields: Any) -> Task:
    return Task.model_validate(
        {"task_id": "suite/name", "instruction": "Do it.", "level": 1, "checker": FILE, **fields}
    )


def refusal(**fields: Any) -> str:
    with pytest.raises(ValidationError) as raised:
        task(**fields)
    return str(raised.value)


def test_verbs_and_checkers_are_discriminated_by_kind() -> None:
    it = task(
        setup=[
            {"kind": "write_file", "path": "/home/user/a.txt", "text": ""},
            {"kind": "launch", "argv": ["galculator"], "window": {"class": "galculator"}},
        ],
        checker={"kind": "all", "checks": [FILE, {"kind": "any", "checks": [{"kind": "answer", "equals": "1"}]}]},
    )
    assert [type(verb) for verb in it.setup] == [WriteSetupFile, Launch]
    assert it.checker is not None
    assert [type(check) for check in leaves(it.checker)] == [FileText, AgentAnswer]


def test_a_task_is_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        task().level = 2


@pytest.mark.parametrize(
    "fields",
    [
        {"surprise": 1},
        {"setup": [{"kind": "write_file", "path": "/a", "text": "", "mode": "0600"}]},
        {"setup": [{"kind": "download", "url": "x"}]},
        {"checker": {**FILE, "path_": "x"}},
        {"checker": {"kind": "registry", "path": "/a"}},
        {"level": 6},
        {"task_id": "no-suite"},
        {"task_id": "Suite/Name"},
        {"setup": [{"kind": "remove", "path": "/a", "timeout_s": 0}]},
        {"setup": [{"kind": "remove", "path": "/a", "timeout_s": float("nan")}]},
        {"setup": [{"kind": "execute", "argv": []}]},
        {"setup": [{"kind": "launch", "argv": ["galculator"]}]},
        {"setup": [{"kind": "wait_window", "window": {}}]},
        {"checker": {"kind": "all", "checks": []}},
        {"checker": {"kind": "weighted", "checks": [{"weight": 0, "check": FILE}]}},
        {"checker": {"kind": "process", "program": "longer-than-fifteen"}},
    ],
)
def test_unknown_fields_kinds_and_values_out_of_range_are_rejected(fields: dict[str, Any]) -> None:
    assert "validation error" in refusal(**fields)


@pytest.mark.parametrize("path", ["a.txt", "~/a.txt", "", "/", "//", "/a/../../etc", "/a\0b", "C:", "C:\\"])
def test_paths_must_be_absolute_and_below_the_root(path: str) -> None:
    assert "is not" in refusal(setup=[{"kind": "remove", "path": path}])


@pytest.mark.parametrize("path", ["/home/user/a b.txt", r"C:\Users\user\a.txt", "C:/Users/a.txt", "/home/user/..a"])
def test_absolute_paths_of_both_systems_are_accepted(path: str) -> None:
    assert task(setup=[{"kind": "remove", "path": path}]).setup[0].kind == "remove"


@pytest.mark.parametrize(
    ("checker", "words"),
    [
        ({"kind": "file_text", "path": "/a"}, "exactly one of equals, contains and matches"),
        ({**FILE, "contains": "x"}, "exactly one of equals, contains and matches"),
        ({"kind": "file_text", "path": "/a", "contains": ""}, "must not be empty"),
        ({"kind": "file_text", "path": "/a", "matches": "("}, "not a regular expression"),
        ({**FILE, "encodings": ["utf-99"]}, "unknown encoding 'utf-99'"),
        ({"kind": "file_bytes", "path": "/a"}, "either sha256 or base64"),
        ({"kind": "file_bytes", "path": "/a", "base64": "??"}, "not base64"),
        ({"kind": "command", "argv": ["true"], "exit_code": None}, "give exit_code, stdout or both"),
        ({"kind": "answer", "equals": " "}, "empty text must not be right"),
        ({"kind": "answer", "matches": ".*"}, "empty text must not be right"),
        (None, "required, unless the task is infeasible"),
    ],
)
def test_checkers_without_an_expectation_are_rejected(checker: dict[str, Any] | None, words: str) -> None:
    assert words in refusal(checker=checker)


def test_write_file_needs_one_content_that_its_encoding_supports() -> None:
    verb = {"kind": "write_file", "path": "/a"}
    assert "either text or base64" in refusal(setup=[verb])
    assert "either text or base64" in refusal(setup=[{**verb, "text": "", "base64": ""}])
    assert "cannot be written in latin-1" in refusal(setup=[{**verb, "text": "漢", "encoding": "latin-1"}])


@pytest.mark.parametrize(
    "fields",
    [
        {"setup": [{"kind": "activate_window", "window": {"title": "x"}}]},
        {"checker": {"kind": "any", "checks": [FILE, {"kind": "clipboard", "equals": "x"}]}},
    ],
)
def test_verbs_and_checkers_that_the_system_does_not_support_are_rejected(fields: dict[str, Any]) -> None:
    assert task(**fields).os.value == "linux"
    assert "not supported in windows guests" in refusal(**fields, os="windows")


def test_freeze_setup_requires_a_setup_and_an_infeasible_task_no_checker() -> None:
    assert task(setup=[{"kind": "make_directory", "path": "/a"}], freeze_setup=True).freeze_setup
    assert not task().freeze_setup
    assert "the task has no setup" in refusal(setup=[], freeze_setup=True)
    assert task(checker=None, infeasible=True).infeasible
    assert "unless the task is infeasible" in refusal(infeasible=True)


@pytest.mark.parametrize(
    ("form", "action"), [("done", Done()), ("fail", Fail()), ({"done": "42"}, Done(answer="42")), (Done(), Done())]
)
def test_the_end_of_an_oracle_may_stand_alone(form: object, action: object) -> None:
    assert parse_action(form) == action


def test_an_oracle_fits_into_max_steps_and_ends_with_done_or_fail() -> None:
    assert task(oracle=[[{"type": "x"}, {"press": "enter"}], ["done"]]).oracle == (
        (TypeText(text="x"), PressKeys(keys=("enter",))),
        (Done(),),
    )
    assert "exceed max_steps 1" in refusal(oracle=[[{"type": "x"}], ["done"]], max_steps=1)
    assert "nothing may follow done or fail" in refusal(oracle=[["done"], [{"type": "x"}]])
    assert "steps must not be empty" in refusal(oracle=[[]])
    condition = {"wait_for": {"file": "/a"}}
    assert task(oracle=[[{"type": "x"}, condition, condition], ["done"]]).oracle
    assert "wait_for follows the actions of its step" in refusal(oracle=[[condition, {"type": "x"}]])
    assert "wait_for follows the actions of its step" in refusal(oracle=[[condition]])
