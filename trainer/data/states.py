"""Checkpoints as rows for slime's `--prompt-data`, next to tasks of `trainer.data.prompts`: groups start in states."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

from cuaenv.client import AsyncEnvClient, Checkpoint, CheckpointNotFound, CheckpointUnusable, EvaluatorFailed, Task
from trainer.agent.starts import STATE_COLUMN, state_of
from trainer.data.prompts import prompt_row

logger = logging.getLogger(__name__)

ASKED: Final = "request"
"""Reason of checkpoints that a client asked for."""
REASONS: Final = ("steps", "branch_point", "done", "failure", ASKED)


async def find_checkpoints(
    client: AsyncEnvClient, *, run: str = "", task: str = "", label: str = "", reasons: Collection[str] = ()
) -> list[Checkpoint]:
    """Return checkpoints of all hosts, oldest first. Raises: EnvError.

    Args:
        run: Only those of this run; empty for all, as for the other arguments.
        task: Only those of this task.
        label: Shell pattern, such as `before *`.
        reasons: Some of `REASONS`.
    """
    return [
        each
        for each in await client.list_checkpoints(run=run, task=task)
        if fnmatchcase(each.label, label or "*") and (each.trigger or ASKED) in (reasons or REASONS)
    ]


async def scores_of(
    client: AsyncEnvClient, checkpoints: Sequence[Checkpoint], *, concurrency: int
) -> dict[Checkpoint, float]:
    """Return scores, each computed on a machine of its own; states that cannot be scored are left out, and logged.

    Raises: EnvError: No machine, or no daemon.
    """
    limit, scores = asyncio.Semaphore(concurrency), {}

    async def score(checkpoint: Checkpoint) -> None:
        async with limit:
            try:
                scores[checkpoint] = (await client.evaluate(checkpoint)).score
            except (EvaluatorFailed, CheckpointNotFound, CheckpointUnusable) as error:
                logger.warning("checkpoint %s: left out: %s", checkpoint.checkpoint_id, error)

    await asyncio.gather(*map(score, checkpoints))
    return scores


def state_rows(
    checkpoints: Sequence[Checkpoint], tasks: Mapping[str, Task], *, scores: Mapping[Checkpoint, float] | None = None
) -> list[dict[str, Any]]:
    """Return a row for each checkpoint of a served task, and if there are scores, with one of them."""
    rows = []
    for checkpoint in checkpoints:
        task = tasks.get(checkpoint.task_id)
        if task is None or (scores is not None and checkpoint not in scores):
            continue
        score = {} if scores is None else {"state_score": scores[checkpoint]}
        rows.append(prompt_row(task, **{STATE_COLUMN: state_of(checkpoint)}, **score))
    return rows
