"""Decide how many machines may boot after some have failed to, and whether to wait for any. Pure: time is an argument.

The circuit breaker of a pool: CLOSED until so many failures in a row, then nobody waits for machines that will not
come, and one at a time tries until one comes up.
"""

from enum import Enum

#: With pauses of 1, 2, 4, ... s about half a minute, where boots fail at once.
FAILING_AFTER = 6


class BreakerState(Enum):
    """Whether machines are worth waiting for."""

    #: They are: few have failed in a row, if any.
    CLOSED = "closed"
    #: They are not: too many have failed in a row, and the next try is after a pause.
    OPEN = "open"
    #: The pause is over: one machine tries, and if it comes up the breaker is closed.
    HALF_OPEN = "half_open"


class Backoff:
    """Holds boots back after a failure, twice as long after each further one, and keeps the reason.

    When the pause is over one machine may try; the first that comes up clears the failures.
    """

    def __init__(self, *, min_s: float, max_s: float, failing_after: int = FAILING_AFTER) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._failing_after = failing_after
        self._failure_count = 0
        self._retry_at_s = 0.0
        self._problem = ""

    @property
    def problem(self) -> str:
        """Why the newest failure happened; empty when the newest boot came up."""
        return self._problem

    @property
    def failure_count(self) -> int:
        """Failures in a row; machines that failed together count once."""
        return self._failure_count

    @property
    def is_failing(self) -> bool:
        """Whether so many have failed in a row that nobody should wait for the next."""
        return self._failure_count >= self._failing_after

    def breaker(self, now_s: float) -> BreakerState:
        """Return the state of the breaker."""
        if not self.is_failing:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._retry_at_s > now_s else BreakerState.HALF_OPEN

    def retry_at_s(self, now_s: float) -> float | None:
        """Return when the pause ends, on the monotonic clock; None when there is none."""
        return self._retry_at_s if self._retry_at_s > now_s else None

    def starting_limit(self, now_s: float, *, limit: int) -> int:
        """Return how many machines may be starting now, out of `limit`."""
        if self._failure_count == 0:
            return limit
        return 0 if self._retry_at_s > now_s else 1

    def failed(self, now_s: float, problem: str, *, cleared: int = 0) -> None:
        """Note that a machine did not come up, or that one did not stay which had cleared so many failures."""
        self._problem = problem
        self._failure_count = max(self._failure_count, cleared)
        # Machines that boot together fail together: that is one failure, not a reason to wait 2^n times as long.
        if self._retry_at_s > now_s:
            return
        # The exponent is bounded: an image that has been broken for a week must not overflow.
        delay_s = min(self._max_s, self._min_s * 2.0 ** min(self._failure_count, 32))
        self._failure_count += 1
        self._retry_at_s = now_s + delay_s

    def succeeded(self) -> int:
        """Note that a machine came up; return how many failures that clears."""
        cleared, self._failure_count = self._failure_count, 0
        self._retry_at_s = 0.0
        self._problem = ""
        return cleared
