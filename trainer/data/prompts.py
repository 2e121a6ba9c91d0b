"""Tasks as rows for slime's `--prompt-data`: `--input-key prompt --label-key label --metadata-key metadata`.

The prompt is the bare instruction: the real one is made by `trainer.agent.prompts` when the first screen is there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.client import Task
from trainer.data.split import Split, Splittable, split


def splittable(task: Task) -> Splittable:
    """Return what a split looks at."""
    return Splittable(task_id=task.task_id, text=task.instruction, level=task.level, suite_split=task.split)


def prompt_rows(tasks: Sequence[Task], *, share: float = 0.2, seed: int = 42) -> dict[Split, list[dict[str, Any]]]:
    """Return rows by split, in id order.

    Raises:
        CannotSplit: See `split`.
    """
    splits = split(map(splittable, tasks), share=share, seed=seed)
    rows: dict[Split, list[dict[str, Any]]] = {"train": [], "held-out": []}
    for task in sorted(tasks, key=lambda task: task.task_id):
        rows[splits[task.task_id]].append(_row(task, splits))
    return rows


def _row(task: Task, splits: Mapping[str, Split]) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": task.instruction}],
        "label": task.task_id,
        "metadata": {
            "task_id": task.task_id,
            "suite": task.suite,
            "level": task.level,
            "os": task.os,
            "tags": list(task.tags),
            "suite_split": task.split,
            "split": splits[task.task_id],
        },
    }
