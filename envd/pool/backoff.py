"""Decide how many machines may boot after some have failed to. Pure: the time comes in as an argument."""


class Backoff:
    """Holds boots back after a failure, twice as long after each further one, and keeps the reason.

    When the pause is over one machine may try; the first that comes up clears the failures.
    """

    def __init__(self, *, min_s: float, max_s: float) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._failure_count = 0
        self._retry_at_s = 0.0
        self._problem = ""

    @property
    def problem(self) -> str:
        """Why the newest failure happened; empty when the newest boot came up."""
        return self._problem

    def retry_at_s(self, now_s: float) -> float | None:
        """Return when the pause ends, on the monotonic clock; None when there is none."""
        return self._retry_at_s if self._retry_at_s > now_s else None

    def starting_limit(self, now_s: float, *, limit: int) -> int:
        """Return how many machines may be starting now, out of `limit`."""
        if self._failure_count == 0:
            return limit
        return 0 if self._retry_at_s > now_s else 1

    def failed(self, now_s: float, problem: str) -> None:
        """Note that a machine did not come up, or did not stay."""
        self._problem = problem
        # Machines that boot together fail together: that is one failure, not a reason to wait 2^n times as long.
        if self._retry_at_s > now_s:
            return
        # The exponent is bounded: an image that has been broken for a week must not overflow.
        delay_s = min(self._max_s, self._min_s * 2.0 ** min(self._failure_count, 32))
        self._failure_count += 1
        self._retry_at_s = now_s + delay_s

    def succeeded(self) -> None:
        """Note that a machine came up."""
        self._failure_count = 0
        self._retry_at_s = 0.0
        self._problem = ""
