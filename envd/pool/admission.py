"""The line for machines: bounded, first come first served, each group with its place and its deadline."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from envd.errors import PoolExhausted
from envd.pool.leased import Granted
from envd.pool.planner import Wanted
from envd.pool.statistics import PoolStatistics

#: What coming up is taken to cost before it was measured: there may be no template yet.
_START_GUESS_S = 10.0


@dataclass(slots=True, eq=False, kw_only=True)
class WaitingGroup:
    """Someone in the line."""

    wanted: Wanted
    enter_s: float
    """When it joined, on the monotonic clock."""
    deadline_s: float
    """When it gives up, on the monotonic clock."""
    admitted: asyncio.Future[Granted] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class AdmissionLine:
    """Groups that wait for machines, in the order in which they came."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._groups: list[WaitingGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[WaitingGroup]:
        return iter(list(self._groups))

    @property
    def is_over_limit(self) -> bool:
        """Whether one has entered too many."""
        return len(self._groups) > self._limit

    @property
    def machine_count(self) -> int:
        """Machines that all groups together wait for."""
        return sum(group.wanted.machine_count for group in self._groups)

    @property
    def next_deadline_s(self) -> float | None:
        """When the first group gives up, on the monotonic clock."""
        return min((group.deadline_s for group in self._groups), default=None)

    def position(self, group: WaitingGroup) -> int:
        """Return its place, 1 for the head."""
        return self._groups.index(group) + 1

    def machines_ahead(self, group: WaitingGroup) -> int:
        """Return how many machines those before it wait for."""
        return sum(ahead.wanted.machine_count for ahead in self._groups[: self._groups.index(group)])

    def enter(self, group: WaitingGroup) -> None:
        """Join at the end."""
        self._groups.append(group)

    def leave(self, group: WaitingGroup) -> None:
        """Leave, from wherever it stands; nothing if it has left."""
        if group in self._groups:
            self._groups.remove(group)


def too_late(
    group: WaitingGroup, line: AdmissionLine, *, pool: str, now_s: float, told: PoolStatistics, capacity: int
) -> PoolExhausted:
    """Tell a group in line that its time is up."""
    return PoolExhausted(
        f"pool {pool!r} had no room for {group.wanted.machine_count} within {now_s - group.enter_s:.1f} s: position"
        f" {line.position(group)} of {len(line)} in line, capacity {capacity} ({told});"
        " retry with the same request_id",
        retry_after_s=_estimate_retry_s(line.machines_ahead(group), told=told, capacity=capacity),
    )


def line_full(wanted: Wanted, line: AdmissionLine, *, pool: str, told: PoolStatistics, capacity: int) -> PoolExhausted:
    """Tell a group that it cannot even stand in line."""
    return PoolExhausted(
        f"pool {pool!r} has no room for {wanted.machine_count}: {len(line)} groups are in line, its limit, so there is"
        f" no position {len(line) + 1}; retry with the same request_id",
        retry_after_s=_estimate_retry_s(line.machine_count, told=told, capacity=capacity),
    )


def _estimate_retry_s(machines_ahead: int, *, told: PoolStatistics, capacity: int) -> float:
    """Guess in how many seconds machines may come free, within [1, 120].

    Each turn-over of the pool costs at least a start; how long episodes run nobody here knows.
    """
    start_s = _START_GUESS_S if told.last_start_s is None else told.last_start_s
    return min(120.0, max(1.0, start_s * (1 + machines_ahead / capacity)))
