"""What a reward may look at: facts of an episode, with nothing of models, tokens or services in them.

Facts are recorded while the episode runs and never recomputed, so a reward is a pure function of them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionFacts:
    """One action as the model meant it and as it was performed."""

    kind: str
    """The action's name in the grammar that the model wrote in: "left_click", "type", "sendkey", ..."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """As the model wrote them, coordinates in its own coordinate space."""
    point_px: tuple[int, int] | None = None
    """Where it went on the guest's screen."""
    text: str | None = None
    """What it typed."""
    keys: tuple[str, ...] = ()
    """Keys pressed, in order."""
    executed: bool = True
    """False if the guest did not take it; see `TurnFacts.errors`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFacts:
    """One reply of the model and what came of it."""

    text: str
    """The reply as sampled, special tokens removed."""
    parsed: bool
    """The reply followed the grammar strictly."""
    fallback: str | None = None
    """Name of the lenient rule that read the reply, where strict parsing failed and fallbacks are on."""
    actions: tuple[ActionFacts, ...] = ()
    """In order; empty if nothing could be read."""
    errors: tuple[str, ...] = ()
    """The agent's mistakes as the environment told them."""
    done: bool = False
    """The reply declared the task done."""
    failed: bool = False
    """The reply declared the task infeasible."""
    changed_fraction: float | None = None
    """Share of the screen's pixels that the step changed, 0 to 1; None where it was not asked for."""
    grey_difference: float | None = None
    """Mean absolute difference of the 64x64 grey screen before and after, over 255."""
    tree_before: str | None = None
    """The accessibility tree that the model had when it replied, as text; None if it had none."""
    tree_after: str | None = None
    boxes_before: tuple[tuple[int, int, int, int], ...] = ()
    """Boxes (left, top, width, height; guest pixels) of the elements that could be acted on when the model replied."""
    terminal_before: str | None = None
    terminal_after: str | None = None
    token_count: int = 0
    """Tokens sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFacts:
    """A whole episode that ended by itself or was truncated; a failed one has no facts and no reward.

    Raises:
        ValueError: The score is no number from 0 to 1, or there is no turn to take.
    """

    task_id: str
    task_score: float
    """What the checker gave, 0 to 1."""
    turns: tuple[TurnFacts, ...]
    max_turns: int
    truncated: bool = False
    """A budget of turns, tokens or time ended it."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    """The task's own data, for example its complexity class."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.task_score) and 0.0 <= self.task_score <= 1.0):
            raise ValueError(
                f"task_score of {self.task_id!r} is {self.task_score}; a checker gives 0 to 1. An episode without a "
                "verdict has no facts: leave it out of its group"
            )
        if self.max_turns < 1:
            raise ValueError(f"max_turns of {self.task_id!r} is {self.max_turns}; an episode has one turn at least")
