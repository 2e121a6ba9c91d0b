"""The input of rewards: facts of an episode, independent of models, tokens and services.

Facts are recorded while the episode runs and never recomputed, so a reward is a pure function of them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionFacts:
    """One action as parsed and as performed."""

    kind: str
    """The action's name in the model's grammar: "left_click", "type", "sendkey", ..."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Arguments written by the model, in its own coordinate space."""
    point_px: tuple[int, int] | None = None
    """Its point in the guest's pixels."""
    text: str | None = None
    """The typed text."""
    keys: tuple[str, ...] = ()
    """Keys pressed, in order."""
    executed: bool = True
    """False if the guest did not perform it; see `TurnFacts.errors`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFacts:
    """One reply of the model and its result."""

    text: str
    """The reply as sampled, special tokens removed."""
    parsed: bool
    """The reply followed the grammar strictly."""
    fallback: str | None = None
    """Name of the fallback that parsed the reply after strict parsing failed."""
    actions: tuple[ActionFacts, ...] = ()
    """Actions in order; empty if the reply could not be parsed."""
    errors: tuple[str, ...] = ()
    """The agent's mistakes, as reported by the environment."""
    done: bool = False
    """The reply declared the task done."""
    failed: bool = False
    """The reply declared the task infeasible."""
    changed_fraction: float | None = None
    """Share of the screen's pixels that the step changed, 0 to 1; None if it was not requested."""
    grey_difference: float | None = None
    """Mean absolute difference of the 64x64 grey screen before and after, over 255."""
    tree_before: str | None = None
    """The accessibility tree before the reply, as text; None if the model had none."""
    tree_after: str | None = None
    boxes_before: tuple[tuple[int, int, int, int], ...] = ()
    """Boxes (left, top, width, height; guest pixels) of the actionable elements before the reply."""
    terminal_before: str | None = None
    terminal_after: str | None = None
    token_count: int = 0
    """Tokens sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFacts:
    """A complete or truncated episode; a failed one has no facts and no reward.

    Raises:
        ValueError: The score is not from 0 to 1, or the budget has no turns.
    """

    task_id: str
    task_score: float
    """The checker's score, 0 to 1."""
    turns: tuple[TurnFacts, ...]
    max_turns: int
    truncated: bool = False
    """A budget of turns, tokens or time ended it."""
    guest_end_cause: str = ""
    """Cause, such as POWER_OFF, if the agent ended its guest; otherwise empty."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    """The task's own data, for example its complexity class."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.task_score) and 0.0 <= self.task_score <= 1.0):
            raise ValueError(
                f"task_score of {self.task_id!r} is {self.task_score}, not from 0 to 1; leave an episode without an"
                " evaluation out of its group"
            )
        if self.max_turns < 1:
            raise ValueError(f"max_turns of {self.task_id!r} is {self.max_turns}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """The reward of one episode, in named parts that sum to the total.

    Raises:
        ValueError: The parts do not sum to the total.
    """

    recipe: str
    total: float
    """The reward for the learner."""
    task_score: float
    """The checker's unchanged score, 0 to 1. Measure progress by this value only."""
    parts: Mapping[str, float]
    """Parts by name. The effect of a cap or clamp is a separate part."""

    def __post_init__(self) -> None:
        if not math.isclose(math.fsum(self.parts.values()), self.total, rel_tol=0.0, abs_tol=1e-9):
            raise ValueError(f"the parts of {self.recipe} sum to {math.fsum(self.parts.values())}, not {self.total}")


def capped(recipe: str, task_score: float, parts: Mapping[str, float], *, low: float, high: float) -> Breakdown:
    """Sum the parts and clamp the sum; the difference is a part named "cap"."""
    total = math.fsum(parts.values())
    bounded = max(low, min(high, total))
    if bounded != total:
        parts = {**parts, "cap": bounded - total}
    return Breakdown(recipe=recipe, total=bounded, task_score=task_score, parts=parts)
