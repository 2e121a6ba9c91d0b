"""The mapping `envd:` in the YAML file of slime's `--custom-config-path`, whose keys become attributes of args."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from cuaenv.problems import did_you_mean
from trainer.agent.training import GroupConfig
from trainer.config import InputError
from trainer.data.curriculum import ALL, curriculum_of
from trainer.replay.pool import PoolSettings

#: Names of `trainer.slime.monitor.metrics_of`, and prefixes of names that depend on the data.
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


class SlimeConfig(GroupConfig):
    """How slime's rollout uses our desktops."""

    workers: int = Field(default=0, ge=0, le=64)
    """Processes that run the samples, see `trainer.slime.play.workers`; 0 for slime's own process."""
    min_valid_members: int = Field(default=2, ge=1)
    """Groups with fewer valid members are dropped as `env_failure`."""
    pad_rows_to: int = Field(default=1, ge=1)
    """Pad each rollout's rows to a multiple of this: data parallel size times `--micro-batch-size`, if that is static
    and `agent.images_per_row` makes several rows."""
    lease_s: float = Field(default=300.0, ge=10, le=3600)
    """Time for which machines outlive a trainer that was killed. A trainer that runs renews their leases."""
    engine_retries: int = Field(default=60, ge=1)
    """Attempts of one engine call, a second apart."""
    max_lost_groups: int | None = Field(default=None, ge=0)
    """The run halts after this many consecutive groups with too few valid members; 0 for never. None for 32, in fully
    asynchronous jobs for those of two rollouts, at least 4 and at most 32."""
    daemon_timeout_s: float = Field(default=60.0, gt=0)
    """The run halts if no daemon answers for this time."""
    picture_dir: str = ""
    """Directory that this process and all engines read at the same path, such as one in /dev/shm if they share a host:
    requests name the files of pictures, see `trainer.tokens.picture_files`. Empty: requests carry a row's pictures."""
    record_dir: str = ""
    """Directory of the files that `trainer.slime.hooks.record_sample` writes; empty for none."""
    sight: Literal["off", "warn", "refuse"] = "off"
    """Before the first episode, check that engine and rows have the pixels of every turn: `warn` logs a fault, `refuse`
    halts the run. See `trainer.slime.play.sight`."""
    curriculum: str = ALL
    """Which drawn tasks are played: `all`, `solve_rate` (those that some of their latest episodes solved, but at most
    80 %), or an own `trainer.data.curriculum.Curriculum` as `module:FUNCTION`. Needs `--data-source-path
    trainer.slime.hooks.data_source`."""
    replay: PoolSettings | None = None
    """Earlier successes for groups that failed, see `trainer.slime.play.replay`; None for no replay."""
    halt: Halt = Field(default_factory=Halt)
    """Conditions that stop the run; by default many void episodes."""

    @property
    def lease_ttl(self) -> timedelta:
        """Lease of each machine."""
        return timedelta(seconds=self.lease_s)

    @property
    def limit_s(self) -> float:
        """Upper bound of a sample's duration in seconds: all phases at their limits, for each attempt."""
        agent = self.agent
        attempt_s = agent.reset_timeout_s + agent.timeout_s + agent.step_timeout_s + agent.evaluate_timeout_s
        # In a tree, another member's episode may run first.
        return (self.attempts + (self.group == "tree")) * attempt_s + 60.0

    def multiple(self, *, evaluation: bool) -> int | None:
        """Return what divides the number of a rollout's rows; None if its result is one sample, not a list of rows."""
        # With rows, always a list: slime infers the shape of a batch from its first member.
        return self.pad_rows_to if self.agent.images_per_row and not evaluation else None

    @field_validator("replay")
    @classmethod
    def _none_if_empty(cls, value: PoolSettings | None) -> PoolSettings | None:
        return value if value is not None and value.model_fields_set else None

    @field_validator("curriculum")
    @classmethod
    def _check_curriculum(cls, value: str) -> str:
        curriculum_of(value)
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        agent = self.agent
        if self.credit == "siblings" and self.replay:
            raise ValueError("credit: siblings compares members that branched from each other; set no replay")
        if self.engine_timeout_s > agent.timeout_s:
            raise ValueError(
                f"engine_timeout_s is {self.engine_timeout_s:g}, longer than an episode (agent.timeout_s:"
                f" {agent.timeout_s:g}), so a hanging engine would look like a slow agent; lower it"
            )
        return self


def envd_of(args: Any) -> Mapping[str, Any]:
    """Return the mapping `envd:` in slime's args. Raises: InputError: There is none."""
    mapping = getattr(args, "envd", None)
    if not isinstance(mapping, Mapping):
        raise InputError("--custom-config-path: no mapping `envd:`; name a YAML file that has one")
    return mapping
