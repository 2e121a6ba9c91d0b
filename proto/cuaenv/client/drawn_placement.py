"""Choose among listed hosts by the load that each reports: for static lists, `dns:///` names and Kubernetes Services.

Every client decides by itself. There is no queue, quota or host health across hosts; `ray_placement` has those.
Choices need no lock: code between two awaits is atomic.
"""

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Sequence
from typing import Final

from cuaenv.client.errors import EnvError, Unavailable, Unreachable
from cuaenv.client.host import Host, HostState
from cuaenv.client.place import HostTable, OpenRequest, Place, note_failure
from cuaenv.client.placement import NextAttempt, choose, next_attempt
from cuaenv.client.targets import Address, is_name, resolve

logger = logging.getLogger(__name__)

#: The first choice waits this long for all hosts to report; else the first one to report would get everything.
_FIRST_REPORTS_S: Final = 2.0
_RESOLVE_INTERVAL_S: Final = 30.0


class DrawnPlacement:
    """A `Placement` that draws two hosts and takes the one with the larger share of free machines."""

    def __init__(self, targets: Sequence[str], *, table: HostTable, rng: random.Random) -> None:
        """Prepare; hosts are connected and watched from the first choice on."""
        self._table = table
        self._rng = rng
        self._static = [Address(target) for target in targets if not is_name(target)]
        self._names: dict[str, tuple[Address, ...]] = {target: () for target in targets if is_name(target)}
        self._unresolved: dict[str, str] = dict.fromkeys(self._names, "not resolved yet")
        self._listed: list[Host] = []
        self._watched_since_s: float | None = None
        self._resolving: asyncio.Task[None] | None = None
        self._list()

    def __repr__(self) -> str:
        return f"<DrawnPlacement {self._listed}>"

    @property
    def only_host(self) -> Host | None:
        return self._listed[0] if not self._names and len(self._static) == 1 else None

    async def place(self, opening: OpenRequest) -> Place:
        loop = asyncio.get_running_loop()
        connect_s = loop.time() + self._table.retry.connect_timeout.total_seconds()
        await self._wait_for_reports(opening.deadline_s)
        while True:
            changed, now_s = self._table.changed, loop.time()
            candidates = [host for host in self._listed if host not in opening.excluded]
            up = [host for host in candidates if host.state is HostState.UP]
            free_at_s = {host: host.backs_off_until_s(opening.task, opening.pool) for host in up}
            available = {host: host.load(opening.task, opening.pool) for host in up if free_at_s[host] <= now_s}
            if (
                now_s < opening.deadline_s
                and (chosen := choose(available, size=opening.machine_count, rng=self._rng)) is not None
            ):
                return Place(chosen)
            was_reached = any(host.connection.was_reached for host in self._listed)
            until_s = opening.deadline_s if was_reached else min(connect_s, opening.deadline_s)
            is_over = now_s >= until_s
            if (error := self._final_error(opening, candidates, up, is_over=is_over)) is not None:
                raise error
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min([until_s, *free_at_s.values()])):
                    await changed.wait()

    def failed(self, opening: OpenRequest, host: Host, error: EnvError) -> None:
        note_failure(opening, host, error, policy=self._table.retry, rng=self._rng)

    async def hosts(self, deadline_s: float) -> Sequence[Host]:
        if self.only_host is None:
            await self._wait_for_reports(deadline_s)
        hosts = [host for host in self._listed if host.state is HostState.UP] or self._listed
        if not hosts:
            raise self._no_host()
        return hosts

    async def aclose(self) -> None:
        if self._resolving is not None:
            self._resolving.cancel()
            await asyncio.wait({self._resolving})

    def _final_error(
        self, opening: OpenRequest, candidates: Sequence[Host], up: Sequence[Host], *, is_over: bool
    ) -> EnvError | None:
        """Return the error that ends the wait for a host; None while a host may become available."""
        if opening.excluded and not up:
            return list(opening.excluded.values())[-1]
        if candidates and not self._unresolved:
            finals = [
                host.problem for host in candidates if host.problem and next_attempt(host.problem) is NextAttempt.FINAL
            ]
            if len(finals) == len(candidates):
                return finals[0]
        if not is_over:
            return None
        return opening.error or self._no_host()

    def _no_host(self) -> Unavailable:
        problems = [
            f"{host.target} {host.state.value}: {host.problem or host.last_error or 'it has not reported'}"
            for host in self._listed
        ]
        problems += [f"{name} cannot be resolved: {problem}" for name, problem in self._unresolved.items()]
        was_reached = any(host.connection.was_reached for host in self._listed)
        kind = Unavailable if was_reached else Unreachable
        return kind(f"no host is available for new episodes: {'; '.join(problems)}", code="UNAVAILABLE")

    async def _wait_for_reports(self, deadline_s: float) -> None:
        """Watch the hosts, and return when all have reported, or 2 s after the start."""
        loop = asyncio.get_running_loop()
        if self._watched_since_s is None:
            self._watched_since_s = loop.time()
            for host in self._listed:
                host.watch()
            if self._names:
                self._resolving = asyncio.create_task(self._resolve(), name="resolve-hosts")
        until_s = min(deadline_s, self._watched_since_s + _FIRST_REPORTS_S)
        while self._unresolved or any(host.state is HostState.UNKNOWN for host in self._listed):
            try:
                async with asyncio.timeout_at(until_s):
                    await self._table.changed.wait()
            except TimeoutError:
                return

    async def _resolve(self) -> None:
        while True:
            for name in self._names:
                try:
                    self._names[name] = await resolve(name)
                    self._unresolved.pop(name, None)
                except OSError as error:
                    # Addresses found earlier may still be valid; each host reports its own state.
                    logger.warning("%s cannot be resolved: %s", name, error)
                    if not self._names[name]:
                        self._unresolved[name] = str(error)
            self._list()
            await asyncio.sleep(1.0 if self._unresolved else _RESOLVE_INTERVAL_S)

    def _list(self) -> None:
        addresses = dict.fromkeys([*self._static, *itertools.chain.from_iterable(self._names.values())])
        self._listed = [self._table.host(address) for address in addresses]
        if self._watched_since_s is not None:
            for host in self._listed:
                host.watch()
        self._table.note_change()
