"""Rows for slime's supervised loss: complete conversations in which each message states whether it is trained.

slime reads them with `--input-key messages --multimodal-keys '{"image": "images"}'` and excludes turns with
`step_loss_mask` 0 from the loss (`slime.utils.mask_utils`). Every message has the mark: a missing one would be read
back from a table as null, which is not 1, and the turn would silently not be trained.
"""

from typing import Any

from trainer.agent.grammars import Grammar
from trainer.data.dataset import platform_of
from trainer.data.transcripts import is_trained, transcript_of, unparsable_turns
from trainer.replay.trajectory import StoredTrajectory


def sft_row(
    trajectory: StoredTrajectory, *, grammar: Grammar | None = None, last_turns: int = 0
) -> dict[str, Any] | None:
    """Return a row, or None if no turn of it would be trained.

    Args:
        trajectory: Turns that it marks as untrained stay untrained.
        grammar: Train only turns that follow it strictly; None for all.
        last_turns: Train only this many turns at the end; 0 for all.
    """
    transcript = transcript_of(trajectory)
    unparsable = unparsable_turns(transcript, grammar) if grammar is not None else {}
    trained = [index for index, turn in enumerate(transcript.messages) if is_trained(turn) and index not in unparsable]
    trained = trained[-last_turns:] if last_turns else trained
    if not trained:
        return None
    metadata = trajectory.metadata
    return {
        "messages": [
            {"role": turn["role"], "content": turn["content"], "step_loss_mask": int(index in trained)}
            for index, turn in enumerate(transcript.messages)
        ],
        "images": list(transcript.images),
        "label": trajectory.task_id,
        "metadata": {
            "task_id": trajectory.task_id,
            "source": str(metadata.get("source") or ""),
            "os": platform_of(trajectory),
            "split": str(metadata.get("split") or ""),
            "prompt_hash": str(metadata.get("prompt_hash") or ""),
        },
    }
