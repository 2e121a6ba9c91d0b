"""The fake hypervisor: creates, forks, captures and adopts drawn desktops, and lists what is left of them."""

import time
from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np

from envd.base.errors import CheckpointCorrupt, EnvdError, HypervisorError, NotForkable, TemplateCorrupt
from envd.hypervisor.fake.backend import CAPABILITIES
from envd.hypervisor.fake.desktop.canvas import Framebuffer, Picture
from envd.hypervisor.fake.desktop.desktop import DrawnDesktop
from envd.hypervisor.fake.files import GuestFiles
from envd.hypervisor.fake.guest import FakeSnapshot, FrozenGuest, read_guest, template_key, write_guest
from envd.hypervisor.fake.machine import FakeMachine, check_screen
from envd.hypervisor.fake.wires.guestd import Service, echo
from envd.hypervisor.machine import (
    Accelerator,
    CaptureReport,
    DiskImage,
    Leftover,
    LeftoverKind,
    Machine,
    MachineSpec,
    MachineState,
    Snapshot,
)


def fake_image(name: str = "fake") -> DiskImage:
    """Return an image for fake machines. Its disk is never opened."""
    return DiskImage(name=name, digest="fake", disk=Path("/dev/null"), disk_format="raw")


class FakeHost:
    """State that outlives a daemon: machines, captures and stored templates."""

    def __init__(self) -> None:
        self.machines: dict[str, FakeMachine] = {}
        """Machines not yet destroyed, by id, including lost ones."""
        self.captures: dict[str, FakeSnapshot] = {}
        """Captures by name, until they are discarded and nothing depends on them."""
        self.templates: dict[MachineSpec, FrozenGuest] = {}
        """Stored templates by `template_key`."""
        self.pictures: dict[tuple[int, int], Picture] = {}
        """Start pictures by screen size. Machines and templates keep theirs."""

    def picture(self, width_px: int, height_px: int) -> Picture:
        """Return the start picture for a screen size; drawn once."""
        size = (width_px, height_px)
        if size not in self.pictures:
            framebuffer = Framebuffer(np.zeros((height_px, width_px, 4), np.uint8), shared=False)
            DrawnDesktop(framebuffer, files=GuestFiles())
            self.pictures[size] = Picture(framebuffer.pixels)
        return self.pictures[size]


