"""Select the held-out tasks. Pure: the same seed gives the same split for any order of tasks."""

import logging
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal

from cuaenv.client import Task
from trainer.config import InputError
from trainer.replay.trajectory import base_id

logger = logging.getLogger(__name__)

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
"""The service's terms, see `cuaenv.client.Task.split`."""


def split(tasks: Iterable[Task], *, share: float = 0.2, seed: int = 42) -> Mapping[str, Split]:
    """Return the split of each task id, by the tasks' levels, instructions and own splits.

    If a suite holds out some of its tasks itself, its split is used for all; the log names each level that it leaves
    out of one side. Otherwise a share of each level is held out, at least one task; a level with a single task is used
    for training only, with a warning in the log. Chunks of a task, variants of a template, and tasks with equal
    instructions stay together: who trains on one has seen the other.

    Args:
        tasks: All tasks; equal ids count once.
        share: Share of the tasks of a level, rounded; 0 to hold out none.

    Raises:
        InputError: One side would be empty, or a level would be on one side only.
    """
    units = _units(tasks)
    if share == 0:
        return {task.task_id: "train" for members in units.values() for task in members}
    by_level: dict[int, list[str]] = defaultdict(list)
    for name, members in units.items():
        by_level[max(task.level for task in members)].append(name)
    held_out = {name for name, members in units.items() if any(task.split == "held_out" for task in members)}
    is_own = bool(held_out)
    if not is_own:
        for level, names in by_level.items():
            if len(names) == 1:
                logger.warning("level %d has a single task, %s: it is used for training only", level, names[0])
                continue
            # Not for secrets. Each level has its own generator, so that more tasks in one do not reshuffle the others.
            random.Random(f"{seed}/{level}").shuffle(ordered := sorted(names))  # noqa: S311
            held_out.update(ordered[: max(1, round(share * len(ordered)))])
    for level, names in sorted(by_level.items()):
        count = len(held_out.intersection(names))
        if is_own and not 0 < count < len(names):
            logger.info("level %d: the suite itself holds out %d of its %d tasks", level, count, len(names))
        elif len(names) > 1 and not 0 < count < len(names):
            raise InputError(
                f"level {level}: {count} of {len(names)} tasks would be held out, but each level needs tasks on both"
                " sides; add tasks of that level, remove it, or hold out none (a share of 0)"
            )
    if units and not 0 < len(held_out) < len(units):
        raise InputError(
            f"{len(held_out)} of {len(units)} tasks would be held out, because no level has two tasks; add tasks, or"
            " hold out none (a share of 0)"
        )
    return {
        task.task_id: "held_out" if name in held_out else "train" for name, members in units.items() for task in members
    }


def template_id(task_id: str) -> str:
    """Return a variant's template, which is its id without `?seed=N`; other ids are returned unchanged."""
    return task_id.partition("?")[0]


def _units(tasks: Iterable[Task]) -> dict[str, list[Task]]:
    """Group chunks and variants of one task, and tasks of one text; a unit has the name of its first template."""
    unit_of: dict[str, str] = {}
    units: dict[str, list[Task]] = {}
    for task in sorted(set(tasks), key=lambda task: task.task_id):
        text = " ".join(task.instruction.casefold().split())
        # Named by template, so that adding or removing variants does not move any task to the other side.
        template = template_id(base_id(task.task_id))
        keys = [f"id {template}", *([f"text {text}"] if text else [])]
        names = sorted({unit_of[key] for key in keys if key in unit_of}) or [template]
        members = [member for name in names for member in units.pop(name, [])]
        units[names[0]] = [*members, task]
        unit_of.update(dict.fromkeys(keys, names[0]))
        unit_of.update({key: names[0] for key, name in unit_of.items() if name in names})
    return units
