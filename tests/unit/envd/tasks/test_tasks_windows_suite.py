"""The Windows suite: 47 tasks as published and 6 twins; right files score 1 and empty guests 0."""

import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

import envd.cli.app
from cuaenv.actions import Action, Click, Done, Drag, Move, PressKeys, Scroll, TypeText, Wait
from cuaenv.results import CommandResult
from envd.base.config_sources import load
from envd.base.errors import ConfigError
from envd.cli.tasks import app
from envd.daemon.suites import load_tasks, with_suites
from envd.hypervisor.machine import GuestOs
from envd.tasks.checkers.graded_text import GradedText
from envd.tasks.checkers.programs import Command
from envd.tasks.evaluate import evaluate
from envd.tasks.model import Task
from envd.tasks.oracle import WaitFor, split_step, without_target
from tests.support.memory_desktop import MemoryDesktop

TASKS = load_tasks(load(environ={"ENVD_TASKS__SUITES": "builtin:windows"})).list()
TASKS = tuple(task for task in TASKS if task.task_id.startswith("windows/"))

#: Right files for the checkers without a text.
ANSWERS = {
    "date_format": "2031-05-14",
    "has_windows_dirs": "PerfLogs\nProgram Files\nUsers\nWindows",
    "non_empty": "WIN-7",
    "has_step1_step2": "Step1\nStep2",
}


#: Twins of tasks for PowerShell, for the command prompt.
TWINS = {
    "cmd-date": "powershell-date",
    "cmd-directories": "powershell-directories",
    "cmd-host-name": "powershell-host-name",
    "cmd-sum": "powershell-sum",
    "cmd-two-steps": "two-steps",
    "cmd-product": "number-to-product",
}
#: Twins whose file is compared with what the computer itself says.
COMPARED = [task for task in TASKS if isinstance(task.checker, Command)]
GRADED = [task for task in TASKS if task not in COMPARED]
PUBLISHED = [task for task in TASKS if task.task_id.removeprefix("windows/") not in TWINS]


def actions(task: Task) -> list[Action]:
    return [without_target(action) for step in task.oracle for action in split_step(step)[0]]


def conditions(task: Task) -> list[WaitFor]:
    return [condition for step in task.oracle for condition in split_step(step)[1]]


def checker_of(task: Task) -> GradedText:
    assert isinstance(task.checker, GradedText)
    return task.checker


def path_of(task: Task) -> str:
    """Return the file that a task asks for."""
    return task.checker.argv[-1].split()[-1] if isinstance(task.checker, Command) else checker_of(task).path


def test_the_suite_has_the_published_shape() -> None:
    assert Counter(task.level for task in PUBLISHED) == {1: 30, 2: 8, 3: 6, 4: 3}
    assert Counter(checker_of(task).kind for task in PUBLISHED) == {
        "exact_match": 43,
        "date_format": 1,
        "has_windows_dirs": 1,
        "non_empty": 1,
        "has_step1_step2": 1,
    }
    assert all(task.os is GuestOs.WINDOWS for task in TASKS)
    assert len({checker_of(task).path for task in TASKS if task.level == 1}) == 1
    assert len({checker_of(task).path for task in TASKS if task.level == 2}) == 8
    assert Counter(task.split for task in PUBLISHED) == {"train": 37, "held_out": 10}
    for split in ("train", "held_out"):
        assert {task.level for task in TASKS if task.split == split} == {1, 2, 3, 4}
    assert len({task.instruction for task in TASKS}) == 53


def test_tasks_for_powershell_need_it_and_six_have_a_twin_with_the_same_answer_in_the_same_split() -> None:
    by_name = {task.task_id.removeprefix("windows/"): task for task in TASKS}
    needy = {name for name, task in by_name.items() if task.needs}
    assert needy == {name for name, task in by_name.items() if "PowerShell" in task.instruction}
    assert len(needy) == 9
    assert all(task.needs in ((), ("powershell",)) for task in TASKS)
    for twin, name in TWINS.items():
        one, other = by_name[twin], by_name[name]
        assert (one.level, one.split) == (other.level, other.split)
        assert path_of(one) == path_of(other)
        assert one in COMPARED or one.checker == other.checker


