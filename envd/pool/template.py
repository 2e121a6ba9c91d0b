"""Templates: the states that a pool's machines are forked from, booted once, tested, and shared by equal pools.

A template is tested before it is used: one fork must show the frame that was frozen before there is a second one.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Protocol

from envd.base.aio import shielded
from envd.base.errors import Draining, EnvdError, GuestError, GuestUnresponsive, HypervisorUnavailable, TemplateCorrupt
from envd.desktop.agent import GuestAgent
from envd.desktop.desktop import Desktop
from envd.desktop.trust import trust
from envd.hypervisor.machine import Hypervisor, MachineSpec, Snapshot
from envd.pool.leased import FrozenDesktop
from envd.pool.lifecycle import MachineFactory, MachineRecord, Work
from envd.pool.planner import LifecycleState

logger = logging.getLogger(__name__)

_FRAME_NOTE = "first_frame_id"
_TYPES_NOTE = "guestd_types"
_HOME_NOTE = "home"
_LAYOUT_TIMEOUT_S = 60.0


class TemplateBuilder(Protocol):
    """Tracks the machines that are used to build a template; implemented by `Pool`."""

    @property
    def factory(self) -> MachineFactory:
        """Creates its machines."""

    async def make(self, work: Work, *, becomes: LifecycleState) -> MachineRecord:
        """Create a machine and wait until it has started. On failure and on cancellation it is destroyed."""


class TemplateCache:
    """The templates of a daemon's pools. Each is built by the first pool that needs it, and then shared."""

    def __init__(self, hypervisor: Hypervisor) -> None:
        self._hypervisor = hypervisor
        self._frozen: dict[MachineSpec, FrozenDesktop] = {}
        self._user_counts: Counter[FrozenDesktop] = Counter()
        # Held while a template is looked up, booted and tested, so that no two pools do so at once.
        self._locks: defaultdict[MachineSpec, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def acquire(self, spec: MachineSpec, *, builder: TemplateBuilder) -> FrozenDesktop:
        """Return the template for `spec`, whose id does not matter; build it if there is none. Undo with `release`.

        If the template was loaded from disk or booted now, the machine that tested it is idle in the builder
        afterwards. On failure nothing is held.

        Raises:
            Draining: The builder's pool is draining.
            GuestUnresponsive, HypervisorError, MachineLost: The template could not be built.
        """
        key = replace(spec, machine_id="")
        async with self._locks[key]:
            if key not in self._frozen:
                async with self._hypervisor.making_template(spec):
                    frozen = await self._load(spec, builder)
                    self._frozen[key] = frozen or await _test(await _boot(spec, builder), builder)
            self._user_counts[self._frozen[key]] += 1
            return self._frozen[key]

    def evict(self, frozen: FrozenDesktop) -> None:
        """Return an unusable template to no further pool. Its present users still release it. Idempotent."""
        self._frozen = {key: kept for key, kept in self._frozen.items() if kept is not frozen}

    async def release(self, frozen: FrozenDesktop) -> None:
        """Release a template that `acquire` returned; its last user discards it."""
        self._user_counts[frozen] -= 1
        if self._user_counts[frozen] == 0:
            del self._user_counts[frozen]
            self.evict(frozen)
            await frozen.snapshot.discard()

    async def _load(self, spec: MachineSpec, builder: TemplateBuilder) -> FrozenDesktop | None:
        """Return the template that is stored on this host, if it passes its test."""
        try:
            snapshot = await self._hypervisor.find_template(spec)
            return None if snapshot is None else await _test(snapshot, builder)
        except (Draining, HypervisorUnavailable):
            raise  # neither is a fault of the template
        except EnvdError as error:
            # The fault may be permanent. A new template costs some minutes, and replaces the stored one.
            logger.error(  # noqa: TRY400 -- the message is complete
                "image %s: the stored template is not usable, booting a new one: %s", spec.image.name, error
            )
            return None


async def _boot(spec: MachineSpec, builder: TemplateBuilder) -> Snapshot:
    """Boot a machine until it is ready and settled, and freeze it."""
    factory = builder.factory
    snapshot: Snapshot | None = None

    async def work(record: MachineRecord) -> None:
        nonlocal snapshot
        # No await between creation and record: a machine that exists is in its record.
        record.machine = await factory.hypervisor.create(replace(spec, machine_id=record.machine_id))
        record.desktop = factory.make_desktop(record.machine)
        try:
            await record.desktop.wait_ready(timeout_s=factory.boot_timeout_s)
        except GuestUnresponsive as error:
            # The log is removed with the machine.
            tail = record.machine.console_tail()
            raise GuestUnresponsive(f"{error}; its console ended with: {tail or 'nothing'}") from error
        if spec.keyboard_layout:
            await _set_layout(record.desktop, spec.keyboard_layout)
        if spec.trusted_authority:
            await trust(GuestAgent(record.machine), spec.trusted_authority)
        await record.machine.pause()
        view = await record.desktop.view()
        await record.desktop.close()
        # The state that a connection to a fork cannot discover, and the frame that the fork must show.
        notes = {_FRAME_NOTE: view.frame.frame_id, _TYPES_NOTE: "yes" if view.guestd_types else "no"}
        if view.home is not None:
            notes[_HOME_NOTE] = view.home
        frozen = await factory.hypervisor.freeze(record.machine, notes=notes)
        if record.retired.is_set():  # no caller waits for it any more
            await shielded(frozen.discard())
        else:
            snapshot = frozen

    try:
        record = await builder.make(work, becomes=LifecycleState.DYING)
        await record.gone.wait()  # the next machine needs its room
    except BaseException:
        if snapshot is not None:
            await shielded(snapshot.discard())
        raise
    if snapshot is None:
        raise RuntimeError(f"machine {record.machine_id} started but froze no template")
    logger.info(
        "image %s: template %.12s frozen, %d MiB", spec.image.name, snapshot.digest, snapshot.report.memory_bytes >> 20
    )
    return snapshot


async def _set_layout(desktop: Desktop, layout: str) -> None:
    """Set the session's keyboard layout. Raises: GuestError: The guest has no such layout, or no setxkbmap."""
    result = await desktop.run(["setxkbmap", "-layout", layout], timeout_s=_LAYOUT_TIMEOUT_S)
    if result.exit_code:
        problem = result.stderr.decode(errors="replace").strip()[-500:]
        raise GuestError(f"keyboard layout {layout}: setxkbmap failed in the guest: {problem}; correct keyboard_layout")


async def _test(snapshot: Snapshot, builder: TemplateBuilder) -> FrozenDesktop:
    """Check that one fork shows the frozen frame; the fork is idle then. On failure the snapshot is discarded.

    Raises:
        TemplateCorrupt: The fork shows another frame.
    """
    factory = builder.factory

    async def work(record: MachineRecord) -> None:
        async with factory.forking:
            record.machine = await factory.hypervisor.fork(snapshot, record.machine_id)
        # The display works while the machine is paused, so the machine is unused afterwards.
        record.desktop = factory.make_desktop(record.machine)
        notes = snapshot.notes
        view = replace(
            await record.desktop.view(), guestd_types=notes.get(_TYPES_NOTE) == "yes", home=notes.get(_HOME_NOTE)
        )
        await record.desktop.close()
        if view.frame.frame_id != notes.get(_FRAME_NOTE):
            raise TemplateCorrupt(
                f"template {snapshot.digest:.12} shows frame {view.frame.frame_id}, and frame"
                f" {notes.get(_FRAME_NOTE)} was frozen"
            )
        record.frozen = FrozenDesktop(snapshot=snapshot, view=view)
        record.desktop = factory.make_desktop(record.machine, view=view)

    try:
        record = await builder.make(work, becomes=LifecycleState.IDLE)
    except BaseException:
        await shielded(snapshot.discard())
        raise
    if record.frozen is None:
        raise RuntimeError(f"machine {record.machine_id} started without a template")
    return record.frozen
