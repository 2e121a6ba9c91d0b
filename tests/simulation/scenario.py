"""What is simulated: hosts, runs, durations and faults."""

import random
from dataclasses import dataclass, field
from math import log


@dataclass(frozen=True, slots=True)
class Spread:
    """A log-normal distribution of a duration in seconds."""

    median_s: float
    p95_s: float

    def draw(self, rng: random.Random) -> float:
        """Return a duration."""
        # 1.645: the 95th percentile of the normal distribution, in standard deviations.
        return self.median_s * rng.lognormvariate(0.0, log(self.p95_s / self.median_s) / 1.645)


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Durations of what machines and episodes do. docs/benchmarks.md has the measurements of envd's part."""

    fork: Spread = Spread(0.194, 0.295)
    destroy: Spread = Spread(0.15, 0.4)
    reset: Spread = Spread(0.009, 0.03)
    step: Spread = Spread(0.419, 1.2)
    park: Spread = Spread(0.228, 0.45)
    resume: Spread = Spread(0.174, 0.35)
    """Times of parking and resuming an episode with an editor: medians measured, the 95th percentiles assumed."""
    think: Spread = Spread(4.0, 12.0)
    """The model's reply. Not ours to measure: a 7B model at 16 concurrent requests is in this range."""
    evaluate: Spread = Spread(0.5, 3.0)
    turn_count: Spread = Spread(12.0, 30.0)
    """Turns of an episode."""

    def episode_s(self, rng: random.Random) -> float:
        """Return the duration of one episode; all of its turns take equally long: episodes differ more than turns."""
        turns = max(1, round(self.turn_count.draw(rng)))
        return self.reset.draw(rng) + turns * (self.step.draw(rng) + self.think.draw(rng)) + self.evaluate.draw(rng)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLoad:
    """One training run."""

    name: str
    weight: float = 1.0
    sizes: tuple[int, ...] = (8,)
    """Sizes of its groups, drawn uniformly."""
    share: float = 1.0
    """Its part of the load, relative to the other runs."""


PLACEMENTS = ("drawn", "ideal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulation."""

    placement: str
    """`drawn` (by clients, as in production) or `ideal`."""
    host_count: int
    machines_per_host: int = 48
    runs: tuple[RunLoad, ...] = (RunLoad(name="run"),)
    load: float | None = None
    """Machine time asked for, as a share of all machine time, by groups that arrive at random; None for saturation:
    each run has so many groups open or waiting that machines are always short."""
    minutes: float = 30.0
    """Measured time."""
    warmup_minutes: float = 10.0
    seed: int = 1
    host_mtbf_h: float | None = None
    """Mean time between two failures of a host; None for no failures."""
    repair_s: float = 300.0
    drain_every_s: float | None = None
    """A host begins to drain for an upgrade every so often, one after the other; None for no drains."""
    upgrade_s: float = 60.0
    durations: Durations = field(default_factory=Durations)
    oversubscribed: float = 1.15
    """At saturation: machines wanted at once, as a share of all machines."""

    @property
    def capacity(self) -> int:
        """All machines."""
        return self.host_count * self.machines_per_host
