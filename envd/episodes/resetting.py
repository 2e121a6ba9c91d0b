"""Bring machines to the start of a task, all in one state: choose the pool, lease, set up, fork, observe.

A task without setup starts in the state of the pool's template. A setup runs once, on the first machine, and the
others are forked from the resulting state. If the task allows it, that state is cached and the next reset starts there.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from envd.base.errors import (
    HypervisorError,
    HypervisorUnavailable,
    InvalidRequest,
    MachineLost,
    PoolNotFound,
    SetupFailed,
    TemplateCorrupt,
)
from envd.base.telemetry.traces import Stopwatch
from envd.desktop.desktop import Desktop
from envd.desktop.display_connection import DesktopView
from envd.desktop.observation import SettleResult
from envd.episodes.checkpoints.parking import surplus_of
from envd.episodes.context import EpisodeContext
from envd.episodes.members import ALREADY_SETTLED, Group, Member, StateKey, TaskState, gather, map_errors, start_from
from envd.episodes.progress import Progress
from envd.episodes.types import ResetCommand
from envd.pool.leased import FrozenDesktop, LeasedMachine, Reservation
from envd.pool.pool import MachinePool
from envd.tasks.model import Task, missing_needs

logger = logging.getLogger(__name__)

#: If machines die during a reset, it starts over once; a second failure is systematic.
_ATTEMPTS = 2


class RunSetup(Protocol):
    """Performs a task's setup verbs."""

    async def __call__(self, task: Task, desktop: Desktop, *, timeout_s: float) -> None:
        """Return when the guest is at the task's start. Raises: SetupFailed, MachineLost."""


def choose_pool(task: Task, requested: str, pools: Mapping[str, MachinePool]) -> MachinePool:
    """Return the pool to run a task in: the requested one, the task's own, or the only one that fits.

    Raises:
        PoolNotFound: No pool has that name, or none fits.
        InvalidRequest: The requested pool runs another system, or several pools fit.
        SetupFailed: The pool's image does not provide what the task needs.
    """
    name = requested or task.pool
    if name:
        pool = pools.get(name)
        if pool is None:
            raise PoolNotFound(
                f"pool {name!r}: not found, needed by task {task.task_id}; this daemon has {_names(pools)}"
            )
        if pool.image.os is not task.os:
            raise InvalidRequest(
                "pool", f"{name!r} runs {pool.image.os.value}, but task {task.task_id} needs {task.os.value}"
            )
        return _provided(task, pool)
    fitting = [p for p in pools.values() if p.image.os is task.os and task.image in {"", p.image.name}]
    if not fitting:
        need = f"{task.os.value}, image {task.image!r}" if task.image else task.os.value
        raise PoolNotFound(f"task {task.task_id}: no pool fits ({need}); this daemon has {_names(pools)}")
    provided = [pool for pool in fitting if not missing_needs(task, pool.image.provides)]
    fitting = provided or [_provided(task, fitting[0])]
    if len(fitting) > 1:
        names = ", ".join(sorted(p.name for p in fitting))
        raise InvalidRequest("pool", f"several fit task {task.task_id}; choose one of {names}")
    return fitting[0]


def _provided(task: Task, pool: MachinePool) -> MachinePool:
    """Return the pool. Raises: SetupFailed: Its image does not provide what the task needs."""
    if lacking := missing_needs(task, pool.image.provides):
        raise SetupFailed(
            f"task {task.task_id}: cannot run in pool {pool.name}: it needs {lacking}, which image {pool.image.name}"
            " does not provide; choose another pool, or a task that ListTasks shows as runnable"
        )
    return pool


