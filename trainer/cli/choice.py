"""Choose the tasks of an evaluation: those that match the flags, on one side of the training split."""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from cuaenv.client import AsyncEnvClient, Task
from trainer.cli.options import LIST_TIMEOUT
from trainer.data.prompts import describe_unrunnable, is_runnable, splittable
from trainer.data.split import split as split_tasks
from trainer.data.split import template_id
from trainer.evaluate.selection import Selection, SelectionError, select


class SplitName(Enum):
    """Side of the train/held-out split."""

    #: Both sides.
    ALL = "all"
    #: Tasks that training may use.
    TRAIN = "train"
    #: Tasks that training may not use.
    HELD_OUT = "held_out"


async def served_tasks(client: AsyncEnvClient, *, named: Sequence[str] = ()) -> list[Task]:
    """Return all served tasks and the named variants. Raises: EnvError."""
    tasks = await client.list_tasks(timeout=LIST_TIMEOUT)
    variants = [task_id for task_id in named if template_id(task_id) != task_id]
    return tasks + (await client.list_tasks(task_ids=variants, timeout=LIST_TIMEOUT) if variants else [])


class Choice(NamedTuple):
    """The tasks of an evaluation, in id order."""

    tasks: list[Task]
    left_out: list[Task]
    """Tasks that match and that no host can run."""


def choose(
    tasks: Sequence[Task], selection: Selection, *, split: SplitName, include_unrunnable: bool = False
) -> Choice:
    """Choose tasks.

    The split is that of `trainer data`, over all tasks of the chosen suites; other flags do not change it.

    Raises:
        SelectionError: No task remains, or a named one is not served.
        CannotSplit: A level has too few tasks.
    """
    matching = _choose(tasks, replace(selection, limit=0), split=split)
    runnable = [
        task for task in matching if include_unrunnable or is_runnable(task) or task.task_id in selection.task_ids
    ]
    ids = {task.task_id for task in runnable}
    left_out = [task for task in matching if task.task_id not in ids]
    if not runnable:
        raise SelectionError(f"no task remains: {describe_unrunnable(left_out)}")
    return Choice(select(runnable, selection), left_out)


def _choose(tasks: Sequence[Task], selection: Selection, *, split: SplitName) -> list[Task]:
    if split is SplitName.ALL:
        return select(tasks, selection)
    in_suites = [task for task in tasks if not selection.suites or task.suite in selection.suites]
    if not in_suites:
        return select(tasks, selection)
    splits = split_tasks([splittable(task) for task in in_suites])
    for task_id in selection.task_ids:
        if splits.get(task_id, split.value) != split.value:
            raise SelectionError(f"{task_id} is in the split {splits[task_id]}; use --split {splits[task_id]} or all")
    return select([task for task in tasks if splits.get(task.task_id) == split.value], selection)
