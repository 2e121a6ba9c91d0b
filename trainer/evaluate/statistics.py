"""Rates with intervals. Pure and deterministic: random draws have a fixed seed.

Attempts at one task are correlated, so they are never treated as independent: with several per task, tasks are
resampled. Variants of a template are alike, too: `pooled_rate` resamples templates, each with all its episodes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ByTemplate = Mapping[str, Sequence[float]]
"""1 or 0 for each valid episode, by template."""
#: The 97.5 % quantile of the standard normal distribution, for 95 % intervals.
_Z = 1.959963984540054
_DRAWS = 10_000
#: Resamples per chunk, so that a thousand tasks need megabytes and not gigabytes.
_CHUNK = 500


@dataclass(frozen=True, slots=True)
class Interval:
    """A rate or a difference, and the 95 % confidence interval around it."""

    mean: float
    low: float
    high: float


def wilson(successes: float, count: int) -> Interval:
    """Return a proportion with its score interval (Wilson 1927; see Agresti and Coull 1998 for why not the normal one).

    Args:
        successes: Number of successes, 0 to `count`; fractional if each of the `count` values is itself a mean.
        count: Number of independent attempts.

    Raises:
        ValueError: `count` is 0, or `successes` is out of range.
    """
    if count < 1 or not 0 <= successes <= count:
        raise ValueError(f"{successes} of {count} is not a proportion")
    rate, z2 = successes / count, _Z * _Z
    middle = (rate + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z / (1 + z2 / count) * math.sqrt(rate * (1 - rate) / count + z2 / (4 * count * count))
    return Interval(rate, min(rate, max(0.0, middle - half)), max(rate, min(1.0, middle + half)))


def success_rate(successes_by_task: Sequence[Sequence[bool]]) -> Interval:
    """Return the share of successful attempts; tasks have equal weight, however often each was attempted.

    One attempt per task gives Wilson's interval. Several give a percentile bootstrap over tasks (Efron and Tibshirani
    1993; clusters: Field and Welsh 2007), because attempts at one task are not independent. See `mean_rate` for equal
    rates.

    Raises:
        ValueError: No tasks, or a task without attempts.
    """
    if not successes_by_task or not all(successes_by_task):
        raise ValueError("a rate needs at least one task and an attempt at each")
    means = np.array([np.mean(attempts) for attempts in successes_by_task])
    if all(len(attempts) == 1 for attempts in successes_by_task):
        return wilson(float(means.sum()), len(means))
    return mean_rate(means)


def mean_rate(values_N: npt.NDArray[np.float64]) -> Interval:
    """Return the mean of tasks' rates or mean scores, each in [0, 1], with an interval.

    It is a bootstrap over tasks, which has zero width if all values are equal: 8 of 8 prove no mean of 1. The interval
    is then Wilson's for one attempt per task; no values in [0, 1] with this mean vary more than zeros and ones.

    Raises:
        ValueError: No values.
    """
    if len(values_N) and np.ptp(values_N) == 0:
        return wilson(float(values_N.sum()), len(values_N))
    return bootstrap_mean(values_N)


def bootstrap_mean(values_N: npt.NDArray[np.float64]) -> Interval:
    """Return the mean with a percentile bootstrap interval: 10,000 resamples of the values, from a fixed seed."""
    if not len(values_N):
        raise ValueError("a mean needs at least one value")
    low, high = bootstrap(len(values_N), lambda picks_RN: values_N[picks_RN].mean(axis=1))
    mean = float(values_N.mean())
    # Rounding may separate equal values from their own mean.
    return Interval(mean, min(mean, low), max(mean, high))


def bootstrap(count: int, statistic: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float64]]) -> tuple[float, float]:
    """Return the 95 % percentile interval of a statistic: 10,000 resamples, from a fixed seed.

    Args:
        count: Number of items to resample.
        statistic: Maps the items' indices (resamples, count) to a value for each resample.
    """
    random = np.random.default_rng(0)
    sizes = [min(_CHUNK, _DRAWS - start) for start in range(0, _DRAWS, _CHUNK)]
    values = [statistic(random.integers(0, count, size=(size, count))) for size in sizes]
    low, high = np.quantile(np.concatenate(values), [0.025, 0.975])
    return float(low), float(high)


def mcnemar(gained: int, lost: int) -> float:
    """Return the exact two-sided p-value of McNemar's test (1947) that gains and losses are equally likely.

    Args:
        gained: Tasks that failed before and succeed now.
        lost: Tasks that succeeded before and fail now.
    """
    count, fewer = gained + lost, min(gained, lost)
    tail = math.fsum(math.comb(count, k) / 2.0**count for k in range(fewer + 1))
    return min(1.0, 2 * tail)


def paired_difference(before_N: npt.NDArray[np.float64], after_N: npt.NDArray[np.float64]) -> Interval:
    """Return the mean change of tasks' success rates.

    If each rate is 0 or 1 (one attempt per task), the interval is Newcombe's for paired proportions (Statistics in
    Medicine 17, 1998, 2635-2650, method 10), which does not shrink to a point if no task changed. Otherwise it is a
    percentile bootstrap over tasks, and Newcombe's if all changed equally.

    Args:
        before_N: Rate of each task, in [0, 1].
        after_N: Rates of the same tasks.
    """
    change_N = after_N - before_N
    if np.ptp(change_N) > 0 and not np.isin([before_N, after_N], [0.0, 1.0]).all():
        return bootstrap_mean(change_N)
    before, after = (wilson(float(rates_N.sum()), len(rates_N)) for rates_N in (before_N, after_N))
    # The phi coefficient is the correlation; a positive covariance has a continuity correction for few tasks.
    covariance = float(np.mean(before_N * after_N) - before.mean * after.mean)
    covariance = max(0.0, covariance - 0.5 / len(change_N)) if covariance > 0 else covariance
    spread = float(np.std(before_N) * np.std(after_N))
    phi = covariance / spread if spread > 0 else 0.0
    low = _root(after.mean - after.low, before.high - before.mean, phi)
    high = _root(before.mean - before.low, after.high - after.mean, phi)
    difference = float(change_N.mean())
    return Interval(difference, max(-1.0, difference - low), min(1.0, difference + high))


def _root(a: float, b: float, phi: float) -> float:
    return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledRate:
    """The mean of all episodes, and its 95 % interval."""

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


def pooled_rate(found: ByTemplate) -> PooledRate:
    """Return the mean over all episodes."""
    return _difference({}, found)


def pooled_gain(before: ByTemplate, after: ByTemplate) -> PooledRate:
    """Return the mean of `after` minus that of `before`, over the templates of both; these are resampled together."""
    both = [name for name in before if before[name] and after.get(name)]
    return _difference({name: before[name] for name in both}, {name: after[name] for name in both})


def _difference(before: ByTemplate, after: ByTemplate) -> PooledRate:
    names = [name for name in after if after[name]]
    if not names:
        return PooledRate(mean=None, interval=None, count=0)
    sums_N4 = np.array([[*_sum(before.get(name, ())), *_sum(after[name])] for name in names])

    def means(picks_RN: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        first_sum, first_count, last_sum, last_count = sums_N4[picks_RN].sum(axis=1).T
        mean: npt.NDArray[np.float64] = last_sum / last_count - first_sum / np.maximum(first_count, 1)
        return mean

    (mean,) = means(np.arange(len(names))[None, :])
    interval = bootstrap(len(names), means) if len(names) > 1 else None
    return PooledRate(mean=float(mean), interval=interval, count=int(sums_N4[:, 3].sum()))


def _sum(values: Sequence[float]) -> tuple[float, float]:
    return sum(values), len(values)
