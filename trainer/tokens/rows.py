"""The tokens of one row, as two streams that grow together and are never edited.

The engine reads a stream with one placeholder for each image; the trainer reads the same stream with as many as the
image has tokens. Sampled ids go into both untouched; nothing here is ever made from decoded text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Rendered text with its images: what a prompt or an observation adds to a row."""

    text: str
    engine_ids: tuple[int, ...]
    """One placeholder for each image."""
    train_ids: tuple[int, ...]
    """As many placeholders as each image has tokens."""
    images: "tuple[Image.Image, ...]" = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One part of a row after its prompt."""

    train_ids: tuple[int, ...]
    log_probs: tuple[float, ...] = ()
    """The engine's own, one for each id, if it sampled them."""
    sampled: bool
    """Whether the model said it, so that it is trained."""
    text: str = ""
    image_count: int = 0
    meta_info: Mapping[str, Any] | None = field(default=None, repr=False)
    """The engine's answer, for slime's own bookkeeping."""


class Row:
    """One append-only context of the model."""

    def __init__(self, prompt: Segment) -> None:
        """Begin with the prompt, the first screenshot included."""
        self.prompt_ids = prompt.train_ids
        self.prompt_image_count = len(prompt.images)
        self.engine_ids = list(prompt.engine_ids)
        self.images = list(prompt.images)
        self.token_count = len(prompt.train_ids)
        """Tokens as the trainer counts them, images included."""
        self._pieces: list[Piece] = []

    @property
    def last_id(self) -> int | None:
        """The id that the row ends with; None if it is empty."""
        return self.engine_ids[-1] if self.engine_ids else None

    @property
    def reply_count(self) -> int:
        """How often the model spoke."""
        return sum(piece.sampled for piece in self._pieces)

    def observe(self, segment: Segment) -> None:
        """Add what the model is shown."""
        self.engine_ids += segment.engine_ids
        self.images += segment.images
        self._add(Piece(train_ids=segment.train_ids, sampled=False, text=segment.text, image_count=len(segment.images)))

    def reply(
        self, token_ids: Sequence[int], log_probs: Sequence[float], *, text: str, meta_info: Mapping[str, Any]
    ) -> None:
        """Add what the model sampled.

        Raises:
            ValueError: Not one log-probability for each id.
        """
        if len(token_ids) != len(log_probs):
            raise ValueError(f"{len(token_ids)} ids came with {len(log_probs)} log-probabilities")
        self.engine_ids += token_ids
        piece = Piece(
            train_ids=tuple(token_ids), log_probs=tuple(log_probs), sampled=True, text=text, meta_info=dict(meta_info)
        )
        self._add(piece)

    def _add(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self.token_count += len(piece.train_ids)

    def as_prompt(self) -> Segment:
        """Return all of it as what another row may begin with: nothing of it is trained there."""
        return Segment(
            text="",
            engine_ids=tuple(self.engine_ids),
            train_ids=(*self.prompt_ids, *(token_id for piece in self._pieces for token_id in piece.train_ids)),
            images=tuple(self.images),
        )

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What follows the prompt, up to the model's last word: what it never answered teaches nothing."""
        end = max((index + 1 for index, piece in enumerate(self._pieces) if piece.sampled), default=0)
        return tuple(self._pieces[:end])

    @property
    def trained_images(self) -> "tuple[Image.Image, ...]":
        """The images among the prompt and `pieces`, in order of appearance."""
        count = self.prompt_image_count + sum(piece.image_count for piece in self.pieces)
        return tuple(self.images[:count])
