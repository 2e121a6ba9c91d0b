"""The queue for machines: which groups wait and which has the kept turn, why each waits, and why some are refused.

`planner` decides which group is admitted next; this module keeps what it must remember between two decisions and
refuses groups, each of which is counted (`AdmissionQueue`), measures how fast machines are returned (`Turnover`), and
explains the queue (`queue_report`). Time is an argument.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

from envd.base.errors import Draining, EnvdError, GroupTooLarge, PoolExhausted, PoolFailing
from envd.base.telemetry.metrics import Metrics
from envd.pool.backoff import Backoff
from envd.pool.leased import Admission
from envd.pool.planner import Demand, KeptTurn, RunShares, Turns, share_of
from envd.pool.status import PoolStatus

#: Returns of machines to remember: enough to smooth groups that end together, few enough to follow a change of task.
_KEEP_COUNT = 32
#: Older returns do not describe the present load.
_KEEP_S = 600.0
#: Bounds of `retry_after_s`.
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 120.0
#: Assumed start time of a machine before one was measured: there may be no template yet.
_START_GUESS_S = 10.0
#: Somebody must remove files.
_DISK_RETRY_S = 10.0

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
    admitted: asyncio.Future[Admission] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


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

    def retry_after_s(self, now_s: float, *, machine_count: int, start_s: float, resident: int) -> float:
        """Estimate in how many seconds `machine_count` machines may be free, within [1, 120].

        Args:
            machine_count: Machines to wait for, including those for groups ahead.
            start_s: How long a machine takes to start. Before returns were measured, each turnover of the pool is
                assumed to cost one start: the pool does not know how long episodes take.
        """
        interval_s = self.interval_s(now_s)
        wait_s = (
            start_s * (1 + machine_count / resident) if interval_s is None else start_s + machine_count * interval_s
        )
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, wait_s))


RefusalReason = Literal["too_large", "over_quota", "queue_full", "too_late", "pool_failing", "draining"]
"""Why a group was refused, for metrics: the pool or the run's quota can never hold it, the queue is full, its deadline
passed there, machines do not start or cannot write to the host's disk, or the pool is draining."""


