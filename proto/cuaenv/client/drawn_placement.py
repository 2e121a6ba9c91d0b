"""Choose the host of each group among a client's hosts, by the load that each reports.

Hosts are listed, or resolved from a `dns:///` name or a Ray cluster. Every client decides by itself: there is no queue,
quota or host health across clients. A placement chooses hosts and nothing else: the daemon admits groups, and leases
free the machines. Choices need no lock: code between two awaits is atomic.
"""

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from cuaenv.client.connection import DaemonConnection, closed_error
from cuaenv.client.credentials import Access
from cuaenv.client.errors import Draining, EnvError, PoolExhausted, RateLimited, SampleVoid, Unavailable, Unreachable
from cuaenv.client.host import Host, HostState
from cuaenv.client.observation import Observation
from cuaenv.client.opening import OpeningRequest
from cuaenv.client.placement import RetryPolicy, choose, next_attempt
from cuaenv.client.targets import Address, is_name, is_ray, resolve
from cuaenv.client.view import StepOptions

logger = logging.getLogger(__name__)

#: The first choice waits this long for all hosts to report; else the first one to report would get everything.
_FIRST_REPORTS_S: Final = 2.0
_RESOLVE_INTERVAL_S: Final = 30.0
#: Shorter for a Ray cluster: a host that drains gets new groups until its clients know.
_RAY_INTERVAL_S: Final = 5.0
_UNRESOLVED_INTERVAL_S: Final = 1.0


@dataclass(slots=True, eq=False)
class OpenRequest:
    """Episodes to open together on one host, and what was tried so far."""

    make_request: Callable[[], OpeningRequest]
    """Makes the request for a host that got none yet."""
    size: int
    timeout: timedelta
    """Longest admission and setup."""
    lease_ttl: timedelta
    defaults: StepOptions
    """Defaults of the episodes' steps."""
    task: str = ""
    pool: str = ""
    """Empty for the task's own pool."""
    branch_count: int = 0
    """Further machines that forks of the episodes may take later."""
    host: Host | None = None
    """The only possible host; None for any."""
    target: str = ""
    """Its address if the host itself is not known; empty for any."""
    instruction: str | None = None
    """The task's instruction; None for that of the response."""
    seen: Observation | None = None
    """The observation that the request names as known."""
    deadline_s: float = field(default=0.0, init=False)
    """Deadline by the loop's clock; set when it is sent."""
    sent: dict[Host, OpeningRequest] = field(default_factory=dict)
    """The request of each host: retries repeat it, so a host opens at most one group."""
    excluded: dict[Host, EnvError] = field(default_factory=dict)
    """Hosts that can never open them, with the error."""
    error: EnvError | None = None
    """The last error."""

    @property
    def machine_count(self) -> int:
        """Machines that the host should have room for."""
        return self.size + self.branch_count

    def request_for(self, host: Host) -> OpeningRequest:
        """Return a host's request: that of an earlier attempt there, or a new one."""
        if host not in self.sent:
            self.sent[host] = self.make_request()
        return self.sent[host]


