"""Stop a run that has gone wrong, by bounds on its own metrics: `halt:` in the YAML file.

A policy that collapses goes on training for as long as it is let: its entropy falls to nothing, its replies cannot be
read any more, or all machines are gone and nothing is left to learn from. What slime saved before that is still good.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

#: Names of `trainer.slime.metrics.rollout_metrics`, and beginnings of those that tell what there was.
METRICS = (
    "branched_frac",
    "fallback_frac",
    "mixed_origin_frac",
    "parsed_frac",
    "reply_tokens",
    "reward",
    "rows",
    "sampled_entropy",
    "success_frac",
    "task_score",
    "turns",
    "void_frac",
    "zero_std_frac",
)
FAMILIES = ("ended/", "reward_part/", "seconds/", "void/")


class Halted(RuntimeError):
    """A metric stayed out of its bounds; the message says which, and which rollout was the last within them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """When to stop.

    Raises:
        ValueError: A metric is not known, or `rollouts` is below 1.
    """

    below: Mapping[str, float] = field(default_factory=dict)
    """Stop where one of these falls below its value."""
    above: Mapping[str, float] = field(default_factory=dict)
    """Stop where one of these rises above its value."""
    rollouts: int = 2
    """In so many rollouts one after the other. A metric that a rollout does not have is within bounds."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name in (*self.below, *self.above):
            if name not in METRICS and not name.startswith(FAMILIES):
                near = difflib.get_close_matches(name, METRICS, n=1)
                meant = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"there is no metric {name}{meant} There are {', '.join((*METRICS, *FAMILIES))}")
        if self.rollouts < 1:
            raise ValueError(f"rollouts is {self.rollouts}; it must be at least 1")

    def crossed(self, metrics: Mapping[str, float]) -> list[str]:
        """Return what is out of bounds, in words."""
        return [
            f"{name} is {metrics[name]:.3g}, {side} {bound:g}"
            for side, bounds in (("below", self.below), ("above", self.above))
            for name, bound in bounds.items()
            if name in metrics and (metrics[name] < bound if side == "below" else metrics[name] > bound)
        ]


class Guard:
    """Looks at the rollouts of a run, one after the other."""

    def __init__(self, halt: Halt) -> None:
        self._halt = halt
        self._last_good: int | None = None
        self._crossed_count = 0

    def look(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Take note of a rollout. Raises: Halted."""
        crossed = self._halt.crossed(metrics)
        if not crossed:
            self._last_good, self._crossed_count = rollout_id, 0
            return
        self._crossed_count += 1
        if self._crossed_count >= self._halt.rollouts:
            good = "none" if self._last_good is None else f"rollout {self._last_good}"
            raise Halted(
                f"halted after rollout {rollout_id}: {'; '.join(crossed)}, in {self._crossed_count} rollouts one after"
                f" the other. The last one within bounds was {good}: go on from a checkpoint of that time with other"
                " settings, or change envd.halt"
            )
