"""Decide what a pool does next. Pure: no I/O, no clock, no await.

`Pool` calls `plan` after every change and carries out the result, so every rule about admission, sizing and eviction
can be read and tested here.

Runs share a pool by weight (`Turns`). A run is a label that clients give their resets. Next is the run that holds the
fewest machines for its weight; among equals, the run whose group came first. Within a run, groups are admitted in
order of arrival. A group that must wait for machines of its own run, because of its quota or of `resident`, has no turn
until they are returned.

A group whose turn comes while there are too few machines for it keeps the turn, and machines that become free are
kept for it. A group of another run that fits may pass it under two conditions: its run then holds no more for its
weight than the waiting group's run will hold, and all passing groups together take no more machines than the waiting
group wants. So a large group is admitted eventually, however many small ones arrive; runs keep their shares; and
machines that are kept for a group do not stay idle while another group can use them.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from heapq import heapify, heappop, heappush

from envd.base.config import DEFAULT_RUN, RunShare


class LifecycleState(Enum):
    """The state of a machine in its pool."""

    #: Being created, or not yet ready.
    STARTING = "starting"
    #: Ready and never used, waiting for a user.
    IDLE = "idle"
    #: Running an episode.
    LEASED = "leased"
    #: No longer usable; being destroyed.
    DYING = "dying"


RunShares = Mapping[str, RunShare]
"""The shares of runs in a pool, as `limits.runs` has them: `DEFAULT_RUN` names that of all runs that are not named."""


def share_of(shares: RunShares, run: str) -> RunShare:
    """Return the share of a run; empty for the run without a label."""
    return shares.get(run) or shares.get(DEFAULT_RUN) or RunShare()


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The machines that a group waits for: all of them or none."""

    idle: int
    """Machines that are idle now."""
    reserved: int = 0
    """Reservations for machines that the group forks itself."""
    parked: int = 0
    """Members without a machine, which begin parked."""
    run: str = ""
    """The run that it belongs to; empty for the run without a label."""

    @property
    def machine_count(self) -> int:
        return self.idle + self.reserved

    @property
    def member_count(self) -> int:
        """Episodes that it opens."""
        return self.machine_count + self.parked


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTurn:
    """A group whose turn has come and that waits for more machines than there are."""

    index: int
    """Its index in the queue."""
    passed_count: int = 0
    """Machines that went to other runs since; at most as many as it wants itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Steps to take now. No machine appears twice."""

    machine_ids: tuple[tuple[str, ...], ...]
    """Idle machines for each admitted group, in order of admission; each group also gets its reservations."""
    admitted: tuple[int, ...] = ()
    """Indexes of those groups in the queue."""
    turn: KeptTurn | None = None
    """The kept turn, by index in the queue before the plan; None if machines are kept for no group."""
    start_count: int
    """Machines to start."""
    destroy: tuple[str, ...]
    """Idle machines to destroy."""
    host_is_short: bool = False
    """Whether it would do more if the host had more memory or disk."""


class Turns:
    """Yields whose turn it is, as groups are admitted or skipped. For one pass over the queue."""

    def __init__(
        self,
        waiting: Sequence[Demand],
        *,
        held: Mapping[str, int],
        shares: RunShares,
        resident: int,
        first: int | None = None,
        gone: Collection[int] = (),
    ) -> None:
        """Start before the first turn.

        Args:
            waiting: The queue, in order of arrival.
            first: Index in `waiting` of the group that already has the turn, and is first.
            gone: Indexes in `waiting` of groups that no longer wait.
        """
        self._waiting = waiting
        self.held: defaultdict[str, int] = defaultdict(int, held)
        """Machines by run, including those of the groups that were admitted."""
        self._shares = shares
        self._resident = resident
        self._first = first
        self._queues: defaultdict[str, deque[int]] = defaultdict(deque)
        for index, group in enumerate(waiting):
            if index not in gone:
                self._queues[group.run].append(index)
        self._heads: list[tuple[float, int]] = []
        for run in self._queues:
            self._push_head(run)

    def level(self, index: int) -> float:
        """Return what a group's run would hold for its weight if the group were admitted."""
        group = self._waiting[index]
        return (self.held[group.run] + group.machine_count) / share_of(self._shares, group.run).weight

    def next(self) -> int | None:
        """Return the index of the group whose turn it is; None at the end.

        Unless the caller then calls `admit` for it, its run has no further turn.
        """
        if self._first is not None:
            first, self._first = self._first, None
            self._heads = [(ratio, index) for ratio, index in self._heads if index != first]
            heapify(self._heads)
            return first
        return heappop(self._heads)[1] if self._heads else None

    def admit(self, index: int) -> None:
        """Count its machines as held by its run; the run's next group is the one behind it."""
        run = self._waiting[index].run
        self.held[run] += self._waiting[index].machine_count
        self._queues[run].popleft()
        self._push_head(run)

    def order(self) -> list[int]:
        """Admit all groups that have a turn; return their indexes in that order, as if machines were never short."""
        order: list[int] = []
        while (index := self.next()) is not None:
            order.append(index)
            self.admit(index)
        return order

    def _push_head(self, run: str) -> None:
        queue, share = self._queues[run], share_of(self._shares, run)
        if not queue:
            return
        held = self.held[run]
        if held + self._waiting[queue[0]].machine_count <= share.most(self._resident):
            heappush(self._heads, (held / share.weight, queue[0]))


