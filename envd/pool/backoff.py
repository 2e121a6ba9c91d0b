"""Decide how many machines may start after failures, and whether groups should wait. Pure: time is an argument.

This is the circuit breaker of a pool. It is CLOSED until too many starts fail in a row. Then groups are refused and one
machine at a time tries, until one starts.
"""

import logging
from enum import Enum

logger = logging.getLogger(__name__)


class BreakerState(Enum):
    """Whether machines are worth waiting for."""

    #: They are: few starts, or none, have failed in a row.
    CLOSED = "closed"
    #: They are not: too many starts have failed in a row, and the next try is after a pause.
    OPEN = "open"
    #: The pause is over: one machine tries, and closes the breaker if it starts.
    HALF_OPEN = "half_open"


class Backoff:
    """Delays starts after a failure, twice as long after each further one, and keeps the reason.

    After the pause one machine may try; the first that starts clears the failures.
    """

    def __init__(self, *, min_s: float, max_s: float, failing_after: int) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._failing_after = failing_after
        self.failure_count = 0
        """Failures in a row; machines that failed together count once."""
        self._is_final = False
        self._was_failing = False
        self._retry_at_s = 0.0
        self.problem = ""
        """Reason of the newest failure; empty if a machine has started since."""

    @property
    def is_failing(self) -> bool:
        """Whether too many starts have failed in a row to wait for the next."""
        return self._is_final or self.failure_count >= self._failing_after

    @property
    def summary(self) -> str:
        """The number of failures in a row, for messages."""
        return "1 failure" if self.failure_count == 1 else f"{self.failure_count} failures in a row"

    def log_change(self, pool: str) -> None:
        """Log once when a pool's machines are no longer worth waiting for, and when they are again."""
        if self.is_failing and not self._was_failing:
            logger.error(
                "pool %s: FAILING: no machine starts, so resets are refused (POOL_FAILING) until one does; it tries"
                " again by itself: %s",
                pool,
                self.problem,
            )
        elif self._was_failing and not self.is_failing:
            logger.warning("pool %s: a machine has started; resets are served again", pool)
        self._was_failing = self.is_failing

    def breaker(self, now_s: float) -> BreakerState:
        if not self.is_failing:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._retry_at_s > now_s else BreakerState.HALF_OPEN

    def retry_at_s(self, now_s: float) -> float | None:
        """Return when the pause ends, on the monotonic clock; None outside a pause."""
        return self._retry_at_s if self._retry_at_s > now_s else None

    def starting_limit(self, now_s: float, *, limit: int) -> int:
        """Return how many machines may be starting now, out of `limit`."""
        if self.failure_count == 0:
            return limit
        return 0 if self._retry_at_s > now_s else 1

    def failed(self, now_s: float, problem: str, *, cleared: int = 0, is_final: bool = False) -> None:
        """Record a failed start, or the loss of an unused machine whose start had cleared `cleared` failures.

        With `is_final`, groups do not wait for further failures.
        """
        self.problem = problem
        self._is_final = is_final
        self.failure_count = max(self.failure_count, cleared)
        # Machines that start together fail together: that is one failure, not a reason to wait 2^n times as long.
        if self._retry_at_s > now_s:
            return
        # The exponent is bounded: an image that has been broken for a week must not overflow.
        delay_s = min(self._max_s, self._min_s * 2.0 ** min(self.failure_count, 32))
        self.failure_count += 1
        self._retry_at_s = now_s + delay_s

    def succeeded(self) -> int:
        """Record that a machine started; return how many failures that clears."""
        cleared, self.failure_count = self.failure_count, 0
        self._is_final = False
        self._retry_at_s = 0.0
        self.problem = ""
        return cleared
