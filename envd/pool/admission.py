"""The line for machines: bounded, first come first served, each group with its place and its deadline."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from envd.guest.desktop import Desktop
from envd.hypervisor.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedMachine:
    """A ready machine in the hands of one user, until `Pool.release`."""

    machine: Machine
    desktop: Desktop

    @property
    def machine_id(self) -> str:
        """The machine's id, for messages and logs."""
        return self.machine.machine_id

    @property
    def lost(self) -> asyncio.Event:
        """Set, once and for ever, when the machine is gone."""
        return self.machine.lost


@dataclass(slots=True, eq=False, kw_only=True)
class WaitingGroup:
    """Someone in the line."""

    size: int
    enter_s: float
    """When it joined, on the monotonic clock."""
    deadline_s: float
    """When it gives up, on the monotonic clock."""
    admitted: asyncio.Future[tuple[LeasedMachine, ...]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


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
        return sum(group.size for group in self._groups)

    @property
    def next_deadline_s(self) -> float | None:
        """When the first group gives up, on the monotonic clock."""
        return min((group.deadline_s for group in self._groups), default=None)

    def position(self, group: WaitingGroup) -> int:
        """Return its place, 1 for the head."""
        return self._groups.index(group) + 1

    def machines_ahead(self, group: WaitingGroup) -> int:
        """Return how many machines those before it wait for."""
        return sum(ahead.size for ahead in self._groups[: self._groups.index(group)])

    def enter(self, group: WaitingGroup) -> None:
        """Join at the end."""
        self._groups.append(group)

    def leave(self, group: WaitingGroup) -> None:
        """Leave, from wherever it stands; nothing if it has left."""
        if group in self._groups:
            self._groups.remove(group)


def estimate_retry_s(*, machines_ahead: int, capacity: int, boot_s: float) -> float:
    """Guess in how many seconds machines may come free, within [1, 120].

    Each turn-over of the pool costs at least a boot; how long episodes run nobody here knows.
    """
    return min(120.0, max(1.0, boot_s * (1 + machines_ahead / capacity)))
