"""The machines of a pool, each with its record and its one task, and the reservations for further machines.

Records what happens to machines, and reports every change to the pool, which decides what to do next.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from envd.base.aio import OwnedTasks, run_unless
from envd.base.errors import MachineLost
from envd.hypervisor.machine import Machine
from envd.pool.admission import Turnover
from envd.pool.backoff import Backoff
from envd.pool.leased import LeasedMachine, Reservation
from envd.pool.lifecycle import MachineFactory, MachineRecord, Work, run_lifecycle
from envd.pool.memory import MemoryClaim
from envd.pool.planner import LifecycleState, PlannedMachine

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class MachineTable:
    """Every machine of one pool that exists or may exist, and every reservation. A `LifecycleListener`."""

    factory: MachineFactory
    backoff: Backoff
    """Records starts and failed starts of idle machines."""
    tasks: OwnedTasks
    make_id: Callable[[], str]
    """Returns a machine id; called until the id is new."""
    changed: Callable[[], None]
    """Called when the pool may have something to do."""
    notify: Callable[[], None]
    """Called when only the pool's status has changed."""
    totals: Counter[str] = field(default_factory=Counter, init=False)
    """Machines that were booted, boot_failed, lost, and template_booted, since the beginning."""
    last_start_s: float | None = field(default=None, init=False)
    """Start time of the newest machine."""
    turnover: Turnover = field(default_factory=Turnover, init=False)
    """Returns of leased machines."""
    _records: dict[str, MachineRecord] = field(default_factory=dict, init=False)
    _reservations: dict[Reservation, MachineRecord | None] = field(default_factory=dict, init=False)
    _undestroyed: dict[str, str] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[MachineRecord]:
        return iter(list(self._records.values()))

    def __getitem__(self, machine_id: str) -> MachineRecord:
        return self._records[machine_id]

    def __contains__(self, machine_id: object) -> bool:
        return machine_id in self._records

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

    def planned(self, now_s: float) -> list[PlannedMachine]:
        """Return the planner's view at a time on the monotonic clock."""
        return [
            PlannedMachine(machine_id=record.machine_id, state=record.planned_state, idle_s=now_s - record.idle_since_s)
            for record in self._records.values()
        ]

    def claims(self, *, expected_bytes: int, booted_bytes: int) -> Iterator[MemoryClaim]:
        """Yield the memory claims of machines and reservations: `expected_bytes` per fork, `booted_bytes` per boot."""
        for record in self._records.values():
            if record.state is not LifecycleState.DYING:
                yield MemoryClaim(
                    expected_bytes=booted_bytes if record.becomes is LifecycleState.DYING else expected_bytes,
                    held_bytes=0 if record.usage is None else record.usage.private_dirty_bytes,
                )
        for _ in range(self.reserved_count):
            yield MemoryClaim(expected_bytes=expected_bytes)

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
        self.tasks.spawn(run_lifecycle(record, work, factory=self.factory, listener=self), name=f"machine:{machine_id}")
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

    async def fill(
        self, reservation: Reservation, work: Work, *, load: Callable[[MachineRecord], Coroutine[Any, Any, None]]
    ) -> MachineRecord:
        """Load a state into the machine of a reservation and use the reservation up; on failure it is kept.

        Args:
            reservation: Not released, and not filled before.
            work: Creates its machine, if it has none.

        Raises:
            MachineLost: It was retired before.
        """
        while (record := self._unfilled(reservation)) is not None and record.retired.is_set():
            await record.gone.wait()
        if record is None:
            record = self.add(work, becomes=LifecycleState.LEASED, reservation=reservation)
        claim = record.claim = asyncio.get_running_loop().create_future()
        if record.state is not LifecycleState.STARTING:
            claim.set_result(None)
        self.notify()
        try:
            await claim
            await run_unless(record.retired, load(record))
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

    def withdraw(self, item: LeasedMachine | Reservation) -> MachineRecord | None:
        """Remove a reservation; return the record of the machine or of the reservation's machine, if any, to retire."""
        if isinstance(item, Reservation):
            return self._reservations.pop(item, None)
        record = self._records.get(item.machine_id)
        return record if record is not None and record.machine is item.machine else None

    @property
    def is_filling(self) -> bool:
        """Whether an urgent reservation is not filled yet."""
        return any(
            reservation.is_urgent and (record is None or not record.fills_reservation)
            for reservation, record in self._reservations.items()
        )

    def cancel_reservations(self) -> None:
        self._reservations.clear()

    # -- LifecycleListener ----------------------------------------------------------------------------------------

    def started(self, record: MachineRecord, *, start_s: float) -> None:
        if record.becomes is LifecycleState.DYING:
            self.totals["template_booted"] += 1
            record.retire()
        else:
            record.state = record.becomes
            record.idle_since_s = self.factory.clock.monotonic()
            self.totals["booted"] += 1
            self.last_start_s = start_s
            self.tasks.spawn(self._measure(record), name=f"measure:{record.machine_id}")
        if record.claim is not None:
            _resolve(record.claim)
        else:
            record.cleared_count = self.backoff.succeeded()
        self.changed()

    def start_failed(self, record: MachineRecord, error: Exception) -> None:
        self.totals["boot_failed"] += 1
        if record.claim is not None:
            _resolve(record.claim, error)
        else:
            problem = f"machine {record.machine_id} failed to start: {error}"
            self.backoff.failed(self.factory.clock.monotonic(), problem)
        self.notify()

    def lost(self, record: MachineRecord, machine: Machine) -> None:
        logger.warning("machine %s: lost while %s: %s", record.machine_id, record.state.value, machine.lost_reason)
        self.totals["lost"] += 1
        if record.state is LifecycleState.IDLE:
            # An unused machine that dies may be the first of many, so the next start is delayed. Its start proved
            # nothing, so the failures that it cleared count again.
            problem = f"machine {record.machine_id} died while idle: {machine.lost_reason}"
            self.backoff.failed(self.factory.clock.monotonic(), problem, cleared=record.cleared_count)
        self.notify()

    def destroy_failed(self, record: MachineRecord, error: Exception) -> None:
        self._undestroyed[record.machine_id] = str(error)
        self.notify()

    def destroyed(self, record: MachineRecord) -> None:
        self._undestroyed.pop(record.machine_id, None)
        del self._records[record.machine_id]
        if record.run is not None:
            self.turnover.returned(self.factory.clock.monotonic())
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
            await self.factory.clock.sleep(interval_s)
            for record in self:
                await self._measure(record)

    async def enforce_disk_quota(self, quota_bytes: int, *, interval_s: float) -> None:
        """Check every machine's use of the host's disk at each interval, until cancelled."""
        while True:
            await self.factory.clock.sleep(interval_s)
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
