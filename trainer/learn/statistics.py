"""Success rates over templates, with intervals. Pure.

Variants of a template are alike, so intervals are bootstrapped over templates, each with all its variants and seeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.evaluate.statistics import bootstrap

ByTemplate = Mapping[str, Sequence[float]]
"""1 or 0 for each valid episode, by template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A mean and its 95 % interval."""

    mean: float | None
    """None without an episode."""
    interval: tuple[float, float] | None
    """None with fewer than two templates."""
    count: int
    """Valid episodes."""

    def as_fields(self, name: str) -> dict[str, object]:
        """Return the fields `NAME`, `NAME_ci` and `NAME_count` of a report."""
        interval = None if self.interval is None else list(self.interval)
        return {name: self.mean, f"{name}_ci": interval, f"{name}_count": self.count}


def rate(found: ByTemplate) -> Rate:
    """Return the mean over all episodes."""
    return _difference({}, found)


def gain(before: ByTemplate, after: ByTemplate) -> Rate:
    """Return the mean of `after` minus that of `before`, over the templates of both; these are resampled together."""
    both = [name for name in before if before[name] and after.get(name)]
    return _difference({name: before[name] for name in both}, {name: after[name] for name in both})


def _difference(before: ByTemplate, after: ByTemplate) -> Rate:
    names = [name for name in after if after[name]]
    if not names:
        return Rate(mean=None, interval=None, count=0)
    sums_N4 = np.array([[*_sum(before.get(name, ())), *_sum(after[name])] for name in names])

    def means(picks_RN: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        first_sum, first_count, last_sum, last_count = sums_N4[picks_RN].sum(axis=1).T
        mean: npt.NDArray[np.float64] = last_sum / last_count - first_sum / np.maximum(first_count, 1)
        return mean

    (mean,) = means(np.arange(len(names))[None, :])
    interval = bootstrap(len(names), means) if len(names) > 1 else None
    return Rate(mean=float(mean), interval=interval, count=int(sums_N4[:, 3].sum()))


def _sum(values: Sequence[float]) -> tuple[float, float]:
    return sum(values), len(values)
