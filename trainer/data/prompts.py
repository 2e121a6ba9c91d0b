"""Tasks as rows for slime's `--prompt-data`: `--input-key prompt --label-key label --metadata-key metadata`.

The prompt is the bare instruction: `trainer.agent.prompts` builds the real one when the first screenshot is available.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from cuaenv.client import Task
from trainer.config import InputError
from trainer.data.split import Split, split

#: Of a variant, see `cuaenv.client.Task.variant_count`.
_MAX_SEED = 2**31 - 1
#: Tasks and variants of one data set; all variants of a template would not fit into memory.
_MAX_TASK_COUNT = 1_000_000


def variant_ids(tasks: Iterable[Task], *, count: int, seed: int = 42) -> list[str]:
    """Return the ids of tasks and of sampled variants of their templates, such as `desktop/delete-line?seed=17`.

    The variants of one task do not depend on the other tasks.

    Args:
        count: Variants per task, the plain one included; fewer if the task has fewer. Several seeds can yield the same
            variant.

    Raises:
        InputError: There would be more than a million.
    """
    tasks = sorted(tasks, key=lambda task: task.task_id)
    if (total := sum(min(count, task.variant_count) for task in tasks)) > _MAX_TASK_COUNT:
        raise InputError(f"{count} variants: {total} tasks in all; ask for fewer, at most {_MAX_TASK_COUNT} in all")
    ids: list[str] = []
    for task in tasks:
        # Not for secrets.
        seeds = random.Random(f"{seed}/{task.task_id}").sample(  # noqa: S311
            range(_MAX_SEED + 1), min(count, task.variant_count) - 1
        )
        ids += [task.task_id, *(f"{task.task_id}?seed={number}" for number in sorted(seeds))]
    return ids


def is_runnable(task: Task) -> bool:
    """Whether a host can run a task, as far as is known."""
    return task.runnable is not False


def describe_unrunnable(tasks: Sequence[Task]) -> str:
    """Describe tasks that cannot run, with the number of tasks for each kind of obstacle."""
    kinds = Counter(kind for task in tasks for kind in {obstacle.partition(":")[0] for obstacle in task.obstacles})
    reasons = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
    return (
        f"left out {len(tasks)} tasks that the daemon's host cannot run ({reasons or 'no reason given'});"
        " `envd osworld lint` on that host lists the reasons, --include-unrunnable keeps the tasks"
    )


def prompt_rows(
    tasks: Sequence[Task], *, share: float = 0.2, seed: int = 42, include_unrunnable: bool = True
) -> dict[Split, list[dict[str, Any]]]:
    """Return rows by split, in id order. Tasks that are left out are split too, so it is the same on all hosts."""
    splits = split(tasks, share=share, seed=seed)
    rows: dict[Split, list[dict[str, Any]]] = {"train": [], "held_out": []}
    for task in sorted(tasks, key=lambda task: task.task_id):
        if include_unrunnable or is_runnable(task):
            rows[splits[task.task_id]].append(prompt_row(task, split=splits[task.task_id]))
    return rows


def prompt_row(task: Task, **metadata: Any) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": task.instruction}],
        "label": task.task_id,
        "metadata": {"task_id": task.task_id, **task_metadata(task), **metadata},
    }


def task_metadata(task: Task) -> dict[str, Any]:
    """Return the properties of a task that rows and trajectories carry."""
    return {"suite": task.suite, "level": task.level, "os": task.os, "tags": list(task.tags), "suite_split": task.split}
