"""The tasks of an evaluation: those that match a filter, on one side of the training split. And their domains."""

import difflib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

from cuaenv.client import AsyncEnvClient, Task
from cuaenv.problems import without_path
from trainer.config import InputError
from trainer.data.prompts import describe_unrunnable, is_runnable
from trainer.data.split import split as split_tasks
from trainer.data.split import template_id

_INFEASIBLE = "infeasible"
_DOMAIN = "domain:"


SplitName = Literal["all", "train", "held_out"]
"""Side of the split of tasks: both, those that training may use, or those that it may not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A filter of a daemon's tasks. Empty fields filter nothing."""

    task_ids: Sequence[str] = ()
    suites: Sequence[str] = ()
    levels: Sequence[int] = ()
    tags: Sequence[str] = ()
    """A task must have all of these."""
    without_tags: Sequence[str] = ()
    """A task must have none of these."""
    limit: int = 0
    """Number of tasks to sample uniformly with a fixed seed; 0 for all."""


async def served_tasks(client: AsyncEnvClient, *, named: Sequence[str] = (), timeout: timedelta) -> list[Task]:
    """Return all served tasks and the named variants. Raises: EnvError."""
    tasks = await client.list_tasks(timeout=timeout)
    variants = [task_id for task_id in named if template_id(task_id) != task_id]
    return tasks + (await client.list_tasks(task_ids=variants, timeout=timeout) if variants else [])


def choose(
    tasks: Sequence[Task],
    selection: Selection,
    *,
    split: SplitName,
    include_unrunnable: bool = False,
    note: Callable[[str], None] = lambda _text: None,
) -> list[Task]:
    """Return the tasks of an evaluation, in id order.

    The split is that of `trainer data`, over all tasks of the chosen suites; other flags do not change it.

    Args:
        note: Receives a note if tasks match that no host can run.

    Raises:
        InputError: No task remains, or a named one is not served.
        InputError: A level has too few tasks.
    """
    matching = select(_on_side(tasks, selection, split), replace(selection, limit=0))
    named = set(selection.task_ids)
    runnable = [task for task in matching if include_unrunnable or is_runnable(task) or task.task_id in named]
    ids = {task.task_id for task in runnable}
    left_out = [task for task in matching if task.task_id not in ids]
    if not runnable:
        raise InputError(f"no task remains: {describe_unrunnable(left_out)}")
    chosen = select(runnable, selection)
    if left_out:
        note(describe_unrunnable(left_out))
    return chosen


def _on_side(tasks: Sequence[Task], selection: Selection, split: SplitName) -> Sequence[Task]:
    """Return the tasks of the chosen suites on one side of the split. Raises: InputError: A named one is not."""
    in_suites = [task for task in tasks if not selection.suites or task.suite in selection.suites]
    if split == "all" or not in_suites:
        return tasks
    splits = split_tasks(in_suites)
    for task_id in selection.task_ids:
        if splits.get(task_id, split) != split:
            raise InputError(f"{task_id} is in the split {splits[task_id]}; use --split {splits[task_id]} or all")
    return [task for task in in_suites if splits[task.task_id] == split]


def select(tasks: Sequence[Task], selection: Selection) -> list[Task]:
    """Return the selected tasks in id order.

    Raises:
        InputError: A named task is not served, or none remains.
    """
    wanted = set(selection.task_ids)
    missing = sorted(wanted - {task.task_id for task in tasks})
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        near = difflib.get_close_matches(missing[0], [task.task_id for task in tasks], n=3, cutoff=0.7)
        hint = (
            f"did you mean {', '.join(near)}?"
            if near
            else f"it serves {len(tasks)} tasks: run `envd tasks list --envd HOST:PORT`"
        )
        raise InputError(f"the daemon does not serve {', '.join(missing[:5])}{more}; {hint}")
    chosen = [
        task
        for task in sorted(tasks, key=lambda task: task.task_id)
        if (not wanted or task.task_id in wanted)
        and (not selection.suites or task.suite in selection.suites)
        and (not selection.levels or task.level in selection.levels)
        and set(selection.tags) <= set(task.tags)
        and not set(selection.without_tags) & set(task.tags)
    ]
    if not chosen:
        suites = ", ".join(sorted({task.suite for task in tasks})) or "none"
        raise InputError(f"none of the daemon's {len(tasks)} tasks matches (its suites: {suites}); relax the filters")
    if 0 < selection.limit < len(chosen):
        chosen = sorted(random.Random(0).sample(chosen, selection.limit), key=lambda task: task.task_id)  # noqa: S311
    return chosen


def read_task_ids(path: Path) -> list[str]:
    """Return the ids in a file: one per line; blank lines and comments after `#` are ignored.

    Raises:
        InputError: It cannot be read, or is empty.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"tasks file {path} cannot be read: {without_path(error)}") from error
    ids = [line for line in (line.partition("#")[0].strip() for line in lines) if line]
    if not ids:
        raise InputError(f"tasks file {path} names no task; write one id per line")
    return list(dict.fromkeys(ids))


def is_infeasible(task: Task) -> bool:
    return _INFEASIBLE in task.tags


def domain_of(task: Task) -> str:
    """Return a task's domain: its tag `domain:X`, else the middle of its id, else its first tag."""
    for tag in task.tags:
        if tag.startswith(_DOMAIN):
            return tag.removeprefix(_DOMAIN)
    parts = task.task_id.split("/")
    if len(parts) > 2:
        return parts[1]
    return next((tag for tag in task.tags if tag != _INFEASIBLE), "other")
