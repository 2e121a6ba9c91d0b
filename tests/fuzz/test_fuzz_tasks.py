"""Any task file yields servable tasks or a `ConfigError`, in bounded time and memory."""

import json
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from envd.base.errors import ConfigError
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.formats.files import read_tasks
from envd.tasks.model import Task
from tests.support.fuzz import corpus, fuzzed, inputs

PROPER: dict[str, Any] = {
    "name": "note",
    "instruction": "Write it.",
    "level": 1,
    "tags": ["a"],
    "max_steps": 5,
    "setup": [
        {"kind": "write_file", "path": "/home/user/a", "text": "a", "encoding": "utf-8"},
        {"kind": "launch", "argv": ["xterm"], "window": {"title": "x"}},
        {"kind": "execute", "argv": ["true"], "timeout_s": 5},
    ],
    "checker": {
        "kind": "all",
        "checks": [
            {"kind": "file_text", "path": "/home/user/a", "matches": "a+"},
            {"kind": "weighted", "checks": [{"weight": 1, "check": {"kind": "process", "program": "xterm"}}]},
        ],
    },
    "oracle": [[{"type": "a"}, {"press": ["ctrl", "s"]}], ["done"]],
}
words = st.sampled_from(
    [
        "", "kind", "write_file", "/home/user/a", "relative", "/a/../b", "C:\\a", "(", "(a+)+$", "a{99999999999}",
        "hex", "idna", "undefined", "\0", "\ud800", "done", "é", "YQ", "sha256", "base64",
    ]
)  # fmt: skip
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | words | st.just(date(2026, 1, 1))
)
anything: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(words | st.integers() | st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@st.composite
def with_wrong_parts(draw: st.DrawFn) -> dict[str, Any]:
    """A valid task with some of its parts, at any depth, replaced or removed."""

    def spoil(value: Any) -> Any:
        if draw(st.integers(0, 11)) == 0:
            return draw(anything)
        if isinstance(value, dict):
            return {key: spoil(part) for key, part in value.items() if draw(st.integers(0, 24))}
        return [spoil(part) for part in value] if isinstance(value, list) else value

    return {key: spoil(part) for key, part in PROPER.items()}


def _dumped(value: object) -> str:
    return yaml.dump(value, allow_unicode=False)


suites = st.one_of(
    st.lists(with_wrong_parts(), min_size=1, max_size=2).map(lambda tasks: _dumped({"suite": "s", "tasks": tasks})),
    anything.map(_dumped),
    st.text(max_size=200),
)


def load(text: str) -> TaskCatalogue | None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "suite.yaml")
        file.write_text(text, encoding="utf-8", errors="surrogatepass")
        try:
            return TaskCatalogue.load([file], include_builtin=False)
        except ConfigError:
            return None


def _matching(pattern: str) -> str:
    checker = f"{{kind: file_text, path: /a, matches: '{pattern}'}}"
    return f"suite: s\ntasks: [{{name: n, instruction: i, level: 1, checker: {checker}}}]"


