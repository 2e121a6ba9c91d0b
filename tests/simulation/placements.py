"""Where groups are opened: by the client's own code, by a model of Ray's scheduler, or by an ideal scheduler."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

from cuaenv.client.placement import HostLoad, RetryPolicy, choose, load_of
from cuaenv.client.results import Pool
from cuaenv.client.slots import GATHER_AFTER_S, GATHER_REST_S, LINGER_S, SlotLedger
from envd.pool.fairness import RunShares
from tests.simulation.clock import EventQueue
from tests.simulation.host import Group, SimHost

#: From a change in a daemon until clients have its report, on one network.
_REPORT_S: Final = 0.05
#: A reset sent less than this before a report may not be counted in it; as in `cuaenv.client.host`.
_UNSEEN_S: Final = 0.5
#: Measured: to create a placement group, wait for it and read its node, on an idle cluster. Ray creates one at a time.
_RESERVE_S: Final = 0.0035
#: Ray tries a waiting group again after this, 1.5 times longer each time, up to the second value.
_RETRY_S: Final = 0.1
_MAX_RETRY_S: Final = 1.0
_POLICY: Final = RetryPolicy()
#: Waiting groups that are considered for slots that have become free.
_MAX_LOOKED_AT: Final = 20


class SimPlacement(Protocol):
    """Sends groups to hosts."""

    def submit(self, group: Group) -> None:
        """Open a group somewhere."""

    def changed(self, host: SimHost) -> None:
        """A host's counts changed."""

    def member_ended(self, group: Group, host: SimHost) -> None:
        """An episode of a group has ended."""

    def ended(self, group: Group, host: SimHost) -> None:
        """All episodes of a group have ended, or its host has failed."""


class Drawn:
    """Each run is one client that chooses by reported load; `cuaenv.client.placement` decides."""

    def __init__(self, hosts: Sequence[SimHost], *, events: EventQueue, rng: random.Random) -> None:
        self._hosts = hosts
        self._events = events
        self._rng = rng
        self._loads: dict[SimHost, HostLoad] = {host: _reported(host) for host in hosts}
        self._reported_s: dict[SimHost, float] = dict.fromkeys(hosts, 0.0)
        self._unreported: dict[SimHost, float] = {}
        self._sent: dict[str, dict[SimHost, deque[tuple[float, int]]]] = {}
        self._avoided: dict[str, dict[SimHost, float]] = {}

    def changed(self, host: SimHost) -> None:
        """See `SimPlacement`: the change is reported soon."""
        self._unreported.setdefault(host, self._events.now_s)

    def _report(self) -> None:
        """Update what clients know: of each host whose first unreported change is old enough."""
        now_s = self._events.now_s
        for host, since_s in list(self._unreported.items()):
            if since_s > now_s - _REPORT_S:
                continue
            del self._unreported[host]
            self._reported_s[host] = since_s + _REPORT_S
            if host.is_up and not host.is_draining:
                self._loads[host] = _reported(host)
            else:
                self._loads.pop(host, None)

    def submit(self, group: Group) -> None:
        """See `SimPlacement`."""
        now_s = self._events.now_s
        self._report()
        available = dict(self._loads)
        for avoided, until_s in list(self._avoided.get(group.run, {}).items()):
            if until_s > now_s:
                available.pop(avoided, None)
            else:
                del self._avoided[group.run][avoided]
        sent = self._sent.setdefault(group.run, {})
        for asked, recent in list(sent.items()):
            since_s = self._reported_s[asked] - _UNSEEN_S
            while recent and recent[0][0] <= since_s:
                recent.popleft()
            if not recent:
                del sent[asked]
            elif asked in available:
                load = available[asked]
                available[asked] = HostLoad(load.capacity, load.room - sum(size for _, size in recent))
        host: SimHost | None = choose(available, size=group.size, rng=self._rng)
        if host is None:
            self._events.after(1.0, self.submit, group)
        elif not host.is_up or host.is_draining:
            self._avoid(host, group, pause_s=_POLICY.reconnect_timeout.total_seconds())
            self._events.after(
                _POLICY.reconnect_timeout.total_seconds() if not host.is_up else 0.01, self.submit, group
            )
        else:
            sent.setdefault(host, deque()).append((now_s, group.size))
            host.enter(group, patience_s=_POLICY.patience.total_seconds(), timed_out=self._timed_out)

    def _timed_out(self, host: SimHost, group: Group) -> None:
        self._avoid(host, group, pause_s=_POLICY.max_pause.total_seconds())
        self.submit(group)

    def _avoid(self, host: SimHost, group: Group, *, pause_s: float) -> None:
        self._avoided.setdefault(group.run, {})[host] = self._events.now_s + pause_s

    def member_ended(self, group: Group, host: SimHost) -> None:
        """See `SimPlacement`: nothing is held."""

    def ended(self, group: Group, host: SimHost) -> None:
        """See `SimPlacement`: nothing is held."""


