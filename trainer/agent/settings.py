"""Settings of an agent, shared by training with slime or AReaL, evaluation and `trainer play`; and their budgets.

Screenshots, replies, the prompt and the whole row have separate budgets. With a single one, a few screenshots would use
up the tokens for replies, and episodes would end because of their images instead of their turns. Settings whose largest
possible row does not fit are refused.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Self

from pydantic import ConfigDict

from cuaenv.actions import Tool
from cuaenv.client import View
from trainer.agent.coordinates import Units
from trainer.agent.grammars import Grammar, grammar
from trainer.agent.system_prompt import STANDARD, Prompt, prompt_of
from trainer.config import STRICT, parse

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Observations, prompts, parsing of replies, and limits of an episode.

    Raises:
        ValueError: A value is out of range, or an episode cannot fit into its row.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    grammar: str = "qwen3-vl"
    """How the model writes actions: a name of `trainer.agent.grammars.GRAMMARS`, or an own one as `module:CLASS`."""
    prompt: str = STANDARD
    """System message and task: `standard`, or an own `trainer.agent.system_prompt.Prompt` as `module:CLASS`."""
    fallbacks: tuple[str, ...] = ()
    """Lenient rules for replies that do not follow the grammar, of `trainer.agent.grammars.FALLBACKS`."""
    coordinates: Units | None = None
    """Units of points: 0 to 1000 for any screenshot size, or its pixels. None for the grammar's own."""

    max_turns: int = 15
    """Replies per episode, unparsable ones included."""
    prompt_tokens: int = 2048
    """Budget of the system message and the task, without screenshots."""
    reply_tokens: int = 512
    """Budget of one reply."""
    context_tokens: int = 32_768
    """Budget of a complete row."""
    images_per_row: int = 0
    """Screenshots in a row before a new one starts with the latest `images_kept`; 0 for a single row."""
    images_kept: int = 2
    """Latest screenshots at the start of a new row, the newest included."""
    first_image_kept: bool = False
    """Whether a new row also starts with the episode's first screenshot."""
    timeout_s: float = 900.0
    """Time from the first observation to the last reply."""
    step_timeout_s: float = 180.0
    """Time for the response to one step, besides the time for which its actions may last."""
    evaluate_timeout_s: float = 900.0
    """Time for the evaluation: the rest of a step that still runs, the checkers, and if they fail, twice more."""
    reset_timeout_s: float = 600.0
    """Time for a free machine and the task's setup."""

    text_only: bool = False
    """No screenshots; the model sees only the accessibility tree or the terminal."""
    image_max_pixels: int = 1_003_520
    """Screenshots are scaled down to at most this many pixels."""
    image_multiple_px: int = 32
    """Sides of a screenshot are multiples of this: the model's patch size times its merge size."""
    repeat_images: bool = True
    """Whether an unchanged screen is shown again; otherwise a sentence replaces it."""
    a11y_tree: bool = False
    """Show the accessibility tree, one line per element."""
    a11y_chars: int = 4096
    """Maximum length of the tree in characters; cut at the end of a line."""
    marks: bool = False
    """Draw numbered boxes around all usable elements; the tree shows the numbers too."""
    terminal: bool = False
    """Show the text of the open terminal."""
    terminal_chars: int = 2048
    """Maximum length of the terminal text in characters, counted from the end."""
    tools: tuple[Tool, ...] = ()
    """Tools that the model is offered, where the episode allows them: `shell`, `files`, `mcp`, `ask_user`."""
    tool_chars: int = 1024
    """Maximum length of the results of one reply's tools in characters; the middle of a longer one is left out."""
    grey_difference: bool = False
    """Record, for rewards, how much a step changed the screen in grey scale; costs about 10 ms per step."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            minimum = 0 if field.name == "images_per_row" else 1
            if isinstance(value, int | float) and not isinstance(value, bool) and not value >= minimum:
                raise ValueError(f"{field.name} is {value}; it must be at least {minimum}")
        kept = self.images_kept + self.first_image_kept
        if self.images_per_row and kept > self.images_per_row:
            raise ValueError(f"new rows would keep {kept} screenshots, but images_per_row is {self.images_per_row}")
        if self.text_only and not (self.a11y_tree or self.terminal):
            raise ValueError("text_only shows nothing unless a11y_tree or terminal is on")
        if self.text_only and self.marks:
            raise ValueError("marks need screenshots; turn off text_only or marks")
        self.make_grammar()
        self.make_prompt()
        self.row_cost.check(self.context_tokens)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object]) -> Self:
        """Parse settings from a YAML file. Raises: InputError."""
        return parse(cls, mapping)

    def make_grammar(self, offered: Sequence[str] | None = None) -> Grammar:
        """Return the grammar with the tools that an episode offers, or with all of `tools`. Raises: ValueError."""
        return grammar(self.grammar, fallbacks=self.fallbacks, tools=self.tools_of(offered))

    def make_prompt(self) -> Prompt:
        """Return the prompt. Raises: InputError."""
        return prompt_of(self.prompt)

    def recorded(self) -> dict[str, object]:
        """Return the settings for records and digests, which equal those of releases that had one prompt."""
        mapping = dataclasses.asdict(self)
        if self.prompt == STANDARD:
            del mapping["prompt"]
        return mapping

    def tools_of(self, offered: Sequence[str] | None) -> tuple[Tool, ...]:
        """Return those of `tools` that an episode offers; all without an episode."""
        if offered is None:
            return self.tools
        kinds = {name.partition(":")[0] for name in offered}
        return tuple(tool for tool in self.tools if tool in kinds)

    @property
    def units(self) -> Units:
        """Units of points, from the settings or the grammar."""
        return self.coordinates or self.make_grammar().coordinates

    @property
    def image_tokens(self) -> int:
        """Maximum number of tokens of a screenshot."""
        return 0 if self.text_only else self.image_max_pixels // self.image_multiple_px**2

    @property
    def row_cost(self) -> RowCost:
        """Cost of the longest possible row."""
        text_chars = self.a11y_tree * self.a11y_chars + self.terminal * self.terminal_chars
        return RowCost(
            prompt=self.prompt_tokens,
            images=min(self.max_turns, self.images_per_row or self.max_turns),
            image=self.image_tokens,
            tree=text_tokens(text_chars),
            turns=self.max_turns,
            reply=self.reply_tokens,
            observation=OBSERVATION_TOKENS + (text_tokens(self.tool_chars) if self.tools else 0),
        )

    @property
    def token_budget(self) -> TokenBudget:
        """Limits of a row of tokens."""
        cost = self.row_cost
        return TokenBudget(
            prompt=cost.prompt + cost.image + cost.tree,
            reply=self.reply_tokens,
            total=self.context_tokens,
            images=cost.images,
        )

    @property
    def view(self) -> View:
        """The view to request: the screenshot as the model's image processor would make it."""
        return View(
            encoding="none" if self.text_only else "raw",
            max_pixel_count=self.image_max_pixels,
            size_multiple_px=self.image_multiple_px,
            a11y_elements=self.a11y_tree,
            marks=self.marks,
            terminal=self.terminal,
            screen_change=True,
            grey_difference=self.grey_difference,
        )

    @property
    def step_timeout(self) -> timedelta:
        return timedelta(seconds=self.step_timeout_s)

    @property
    def evaluate_timeout(self) -> timedelta:
        return timedelta(seconds=self.evaluate_timeout_s)

    @property
    def reset_timeout(self) -> timedelta:
        return timedelta(seconds=self.reset_timeout_s)