class FakeHypervisor:
    """A hypervisor of drawn desktops.

    A second one on the same `host` models a restarted daemon: it adopts or reaps what the first one left, and keeps
    its stored templates.
    """

    capabilities = CAPABILITIES
    accelerator = Accelerator.FAKE
    description = "fake: drawn desktops in this process, no guest code runs"
    problem = ""

    def __init__(self, *, reaction_s: float = 0.0, host: FakeHost | None = None) -> None:
        """Open it; `reaction_s` is that of its machines."""
        self._reaction_s = reaction_s
        self.services: dict[int, Service] = {7: echo}
        """Programs that listen on ports of its guests' loopbacks."""
        self.host = host or FakeHost()
        self._own_ids: set[str] = set()
        self._own_captures: set[str] = set()

    def __repr__(self) -> str:
        return f"<FakeHypervisor {len(self.live_machine_ids)} live | {len(self.machines)} on the host>"

    @property
    def machines(self) -> dict[str, FakeMachine]:
        """Machines on the host by id, including lost ones, until they are destroyed."""
        return self.host.machines

    @property
    def live_machine_ids(self) -> frozenset[str]:
        return frozenset(id for id, machine in self.machines.items() if machine.state is not MachineState.GONE)

    async def create(self, spec: MachineSpec) -> FakeMachine:
        self._require_new(spec.machine_id)
        check_screen(spec.screen_width_px, spec.screen_height_px)
        machine = self._enter(self._new_machine(spec))
        try:
            await machine.boot(self.host.picture(spec.screen_width_px, spec.screen_height_px))
        except BaseException:
            await machine.destroy()
            raise
        return machine

    async def freeze(self, machine: Machine, *, notes: Mapping[str, str]) -> FakeSnapshot:
        begin_s = time.monotonic()
        booted = _own_machine(machine)
        try:
            await booted.pause()
            if booted.snapshot is not None or booted.desktop is None:
                why = "has not booted" if booted.desktop is None else "was forked"
                raise HypervisorError(f"machine {booted.machine_id} {why}; only a booted machine becomes a template")
            size_bytes = booted.framebuffer.mapped_bytes + booted.files.size_bytes
            frozen = FrozenGuest.of(booted.guest, booted.spec, own_bytes=size_bytes, notes=notes)
            self.host.templates[template_key(booted.spec)] = frozen
        finally:
            await booted.destroy()
        return self._template(frozen, booted.spec, begin_s)

    def making_template(self, spec: MachineSpec) -> AbstractAsyncContextManager[None]:  # noqa: ARG002
        """Exclude nothing: drawn templates are in this process."""
        return nullcontext()

    async def find_template(self, spec: MachineSpec) -> FakeSnapshot | None:
        """Return the host's template for such machines, or None."""
        begin_s = time.monotonic()
        stored = self.host.templates.get(template_key(spec))
        return None if stored is None else self._template(stored, spec, begin_s)

    async def fork(self, snapshot: Snapshot, machine_id: str) -> FakeMachine:
        """Create a paused machine in a snapshot's state. On failure or cancellation nothing is left."""
        machine = await self.prepare(snapshot, machine_id)
        try:
            await self.load(machine, snapshot)
        except BaseException:
            await machine.destroy()
            raise
        return machine

    async def prepare(self, snapshot: Snapshot, machine_id: str) -> FakeMachine:
        """Create a paused machine that waits for a state. Raises: TemplateCorrupt, HypervisorError."""
        self._require_new(machine_id)
        frozen = await self._forkable(snapshot, machine_id)
        spec = replace(snapshot.spec, machine_id=machine_id)
        machine = self._enter(self._new_machine(spec, frozen.template))
        try:
            await machine.open_wires()
        except BaseException:
            await machine.destroy()
            raise
        return machine

    async def load(self, machine: Machine, snapshot: Snapshot) -> None:
        """Put a machine into a snapshot's state. Raises: TemplateCorrupt, MachineLost, HypervisorError."""
        waiting = _own_machine(machine)
        try:
            frozen = await self._forkable(snapshot, waiting.machine_id)
            waiting.check_present("load a state")
            waiting.load(frozen)
        except EnvdError as error:
            waiting.kill(f"its state could not be loaded: {error}")
            raise

    async def _forkable(self, snapshot: Snapshot, machine_id: str) -> FakeSnapshot:
        frozen = _own_snapshot(snapshot)
        if frozen.is_discarded:
            raise HypervisorError(f"machine {machine_id}: {frozen!r} was discarded; it cannot be forked any more")
        await self.check_intact(frozen)
        return frozen

    async def check_intact(self, snapshot: Snapshot) -> None:
        """Check that the template under a snapshot is still the stored one. Raises: TemplateCorrupt."""
        template = _own_snapshot(snapshot).template
        if self.host.templates.get(template_key(template.spec)) is not template.frozen:
            raise TemplateCorrupt(f"template {template.digest:.12} was removed or replaced while it was in use")

    async def capture(self, machine: Machine) -> FakeSnapshot:
        begin_s = time.monotonic()
        fork = _own_machine(machine)
        fork.check_present("capture it")
        if fork.snapshot is None:
            raise NotForkable(f"machine {fork.machine_id} was booted, not forked from a template")
        try:
            await self.check_intact(fork.snapshot)
        except TemplateCorrupt as error:
            raise NotForkable(f"machine {fork.machine_id} cannot be forked: {error}") from error
        was_running = fork.state is MachineState.RUNNING
        await fork.pause()
        try:
            await fork.copied()
            fork.check_present("capture it")
            own_bytes = fork.own_bytes
            frozen = FrozenGuest.of(fork.guest, fork.spec, own_bytes=own_bytes, notes={})
        finally:
            if was_running and not fork.lost.is_set():
                await fork.resume()
        took_ms = (time.monotonic() - begin_s) * 1000
        report = CaptureReport(memory_bytes=own_bytes, paused_ms=took_ms, total_ms=took_ms)
        capture = FakeSnapshot(
            frozen, spec=frozen.spec, report=report, parent=fork.snapshot, on_gone=self._forget_capture
        )
        self.host.captures[capture.name] = capture
        self._own_captures.add(capture.name)
        return capture

    async def save(self, snapshot: Snapshot, directory: Path) -> None:
        write_guest(_own_snapshot(snapshot).frozen.guest, directory / "guest")

    async def restore(self, template: Snapshot, directory: Path) -> FakeSnapshot:
        """Return a guest that `save` wrote, as a capture. Raises: CheckpointCorrupt, HypervisorError."""
        try:
            guest = read_guest(directory / "guest")
        except ValueError as error:
            raise CheckpointCorrupt(f"stored guest {directory}: cannot be read: {error}") from error
        except OSError as error:
            raise HypervisorError(f"stored guest {directory}: cannot be read: {error}") from error
        spec, parent = template.spec, _own_snapshot(template).template
        frozen = FrozenGuest.of(guest, spec, own_bytes=guest.framebuffer.mapped_bytes, notes={})
        report = CaptureReport(memory_bytes=frozen.size_bytes, paused_ms=0.0, total_ms=0.0)
        capture = FakeSnapshot(frozen, spec=spec, report=report, parent=parent, on_gone=self._forget_capture)
        self.host.captures[capture.name] = capture
        self._own_captures.add(capture.name)
        return capture

    async def adopt(self, machine_ids: Collection[str]) -> dict[str, Machine]:
        """Take over, paused, those of an earlier hypervisor's machines that are present and booted."""
        adopted: dict[str, Machine] = {}
        for machine_id in set(machine_ids) & set(self.machines) - self._own_ids:
            machine = self.machines[machine_id]
            if machine.state is MachineState.GONE or machine.desktop is None:
                continue
            machine.on_destroyed = self._forget
            self._own_ids.add(machine_id)
            await machine.open_wires()
            await machine.pause()
            # Its daemon can no longer discard these snapshots, so they are removed with the machine.
            snapshot = machine.snapshot
            while snapshot is not None:
                self._own_captures.add(snapshot.name)
                await snapshot.discard()
                snapshot = snapshot.parent
            adopted[machine_id] = machine
        return adopted

    async def reap(self) -> list[str]:
        """Destroy what earlier hypervisors left on this host, except templates. Returns the ids of the machines."""
        orphans = [machine for id, machine in self.machines.items() if id not in self._own_ids]
        for machine in orphans:
            await machine.destroy()
        for name in set(self.host.captures) - self._own_captures:
            del self.host.captures[name]
        return [machine.machine_id for machine in orphans]

    async def leftovers(self) -> list[Leftover]:
        """Return machines and captures on the host that belong to no live hypervisor."""
        machines = set(self.machines) - self._own_ids
        captures = set(self.host.captures) - self._own_captures
        return [
            *(Leftover(LeftoverKind.DOMAIN, machine_id) for machine_id in sorted(machines)),
            *(Leftover(LeftoverKind.CAPTURE, name) for name in sorted(captures)),
        ]

    async def remove(self, leftover: Leftover) -> None:
        if leftover not in await self.leftovers():
            return
        if leftover.kind is LeftoverKind.DOMAIN:
            await self.machines[leftover.name].destroy()
        else:
            del self.host.captures[leftover.name]

    async def close(self) -> None:
        self.host.pictures.clear()

    def _require_new(self, machine_id: str) -> None:
        if machine_id in self.machines:
            raise HypervisorError(f"machine {machine_id} exists already; destroy it first")

    def _new_machine(self, spec: MachineSpec, snapshot: FakeSnapshot | None = None) -> FakeMachine:
        return FakeMachine(spec, snapshot=snapshot, reaction_s=self._reaction_s, on_destroyed=self._forget)

    def _enter(self, machine: FakeMachine) -> FakeMachine:
        machine.services = self.services
        self.machines[machine.machine_id] = machine
        self._own_ids.add(machine.machine_id)
        return machine

    def _template(self, frozen: FrozenGuest, spec: MachineSpec, begin_s: float) -> FakeSnapshot:
        took_ms = (time.monotonic() - begin_s) * 1000
        report = CaptureReport(memory_bytes=frozen.size_bytes, paused_ms=took_ms, total_ms=took_ms)
        return FakeSnapshot(frozen, spec=spec, report=report, parent=None, on_gone=self._forget_capture)

    def _forget(self, machine: FakeMachine) -> None:
        self.machines.pop(machine.machine_id, None)
        self._own_ids.discard(machine.machine_id)

    def _forget_capture(self, capture: FakeSnapshot) -> None:
        self.host.captures.pop(capture.name, None)
        self._own_captures.discard(capture.name)


def _own_snapshot(snapshot: Snapshot) -> FakeSnapshot:
    if not isinstance(snapshot, FakeSnapshot):
        raise TypeError(f"{snapshot!r} is not a snapshot of this hypervisor")
    return snapshot


def _own_machine(machine: Machine) -> FakeMachine:
    if not isinstance(machine, FakeMachine):
        raise TypeError(f"{machine!r} is not a machine of this hypervisor")
    return machine
