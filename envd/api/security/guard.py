"""Admits or rejects calls by token, scope, owner of the episode, and the limits of each caller.

These are its call rate, and its running calls with the bodies that they receive and hold.

Checked before the body of a call is read (`identify`, `count`), before each request is served (`admit`), and before
each message of a stream is sent, so that revoking a token takes effect at once.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final, Self

from envd.api.security.access import ALWAYS_SERVED, TRUSTED, Caller, bearer_token
from envd.api.security.secret_files import Reloaded
from envd.api.security.tokens import TokenTable
from envd.api.status import is_failure_of_ours, reason_of
from envd.base.errors import InvalidRequest, RateLimited, Unauthenticated, unknown_episode

#: As grpc provides it.
Metadata = Iterable[tuple[str, str | bytes]]

#: Running calls of one host without a token to each method of `Health`.
MAX_HEALTH_CALLS: Final = 16
#: Most ids that count in one request; a request with more is invalid.
MAX_COUNTED_IDS: Final = 1000
#: Ids per second, and at once, in `KeepAlive` and `Close`, which the configured call rate does not limit.
RENEWALS_PER_S: Final = 2000.0
RENEWAL_BURST: Final = 20_000
#: Messages with bytes for guests' ports per second, and at once, of one caller: half of a processor's core.
MESSAGES_PER_S: Final = 4000.0
MESSAGE_BURST: Final = 4000
#: Refused calls of one caller and reason that are logged at once, and the interval of further ones.
BURST: Final = 10
INTERVAL_S: Final = 10.0
#: Callers whose call rate is known, least recently used dropped first; a dropped caller starts with a full bucket.
MAX_CALLERS = 4096
#: Requests of one caller that are received at once; more wait. gRPC reveals a message's size only with its end, so each
#: may take the largest message's size.
MAX_RECEIVING = 16
#: Bytes of the requests that one caller's calls hold.
MAX_BYTES = 512 << 20
#: Most time for receiving a request if places are scarce: 32 MiB at 2 Mbit/s.
RECEIVE_TIMEOUT_S = 120.0

_RETRY_AFTER_S = 1.0


class RateLimiter:
    """The call rate of each caller: a token bucket of `burst` calls, full at first."""

    def __init__(self, *, calls_per_second: float, burst: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Limit every caller to the same rate.

        Args:
            calls_per_second: Fill rate of a bucket; 0 for no limit.
            burst: Capacity of a bucket.
        """
        self._calls_per_second = calls_per_second
        self._burst = burst
        self._clock_s = clock_s
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Calls that each caller has left, and when that was counted."""

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, caller: str, count: int = 1) -> float:
        """Count `count` calls, at most one less than a burst, and return 0; if the caller has fewer left, count none.

        Then return the seconds until it may retry.
        """
        if not self._calls_per_second:
            return 0.0
        count = min(count, max(1, self._burst - 1))
        now_s = self._clock_s()
        level, seen_s = self._buckets.get(caller, (float(self._burst), now_s))
        level = min(float(self._burst), level + max(0.0, now_s - seen_s) * self._calls_per_second)
        has_enough = level >= count
        self._buckets[caller] = (level - count if has_enough else level, now_s)
        self._buckets.move_to_end(caller)
        if len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)
        return 0.0 if has_enough else (count - level) / self._calls_per_second


class CallerLoad:
    """The running calls of one caller."""

    def __init__(self) -> None:
        self.call_count = 0
        self.byte_count = 0
        self.receiving_count = 0
        self.crowded = asyncio.Semaphore(MAX_RECEIVING - MAX_RECEIVING // 2)
        """Admits calls when half of the places are taken."""


class RunningCall:
    """One call, from entering it to leaving it; holds the bytes of its newest request."""

    __slots__ = ("_byte_count", "_caller", "_callers", "_max_calls", "_name", "_receive_timeout_s")

    def __init__(
        self, callers: dict[str, CallerLoad], name: str, *, max_calls: int, receive_timeout_s: float = RECEIVE_TIMEOUT_S
    ) -> None:
        """Describe a call, which counts while it is entered; enter it at once.

        Args:
            callers: Those with running calls, by name.
        """
        self._callers = callers
        self._name = name
        self._caller = callers.get(name) or CallerLoad()
        self._max_calls = max_calls
        self._receive_timeout_s = receive_timeout_s
        self._byte_count = 0

    def __enter__(self) -> Self:
        """Count the call. Raises: RateLimited: as many as allowed are running."""
        caller = self._caller
        if caller.call_count >= self._max_calls:
            raise RateLimited(
                f"{self._name}: {caller.call_count} calls are running, at most {self._max_calls};"
                f" retry in {_RETRY_AFTER_S:g} s",
                retry_after_s=_RETRY_AFTER_S,
            )
        caller.call_count += 1
        self._callers[self._name] = caller
        return self

    def __exit__(self, *_: object) -> None:
        caller = self._caller
        caller.byte_count -= self._byte_count
        caller.call_count -= 1
        if not caller.call_count:
            del self._callers[self._name]

    async def receive(self, requests: AsyncIterator[bytes]) -> bytes | None:
        """Return the only request; None if there is none. Waits while the caller's other calls receive theirs.

        Raises:
            InvalidRequest: It did not arrive in time, and more than a few others had not arrived either.
        """
        caller = self._caller
        if caller.receiving_count < MAX_RECEIVING // 2:
            # No timeout, which would cost each call 8 us: calls without requests cannot take all places this way.
            caller.receiving_count += 1
            try:
                return await anext(requests, None)
            finally:
                caller.receiving_count -= 1
        try:
            async with caller.crowded, asyncio.timeout(self._receive_timeout_s):
                return await anext(requests, None)
        except TimeoutError:
            raise InvalidRequest("request", f"did not arrive within {self._receive_timeout_s:g} s") from None

    def hold(self, byte_count: int) -> None:
        """Count the bytes of a request instead of the previous one's. Raises: RateLimited."""
        caller = self._caller
        total = caller.byte_count - self._byte_count + byte_count
        if total > MAX_BYTES:
            raise RateLimited(
                f"{self._name}: running calls hold {caller.byte_count} bytes of requests, at most {MAX_BYTES};"
                f" retry in {_RETRY_AFTER_S:g} s",
                retry_after_s=_RETRY_AFTER_S,
            )
        caller.byte_count = total
        self._byte_count = byte_count


