"""OSWorld's task files as tasks, and the files that each would download."""

import json
from pathlib import Path
from typing import Any

import pytest

from envd.base.errors import TaskNotFound
from envd.hypervisor.machine import GuestOs
from envd.integrations.osworld.catalogue import desktop_task, osworld_tasks
from envd.integrations.osworld.downloads import asset_urls
from envd.integrations.osworld.files import read_files
from envd.integrations.osworld.tasks import OsworldEvaluator
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.fields import AssetRef
from envd.tasks.model import Task

TASK: dict[str, Any] = {
    "id": "0001-a",
    "snapshot": "os",
    "instruction": "Do it.",
    "config": [{"type": "launch", "parameters": {"command": ["gimp"]}}],
    "related_apps": ["gimp"],
    "evaluator": {
        "func": "exact_match",
        "result": {"type": "vm_command_line", "command": "true"},
        "expected": {"type": "rule", "rules": {"expected": ""}},
        "_note": "to be left",
    },
}


def write(directory: Path, task: dict[str, Any], *, examples: str = "examples", domain: str = "gimp") -> None:
    path = directory / examples / domain / f"{task['id']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(task))


def test_a_task_keeps_osworlds_setup_and_evaluator(tmp_path: Path) -> None:
    write(tmp_path, TASK)
    task = TaskCatalogue(osworld_tasks(tmp_path)).get("osworld/0001-a")
    assert (task.instruction, task.image, task.os, task.tags) == ("Do it.", "osworld", GuestOs.LINUX, ("gimp",))
    assert [verb.model_dump(include={"kind", "steps"}) for verb in task.setup] == [
        {"kind": "osworld", "steps": tuple(TASK["config"])}
    ]
    assert isinstance(task.checker, OsworldEvaluator)
    assert task.checker.to_osworld() == {
        "func": "exact_match",
        "conj": "and",
        "result": TASK["evaluator"]["result"],
        "expected": TASK["evaluator"]["expected"],
        "postconfig": [],
    }


def test_one_id_for_two_systems_yields_two_tasks_in_the_domains_of_their_directories(tmp_path: Path) -> None:
    write(tmp_path, TASK)
    write(tmp_path, TASK, examples="examples_windows", domain="word")
    found = [task for task in osworld_tasks(tmp_path) if isinstance(task, Task)]
    tasks = {task.task_id: (task.os, task.domain) for task in found}
    assert tasks["osworld/0001-a"] == (GuestOs.LINUX, "gimp")
    assert tasks["osworld-windows/0001-a"] == (GuestOs.WINDOWS, "word")


def test_the_task_of_desktop_env_is_found_by_its_id_and_not_listed(tmp_path: Path) -> None:
    write(tmp_path, TASK)
    tasks = TaskCatalogue([]).with_tasks(osworld_tasks(tmp_path), hidden=[desktop_task()])
    assert tasks.get("osworld/desktop").setup == ()
    assert [task.task_id for task in tasks.list()] == ["osworld/0001-a"]


def test_an_infeasible_task_has_no_checker(tmp_path: Path) -> None:
    write(tmp_path, {**TASK, "evaluator": {"func": "infeasible"}, "config": None})
    task = TaskCatalogue(osworld_tasks(tmp_path)).get("osworld/0001-a")
    assert (task.infeasible, task.checker, task.setup) == (True, None, ())


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"instruction": None}, "instruction must be text"),
        ({"evaluator": {}}, "'func' is missing"),
        ({"evaluator": {"func": 3}}, "func must be text or a list"),
        ({"evaluator": "a directory"}, "evaluator in it, must be objects"),
        ({"config": [{"type": "launch"}]}, "'parameters' is missing"),
        ({"config": ["launch"]}, "a step must be an object"),
        ({"evaluator": {**TASK["evaluator"], "surprise": 1}}, "unknown key"),
    ],
)
def test_an_invalid_task_file_is_left_out_by_name(tmp_path: Path, change: dict[str, Any], fault: str) -> None:
    write(tmp_path, TASK)
    (tmp_path / "examples" / "gimp" / "0001-b.json").write_text(json.dumps({**TASK, "id": "0001-b", **change}))
    catalogue = TaskCatalogue(osworld_tasks(tmp_path))
    assert [task.task_id for task in catalogue.list()] == ["osworld/0001-a"]
    [problem] = catalogue.problems
    assert problem.where.endswith("0001-b.json")
    assert fault in problem.message
    with pytest.raises(TaskNotFound, match="left out"):
        catalogue.get("osworld/0001-b")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", "line 1 column 2"),
        ("[]", "must be objects"),
        ("3", "must be objects"),
        ('{"id": "a", "instruction": "b"}', "'evaluator' is missing"),
    ],
)
def test_a_file_that_is_not_a_task_is_left_out_by_name(tmp_path: Path, content: str, fault: str) -> None:
    write(tmp_path, TASK)
    (tmp_path / "examples" / "gimp" / "broken.json").write_text(content)
    files, [problem] = read_files(tmp_path)
    assert [file.task_id for file in files] == ["osworld/0001-a"]
    assert "broken.json" in problem.where
    assert fault in problem.message


def test_of_two_files_with_one_id_the_first_is_served(tmp_path: Path) -> None:
    write(tmp_path, TASK)
    write(tmp_path, {**TASK, "instruction": "Another."}, domain="vlc")
    catalogue = TaskCatalogue(osworld_tasks(tmp_path))
    assert [task.instruction for task in catalogue.list()] == ["Do it."]
    assert "duplicate id" in str(catalogue.problems[0])


def test_downloads_have_the_names_that_osworld_looks_for() -> None:
    steps = [
        {
            "type": "download",
            "parameters": {"files": [{"url": "https://example.org/a.png", "path": "/home/user/x.png"}]},
        }
    ]
    evaluator = {
        "postconfig": steps,
        "expected": [
            None,
            {"type": "rule", "rules": {}},
            {"type": "cloud_file", "path": "https://example.org/gold", "dest": "gold.xlsx"},
            {"type": "cloud_file", "multi": True, "path": ["https://a/1", "https://a/2"], "dest": ["one", "two"]},
        ],
    }
    # uuid5 of the URL in the URL namespace, as RFC 4122 has it.
    assert asset_urls(steps, evaluator) == {
        "b562a085-c33f-548e-adbe-26e29042fc3f_x.png": "https://example.org/a.png",
        "gold.xlsx": "https://example.org/gold",
        "one": "https://a/1",
        "two": "https://a/2",
    }


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../up"])
def test_a_name_outside_the_cache_directory_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="is not a file name below a directory"):
        asset_urls((), {"expected": {"type": "cloud_file", "path": "https://example.org/x", "dest": name}})


def test_the_downloads_of_an_osworld_task_are_listed_as_assets(tmp_path: Path) -> None:
    download = {"type": "download", "parameters": {"files": [{"url": "https://example.org/a", "path": "/home/user/a"}]}}
    expected = {"type": "cloud_file", "path": "https://example.org/b", "dest": "b"}
    write(tmp_path, {**TASK, "config": [download], "evaluator": {**TASK["evaluator"], "expected": expected}})
    task = TaskCatalogue(osworld_tasks(tmp_path)).get("osworld/0001-a")
    assert list(task.downloads()) == [AssetRef("https://example.org/a"), AssetRef("https://example.org/b")]