def _reported(host: SimHost) -> HostLoad:
    pool = Pool(
        name="desktop",
        image="desktop",
        accelerator="kvm",
        capacity=host.capacity,
        idle_count=host.idle_count,
        leased_count=host.leased_count,
        dying_count=host.dying_count,
        waiting_count=host.waiting_count,
        is_failing=False,
        problem="",
        host="",
    )
    return load_of([pool])


def _free_count(host: SimHost) -> int:
    """Return the machines that a new group would get at once."""
    return host.idle_count - host.waiting_count if host.is_up and not host.is_draining else 0


class _Buckets:
    """Hosts by a number of free machines."""

    def __init__(self, hosts: Sequence[SimHost], most: int) -> None:
        self._by_count: list[dict[SimHost, None]] = [{} for _ in range(most + 1)]
        self._count: dict[SimHost, int] = {}
        for host in hosts:
            self.set(host, host.capacity)

    def set(self, host: SimHost, count: int) -> None:
        """Set a host's number; below 1 for none."""
        old, new = self._count.get(host, 0), max(0, count)
        if old != new:
            self._by_count[old].pop(host, None)
            if new:
                self._by_count[new][host] = None
            self._count[host] = new

    def most(self, size: int) -> SimHost | None:
        """Return a host with the most free machines, if it has `size`."""
        for count in range(len(self._by_count) - 1, size - 1, -1):
            if self._by_count[count]:
                return next(iter(self._by_count[count]))
        return None

    def fewest(self, size: int) -> SimHost | None:
        """Return a host with the fewest free machines of those that have `size`."""
        for count in range(size, len(self._by_count)):
            if self._by_count[count]:
                return next(iter(self._by_count[count]))
        return None


@dataclass(slots=True, eq=False)
class _Gathering:
    """Slots that a client gathers one by one on a host."""

    group: Group
    host: SimHost


