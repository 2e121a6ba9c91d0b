"""The lifecycle of one machine in a pool: created, ready, used once, destroyed. One task, `run_lifecycle`, runs it.

How the machine is created is the `Work` that `run_lifecycle` gets: `prepared` and `adopted` here, others in `template`.
A prepared machine waits for a state, which `load` gives it once its user is known.

`MachineRegister` writes each machine to the database before the hypervisor is asked for it.

`LifecycleListener` receives each event, and decides what to do about it; its methods never wait.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from envd.base.aio import race, run_unless
from envd.base.clock import Clock, wait_until
from envd.base.errors import EnvdError
from envd.base.store.statements import MachineRow, delete_machine, upsert
from envd.base.store.store import Store
from envd.desktop.desktop import Desktop
from envd.desktop.view import ConnectionState, DesktopView
from envd.hypervisor.machine import Hypervisor, Machine, MachineUsage
from envd.pool.leased import FrozenDesktop, Reservation
from envd.pool.planner import LifecycleState

logger = logging.getLogger(__name__)

#: How often a closing pool tries to destroy a machine before it reports it as left behind.
_CLOSE_ATTEMPTS = 3


async def unregister_all(store: Store, *, adopted: Collection[str], reaped: Collection[str]) -> None:
    """Delete the rows of a previous daemon's machines, after its hypervisor has removed the machines.

    Raises:
        StoreError: No row was deleted.
    """
    gone = [row for row in await store.rows(MachineRow) if row.machine_id not in adopted]
    for row in gone:
        if row.machine_id not in reaped:
            logger.info("machine %s of pool %s: left nothing behind", row.machine_id, row.pool)
    await store.commit(*(delete_machine(row.machine_id) for row in gone))


class MachineRegister:
    """The rows of one pool's machines."""

    def __init__(self, pool: str, *, store: Store, clock: Clock) -> None:
        self._pool = pool
        self._store = store
        self._clock = clock

    async def register(self, machine_id: str) -> None:
        """Record that a machine may exist from now on. Raises: StoreError: it must not be created."""
        row = MachineRow(machine_id=machine_id, pool=self._pool, enter_time_s=self._clock.now().timestamp())
        await self._store.commit(upsert(row))

    def unregister(self, machine_id: str) -> None:
        self._store.write_soon(delete_machine(machine_id))


class LifecycleListener(Protocol):
    """Receives the events of a machine's lifecycle."""

    def started(self, record: "MachineRecord", *, start_s: float) -> None:
        """The machine exists and enters the state that it `becomes`."""

    def start_failed(self, record: "MachineRecord", error: Exception) -> None:
        """Creating it failed; the machine, if there is one, is destroyed next."""

    def lost(self, record: "MachineRecord", machine: Machine) -> None:
        """The machine died on its own after it started."""

    def destroy_failed(self, record: "MachineRecord", error: Exception) -> None:
        """The hypervisor did not destroy it; destroying is retried."""

    def destroyed(self, record: "MachineRecord") -> None:
        """Nothing of it is left or, while the pool closes, nothing more can be done."""


@dataclass(slots=True, eq=False, kw_only=True)
class MachineRecord:
    """One machine, from before the hypervisor is asked for it until it is destroyed."""

    machine_id: str
    becomes: LifecycleState = LifecycleState.IDLE
    """Its state once it has started: IDLE; LEASED if it is forked for a user; DYING if it only makes a template."""
    claim: asyncio.Future[None] | None = None
    """Wakes the caller that waits for this machine."""
    reservation: Reservation | None = None
    """The reservation that it fills, or tries to fill."""
    fills_reservation: bool = False
    """Whether it was handed over for its reservation, which is then used up."""
    cleared_count: int = 0
    """Failures in a row that its start cleared."""
    run: str | None = None
    """The run that holds it, or held it last; None if it was never leased."""
    state: LifecycleState = LifecycleState.STARTING
    idle_since_s: float = 0.0
    machine: Machine | None = None
    desktop: Desktop | None = None
    frozen: FrozenDesktop | None = None
    """The state that it was forked from; while it waits for one, its template."""
    is_waiting: bool = False
    """Whether it waits for a state."""
    usage: MachineUsage | None = None
    is_registered: bool = False
    """Whether it may be in the register."""
    retired: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the machine is no longer wanted, in any state."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when nothing of it is left."""

    @property
    def planned_state(self) -> LifecycleState:
        """The state for the planner: DYING from the instant of a loss, even before its task has handled that."""
        if self.machine is not None and self.machine.lost.is_set():
            return LifecycleState.DYING
        # A machine that starts for a user is never idle.
        is_claimed = self.state is LifecycleState.STARTING and self.becomes is not LifecycleState.IDLE
        return self.becomes if is_claimed else self.state

    def retire(self) -> None:
        """Ask for its destruction, in any state. Idempotent."""
        self.state = LifecycleState.DYING
        self.retired.set()