def alias_bomb(levels: int) -> str:
    """Return an alias bomb: each level contains the previous one nine times."""
    checks = ["&a0 {kind: process, program: x}"]
    checks += [f"&a{n} {{kind: all, checks: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, levels)]
    lines = "".join(f"  - {check}\n" for check in checks)
    return f"suite: s\ntasks:\n- name: n\n  instruction: i\n  level: 1\n  tags:\n{lines}  checker: *a{levels - 1}\n"


@fuzzed(40)
@given(suites | inputs("tasks").map(lambda data: data.decode("utf-8", "replace")))
@example("{[a]: 1}")
@example("suite: s\ntasks: [{name: n, instruction: i, {a: b}: 1}]")
@example("suite: 2001-99-99\ntasks: []")
@example("suite: s\ntasks: [{name: n, level: 2001-02-30}]")
@example("x: !!int zz")
@example("x: !!float zz")
@example("x: !!binary é")
@example("x: !!timestamp zz")
@example("x: 9:" + "9" * 5000)
@example("x: 0b" + "1" * 5000)
@example("- &a [*a]")
@example("suite: s\ntasks: [{name: n, instruction: i, level: 1, checker: &c {kind: all, checks: [*c]}}]")
@example("suite: s\ntasks: &t [*t]")
@example("[" * 600)
@example("suite: s\ntasks: " + "[" * 600 + "]" * 600)
@example(
    "suite: s\ntasks: [{name: n, instruction: i, level: 1, checker: "
    + "{kind: all, checks: [" * 300
    + "]}" * 300
    + "}]"
)
@example('suite: s\ntasks: [{name: n, instruction: "\\ud800", level: 1, infeasible: true}]')
@example(_matching("a{99999999999}"))
@example(_matching("(" * 3000 + ")" * 3000))
@example("%YAML 9.9\n---\na")
@example("\x00")
def test_any_file_is_loaded_or_rejected(text: str) -> None:
    catalogue = load(text)
    for task in catalogue.list() if catalogue else ():
        # Accepted tasks can be encoded for the wire.
        f"{task.task_id}{task.instruction}{''.join(task.tags)}".encode()


CONFIG: dict[str, Any] = {
    "id": "a1",
    "instruction": "Do it.",
    "config": [
        {"type": "launch", "parameters": {"command": ["a", "b"], "shell": False}},
        {"type": "execute", "parameters": {"command": "a b", "until": {"returncode": 0}}},
        {"type": "download", "parameters": {"files": [{"url": "https://files.example.org/a", "path": "/home/user/a"}]}},
        {"type": "activate_window", "parameters": {"window_name": "a", "strict": True}},
    ],
    "related_apps": ["a"],
    "evaluator": {"func": ["a"], "result": [{"type": "vm_file", "path": "/a"}], "expected": [{"type": "rule"}]},
}
ROWS: list[dict[str, Any]] = [
    {"task_config": CONFIG, "metadata": None},
    {"metadata": {"metadata": {"task_config": CONFIG}}, "env_config": {"os_type": "Ubuntu"}},
    {"prompt": [{"role": "user", "content": "Do it."}], "target": {"text": "a", "output_path": "C:\\a"}},
    {"task": {"name": "a", "instruction": "i", "level": 1, "infeasible": True}},
    CONFIG,
]


@st.composite
def spoilt_rows(draw: st.DrawFn) -> list[Any]:
    """Rows with some parts, at any depth, replaced, removed or written as text."""

    def spoil(value: Any) -> Any:
        luck = draw(st.integers(0, 24))
        if luck == 0:
            return draw(anything)
        if isinstance(value, dict):
            spoilt = {key: spoil(part) for key, part in value.items() if draw(st.integers(0, 24))}
            return json.dumps(spoilt, default=str) if luck == 1 else spoilt
        return [spoil(part) for part in value] if isinstance(value, list) else value

    return [spoil(row) for row in ROWS]


@fuzzed(60)
@given(spoilt_rows())
@example([{"metadata": "{"}, CONFIG])
@example([{"metadata": "x"}, {1: 2}])
@example([{"task_config": "[" * 5000}])
def test_a_malformed_row_does_not_affect_the_others(rows: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "rows.yaml")
        file.write_text(_dumped([*rows, CONFIG]), encoding="utf-8", errors="surrogatepass")
        found = list(read_tasks(file))
    if len(found) > 1:
        assert isinstance(found[-1], Task)
        assert found[-1].task_id == "imported/a1"


def test_the_unmodified_example_is_accepted() -> None:
    catalogue = load(_dumped({"suite": "s", "tasks": [PROPER]}))
    assert catalogue is not None
    assert len(catalogue) == 1


@pytest.mark.parametrize("levels", [8, 30])
def test_an_alias_bomb_is_rejected(tmp_path: Path, levels: int) -> None:
    file = tmp_path / "suite.yaml"
    file.write_text(alias_bomb(levels), encoding="utf-8")
    with pytest.raises(ConfigError, match="aliases"):
        TaskCatalogue.load([file], include_builtin=False)


def test_every_task_file_of_the_corpus_is_loaded_or_rejected() -> None:
    for data in corpus("tasks"):
        load(data.decode())
