"""Carry out the planner's decisions: start machines ahead of demand, lease them once, destroy and replace them.

Invariants, which hold because one event loop is atomic between awaits:

* Every machine that exists, or may exist, has a record in the pool, created before the hypervisor is asked for it.
* Every record has one task (see `machines`), and only that task creates, watches and destroys the machine.
* A machine is used once. After it was leased it never becomes idle again.

`planner` picks the next group, `queue` keeps and refuses the groups that wait, `machines` runs the life of each
machine, `backoff` sets the pauses after failures, `template` provides the state to fork from, and `room` bounds the
machines of the host.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from envd.base.aio import Changes, OwnedTasks, shielded
from envd.base.clock import wait_until
from envd.base.errors import EnvdError, GroupTooLarge, MachineLost, NotForkable, TemplateCorrupt
from envd.desktop.desktop import Desktop
from envd.desktop.display_connection import ConnectionState
from envd.hypervisor.machine import DiskImage, Machine, MachineSpec
from envd.pool.backoff import Backoff
from envd.pool.leased import Admission, FrozenDesktop, LeasedMachine, Reservation, freeze
from envd.pool.machines import MachineRecord, MachineTable, Work
from envd.pool.planner import Demand, LifecycleState, missing_count, plan
from envd.pool.queue import AdmissionQueue, QueueEntry, WaitingGroup, queue_report, quota_note
from envd.pool.room import PoolRoom, booted_bytes, forked_bytes
from envd.pool.settings import PoolHost, PoolParameters
from envd.pool.status import PoolStatus
from envd.pool.template import TemplateKeeper

logger = logging.getLogger(__name__)

#: How often the machines' disk quotas are enforced: a stat of two files per machine.
_QUOTA_INTERVAL_S = 2.0
#: Machines beyond `resident`, for as long as loading a state takes.
_MAX_REPLACING = 4


class MachinePool:
    """Machines of one image: some idle, some leased, the others starting or dying."""

    def __init__(
        self,
        settings: PoolParameters,
        *,
        image: DiskImage,
        host: PoolHost,
        make_desktop: Callable[..., Desktop] = Desktop,
        make_suffix: Callable[[], str] = lambda: secrets.token_hex(3),
    ) -> None:
        """Set up an empty pool; nothing runs before `start`.

        Args:
            make_desktop: See `MachineTable`.
            make_suffix: Returns the part of a machine id after the pool's name: at most 7 of [a-z0-9].
        """
        self.settings = settings
        self.image = image
        self.changes = Changes()
        """Notified whenever `statistics` change."""
        self.hypervisor = host.hypervisor
        self._clock = host.clock
        self._metrics = host.metrics
        self._tasks = OwnedTasks()
        self._closing = asyncio.Event()
        self._spec = settings.machine_spec(image)
        self._backoff = Backoff(
            min_s=settings.backoff_min_s, max_s=settings.backoff_max_s, failing_after=settings.failing_after
        )
        self._machines = MachineTable(
            pool=settings.name,
            hypervisor=host.hypervisor,
            make_desktop=make_desktop,
            forking=asyncio.Semaphore(settings.max_starting),
            boot_timeout_s=settings.boot_timeout_s,
            clock=host.clock,
            store=host.store,
            backoff=self._backoff,
            tasks=self._tasks,
            closing=self._closing,
            destroy_retry_min_s=settings.backoff_min_s,
            destroy_retry_max_s=settings.backoff_max_s,
            always_running=settings.always_running,
            linger_s=settings.linger_s,
            make_id=lambda: f"{settings.name}-{make_suffix()}",
            changed=self._reconcile,
            notify=self._measured,
        )
        expected_bytes, full_bytes = forked_bytes(settings), booted_bytes(settings)
        self._room = PoolRoom(
            host=host.room,
            growth=partial(self._machines.growth_bytes, forked_bytes=expected_bytes, booted_bytes=full_bytes),
            expected_bytes=expected_bytes,
            resident=settings.resident,
            clock=host.clock,
        )
        self._template = TemplateKeeper(
            spec=self._spec,
            machines=self._machines,
            templates=host.templates,
            check_interval_s=settings.measure_interval_s,
            make=self._make,
            wait_for_room=self._wait_for_room,
            changed=self._reconcile,
        )
        self._queue = AdmissionQueue(
            settings.name,
            limit=settings.queue_limit,
            shares=settings.shares,
            resident=settings.resident,
            turnover=self._machines.turnover,
            metrics=host.metrics,
        )
        self.measure_memory = self._machines.measure_once
        """Measures the memory of every machine now, which `statistics` then has."""
        self.list_machine_ids = self._machines.list_ids
        self._replacing = asyncio.Semaphore(_MAX_REPLACING)
        self._parked_count = self._parked_bytes = 0
        self._reconciled_s = self._clock.monotonic()
        """When the last `_reconcile` began, on the monotonic clock."""
        self._is_started = False
        self._draining = False
        self._close_task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def _used_count(self) -> int:
        return len(self._machines) + self._machines.reserved_count

    @property
    def _open_room(self) -> int | None:
        """How many episodes may be opened now; None if only machines bound them."""
        if not self.settings.parks:
            return None
        leased_count = self._machines.counts()[LifecycleState.LEASED]
        return self.settings.capacity - leased_count - self._machines.unfilled_count - self._parked_count

    @property
    def copies_running_machines(self) -> bool:
        """Whether its machines can be forked in the state that they are in: see `Capabilities`."""
        return not self.hypervisor.capabilities.not_forkable

    def require_copies(self) -> None:
        """Raises: NotForkable: No machine of this pool can be forked in the state that it is in."""
        if reason := self.hypervisor.capabilities.not_forkable:
            raise NotForkable(f"pool {self.name}: {reason}")

    @property
    def template(self) -> FrozenDesktop | None:
        """The state that its machines are forked from; None while there is none."""
        return self._template.frozen

    def __repr__(self) -> str:
        return f"<MachinePool {self.name!r} {self.statistics()}>"

    def statistics(self) -> PoolStatus:
        """Return the present counts and the totals since the start."""
        states = self._machines.counts()
        usages = [record.usage for record in self._machines if record.usage is not None]
        totals = self._machines.totals
        failure = self.hypervisor.problem or self._backoff.problem or self._machines.problem
        if self._backoff.is_failing:
            failure = f"{self._backoff.summary}, so resets are refused until a machine starts: {failure}"
        return PoolStatus(
            name=self.name,
            image=self.image.name,
            os=self.image.os.value,
            accelerator=self.hypervisor.accelerator.value,
            capacity=self.settings.capacity,
            resident=self.settings.resident,
            parked_count=self._parked_count,
            parked_bytes=self._parked_bytes,
            always_running=self.settings.always_running,
            tools=self.settings.tools,
            not_forkable=self.hypervisor.capabilities.not_forkable,
            idle_count=states[LifecycleState.IDLE],
            leased_count=states[LifecycleState.LEASED],
            starting_count=states[LifecycleState.STARTING],
            dying_count=states[LifecycleState.DYING],
            reserved_count=self._machines.unfilled_count,
            waiting_count=self._queue.machine_count,
            waiting_by_run=self._queue.count_by_run,
            held_by_run=self._machines.held(),
            memory_bytes=sum(usage.private_dirty_bytes for usage in usages),
            pss_bytes=sum(usage.pss_bytes for usage in usages),
            healthy=not failure,
            problem=failure or self._room.shortage or self._room.host.disk_shortage,
            breaker=self._backoff.breaker(self._clock.monotonic()),
            booted_total=totals["booted"],
            boot_failure_total=totals["boot_failed"],
            lost_total=totals["lost"],
            template_boot_total=totals["template_booted"],
            template_digest="" if self.template is None else self.template.snapshot.digest,
            last_start_s=self._machines.last_start_s,
            image_expire_unix_s=self.image.expire_time.timestamp() if self.image.expire_time else None,
        )

    def queue(self) -> tuple[QueueEntry, ...]:
        """Return the queued groups in the order of their turns."""
        held, now_s = self._machines.held(), self._clock.monotonic()
        return queue_report(self._queue, held=held, shares=self.settings.shares, status=self.statistics(), now_s=now_s)

    def has(self, machine_id: str) -> bool:
        return machine_id in self._machines

    async def start(self) -> None:
        """Start to get a template and to fork machines; returns before any is idle. Call once."""
        if self._is_started:
            raise RuntimeError(f"{self!r} was started before; create a new pool")
        self._is_started = True
        self._room.host.join(self._room.growth)
        self._tasks.spawn(self._keep_time(), name=f"pool:{self.name}:time")
        self._tasks.spawn(
            self._machines.measure(interval_s=self.settings.measure_interval_s), name=f"pool:{self.name}:measure"
        )
        self._tasks.spawn(
            self._machines.enforce_disk_quota(self.settings.disk_quota_mib << 20, interval_s=_QUOTA_INTERVAL_S),
            name=f"pool:{self.name}:quota",
        )
        self._template.start()
        self._reconcile()

    async def acquire(
        self,
        count: int = 1,
        *,
        reserved: int = 0,
        parked: int = 0,
        run: str = "",
        owner: str = "",
        retained_count: int = 0,
        timeout_s: float,
    ) -> Admission:
        """Take `count` idle machines and `reserved` reservations, all or none, when it is the run's turn.

        The machines are forks of the pool's template that have not run yet, and may still load its state. A reservation
        is for one machine that the caller forks from another state, with `fork`. Return everything with `release`. On
        failure and on cancellation nothing is taken.

        Args:
            parked: Members of the group that begin parked, without a machine.
            run: The run whose share they count for; empty for the run without a label.
            owner: Name of the token that asks, for listings of the queue.
            retained_count: Machines of the run that the caller holds, and returns only after these.

        Raises:
            GroupTooLarge: The pool, or the run's quota, can never hold that many.
            PoolExhausted: The queue is full, or it was not the run's turn within `timeout_s`.
            PoolFailing: Machines do not start, and too few were idle; or the host's disk is full.
            Draining: The pool is draining.
        """
        demand = Demand(idle=count, reserved=reserved, parked=parked, run=run)
        if demand.machine_count < 1 or min(count, reserved) < 0:
            raise GroupTooLarge(f"a group of {count} machines and {reserved} reservations is empty; ask for at least 1")
        refusal = self._queue.never(demand, retained_count=retained_count, open_limit=self.settings.capacity)
        if refusal is None and self._draining:
            refusal = self._queue.counted("draining", self._queue.draining(), run=run)
        if refusal is not None:
            raise refusal
        now_s = self._clock.monotonic()
        group = WaitingGroup(demand=demand, owner=owner, enter_s=now_s, deadline_s=now_s + timeout_s)
        self._queue.enter(group)
        self._reconcile()
        if self._queue.is_over_limit and not group.admitted.done():
            self._queue.leave(group)
            raise self._queue.queue_full(demand, now_s=now_s, status=self.statistics())
        try:
            admission = await group.admitted
        except asyncio.CancelledError:
            self._take_back(group)
            raise
        self._metrics.group_admitted(
            pool=self.name, run=run, machine_count=demand.machine_count, wait_s=self._clock.monotonic() - now_s
        )
        for machine in admission.machines:
            machine.start_loading(self._tasks)
        return admission

    async def fork(self, reservation: Reservation, frozen: FrozenDesktop) -> LeasedMachine:
        """Use up a reservation for a fork of a frozen state, paused and asleep.

        On failure and on cancellation the reservation is still held, and must be released.

        Raises:
            MachineLost: The reservation was released during the fork, or the machine died.
            Draining: The pool is closing.
            TemplateCorrupt: The template that the state depends on was removed.
            HypervisorError: libvirt or QEMU refused; the message says why.
        """
        if self._closing.is_set():
            raise self._queue.draining()
        try:
            record = await self._machines.fill(reservation, frozen)
        except MachineLost:
            if self._closing.is_set():
                raise self._queue.draining() from None
            raise
        except TemplateCorrupt:
            await self._template.check()
            raise
        return self._machines.hand_out(record, run=reservation.run)

    @asynccontextmanager
    async def replacing(self, *, run: str) -> AsyncIterator[Reservation]:
        """Reserve a place for the successor of a leased machine, which its user releases after the block.

        It does not queue, and may exceed `resident` until the predecessor is gone: that one is paused and grows no
        more. A few at once, so that this stays small. If the block fails, the reservation is released.
        """
        async with self._replacing:
            (reservation,) = self._machines.reserve(1, pool=self.name, run=run, is_urgent=True)
            self._reconcile()
            async with self.releasing_on_failure([reservation]):
                yield reservation

    @asynccontextmanager
    async def releasing_on_failure(self, items: Iterable[LeasedMachine | Reservation]) -> AsyncIterator[None]:
        """Release machines and reservations if the block fails or is cancelled."""
        try:
            yield
        except BaseException:
            await self.release(items)
            raise

    async def adopt(self, machine: Machine, state: ConnectionState, *, run: str) -> LeasedMachine:
        """Adopt a paused machine left by a previous daemon as one that `run` holds. Destroys it on failure.

        Raises:
            MachineLost: It died.
            GuestUnresponsive, GuestError: Its display does not work.
            StoreError: It could not be registered.
        """
        work = self._machines.adopted(machine, state)
        try:
            record = await self._machines.make(work, becomes=LifecycleState.LEASED, machine_id=machine.machine_id)
        except BaseException:
            await shielded(machine.destroy())
            raise
        return self._machines.hand_out(record, run=run)

    def spec_of(self, machine_id: str) -> MachineSpec:
        return replace(self._spec, machine_id=machine_id)

    def set_parked(self, count: int, *, size_bytes: int) -> None:
        """Set how many open episodes are parked, which count toward `capacity`, and the size of their states."""
        self._parked_count, self._parked_bytes = count, size_bytes
        self._reconcile()

    def reserve_for_parked(self, *, run: str) -> Reservation | None:
        """Reserve a machine for a parked episode if there is one now: one that is idle, or one more."""
        has_idle = self._machines.counts()[LifecycleState.IDLE] > 0
        if not has_idle and (self._used_count >= self.settings.resident or self._room.count() <= 0):
            return None
        (reservation,) = self._machines.reserve(1, pool=self.name, run=run, is_urgent=True)
        if has_idle and self.template is not None:
            # Also one that is kept for a queued group: one more in its place would exceed `resident`.
            self._machines.promise(partial(self._template.prepare, self.template), may_take_idle=True, may_start=False)
        self._reconcile()
        return reservation

    def is_queued_before(self, time_s: float) -> bool:
        """Return whether a group that only lacks machines was queued before."""
        held, open_room = self._machines.held(), self._open_room or 0
        return any(
            group.enter_s < time_s
            and group.demand.member_count <= open_room
            and not quota_note(group.demand, held=held, shares=self.settings.shares)
            for group in self._queue
        )

    def missing_for(self, waiting_count: int) -> int:
        """Return how many leased machines have to be given up, so that others get theirs.

        Others are `waiting_count` parked episodes with calls, the queued groups as far as they may be opened, and the
        spare machines. Not positive if there is room for all.
        """
        return missing_count(
            self._machines.counts(),
            wanted_count=waiting_count + self.settings.size,
            queued_count=min(self._queue.machine_count, self._open_room or 0),
            free_count=self.settings.resident - self._used_count,
            host_is_short=bool(self._room.shortage),
        )

    async def freeze(self, leased: LeasedMachine) -> FrozenDesktop:
        """Freeze a leased machine's state, to fork from; see `leased.freeze`."""
        return await freeze(leased, hypervisor=self.hypervisor)

    async def release(self, items: Iterable[LeasedMachine | Reservation]) -> None:
        """Destroy leased machines and drop reservations, with the machines that fill them; returns when all are gone.

        Idempotent; cancellation does not undo it.
        """
        records = [record for item in items if (record := self._machines.withdraw(item)) is not None]
        for record in records:
            record.retire()
        self._reconcile()
        for record in records:
            await record.gone.wait()

    def drain(self, *, is_over: bool = False) -> None:
        """Stop leasing: refuse queued groups, destroy idle and starting machines. Idempotent.

        Leased machines stay, and reservations can still be filled. If the drain `is_over`, nothing more is
        forked, and a machine that cannot be destroyed in a few attempts is left behind.
        """
        self._draining = True
        if is_over:
            self._closing.set()
        self._reconcile()

    async def close(self) -> None:
        """Destroy every machine and end every task. Idempotent; continues if the caller is cancelled."""
        if self._close_task is None:
            self._close_task = asyncio.create_task(self._close(), name=f"pool:{self.name}:close")
        await asyncio.shield(self._close_task)

    async def _close(self) -> None:
        self._closing.set()
        records = list(self._machines)
        for record in records:
            record.retire()
        self._machines.cancel_reservations()
        self.drain()
        for record in records:
            await record.gone.wait()
        await self._tasks.cancel()
        self._room.host.leave(self._room.growth)
        await self._template.release()

    # -- reconciling --------------------------------------------------------------------------------------------

    def _reconcile(self) -> None:
        """Move the pool towards its target. Called after every change; never waits."""
        self._reconciled_s = self._clock.monotonic()
        if self._draining:
            self._room.note(is_short=False)
            for group in self._queue:
                self._queue.refuse(group, "draining", self._queue.draining())
            for record in self._machines:
                is_starting = record.state is LifecycleState.STARTING and record.reservation is None
                if is_starting or record.state is LifecycleState.IDLE:
                    record.retire()
        else:
            if self._room.host.disk_is_full:
                self._queue.refuse_disk_full(self._room.host.disk_shortage)
            self._follow_plan()
            self._refuse_if_failing()
            # A group that times out may have blocked those behind it. No group times out that could be admitted now.
            now_s, held = self._clock.monotonic(), self._machines.held()
            if self._queue.refuse_late(now_s=now_s, status=self.statistics(), held=held):
                self._follow_plan()
        self.changes.notify()

    def _refuse_if_failing(self) -> None:
        """If the pool is failing, refuse all groups that want more machines than are idle."""
        self._backoff.log_change(self.name)
        if not self._backoff.is_failing or not len(self._queue):
            return
        # Idle machines may have been kept for a large group, which will not be admitted: admit the smaller ones.
        status, now_s = self.statistics(), self._clock.monotonic()
        too_large = [group for group in self._queue if group.demand.idle > status.idle_count]
        self._queue.refuse_failing(too_large, self._backoff, now_s=now_s, status=status)
        self._follow_plan()
        self._queue.refuse_failing(self._queue, self._backoff, now_s=now_s, status=self.statistics())

    def _follow_plan(self) -> None:
        template = self.template
        if template is None:
            return
        now_s = self._clock.monotonic()
        groups = self._queue.waiting
        steps = plan(
            self._machines.idle_s(now_s),
            counts=self._machines.planned_counts(),
            reserved_count=self._machines.reserved_count,
            waiting=[group.demand for group in groups],
            idle_target=self._idle_target(),
            resident=self.settings.resident,
            host_room=self._room.count(),
            max_starting=self._starting_limit(now_s, is_queued=bool(groups)),
            max_idle_s=self.settings.max_idle_s,
            open_room=self._open_room,
            held=self._machines.held(),
            shares=self.settings.shares,
            turn=self._queue.turn(groups),
        )
        self._queue.set_turn(groups, steps.turn)
        for index, machine_ids in zip(steps.admitted, steps.machine_ids, strict=True):
            group = groups[index]
            self._queue.leave(group)
            group.admitted.set_result(self._admit(group.demand, machine_ids))
        for machine_id in steps.destroy:
            self._machines[machine_id].retire()
        for _ in range(steps.start_count):
            self._machines.add(self._template.prepare(template))
        self._room.note(is_short=steps.host_is_short)
        # Each reservation gets a machine that waits, so that it only has to load. Idle ones are left to the queue.
        if self._machines.promise(
            lambda: self._template.prepare(template),
            may_take_idle=not len(self._queue),
            may_start=self._backoff.starting_limit(now_s, limit=1) > 0,
        ):
            self._follow_plan()

    def _starting_limit(self, now_s: float, *, is_queued: bool) -> int:
        """Return how many machines may be starting now.

        Starting one takes a processor for 0.1 s. Spare ones wait while a caller waits for a state to be loaded.
        """
        if self._machines.is_filling and not is_queued:
            return 0
        return self._backoff.starting_limit(now_s, limit=self.settings.max_starting)

    def _idle_target(self) -> int:
        """Return how many spare machines to keep; in a failing pool one more than there are, so that one tries."""
        if not self._backoff.is_failing:
            return self.settings.size
        return max(self.settings.size, self._machines.counts()[LifecycleState.IDLE] + 1)

    def _admit(self, demand: Demand, machine_ids: Iterable[str]) -> Admission:
        return Admission(
            machines=tuple(
                self._machines.hand_out(self._machines[machine_id], run=demand.run) for machine_id in machine_ids
            ),
            reservations=self._machines.reserve(
                demand.reserved, pool=self.name, run=demand.run, is_urgent=not demand.idle
            ),
        )

    def _take_back(self, group: WaitingGroup) -> None:
        """Undo the admission of a cancelled waiter; it did not use the machines, so they become idle again."""
        self._queue.leave(group)
        admitted = group.admitted
        if admitted.done() and not admitted.cancelled() and admitted.exception() is None:
            self._machines.take_back(admitted.result())
        self._reconcile()

    async def _keep_time(self) -> None:
        """Reconcile at every deadline, end of a pause and expiry of an idle machine."""
        while True:
            changed = self.changes.next
            wake_s = self._next_wake_s()
            await wait_until(self._clock, wake_s, or_event=changed)
            if wake_s is not None and self._clock.monotonic() >= wake_s:
                self._reconcile()

    def _next_wake_s(self) -> float | None:
        """Return the first instant after the last `_reconcile` that needs another; it may have passed since."""
        after_s = self._reconciled_s
        times_s = (
            self._queue.next_deadline_s,
            self._backoff.retry_at_s(after_s),
            self._room.poll_at_s if self.template is not None else None,
            self._machines.next_surplus_s(after_s, max_idle_s=self.settings.max_idle_s),
        )
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    # -- the template -------------------------------------------------------------------------------------------

    async def _make(self, work: Work, becomes: LifecycleState) -> MachineRecord:
        if self._draining:
            raise self._queue.draining()
        try:
            return await self._machines.make(work, becomes=becomes)
        except EnvdError:
            if self._draining:
                raise self._queue.draining() from None
            raise

    async def _wait_for_room(self) -> None:
        await self._room.wait(lambda: self._used_count < self.settings.resident, changes=self.changes)

    def _measured(self) -> None:
        self._room.host.publish()
        self.changes.notify()
