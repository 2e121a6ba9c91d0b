"""The suite of tasks with tools."""

from collections import Counter

from cuaenv.actions import AskUser, CallTool, ToolAction
from envd.base.config import Config
from envd.daemon.suites import load_tasks
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.checkers.base import judge_directly
from envd.tasks.model import Task
from envd.tasks.templates import split_of


def suite() -> list[Task]:
    catalogue = load_tasks(Config.model_validate({"tasks": {"suites": ["builtin:tools"]}}))
    return [task for task in catalogue.list() if task.task_id.startswith("tools/")]


def used(task: Task) -> set[str]:
    return {action.needs for step in task.oracle for action in step if isinstance(action, ToolAction)}


def test_each_group_has_its_number_of_tasks_and_uses_what_it_needs() -> None:
    tasks = suite()
    assert Counter(tag for task in tasks for tag in task.tags) == {"screen": 12, "either": 12, "both": 8, "user": 4}
    for task in tasks:
        screen_count = sum(not isinstance(action, ToolAction) for step in task.oracle[:-1] for action in step)
        match task.tags:
            case ("screen",):
                assert used(task) == set(), task.task_id
            case ("either",):
                assert used(task) <= {"shell", "files"}, task.task_id
                assert used(task), task.task_id
                assert screen_count == 0, task.task_id
            case ("both",):
                assert used(task) == {"mcp"} == set(task.tools), task.task_id
            case _:
                assert "ask_user" in used(task), task.task_id


async def test_the_users_answers_are_those_that_the_oracle_needs() -> None:
    for task in suite():
        if task.user is None:
            continue
        said = [
            await task.user.answer(action.question, (), judge=judge_directly)
            for step in task.oracle
            for action in step
            if isinstance(action, AskUser)
        ]
        assert all(answer != task.user.unknown for answer in said), task.task_id


def test_oracles_call_the_servers_of_the_setup_and_twins_are_in_one_split() -> None:
    for task in suite():
        called = {action.server for step in task.oracle for action in step if isinstance(action, CallTool)}
        assert called == set(task.mcp_servers), task.task_id
    desktop = TaskCatalogue.load()
    for task in suite():
        twin = desktop.find(task.task_id.replace("tools/", "desktop/"))
        if twin is not None:
            assert split_of(task) == split_of(twin), task.task_id
