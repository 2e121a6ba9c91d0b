"""Decide whether and when to retry a call. Pure: no I/O, no clock, no randomness."""

from dataclasses import dataclass
from datetime import timedelta

from cuaenv.client.errors import DeadlineExceeded, EnvError, Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How calls are retried, within their deadline and under the same request id."""

    attempt_timeout: timedelta = timedelta(seconds=60)
    """Retry after this long without a response; the service joins the retry to the running call."""
    first_pause: timedelta = timedelta(milliseconds=100)
    """Upper bound of the first pause; it doubles with each attempt."""
    max_pause: timedelta = timedelta(seconds=5)
    reconnect_timeout: timedelta = timedelta(seconds=10)
    """How long to retry a host that may have opened episodes before trying another."""
    patience: timedelta = timedelta(minutes=1)
    """How long a reset waits in one host's queue before another host is chosen."""


def retry_pause_s(error: EnvError, *, attempt: int, policy: RetryPolicy, jitter: float) -> float | None:
    """Return how many seconds to wait before a retry, or None if a retry cannot help.

    Args:
        error: Error of the last attempt.
        attempt: Number of attempts that failed before it.
        policy: Bounds of the pause.
        jitter: Random in [0, 1), so that clients that failed together do not retry together.
    """
    if error.retry_after is not None:
        return error.retry_after.total_seconds() + jitter * policy.first_pause.total_seconds()
    if isinstance(error, Unavailable | DeadlineExceeded):
        # Larger exponents change nothing, and would overflow.
        bound_s = policy.first_pause.total_seconds() * 2.0 ** min(attempt, 30)
        return jitter * min(bound_s, policy.max_pause.total_seconds())
    return None