async def reset_group(
    pool: MachinePool, task: Task, command: ResetCommand, *, context: EpisodeContext, run_setup: RunSetup
) -> Group:
    """Lease machines and bring them all to the start of the task; if one dies, start over once with new ones.

    On failure and on cancellation no machine, reservation or state is kept. The whole group starts over, not only the
    machine that died: groups that hold some machines while they wait for another would deadlock. Timings: those of
    `acquire`, `setup`, `settle`, `freeze`, `fork` and `observe` that took place, and `total`.
    """
    clock, states = context.clock, context.states
    reset = _Reset(task, command, pool, context, run_setup, Stopwatch(clock))
    deadline_s = clock.monotonic() + command.timeout_s
    for attempt in range(1, _ATTEMPTS + 1):
        key = None if pool.template is None else _state_key(pool, task, pool.template)
        with states.borrow(key) as state:
            try:
                return await reset.attempt(state, deadline_s=deadline_s)
            except HypervisorUnavailable:
                raise  # unrelated to the cached state
            except (MachineLost, HypervisorError) as error:
                # The cached state may be the cause, so the next attempt runs the setup.
                if key is not None and state is not None:
                    states.evict(key)
                # The pool recreates a template that was removed, so it is worth waiting for.
                if not isinstance(error, MachineLost | TemplateCorrupt) or attempt == _ATTEMPTS:
                    raise
                logger.warning("task %s: reset starts over on new machines: %s", task.task_id, error)
    raise AssertionError("the last attempt returns or raises")


def _state_key(pool: MachinePool, task: Task, template: FrozenDesktop) -> StateKey | None:
    """Return the cache key of the state after the task's setup on a template; None if it is not cached."""
    if not task.freeze_setup or not pool.settings.task_templates or not pool.copies_running_machines:
        return None
    return StateKey(
        pool=pool.name, task_id=task.task_id, task_version=task.version, template_digest=template.snapshot.digest
    )