def test_an_oracle_waits_for_conditions_and_never_for_a_time() -> None:
    for task in TASKS:
        assert not any(isinstance(action, Wait) for action in actions(task)), task.task_id
        # A step after which the next keys would go to another window, or the result would be incomplete.
        waits = [step for step in task.oracle if any(action == PressKeys(("enter",)) for action in step)]
        assert waits, task.task_id
        in_shell = [step for step in waits if not split_step(step)[1]]
        assert len(in_shell) <= 2, f"{task.task_id}: only commands whose prompt stays open need no condition"
        assert any(path_of(task) == condition.file for condition in conditions(task)), task.task_id


def test_an_oracle_ends_every_shell_and_waits_until_its_window_has_closed() -> None:
    for task, shell in itertools.product(TASKS, ("powershell", "cmd")):
        opened = [index for index, step in enumerate(task.oracle) if TypeText(shell) in step]
        ended = [
            index
            for index, step in enumerate(task.oracle)
            if any(isinstance(action, TypeText) and action.text.endswith(("; exit", "& exit")) for action in step)
            and any(condition.window and condition.absent for condition in split_step(step)[1])
        ]
        assert len(opened) == len(ended) * (shell in task.tags), task.task_id


def test_an_instruction_names_everything_that_is_checked() -> None:
    for task in TASKS:
        assert path_of(task) in task.instruction, task.task_id
        if task.level <= 2:
            checker = checker_of(task)
            assert checker.text is not None, task.task_id
            assert all(line in task.instruction for line in checker.text.splitlines()), task.task_id


def test_an_oracle_uses_the_keyboard_and_types_what_is_asked_for() -> None:
    for task in TASKS:
        assert isinstance(actions(task)[-1], Done), task.task_id
        assert not any(isinstance(action, Click | Drag | Scroll | Move) for action in actions(task)), task.task_id
        typed = "".join(action.text for action in actions(task) if isinstance(action, TypeText))
        assert path_of(task) in typed, task.task_id


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
async def test_the_right_file_scores_one_and_an_empty_guest_zero(encoding: str) -> None:
    for task in GRADED:
        checker = checker_of(task)
        desktop = MemoryDesktop()
        desktop.answers["powershell.exe",] = CommandResult(exit_code=0, stdout=b"absent\r\n", stderr=b"")
        assert (await evaluate(task, desktop, last_action=Done(), timeout_s=60.0)).score == 0.0, task.task_id
        text = ANSWERS.get(checker.kind) or checker.text or ""
        data = (text.replace("\n", "\r\n") + "\r\n").encode(encoding)
        desktop.files[checker.path] = data
        desktop.answers["powershell.exe",] = CommandResult(exit_code=0, stdout=b"%d\r\n" % len(data), stderr=b"")
        assert (await evaluate(task, desktop, last_action=Done(), timeout_s=60.0)).score == 1.0, task.task_id


@pytest.mark.parametrize(
    ("name", "computer", "right", "wrong"),
    [
        ("cmd-host-name", "WIN-7", ["WIN-7", "win-7 ", "\r\nWIN-7"], ["", "WIN", "other", "WIN-7 or WIN-8", "x\r\nx"]),
        (
            "cmd-date",
            "Fri 03/07/2031",
            ["2031-03-07", "2031-03-07 "],
            ["", "2031-05-14", "2031-07-03", "03/07/2031", "2031-03-07 or 2031-03-08"],
        ),
    ],
)
async def test_a_name_or_date_is_the_computers_own(
    name: str, computer: str, right: list[str], wrong: list[str]
) -> None:
    (task,) = (task for task in COMPARED if task.task_id == f"windows/{name}")
    desktop = MemoryDesktop()
    for score, texts in ((1.0, right), (0.0, wrong)):
        for text in texts:
            output = f"{computer}\r\n{text}\r\n".encode()
            desktop.answers["cmd.exe",] = CommandResult(exit_code=0, stdout=output, stderr=b"")
            assert (await evaluate(task, desktop, last_action=Done(), timeout_s=60.0)).score == score, text
    desktop.answers["cmd.exe",] = CommandResult(exit_code=1, stdout=f"{computer}\r\n".encode(), stderr=b"")
    assert (await evaluate(task, desktop, last_action=Done(), timeout_s=60.0)).score == 0.0