class Ray:
    """A model of Ray's placement groups: first come, first served, retried with pauses; the node with most free slots.

    The client's own `SlotLedger` reuses the slots of ended episodes. Draining hosts are passed over, as the client does
    by holding its reservations there. With `reuses` off, a group holds all of its slots until its last episode ends.
    With `gathers`, each client gathers the slots of its oldest group one by one on a host, as `RayPlacement` does.
    """

    def __init__(
        self, hosts: Sequence[SimHost], *, events: EventQueue, rng: random.Random, reuses: bool, gathers: bool
    ) -> None:
        self._hosts = hosts
        self._events = events
        self._rng = rng
        self._reuses = reuses
        self._gathers = gathers
        self._gathering: dict[str, _Gathering] = {}
        self._resting_until_s: dict[str, float] = {}
        self._free = {host: host.capacity for host in hosts}
        self._buckets = _Buckets(hosts, max(host.capacity for host in hosts))
        self._busy_until_s = 0.0
        self._ledgers: dict[str, SlotLedger[SimHost, tuple[SimHost, int]]] = {}
        self._waiting: dict[str, dict[Group, None]] = {}
        self._freeing: set[str] = set()

    def changed(self, host: SimHost) -> None:
        """See `SimPlacement`: Ray sees whole hosts only."""
        self._buckets.set(host, self._free[host] if host.is_up and not host.is_draining else 0)

    def submit(self, group: Group) -> None:
        """See `SimPlacement`."""
        self._waiting.setdefault(group.run, {})[group] = None
        if not self._reuse(group):
            if self._gathers:
                self._events.after(GATHER_AFTER_S, self._gather, group.run)
            self._busy_until_s = max(self._busy_until_s, self._events.now_s) + _RESERVE_S
            self._events.after(self._busy_until_s - self._events.now_s, self._try, group, _RETRY_S)

    def _ledger(self, run: str) -> SlotLedger[SimHost, tuple[SimHost, int]]:
        return self._ledgers.setdefault(run, SlotLedger())

    def _reuse(self, group: Group) -> bool:
        ledger = self._ledger(group.run)
        host = ledger.find(
            group.size,
            accepts=lambda host: host.is_up and not host.is_draining and self._may_use(group, host),
            now_s=self._events.now_s,
        )
        if host is None:
            return False
        ledger.take(host, group.size)
        self._open(group, host)
        return True

    def _try(self, group: Group, retry_s: float) -> None:
        if group not in self._waiting[group.run]:  # it has reused slots since
            return
        host = self._buckets.most(group.size)
        if host is None:
            self._events.after(retry_s, self._try, group, min(1.5 * retry_s, _MAX_RETRY_S))
            return
        self._hold(host, group.size)
        if not self._may_use(group, host):
            self._hold(host, -group.size)
            self._events.after(_MAX_RETRY_S, self._try, group, _MAX_RETRY_S)
            return
        self._ledger(group.run).add(host, (host, group.size), group.size, now_s=self._events.now_s)
        self._open(group, host)

    def _may_use(self, group: Group, host: SimHost) -> bool:
        return all(one.host is not host or one.group is group for one in self._gathering.values())

    def _gather(self, run: str) -> None:
        """Begin to gather slots for a run's oldest group, if it has waited for long."""
        group = next(iter(self._waiting[run]), None)
        is_due = group is not None and self._events.now_s - group.enter_s >= GATHER_AFTER_S
        if (
            group is None
            or run in self._gathering
            or not is_due
            or self._events.now_s < self._resting_until_s.get(run, 0.0)
        ):
            return
        taken = {gathering.host for gathering in self._gathering.values()}
        usable = [host for host in self._hosts if host.is_up and not host.is_draining and host not in taken]
        if not usable:
            self._events.after(_MAX_RETRY_S, self._gather, run)
            return
        gathering = self._gathering[run] = _Gathering(group, self._rng.choice(usable))
        for _ in range(group.size):
            self._busy_until_s = max(self._busy_until_s, self._events.now_s) + _RESERVE_S
            self._events.after(self._busy_until_s - self._events.now_s, self._try_slot, gathering, _RETRY_S)

    def _try_slot(self, gathering: "_Gathering", retry_s: float) -> None:
        group, host = gathering.group, gathering.host
        if self._gathering.get(group.run) is not gathering:
            return
        if not host.is_up or host.is_draining:
            self._end_gathering(group.run)
        elif not self._free[host]:
            self._events.after(retry_s, self._try_slot, gathering, min(1.5 * retry_s, _MAX_RETRY_S))
        else:
            self._hold(host, 1)
            self._ledger(group.run).add(host, (host, 1), 1, now_s=self._events.now_s)
            self._give(group.run, host, 1)
            self._events.after(_MAX_RETRY_S, self._regather, gathering)

    def _regather(self, gathering: "_Gathering") -> None:
        """One slot taken: if the gathering still runs and has too few, ask for another."""
        run = gathering.group.run
        if self._gathering.get(run) is gathering:
            found = self._ledger(run).reusable_count(gathering.host, now_s=self._events.now_s)
            if found < gathering.group.size:
                self._try_slot(gathering, _RETRY_S)
            else:
                self._events.after(_MAX_RETRY_S, self._regather, gathering)

    def _end_gathering(self, run: str) -> None:
        del self._gathering[run]
        self._resting_until_s[run] = self._events.now_s + GATHER_REST_S
        self._events.after(GATHER_REST_S, self._gather, run)

    def _open(self, group: Group, host: SimHost) -> None:
        del self._waiting[group.run][group]
        if (gathering := self._gathering.get(group.run)) is not None and gathering.group is group:
            self._end_gathering(group.run)
        group.host = host
        host.enter(group, patience_s=_POLICY.patience.total_seconds(), timed_out=self._timed_out)

    def _timed_out(self, host: SimHost, group: Group) -> None:
        self._give(group.run, host, group.size)
        self.submit(group)

    def _hold(self, host: SimHost, count: int) -> None:
        self._free[host] -= count
        self.changed(host)

    def member_ended(self, group: Group, host: SimHost) -> None:
        """See `SimPlacement`."""
        if self._reuses:
            self._give(group.run, host, 1)

    def ended(self, group: Group, host: SimHost) -> None:
        """See `SimPlacement`."""
        if not host.is_up:
            for held_at, count in self._ledger(group.run).drop(host):
                self._hold(held_at, -count)
        elif not self._reuses:
            self._give(group.run, host, group.size)

    def _give(self, run: str, host: SimHost, count: int) -> None:
        self._ledger(run).give(host, count, now_s=self._events.now_s)
        for group in list(islice(self._waiting.get(run, ()), _MAX_LOOKED_AT)):
            self._reuse(group)
        if run not in self._freeing:
            self._freeing.add(run)
            self._events.after(LINGER_S if self._reuses else 0.0, self._free_surplus, run)

    def _free_surplus(self, run: str) -> None:
        self._freeing.discard(run)
        now_s = self._events.now_s + (0.0 if self._reuses else LINGER_S)
        mine = self._gathering.get(run)
        others = {one.host for one in self._gathering.values() if one is not mine}

        def is_gathered(host: SimHost) -> bool | None:
            return False if host in others else True if mine is not None and host is mine.host else None

        for host, count in self._ledger(run).surplus(now_s=now_s, is_gathered=is_gathered):
            self._hold(host, -count)
        if self._reuses and self._ledger(run).has_unused:
            self._freeing.add(run)
            self._events.after(LINGER_S, self._free_surplus, run)


