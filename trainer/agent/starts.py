"""Where episodes start: at the beginning of a task, or in the state of a checkpoint that a row of data names."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from cuaenv.client import Checkpoint
from trainer.config import InputError

STATE_COLUMN: Final = "checkpoint"
"""Column of the checkpoint in a row, or in its metadata."""
_ADAPTER: Final = TypeAdapter(Checkpoint)


def state_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint as the column of a row, of JSON values."""
    row: dict[str, Any] = _ADAPTER.dump_python(checkpoint, mode="json", exclude={"timings_ms"})
    return row


def start_of(columns: Mapping[str, Any], task: str) -> str | Checkpoint:
    """Return where a row starts: its checkpoint, or else its task. Raises: InputError: its checkpoint is malformed."""
    state = columns.get(STATE_COLUMN)
    if state is None:
        return task
    try:
        checkpoint = _ADAPTER.validate_python(state)
    except (TypeError, ValidationError) as error:
        raise InputError(f"row of task {task}: column {STATE_COLUMN} is not one of `trainer data states`") from error
    if checkpoint.task_id != task:
        raise InputError(f"row of task {task}: {checkpoint.checkpoint_id} is a checkpoint of {checkpoint.task_id}")
    return checkpoint


def start_name(
    start: str | Checkpoint, *, basis_digest: str, prompt_hash: str, perturbations: Sequence[str] = ()
) -> str:
    """Return what identifies the state and the prompt that an episode begins with; empty if they are unknown.

    Args:
        start: Of `start_of`.
        basis_digest: Of the episode's `Evaluation`: the task's definition, setup, image and screen.
        prompt_hash: `trainer.agent.prompts.prompt_hash`.
        perturbations: Of the episode's world. Each reset draws its own, and its seed is not known.
    """
    if not basis_digest or (perturbations and not isinstance(start, Checkpoint)):
        return ""
    checkpoint_id = start.checkpoint_id if isinstance(start, Checkpoint) else ""
    return f"{basis_digest}/{checkpoint_id}/{prompt_hash}"


def step_limit(start: str | Checkpoint, max_steps: int) -> int:
    """Return the step limit of an episode that may take `max_steps` from its start; 0 for the start's own limit."""
    return max_steps + start.step_count if max_steps and isinstance(start, Checkpoint) else max_steps


def task_id_of(start: str | Checkpoint) -> str:
    """Return the task's id."""
    return start.task_id if isinstance(start, Checkpoint) else start
