"""Stop a run whose metrics leave their bounds: `halt:` in the YAML file.

Without it, a run whose policy has collapsed or whose machines are gone trains on. Checkpoints saved before are intact.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cuaenv.problems import did_you_mean

#: Names of `trainer.slime.records.metrics_of`, and prefixes of names that depend on the data.
METRICS = (
    "branched_frac", "ended_by_guest_frac", "fallback_frac", "mixed_origin_frac", "parsed_frac", "reply_tokens",
    "reward", "rows", "sampled_entropy", "success_frac", "task_score", "turns", "undecided_frac", "void_frac",
    "zero_std_frac",
)  # fmt: skip
FAMILIES = ("ended/", "reward_part/", "seconds/", "tree/", "void/")
#: A policy can cause void episodes: a run in which they prevail measures only what is left.
DEFAULT_ABOVE: Mapping[str, float] = {"void_frac": 0.5, "undecided_frac": 0.1}


class Halted(RuntimeError):
    """The run was ended; the message names the reason and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """When to stop.

    Raises:
        ValueError: A metric is unknown, or `rollouts` is below 1.
    """

    below: Mapping[str, float] = field(default_factory=dict)
    """Stop if one of these metrics falls below its value."""
    above: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_ABOVE))
    """Stop if one of these metrics rises above its value. Replaces the default bounds; `{}` turns them off."""
    rollouts: int = 2
    """Consecutive rollouts out of bounds. A rollout counts once per batch of groups that it used up. A metric that a
    rollout lacks is within bounds."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name in (*self.below, *self.above):
            if name not in METRICS and not name.startswith(FAMILIES):
                near = did_you_mean(name, METRICS)
                hint = near or f"; known metrics: {', '.join((*METRICS, *FAMILIES))}"
                raise ValueError(f"metric {name}: unknown{hint}")
        if self.rollouts < 1:
            raise ValueError(f"rollouts is {self.rollouts}; it must be at least 1")

    def crossed(self, metrics: Mapping[str, float]) -> list[str]:
        """Return a description of each metric out of bounds."""
        return [
            f"{name} is {metrics[name]:.3g}, {side} {bound:g}"
            for side, bounds in (("below", self.below), ("above", self.above))
            for name, bound in bounds.items()
            if name in metrics and (metrics[name] < bound if side == "below" else metrics[name] > bound)
        ]


class Guard:
    """Checks the consecutive rollouts of a run."""

    def __init__(self, halt: Halt) -> None:
        self._halt = halt
        self._last_good: int | None = None
        self._crossed_count = 0

    def check(self, rollout_id: int, metrics: Mapping[str, float], *, count: int = 1) -> None:
        """Check the next rollout, which used up `count` batches of groups. Raises: Halted."""
        if not self._halt.crossed(metrics):
            self._last_good, self._crossed_count = rollout_id, 0
            return
        self._check(metrics, when=f"after rollout {rollout_id}", count=count)
        self._crossed_count += count

    def check_unfinished(self, metrics: Mapping[str, float], *, count: int) -> None:
        """Check a rollout that has used up `count` batches of groups and has not ended. Raises: Halted."""
        self._check(metrics, when="during a rollout", count=count)

    def _check(self, metrics: Mapping[str, float], *, when: str, count: int) -> None:
        crossed = self._halt.crossed(metrics)
        crossed_count = self._crossed_count + count
        if crossed and crossed_count >= self._halt.rollouts:
            good = "none" if self._last_good is None else f"rollout {self._last_good}"
            raise Halted(
                f"halted {when}: {'; '.join(crossed)}, in {crossed_count} consecutive rollouts; last rollout within"
                f" bounds: {good}. Continue from a checkpoint of that time with other settings, or change envd.halt"
            )
