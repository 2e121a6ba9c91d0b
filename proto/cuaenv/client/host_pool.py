"""The hosts of one client in one event loop: opens episodes where its placement says, and asks all hosts.

Counts need no lock: code between two awaits is atomic.
"""

import asyncio
import contextlib
import logging
import random
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

from cuaenv.client.credentials import Access
from cuaenv.client.drawn_placement import DrawnPlacement, OpenRequest
from cuaenv.client.errors import DeadlineExceeded, EnvError, Unavailable
from cuaenv.client.host import Host, HostStatistics
from cuaenv.client.limiter import EpisodeLimiter
from cuaenv.client.placement import NextAttempt, RetryPolicy, next_attempt, retry_pause_s

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_CLOSE_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStatistics:
    """Statistics of a client in one event loop."""

    hosts: tuple[HostStatistics, ...]
    gated_count: int
    """Episodes that wait because of `max_episodes`."""


class HostPool:
    """Opens episodes on hosts."""

    def __init__(
        self,
        targets: Sequence[str],
        *,
        access: Access,
        retry: RetryPolicy,
        keep_alive_interval: timedelta | None,
        max_episodes: int | None,
        rng: random.Random,
    ) -> None:
        """Prepare; nothing is connected yet."""
        self.limiter = EpisodeLimiter(max_episodes)
        self.opened: weakref.WeakSet[Any] = weakref.WeakSet()
        """Each `AsyncEpisode` without a block; the client closes them at its end."""
        self._retry = retry
        self._rng = rng
        self._placement = DrawnPlacement(
            targets, access=access, retry=retry, keep_alive_interval=keep_alive_interval, rng=rng
        )

    def __repr__(self) -> str:
        return f"<HostPool {self._placement}, {self.limiter}>"

    @property
    def may_choose(self) -> bool:
        """Whether episodes may be opened on one host or another."""
        return self._placement.only_host is None

    def statistics(self) -> ClientStatistics:
        hosts = tuple(host.statistics() for host in self._placement.known)
        return ClientStatistics(hosts=hosts, gated_count=self.limiter.waiting_count)

    async def wait_until_idle(self, timeout: timedelta) -> None:
        """Return when no episode is open or being opened, or after `timeout`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout.total_seconds()):
                while any(len(host.leases) or host.opener.open_count for host in self._placement.known):
                    await self._placement.changed.wait()

    async def aclose(self) -> None:
        """Wait at most 20 s until abandoned openings have ended, then disconnect. Idempotent."""
        await self._placement.aclose()
        await asyncio.gather(*(host.aclose(_CLOSE_TIMEOUT_S) for host in self._placement.known))

    async def open(self, opening: OpenRequest) -> tuple[Host, Any]:
        """Open episodes on one host; return it, and its response.

        Raises:
            EnvError: None were opened; or no response came, and leases end what was opened.
        """
        host = opening.host or self._placement.only_host
        if host is not None:
            return host, await self._open_there(opening, host)
        while True:
            host = await self._placement.place(opening)
            try:
                return host, await self._attempt(opening, host, may_abandon=True)
            except EnvError as error:
                _note(opening, error)
                self._placement.failed(opening, host, error)

    async def _open_there(self, opening: OpenRequest, host: Host) -> Any:
        """Open episodes on the only possible host. Raises: EnvError."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                return await self._attempt(opening, host, may_abandon=False)
            except EnvError as error:
                _note(opening, error)
                pause_s = retry_pause_s(error, attempt=0, policy=self._retry, jitter=self._rng.random())
                if next_attempt(error) is not NextAttempt.LATER or pause_s is None:
                    raise
                if loop.time() + pause_s >= opening.deadline_s:
                    raise
                await asyncio.sleep(pause_s)
                if loop.time() >= opening.deadline_s:  # the sleep overran
                    raise

    async def _attempt(self, opening: OpenRequest, host: Host, *, may_abandon: bool) -> Any:
        request = opening.sent.get(host)
        if request is None:
            request = opening.sent[host] = opening.make_request()
        return await host.opener.open(
            request, size=opening.size, deadline_s=opening.deadline_s, may_abandon=may_abandon
        )

    async def host(self, target: str, *, timeout: timedelta) -> Host:
        """Return the host with this address. Raises: EnvError: it is not one of the hosts, or none is known."""
        for host in await self._hosts(timeout):
            if host.target == target:
                return host
        raise Unavailable(f"host {target}: not among this client's hosts that are up", host=target)

    async def _hosts(self, timeout: timedelta) -> Sequence[Host]:
        return await self._placement.hosts(asyncio.get_running_loop().time() + timeout.total_seconds())

    async def call_all(self, call: Callable[[Host], Awaitable[Result]], *, timeout: timedelta) -> list[Result]:
        """Return the results of all hosts, without those that fail unless all do. Raises: EnvError."""
        hosts = await self._hosts(timeout)
        if len(hosts) == 1:
            try:
                return [await call(hosts[0])]
            except EnvError as error:
                raise error.with_traceback(None) from None
        results = await asyncio.gather(*(call(host) for host in hosts), return_exceptions=True)
        succeeded: list[Result] = []
        failed: list[EnvError] = []
        for host, result in zip(hosts, results, strict=True):
            if not isinstance(result, BaseException):
                succeeded.append(result)
            elif isinstance(result, EnvError):
                logger.warning("%s is skipped: %s", host.target, result)
                failed.append(result)
            else:
                raise result
        if not succeeded:
            raise failed[0]
        return succeeded


def _note(opening: OpenRequest, error: EnvError) -> None:
    if isinstance(error, DeadlineExceeded) and opening.error is not None:
        # The earlier error says more than the timeout of its retry.
        raise opening.error from error
    opening.error = error
