"""Continue samples that slime aborts with `--partial-rollout`: in their desktop's state, with the tokens so far.

An aborted sample keeps a checkpoint, the agent's state and its row in its metadata. The next rollout opens the
checkpoint and continues the row. Without the checkpoint, or its host, the sample starts over.
"""

import logging
import pickle
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from cuaenv.client import AsyncEnvClient, AsyncEpisode, Checkpoint, EnvError
from trainer.agent.turns import BranchPoint
from trainer.files import write_atomically
from trainer.slime.slime_compat import Sample
from trainer.tokens.rows import Row

logger = logging.getLogger(__name__)

_KEY: Final = "envd_partial"
_TIMEOUT: Final = timedelta(seconds=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """A sample between two turns."""

    checkpoint: Checkpoint
    point: BranchPoint
    row: Row


def partial_of(sample: Sample) -> Partial | None:
    """Return where an aborted sample is to continue; None for its beginning."""
    found: Partial | None = (sample.metadata or {}).get(_KEY)
    return found


async def stored(sample: Sample, episode: AsyncEpisode, point: BranchPoint, row: Row) -> Partial | None:
    """Store an episode between two turns; None if it has none or cannot be stored, which is logged."""
    if not point.turns:
        return None
    try:
        checkpoint = await episode.checkpoint(f"sample {sample.index}", timeout=_TIMEOUT)
    except EnvError as error:
        logger.warning("[envd] sample %s: starts over in a later rollout: %s", sample.index, error)
        return None
    return Partial(checkpoint=checkpoint, point=replace(point, is_resumed=True), row=row.copy())


async def replace_partial(client: AsyncEnvClient, sample: Sample, partial: Partial | None) -> None:
    """Note where an aborted sample is to continue, or None, and delete the checkpoint that it no longer needs."""
    old = sample.metadata.pop(_KEY, None)
    if partial is not None:
        sample.metadata[_KEY] = partial
        # slime notes in which rollout a sample with a response began.
        sample.response = "".join(piece.text for piece in partial.row.pieces)
    if old is None or old is partial:
        return
    try:
        await client.delete_checkpoint(old.checkpoint, timeout=_TIMEOUT)
    except EnvError as error:
        logger.info("[envd] checkpoint %s: left to expire: %s", old.checkpoint.checkpoint_id, error)


def save_buffer(source: Any, directory: str, rollout_id: int) -> None:
    """Write the aborted groups of slime's data source next to its own state, which lacks them. Raises: OSError."""
    path = _buffer_path(directory, rollout_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, pickle.dumps(source.buffer))


def load_buffer(source: Any, directory: str, rollout_id: int | None) -> None:
    """Read the aborted groups that `save_buffer` wrote, if it did. Raises: OSError."""
    path = _buffer_path(directory, rollout_id)
    if path.exists():
        # Of the same directory, and as trusted, as the weights that slime unpickles.
        with path.open("rb") as file:
            source.buffer = _Unpickler(file).load()
        logger.info("[envd] %d aborted groups continue", len(source.buffer))


class _Unpickler(pickle.Unpickler):
    """Reads files of 0.2.0, too, in which this module has its former name."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """See `pickle.Unpickler`."""
        return super().find_class(__name__ if module_name == "trainer.slime.partial" else module_name, global_name)


def _buffer_path(directory: str, rollout_id: int | None) -> Path:
    return Path(directory) / "partial" / f"{rollout_id}.pickle"
