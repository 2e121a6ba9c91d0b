"""The notation of actions in oracles: parsing and writing."""

import json
import re

import pytest
from typer.testing import CliRunner

from cuaenv.actions import Click, Drag
from envd.cli.app import app
from envd.cli.tasks_oracles import oracle_line
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.model import Task
from envd.tasks.oracle import Aimed, Target, WaitFor, parse_action, write_action
from tests.support.server import load_fake_tasks


@pytest.mark.parametrize(
    "form",
    [
        {"window": {"title": "Save as", "class": "notepad"}},
        {"file": "C:\\a b.txt", "timeout_s": 5.0},
        {"process": "notepad", "absent": True},
    ],
)
def test_a_written_condition_is_parsed_back_also_through_json(form: dict[str, object]) -> None:
    condition = parse_action({"wait_for": form})
    assert isinstance(condition, WaitFor)
    assert json.loads(json.dumps(write_action(condition))) == {"wait_for": form}


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({}, "give exactly one of window, file and process"),
        ({"window": {"title": "x"}, "file": "/a"}, "give exactly one of window, file and process"),
        ({"window": {}}, "wait_for.window"),
        ({"file": "a.txt"}, "wait_for.file"),
        ({"process": ""}, "wait_for.process"),
        ({"file": "/a", "timeout_s": 0}, "wait_for.timeout_s"),
        ({"file": "/a", "gone": True}, "wait_for.gone"),
    ],
)
def test_an_invalid_condition_is_rejected_with_its_field(form: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_action({"wait_for": form})


TARGET = {"window": "^a", "role": "push-button", "name": "Save", "x": 3}


@pytest.mark.parametrize(
    ("form", "aimed"),
    [
        (
            {"click": {"x": 3, "y": 4, "target": TARGET}},
            Aimed(Click(3, 4), Target(window="^a", role="push-button", name="Save", x=3)),
        ),
        (
            {"drag": {"x": 1, "y": 2, "to_x": 3, "to_y": 4, "to_target": {"name": "Trash"}}},
            Aimed(Drag(start_x=1, start_y=2, end_x=3, end_y=4), to_target=Target(name="Trash")),
        ),
    ],
)
def test_a_target_is_written_and_left_out_for_other_players(form: dict[str, object], aimed: Aimed) -> None:
    assert parse_action(form) == aimed
    assert json.loads(json.dumps(write_action(aimed))) == form
    solved = load_fake_tasks().get("fake/enable").model_copy(update={"oracle": ((aimed,),)})
    assert oracle_line(solved)["steps"] == [[write_action(aimed.action)]]


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"click": {"x": 3, "y": 4, "target": {}}}, "click.target: give window, role or name"),
        ({"click": {"x": 3, "y": 4, "target": {"window": "("}}}, "click.target.window: not a regular expression"),
        ({"click": {"x": 3, "y": 4, "target": {"name": "a", "x": -1}}}, "click.target.x"),
        ({"click": {"x": 3, "y": 4, "target": {"title": "a"}}}, "click.target.title"),
        ({"click": {"x": 3, "y": 4, "to_target": {"name": "a"}}}, "to_target: the action has no such position"),
        ({"click": {"target": {"name": "a"}}}, "target: the action has no such position"),
        ({"run_shell": {"command": "ls", "target": {"name": "a"}}}, "target: the action has no such position"),
    ],
)
def test_an_invalid_target_is_rejected_with_its_field(form: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_action(form)


def test_oracles_are_handed_out_as_json_lines() -> None:
    result = CliRunner().invoke(app, ["tasks", "oracles", "--hypervisor", "fake"])
    assert result.exit_code == 0
    lines = {line["task_id"]: line for line in map(json.loads, result.stdout.splitlines())}
    assert {id for id in lines if id.startswith("fake/")} == {task.task_id for task in load_fake_tasks().list()}
    assert lines["fake/count-to-five"]["steps"] == [
        [{"click": {"x": 819, "y": 100, "count": 3}}],
        [{"click": {"x": 819, "y": 100, "count": 2}}],
        [{"done": ""}],
    ]
    for task in load_fake_tasks().list():
        read = tuple(tuple(map(parse_action, step)) for step in lines[task.task_id]["steps"])
        assert read == task.oracle


def test_a_suite_without_oracles_is_refused() -> None:
    result = CliRunner().invoke(app, ["tasks", "oracles", "--hypervisor", "fake", "--suite", "other"])
    assert (result.exit_code != 0, result.stdout) == (True, "")
    assert "--suite other: no task of it has an oracle; choose one of drawn, escape, fake, long" in " ".join(
        result.stderr.split()
    )


def test_oracles_of_variants_are_printed_by_seed() -> None:
    chosen = ["tasks", "oracles", "--hypervisor", "fake", "--suite", "drawn", "--seeds", "3:5"]
    lines = [json.loads(line) for line in CliRunner().invoke(app, chosen).stdout.splitlines()]
    assert len(lines) == 48
    assert {line["task_id"].partition("?")[2] for line in lines} == {"seed=3", "seed=4"}
    assert {line["split"] for line in lines} == {"train", "held_out"}


def test_oracles_of_named_tasks_are_printed_without_building_others(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    get = TaskCatalogue.get

    def noted(self: TaskCatalogue, task_id: str) -> Task:
        built.append(task_id)
        return get(self, task_id)

    monkeypatch.setattr(TaskCatalogue, "get", noted)
    names = [json.loads(line)["task_id"] for line in printed("drawn/press", "--seeds", "3:5").splitlines()]
    assert names == ["drawn/press?seed=3", "drawn/press?seed=4"]
    assert {task_id.partition("?")[0] for task_id in built} == {"drawn/press"}
    assert json.loads(printed("drawn/press?seed=7"))["task_id"] == "drawn/press?seed=7"
    result = CliRunner().invoke(app, ["tasks", "oracles", "--hypervisor", "fake", "drawn/prss"])
    assert (result.exit_code != 0, "did you mean drawn/press" in " ".join(result.stderr.split())) == (True, True)


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["tasks", "oracles", "--hypervisor", "fake", *arguments])
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("seeds", ["3", "5:3", "a:b", "0:2147483649"])
def test_a_malformed_range_of_seeds_is_refused(seeds: str) -> None:
    result = CliRunner().invoke(app, ["tasks", "oracles", "--hypervisor", "fake", "--seeds", seeds])
    assert result.exit_code != 0
    assert "not a range of seeds; give FIRST:END" in result.stderr
