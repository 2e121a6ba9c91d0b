"""Decide what the model remembers of an episode: one row that is only added to, or rows with the latest screens. Pure.

A row that was written is never edited. Where old screenshots must go, a new row is begun: the same messages, with
short texts in place of the screenshots that are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trainer.agent.types import Message


@dataclass(frozen=True, slots=True)
class _Seen:
    full: Message
    brief: Message


@dataclass(slots=True)
class History:
    """What was said and shown so far, and what of it is in the row that is being written."""

    system: Message
    images_per_row: int = 0
    """Observations in full that a row may hold; 0 for any number."""
    images_kept: int = 1
    """Latest observations in full that a new row begins with."""
    first_image_kept: bool = False
    """A new row has the first observation in full as well."""
    row: int = 0
    """Index of the row that is being written."""
    _past: list[_Seen | Message] = field(default_factory=list)
    _in_row: int = 0

    def copy(self) -> "History":
        """Return one that grows by itself from here on."""
        return replace(self, _past=list(self._past))

    def begin(self, full: Message, brief: Message) -> Sequence[Message]:
        """Return the first row's messages.

        Args:
            full: The task and the first look.
            brief: The task alone.
        """
        self._past.append(_Seen(full, brief))
        self._in_row = 1
        return [self.system, full]

    def reply(self, text: str) -> None:
        """Note what the model said; its row has it already."""
        self._past.append(Message("assistant", (text,)))

    def observe(self, full: Message, brief: Message) -> Sequence[Message] | None:
        """Note an observation. Returns the messages of a new row if one must be begun; None to append `full`."""
        self._past.append(_Seen(full, brief))
        if not self.images_per_row or self._in_row < self.images_per_row:
            self._in_row += 1
            return None
        self.row += 1
        return [self.system, *self._recall()]

    def note(self, message: Message) -> None:
        """Note an observation that shows nothing, and so never makes a new row."""
        self._past.append(message)

    def _recall(self) -> list[Message]:
        """Return the past for a new row, and count what it shows."""
        looks = [index for index, item in enumerate(self._past) if isinstance(item, _Seen)]
        shown = {*looks[: self.first_image_kept], *looks[-self.images_kept :]}
        self._in_row = len(shown)
        return [
            item if isinstance(item, Message) else item.full if index in shown else item.brief
            for index, item in enumerate(self._past)
        ]
