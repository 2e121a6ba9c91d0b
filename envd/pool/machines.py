"""The machines of a pool, each with its record and its one task, and the reservations for further machines.

A machine is created, idle, used once, destroyed: `MachineTable.add` starts the task that does all of it. How the
machine is created is the task's `Work`: `prepared` and `adopted` return those of machines that wait for a state and of
a previous daemon's, `template` has others. A machine that waits gets its state once its user is known.

Every change is reported to the pool, which decides what to do next.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from envd.base.aio import OwnedTasks, race, run_unless
from envd.base.clock import Clock, wait_until
from envd.base.errors import EnvdError, MachineLost
from envd.base.store.store import MachineRow, Store, delete_machine, upsert
from envd.desktop.desktop import Desktop
from envd.desktop.display_connection import ConnectionState
from envd.hypervisor.machine import Hypervisor, Machine, MachineUsage
from envd.pool.backoff import Backoff
from envd.pool.leased import Admission, FrozenDesktop, LeasedMachine, Reservation
from envd.pool.planner import LifecycleState
from envd.pool.queue import Turnover
from envd.pool.room import growth_of

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
    """Whether it may be in the database."""
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


Work = Callable[[MachineRecord], Coroutine[Any, Any, None]]
"""Creates a record's machine. Stores it in the record at once, so that it is always destroyed."""


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class MachineTable:
    """Every machine of one pool that exists or may exist, and every reservation. Each machine is listed in the
    database before the hypervisor is asked for it."""

    pool: str
    hypervisor: Hypervisor
    make_desktop: Callable[..., Desktop]
    """Connects to a machine, which it takes with the keyword `view` of `Desktop`."""
    forking: asyncio.Semaphore
    """Bounds the concurrent forks."""
    boot_timeout_s: float
    clock: Clock
    store: Store
    backoff: Backoff
    """Records starts and failed starts of idle machines."""
    tasks: OwnedTasks
    closing: asyncio.Event
    """Set when the pool closes: then destroying is tried only a few more times."""
    destroy_retry_min_s: float
    destroy_retry_max_s: float
    always_running: bool
    linger_s: float
    """See `LeasedMachine`."""
    make_id: Callable[[], str]
    """Returns a machine id; called until the id is new."""
    changed: Callable[[], None]
    """Called when the pool may have something to do."""
    notify: Callable[[], None]
    """Called when only the pool's status has changed."""
    totals: Counter[str] = field(default_factory=Counter, init=False)
    """Machines that were booted, boot_failed, lost, leased, and template_booted, since the beginning."""
    last_start_s: float | None = field(default=None, init=False)
    """Start time of the newest machine."""
    turnover: Turnover = field(default_factory=Turnover, init=False)
    """Returns of leased machines."""
    _records: dict[str, MachineRecord] = field(default_factory=dict, init=False)
    _reservations: dict[Reservation, MachineRecord | None] = field(default_factory=dict, init=False)
    _undestroyed: dict[str, str] = field(default_factory=dict, init=False)
    left_behind: list[str] = field(default_factory=list, init=False)
    """Machines that could not be destroyed when the pool closed."""

    def list_ids(self) -> list[str]:
        """Return the machines that exist, or may exist. Once the pool is closed: those that could not be destroyed."""
        return [*self._records, *self.left_behind]

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[MachineRecord]:
        return iter(list(self._records.values()))

    def __getitem__(self, machine_id: str) -> MachineRecord:
        return self._records[machine_id]

    def __contains__(self, machine_id: object) -> bool:
        return machine_id in self._records

    def next_surplus_s(self, now_s: float, *, max_idle_s: float) -> float | None:
        """Return when the next idle machine reaches that age, on the monotonic clock; None if none will."""
        # An idle machine that is wanted may be older; only the instant of reaching the age matters.
        idle = (record.idle_since_s for record in self if record.state is LifecycleState.IDLE)
        return min((since_s + max_idle_s for since_s in idle if now_s - since_s < max_idle_s), default=None)

    @property
    def reserved_count(self) -> int:
        """Reservations that have no machine yet."""
        return sum(record is None for record in self._reservations.values())

    def counts(self) -> Counter[LifecycleState]:
        """Return the number of machines in each state, without those that wait for a reservation's state."""
        return Counter(record.state for record in self._records.values() if not self._is_promised(record))

    @property
    def unfilled_count(self) -> int:
        """Reservations that have no machine with a state, or that is getting one."""
        return self.reserved_count + sum(map(self._is_promised, self._records.values()))

    def _is_promised(self, record: MachineRecord) -> bool:
        is_unused = record.claim is None and record.state is not LifecycleState.DYING
        return is_unused and record.reservation is not None and self._reservations.get(record.reservation) is record

    def held(self) -> Mapping[str, int]:
        """Return how many machines and reservations each run holds."""
        held = Counter(
            reservation.run
            for reservation, record in self._reservations.items()
            if record is None or not record.fills_reservation
        )
        held.update(
            record.run
            for record in self._records.values()
            if record.run is not None and record.state is LifecycleState.LEASED
        )
        return held

    @property
    def problem(self) -> str:
        """Why a machine could not be destroyed; empty if all were."""
        return next(
            (f"machine {machine_id} could not be destroyed: {why}" for machine_id, why in self._undestroyed.items()), ""
        )

    def idle_s(self, now_s: float) -> dict[str, float]:
        """Return the idle machines, for the planner: seconds since each became idle, by its id.

        `now_s` is a time on the monotonic clock.
        """
        return {
            record.machine_id: now_s - record.idle_since_s
            for record in self
            if record.planned_state is LifecycleState.IDLE
        }

    def planned_counts(self) -> Counter[LifecycleState]:
        """Return the number of machines in each state, for the planner."""
        return Counter(record.planned_state for record in self)

    def growth_bytes(self, *, forked_bytes: int, booted_bytes: int) -> int:
        """Return the memory that machines and reservations have yet to grow into, given what forks and boots reach."""
        return self.reserved_count * forked_bytes + sum(
            growth_of(
                booted_bytes if record.becomes is LifecycleState.DYING else forked_bytes,
                held_bytes=0 if record.usage is None else record.usage.private_dirty_bytes,
            )
            for record in self._records.values()
            if record.state is not LifecycleState.DYING
        )

    # -- machines and reservations ------------------------------------------------------------------------------

    def add(
        self,
        work: Work,
        *,
        becomes: LifecycleState = LifecycleState.IDLE,
        reservation: Reservation | None = None,
        machine_id: str = "",
    ) -> MachineRecord:
        """Start to create a machine, with a new id unless one is given."""
        while not machine_id or machine_id in self._records:
            machine_id = self.make_id()
        record = self._records[machine_id] = MachineRecord(
            machine_id=machine_id, becomes=becomes, reservation=reservation
        )
        if reservation is not None:
            self._reservations[reservation] = record
        self.tasks.spawn(self._run(record, work), name=f"machine:{machine_id}")
        return record

    async def make(
        self, work: Work, *, becomes: LifecycleState, reservation: Reservation | None = None, machine_id: str = ""
    ) -> MachineRecord:
        """Create a machine and wait until it has started. On failure and on cancellation it is destroyed.

        Raises:
            MachineLost: It was retired before it started.
        """
        record = self.add(work, becomes=becomes, reservation=reservation, machine_id=machine_id)
        claim = record.claim = asyncio.get_running_loop().create_future()
        self.notify()
        try:
            await claim
        except BaseException:
            record.claim = None
            record.retire()
            self.notify()
            raise
        return record

    def promise(self, prepare: Callable[[], Work], *, may_take_idle: bool, may_start: bool) -> bool:
        """Let a machine wait for each reservation that has none; return whether idle machines were taken for that.

        Args:
            prepare: Returns the work that creates a machine that waits.
            may_take_idle: Whether to take idle machines that wait.
            may_start: Whether to start machines for the others.
        """
        records = self._records.values()
        idle = [each for each in records if each.planned_state is LifecycleState.IDLE and each.is_waiting]
        is_taken = False
        for reservation in [each for each, record in self._reservations.items() if record is None]:
            if idle and may_take_idle:
                record = idle.pop()
                record.state = record.becomes = LifecycleState.LEASED
                record.reservation = reservation
                self._reservations[reservation] = record
                is_taken = True
            elif may_start:
                self.add(prepare(), becomes=LifecycleState.LEASED, reservation=reservation)
        return is_taken

    async def fill(self, reservation: Reservation, frozen: FrozenDesktop) -> MachineRecord:
        """Load a state into the machine of a reservation and use the reservation up; on failure it is kept.

        Args:
            reservation: Not released, and not filled before.

        Raises:
            MachineLost: It was retired before.
        """
        while (record := self._unfilled(reservation)) is not None and record.retired.is_set():
            await record.gone.wait()
        if record is None:
            record = self.add(self.prepared(frozen), becomes=LifecycleState.LEASED, reservation=reservation)
        claim = record.claim = asyncio.get_running_loop().create_future()
        if record.state is not LifecycleState.STARTING:
            claim.set_result(None)
        self.notify()
        try:
            await claim
            await run_unless(record.retired, self._load(record, frozen))
        except BaseException:
            record.retire()
            self.notify()
            raise
        if record.retired.is_set():
            raise _retired_error(record)
        record.fills_reservation = True
        self.changed()
        return record

    def _unfilled(self, reservation: Reservation) -> MachineRecord | None:
        """Return the machine that waits for a reservation's state, if there is one."""
        record = self._reservations.get(reservation)
        if reservation not in self._reservations or (record is not None and record.claim is not None):
            raise RuntimeError(f"{reservation!r} has a machine, or was released")
        return record

    def reserve(self, count: int, *, pool: str, run: str, is_urgent: bool) -> tuple[Reservation, ...]:
        reservations = tuple(Reservation(pool, run=run, is_urgent=is_urgent) for _ in range(count))
        self._reservations.update(dict.fromkeys(reservations))
        return reservations

    def hand_out(self, record: MachineRecord, *, run: str) -> LeasedMachine:
        """Lease a machine to a run."""
        machine, frozen = record.machine, record.frozen
        if machine is None:
            raise RuntimeError(f"machine {record.machine_id} is {record.state.value} but was never created")
        if record.desktop is None:
            record.desktop = self.make_desktop(machine, view=None if frozen is None else frozen.view)
        record.state = LifecycleState.LEASED
        record.run = run
        return LeasedMachine(
            machine=machine,
            desktop=record.desktop,
            frozen=frozen,
            always_running=self.always_running,
            linger_s=self.linger_s,
            load=partial(self._load, record, frozen) if record.is_waiting and frozen else None,
        )

    def take_back(self, admission: Admission) -> None:
        """Undo an admission whose machines were not used, so that they are idle again."""
        for reservation in admission.reservations:
            if (promised := self.withdraw(reservation)) is not None:
                promised.retire()
        for machine in admission.machines:
            record = self.withdraw(machine)
            if record is not None and record.state is LifecycleState.LEASED:
                record.state = LifecycleState.IDLE
                record.run = None

    def withdraw(self, item: LeasedMachine | Reservation) -> MachineRecord | None:
        """Remove a reservation; return the record of the machine or of the reservation's machine, if any, to retire."""
        if isinstance(item, Reservation):
            return self._reservations.pop(item, None)
        record = self._records.get(item.machine_id)
        return record if record is not None and record.machine is item.machine else None

    def retire_unused(self) -> None:
        """Retire the forks of the template that were never leased."""
        for record in self:
            if record.becomes is LifecycleState.IDLE and record.run is None:
                record.retire()

    @property
    def is_filling(self) -> bool:
        """Whether an urgent reservation is not filled yet."""
        return any(
            reservation.is_urgent and (record is None or not record.fills_reservation)
            for reservation, record in self._reservations.items()
        )

    def cancel_reservations(self) -> None:
        self._reservations.clear()

    # -- how machines are created ---------------------------------------------------------------------------------

    def prepared(self, frozen: FrozenDesktop) -> Work:
        """Create a machine that waits for a state, and can load that of any snapshot with the same template."""

        async def work(record: MachineRecord) -> None:
            async with self.forking:
                # No await between creation and record: a machine that exists is in its record.
                record.machine = await self.hypervisor.prepare(frozen.snapshot, record.machine_id)
            record.frozen = frozen
            record.is_waiting = True

        return work

    async def _load(self, record: MachineRecord, frozen: FrozenDesktop) -> None:
        """Give a machine that waits a state; it is then a fork, paused and asleep. On failure the machine is lost."""
        if record.machine is None:
            raise RuntimeError(f"machine {record.machine_id} was never created")
        record.is_waiting = False
        record.frozen = frozen
        await self.hypervisor.load(record.machine, frozen.snapshot)

    def adopted(self, machine: Machine, state: ConnectionState) -> Work:
        """Take over a paused machine that was used before. Its desktop is asleep, so its next use sets its clock."""

        async def work(record: MachineRecord) -> None:
            record.machine = machine
            record.desktop = self.make_desktop(machine)
            view = await record.desktop.view()
            await record.desktop.close()
            record.desktop = self.make_desktop(machine, view=view.with_connection_state(state))

        return work

    # -- the life of one machine ------------------------------------------------------------------------------

    async def _run(self, record: MachineRecord, work: Work) -> None:
        """Create a machine, keep it until it is retired or lost, and destroy it."""
        try:
            await self._start(record, work)
            if record.machine is not None and not record.retired.is_set():
                await race(record.retired, record.machine.lost)
                if not record.retired.is_set():
                    self._lost(record, record.machine)
        finally:
            record.retire()
            try:
                await self._destroy(record)
            finally:
                record.gone.set()
                self._destroyed(record)

    async def _start(self, record: MachineRecord, work: Work) -> None:
        begin_s = self.clock.monotonic()
        try:
            await run_unless(record.retired, self._register_and_create(record, work))
        except Exception as error:  # on any error this machine is destroyed and the pool continues
            if not record.retired.is_set():
                unexpected = None if isinstance(error, EnvdError) else error
                logger.warning("machine %s: failed to start: %s", record.machine_id, error, exc_info=unexpected)
                record.retire()
                self._start_failed(record, error)
            return
        if not record.retired.is_set():
            start_s = self.clock.monotonic() - begin_s
            logger.info("machine %s: ready after %.2f s", record.machine_id, start_s)
            self._started(record, start_s=start_s)

    async def _register_and_create(self, record: MachineRecord, work: Work) -> None:
        record.is_registered = True
        # If it cannot be listed, it must not be created.
        row = MachineRow(machine_id=record.machine_id, pool=self.pool, enter_time_s=self.clock.now().timestamp())
        await self.store.commit(upsert(row))
        await work(record)

    async def _destroy(self, record: MachineRecord) -> None:
        """Destroy the machine, with retries: while it may exist it keeps its record and its capacity."""
        if record.desktop is not None:
            try:
                await record.desktop.close()
            except Exception:
                logger.exception("machine %s: its connections did not close", record.machine_id)
        attempt = 0
        while record.machine is not None:
            attempt += 1
            try:
                await record.machine.destroy()
            except Exception as error:  # a leak is worse than any error
                self._undestroyed[record.machine_id] = str(error)
                self.notify()
                if self.closing.is_set() and attempt >= _CLOSE_ATTEMPTS:
                    self.left_behind.append(record.machine_id)
                    logger.exception("machine %s: left behind; the next start of envd reaps it", record.machine_id)
                    return
                logger.warning("machine %s: not destroyed at attempt %d: %s", record.machine_id, attempt, error)
                delay_s = min(self.destroy_retry_max_s, self.destroy_retry_min_s * 2.0 ** min(attempt - 1, 32))
                await wait_until(self.clock, self.clock.monotonic() + delay_s, or_event=self.closing)
            else:
                break
        if record.is_registered:
            self.store.write_soon(delete_machine(record.machine_id))

    def _started(self, record: MachineRecord, *, start_s: float) -> None:
        """It exists and enters the state that it `becomes`."""
        if record.becomes is LifecycleState.DYING:
            self.totals["template_booted"] += 1
            record.retire()
        else:
            record.state = record.becomes
            record.idle_since_s = self.clock.monotonic()
            self.totals["booted"] += 1
            self.last_start_s = start_s
            self.tasks.spawn(self._measure(record), name=f"measure:{record.machine_id}")
        if record.claim is not None:
            _resolve(record.claim)
        else:
            record.cleared_count = self.backoff.succeeded()
        self.changed()

    def _start_failed(self, record: MachineRecord, error: Exception) -> None:
        """Creating it failed; the machine, if there is one, is destroyed next."""
        self.totals["boot_failed"] += 1
        if record.claim is not None:
            _resolve(record.claim, error)
        else:
            problem = f"machine {record.machine_id} failed to start: {error}"
            self.backoff.failed(self.clock.monotonic(), problem)
        self.notify()

    def _lost(self, record: MachineRecord, machine: Machine) -> None:
        """It died on its own after it started."""
        logger.warning("machine %s: lost while %s: %s", record.machine_id, record.state.value, machine.lost_reason)
        self.totals["lost"] += 1
        if record.state is LifecycleState.IDLE:
            # An unused machine that dies may be the first of many, so the next start is delayed. Its start proved
            # nothing, so the failures that it cleared count again.
            problem = f"machine {record.machine_id} died while idle: {machine.lost_reason}"
            self.backoff.failed(self.clock.monotonic(), problem, cleared=record.cleared_count)
        self.notify()

    def _destroyed(self, record: MachineRecord) -> None:
        """Nothing of it is left or, while the pool closes, nothing more can be done."""
        self._undestroyed.pop(record.machine_id, None)
        del self._records[record.machine_id]
        if record.run is not None:
            self.turnover.returned(self.clock.monotonic())
        if record.reservation in self._reservations:
            if record.fills_reservation:
                del self._reservations[record.reservation]
            else:
                self._reservations[record.reservation] = None
        if record.claim is not None:
            _resolve(record.claim, _retired_error(record))
        self.changed()

    # -- memory and disk ----------------------------------------------------------------------------------------

    async def measure(self, *, interval_s: float) -> None:
        """Measure every machine's memory at each interval, until cancelled."""
        while True:
            await self.clock.sleep(interval_s)
            await self.measure_once()

    async def measure_once(self) -> None:
        """Measure every machine's memory."""
        for record in self:
            await self._measure(record)

    async def enforce_disk_quota(self, quota_bytes: int, *, interval_s: float) -> None:
        """Check every machine's use of the host's disk at each interval, until cancelled."""
        while True:
            await self.clock.sleep(interval_s)
            for record in self:
                if record.machine is not None:
                    record.machine.enforce_disk_quota(quota_bytes)

    async def _measure(self, record: MachineRecord) -> None:
        if record.machine is None or record.state is LifecycleState.DYING:
            return
        try:
            record.usage = await record.machine.usage()
        except Exception as error:  # one failed measurement must not stop the others
            logger.debug("machine %s: not measured: %s", record.machine_id, error)
        self.notify()


def _retired_error(record: MachineRecord) -> MachineLost:
    return MachineLost(f"machine {record.machine_id} was destroyed before it was handed over")


def _resolve(claim: "asyncio.Future[None]", error: Exception | None = None) -> None:
    """Wake the caller of `make`. A cancelled caller has cancelled the claim, and retires the machine when it runs."""
    if claim.done():
        return
    if error is None:
        claim.set_result(None)
    else:
        claim.set_exception(error)
