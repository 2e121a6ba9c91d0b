"""A reward with its reasons."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """What one episode is worth, in named parts that sum to the total.

    Raises:
        ValueError: The parts do not sum to the total.
    """

    recipe: str
    total: float
    """What the learner gets."""
    task_score: float
    """The checker's verdict as it was given, 0 to 1, whatever the recipe made of it. Judge progress by this alone."""
    parts: Mapping[str, float]
    """By name. A cap or a clamp is a part of its own: what it took away or added."""

    def __post_init__(self) -> None:
        if not math.isclose(math.fsum(self.parts.values()), self.total, rel_tol=0.0, abs_tol=1e-9):
            raise ValueError(f"the parts of {self.recipe} sum to {math.fsum(self.parts.values())}, not {self.total}")


def capped(recipe: str, task_score: float, parts: Mapping[str, float], *, low: float, high: float) -> Breakdown:
    """Sum the parts and keep the sum within bounds, with what that took or gave as a part named "cap"."""
    total = math.fsum(parts.values())
    bounded = max(low, min(high, total))
    if bounded != total:
        parts = {**parts, "cap": bounded - total}
    return Breakdown(recipe=recipe, total=bounded, task_score=task_score, parts=parts)
