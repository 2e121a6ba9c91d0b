"""Loads states into machines that wait for one.

Such a machine has mapped its template's memory and opened its overlay on the template's disk, so it can load the state
of the template or of any capture that descends from it. What a capture needs in addition is put in first: the pages
that differ, and the captured disks between overlay and template. QEMU activates the disks, and reads the overlay's
header again, when it has loaded the devices (block.c, `bdrv_activate`).
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from envd.base.errors import HypervisorError
from envd.hypervisor.qemu.domain_xml import parse_forwarded_port
from envd.hypervisor.qemu.machine import Caller, LibvirtMachine
from envd.hypervisor.qemu.monitor import Monitor, overlay_node
from envd.hypervisor.qemu.processes import command_line
from envd.hypervisor.qemu.snapshots.overlays import set_backing_file
from envd.hypervisor.qemu.snapshots.pages import MemoryMap
from envd.hypervisor.qemu.snapshots.records import MachineRecord, write_record
from envd.hypervisor.qemu.snapshots.snapshot import LibvirtSnapshot, MemoryPatch


async def find_guestd_port(machine: LibvirtMachine) -> None:
    """Ask QEMU for the host port that forwards to guestd, if the image has it. Raises: HypervisorError."""
    if machine.spec.image.has_guestd:
        machine.set_guestd_port(parse_forwarded_port(await Monitor(machine.run_control).human("info usernet")))


async def load_state(machine: LibvirtMachine, snapshot: LibvirtSnapshot, *, call: Caller) -> None:
    """Load a snapshot's state into a machine that has none yet. On failure the machine cannot be used.

    Raises:
        HypervisorError: QEMU failed.
        OSError: Its memory or a file cannot be accessed.
    """
    waiting = machine.snapshot
    if waiting is None or machine.is_loaded or waiting.template.ref != snapshot.template.ref:
        raise HypervisorError(f"machine {machine.machine_id}: not waiting for a state of {snapshot!r}")
    await machine.set_snapshot(snapshot)
    if snapshot.patch is not None:
        await asyncio.gather(
            call(_write_pages, machine, snapshot.patch),
            _set_backing(machine, snapshot.captures, call=call),
        )
    await Monitor(machine.run_control).load(snapshot.files.devices)
    await call(write_record, machine.files.directory, MachineRecord(spec=machine.spec, backing=snapshot.ref))
    machine.is_loaded = True


def _write_pages(machine: LibvirtMachine, patch: MemoryPatch) -> None:
    MemoryMap.of(machine.pid, machine.memory_path).write(patch.extents, patch.pages)


async def _set_backing(machine: LibvirtMachine, captures: Sequence[LibvirtSnapshot], *, call: Caller) -> None:
    arguments = await call(lambda: command_line(machine.pid))
    monitor = Monitor(machine.run_control)
    overlays = machine.files.overlays(machine.spec.image)
    for index, overlay in enumerate(overlays):
        disks: list[Path] = [capture.files.disks(len(overlays))[index] for capture in captures]
        await call(set_backing_file, overlay, disks[-1])
        await monitor.set_backing(overlay_node(arguments, overlay), disks)