def test_the_suite_is_served_only_if_configured(tmp_path: Path) -> None:
    served = load_tasks(load(flags={"cache_dir": tmp_path})).list()
    assert all(task.os is GuestOs.LINUX for task in served)
    with pytest.raises(ConfigError, match=r"'linux'; .*windows"):
        load_tasks(load(environ={"ENVD_TASKS__SUITES": "builtin:linux"}))


def test_verify_serves_a_built_in_suite_that_it_is_asked_for(tmp_path: Path) -> None:
    settings = load(flags={"cache_dir": tmp_path, "tasks.suites": ["/a/one.yaml"]})
    named = with_suites(settings, ["windows", "desktop", "windows"])
    assert named.tasks.suites == ("/a/one.yaml", "builtin:windows")
    assert with_suites(named, ["windows"]).tasks.suites == named.tasks.suites


@pytest.mark.parametrize("name", ["windows", "windows/", "windows/notepad-quotes"])
def test_a_task_loads_its_built_in_suite(name: str) -> None:
    assert with_suites(load(), [name]).tasks.suites == ("builtin:windows",)
    from_file = load(flags={"tasks.suites": ["/a/windows.yaml"]})
    assert with_suites(from_file, [name]) == from_file


def test_tasks_of_a_suite_are_listed_and_shown_by_name(tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, ["list", "--suite", "windows", "--json"])
    ids = {task["task_id"] for task in json.loads(listed.stdout)["tasks"]}
    assert "windows/notepad-quotes" in ids
    assert {task_id.partition("/")[0] for task_id in ids} == {"windows"}
    assert CliRunner().invoke(app, ["show", "windows/notepad-quotes"]).exit_code == 0
    unknown = CliRunner().invoke(app, ["list", "--suite", "nosuch"])
    assert "suite 'nosuch' not found" in " ".join(unknown.output.split())


@pytest.mark.parametrize(
    ("suite", "error"),
    [
        ("windows", "the tasks need an image with windows, and there is none; use --image"),
        ("macos", "suite 'macos' not found"),
        ("desktp", "suite 'desktp' not found; did you mean desktop?"),
    ],
)
def test_verify_finds_the_tasks_of_a_suite_by_its_name(tmp_path: Path, suite: str, error: str) -> None:
    words = ["tasks", "verify", "--suite", suite, "--cache-dir", str(tmp_path), "--state-dir", str(tmp_path), "--json"]
    shown = CliRunner().invoke(envd.cli.app.app, words, prog_name="envd", env={"COLUMNS": "200"})
    assert shown.exit_code != 0
    assert error in " ".join(shown.output.split())


def test_the_page_has_the_number_of_tasks_of_each_level_and_split() -> None:
    page = Path(__file__).parents[4].joinpath("docs/windows.md").read_text()
    rows = re.findall(r"^\| (\d) \| (\d+) \| (\d+|-) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 6
    for level, count, held_out_count, text in rows:
        tasks = [task for task in TASKS if task.level == int(level) and ("cmd" in task.tags) == ("cmd-*" in text)]
        held_out = [task for task in tasks if task.split == "held_out"]
        assert (len(tasks), len(held_out)) == (int(count), int(held_out_count.replace("-", "0"))), text
    assert f"{len(TASKS)} tasks" in page