class AdmissionQueue:
    """Groups that wait for machines of a pool, in order of arrival. Makes and counts the errors of those refused."""

    def __init__(
        self, pool: str, *, limit: int, shares: RunShares, resident: int, turnover: Turnover, metrics: Metrics
    ) -> None:
        self._pool = pool
        self._limit = limit
        self._shares = shares
        self._resident = resident
        self._turnover = turnover
        self._metrics = metrics
        self._groups: list[WaitingGroup] = []
        self._turn: WaitingGroup | None = None

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[WaitingGroup]:
        return iter(list(self._groups))

    @property
    def waiting(self) -> list[WaitingGroup]:
        """The groups that can be admitted or refused.

        One that was cancelled in this iteration of the event loop stays in the queue until its own code runs.
        """
        return [group for group in self._groups if not group.admitted.done()]

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
        """Return the waiting groups in the present order of turns; `held` is machines by run.

        Groups that wait for machines of their own run come last, in order of arrival.
        """
        groups = self.waiting
        turn = self.turn(groups)
        order = Turns(
            [group.demand for group in groups],
            held=held,
            shares=self._shares,
            resident=self._resident,
            first=None if turn is None else turn.index,
        ).order()
        seen = set(order)
        rest = (index for index in range(len(groups)) if index not in seen)
        return [groups[index] for index in (*order, *rest)]

    def enter(self, group: WaitingGroup) -> None:
        self._groups.append(group)

    def leave(self, group: WaitingGroup) -> None:
        """Leave, from any position. Idempotent."""
        if group in self._groups:
            self._groups.remove(group)
        if group is self._turn:
            self._turn = None

    def turn(self, groups: Sequence[WaitingGroup]) -> KeptTurn | None:
        """Return the kept turn, by index in `groups`; None if no group there has it."""
        if self._turn is None or self._turn not in groups:
            return None
        return KeptTurn(index=groups.index(self._turn), passed_count=self._turn.passed_count)

    def set_turn(self, groups: Sequence[WaitingGroup], turn: KeptTurn | None) -> None:
        """Remember the kept turn, by index in `groups`."""
        self._turn = None if turn is None else groups[turn.index]
        if self._turn is not None and turn is not None:
            self._turn.passed_count = turn.passed_count

    # -- refusals -----------------------------------------------------------------------------------------------

    def counted(self, reason: RefusalReason, error: EnvdError, *, run: str) -> EnvdError:
        """Count a refusal and return its error."""
        self._metrics.group_refused(pool=self._pool, run=run, reason=reason)
        return error

    def refuse(self, group: WaitingGroup, reason: RefusalReason, error: EnvdError) -> None:
        """Remove a group from the queue, with an error for its caller."""
        self.leave(group)
        if not group.admitted.done():
            group.admitted.set_exception(self.counted(reason, error, run=group.demand.run))

    def refuse_failing(
        self, groups: Iterable[WaitingGroup], backoff: Backoff, *, now_s: float, status: PoolStatus
    ) -> None:
        """Refuse queued groups because machines do not start."""
        for group in groups:
            self.refuse(group, "pool_failing", self._failing(backoff, now_s=now_s, status=status))

    def refuse_disk_full(self, shortage: str) -> None:
        """Refuse all groups because machines, also idle ones, cannot write to the host's disk."""
        for group in self:
            error = PoolFailing(
                f"pool {self._pool!r} leases no machine: {shortage}; try another host, or this one then",
                retry_after_s=_DISK_RETRY_S,
            )
            self.refuse(group, "pool_failing", error)

    def refuse_late(self, *, now_s: float, status: PoolStatus, held: Mapping[str, int]) -> bool:
        """Refuse every queued group whose deadline has passed; return whether there was one.

        Each error names the position before any was removed.
        """
        late = [group for group in self.waiting if group.deadline_s <= now_s]
        refused = [(group, self._too_late(group, now_s=now_s, status=status, held=held)) for group in late]
        for group, error in refused:
            self.refuse(group, "too_late", error)
        return bool(late)

    def never(self, demand: Demand, *, retained_count: int, open_limit: int) -> EnvdError | None:
        """Return the error of a group that can never be admitted while its caller retains machines; None if it can.

        It is counted.
        """
        retained = f" in addition to the {retained_count} that it retains" if retained_count else ""
        if demand.member_count + retained_count > open_limit:
            error = GroupTooLarge(
                f"pool {self._pool!r} has at most {open_limit} open episodes, so never a group of"
                f" {demand.member_count}{retained}; ask for fewer, or raise the pool's capacity"
            )
            return self.counted("too_large", error, run=demand.run)
        if demand.machine_count + retained_count > self._resident:
            error = GroupTooLarge(
                f"pool {self._pool!r} holds at most {self._resident} machines, so never a group of"
                f" {demand.machine_count}{retained}; ask for fewer, or raise the pool's resident (default: capacity)"
            )
            return self.counted("too_large", error, run=demand.run)
        quota = share_of(self._shares, demand.run).quota
        if quota is not None and demand.machine_count + retained_count > quota:
            error = GroupTooLarge(
                f"run {demand.run!r} may hold at most {quota} machines of pool {self._pool!r}, so never a group of"
                f" {demand.machine_count}{retained}; ask for fewer, or raise the run's quota"
            )
            return self.counted("over_quota", error, run=demand.run)
        return None

    def queue_full(self, demand: Demand, *, now_s: float, status: PoolStatus) -> EnvdError:
        """Return the error of a group that finds the queue full. It is counted."""
        error = PoolExhausted(
            f"pool {self._pool!r} has no room for {demand.machine_count}: the queue has reached its limit of"
            f" {len(self)} groups; retry with the same request_id",
            retry_after_s=self._retry_after_s(self.machine_count + demand.machine_count, now_s=now_s, status=status),
        )
        return self.counted("queue_full", error, run=demand.run)

    def _too_late(
        self, group: WaitingGroup, *, now_s: float, status: PoolStatus, held: Mapping[str, int]
    ) -> PoolExhausted:
        demand = group.demand
        queued = self.in_order(held=held)
        ahead = queued[: queued.index(group)]
        wanted_count = sum(each.demand.machine_count for each in ahead) + demand.machine_count
        busy_count = status.leased_count + status.reserved_count
        note = quota_note(demand, held=held, shares=self._shares)
        return PoolExhausted(
            f"pool {self._pool!r} had no room for {demand.machine_count} within {now_s - group.enter_s:.1f} s: position"
            f" {len(ahead) + 1} of {len(queued)} in the queue, {busy_count} of {self._resident} machines busy"
            f" ({status}){note and f'; {note}'}; retry with the same request_id",
            retry_after_s=self._retry_after_s(wanted_count, now_s=now_s, status=status),
        )

    def _failing(self, backoff: Backoff, *, now_s: float, status: PoolStatus) -> PoolFailing:
        retry_at_s = backoff.retry_at_s(now_s)
        next_s = 0.0 if retry_at_s is None else retry_at_s - now_s
        when = "one tries now" if retry_at_s is None else f"the next one tries in {next_s:.0f} s"
        return PoolFailing(
            f"pool {self._pool!r} is failing, after {backoff.summary}, and {when}:"
            f" {backoff.problem}; try another pool or host, or this one then",
            # A retry before that try has ended would get the same error.
            retry_after_s=max(1.0, next_s if retry_at_s is not None else min(60.0, _start_s(status))),
        )

    def draining(self) -> Draining:
        """Return the error of a pool that is draining."""
        # A retry finds another daemon, or none: one second is as good as any other figure.
        return Draining(f"pool {self._pool!r} is draining and leases no more; try another host", retry_after_s=1.0)

    def _retry_after_s(self, machine_count: int, *, now_s: float, status: PoolStatus) -> float:
        return self._turnover.retry_after_s(
            now_s, machine_count=machine_count, start_s=_start_s(status), resident=self._resident
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntry:
    """A group that waits for machines."""

    run: str
    owner: str
    """Name of the token that asked; empty if the daemon uses no tokens."""
    machine_count: int
    """Machines that it waits for."""
    position: int
    """1 for the group that is admitted next."""
    waited_s: float
    left_s: float
    """Time until it is refused."""
    reason: str
    """What it waits for, for people."""


def queue_report(
    queue: AdmissionQueue, *, held: Mapping[str, int], shares: RunShares, status: PoolStatus, now_s: float
) -> tuple[QueueEntry, ...]:
    """Return the queued groups in the order of their turns; `held` is machines by run."""
    groups = queue.in_order(held=held)
    demands = [group.demand for group in groups]
    return tuple(
        QueueEntry(
            run=group.demand.run,
            owner=group.owner,
            machine_count=group.demand.machine_count,
            position=index + 1,
            waited_s=now_s - group.enter_s,
            left_s=max(0.0, group.deadline_s - now_s),
            reason=_reason(group.demand, ahead=demands[:index], held=held, shares=shares, status=status)
            if group.has_caller()
            else f"its caller is gone; a reset or fork leaves the queue after {GRACE_S:g} s unless a retry comes",
        )
        for index, group in enumerate(groups)
    )


def quota_note(demand: Demand, *, held: Mapping[str, int], shares: RunShares) -> str:
    """Return that a group waits for machines of its own run; empty if it does not."""
    quota, held_count = share_of(shares, demand.run).quota, held.get(demand.run, 0)
    if quota is None or held_count + demand.machine_count <= quota:
        return ""
    return f"run {demand.run!r} holds {held_count} of its quota of {quota}"


def _reason(
    demand: Demand, *, ahead: Sequence[Demand], held: Mapping[str, int], shares: RunShares, status: PoolStatus
) -> str:
    if not status.healthy:
        return status.problem
    if note := quota_note(demand, held=held, shares=shares):
        return note
    if ahead:
        count = sum(other.machine_count for other in ahead)
        groups = "1 group that wants" if len(ahead) == 1 else f"{len(ahead)} groups that want"
        return f"behind {groups} {count} machine{'s' * (count > 1)}"
    if not status.template_digest:
        return "the pool's template is not ready yet"
    busy_count = status.leased_count + status.reserved_count
    coming = {"idle": status.idle_count, "starting": status.starting_count, "being destroyed": status.dying_count}
    # Places without a machine are kept for the group, whose turn it is.
    coming["free"] = max(0, status.resident - busy_count - sum(coming.values()))
    parts = [f"{busy_count} of {status.resident} machines busy", *(f"{n} {what}" for what, n in coming.items() if n)]
    if missing_count := max(0, demand.machine_count - sum(coming.values())):
        parts.append(f"{missing_count} more needed")
    return f"next: {', '.join(parts)}" + (f"; {status.problem}" if status.problem else "")


def _start_s(status: PoolStatus) -> float:
    return _START_GUESS_S if status.last_start_s is None else status.last_start_s
