"""Which of a daemon's tasks are evaluated: those that flags ask for, on one side of the split that training knows."""

from collections.abc import Sequence
from enum import Enum

from trainer.client import Task
from trainer.data.prompts import splittable
from trainer.data.split import split as split_tasks
from trainer.evaluate.selection import Selection, select


class SplitName(Enum):
    """Which tasks, by whether training may see them."""

    #: As if there were no split.
    ALL = "all"
    #: What training may see.
    TRAIN = "train"
    #: What it may not.
    HELD_OUT = "held-out"


def choose(tasks: Sequence[Task], selection: Selection, *, split: SplitName) -> list[Task]:
    """Return the chosen tasks in id order.

    The split is the one of `trainer data`, over all tasks of the chosen suites, as the data set for training was split:
    what other flags leave of them does not move it.

    Raises:
        SelectionError: None are left, or one that was named is not served.
        CannotSplit: A level has too few tasks.
    """
    if split is SplitName.ALL:
        return select(tasks, selection)
    splits = split_tasks([splittable(task) for task in tasks if not selection.suites or task.suite in selection.suites])
    return select([task for task in tasks if splits.get(task.task_id) == split.value], selection)
