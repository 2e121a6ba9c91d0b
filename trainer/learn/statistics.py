"""Success rates over templates, with intervals. Pure.

Variants of a template are alike, so intervals are bootstrapped over templates, each with all its variants and seeds.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_RESAMPLES = 2000

ByTemplate = Mapping[str, Sequence[float]]
"""1 or 0 for each valid episode, by template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A mean and its 95 % interval; None without an episode."""

    mean: float | None
    interval: tuple[float, float] | None
    count: int
    """Valid episodes."""

    def as_fields(self, name: str) -> dict[str, object]:
        """Return the fields `NAME`, `NAME_ci` and `NAME_count` of a report."""
        interval = None if self.interval is None else list(self.interval)
        return {name: self.mean, f"{name}_ci": interval, f"{name}_count": self.count}


def rate(found: ByTemplate, *, seed: int = 0) -> Rate:
    """Return the mean over all episodes."""
    return _difference({}, found, seed=seed)


def gain(before: ByTemplate, after: ByTemplate, *, seed: int = 0) -> Rate:
    """Return the mean of `after` minus that of `before`, over the templates of both; these are resampled together."""
    both = [name for name in before if before[name] and after.get(name)]
    return _difference({name: before[name] for name in both}, {name: after[name] for name in both}, seed=seed)


def _difference(before: ByTemplate, after: ByTemplate, *, seed: int) -> Rate:
    names = [name for name in after if after[name]]
    if not names:
        return Rate(mean=None, interval=None, count=0)
    sums = {name: (*_sum(before.get(name, ())), *_sum(after[name])) for name in names}

    def mean(chosen: Sequence[str]) -> float:
        first_sum, first_count, last_sum, last_count = map(sum, zip(*(sums[name] for name in chosen), strict=True))
        return float(last_sum / last_count - (first_sum / first_count if first_count else 0.0))

    rng = random.Random(seed)  # noqa: S311 -- not a secret
    means = sorted(mean(rng.choices(names, k=len(names))) for _ in range(_RESAMPLES))
    interval = (means[round(0.025 * _RESAMPLES)], means[round(0.975 * _RESAMPLES) - 1])
    return Rate(mean=mean(names), interval=interval, count=int(sum(total[3] for total in sums.values())))


def _sum(values: Sequence[float]) -> tuple[float, float]:
    return sum(values), len(values)
