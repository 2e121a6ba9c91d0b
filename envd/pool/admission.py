"""The bounded queue for machines: each group with its deadline and, for one of them, the reserved turn.

`planner` decides which group is served next; this module keeps what it must remember between two decisions, and
measures how fast machines are returned (`Turnover`). Time is an argument.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from envd.pool.fairness import Demand, RunShares, Turns
from envd.pool.leased import MachineLease
from envd.pool.planner import ReservedTurn

#: Returns of machines to remember: enough to smooth groups that end together, few enough to follow a change of task.
_KEEP_COUNT = 32
#: Older returns do not describe the present load.
_KEEP_S = 600.0
#: Bounds of `retry_after_s`.
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 120.0

#: How long an opening continues without a caller, in seconds. A client connects again after at most 5 s.
GRACE_S = 10.0
#: Whether a caller waits for the call that the current task performs. The episodes' ledger sets it.
has_caller: ContextVar[Callable[[], bool]] = ContextVar("has_caller", default=lambda: True)


@dataclass(slots=True, eq=False, kw_only=True)
class WaitingGroup:
    """A queued group."""

    demand: Demand
    enter_s: float
    """Time at which it joined, on the monotonic clock."""
    deadline_s: float
    """Time at which it times out, on the monotonic clock."""
    owner: str = ""
    """Name of the token that asked; empty if the daemon uses no tokens."""
    passed_count: int = 0
    """Machines that went to other runs since its turn came."""
    has_caller: Callable[[], bool] = field(default_factory=has_caller.get)
    admitted: asyncio.Future[MachineLease] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class AdmissionQueue:
    """Groups that wait for machines, in order of arrival."""

    def __init__(self, *, limit: int, shares: RunShares, capacity: int) -> None:
        self._limit = limit
        self._shares = shares
        self._capacity = capacity
        self._groups: list[WaitingGroup] = []
        self._turn: WaitingGroup | None = None

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[WaitingGroup]:
        return iter(list(self._groups))

    @property
    def is_over_limit(self) -> bool:
        """Whether more groups wait than the limit allows."""
        return len(self._groups) > self._limit

    @property
    def machine_count(self) -> int:
        """Machines that all groups together wait for."""
        return sum(group.demand.machine_count for group in self._groups)

    @property
    def count_by_run(self) -> Mapping[str, int]:
        """Groups of each run that has any."""
        return Counter(group.demand.run for group in self._groups)

    @property
    def next_deadline_s(self) -> float | None:
        """When the first group times out, on the monotonic clock."""
        return min((group.deadline_s for group in self._groups), default=None)

    def in_order(self, *, held: Mapping[str, int]) -> list[WaitingGroup]:
        """Return all groups in the present order of turns; `held` is machines by run.

        Groups that wait for machines of their own run come last, in order of arrival.
        """
        order = Turns(
            [other.demand for other in self._groups],
            held=held,
            shares=self._shares,
            capacity=self._capacity,
            first=None if self._turn is None else self._groups.index(self._turn),
        ).order()
        seen = set(order)
        rest = (index for index in range(len(self._groups)) if index not in seen)
        return [self._groups[index] for index in (*order, *rest)]

    def enter(self, group: WaitingGroup) -> None:
        self._groups.append(group)

    def leave(self, group: WaitingGroup) -> None:
        """Leave, from any position. Idempotent."""
        if group in self._groups:
            self._groups.remove(group)
        if group is self._turn:
            self._turn = None

    def turn(self, groups: Sequence[WaitingGroup]) -> ReservedTurn | None:
        """Return the reserved turn, by index in `groups`; None if no group there has it."""
        if self._turn is None or self._turn not in groups:
            return None
        return ReservedTurn(index=groups.index(self._turn), passed_count=self._turn.passed_count)

    def set_turn(self, groups: Sequence[WaitingGroup], turn: ReservedTurn | None) -> None:
        """Remember the reserved turn, by index in `groups`."""
        self._turn = None if turn is None else groups[turn.index]
        if self._turn is not None and turn is not None:
            self._turn.passed_count = turn.passed_count


class Turnover:
    """The newest returns of leased machines."""

    def __init__(self) -> None:
        self._returns_s: deque[float] = deque(maxlen=_KEEP_COUNT)

    def returned(self, now_s: float) -> None:
        self._returns_s.append(now_s)

    def interval_s(self, now_s: float) -> float | None:
        """Return the mean time between two returns, including the time since the newest; None if unknown."""
        recent = [at_s for at_s in self._returns_s if at_s > now_s - _KEEP_S]
        # One return has no interval.
        return (now_s - recent[0]) / (len(recent) - 1) if len(recent) > 1 else None

    def retry_after_s(self, now_s: float, *, machine_count: int, start_s: float, capacity: int) -> float:
        """Estimate in how many seconds `machine_count` machines may be free, within [1, 120].

        Args:
            machine_count: Machines to wait for, including those for groups ahead.
            start_s: How long a machine takes to start. Before returns were measured, each turnover of the pool is
                assumed to cost one start: the pool does not know how long episodes take.
        """
        interval_s = self.interval_s(now_s)
        wait_s = (
            start_s * (1 + machine_count / capacity) if interval_s is None else start_s + machine_count * interval_s
        )
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, wait_s))
