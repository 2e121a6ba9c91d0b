"""Carry out what the planner decides: boot machines ahead of demand, lease them once, destroy and replace them.

Always true, because one event loop is atomic between awaits:

* Every machine that exists, or may exist, has a record in the pool, made before the hypervisor is asked for it.
* Every record has one task (see `life`) that alone makes, watches and destroys the machine.
* A machine is used once. In its user's hands, it never becomes idle again.

Who is next is `planner`'s decision, who stands where in line `admission`'s, which pauses follow failures
`backoff`'s.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from envd.errors import Draining, EnvdError, GroupTooLarge, PoolExhausted
from envd.guest.desktop import Desktop
from envd.hypervisor.machine import DiskImage, Hypervisor, Machine, MachineSpec
from envd.pool.admission import AdmissionLine, LeasedMachine, WaitingGroup, estimate_retry_s
from envd.pool.backoff import Backoff
from envd.pool.clock import Clock, SystemClock, wait_until
from envd.pool.life import Nursery, Record, live
from envd.pool.planner import MachineState, PlannedMachine, plan
from envd.pool.settings import PoolSettings
from envd.pool.tasks import Changes, OwnedTasks

logger = logging.getLogger(__name__)

#: What a boot is taken to cost before one was measured.
_BOOT_GUESS_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """A pool at one moment, and what it has done since it started."""

    idle_count: int
    leased_count: int
    starting_count: int
    dying_count: int
    waiting_count: int
    """Machines that the groups in line wait for."""
    memory_bytes: int
    """Private dirty bytes of all machines, when last measured."""
    problem: str
    """Why machines fail to start or to go; empty when they do not."""
    booted_total: int
    """Machines that came up."""
    boot_failure_total: int
    """Machines that did not come up."""
    lost_total: int
    """Machines that died on their own after they came up."""
    leased_total: int
    """Machines handed out."""
    last_boot_s: float | None
    """How long the newest boot took; None before the first."""

    @property
    def healthy(self) -> bool:
        """Whether machines come and go as they should."""
        return not self.problem


class Pool:
    """Machines of one image: some ready, some leased, the rest on their way in or out."""

    def __init__(
        self,
        settings: PoolSettings,
        *,
        hypervisor: Hypervisor,
        image: DiskImage,
        make_desktop: Callable[[Machine], Desktop] = Desktop,
        clock: Clock | None = None,
        make_suffix: Callable[[], str] = lambda: secrets.token_hex(3),
    ) -> None:
        """Set up an empty pool; nothing runs before `start`.

        Args:
            settings: Size, machines and manners.
            hypervisor: Makes the machines; other pools may share it. Whoever made it closes it, after the pool.
            image: What the machines boot.
            make_desktop: Connects to a running machine.
            clock: Where time comes from; by default the host's.
            make_suffix: Makes what follows the pool's name in a machine id: at most 7 of [a-z0-9].
        """
        self.settings = settings
        self.image = image
        self._hypervisor = hypervisor
        self._clock = clock or SystemClock()
        self._make_suffix = make_suffix
        self._records: dict[str, Record] = {}
        self._line = AdmissionLine(limit=settings.queue_limit)
        self._backoff = Backoff(min_s=settings.backoff_min_s, max_s=settings.backoff_max_s)
        self._undead: dict[str, str] = {}
        self._totals: Counter[str] = Counter()
        self._last_boot_s: float | None = None
        self._changes = Changes()
        self._tasks = OwnedTasks()
        self._started = False
        self._draining = False
        self._closing = asyncio.Event()
        self._close_task: asyncio.Task[None] | None = None
        self._nursery = Nursery(
            hypervisor=hypervisor,
            make_desktop=make_desktop,
            boot_timeout_s=settings.boot_timeout_s,
            destroy_retry_min_s=settings.backoff_min_s,
            destroy_retry_max_s=settings.backoff_max_s,
            clock=self._clock,
            closing=self._closing,
        )

    @property
    def name(self) -> str:
        """The pool's name, unique in the daemon."""
        return self.settings.name

    @property
    def capacity(self) -> int:
        """Most machines that exist at once."""
        return self.settings.capacity

    @property
    def accelerator(self) -> str:
        """How its guests run: kvm, tcg or fake."""
        return self._hypervisor.accelerator.value

    @property
    def changes(self) -> Changes:
        """Notified whenever `statistics` change."""
        return self._changes

    def __repr__(self) -> str:
        s = self.statistics()
        problem = f" | {s.problem}" if s.problem else ""
        return (
            f"<Pool {self.name!r} {s.idle_count} idle | {s.leased_count} leased | {s.starting_count} starting"
            f" | {s.dying_count} dying | {s.waiting_count} waiting{problem}>"
        )

    def statistics(self) -> PoolStatistics:
        """Count what there is now and what there has been."""
        states = Counter(record.state for record in self._records.values())
        undead = next((f"machine {machine_id} does not go: {why}" for machine_id, why in self._undead.items()), "")
        return PoolStatistics(
            idle_count=states[MachineState.IDLE],
            leased_count=states[MachineState.LEASED],
            starting_count=states[MachineState.STARTING],
            dying_count=states[MachineState.DYING],
            waiting_count=self._line.machine_count,
            memory_bytes=sum(r.usage.private_dirty_bytes for r in self._records.values() if r.usage is not None),
            problem=self._backoff.problem or undead,
            booted_total=self._totals["booted"],
            boot_failure_total=self._totals["boot_failed"],
            lost_total=self._totals["lost"],
            leased_total=self._totals["leased"],
            last_boot_s=self._last_boot_s,
        )

    async def start(self) -> None:
        """Begin to boot machines; returns before any is ready. Once."""
        if self._started:
            raise RuntimeError(f"{self!r} was started before; make a new pool")
        self._started = True
        self._tasks.spawn(self._keep_time(), name=f"pool:{self.name}:time")
        self._tasks.spawn(self._measure(), name=f"pool:{self.name}:measure")
        self._reconcile()

    async def lease(self, count: int = 1, *, timeout_s: float) -> tuple[LeasedMachine, ...]:
        """Take `count` ready machines, all or none, in the order of asking. Give each back with `release`.

        On failure and on cancellation nothing is taken.

        Raises:
            GroupTooLarge: The pool can never hold `count` machines.
            PoolExhausted: The line is full, or it was not the caller's turn within `timeout_s`.
            Draining: The pool is going away.
        """
        if not 1 <= count <= self.capacity:
            raise GroupTooLarge(
                f"pool {self.name!r} holds at most {self.capacity} machines, so never a group of {count};"
                " ask for fewer, or raise the pool's capacity"
            )
        if self._draining:
            raise self._draining_error()
        now_s = self._clock.monotonic()
        group = WaitingGroup(size=count, enter_s=now_s, deadline_s=now_s + timeout_s)
        self._line.enter(group)
        if self._line.is_over_limit and not (len(self._line) == 1 and self.statistics().idle_count >= count):
            self._line.leave(group)
            raise self._line_full_error(count)
        self._reconcile()
        try:
            return await group.admitted
        except asyncio.CancelledError:
            self._take_back(group)
            raise

    async def release(self, machines: Iterable[LeasedMachine]) -> None:
        """Destroy leased machines; returns when they are gone. Idempotent, and not undone by cancellation."""
        records = [
            record
            for leased in machines
            if (record := self._records.get(leased.machine_id)) is not None and record.machine is leased.machine
        ]
        for record in records:
            record.retire()
        self._reconcile()
        for record in records:
            await record.gone.wait()

    def drain(self) -> None:
        """Lease no more: send away who waits, destroy what is idle or starting. Leased machines stay. Idempotent."""
        self._draining = True
        self._reconcile()

    async def close(self) -> None:
        """Destroy every machine and end every task. Idempotent; once begun it goes on, whoever is cancelled."""
        if self._close_task is None:
            self._close_task = asyncio.create_task(self._close(), name=f"pool:{self.name}:close")
        await asyncio.shield(self._close_task)

    async def _close(self) -> None:
        self._closing.set()
        records = list(self._records.values())
        for record in records:
            record.retire()
        self.drain()
        for record in records:
            await record.gone.wait()
        await self._tasks.cancel()

    # -- deciding -----------------------------------------------------------------------------------------------

    def _reconcile(self) -> None:
        """Bring the pool towards what it should be. Called after every change; never waits."""
        if self._draining:
            for group in self._line:
                self._refuse(group, self._draining_error())
            for record in self._records.values():
                if record.state in {MachineState.IDLE, MachineState.STARTING}:
                    record.retire()
        else:
            self._follow_plan()
            # Whoever gives up may have held up those behind, and nobody gives up who could be served.
            if self._expire():
                self._follow_plan()
        self._changes.notify()

    def _follow_plan(self) -> None:
        if not self._started:
            return
        now_s = self._clock.monotonic()
        # A waiter that was cancelled this instant stays in line until its own code runs.
        groups = [group for group in self._line if not group.admitted.done()]
        steps = plan(
            (
                PlannedMachine(machine_id=r.machine_id, state=r.planned_state, idle_s=now_s - r.idle_since_s)
                for r in self._records.values()
            ),
            waiting=[group.size for group in groups],
            idle_target=self.settings.idle_target,
            capacity=self.capacity,
            max_starting=self._backoff.starting_limit(now_s, limit=self.settings.max_starting),
            max_idle_s=self.settings.max_idle_s,
        )
        for group, machine_ids in zip(groups, steps.lease, strict=False):
            self._line.leave(group)
            group.admitted.set_result(tuple(self._hand_out(self._records[i]) for i in machine_ids))
        for machine_id in steps.destroy:
            self._records[machine_id].retire()
        for _ in range(steps.start_count):
            self._start_one()

    def _start_one(self) -> None:
        machine_id = f"{self.name}-{self._make_suffix()}"
        while machine_id in self._records:
            machine_id = f"{self.name}-{self._make_suffix()}"
        spec = MachineSpec(
            machine_id=machine_id,
            image=self.image,
            memory_mib=self.settings.memory_mib,
            vcpu_count=self.settings.vcpu_count,
            screen_width_px=self.settings.screen_width_px,
            screen_height_px=self.settings.screen_height_px,
        )
        record = self._records[machine_id] = Record(machine_id=machine_id)
        self._tasks.spawn(live(record, spec, nursery=self._nursery, keeper=self), name=f"machine:{machine_id}")

    def _hand_out(self, record: Record) -> LeasedMachine:
        if record.machine is None or record.desktop is None:
            raise RuntimeError(f"machine {record.machine_id} is {record.state.value} but was never made")
        record.state = MachineState.LEASED
        self._totals["leased"] += 1
        return LeasedMachine(machine=record.machine, desktop=record.desktop)

    def _take_back(self, group: WaitingGroup) -> None:
        """Undo an admission whose waiter was cancelled before it heard of it: those machines are as good as new."""
        self._line.leave(group)
        admitted = group.admitted
        if admitted.done() and not admitted.cancelled() and admitted.exception() is None:
            for machine in admitted.result():
                record = self._records.get(machine.machine_id)
                if record is not None and record.state is MachineState.LEASED:
                    record.state = MachineState.IDLE
                    self._totals["leased"] -= 1
        self._reconcile()

    # -- refusing -----------------------------------------------------------------------------------------------

    def _expire(self) -> bool:
        """Send away every group whose time is up; tell whether there was one."""
        now_s = self._clock.monotonic()
        late = [group for group in self._line if group.deadline_s <= now_s]
        errors = [self._too_late_error(group, now_s) for group in late]
        for group, error in zip(late, errors, strict=True):
            self._refuse(group, error)
        return bool(late)

    def _refuse(self, group: WaitingGroup, error: EnvdError) -> None:
        self._line.leave(group)
        if not group.admitted.done():
            group.admitted.set_exception(error)

    def _too_late_error(self, group: WaitingGroup, now_s: float) -> PoolExhausted:
        s = self.statistics()
        problem = f"; machines fail to start: {s.problem}" if s.problem else ""
        return PoolExhausted(
            f"pool {self.name!r} had no room for {group.size} within {now_s - group.enter_s:.1f} s: position"
            f" {self._line.position(group)} of {len(self._line)} in line ({s.idle_count} idle, {s.leased_count} leased,"
            f" {s.starting_count} starting, {s.dying_count} dying, capacity {self.capacity}){problem};"
            " retry with the same request_id",
            retry_after_s=self._estimate_retry_s(self._line.machines_ahead(group)),
        )

    def _line_full_error(self, count: int) -> PoolExhausted:
        return PoolExhausted(
            f"pool {self.name!r} has no room for {count}: {len(self._line)} groups are in line, its limit, so there is"
            f" no position {len(self._line) + 1}; retry with the same request_id",
            retry_after_s=self._estimate_retry_s(self._line.machine_count),
        )

    def _draining_error(self) -> Draining:
        # Whoever comes back finds another daemon, or none: a second is as good as any other figure.
        return Draining(f"pool {self.name!r} is draining and leases no more; try another host", retry_after_s=1.0)

    def _estimate_retry_s(self, machines_ahead: int) -> float:
        boot_s = _BOOT_GUESS_S if self._last_boot_s is None else self._last_boot_s
        return estimate_retry_s(machines_ahead=machines_ahead, capacity=self.capacity, boot_s=boot_s)

    # -- what becomes of the machines: see `life.Keeper` ----------------------------------------------------------

    def came_up(self, record: Record, *, boot_s: float) -> None:
        """See `Keeper`."""
        record.state = MachineState.IDLE
        record.idle_since_s = self._clock.monotonic()
        self._last_boot_s = boot_s
        self._totals["booted"] += 1
        self._backoff.succeeded()
        self._reconcile()

    def did_not_start(self, record: Record, error: Exception) -> None:
        """See `Keeper`."""
        self._totals["boot_failed"] += 1
        self._backoff.failed(self._clock.monotonic(), f"machine {record.machine_id} did not start: {error}")
        self._changes.notify()

    def was_lost(self, record: Record, machine: Machine) -> None:
        """See `Keeper`."""
        logger.warning("machine %s: lost while %s: %s", record.machine_id, record.state.value, machine.lost_reason)
        self._totals["lost"] += 1
        if record.state is MachineState.IDLE:
            # One that dies unused may be the first of many: the next waits a little.
            problem = f"machine {record.machine_id} died while idle: {machine.lost_reason}"
            self._backoff.failed(self._clock.monotonic(), problem)
        self._changes.notify()

    def does_not_go(self, record: Record, error: Exception) -> None:
        """See `Keeper`."""
        self._undead[record.machine_id] = str(error)
        self._changes.notify()

    def is_gone(self, record: Record) -> None:
        """See `Keeper`."""
        self._undead.pop(record.machine_id, None)
        del self._records[record.machine_id]
        self._reconcile()

    # -- time ---------------------------------------------------------------------------------------------------

    async def _keep_time(self) -> None:
        """Reconcile whenever a deadline, the end of a pause or an idle machine's age is reached."""
        while True:
            changed = self._changes.next
            wake_s = self._next_wake_s()
            await wait_until(self._clock, wake_s, or_event=changed)
            if wake_s is not None and self._clock.monotonic() >= wake_s:
                self._reconcile()

    def _next_wake_s(self) -> float | None:
        now_s = self._clock.monotonic()
        # An idle machine that is wanted may be older than this; only the moment of reaching it matters.
        ages_s = (
            record.idle_since_s + self.settings.max_idle_s
            for record in self._records.values()
            if record.state is MachineState.IDLE and now_s - record.idle_since_s < self.settings.max_idle_s
        )
        times_s = (
            self._line.next_deadline_s,
            self._backoff.retry_at_s(now_s),
            min(ages_s, default=None),
        )
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    async def _measure(self) -> None:
        """Keep every machine's memory figure fresh."""
        while True:
            await self._clock.sleep(self.settings.measure_interval_s)
            for record in list(self._records.values()):
                if record.machine is None or record.state is MachineState.DYING:
                    continue
                try:
                    record.usage = await record.machine.usage()
                except Exception as error:  # a figure that is missing must not cost the next one
                    logger.debug("machine %s: not measured: %s", record.machine_id, error)
            self._changes.notify()
