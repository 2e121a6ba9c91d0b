"""The machines of one group: forked from one state, all or none, and each agent's first observation.

`TaskStates` has the frozen starts of tasks (LRU). Always true: a state is discarded exactly once, when it is no longer
cached and no fork from it is running.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from envd.base.aio import OwnedTasks
from envd.base.errors import GuestError, GuestUnresponsive, MachineLost, NotForkable, SetupFailed
from envd.base.telemetry.traces import Stopwatch
from envd.desktop.display.frames import marks_of
from envd.desktop.display_connection import DesktopView
from envd.desktop.observation import Encoding, Observation, ObservationOptions, SettleResult
from envd.episodes.progress import EpisodeOrigin, Progress
from envd.pool.leased import FrozenDesktop, LeasedMachine, Reservation
from envd.pool.pool import MachinePool

T = TypeVar("T")

#: The settle result of a machine that has not run since it was forked.
ALREADY_SETTLED = SettleResult(settled=True, settle_ms=0.0, change_count=0)


ParkSurplus = Callable[[FrozenDesktop], Awaitable[Sequence[LeasedMachine]]]
"""Stores a state once for each member that begins parked, and returns the stand-ins for their machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One machine at the start of its episode."""

    machine: LeasedMachine
    observation: Observation
    origin: EpisodeOrigin


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All machines of one reset or fork, ready to become episodes."""

    members: tuple[Member, ...]
    progress: Progress
    """The progress that belongs to their state."""
    timings_ms: dict[str, float]


async def start_from(
    pool: MachinePool,
    frozen: FrozenDesktop,
    reservations: Sequence[Reservation],
    *,
    machines: Sequence[LeasedMachine] = (),
    view: DesktopView | None = None,
    settle: SettleResult | None = None,
    park_surplus: ParkSurplus | None = None,
    options: ObservationOptions,
    subject: str,
    watch: Stopwatch,
) -> tuple[Member, ...]:
    """Fork a machine for every reservation from a frozen state, and return each agent's first observation.

    All or none: the first failure cancels the rest. The caller keeps the state until this returns, and releases
    reservations and machines if it fails. Phases of `watch`: `fork` (of the slowest machine), `observe`,
    `park`.

    Args:
        machines: Machines that are in this state already; they come first.
        view: What all screens show; the view of the state by default.
        settle: How the screen settled; None if nothing waited for that.
        park_surplus: Adds the members that begin parked, which see what the first one sees; None if there are none.
        subject: The request, as `<thing> <id>`, for messages.

    Raises:
        InvalidRequest: The observation is impossible on this screen.
        MachineLost: A machine died.
        SetupFailed: A guest failed when it was observed.
        HypervisorError: The state could not be forked.
    """
    view = view or frozen.view
    options.require_region_on(view.size_px)
    # Encode while QEMU starts: both take 0.1 s or more.
    encoding = asyncio.create_task(view.encode(options), name="start:encode")
    started = list(machines)
    try:
        if reservations:
            started += await gather(pool.fork(reservation, frozen) for reservation in reservations)
            watch.lap("fork")
    finally:
        await asyncio.gather(encoding, return_exceptions=True)
    shared = Observation(frame=encoding.result(), settle=settle)
    observations = [shared] * len(started)
    # A guest runs only if the options ask for more than pixels, or if it always runs from here on.
    if options.asks_guest or pool.settings.always_running:
        observations = await gather(_observe(machine, view, shared, options, subject) for machine in started)
    watch.lap("observe")
    if park_surplus is not None:
        # Last: the stored states have no owner until there are episodes.
        parked = await park_surplus(frozen)
        started += parked
        observations += observations[:1] * len(parked)
        watch.lap("park")
    origin = EpisodeOrigin(
        template_digest=frozen.snapshot.digest,
        overlay_parent=frozen.snapshot.disk_digest,
        first_frame_id=view.frame.frame_id,
        is_new_session=not pool.copies_running_machines,
    )
    return tuple(
        Member(machine=machine, observation=observation, origin=origin)
        for machine, observation in zip(started, observations, strict=True)
    )


async def _observe(
    machine: LeasedMachine, view: DesktopView, shared: Observation, options: ObservationOptions, subject: str
) -> Observation:
    """Run a guest and return its agent's first observation, with the frame that all share unless it has marks."""
    with map_errors(machine, subject):
        async with machine.running():
            if not options.asks_guest:
                return shared
            own = await machine.desktop.observe(replace(options, encoding=Encoding.NONE))
            marks = marks_of(own.a11y_elements)
            frame = await view.encode(options, marks=marks) if marks else shared.frame
            return replace(own, frame=frame, settle=shared.settle)


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


async def gather(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all concurrently. The first failure cancels the rest and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failures:
        # MachineLost is worth a retry; a failure on a healthy machine would repeat, so report that one.
        worst = next((e for e in failures.exceptions if not isinstance(e, MachineLost)), failures.exceptions[0])
        raise worst from worst.__cause__
    return [task.result() for task in tasks]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKey:
    """Everything that determines the start of a task."""

    pool: str
    task_id: str
    task_version: int
    template_digest: str
    """Digest of the template on which the setup ran."""


@dataclass(slots=True, eq=False, kw_only=True)
class TaskState:
    """A desktop at the start of its task."""

    frozen: FrozenDesktop
    settle: SettleResult
    """How the screen settled before it was frozen."""
    user_count: int = 0
    """Blocks that fork from it now."""
    evicted: bool = False
    """Whether it is no longer cached."""


class TaskStates:
    """The cache of task states of one service."""

    def __init__(self) -> None:
        self._entries: OrderedDict[StateKey, TaskState] = OrderedDict()
        self._tasks = OwnedTasks()

    def __len__(self) -> int:
        return len(self._entries)

    @contextmanager
    def borrow(self, key: StateKey | None) -> Iterator[TaskState | None]:
        """Yield a cached state that is not discarded during the block; None if it is not cached or `key` is None."""
        entry = None if key is None else self._entries.get(key)
        if key is None or entry is None:
            yield None
            return
        self._entries.move_to_end(key)
        entry.user_count += 1
        try:
            yield entry
        finally:
            entry.user_count -= 1
            self._discard_unused(entry)

    def add(self, key: StateKey, state: TaskState, *, limit: int) -> None:
        """Cache a state and own it from now on; evict the oldest of its pool above `limit`. Never waits."""
        if key in self._entries:  # a concurrent reset of the same task was faster
            self.discard(state.frozen)
            return
        self._entries[key] = state
        of_pool = [entry_key for entry_key in self._entries if entry_key.pool == key.pool]
        for oldest in of_pool[: max(0, len(of_pool) - limit)]:
            self.evict(oldest)

    def evict(self, key: StateKey) -> None:
        """Remove a state from the cache, if it is there; discard it when its last user is done."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            entry.evicted = True
            self._discard_unused(entry)

    def discard(self, frozen: FrozenDesktop) -> None:
        """Discard a state that has no more users; returns before that is done."""
        self._tasks.spawn(frozen.snapshot.discard(), name=f"state:{frozen.snapshot.digest:.12}:discard")

    async def aclose(self) -> None:
        """Discard every state; returns when all are gone. No state may be in use."""
        for key in list(self._entries):
            self.evict(key)
        await self._tasks.join()

    def _discard_unused(self, entry: TaskState) -> None:
        if entry.evicted and not entry.user_count:
            self.discard(entry.frozen)