class Ideal:
    """One queue with perfect knowledge: fair by weight, the fullest host that fits, no delay.

    If the next group fits nowhere, the host with most free machines is kept for it, and other groups use the others.
    """

    def __init__(self, hosts: Sequence[SimHost], *, events: EventQueue, shares: RunShares) -> None:
        self._events = events
        self._shares = shares
        self._buckets = _Buckets(hosts, max(host.capacity for host in hosts))
        self._queues: dict[str, deque[Group]] = {}
        self._held: dict[str, int] = {}
        self._kept: tuple[SimHost, Group] | None = None
        self._serving = False

    def changed(self, host: SimHost) -> None:
        """See `SimPlacement`."""
        if self._kept is not None and host is self._kept[0]:
            if not host.is_up or host.is_draining:
                self._kept = None
            self._buckets.set(host, 0)
        else:
            self._buckets.set(host, _free_count(host))
        if not self._serving and any(self._queues.values()):
            self._serving = True
            self._events.after(0.0, self._serve)

    def submit(self, group: Group) -> None:
        """See `SimPlacement`."""
        self._queues.setdefault(group.run, deque()).append(group)
        self._serve()

    def _serve(self) -> None:
        self._serving = False
        while True:
            if self._kept is not None and _free_count(self._kept[0]) >= self._kept[1].size:
                host, group = self._kept
                self._kept = None
                self._open(group, host)
            heads = sorted(
                (self._held.get(run, 0) / self._shares.of(run).weight, run)
                for run, queue in self._queues.items()
                if queue
            )
            if not any(self._serve_head(self._queues[run][0]) for _, run in heads):
                return

    def _serve_head(self, group: Group) -> bool:
        """Open a run's next group if it fits; else keep a host for it, unless one is kept for another."""
        host = self._buckets.fewest(group.size)
        if host is not None:
            if self._kept is not None and self._kept[1] is group:
                kept, self._kept = self._kept[0], None
                self._buckets.set(kept, _free_count(kept))
            self._open(group, host)
            return True
        if self._kept is None and (most := self._buckets.most(1)) is not None:
            self._kept = (most, group)
            self._buckets.set(most, 0)
        return False

    def _open(self, group: Group, host: SimHost) -> None:
        self._queues[group.run].popleft()
        self._held[group.run] = self._held.get(group.run, 0) + group.size
        group.host = host
        host.enter(group, patience_s=float("inf"), timed_out=lambda *_: None)

    def member_ended(self, group: Group, host: SimHost) -> None:
        """See `SimPlacement`."""
        self._held[group.run] -= 1

    def ended(self, group: Group, host: SimHost) -> None:
        """See `SimPlacement`."""
        if not host.is_up:
            self._held[group.run] -= group.running_count or group.size
