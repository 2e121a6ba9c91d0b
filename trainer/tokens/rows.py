"""The tokens of one row, as two append-only streams.

The engine's stream has one placeholder per image; the trainer's stream has one placeholder per image token. Sampled ids
go into both unchanged; no ids are ever computed from decoded text.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Rendered text and images of a prompt or an observation."""

    text: str
    engine_ids: tuple[int, ...]
    """Token ids with one placeholder per image."""
    train_ids: tuple[int, ...]
    """Token ids with one placeholder per image token."""
    images: "tuple[Image.Image, ...]" = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One part of a row after its prompt."""

    train_ids: tuple[int, ...]
    log_probs: tuple[float, ...] = ()
    """The engine's log-probabilities, one per id, if sampled."""
    sampled: bool
    """Whether the model sampled it."""
    is_masked: bool = False
    """Whether it is not trained, although the model sampled it."""
    text: str = ""
    image_count: int = 0
    extra: Mapping[str, Any] | None = field(default=None, repr=False)
    """What else the engine reported of a reply, for its trainer."""


class Row:
    """One append-only context of the model."""

    def __init__(self, prompt: Segment) -> None:
        """Start with the prompt, the first screenshot included."""
        self.prompt_ids = prompt.train_ids
        self.prompt_image_count = len(prompt.images)
        self.engine_ids = list(prompt.engine_ids)
        self.images = list(prompt.images)
        self.token_count = len(prompt.train_ids)
        """Length of the trainer's stream."""
        self._pieces: list[Piece] = []

    @property
    def last_id(self) -> int | None:
        """The row's last id; None if it is empty."""
        return self.engine_ids[-1] if self.engine_ids else None

    @property
    def reply_count(self) -> int:
        """Number of replies."""
        return sum(piece.sampled for piece in self._pieces)

    def observe(self, segment: Segment) -> None:
        """Add an observation."""
        self.engine_ids += segment.engine_ids
        self.images += segment.images
        self._add(Piece(train_ids=segment.train_ids, sampled=False, text=segment.text, image_count=len(segment.images)))

    def reply(
        self, token_ids: Sequence[int], log_probs: Sequence[float], *, text: str, extra: Mapping[str, Any]
    ) -> None:
        """Add a sampled reply. Raises: ValueError: The numbers of ids and log-probabilities differ."""
        if len(token_ids) != len(log_probs):
            raise ValueError(f"{len(token_ids)} ids came with {len(log_probs)} log-probabilities")
        self.engine_ids += token_ids
        piece = Piece(
            train_ids=tuple(token_ids), log_probs=tuple(log_probs), sampled=True, text=text, extra=dict(extra)
        )
        self._add(piece)

    def _add(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self.token_count += len(piece.train_ids)

    def copy(self, *, masked: bool = False) -> "Row":
        """Return an independent copy; with `masked`, no reply so far is trained in it."""
        row = copy(self)
        row.engine_ids, row.images = list(self.engine_ids), list(self.images)
        row._pieces = [replace(piece, is_masked=piece.is_masked or masked) for piece in self._pieces]
        return row

    def as_prompt(self, *, without_last_reply: bool = False) -> Segment:
        """Return the complete row as the prompt of another row, where none of it is trained.

        Args:
            without_last_reply: Leave out the reply with which the row ends.
        """
        pieces = self._pieces[: len(self._pieces) - without_last_reply]
        left_out = len(self._pieces[-1].train_ids) if without_last_reply else 0
        return Segment(
            text="",
            engine_ids=tuple(self.engine_ids[: len(self.engine_ids) - left_out]),
            train_ids=tuple(chain(self.prompt_ids, *(piece.train_ids for piece in pieces))),
            images=tuple(self.images),
        )

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The parts after the prompt, up to the last reply: observations after it are not trained."""
        end = max((index + 1 for index, piece in enumerate(self._pieces) if piece.sampled), default=0)
        return tuple(self._pieces[:end])

    @property
    def trained_images(self) -> "tuple[Image.Image, ...]":
        """The images among the prompt and `pieces`, in order of appearance."""
        count = self.prompt_image_count + sum(piece.image_count for piece in self.pieces)
        return tuple(self.images[:count])
