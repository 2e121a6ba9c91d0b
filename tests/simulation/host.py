"""One simulated host: a daemon's pool with the real queue and planner, over machines that are only states and times."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from envd.base.telemetry.metrics import Metrics
from envd.pool.planner import Demand, LifecycleState, RunShares, plan
from envd.pool.queue import AdmissionQueue, Turnover, WaitingGroup
from tests.simulation.clock import EventQueue
from tests.simulation.scenario import Durations

#: Never runs: the queue's groups have futures of some loop, and only ask whether they are done.
_LOOP = asyncio.new_event_loop()
_LOOP.close()
_MAX_STARTING = 8
_METRICS = Metrics()
_MAX_IDLE_S = 600.0


@dataclass(slots=True, eq=False)
class Group:
    """A group of episodes, from its first request until its last episode has ended."""

    run: str
    size: int
    enter_s: float
    durations_s: tuple[float, ...]
    host: "SimHost | None" = None
    start_s: float | None = None
    running_count: int = 0
    attempt: int = 0
    excluded_until_s: "dict[SimHost, float]" = field(default_factory=dict)


class SimHost:
    """A host. It notifies its placement when its counts change."""

    def __init__(
        self,
        index: int,
        *,
        events: EventQueue,
        capacity: int,
        shares: RunShares,
        durations: Durations,
        rng: random.Random,
        admitted: Callable[["SimHost", Group], None],
        changed: Callable[["SimHost"], None],
    ) -> None:
        """Start with all machines ready."""
        self.index = index
        self.capacity = capacity
        self.is_up = True
        self.is_draining = False
        self.generation = 0
        """Raised when the host fails: events of its earlier machines are void."""
        self.groups: dict[Group, None] = {}
        """Those that run here."""
        self._events = events
        self._shares = shares
        self._durations = durations
        self._rng = rng
        self._admitted = admitted
        self._changed = changed
        self._reconciling = False
        self._ids = 0
        self._reset_state()
        self._fill()

    def _reset_state(self) -> None:
        self._queue = AdmissionQueue(
            "simulated", limit=256, shares=self._shares, resident=self.capacity, turnover=Turnover(), metrics=_METRICS
        )
        self._waiting: dict[WaitingGroup, Group] = {}
        self._machines: dict[str, LifecycleState] = {}
        self._held: dict[str, int] = {}
        self.idle_count = self.leased_count = self.dying_count = 0
        self.waiting_count = 0

    def _fill(self) -> None:
        for _ in range(self.capacity):
            self._put(self._new_id(), LifecycleState.IDLE)

    def _new_id(self) -> str:
        self._ids += 1
        return str(self._ids)

    def _put(self, machine_id: str, state: LifecycleState) -> None:
        old = self._machines.get(machine_id)
        if old is not None:
            self._count(old, -1)
        self._machines[machine_id] = state
        self._count(state, 1)

    def _count(self, state: LifecycleState, change: int) -> None:
        if state is LifecycleState.IDLE:
            self.idle_count += change
        elif state is LifecycleState.LEASED:
            self.leased_count += change
        elif state is LifecycleState.DYING:
            self.dying_count += change

    # What clients do

    def enter(self, group: Group, *, patience_s: float, timed_out: Callable[["SimHost", Group], None]) -> None:
        """Queue a group; `timed_out` is called if it still waits after `patience_s`."""
        now_s = self._events.now_s
        future: asyncio.Future[object] = asyncio.Future(loop=_LOOP)
        waiting = WaitingGroup(
            demand=Demand(idle=group.size, run=group.run),
            enter_s=now_s,
            deadline_s=now_s + patience_s,
            admitted=future,  # type: ignore[arg-type]
        )
        self._waiting[waiting] = group
        self.waiting_count += group.size
        self._queue.enter(waiting)
        if patience_s != float("inf"):
            self._events.after(patience_s, self._expire, waiting, timed_out, self.generation)
        self._touch()

    def _expire(self, waiting: WaitingGroup, timed_out: Callable[["SimHost", Group], None], generation: int) -> None:
        if generation != self.generation or (group := self._waiting.pop(waiting, None)) is None:
            return
        self.waiting_count -= group.size
        self._queue.leave(waiting)
        self._touch()
        timed_out(self, group)

    def end_member(self, machine_id: str, group: Group, generation: int) -> None:
        """An episode has ended: destroy its machine."""
        if generation != self.generation:
            return
        self._held[group.run] -= 1
        self._destroy(machine_id)
        # The planner can do nothing before the machine is destroyed.
        self._changed(self)

    def fail(self) -> list[Group]:
        """Lose everything. Returns the groups that ran or waited here."""
        lost = [*self.groups, *self._waiting.values()]
        self.generation += 1
        self.is_up = self.is_draining = False
        self.groups.clear()
        self._reset_state()
        self._changed(self)
        return lost

    def recover(self) -> None:
        """Come back with all machines ready."""
        self.is_up, self.is_draining = True, False
        if not self._machines:
            self._fill()
        self._changed(self)

    def drain(self) -> None:
        """Take no new groups."""
        self.is_draining = True
        self._changed(self)

    # What the daemon does

    def _touch(self) -> None:
        """Reconcile once for all changes of this instant."""
        self._changed(self)
        if not self._reconciling:
            self._reconciling = True
            self._events.after(0.0, self._reconcile)

    def _reconcile(self) -> None:
        self._reconciling = False
        if not self.is_up:
            return
        groups = list(self._queue)
        steps = plan(
            {machine_id: 0.0 for machine_id, state in self._machines.items() if state is LifecycleState.IDLE},
            counts=Counter(self._machines.values()),
            reserved_count=0,
            waiting=[waiting.demand for waiting in groups],
            idle_target=self.capacity,
            resident=self.capacity,
            host_room=self.capacity,
            max_starting=_MAX_STARTING,
            max_idle_s=_MAX_IDLE_S,
            held=self._held,
            shares=self._shares,
            turn=self._queue.turn(groups),
        )
        self._queue.set_turn(groups, steps.turn)
        for index, machine_ids in zip(steps.admitted, steps.machine_ids, strict=True):
            waiting = groups[index]
            self._queue.leave(waiting)
            self._admit(self._waiting.pop(waiting), machine_ids)
        for _ in range(steps.start_count):
            machine_id = self._new_id()
            self._put(machine_id, LifecycleState.STARTING)
            self._events.after(self._durations.fork.draw(self._rng), self._started, machine_id, self.generation)
        self._changed(self)

    def _admit(self, group: Group, machine_ids: tuple[str, ...]) -> None:
        self.waiting_count -= group.size
        self._held[group.run] = self._held.get(group.run, 0) + group.size
        group.host, group.start_s, group.running_count = self, self._events.now_s, group.size
        self.groups[group] = None
        for machine_id in machine_ids:
            self._put(machine_id, LifecycleState.LEASED)
        self._admitted(self, group)
        for machine_id, duration_s in zip(machine_ids, group.durations_s, strict=True):
            self._events.after(duration_s, self.end_member, machine_id, group, self.generation)

    def _destroy(self, machine_id: str) -> None:
        self._put(machine_id, LifecycleState.DYING)
        self._events.after(self._durations.destroy.draw(self._rng), self._destroyed, machine_id, self.generation)

    def _started(self, machine_id: str, generation: int) -> None:
        if generation == self.generation:
            self._put(machine_id, LifecycleState.IDLE)
            self._touch()

    def _destroyed(self, machine_id: str, generation: int) -> None:
        if generation == self.generation:
            self._count(LifecycleState.DYING, -1)
            del self._machines[machine_id]
            self._touch()
