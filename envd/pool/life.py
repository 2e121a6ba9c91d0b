"""One machine's life in a pool: made, ready, used once, destroyed. One task, `live`, does all of it.

What to do about an event is the pool's decision; it hears of each through `Keeper`, whose methods never wait.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from envd.errors import EnvdError
from envd.guest.desktop import Desktop
from envd.hypervisor.machine import Hypervisor, Machine, MachineSpec, MachineUsage
from envd.pool.clock import Clock, wait_until
from envd.pool.planner import MachineState
from envd.pool.tasks import run_unless

logger = logging.getLogger(__name__)

#: How often a closing pool tries to destroy a machine before it reports it as left behind.
_CLOSE_ATTEMPTS = 3


class Keeper(Protocol):
    """Who hears what becomes of a machine."""

    def came_up(self, record: "Record", *, boot_s: float) -> None:
        """The machine is ready."""

    def did_not_start(self, record: "Record", error: Exception) -> None:
        """The machine could not be made, or did not get ready."""

    def was_lost(self, record: "Record", machine: Machine) -> None:
        """The machine died on its own after it came up."""

    def does_not_go(self, record: "Record", error: Exception) -> None:
        """The hypervisor did not destroy it; it is tried again."""

    def is_gone(self, record: "Record") -> None:
        """Nothing of it is left, or, while closing, nothing more can be done."""


@dataclass(slots=True, eq=False, kw_only=True)
class Record:
    """One machine, from before the hypervisor is asked for it until it is gone."""

    machine_id: str
    state: MachineState = MachineState.STARTING
    idle_since_s: float = 0.0
    machine: Machine | None = None
    desktop: Desktop | None = None
    usage: MachineUsage | None = None
    retired: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the machine is no longer wanted, whatever its state."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when nothing of it is left."""

    @property
    def planned_state(self) -> MachineState:
        """What the planner may count on: a machine that just died is no longer idle, though nobody has looked yet."""
        is_lost = self.machine is not None and self.machine.lost.is_set()
        return MachineState.DYING if is_lost else self.state

    def retire(self) -> None:
        """Ask for its end, from any state. Idempotent."""
        self.state = MachineState.DYING
        self.retired.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Nursery:
    """What a machine is made with, and how patiently it is destroyed."""

    hypervisor: Hypervisor
    make_desktop: Callable[[Machine], Desktop]
    boot_timeout_s: float
    destroy_retry_min_s: float
    destroy_retry_max_s: float
    clock: Clock
    closing: asyncio.Event
    """Set when the pool goes away: then destroying is tried only a few times more."""


async def live(record: Record, spec: MachineSpec, *, nursery: Nursery, keeper: Keeper) -> None:
    """Make a machine, keep it until it is retired or lost, and see it gone."""
    try:
        await _boot(record, spec, nursery, keeper)
        if record.machine is not None and not record.retired.is_set():
            await run_unless(record.retired, _wait(record.machine.lost))
            if not record.retired.is_set():
                keeper.was_lost(record, record.machine)
    finally:
        record.retire()
        try:
            await _destroy(record, nursery, keeper)
        finally:
            record.gone.set()
            keeper.is_gone(record)


async def _boot(record: Record, spec: MachineSpec, nursery: Nursery, keeper: Keeper) -> None:
    begin_s = nursery.clock.monotonic()
    try:
        await run_unless(record.retired, _bring_up(record, spec, nursery))
    except Exception as error:  # whatever went wrong, this machine must go and the pool go on
        if not record.retired.is_set():
            unexpected = None if isinstance(error, EnvdError) else error
            logger.warning("machine %s: did not start: %s", record.machine_id, error, exc_info=unexpected)
            record.retire()
            keeper.did_not_start(record, error)
        return
    if not record.retired.is_set():
        boot_s = nursery.clock.monotonic() - begin_s
        logger.info("machine %s: ready after %.1f s", record.machine_id, boot_s)
        keeper.came_up(record, boot_s=boot_s)


async def _bring_up(record: Record, spec: MachineSpec, nursery: Nursery) -> None:
    # No await between making it and noting it: a machine that exists is a machine on record.
    record.machine = await nursery.hypervisor.create(spec)
    record.desktop = nursery.make_desktop(record.machine)
    await record.desktop.wait_ready(timeout_s=nursery.boot_timeout_s)


async def _destroy(record: Record, nursery: Nursery, keeper: Keeper) -> None:
    """See the machine gone, however often that takes: while it may exist it stays on record and holds its place."""
    if record.desktop is not None:
        try:
            await record.desktop.close()
        except Exception:
            logger.exception("machine %s: its connections did not close", record.machine_id)
    if record.machine is None:
        return
    attempt = 0
    while True:
        attempt += 1
        try:
            await record.machine.destroy()
        except Exception as error:  # a leak is worse than any error
            keeper.does_not_go(record, error)
            if nursery.closing.is_set() and attempt >= _CLOSE_ATTEMPTS:
                logger.exception("machine %s: left behind; the next start reaps it", record.machine_id)
                return
            logger.warning("machine %s: not destroyed at attempt %d: %s", record.machine_id, attempt, error)
            delay_s = min(nursery.destroy_retry_max_s, nursery.destroy_retry_min_s * 2.0 ** min(attempt - 1, 32))
            await wait_until(nursery.clock, nursery.clock.monotonic() + delay_s, or_event=nursery.closing)
        else:
            return


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