class CallGuard:
    """Guards the methods of one service."""

    def __init__(
        self,
        *,
        tokens: Reloaded[TokenTable] | None,
        limiter: RateLimiter,
        renewals: RateLimiter,
        max_calls: int,
        owner_of: Callable[[str], str | None],
    ) -> None:
        """Set up a guard.

        Args:
            tokens: The valid tokens; None to trust every caller.
            renewals: Limits the rate of ids in the calls that `limiter` exempts, which only keep or release.
            owner_of: Returns the owner of an episode; None if the id is unknown.
        """
        self._tokens = tokens
        self._limiter = limiter
        self._renewals = renewals
        self._messages = RateLimiter(calls_per_second=MESSAGES_PER_S, burst=MESSAGE_BURST)
        self._in_flight: dict[str, CallerLoad] = {}
        # A failure of the daemon costs a tenth of a refused call: 100 are logged at once, and then one per second.
        self._log_lines = RateLimiter(calls_per_second=BURST / INTERVAL_S, burst=BURST * BURST)
        self._omitted: OrderedDict[str, int] = OrderedDict()
        """Failures that were not logged since the last one that was, by caller and reason."""
        self._max_calls = max_calls
        self._owner_of = owner_of

    def identify(self, method: str, metadata: Metadata) -> Caller:
        """Return the caller, if it may call the method.

        Raises:
            Unauthenticated: No token, or an unknown one.
            ScopeTooSmall: The token's scope does not cover the method.
        """
        caller = self._authenticate(metadata)
        caller.require(method)
        return caller

    def find_caller(self, metadata: Metadata) -> Caller | None:
        try:
            return self._authenticate(metadata)
        except Unauthenticated:
            return None

    def running_call(self, caller: Caller, method: str, peer: str) -> RunningCall:
        """Return a call that counts while it is entered, which raises RateLimited."""
        name = _name_of(caller, peer)
        # Separately, so that a caller can always renew and close its episodes.
        name = f"{name}, {method}" if method in ALWAYS_SERVED else name
        return RunningCall(self._in_flight, name, max_calls=self._max_calls)

    def running_health_call(self, method: str, peer: str) -> RunningCall:
        """Return an unknown caller's health call that counts while it is entered, which raises RateLimited."""
        return RunningCall(self._in_flight, f"{method} of {_host(peer)}", max_calls=MAX_HEALTH_CALLS)

    def count(self, caller: Caller, method: str, peer: str) -> None:
        """Count a request. Raises: RateLimited: the caller exceeds its call rate."""
        _take(self._renewals if method in ALWAYS_SERVED else self._limiter, _name_of(caller, peer))

    def message_wait_s(self, caller: Caller, peer: str) -> float:
        """Count a message with bytes for a guest's port and return 0, or return the seconds until it may be taken."""
        return self._messages.take(_name_of(caller, peer))

    def count_health_call(self, peer: str) -> None:
        """Count a health call against its host. Raises: RateLimited."""
        _take(self._limiter, f"health of {_host(peer)}")

    def count_unauthenticated(self, peer: str) -> None:
        """Count an unauthenticated call against its host. Raises: RateLimited."""
        _take(self._limiter, _host(peer))

    def log_text(self, error: Exception, caller_name: str, peer: str) -> str | None:
        """Return a failure's text for the log, with the number of equal ones omitted before it; None to omit it.

        A caller can make hundreds per second.
        """
        caller = f"token {caller_name!r}" if caller_name else _host(peer)
        reason = reason_of(error)
        key = f"{caller} {reason}"
        if self._log_lines.take(key, 1 if is_failure_of_ours(error) else BURST):
            self._omitted[key] = self._omitted.pop(key, 0) + 1
            if len(self._omitted) > MAX_CALLERS:
                self._omitted.popitem(last=False)
            return None
        count = self._omitted.pop(key, 0)
        return f"{error} (after {count} more {reason} of {caller} that are not logged)" if count else str(error)

    def admit(self, caller: Caller, method: str, *, episode_id: str, id_count: int, peer: str) -> None:
        """Check that a request may be served.

        Args:
            episode_id: The episode that the request names; empty if it names none or several.
            id_count: Number of episodes or tasks that it names, if it names several; each counts as a call.

        Raises:
            EpisodeNotFound: The episode is another caller's, or unknown; the error is the same for both.
            RateLimited: The caller names too many.
        """
        if method not in ALWAYS_SERVED:
            self.check_owner(caller, method, episode_id)
        if id_count > 1:
            limiter = self._renewals if method in ALWAYS_SERVED else self._limiter
            _take(limiter, _name_of(caller, peer), min(id_count, MAX_COUNTED_IDS) - 1)

    def check_owner(self, caller: Caller, method: str, episode_id: str) -> None:
        """Check that a caller may call a method for an episode, if one is given. Raises: EpisodeNotFound."""
        if episode_id and not caller.may_call(method, self._owner_of(episode_id)):
            raise unknown_episode(episode_id)

    def _authenticate(self, metadata: Metadata) -> Caller:
        if self._tokens is None:
            return TRUSTED
        found = self._tokens.get().find(bearer_token(metadata))
        if found is None:
            raise Unauthenticated(
                "the token is unknown here (mistyped, replaced or revoked); ask the operator for a valid one"
            )
        return found


def _take(limiter: RateLimiter, name: str, count: int = 1) -> None:
    wait_s = limiter.take(name, count)
    if wait_s:
        raise RateLimited(f"{name}: too many calls; retry in {wait_s:.3g} s", retry_after_s=wait_s)


def _name_of(caller: Caller, peer: str) -> str:
    return f"token {caller.name!r}" if caller.name else _host(peer)


def _host(peer: str) -> str:
    """Return the host of a grpc peer, such as ipv4:192.0.2.7:41234: a host's connections share one rate limit."""
    return f"host {peer.rpartition(':')[0]}"
