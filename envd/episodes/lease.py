"""Decide until when an episode may keep its machine. Pure: the time comes in as an argument."""

from collections.abc import Iterable


class Lease:
    """Lapses when its holder has been silent for `ttl_s`; never while a call of the holder is running."""

    def __init__(self, *, ttl_s: float, now_s: float) -> None:
        self.ttl_s = ttl_s
        self._expire_s = now_s + ttl_s
        self._call_count = 0

    @property
    def expire_s(self) -> float:
        """When it lapses if nothing else happens, on the monotonic clock."""
        return self._expire_s

    @property
    def in_call(self) -> bool:
        """Whether a call is running, so that it cannot lapse."""
        return self._call_count > 0

    def renew(self, now_s: float, *, ttl_s: float | None = None) -> None:
        """Start over, from now on with `ttl_s` if one is given."""
        if ttl_s is not None:
            self.ttl_s = ttl_s
        self._expire_s = now_s + self.ttl_s

    def expire_at(self, expire_s: float) -> None:
        """Lapse then, if nothing else happens."""
        self._expire_s = expire_s

    def begin_call(self) -> None:
        """Note that a call runs."""
        self._call_count += 1

    def end_call(self, now_s: float, *, renews: bool) -> None:
        """Note that a call has ended; with `renews`, start over."""
        self._call_count -= 1
        if renews:
            self.renew(now_s)

    def has_lapsed(self, now_s: float) -> bool:
        """Tell whether the machine may be taken back."""
        return not self.in_call and now_s >= self._expire_s


def next_expiry_s(leases: Iterable[Lease]) -> float | None:
    """Return when the first lease lapses that can; None if none can."""
    return min((lease.expire_s for lease in leases if not lease.in_call), default=None)
