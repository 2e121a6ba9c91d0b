"""The machines of one group: forked from one state, all or none, and each agent's first observation."""

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from envd.base.clock import Clock
from envd.base.errors import GuestError, GuestUnresponsive, MachineLost, NotForkable, SetupFailed
from envd.episodes.types import Origin
from envd.guest.display.marks import marks_of
from envd.guest.observation import Encoding, Observation, ObservationOptions, SettleResult
from envd.guest.view import DesktopView
from envd.pool.leased import FrozenDesktop, LeasedMachine, Reservation
from envd.pool.pool import Pool

T = TypeVar("T")

#: The settle result of a machine that has not run since it was forked.
ALREADY_SETTLED = SettleResult(settled=True, settle_ms=0.0, change_count=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One machine at the start of its episode."""

    machine: LeasedMachine
    observation: Observation
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All machines of one reset or fork, ready to become episodes."""

    members: tuple[Member, ...]
    timings_ms: dict[str, float]

    def perturbed(self, kinds: tuple[str, ...]) -> "Group":
        """Return the group with the perturbations of its world."""
        members = (replace(each, origin=replace(each.origin, perturbations=kinds)) for each in self.members)
        return replace(self, members=tuple(members)) if kinds else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Forks:
    """Machines that were forked from one state."""

    machines: tuple[LeasedMachine, ...]
    slowest_ms: float
    """Duration of the slowest fork; 0 if there are none."""


async def fork_all(pool: Pool, reservations: Sequence[Reservation], frozen: FrozenDesktop, *, clock: Clock) -> Forks:
    """Fork a machine for every reservation, concurrently. The first failure cancels the rest.

    The caller owns the reservations.
    """

    slowest_ms = 0.0

    async def fork(reservation: Reservation) -> LeasedMachine:
        nonlocal slowest_ms
        begin_s = clock.monotonic()
        machine = await pool.fork(reservation, frozen)
        slowest_ms = max(slowest_ms, (clock.monotonic() - begin_s) * 1000)
        return machine

    machines = await _gather(fork(reservation) for reservation in reservations)
    return Forks(machines=tuple(machines), slowest_ms=slowest_ms)


async def observe_all(
    machines: Sequence[LeasedMachine],
    *,
    frozen: FrozenDesktop,
    view: DesktopView,
    settle: SettleResult | None,
    options: ObservationOptions,
    always_running: bool,
    subject: str,
) -> tuple[Member, ...]:
    """Return each agent's first observation. All see the same frame, which is encoded once.

    A guest runs only if the options ask for more than pixels, or if it always runs from here on.

    Args:
        frozen: The state that their disks and memory are based on, for their origin.
        settle: How the screen settled; None if nothing waited for that.
        subject: The request, as `<thing> <id>`, for messages.
    """
    encoded = await view.encode(options)
    origin = Origin(
        template_digest=frozen.snapshot.digest,
        overlay_parent=frozen.snapshot.disk_digest,
        first_frame_id=view.frame.frame_id,
    )
    shared = Observation(frame=encoded, settle=settle)

    async def observe(machine: LeasedMachine) -> Member:
        observation = shared
        if always_running or options.asks_guest:
            with map_errors(machine, subject):
                async with machine.running():
                    if options.asks_guest:
                        own = await machine.desktop.observe(replace(options, encoding=Encoding.NONE))
                        marks = marks_of(own.a11y_elements)
                        frame = await view.encode(options, marks=marks) if marks else encoded
                        observation = replace(own, frame=frame, settle=settle)
        return Member(machine=machine, observation=observation, origin=origin)

    return tuple(await _gather(observe(machine) for machine in machines))


@contextmanager
def map_errors(machine: LeasedMachine, subject: str) -> Iterator[None]:
    """Attribute a failure on a machine that no agent has used yet to `subject`.

    Raises:
        MachineLost: The machine is gone, so the first failure is only a symptom.
        SetupFailed: Its guest failed, or cannot be forked.
        Exception: Any other exception of the block, unchanged.
    """
    where = f"{subject}: machine {machine.machine_id}"
    try:
        yield
    except Exception as error:
        if machine.lost.is_set() and not isinstance(error, MachineLost):
            raise MachineLost(f"{where}: lost before its first step: {machine.machine.lost_reason}") from error
        if isinstance(error, GuestError | GuestUnresponsive | NotForkable):
            raise SetupFailed(f"{where}: {error}") from error
        raise


async def _gather(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all concurrently. The first failure cancels the rest and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failures:
        # MachineLost is worth a retry; a failure on a healthy machine would repeat, so report that one.
        worst = next((e for e in failures.exceptions if not isinstance(e, MachineLost)), failures.exceptions[0])
        raise worst from worst.__cause__
    return [task.result() for task in tasks]
