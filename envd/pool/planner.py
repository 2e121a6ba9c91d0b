"""Decide what a pool does next. Pure: no I/O, no clock, no await.

`Pool` calls `plan` after every change and carries out what it returns, so every rule about admission, sizing
and eviction can be read, and tested, here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum


class MachineState(Enum):
    """Where a machine of a pool is in its life."""

    #: Being made, or its guest not yet ready.
    STARTING = "starting"
    #: Ready and never used, waiting for a lease.
    IDLE = "idle"
    #: Running an episode.
    LEASED = "leased"
    #: Past its use; being destroyed.
    DYING = "dying"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMachine:
    """What the planner needs to know of one machine."""

    machine_id: str
    state: MachineState
    idle_s: float = 0.0
    """Seconds since it became idle. Meaningful only when `IDLE`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Steps to take now. No machine appears twice."""

    lease: tuple[tuple[str, ...], ...]
    """Machines for each group admitted, from the head of the queue."""
    start_count: int
    """Machines to boot."""
    destroy: tuple[str, ...]
    """Idle machines to give up."""


def plan(
    machines: Iterable[PlannedMachine],
    *,
    waiting: Sequence[int],
    idle_target: int,
    capacity: int,
    max_starting: int,
    max_idle_s: float,
) -> Plan:
    """Admit whole groups, then move the pool towards `idle_target` spare machines.

    Args:
        machines: Every machine that the pool knows of, in any order.
        waiting: Sizes of the groups queued for a lease, first come first; each in [1, capacity].
        idle_target: Spare machines to keep ready beyond demand.
        capacity: Most machines that may exist at once, dying ones included.
        max_starting: Most machines that may be starting at once; 0 while boots are held back.
        max_idle_s: Age in seconds from which on a surplus idle machine is destroyed.
    """
    machines = list(machines)
    # Freshest first: the oldest of a surplus then ages out instead of circulating.
    idle = sorted((m for m in machines if m.state is MachineState.IDLE), key=lambda m: m.idle_s)
    starting_count = sum(m.state is MachineState.STARTING for m in machines)

    # No group overtakes another, or the large ones would wait for ever.
    lease: list[tuple[str, ...]] = []
    for size in waiting:
        if size > len(idle):
            break
        lease.append(tuple(m.machine_id for m in idle[:size]))
        idle = idle[size:]

    wanted = sum(waiting[len(lease) :]) + idle_target
    surplus = idle[wanted:]

    # A dying machine still holds its memory, so it counts against capacity
    # until the hypervisor confirms that it is gone.
    room = capacity - len(machines)
    missing = wanted - len(idle) - starting_count
    return Plan(
        lease=tuple(lease),
        start_count=max(0, min(room, missing, max_starting - starting_count)),
        destroy=tuple(m.machine_id for m in surplus if m.idle_s >= max_idle_s),
    )
