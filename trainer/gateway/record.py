"""Finished sessions in the run's directory, and their rows in other forms.

`sessions.jsonl` has one line for each session: outcome, reward, counts. `rows.jsonl` has one trajectory for each row of
a session that is not void, in the format of `trainer.replay.trajectory`, with the row's tokens, masks and
log-probabilities.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.adapters.areal.engine import TurnRow
from trainer.agent.types import data_uri, without_control_tokens
from trainer.gateway.prompts import DataUrl, Item
from trainer.gateway.session import Session
from trainer.replay.trajectory import IMAGE_PLACEHOLDER, StoredTrajectory, TokenRow
from trainer.tokens.rows import Row

SESSIONS_FILE, ROWS_FILE = "sessions.jsonl", "rows.jsonl"


class RunDirectory:
    """The files of a run; lines are appended."""

    def __init__(self, directory: Path) -> None:
        """Make the directory. Raises: OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory

    def add(self, session: Session, *, reward: float | None, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Write a finished session; returns its summary. Raises: OSError."""
        summary = summary_of(session, reward=reward, metadata=metadata)
        if not session.void and reward is not None:
            for trajectory in trajectories_of(session, reward=reward, metadata=metadata):
                self._append(ROWS_FILE, trajectory.as_row())
        self._append(SESSIONS_FILE, summary)
        return summary

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        # One unbuffered write in append mode: concurrent lines do not mix.
        with (self._directory / name).open("ab", buffering=0) as file:
            file.write((json.dumps(line, ensure_ascii=False) + "\n").encode())


def summary_of(session: Session, *, reward: float | None, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what happened in a session, as JSON values."""
    counts = session.counts
    return {
        "session": session.session_id,
        "void": session.void,
        "exhausted": session.exhausted,
        "reward": None if session.void else reward,
        "turns": counts.turns,
        "rows": len(session.rows),
        "row_reasons": dict(Counter(recorded.reason for recorded in session.rows)),
        "replaced": counts.replaced,
        "unparsed": counts.unparsed,
        "reply_tokens": counts.reply_tokens,
        "finishes": dict(counts.finishes),
        "weight_versions": sorted({version for each in session.rows for version in weight_versions(each.row)}),
        "metadata": dict(metadata),
    }


def trajectories_of(session: Session, *, reward: float, metadata: Mapping[str, Any]) -> list[StoredTrajectory]:
    """Return the rows of a session."""
    return [
        StoredTrajectory(
            task_id=f"{metadata.get('task_id') or session.session_id}_chunk{number}",
            messages=tuple(_message(item) for item in recorded.items),
            images=tuple(data_uri(image, compress_level=6) for image in recorded.row.trained_images),
            reward=reward,
            metadata={
                **{key: value for key, value in metadata.items() if key != "task_id"},
                "session": session.session_id,
                "row": number,
                "reason": recorded.reason,
                "tools": list(recorded.tools),
                "weight_versions": weight_versions(recorded.row),
                "finishes": [str(piece["finish_reason"].get("type")) for piece in _extras(recorded.row)],
            },
            rows=(token_row(recorded.row),),
        )
        for number, recorded in enumerate(session.rows)
    ]


def token_row(row: Row) -> TokenRow:
    """Return the tokens of a row, as they are trained."""
    pieces = row.pieces
    response = [token for piece in pieces for token in piece.train_ids]
    return TokenRow(
        tokens=(*row.prompt_ids, *response),
        response_length=len(response),
        loss_mask=tuple(int(piece.sampled and not piece.is_masked) for piece in pieces for _ in piece.train_ids),
        log_probs=tuple(
            log_prob for piece in pieces for log_prob in (piece.log_probs or (0.0,) * len(piece.train_ids))
        ),
        images=tuple(range(len(row.trained_images))),
    )


def areal_turns(row: Row) -> list[TurnRow]:
    """Return the prompt and the reply of each turn, for `trainer.adapters.areal.rows.batch`."""
    ids, count, turns = list(row.prompt_ids), row.prompt_image_count, list[TurnRow]()
    for piece in row.pieces:
        if piece.sampled:
            version = re.search(r"\d+", str((piece.extra or {}).get("weight_version", "")))
            turns.append(
                TurnRow(
                    input_ids=tuple(ids),
                    output_ids=piece.train_ids,
                    log_probs=piece.log_probs,
                    versions=(int(version[0]) if version else 0,) * len(piece.train_ids),
                    images=tuple(row.images[:count]),
                )
            )
        ids += piece.train_ids
        count += piece.image_count
    return turns


def weight_versions(row: Row) -> list[str]:
    """Return the version of the weights that sampled each reply."""
    return [str(extra.get("weight_version", "")) for extra in _extras(row)]


def _extras(row: Row) -> Sequence[Mapping[str, Any]]:
    return [piece.extra or {} for piece in row.pieces if piece.sampled]


def _message(item: Item) -> Mapping[str, Any]:
    parts = (IMAGE_PLACEHOLDER if isinstance(part, DataUrl) else without_control_tokens(part) for part in item.parts)
    text = "".join(parts)
    calls = [
        f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments}, ensure_ascii=False)}\n</tool_call>"
        for call in item.calls
    ]
    return {"role": item.role, "content": "\n".join([text, *calls] if text else calls)}
