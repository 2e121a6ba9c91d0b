"""Explain the queue of a pool: each group's position, and what it waits for. Pure: no I/O, no clock."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envd.pool.admission import GRACE_S, AdmissionQueue
from envd.pool.fairness import Demand, RunShares
from envd.pool.status import PoolStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedGroup:
    """A group that waits for machines."""

    run: str
    owner: str
    """Name of the token that asked; empty if the daemon uses no tokens."""
    machine_count: int
    """Machines that it waits for."""
    position: int
    """1 for the group that is served next."""
    waited_s: float
    left_s: float
    """Time until it is refused."""
    reason: str
    """What it waits for, for people."""


def queue_report(
    queue: AdmissionQueue, *, held: Mapping[str, int], shares: RunShares, status: PoolStatus, now_s: float
) -> tuple[QueuedGroup, ...]:
    """Return the queued groups in the order of their turns; `held` is machines by run."""
    groups = queue.in_order(held=held)
    demands = [group.demand for group in groups]
    return tuple(
        QueuedGroup(
            run=group.demand.run,
            owner=group.owner,
            machine_count=group.demand.machine_count,
            position=index + 1,
            waited_s=now_s - group.enter_s,
            left_s=max(0.0, group.deadline_s - now_s),
            reason=_reason(group.demand, ahead=demands[:index], held=held, shares=shares, status=status)
            if group.has_caller()
            else f"its caller is gone; it leaves the queue after {GRACE_S:g} s unless a retry comes",
        )
        for index, group in enumerate(groups)
    )


def quota_note(demand: Demand, *, held: Mapping[str, int], shares: RunShares) -> str:
    """Return that a group waits for machines of its own run; empty if it does not."""
    quota, held_count = shares.of(demand.run).quota, held.get(demand.run, 0)
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
    coming["free"] = max(0, status.capacity - busy_count - sum(coming.values()))
    parts = [f"{busy_count} of {status.capacity} machines busy", *(f"{n} {what}" for what, n in coming.items() if n)]
    if missing_count := max(0, demand.machine_count - sum(coming.values())):
        parts.append(f"{missing_count} more needed")
    return f"next: {', '.join(parts)}" + (f"; {status.problem}" if status.problem else "")
