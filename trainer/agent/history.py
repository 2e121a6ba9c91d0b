"""Decide what the model sees of an episode: one growing row, or several rows with the latest screenshots. Pure.

A written row is never edited. To drop old screenshots a new row starts with the same messages, in which short texts
replace the dropped screenshots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trainer.agent.types import Message


@dataclass(frozen=True, slots=True)
class _Observation:
    full: Message
    brief: Message


@dataclass(slots=True)
class History:
    """The messages so far, and the number of observations in the current row."""

    system: Message
    images_per_row: int = 0
    """Maximum number of full observations in a row; 0 for no limit."""
    images_kept: int = 1
    """Latest full observations at the start of a new row."""
    first_image_kept: bool = False
    """Whether a new row also has the first observation in full."""
    row: int = 0
    """Index of the current row."""
    _past: list[_Observation | Message] = field(default_factory=list)
    _in_row: int = 0

    def copy(self) -> "History":
        return replace(self, _past=list(self._past))

    def begin(self, full: Message, brief: Message) -> Sequence[Message]:
        """Return the first row's messages.

        Args:
            full: The task and the first observation.
            brief: The task only.
        """
        self._past.append(_Observation(full, brief))
        self._in_row = 1
        return [self.system, full]

    def reply(self, text: str) -> None:
        """Record a reply of the model, which is already in the row."""
        self._past.append(Message("assistant", (text,)))

    def observe(self, full: Message, brief: Message) -> Sequence[Message] | None:
        """Record an observation. Returns the messages of a new row if one must start; None to append `full`."""
        self._past.append(_Observation(full, brief))
        if not self.images_per_row or self._in_row < self.images_per_row:
            self._in_row += 1
            return None
        self.row += 1
        return [self.system, *self._new_row()]

    def note(self, message: Message) -> None:
        """Record a message without an observation; it never starts a new row."""
        self._past.append(message)

    def _new_row(self) -> list[Message]:
        """Return the messages of a new row, and count its full observations."""
        observations = [index for index, item in enumerate(self._past) if isinstance(item, _Observation)]
        shown = {*observations[: self.first_image_kept], *observations[-self.images_kept :]}
        self._in_row = len(shown)
        return [
            item if isinstance(item, Message) else item.full if index in shown else item.brief
            for index, item in enumerate(self._past)
        ]
