"""Adopts a libvirtd's machines, and their snapshots, that a previous daemon forked.

QEMU does not notice: it accepts another connection to its display, agent and monitor. Adopted machines are paused, and
can be captured like any fork. Nothing can be forked from their snapshots, which are removed with the last machine that
uses them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from envd.hypervisor.machine import MachineSpec
from envd.hypervisor.qemu.domain_xml import MachineFiles
from envd.hypervisor.qemu.machine import Caller, LibvirtMachine
from envd.hypervisor.qemu.snapshots.capture import Freezer, captured_snapshot
from envd.hypervisor.qemu.snapshots.files import SnapshotFiles
from envd.hypervisor.qemu.snapshots.loading import find_guestd_port
from envd.hypervisor.qemu.snapshots.records import SnapshotRef, read_capture, read_machine
from envd.hypervisor.qemu.snapshots.snapshot import LibvirtSnapshot


class BackingSnapshots:
    """Snapshots that back adopted machines; each is loaded once and then shared."""

    def __init__(self, freezer: Freezer, captures_dir: Path, *, call: Caller) -> None:
        self._freezer = freezer
        self._captures_dir = captures_dir
        self._call = call
        self._loaded: dict[SnapshotRef, LibvirtSnapshot] = {}

    @property
    def captures(self) -> list[LibvirtSnapshot]:
        """Loaded captures, without stored templates."""
        return [snapshot for ref, snapshot in self._loaded.items() if ref.kind == "capture"]

    async def load(self, ref: SnapshotRef, spec: MachineSpec) -> LibvirtSnapshot:
        """Return a snapshot, with its ancestors loaded. Raises: HypervisorError: one is missing or damaged."""
        if ref not in self._loaded:
            if ref.kind == "template":
                snapshot = await self._call(self._freezer.find_by_key, ref.name, spec)
            else:
                files = SnapshotFiles(directory=self._captures_dir / ref.name)
                record = await self._call(read_capture, files.directory)
                snapshot = captured_snapshot(files, record, await self.load(record.backing, spec))
            self._loaded[ref] = snapshot
        return self._loaded[ref]

    async def discard(self) -> None:
        """Allow no more forks of them, so that each is removed with its last machine."""
        for snapshot in self._loaded.values():
            await snapshot.discard()


async def adopt(
    domain: Any,
    directory: Path,
    *,
    snapshots: BackingSnapshots,
    call: Caller,
    on_destroyed: Callable[[LibvirtMachine], None],
) -> LibvirtMachine:
    """Return a running domain as a machine of this daemon, paused. On failure the domain is unchanged.

    Raises:
        HypervisorError: Its record or a snapshot is missing or damaged, or its QEMU does not respond.
        MachineLost: It has ended.
    """
    record = await call(read_machine, directory)
    snapshot = await snapshots.load(record.backing, record.spec)
    machine = LibvirtMachine(
        record.spec,
        MachineFiles(directory=directory),
        memory_path=snapshot.memory_path,
        snapshot=snapshot,
        call=call,
        on_destroyed=on_destroyed,
    )
    try:
        machine.attach_adopted(domain)
        await machine.pause()
        await find_guestd_port(machine)
    except BaseException:
        await machine.detach()
        raise
    return machine
