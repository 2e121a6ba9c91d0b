"""Tell how fast leased machines come back, to say when another try may fare better. Pure: time is an argument."""

from collections import deque

#: Enough to smooth groups that end together, few enough to follow a change of task.
_KEEP_COUNT = 32
#: Returns from before this long say nothing of now.
_KEEP_S = 600.0
#: What is told at least, so that nobody comes back at once, and at most, so that nobody stays away for long.
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 120.0


class Turnover:
    """The newest returns of leased machines."""

    def __init__(self) -> None:
        self._returns_s: deque[float] = deque(maxlen=_KEEP_COUNT)

    def returned(self, now_s: float) -> None:
        """Note that a machine came back from its user."""
        self._returns_s.append(now_s)

    def interval_s(self, now_s: float) -> float | None:
        """Return the mean time from one return to the next, the present wait included; None where that is unknown."""
        recent = [at_s for at_s in self._returns_s if at_s > now_s - _KEEP_S]
        # One return tells when, but not how often.
        return (now_s - recent[0]) / (len(recent) - 1) if len(recent) > 1 else None

    def retry_after_s(self, now_s: float, *, machine_count: int, start_s: float, capacity: int) -> float:
        """Estimate in how many seconds so many machines may have come free, within [1, 120].

        Args:
            now_s: The time on the monotonic clock.
            machine_count: How many are waited for, those for groups ahead included.
            start_s: How long a machine takes to come up. While returns are unknown, each turn-over of the pool is
                taken to cost one start: how long episodes run nobody here knows.
            capacity: Machines of the pool.
        """
        interval_s = self.interval_s(now_s)
        wait_s = (
            start_s * (1 + machine_count / capacity) if interval_s is None else start_s + machine_count * interval_s
        )
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, wait_s))
