"""Add up what a row of an episode can cost at most, and refuse what cannot fit. Pure.

Screenshots, replies, the prompt and the row as a whole are counted apart. Otherwise a few screens silently eat the
room for replies, and an episode's end says more about its pictures than about its turns.
"""

import math
from dataclasses import dataclass

#: For the frame of a message and what is said of the last action, beside tree and terminal.
OBSERVATION_TOKENS = 96
#: Trees and terminals have 3.5 characters a token or more with the tokenizers of Qwen; a row's engine counts exactly.
_CHARS_PER_TOKEN = 3


class ImpossibleBudget(ValueError):
    """The episode cannot fit into the row; the message shows the sum."""


def image_tokens(width_px: int, height_px: int, *, multiple_px: int = 32) -> int:
    """Return how many tokens a screenshot takes: one for each square of `multiple_px`.

    For Qwen3-VL and Qwen3.5-VL a square is a patch of 16 px, merged 2 by 2: 32 px.
    """
    return round(width_px / multiple_px) * round(height_px / multiple_px)


def text_tokens(chars: int) -> int:
    """Return an estimate, rather too high, of how many tokens a text takes."""
    return math.ceil(chars / _CHARS_PER_TOKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCost:
    """What the longest possible row of an episode holds, in tokens."""

    prompt: int
    """System message and task."""
    images: int
    """How many screenshots are in the row at once."""
    image: int
    """One screenshot."""
    tree: int
    """Text that is dropped together with its screenshot: accessibility tree and terminal."""
    turns: int
    reply: int
    observation: int = OBSERVATION_TOKENS

    @property
    def total(self) -> int:
        """All of it."""
        return self.prompt + self.images * (self.image + self.tree) + self.turns * (self.reply + self.observation)

    def __str__(self) -> str:
        return (
            f"{self.prompt} of prompt + {self.images} x ({self.image} of screenshot + {self.tree} of tree and terminal)"
            f" + {self.turns} turns x ({self.reply} of reply + {self.observation} of observation) = {self.total} tokens"
        )

    def check(self, context_tokens: int) -> None:
        """Refuse a row that does not fit. Raises: ImpossibleBudget."""
        if self.total > context_tokens:
            raise ImpossibleBudget(
                f"an episode does not fit into its row: {self}, but context_tokens is {context_tokens}."
                " Lower max_turns, reply_tokens, image_max_pixels or a11y_chars, keep fewer screenshots with"
                " images_per_row, or raise context_tokens"
            )