class MakeDesktop(Protocol):
    """Connects to a machine."""

    def __call__(self, machine: Machine, /, *, view: DesktopView | None = None) -> Desktop:
        """See `Desktop`: with a view, the machine has not run since it was forked."""


Work = Callable[[MachineRecord], Coroutine[Any, Any, None]]
"""Creates a record's machine. Stores it in the record at once, so that it is always destroyed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFactory:
    """Dependencies and retry limits for creating and destroying machines."""

    hypervisor: Hypervisor
    make_desktop: MakeDesktop
    forking: asyncio.Semaphore
    """Bounds the concurrent forks."""
    boot_timeout_s: float
    destroy_retry_min_s: float
    destroy_retry_max_s: float
    clock: Clock
    register: MachineRegister
    """Lists every machine before the hypervisor creates it."""
    closing: asyncio.Event
    """Set when the pool closes: then destroying is tried only a few more times."""


def prepared(frozen: FrozenDesktop, *, factory: MachineFactory) -> Work:
    """Create a machine that waits for a state, and can load that of any snapshot with the same template."""

    async def work(record: MachineRecord) -> None:
        async with factory.forking:
            # No await between creation and record: a machine that exists is in its record.
            record.machine = await factory.hypervisor.prepare(frozen.snapshot, record.machine_id)
        record.frozen = frozen
        record.is_waiting = True

    return work


async def load(record: MachineRecord, frozen: FrozenDesktop, *, factory: MachineFactory) -> None:
    """Give a machine that waits a state; it is then a fork, paused and asleep. On failure the machine is lost."""
    if record.machine is None:
        raise RuntimeError(f"machine {record.machine_id} was never created")
    record.is_waiting = False
    record.frozen = frozen
    await factory.hypervisor.load(record.machine, frozen.snapshot)


def adopted(machine: Machine, state: ConnectionState, *, factory: MachineFactory) -> Work:
    """Take over a paused machine that was used before. Its desktop is asleep, so its next use sets its clock."""

    async def work(record: MachineRecord) -> None:
        record.machine = machine
        record.desktop = factory.make_desktop(machine)
        view = await record.desktop.view()
        await record.desktop.close()
        record.desktop = factory.make_desktop(machine, view=view.with_connection_state(state))

    return work


async def run_lifecycle(
    record: MachineRecord, work: Work, *, factory: MachineFactory, listener: LifecycleListener
) -> None:
    """Create a machine, keep it until it is retired or lost, and destroy it."""
    try:
        await _start(record, work, factory, listener)
        if record.machine is not None and not record.retired.is_set():
            await race(record.retired, record.machine.lost)
            if not record.retired.is_set():
                listener.lost(record, record.machine)
    finally:
        record.retire()
        try:
            await _destroy(record, factory, listener)
        finally:
            record.gone.set()
            listener.destroyed(record)


async def _start(record: MachineRecord, work: Work, factory: MachineFactory, listener: LifecycleListener) -> None:
    begin_s = factory.clock.monotonic()
    try:
        await run_unless(record.retired, _register_and_create(record, work, factory))
    except Exception as error:  # on any error this machine is destroyed and the pool continues
        if not record.retired.is_set():
            unexpected = None if isinstance(error, EnvdError) else error
            logger.warning("machine %s: failed to start: %s", record.machine_id, error, exc_info=unexpected)
            record.retire()
            listener.start_failed(record, error)
        return
    if not record.retired.is_set():
        start_s = factory.clock.monotonic() - begin_s
        logger.info("machine %s: ready after %.2f s", record.machine_id, start_s)
        listener.started(record, start_s=start_s)


async def _register_and_create(record: MachineRecord, work: Work, factory: MachineFactory) -> None:
    record.is_registered = True
    await factory.register.register(record.machine_id)
    await work(record)


async def _destroy(record: MachineRecord, factory: MachineFactory, listener: LifecycleListener) -> None:
    """Destroy the machine, with retries: while it may exist it keeps its record and its capacity."""
    if record.desktop is not None:
        try:
            await record.desktop.close()
        except Exception:
            logger.exception("machine %s: its connections did not close", record.machine_id)
    if record.machine is None:
        _unregister(record, factory)
        return
    attempt = 0
    while True:
        attempt += 1
        try:
            await record.machine.destroy()
        except Exception as error:  # a leak is worse than any error
            listener.destroy_failed(record, error)
            if factory.closing.is_set() and attempt >= _CLOSE_ATTEMPTS:
                logger.exception("machine %s: left behind; the next start of envd reaps it", record.machine_id)
                return
            logger.warning("machine %s: not destroyed at attempt %d: %s", record.machine_id, attempt, error)
            delay_s = min(factory.destroy_retry_max_s, factory.destroy_retry_min_s * 2.0 ** min(attempt - 1, 32))
            await wait_until(factory.clock, factory.clock.monotonic() + delay_s, or_event=factory.closing)
        else:
            _unregister(record, factory)
            return


def _unregister(record: MachineRecord, factory: MachineFactory) -> None:
    if record.is_registered:
        factory.register.unregister(record.machine_id)