def plan(
    idle_s: Mapping[str, float],
    *,
    counts: Mapping[LifecycleState, int],
    reserved_count: int,
    waiting: Sequence[Demand],
    idle_target: int,
    resident: int,
    host_room: int,
    max_starting: int,
    max_idle_s: float,
    open_room: int | None = None,
    held: Mapping[str, int] | None = None,
    shares: RunShares | None = None,
    turn: KeptTurn | None = None,
) -> Plan:
    """Admit whole groups, then move the pool towards `idle_target` spare machines.

    Args:
        idle_s: The idle machines: seconds since each became idle, by its id.
        counts: The machines by state, idle ones included.
        reserved_count: Reservations that have no machine yet.
        waiting: Demands of the queued groups, in order of arrival; each within [1, resident] and its run's quota.
        idle_target: Spare machines: those to have idle beyond demand.
        resident: Most machines and reservations at once, dying machines included.
        host_room: Further machines and reservations that the host's memory and disk allow.
        max_starting: Most machines that may be starting at once; 0 during a pause after a failure.
        max_idle_s: Age in seconds at which a surplus idle machine is destroyed.
        open_room: Episodes that may be opened; None if only machines bound them.
        held: Machines and reservations held by each run.
        shares: Weights and quotas of runs; by default equal and unbounded.
        turn: The turn that the last plan kept, if its group still waits.
    """
    shares = shares or {}
    # Freshest first: the oldest of a surplus then ages out instead of circulating.
    idle = sorted(idle_s, key=lambda machine_id: idle_s[machine_id])
    room = resident - sum(counts.values()) - reserved_count
    first = None if turn is None else turn.index
    turns = Turns(waiting, held=held or {}, shares=shares, resident=resident, first=first)
    admitted, turn = _admit(
        waiting, turns, idle_count=len(idle), room=room, host_room=host_room, open_room=open_room, turn=turn
    )
    machine_ids: list[tuple[str, ...]] = []
    for index in admitted:
        count = waiting[index].idle
        machine_ids.append(tuple(idle[:count]))
        idle = idle[count:]
        room -= waiting[index].reserved
        host_room -= waiting[index].reserved
    order = Turns(
        waiting,
        held=turns.held,
        shares=shares,
        resident=resident,
        first=None if turn is None else turn.index,
        gone=set(admitted),
    ).order()
    # Groups that wait for machines of their own run come last: nothing is evicted for them, but machines are started.
    seen = {*admitted, *order}
    queue = [waiting[index] for index in order]
    everyone = [*queue, *(group for index, group in enumerate(waiting) if index not in seen)]
    free = min(room, host_room)
    # A dying machine holds its memory until the hypervisor confirms that it is gone, so it counts against `resident`.
    dying_count = counts.get(LifecycleState.DYING, 0)
    kept = idle[: len(idle) - _evict_count(queue, idle_count=len(idle), coming_count=free + dying_count)]
    starting_count = counts.get(LifecycleState.STARTING, 0)

    def starts(free: int) -> int:
        """Return how many machines to start if there is room for `free` more."""
        budget = free + dying_count + len(idle) + starting_count
        wanted = _idle_wanted(everyone, idle_target=idle_target, budget=budget)
        return max(0, min(free, wanted - len(kept) - starting_count, max_starting - starting_count))

    surplus = kept[sum(group.idle for group in everyone) + idle_target :]
    start_count = starts(free)
    head_lacks_memory = bool(queue) and free < queue[0].reserved <= room
    return Plan(
        machine_ids=tuple(machine_ids),
        admitted=admitted,
        turn=turn,
        start_count=start_count,
        destroy=(*(each for each in surplus if idle_s[each] >= max_idle_s), *idle[len(kept) :]),
        host_is_short=head_lacks_memory or start_count < starts(room),
    )