@dataclass(frozen=True, slots=True)
class _Reset:
    """What all attempts of a reset share."""

    task: Task
    command: ResetCommand
    pool: MachinePool
    context: EpisodeContext
    run_setup: RunSetup
    watch: Stopwatch

    @property
    def surplus_count(self) -> int:
        """Members that begin parked, because the pool never has so many machines."""
        return surplus_of(self.pool, self.command.group_size)

    async def _park_surplus(self, frozen: FrozenDesktop) -> Sequence[LeasedMachine]:
        command = self.command
        return await self.context.parking.park_copies(
            self.pool, frozen, count=self.surplus_count, run=command.run, owner=command.owner
        )

    async def attempt(self, state: TaskState | None, *, deadline_s: float) -> Group:
        """Lease machines and bring them to the start of the task, from its cached state if there is one."""
        count = self.command.group_size - self.surplus_count
        # Idle machines are in the template's state; machines for another state are forked from that.
        is_forked = self.task.has_start and self.pool.copies_running_machines
        idle_count = 0 if state is not None else 1 if is_forked else count
        admission = await self.pool.acquire(
            idle_count,
            reserved=count - idle_count,
            parked=self.surplus_count,
            run=self.command.run,
            owner=self.command.owner,
            timeout_s=min(deadline_s - self.context.clock.monotonic(), self.command.admission_timeout_s),
        )
        self.watch.lap("acquire")
        async with self.pool.releasing_on_failure([*admission.machines, *admission.reservations]):
            if state is not None:
                settle = SettleResult(settled=state.settle.settled, settle_ms=0.0, change_count=0)
                members = await self._start(state.frozen, (), admission.reservations, settle=settle)
            elif is_forked:
                members = await self._set_up(admission.machines[0], admission.reservations, deadline_s=deadline_s)
            elif self.task.has_start:
                members = await self._set_up_each(admission.machines, deadline_s=deadline_s)
            else:
                members = await self._start_unused(admission.machines)
        return Group(
            members=members, progress=Progress(), timings_ms={**self.watch.timings_ms, "total": self.watch.total_ms}
        )

    async def _set_up(
        self, first: LeasedMachine, reservations: Sequence[Reservation], *, deadline_s: float
    ) -> tuple[Member, ...]:
        """Run the setup on the first machine, and fork the others from the resulting state."""
        self.command.observe.require_region_on(first.desktop.screen_size)
        with map_errors(first, f"task {self.task.task_id}"):
            settle = await self._run_setup(first, deadline_s=deadline_s)
            key = _state_key(self.pool, self.task, first.frozen)
            if not reservations and key is None and not self.surplus_count:
                # The guest is paused again, so this view is the state in which the first step starts.
                view = await first.desktop.view()
                return await self._start(first.frozen, [first], (), settle=settle, view=view)
            frozen = await self.pool.freeze(first)
        self.watch.lap("freeze")
        cached = False
        try:
            members = await self._start(frozen, [first], reservations, settle=settle)
            # Do not start later episodes on a screen that was still changing.
            if key is not None and settle.settled:
                self.context.states.add(
                    key, TaskState(frozen=frozen, settle=settle), limit=self.pool.settings.task_templates
                )
                cached = True
            return members
        finally:
            if not cached:
                self.context.states.discard(frozen)

    async def _start_unused(self, machines: Sequence[LeasedMachine]) -> tuple[Member, ...]:
        """Start from the state of the template, in which the machines are."""
        if not self.surplus_count:
            return await self._start(machines[0].frozen, machines, (), settle=ALREADY_SETTLED)
        # A template is not stored as a checkpoint, but a machine that has its state is.
        frozen = await self.pool.freeze(machines[0])
        try:
            return await self._start(frozen, machines, (), settle=ALREADY_SETTLED)
        finally:
            self.context.states.discard(frozen)

    async def _set_up_each(self, machines: Sequence[LeasedMachine], *, deadline_s: float) -> tuple[Member, ...]:
        """Run the setup on every machine, where machines cannot be copied: equal by construction, not copies."""

        resets = [replace(self, watch=Stopwatch(self.context.clock)) for _ in machines]
        members = await gather(
            reset._set_up_one(machine, deadline_s=deadline_s) for reset, machine in zip(resets, machines, strict=True)
        )
        slowest = max((reset.watch for reset in resets), key=lambda watch: watch.total_ms)
        self.watch.timings_ms.update(slowest.timings_ms)
        return tuple(members)

    async def _set_up_one(self, machine: LeasedMachine, *, deadline_s: float) -> Member:
        self.command.observe.require_region_on(machine.desktop.screen_size)
        with map_errors(machine, f"task {self.task.task_id}"):
            settle = await self._run_setup(machine, deadline_s=deadline_s)
            view = await machine.desktop.view()
        (member,) = await self._start(machine.frozen, [machine], (), settle=settle, view=view)
        return member

    async def _run_setup(self, machine: LeasedMachine, *, deadline_s: float) -> SettleResult:
        """Run the setup on a machine, which is paused again afterwards. Raises: SetupFailed, MachineLost."""
        timeout_s = max(0.0, min(self.context.limits.setup_timeout_s, deadline_s - self.context.clock.monotonic()))
        async with machine.running():
            await self.run_setup(self.task, machine.desktop, timeout_s=timeout_s)
            self.watch.lap("setup")
            default = self.pool.settings.settle
            settle = await machine.desktop.settle((self.command.settle or default).ignoring(default.ignored_regions))
            self.watch.lap("settle")
        return settle

    async def _start(
        self,
        frozen: FrozenDesktop,
        machines: Sequence[LeasedMachine],
        reservations: Sequence[Reservation],
        *,
        settle: SettleResult,
        view: DesktopView | None = None,
    ) -> tuple[Member, ...]:
        return await start_from(
            self.pool,
            frozen,
            reservations,
            machines=machines,
            view=view,
            settle=settle,
            park_surplus=self._park_surplus if self.surplus_count else None,
            options=self.command.observe,
            subject=f"task {self.task.task_id}",
            watch=self.watch,
        )


def _names(pools: Mapping[str, MachinePool]) -> str:
    return ", ".join(sorted(pools)) or "no pools"
