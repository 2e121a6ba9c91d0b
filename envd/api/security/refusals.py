"""Limits the log lines of refused calls, with which a caller could otherwise fill the disk."""

from collections import OrderedDict
from typing import Final

from envd.api.security.rate import MAX_CALLERS, RateLimiter
from envd.base.errors import EpisodeNotFound, InvalidRequest, ScopeTooSmall, Unauthenticated

#: Lines of one caller and reason that are logged at once, and the interval of further ones.
BURST: Final = 10
INTERVAL_S: Final = 10.0
#: Failures of calls that did nothing, so that a caller can make hundreds per second.
_REFUSALS: Final = (EpisodeNotFound, InvalidRequest, ScopeTooSmall, Unauthenticated)


class RefusalLog:
    """Decides which refused calls are logged, and counts the others."""

    def __init__(self) -> None:
        self._lines = RateLimiter(calls_per_second=1 / INTERVAL_S, burst=BURST)
        self._omitted: OrderedDict[str, int] = OrderedDict()

    def describe(self, caller: str, error: Exception) -> str | None:
        """Return the text of a failure for the log, with the number of equal ones omitted before it; None to omit it.

        Args:
            error: The failure. Only refusals are ever omitted.
        """
        if not isinstance(error, _REFUSALS):
            return str(error)
        key = f"{caller} {error.reason}"
        if self._lines.take(key):
            self._omitted[key] = self._omitted.pop(key, 0) + 1
            if len(self._omitted) > MAX_CALLERS:
                self._omitted.popitem(last=False)
            return None
        count = self._omitted.pop(key, 0)
        return f"{error} (after {count} more {error.reason} of {caller} that are not logged)" if count else str(error)
