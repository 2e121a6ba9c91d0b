"""Refuse groups: why they get no machines, and when to retry. Each refusal is counted."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from envd.base.errors import Draining, EnvdError, GroupTooLarge, PoolExhausted, PoolFailing
from envd.base.telemetry.metrics import Metrics
from envd.pool.admission import AdmissionQueue, Turnover, WaitingGroup
from envd.pool.backoff import Backoff
from envd.pool.fairness import Demand, RunShares
from envd.pool.queue_report import quota_note
from envd.pool.status import PoolStatus

#: Assumed start time of a machine before one was measured: there may be no template yet.
_START_GUESS_S = 10.0
#: Somebody must remove files.
_DISK_RETRY_S = 10.0


class RefusalReason(Enum):
    """Why a group was refused."""

    #: The pool can never hold it.
    TOO_LARGE = "too_large"
    #: Its run's quota can never hold it.
    OVER_QUOTA = "over_quota"
    #: The queue is full.
    QUEUE_FULL = "queue_full"
    #: Its deadline passed in the queue.
    TOO_LATE = "too_late"
    #: The pool's machines do not start, or cannot write to the host's disk.
    POOL_FAILING = "pool_failing"
    #: The pool is draining.
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A refused group's error, and its reason for metrics."""

    reason: RefusalReason
    error: EnvdError


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """Builds the refusals of one pool, and delivers them to its queued groups."""

    pool: str
    capacity: int
    shares: RunShares
    queue: AdmissionQueue
    turnover: Turnover
    metrics: Metrics

    def counted(self, refusal: Refusal, *, run: str) -> EnvdError:
        self.metrics.group_refused(pool=self.pool, run=run, reason=refusal.reason.value)
        return refusal.error

    def refuse(self, group: WaitingGroup, refusal: Refusal) -> None:
        """Remove a group from the queue, with the refusal's error for its caller."""
        self.queue.leave(group)
        if not group.admitted.done():
            group.admitted.set_exception(self.counted(refusal, run=group.demand.run))

    def refuse_failing(
        self, groups: Iterable[WaitingGroup], backoff: Backoff, *, now_s: float, status: PoolStatus
    ) -> None:
        """Refuse queued groups because machines do not start."""
        for group in groups:
            self.refuse(group, self.failing(backoff, now_s=now_s, status=status))

    def refuse_disk_full(self, groups: Iterable[WaitingGroup], shortage: str) -> None:
        """Refuse queued groups because machines, also ready ones, cannot write to the host's disk."""
        for group in tuple(groups):
            error = PoolFailing(
                f"pool {self.pool!r} leases no machine: {shortage}; try another host, or this one then",
                retry_after_s=_DISK_RETRY_S,
            )
            self.refuse(group, Refusal(reason=RefusalReason.POOL_FAILING, error=error))

    def refuse_late(
        self, groups: Iterable[WaitingGroup], *, now_s: float, status: PoolStatus, held: Mapping[str, int]
    ) -> None:
        """Refuse queued groups whose deadline has passed; each error names the position before any was removed."""
        refused = [(group, self.too_late(group, now_s=now_s, status=status, held=held)) for group in groups]
        for group, refusal in refused:
            self.refuse(group, refusal)

    def never(self, demand: Demand, *, retained_count: int) -> Refusal | None:
        """Refuse a group that can never be admitted while its run retains `retained_count` machines; else None."""
        if demand.machine_count > self.capacity:
            error = GroupTooLarge(
                f"pool {self.pool!r} holds at most {self.capacity} machines, so never a group of"
                f" {demand.machine_count}; ask for fewer, or raise the pool's capacity"
            )
            return Refusal(reason=RefusalReason.TOO_LARGE, error=error)
        quota = self.shares.of(demand.run).quota
        if quota is not None and demand.machine_count + retained_count > quota:
            retained = f" in addition to the {retained_count} that it retains" if retained_count else ""
            error = GroupTooLarge(
                f"run {demand.run!r} may hold at most {quota} machines of pool {self.pool!r}, so never a group of"
                f" {demand.machine_count}{retained}; ask for fewer, or raise the run's quota"
            )
            return Refusal(reason=RefusalReason.OVER_QUOTA, error=error)
        return None

    def queue_full(self, demand: Demand, *, now_s: float, status: PoolStatus) -> Refusal:
        """Refuse a group that finds the queue full."""
        error = PoolExhausted(
            f"pool {self.pool!r} has no room for {demand.machine_count}: the queue has reached its limit of"
            f" {len(self.queue)} groups; retry with the same request_id",
            retry_after_s=self._retry_after_s(
                self.queue.machine_count + demand.machine_count, now_s=now_s, status=status
            ),
        )
        return Refusal(reason=RefusalReason.QUEUE_FULL, error=error)

    def too_late(self, group: WaitingGroup, *, now_s: float, status: PoolStatus, held: Mapping[str, int]) -> Refusal:
        """Refuse a queued group whose deadline has passed."""
        demand = group.demand
        queued = self.queue.in_order(held=held)
        ahead = queued[: queued.index(group)]
        wanted_count = sum(each.demand.machine_count for each in ahead) + demand.machine_count
        busy_count = status.leased_count + status.reserved_count
        note = quota_note(demand, held=held, shares=self.shares)
        error = PoolExhausted(
            f"pool {self.pool!r} had no room for {demand.machine_count} within {now_s - group.enter_s:.1f} s: position"
            f" {len(ahead) + 1} of {len(self.queue)} in the queue, {busy_count} of {self.capacity} machines busy"
            f" ({status}){note and f'; {note}'}; retry with the same request_id",
            retry_after_s=self._retry_after_s(wanted_count, now_s=now_s, status=status),
        )
        return Refusal(reason=RefusalReason.TOO_LATE, error=error)

    def failing(self, backoff: Backoff, *, now_s: float, status: PoolStatus) -> Refusal:
        """Refuse a group because machines do not start."""
        retry_at_s = backoff.retry_at_s(now_s)
        next_s = 0.0 if retry_at_s is None else retry_at_s - now_s
        when = "one tries now" if retry_at_s is None else f"the next one tries in {next_s:.0f} s"
        error = PoolFailing(
            f"pool {self.pool!r} is failing, after {backoff.failure_count} failures in a row, and {when}:"
            f" {backoff.problem}; try another pool or host, or this one then",
            # A retry before that try has ended would get the same error.
            retry_after_s=max(1.0, next_s if retry_at_s is not None else min(60.0, _start_s(status))),
        )
        return Refusal(reason=RefusalReason.POOL_FAILING, error=error)

    def draining(self) -> Refusal:
        """Refuse a group because the pool is draining."""
        # A retry finds another daemon, or none: one second is as good as any other figure.
        error = Draining(f"pool {self.pool!r} is draining and leases no more; try another host", retry_after_s=1.0)
        return Refusal(reason=RefusalReason.DRAINING, error=error)

    def _retry_after_s(self, machine_count: int, *, now_s: float, status: PoolStatus) -> float:
        return self.turnover.retry_after_s(
            now_s, machine_count=machine_count, start_s=_start_s(status), capacity=self.capacity
        )


def _start_s(status: PoolStatus) -> float:
    return _START_GUESS_S if status.last_start_s is None else status.last_start_s
