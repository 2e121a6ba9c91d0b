"""Compute the largest possible row of an episode and reject settings that cannot fit. Pure.

Screenshots, replies, the prompt and the whole row have separate budgets. With a single one, a few screenshots would use
up the tokens for replies, and episodes would end because of their images instead of their turns.
"""

import math
from dataclasses import dataclass

#: For the frame of a message and the result of the last action, without tree and terminal.
OBSERVATION_TOKENS = 96
#: Trees and terminals have at least 3.5 characters per token with Qwen's tokenizers. The engine counts exactly.
_CHARS_PER_TOKEN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """Limits of a row, in tokens of the trainer's stream."""

    prompt: int
    """Tokens of the prompt, the first screenshot included."""
    reply: int
    """Tokens of one reply."""
    total: int
    """Tokens of the complete row."""
    images: int
    """Number of images."""
    response: int | None = None
    """Tokens after the prompt; None for no limit but `total`."""


def text_tokens(chars: int) -> int:
    return math.ceil(chars / _CHARS_PER_TOKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCost:
    """Size of the longest possible row of an episode, in tokens."""

    prompt: int
    """System message and task."""
    images: int
    """Number of screenshots in the row."""
    image: int
    """One screenshot."""
    tree: int
    """Text that is dropped with its screenshot: accessibility tree and terminal."""
    turns: int
    reply: int
    observation: int = OBSERVATION_TOKENS

    @property
    def total(self) -> int:
        return self.prompt + self.images * (self.image + self.tree) + self.turns * (self.reply + self.observation)

    def __str__(self) -> str:
        return (
            f"{self.prompt} of prompt + {self.images} x ({self.image} of screenshot + {self.tree} of tree and terminal)"
            f" + {self.turns} turns x ({self.reply} of reply + {self.observation} of observation) = {self.total} tokens"
        )

    def check(self, context_tokens: int) -> None:
        """Refuse a row that does not fit. Raises: ValueError: The message shows the sum."""
        if self.total > context_tokens:
            raise ValueError(
                f"an episode does not fit into its row: {self}, but context_tokens is {context_tokens}."
                " Lower max_turns, reply_tokens, image_max_pixels, a11y_chars or tool_chars, keep fewer screenshots"
                " with images_per_row, or raise context_tokens"
            )
