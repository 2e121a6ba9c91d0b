"""Bring machines to the start of a task: choose the pool, lease, set up, settle, take the first look."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from envd.episodes.step import Stopwatch, check_region, look
from envd.episodes.types import ResetCommand
from envd.errors import GuestError, GuestUnresponsive, InvalidRequest, MachineLost, PoolNotFound, SetupFailed
from envd.guest.actions import Done, Fail
from envd.guest.desktop import Desktop
from envd.guest.observation import Observation
from envd.pool.admission import LeasedMachine
from envd.pool.clock import Clock
from envd.pool.pool import Pool
from envd.tasks.evaluation import Evaluation
from envd.tasks.model import Task

logger = logging.getLogger(__name__)

#: A machine that dies during reset is replaced once; the second time it is no accident.
_ATTEMPTS = 2


class RunSetup(Protocol):
    """Performs a task's setup verbs."""

    async def __call__(self, task: Task, desktop: Desktop, *, timeout_s: float) -> None:
        """Return when the guest is at the task's start. Raises: SetupFailed, MachineLost."""


class RunCheckers(Protocol):
    """Scores a task."""

    async def __call__(
        self, task: Task, desktop: Desktop, *, last_action: Done | Fail | None, timeout_s: float
    ) -> Evaluation:
        """Return the score of the state that the guest is in. Raises: EvaluatorFailed, MachineLost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """One machine at the start of its task."""

    machine: LeasedMachine
    observation: Observation
    timings_ms: dict[str, float]
    """`setup`, `settle` and `observe`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedGroup:
    """All machines of a reset."""

    members: tuple[Opened, ...]
    timings_ms: dict[str, float]
    """`acquire`, the slowest member's phases, and `total`."""


def choose_pool(task: Task, requested: str, pools: Mapping[str, Pool]) -> Pool:
    """Return the pool to run a task in: the one asked for, the task's own, or the only one that fits.

    Raises:
        PoolNotFound: There is none of that name, or none that fits.
        InvalidRequest: The pool asked for runs another system, or several fit.
    """
    name = requested or task.pool
    if name:
        pool = pools.get(name)
        if pool is None:
            raise PoolNotFound(f"no pool {name!r} for task {task.task_id}; this daemon has {_names(pools)}")
        if pool.image.os is not task.os:
            raise InvalidRequest(
                "pool", f"{name!r} runs {pool.image.os.value}, but task {task.task_id} needs {task.os.value}"
            )
        return pool
    fitting = [p for p in pools.values() if p.image.os is task.os and task.image in {"", p.image.name}]
    if not fitting:
        need = f"{task.os.value}, image {task.image!r}" if task.image else task.os.value
        raise PoolNotFound(f"no pool fits task {task.task_id} ({need}); this daemon has {_names(pools)}")
    if len(fitting) > 1:
        names = ", ".join(sorted(p.name for p in fitting))
        raise InvalidRequest("pool", f"several fit task {task.task_id}; name one of {names}")
    return fitting[0]


async def open_group(
    pool: Pool,
    task: Task,
    command: ResetCommand,
    *,
    run_setup: RunSetup,
    setup_timeout_s: float,
    clock: Clock,
) -> OpenedGroup:
    """Lease machines and bring them all to the start of the task; if one dies, once more with new ones.

    On failure and on cancellation no machine is kept. The whole group starts over, not the one that died:
    groups that hold some machines while they wait for another would deadlock.

    Raises:
        GroupTooLarge, PoolExhausted, Draining: See `Pool.lease`.
        SetupFailed: A setup verb or the first look failed.
        MachineLost: Machines died under both attempts.
        InvalidRequest: The observation asked for is not possible on this screen.
    """
    begin_s = clock.monotonic()
    deadline_s = begin_s + command.timeout_s
    for attempt in range(1, _ATTEMPTS + 1):
        machines = await pool.lease(command.group_size, timeout_s=deadline_s - clock.monotonic())
        acquire_s = clock.monotonic() - begin_s
        left_s = max(0.0, deadline_s - clock.monotonic())
        opening = _Opening(task, command, pool, run_setup, min(setup_timeout_s, left_s), clock)
        try:
            members = await opening.open_all(machines)
        except BaseException as error:
            await pool.release(machines)
            if not isinstance(error, MachineLost) or attempt == _ATTEMPTS:
                raise
            logger.warning("task %s: reset starts over on new machines: %s", task.task_id, error)
        else:
            slowest = {phase: max(m.timings_ms[phase] for m in members) for phase in members[0].timings_ms}
            total_ms = (clock.monotonic() - begin_s) * 1000
            return OpenedGroup(members=members, timings_ms={"acquire": acquire_s * 1000, **slowest, "total": total_ms})
    raise AssertionError("the last attempt returns or raises")


@dataclass(frozen=True, slots=True)
class _Opening:
    """What is the same for all machines of a group."""

    task: Task
    command: ResetCommand
    pool: Pool
    run_setup: RunSetup
    setup_timeout_s: float
    clock: Clock

    async def open_all(self, machines: Sequence[LeasedMachine]) -> tuple[Opened, ...]:
        """Open every machine, all at once. The first that fails stops the others."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self.open_one(machine), name=f"open:{machine.machine_id}") for machine in machines
                ]
        except ExceptionGroup as failures:
            # A lost machine is worth a second try; what fails on a sound one would fail again.
            worst = next((e for e in failures.exceptions if not isinstance(e, MachineLost)), failures.exceptions[0])
            raise worst from worst.__cause__
        return tuple(task.result() for task in tasks)

    async def open_one(self, machine: LeasedMachine) -> Opened:
        """Bring one machine to the start of the task, and look."""
        watch = Stopwatch(self.clock)
        try:
            check_region(self.command.observe, machine.desktop)
            await self.run_setup(self.task, machine.desktop, timeout_s=self.setup_timeout_s)
            watch.lap("setup")
            settle = self.command.settle or self.pool.settings.settle
            observation = await look(machine.desktop, settle=settle, options=self.command.observe, watch=watch)
        except Exception as error:
            where = f"task {self.task.task_id} on machine {machine.machine_id}"
            # Whatever a dying machine made fail first, the machine is the cause.
            if machine.lost.is_set() and not isinstance(error, MachineLost):
                raise MachineLost(f"{where}: lost during reset: {machine.machine.lost_reason}") from error
            if isinstance(error, GuestError | GuestUnresponsive):
                raise SetupFailed(f"{where}: {error}") from error
            raise
        return Opened(machine=machine, observation=observation, timings_ms=watch.timings_ms)


def _names(pools: Mapping[str, Pool]) -> str:
    return ", ".join(sorted(pools)) or "no pools"
