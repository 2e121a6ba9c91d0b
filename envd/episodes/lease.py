"""Decide until when an episode may keep its machine. Pure: the time comes in as an argument."""

from collections.abc import Iterable
from typing import Final

MAX_CALL_S: Final = 4200.0
"""A call keeps its lease for this long: 64 waits of 60 s, settling for 300 s, and a minute."""

_RENEWAL_S = 1.0


class Lease:
    """Expires after `ttl_s` without a call, and `MAX_CALL_S` later if a call is running."""

    def __init__(self, *, ttl_s: float, now_s: float) -> None:
        self.ttl_s = ttl_s
        self.expire_s = now_s + ttl_s
        """When it expires if no call renews it or is running, on the monotonic clock."""
        self.idle_since_s = now_s
        """End of the last call, on the monotonic clock."""
        self.expects_idle = False
        """Whether its client has said that no call follows soon."""
        self.call_count = 0
        """Calls that are running."""

    @property
    def reclaim_s(self) -> float:
        """When the machine may be reclaimed, unless a call ends earlier or renews the lease."""
        return self.expire_s + MAX_CALL_S if self.in_call else self.expire_s

    @property
    def in_call(self) -> bool:
        return self.call_count > 0

    def renew(self, now_s: float, *, ttl_s: float | None = None) -> None:
        if ttl_s is not None:
            self.ttl_s = ttl_s
        self.expire_s = now_s + self.ttl_s

    def extend(self, lag_s: float, *, now_s: float) -> None:
        """Add the time in which no call could renew it; if it expired then, leave time for waiting renewals."""
        had_expired = self.expire_s < now_s - lag_s
        self.expire_s += lag_s
        if not had_expired:
            self.expire_s = max(self.expire_s, now_s + _RENEWAL_S)

    def begin_call(self) -> None:
        self.call_count += 1
        self.expects_idle = False

    def end_call(self, now_s: float, *, renews: bool) -> None:
        """Count a call that ended; with `renews`, restart the lease."""
        self.call_count -= 1
        self.idle_since_s = now_s
        if renews:
            self.renew(now_s)

    def has_expired(self, now_s: float) -> bool:
        return now_s >= self.reclaim_s


def next_expiry_s(leases: Iterable[Lease]) -> float | None:
    """Return when the first machine may be reclaimed; None without leases."""
    return min((lease.reclaim_s for lease in leases), default=None)
