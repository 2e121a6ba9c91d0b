"""The mapping `envd:` in the YAML file of slime's `--custom-config-path`, whose keys become attributes of args."""

import json
from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from trainer.agent.training import GroupConfig
from trainer.config import ConfigError, json_of
from trainer.replay.pool import PoolSettings
from trainer.slime.guard import Halt


class Replay(PoolSettings):
    """Replay of earlier successes to groups that failed; see `trainer.slime.replay`."""

    files: tuple[Path, ...] = ()
    """Files of trajectories that the pool starts with."""


class SlimeConfig(GroupConfig):
    """How slime's rollout uses our desktops."""

    workers: int = Field(default=0, ge=0, le=64)
    """Processes that run the samples, see `trainer.slime.workers`; 0 for slime's own process."""
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
    requests name the files of pictures, see `trainer.slime.pictures`. Empty: requests carry all pictures of a row."""
    record_dir: str = ""
    """Directory of the files that `trainer.slime.hooks.record_sample` writes; empty for none."""
    sight: Literal["off", "warn", "refuse"] = "off"
    """Before the first episode, check that engine and rows have the pixels of every turn, see `trainer.slime.sight`:
    `warn` logs a fault, `refuse` halts the run."""
    replay: Replay | None = None
    """Earlier successes for groups that failed; None for no replay."""
    halt: Halt = Field(default_factory=Halt)
    """Conditions that stop the run; by default many void episodes."""

    @staticmethod
    def from_args(args: Any) -> "SlimeConfig":
        """Return the configuration in slime's args. Raises: ConfigError."""
        mapping = getattr(args, "envd", None)
        if not isinstance(mapping, Mapping):
            raise ConfigError("--custom-config-path: no mapping `envd:`; name a YAML file that has one")
        # Called for every sample: equal text is parsed once.
        return _parsed(json_of(mapping))

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

    @field_validator("replay")
    @classmethod
    def _none_if_empty(cls, value: Replay | None) -> Replay | None:
        return value if value is not None and value.model_fields_set else None

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


@lru_cache(maxsize=8)
def _parsed(text: str) -> SlimeConfig:
    return SlimeConfig.from_mapping(json.loads(text))