def _admit(
    waiting: Sequence[Demand],
    turns: Turns,
    *,
    idle_count: int,
    room: int,
    host_room: int,
    open_room: int | None,
    turn: KeptTurn | None,
) -> tuple[tuple[int, ...], KeptTurn | None]:
    """Admit every group that fits and whose turn it is, or that may pass the group with the turn.

    Returns the admitted groups in order, and the turn that is kept afterwards.
    """
    admitted: list[int] = []
    while (index := turns.next()) is not None:
        group = waiting[index]
        fits = group.idle <= idle_count and group.reserved <= min(room, host_room)
        fits = fits and (open_room is None or group.member_count <= open_room)
        if fits and (turn is None or index == turn.index or _may_pass(index, turn, waiting=waiting, turns=turns)):
            turn = _turn_after(index, waiting, turn)
            admitted.append(index)
            idle_count -= group.idle
            room -= group.reserved
            host_room -= group.reserved
            open_room = None if open_room is None else open_room - group.member_count
            turns.admit(index)
        elif turn is None and (idle_count or room > 0):
            # Keep the turn only if there is a machine or room to keep; otherwise it stays undecided.
            turn = KeptTurn(index=index)
    return tuple(admitted), turn


def _may_pass(index: int, turn: KeptTurn, *, waiting: Sequence[Demand], turns: Turns) -> bool:
    """Return whether a group may be admitted while another group has the turn."""
    passed_count = turn.passed_count + waiting[index].machine_count
    return passed_count <= waiting[turn.index].machine_count and turns.level(index) <= turns.level(turn.index)


def _turn_after(index: int, waiting: Sequence[Demand], turn: KeptTurn | None) -> KeptTurn | None:
    """Return the kept turn after a group has been admitted."""
    if turn is None or turn.index == index:
        return None
    return replace(turn, passed_count=turn.passed_count + waiting[index].machine_count)


def _evict_count(queue: Sequence[Demand], *, idle_count: int, coming_count: int) -> int:
    """Return how many idle machines to destroy, so that the group whose turn it is gets its reservations.

    Idle machines are cheap to replace, and groups that may pass have been admitted already.
    """
    if not queue:
        return 0
    return max(0, min(idle_count - queue[0].idle, queue[0].reserved - max(0, coming_count)))


def _idle_wanted(queue: Sequence[Demand], *, idle_target: int, budget: int) -> int:
    """Return how many machines should be idle or starting, out of `budget` for them and the queued reservations.

    In queue order: a machine for one group is not there for the next. Spare machines come last.
    """
    wanted = 0
    for group in queue:
        if budget <= 0:
            break
        wanted += min(group.idle, budget)
        budget -= group.machine_count
    return wanted + min(idle_target, max(0, budget))


def missing_count(
    counts: Mapping[LifecycleState, int], *, wanted_count: int, queued_count: int, free_count: int, host_is_short: bool
) -> int:
    """Return how many leased machines have to be given up for others; not positive if there is room for all.

    Args:
        counts: The machines by state.
        wanted_count: Machines for parked episodes with calls, and spare ones.
        queued_count: Machines that queued groups wait for, as far as these may be opened; negative for none.
        free_count: Machines that may be added; negative if there are too many.
    """
    coming_count = counts[LifecycleState.IDLE] + counts[LifecycleState.DYING]
    if not host_is_short:
        coming_count += counts[LifecycleState.STARTING] + max(0, free_count)
    return wanted_count + max(0, queued_count) - coming_count
