"""The protocol by which a client decides on which host each group of episodes is opened.

`drawn_placement` chooses among listed hosts by their reported load; `ray_placement` reserves machines in a Ray cluster.
A placement chooses hosts and nothing else: the daemon admits groups, and leases free the machines.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from cuaenv.client.connection import Connection
from cuaenv.client.credentials import Access
from cuaenv.client.errors import Draining, EnvError, PoolExhausted, RateLimited, SampleVoid
from cuaenv.client.host import Host
from cuaenv.client.opening import OpeningRequest
from cuaenv.client.placement import NextAttempt, RetryPolicy, next_attempt
from cuaenv.client.targets import Address


@dataclass(slots=True, eq=False)
class OpenRequest:
    """Episodes to open together on one host, and what was tried so far."""

    make_request: Callable[[], OpeningRequest]
    """Makes the request for a host that got none yet."""
    size: int
    deadline_s: float
    task: str = ""
    pool: str = ""
    """Empty for the task's own pool."""
    branch_count: int = 0
    """Further machines that forks of the episodes may take later."""
    host: Host | None = None
    """The only possible host; None for any."""
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


class Place:
    """A host, and the slots held there for a group, until everyone who shares it has released it."""

    def __init__(self, host: Host, *, slot_count: int = 0, free: Callable[[int], None] = lambda _count: None) -> None:
        """Hold slots; `free` is called with the number of slots that are no longer needed, and must not wait."""
        self.host = host
        self._slot_count = slot_count
        self._free = free
        self._user_count = 1

    def share(self) -> "Place":
        """Add a user, who also calls `release`. Returns this place."""
        self._user_count += 1
        return self

    def give_back(self) -> None:
        """Free the slot of one episode that has ended."""
        if self._slot_count:
            self._slot_count -= 1
            self._free(1)

    def release(self) -> None:
        """Remove a user; the last one frees all slots. Each user calls it once."""
        self._user_count -= 1
        if self._user_count == 0 and self._slot_count:
            count, self._slot_count = self._slot_count, 0
            self._free(count)


class Placement(Protocol):
    """Chooses the hosts of one client in one event loop."""

    @property
    def only_host(self) -> Host | None:
        """The host of all episodes if there can only be one; it needs no choice."""

    async def place(self, opening: OpenRequest) -> Place:
        """Wait for a host that can open the episodes. Raises: EnvError: there will be none."""

    def failed(self, opening: OpenRequest, host: Host, error: EnvError) -> None:
        """Note an error of a chosen host, whose place was released. Raises: EnvError: no other attempt can succeed."""

    async def hosts(self, deadline_s: float) -> Sequence[Host]:
        """Return the hosts to ask about tasks and pools. Raises: EnvError: none is available."""

    async def aclose(self) -> None:
        """Stop choosing, and free what is held. Idempotent."""


def note_failure(opening: OpenRequest, host: Host, error: EnvError, *, policy: RetryPolicy, rng: random.Random) -> None:
    """Exclude a host for an opening, or avoid it for a while. Raises: EnvError: every host would fail alike."""
    match next_attempt(error):
        case NextAttempt.FINAL:
            raise error
        case NextAttempt.UNKNOWN:
            host.back_off(policy.reconnect_timeout.total_seconds(), because=error)
        case NextAttempt.ELSEWHERE:
            opening.excluded[host] = error
            if isinstance(error, SampleVoid):
                # A host that fails fast always has room, and would attract every opening.
                host.back_off(policy.max_pause.total_seconds(), because=error)
        case NextAttempt.LATER:
            pause = error.retry_after or policy.max_pause
            if isinstance(error, PoolExhausted):
                # Only a queued request gets a machine; and the host reports by itself when it has room.
                pause = min(pause, policy.max_pause)
            is_wide = isinstance(error, Draining | RateLimited)
            only = None if is_wide else (opening.task, opening.pool)
            jitter_s = rng.random() * policy.first_pause.total_seconds()
            host.back_off(pause.total_seconds() + jitter_s, because=error, only=only)


class HostTable:
    """All hosts that a client has used in one event loop: episodes may be open on hosts that are no longer listed."""

    def __init__(self, *, access: Access, retry: RetryPolicy, keep_alive_interval: timedelta | None) -> None:
        self.retry = retry
        self._access = access
        self._keep_alive_interval = keep_alive_interval
        self._hosts: dict[Address, Host] = {}
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[Host]:
        return iter(list(self._hosts.values()))

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change of any host. Take it before looking at the hosts, then wait for it."""
        return self._changed

    def note_change(self) -> None:
        """Wake everyone who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def host(self, address: Address) -> Host:
        """Return the host at an address; a new one is not connected yet."""
        if address not in self._hosts:
            connection = Connection(address, access=self._access, retry=self.retry)
            self._hosts[address] = Host(
                connection, keep_alive_interval=self._keep_alive_interval, changed=self.note_change
            )
        return self._hosts[address]
