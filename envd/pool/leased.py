"""Leased machines, which are paused until they are used, and reservations for machines that are yet to be forked.

A guest runs only inside `LeasedMachine.running`, so an unused desktop costs no CPU and does not change behind its
user's back. One lock orders changes between running and paused: while a machine is resumed, woken, paused or captured,
no other of these operations runs on it. A machine may be leased while it still loads its state, because its first frame
is known; each of these operations waits for that.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from envd.base.aio import OwnedTasks, shielded
from envd.base.errors import EnvdError, GuestUnresponsive, MachineLost
from envd.base.losses import Loss, LossOwner
from envd.desktop.desktop import Desktop
from envd.desktop.display_connection import DesktopView
from envd.hypervisor.machine import Hypervisor, Machine, MachineSpec, MachineState, Snapshot

logger = logging.getLogger(__name__)

#: How long a guest runs after its last use. Persisting and sending a response takes 2 ms, and 3 ms if the machine is
#: paused at the same time. A client that steps again at once finds the guest running.
LINGER_S = 0.005


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FrozenDesktop:
    """A state to fork machines from, and the view of such a fork."""

    snapshot: Snapshot
    """Owned by the caller that froze it, which discards it after the last fork."""
    view: DesktopView


class LeasedMachine:
    """A machine that one call or episode has until `Pool.release`. Paused and asleep until its first use."""

    def __init__(
        self,
        *,
        machine: Machine,
        desktop: Desktop,
        frozen: FrozenDesktop | None,
        always_running: bool = False,
        linger_s: float = 0.0,
        load: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """Lease a machine that was forked and has not run since.

        Args:
            desktop: Its desktop, asleep.
            frozen: The state that it was forked from; None if a previous daemon forked it.
            linger_s: How long it keeps running after each use, unless it always runs.
            load: Loads its state, or loses the machine; None if it has its state.
        """
        self.machine = machine
        self.desktop = desktop
        self._frozen = frozen
        self._always_running = always_running
        self._linger_s = linger_s
        self._user_count = self._use_count = 0
        self._wake_error: Exception | None = None
        # Held while the machine changes between running and paused, and while it must stay paused.
        self._lock = asyncio.Lock()
        self._pausing = OwnedTasks()
        self._load = load
        self._loading: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<LeasedMachine {self.machine_id} {self.machine.state.value} | {self._user_count} users>"

    @property
    def frozen(self) -> FrozenDesktop:
        """The state that it was forked from. Raises: RuntimeError: a previous daemon forked it."""
        if self._frozen is None:
            raise RuntimeError(f"{self!r} was forked by a previous daemon")
        return self._frozen

    @property
    def machine_id(self) -> str:
        """The machine's id, for messages and logs."""
        return self.machine.machine_id

    @property
    def lost(self) -> asyncio.Event:
        """Set once the machine is gone; never cleared."""
        return self.machine.lost

    @property
    def in_use(self) -> bool:
        """Whether a block of `running` is open."""
        return self._user_count > 0

    def start_loading(self, tasks: OwnedTasks) -> None:
        """Load its state in a task, unless it has it."""
        if self._load is not None:
            self._loading = tasks.spawn(self._load_state(self._load), name=f"load:{self.machine_id}")

    async def _load_state(self, load: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with suppress(EnvdError):  # The machine is lost, which its user finds out at the next call.
            await load()

    async def _loaded(self) -> None:
        if self._loading is not None and not self._loading.done():
            await asyncio.wait({self._loading})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[float]:
        """Run the guest during the block; yields the milliseconds that resuming took, 0 if it was running.

        Uses may nest and overlap. The first one resumes the machine and wakes a desktop that is asleep. After the last
        one the machine is paused `linger_s` later, unless the pool's machines always run. Leaving the block neither
        fails nor waits, even if the machine is gone.

        Raises:
            GuestUnresponsive, GuestError: The desktop did not wake up, now or before; the machine is unusable.
            MachineLost: The machine is gone.
        """
        self._user_count += 1
        self._use_count += 1
        try:
            yield await self._run()
        finally:
            self._user_count -= 1
            if not self._should_run:
                self._pausing.spawn(self._pause(after=self._use_count), name=f"pause:{self.machine_id}")

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Keep the guest paused during the block, also for users inside `running`; then let it run again."""
        async with self._lock:
            await self._loaded()
            was_running = self.machine.state is MachineState.RUNNING
            try:
                await self.machine.pause()
                yield
            finally:
                if was_running and self._should_run:
                    await shielded(self._resume())

    @property
    def _should_run(self) -> bool:
        return self._user_count > 0 or (self._always_running and not self.desktop.is_asleep)

    async def _run(self) -> float:
        async with self._lock:
            if self._wake_error is not None:
                raise GuestUnresponsive(
                    f"machine {self.machine_id} did not wake up before: {self._wake_error}"
                ) from self._wake_error
            if self.machine.state is MachineState.RUNNING and not self.desktop.is_asleep:
                return 0.0
            begin_s = time.monotonic()
            await self._loaded()
            await self.machine.resume()
            try:
                await self.desktop.wake(windows=not self.machine.spec.image.runs_linux)
            except MachineLost:
                raise
            except Exception as error:
                self._wake_error = error
                raise
            return (time.monotonic() - begin_s) * 1000

    async def _pause(self, *, after: int) -> None:
        if self._linger_s:
            await asyncio.sleep(self._linger_s)
        async with self._lock:
            if self._use_count > after:  # used again
                return
            try:
                await self.machine.pause()
            except MachineLost:
                pass  # it no longer runs
            except EnvdError:
                # The use itself succeeded; the next use tries again.
                logger.exception("machine %s: not paused after use", self.machine_id)

    async def _resume(self) -> None:
        with suppress(MachineLost):  # its users find out at their next call
            await self.machine.resume()


async def freeze(leased: LeasedMachine, *, hypervisor: Hypervisor) -> FrozenDesktop:
    """Freeze a machine's state and view of one instant, to fork from. The machine is paused for that time.

    The caller discards the snapshot after the last fork. On failure and on cancellation no snapshot is kept, and the
    machine is unchanged.

    Raises:
        NotForkable: The machine has something that a fork cannot have; the message names it.
        MachineLost: The machine is gone.
        GuestUnresponsive, GuestError: Its display does not work.
        HypervisorError: The backend refused, for example because the disk is full.
    """
    capturing: asyncio.Task[Snapshot] | None = None
    try:
        async with leased.paused():
            # Concurrent: an idle display answers after a tenth of a second, and copying takes as long.
            capturing = asyncio.create_task(hypervisor.capture(leased.machine), name=f"capture:{leased.machine_id}")
            try:
                view = await leased.desktop.view()
            finally:
                # The machine must not resume before it is copied.
                await shielded(asyncio.wait({capturing}))
            snapshot = capturing.result()
    except BaseException:
        if capturing is not None and not capturing.cancelled() and capturing.exception() is None:
            await shielded(capturing.result().discard())
        raise
    return FrozenDesktop(snapshot=snapshot, view=view)


class Reservation:
    """Capacity and memory for one machine, which waits for a state or does not exist yet.

    `Pool.fork` fills it; `Pool.release` returns it, with its machine.
    """

    def __init__(self, pool: str, *, run: str = "", is_urgent: bool = False) -> None:
        """Reserve for a run; urgent if the caller is going to fill it at once."""
        self.pool = pool
        self.run = run
        self.is_urgent = is_urgent

    def __repr__(self) -> str:
        return f"<Reservation of {self.pool!r}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The machines and reservations that an admitted group got. The user returns all of it with `Pool.release`."""

    machines: tuple[LeasedMachine, ...]
    reservations: tuple[Reservation, ...] = ()


class StandIn:
    """Implements `envd.hypervisor.machine.Machine` for an episode that has none: it is lost, or parked.

    Every call that needs a guest raises MachineLost. That of a parked episode is not lost until the episode gets
    another machine, when `lost` is set.
    """

    guestd_url = None
    reacts_before_answer = False

    def __init__(self, spec: MachineSpec, *, reason: str, is_parked: bool = False) -> None:
        self.spec = spec
        self.is_parked = is_parked
        self.state = MachineState.PAUSED if is_parked else MachineState.GONE
        self.lost = asyncio.Event()
        self.lost_reason = reason
        self.loss: Loss | None = None
        if not is_parked:
            self.lost.set()
            self.loss = Loss(LossOwner.HOST, reason)

    @property
    def machine_id(self) -> str:
        return self.spec.machine_id

    def processor_s(self) -> float | None:
        """Return None: unknown."""
        return None

    async def examine(self) -> Loss:
        """Return its loss."""
        return Loss(LossOwner.HOST, self.lost_reason)

    def console_tail(self) -> str:
        """Return an empty string: unknown."""
        return ""

    def enforce_disk_quota(self, quota_bytes: int) -> None:
        """Do nothing: it uses no disk."""

    async def _raise(self, *_arguments: object, **_options: object) -> NoReturn:
        """Raises: MachineLost."""
        raise MachineLost(f"machine {self.machine_id} is gone: {self.lost_reason}")

    open_display = agent_command = pause = resume = usage = _raise

    async def destroy(self) -> None:
        """Do nothing: nothing of it is left."""


def lost_machine(spec: MachineSpec, *, reason: str) -> LeasedMachine:
    """Return a stand-in for a machine of a previous daemon that is lost."""
    machine = StandIn(spec, reason=reason)
    return LeasedMachine(machine=machine, desktop=Desktop(machine), frozen=None)


def parked_machine(spec: MachineSpec, view: DesktopView) -> LeasedMachine:
    """Return a stand-in for the machine of a parked episode, which shows its last screen."""
    machine = StandIn(spec, reason="its episode is parked", is_parked=True)
    return LeasedMachine(machine=machine, desktop=Desktop(machine, view=view), frozen=None)
