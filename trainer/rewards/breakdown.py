"""A reward and its parts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


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
