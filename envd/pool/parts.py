"""Build the collaborators of a pool from its settings and from what it shares with the other pools of its daemon."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from envd.base.aio import OwnedTasks
from envd.base.clock import Clock, SystemClock
from envd.base.store.store import NullStore, Store
from envd.base.telemetry.metrics import Metrics
from envd.hypervisor.machine import DiskImage, Hypervisor, MachineSpec
from envd.pool.admission import AdmissionQueue
from envd.pool.backoff import Backoff
from envd.pool.host_room import HostDisk, HostRoom
from envd.pool.lifecycle import MachineFactory, MachineRegister, MakeDesktop
from envd.pool.machine_table import MachineTable
from envd.pool.memory import HostMemory, booted_bytes, forked_bytes
from envd.pool.refusals import Refusals
from envd.pool.settings import PoolSettings
from envd.pool.template import TemplateCache
from envd.pool.template_keeper import TemplateKeeper


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHost:
    """What the pools of one daemon share."""

    hypervisor: Hypervisor
    """Creates the machines. Its owner closes it, after the pools."""
    templates: TemplateCache | None = None
    """Their templates; None if each pool has its own."""
    memory: HostMemory | None = None
    """The host's memory; None for unbounded."""
    disk: HostDisk | None = None
    """The host's disk; None for unbounded."""
    metrics: Metrics = field(default_factory=Metrics)
    """Counts admissions and refusals; by default not exported."""
    clock: Clock = field(default_factory=SystemClock)
    store: Store = field(default_factory=NullStore)
    """Database for the machines; by default none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolParts:
    """The collaborators of one pool."""

    spec: MachineSpec
    queue: AdmissionQueue
    backoff: Backoff
    tasks: OwnedTasks
    closing: asyncio.Event
    """Set when the pool closes."""
    factory: MachineFactory
    machines: MachineTable
    room: HostRoom
    template: TemplateKeeper
    refusals: Refusals


def build_parts(
    settings: PoolSettings,
    *,
    image: DiskImage,
    host: PoolHost,
    make_desktop: MakeDesktop,
    make_suffix: Callable[[], str],
    changed: Callable[[], None],
    notify: Callable[[], None],
) -> PoolParts:
    """Return the collaborators of an empty pool. Starts nothing.

    Args:
        make_suffix: Returns the part of a machine id after the pool's name.
        changed: See `MachineTable`.
        notify: See `MachineTable`.
    """
    clock, tasks, closing = host.clock, OwnedTasks(), asyncio.Event()
    spec = settings.machine_spec(image)
    queue = AdmissionQueue(limit=settings.queue_limit, shares=settings.shares, capacity=settings.capacity)
    backoff = Backoff(min_s=settings.backoff_min_s, max_s=settings.backoff_max_s, failing_after=settings.failing_after)
    factory = MachineFactory(
        hypervisor=host.hypervisor,
        make_desktop=make_desktop,
        forking=asyncio.Semaphore(settings.max_starting),
        boot_timeout_s=settings.boot_timeout_s,
        destroy_retry_min_s=settings.backoff_min_s,
        destroy_retry_max_s=settings.backoff_max_s,
        clock=clock,
        register=MachineRegister(settings.name, store=host.store, clock=clock),
        closing=closing,
    )
    machines = MachineTable(
        factory=factory,
        backoff=backoff,
        tasks=tasks,
        make_id=lambda: f"{settings.name}-{make_suffix()}",
        changed=changed,
        notify=notify,
    )
    expected_bytes = forked_bytes(settings)
    return PoolParts(
        spec=spec,
        queue=queue,
        backoff=backoff,
        tasks=tasks,
        closing=closing,
        factory=factory,
        machines=machines,
        room=HostRoom(
            memory=host.memory,
            disk=host.disk,
            claims=partial(machines.claims, expected_bytes=expected_bytes, booted_bytes=booted_bytes(settings)),
            expected_bytes=expected_bytes,
            capacity=settings.capacity,
            clock=clock,
        ),
        template=TemplateKeeper(
            spec=spec,
            factory=factory,
            templates=host.templates or TemplateCache(host.hypervisor),
            backoff=backoff,
            tasks=tasks,
            check_interval_s=settings.measure_interval_s,
        ),
        refusals=Refusals(
            pool=settings.name,
            capacity=settings.capacity,
            shares=settings.shares,
            queue=queue,
            turnover=machines.turnover,
            metrics=host.metrics,
        ),
    )