class DrawnPlacement:
    """Draws two hosts and takes the one with the larger share of free machines, for one client in one event loop."""

    def __init__(
        self,
        targets: Sequence[str],
        *,
        access: Access,
        retry: RetryPolicy,
        keep_alive_interval: timedelta | None,
        rng: random.Random,
    ) -> None:
        """Prepare; hosts are connected and watched from the first choice on."""
        self._access = access
        self._retry = retry
        self._keep_alive_interval = keep_alive_interval
        self._rng = rng
        self._known: dict[Address, Host] = {}
        self._changed = asyncio.Event()
        self._static = [Address(target) for target in targets if not is_name(target)]
        self._names: dict[str, tuple[Address, ...]] = {target: () for target in targets if is_name(target)}
        self._unresolved: dict[str, str] = {name: f"{name} is not resolved yet" for name in self._names}
        self._interval_s = _RAY_INTERVAL_S if any(map(is_ray, targets)) else _RESOLVE_INTERVAL_S
        self._has_answered = False
        """Whether a Ray cluster has ever answered that none of its hosts is up."""
        self._listed: list[Host] = []
        self._watched_since_s: float | None = None
        self._resolving: asyncio.Task[None] | None = None
        self._is_closed = False
        self._list()

    def __repr__(self) -> str:
        return f"<DrawnPlacement {self._listed}>"

    @property
    def only_host(self) -> Host | None:
        """The host of all episodes if there can only be one; it needs no choice."""
        return self._listed[0] if not self._names and len(self._static) == 1 else None

    @property
    def known(self) -> Sequence[Host]:
        """All hosts that were ever listed: episodes may be open on those that no longer are."""
        return list(self._known.values())

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change of any host. Take it before looking at the hosts, then wait for it."""
        return self._changed

    async def place(self, opening: OpenRequest) -> Host:
        """Wait for a host that can open the episodes. Raises: EnvError: there will be none."""
        loop = asyncio.get_running_loop()
        connect_s = loop.time() + self._retry.connect_timeout.total_seconds()
        await self._wait_for_reports(opening.deadline_s)
        while True:
            self._require_open()
            changed, now_s = self._changed, loop.time()
            candidates = [host for host in self._listed if host not in opening.excluded]
            up = [host for host in candidates if host.state is HostState.UP]
            free_at_s = {host: host.backs_off_until_s(opening.task, opening.pool) for host in up}
            available = {host: host.load(opening.task, opening.pool) for host in up if free_at_s[host] <= now_s}
            if (
                now_s < opening.deadline_s
                and (chosen := choose(available, size=opening.machine_count, rng=self._rng)) is not None
            ):
                return chosen
            until_s = opening.deadline_s if self._was_reached else min(connect_s, opening.deadline_s)
            is_over = now_s >= until_s
            if (error := self._final_error(opening, candidates, up, is_over=is_over)) is not None:
                raise error
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min([until_s, *free_at_s.values()])):
                    await changed.wait()

    def failed(self, opening: OpenRequest, host: Host, error: EnvError) -> None:
        """Exclude a host for an opening, or avoid it for a while. Raises: EnvError: every host would fail alike."""
        match next_attempt(error):
            case "nowhere":
                raise error
            case "unknown":
                host.back_off(self._retry.reconnect_timeout.total_seconds(), because=error)
            case "elsewhere":
                opening.excluded[host] = error
                if isinstance(error, SampleVoid):
                    # A host that fails fast always has room, and would attract every opening.
                    host.back_off(self._retry.max_pause.total_seconds(), because=error)
            case "later":
                pause = error.retry_after or self._retry.max_pause
                if isinstance(error, PoolExhausted):
                    # Only a queued request gets a machine; and the host reports by itself when it has room.
                    pause = min(pause, self._retry.max_pause)
                is_wide = isinstance(error, Draining | RateLimited)
                only = None if is_wide else (opening.task, opening.pool)
                jitter_s = self._rng.random() * self._retry.first_pause.total_seconds()
                host.back_off(pause.total_seconds() + jitter_s, because=error, only=only)

    async def hosts(self, deadline_s: float) -> Sequence[Host]:
        """Return the hosts to ask about tasks and pools. Raises: EnvError: none is available."""
        if self.only_host is None:
            await self._wait_for_reports(deadline_s)
        hosts = [host for host in self._listed if host.state is HostState.UP] or self._listed
        if not hosts:
            raise self._no_host()
        return hosts

    async def aclose(self) -> None:
        """Stop resolving names, and end the waits for hosts. Idempotent."""
        self._is_closed = True
        self._note_change()
        if self._resolving is not None:
            self._resolving.cancel()
            await asyncio.wait({self._resolving})

    @property
    def _was_reached(self) -> bool:
        return self._has_answered or any(host.connection.was_reached for host in self._listed)

    def _final_error(
        self, opening: OpenRequest, candidates: Sequence[Host], up: Sequence[Host], *, is_over: bool
    ) -> EnvError | None:
        """Return the error that ends the wait for a host; None while a host may become available."""
        if opening.excluded and not up:
            return list(opening.excluded.values())[-1]
        if candidates and not self._unresolved:
            finals = [host.problem for host in candidates if host.problem and next_attempt(host.problem) == "nowhere"]
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
        kind = Unavailable if self._was_reached else Unreachable
        reasons = "; ".join([*problems, *self._unresolved.values()])
        return kind(f"no host is available for new episodes: {reasons}", code="UNAVAILABLE")

    async def _wait_for_reports(self, deadline_s: float) -> None:
        """Watch the hosts, and return when all have reported, or 2 s after the start."""
        self._require_open()
        loop = asyncio.get_running_loop()
        if self._watched_since_s is None:
            self._watched_since_s = loop.time()
            for host in self._listed:
                host.watch()
            if self._names:
                self._resolving = asyncio.create_task(self._resolve(), name="resolve-hosts")
        until_s = min(deadline_s, self._watched_since_s + _FIRST_REPORTS_S)
        while not self._is_closed and (
            self._unresolved or any(host.state is HostState.UNKNOWN for host in self._listed)
        ):
            try:
                async with asyncio.timeout_at(until_s):
                    await self._changed.wait()
            except TimeoutError:
                return

    def _require_open(self) -> None:
        if self._is_closed:
            raise closed_error(", ".join([*(address.target for address in self._static), *self._names]))

    async def _resolve(self) -> None:
        while True:
            for name in self._names:
                await self._resolve_one(name)
            self._list()
            await asyncio.sleep(_UNRESOLVED_INTERVAL_S if self._unresolved else self._interval_s)

    async def _resolve_one(self, name: str) -> None:
        try:
            found = await resolve(name)
            for address in found:
                self._host(address)
        except (OSError, ValueError, Unreachable) as error:
            # Addresses found earlier may still be valid; each host reports its own state.
            problem = str(error) if is_ray(name) else f"{name} cannot be resolved: {error}"
        except Unavailable as error:  # the Ray cluster knows that none is up
            self._has_answered = True
            self._names[name], problem = (), str(error)
        else:
            self._names[name], problem = found, ""
        if problem and problem != self._unresolved.get(name):
            logger.warning("%s", problem)
        if problem and not self._names[name]:
            self._unresolved[name] = problem
        else:
            self._unresolved.pop(name, None)

    def _list(self) -> None:
        addresses = dict.fromkeys([*self._static, *itertools.chain.from_iterable(self._names.values())])
        self._listed = [self._host(address) for address in addresses]
        if self._watched_since_s is not None:
            for host in self._listed:
                host.watch()
        self._note_change()

    def _host(self, address: Address) -> Host:
        """Return the host at an address; a new one is not connected yet. Raises: ValueError, OSError."""
        if address not in self._known:
            connection = DaemonConnection(address, access=self._access, retry=self._retry)
            self._known[address] = Host(
                connection, keep_alive_interval=self._keep_alive_interval, changed=self._note_change
            )
        return self._known[address]

    def _note_change(self) -> None:
        """Wake everyone who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()
