"""Limit the call rate of each caller: a token bucket of `burst` calls. Pure except for its clock."""

import time
from collections import OrderedDict
from collections.abc import Callable

#: Callers whose buckets are kept, least recently used dropped first; a dropped caller starts with a full bucket.
MAX_CALLERS = 4096


class Bucket:
    """The bucket of one caller; full at first."""

    def __init__(self, *, calls_per_second: float, burst: int, now_s: float) -> None:
        self._rate = calls_per_second
        self._burst = burst
        self._level = float(burst)
        self._seen_s = now_s

    def take(self, now_s: float, count: int = 1) -> float:
        """Take `count` calls and return 0; if there are fewer, take none and return the seconds until there are."""
        elapsed_s = max(0.0, now_s - self._seen_s)
        self._level = min(float(self._burst), self._level + elapsed_s * self._rate)
        self._seen_s = now_s
        if self._level < count:
            return (count - self._level) / self._rate
        self._level -= count
        return 0.0


class RateLimiter:
    """The buckets of all callers."""

    def __init__(self, *, calls_per_second: float, burst: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Limit every caller to the same rate.

        Args:
            calls_per_second: Fill rate of a bucket; 0 for no limit.
            burst: Capacity of a bucket.
        """
        self._calls_per_second = calls_per_second
        self._burst = burst
        self._clock_s = clock_s
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, caller: str, count: int = 1) -> float:
        """Count `count` calls, at most one less than a burst, and return 0; if the caller has fewer left, count none.

        Then return the seconds until it may retry.
        """
        if not self._calls_per_second:
            return 0.0
        now_s = self._clock_s()
        bucket = self._buckets.get(caller)
        if bucket is None:
            bucket = self._buckets[caller] = Bucket(
                calls_per_second=self._calls_per_second, burst=self._burst, now_s=now_s
            )
        self._buckets.move_to_end(caller)
        if len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)
        return bucket.take(now_s, min(count, max(1, self._burst - 1)))
