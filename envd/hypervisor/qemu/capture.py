"""Freezes machines: templates by migration, live forks by copying what differs.

Tested on QEMU 7.2 and libvirt 9.0. A template's memory is a shared file, so its saved state needs no memory
(`x-ignore-shared`), and a fork maps that file privately. To capture a live fork, its written pages are read from its
process, its devices are saved alone (`xen-save-devices-state`, which does not need Xen) and its overlay is copied; the
machine is paused only for that. None of these includes a VGA card's video memory, so only machines whose memory blocks
are all known can be captured.
"""

import asyncio
import os
import secrets
import shutil
import struct
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import numpy as np
import xxhash

from envd.base.errors import EnvdError, HypervisorError, MachineLost, NotForkable, TemplateCorrupt
from envd.hypervisor.machine import Accelerator, CaptureReport, Firmware, MachineSpec, MachineState
from envd.hypervisor.qemu.connection import LibvirtLink
from envd.hypervisor.qemu.domain_xml import MEMORY, VIDEO_ALIAS, domain_xml
from envd.hypervisor.qemu.machine import LibvirtMachine
from envd.hypervisor.qemu.monitor import overlay_node
from envd.hypervisor.qemu.processes import command_line
from envd.hypervisor.qemu.snapshots.files import (
    QemuFiles,
    SnapshotManifest,
    combined_digest,
    copy_file,
    copy_overlay,
    create_overlay,
    digest_file,
    set_backing_file,
)
from envd.hypervisor.qemu.snapshots.pages import MemoryMap, PageDigests, Pages, prefaulted, size_bytes
from envd.hypervisor.qemu.snapshots.snapshot import (
    CaptureRecord,
    ForkRecord,
    LibvirtSnapshot,
    MemoryPatch,
    write_record,
)
from envd.hypervisor.qemu.snapshots.templates import QemuTemplateStore

#: Copied with the guest's memory and the UEFI variables; the firmware's code is the same file in every fork.
_COPIED_BLOCKS = {MEMORY, "system.flash0", "system.flash1"}
#: ROMs of firmware and cards are equal in every process of one QEMU version. Video memory has at least 8 MiB.
_LARGEST_ROM_BYTES = 2 << 20
_NO_REPORT = CaptureReport(memory_bytes=0, paused_ms=0.0, total_ms=0.0)
#: The stream's magic number and version; both kinds of state begin with them.
HEADER_BYTES = 8
_MAGIC = b"QEVM"
_CONFIGURATION, _SUBSECTION, _SECTION_FULL, _FOOTER = 0x07, 0x05, 0x04, 0x7E
_RAM_VERSION = 4
_RAM_PAGE, _RAM_END = 0x08, 0x10
_PAGE_BYTES = 4096
_FIRMWARE_VARS = b"system.flash1"


async def capture(machine: LibvirtMachine, captures_dir: Path, *, link: LibvirtLink) -> LibvirtSnapshot:
    """Freeze a fork's state; the machine then continues in its earlier state. Must not be cancelled."""
    parent = machine.snapshot
    if parent is None:
        raise NotForkable(f"machine {machine.machine_id}: booted, not forked from a template, so it cannot be captured")
    begin_s = time.monotonic()
    files = QemuFiles(directory=captures_dir / secrets.token_hex(6))
    try:
        await _require_forkable(machine, parent, link=link)
        files.directory.mkdir(parents=True)
        patch, paused_ms = await _copy(machine, files, parent.template.files.devices, link=link)
        digest, disk_digest = await link.call(_store, files, parent, patch)
        record = CaptureRecord(spec=machine.spec, digest=digest, disk_digest=disk_digest, backing=parent.ref)
        await link.call(write_record, files.directory, record)
    except BaseException as error:
        await link.call(shutil.rmtree, files.directory, True)
        if isinstance(error, OSError | EnvdError) and not isinstance(error, MachineLost):
            await machine.require_present(error)
        if isinstance(error, OSError):
            raise HypervisorError(f"machine {machine.machine_id}: capture failed: {error}") from error
        raise
    report = CaptureReport(
        memory_bytes=len(patch.pages), paused_ms=paused_ms, total_ms=(time.monotonic() - begin_s) * 1000
    )
    return captured_snapshot(files, record, parent, patch=patch, report=report)


def captured_snapshot(
    files: QemuFiles,
    record: CaptureRecord,
    parent: LibvirtSnapshot,
    *,
    patch: MemoryPatch | None = None,
    stored_pages: PageDigests | None = None,
    report: CaptureReport = _NO_REPORT,
) -> LibvirtSnapshot:
    """Return the snapshot of a capture.

    Without `patch` it only backs existing forks: a previous daemon had the pages in memory, so nothing can be forked.
    """
    return LibvirtSnapshot(
        files=files,
        spec=record.spec,
        digest=record.digest,
        disk_digest=record.disk_digest,
        memory_path=parent.memory_path,
        patch=patch,
        stored_pages=stored_pages,
        parent=parent,
        report=report,
    )


async def _copy(
    machine: LibvirtMachine, files: QemuFiles, template_state: Path, *, link: LibvirtLink
) -> tuple[MemoryPatch, float]:
    """Copy the state that a fork cannot share; return the pages, and the duration of the pause in milliseconds."""
    memory = await link.call(MemoryMap.of, machine.pid, machine.memory_path)
    monitor = machine.monitor
    vars_bytes = machine.files.firmware_vars.stat().st_size if machine.spec.image.firmware is Firmware.UEFI else 0
    prefix_bytes = len(state_prefix(template_state, bytes(vars_bytes)))
    was_running = machine.state is MachineState.RUNNING
    buffer: Pages | None = None
    if was_running:
        # Allocated before the pause, with a reserve for pages written until then.
        buffer = await link.call(lambda: prefaulted(size_bytes(memory.private_extents()) * 5 // 4))
    # The prefix, written below, ends with the first bytes of the state.
    async with monitor.device_file(files.devices, offset=prefix_bytes - HEADER_BYTES):
        stopped_s = time.monotonic()
        await machine.pause()
        try:
            # Concurrent, so that the pause is only as long as the slowest copy.
            pages = asyncio.ensure_future(link.call(_written_pages, memory, buffer))
            others = (
                asyncio.ensure_future(monitor.save_devices()),
                *(
                    asyncio.ensure_future(link.call(copy_file, source, target))
                    for source, target in _copied_files(machine, files)
                ),
            )
            # Not `asyncio.wait`: all fail at once if the machine is destroyed meanwhile, and only one error is raised.
            await asyncio.gather(pages, *others, return_exceptions=True)
        finally:
            if was_running:
                await machine.resume()
        paused_ms = (time.monotonic() - stopped_s) * 1000
    for copy in others:
        copy.result()
    with files.devices.open("r+b") as file:
        file.write(state_prefix(template_state, files.firmware_vars.read_bytes() if vars_bytes else b""))
    return pages.result(), paused_ms


async def _require_forkable(machine: LibvirtMachine, parent: LibvirtSnapshot, *, link: LibvirtLink) -> None:
    """Check that all of a machine's state can be copied. Raises: NotForkable: names what cannot."""
    image = machine.spec.image
    monitor = machine.monitor
    prefix = f"machine {machine.machine_id} cannot be forked in its current state"
    try:
        await link.call(parent.check_intact)
    except TemplateCorrupt as error:
        raise NotForkable(f"{prefix}: {error}") from error
    blocks = await monitor.memory_blocks()
    for name, block_bytes in blocks.items():
        # Firmware, boot loaders and systems without a driver use a virtio card's VGA memory; its driver displays guest
        # memory.
        is_unused = name.replace("vga.vram", "virtio-vga.rom") in blocks.keys() - {name}
        if is_unused and not await monitor.has_driver(VIDEO_ALIAS):
            raise NotForkable(f"{prefix}: no driver of its virtio display runs; install it (Windows: viogpudo)")
        if name not in _COPIED_BLOCKS and block_bytes > _LARGEST_ROM_BYTES and not is_unused:
            raise NotForkable(f"{prefix}: {block_bytes >> 20} MiB of {name} are not part of the guest's memory")
    # A machine whose firmware is not UEFI has no such file, and so no such drive.
    own = {str(path) for path in (*machine.files.disks(len(image.disks)), machine.files.firmware_vars)}
    written, removable = await monitor.drives()
    if stray := sorted((written - own) | (removable - {str(drive.path) for drive in image.cdroms})):
        raise NotForkable(f"{prefix}: it has {stray[0]} in addition to its image's drives")
    if machine.tpm is not None and machine.tpm.has_ended:
        raise NotForkable(f"{prefix}: the process of its TPM (swtpm) has ended")
    try:
        await link.call(_try_reading_memory, machine)
    except OSError as error:
        raise NotForkable(
            f"{prefix}: the memory of its QEMU cannot be read ({error}); run envd as root, or as QEMU's user with"
            " kernel.yama.ptrace_scope=0"
        ) from error


def _try_reading_memory(machine: LibvirtMachine) -> None:
    MemoryMap.of(machine.pid, machine.memory_path).read(np.zeros((0, 2), dtype=np.int64))
    with open(f"/proc/{machine.pid}/pagemap", "rb"):
        pass


def _written_pages(memory: MemoryMap, buffer: Pages | None) -> MemoryPatch:
    extents = memory.private_extents()
    return MemoryPatch(extents=extents, pages=memory.read(extents, into=buffer))


def _store(files: QemuFiles, parent: LibvirtSnapshot, patch: MemoryPatch) -> tuple[str, str]:
    """Create the empty overlay that forks copy; return the digests of the snapshot and of its disk."""
    count = len(parent.spec.image.disks)
    disks = files.disks(count)
    for parent_seed, seed, disk in zip(parent.files.seeds(count), files.seeds(count), disks, strict=True):
        copy_overlay(parent_seed, seed, disk)
    memory = xxhash.xxh3_128(patch.extents.data)
    memory.update(patch.pages.data)
    disk_digest = combined_digest(parent.disk_digest, *map(digest_file, disks))
    others = [files.devices, *([files.firmware_vars] if files.firmware_vars.exists() else [])]
    return combined_digest(parent.digest, memory.hexdigest(), *map(digest_file, others), disk_digest), disk_digest


def _copied_files(machine: LibvirtMachine, files: QemuFiles) -> list[tuple[Path, Path]]:
    """Return (machine's file, snapshot's file) of everything on disk that belongs to its state."""
    image = machine.spec.image
    copied = list(zip(machine.files.disks(len(image.disks)), files.disks(len(image.disks)), strict=True))
    if image.firmware is Firmware.UEFI:
        copied.append((machine.files.firmware_vars, files.firmware_vars))
    return copied


class Freezer:
    """Makes and finds templates. Finding blocks; for the libvirt executor."""

    def __init__(self, store: QemuTemplateStore, *, accelerator: Accelerator, versions: str, cpu: str) -> None:
        """Configure what templates depend on in addition to their image and settings."""
        self._store = store
        self._accelerator = accelerator
        self._versions = versions
        self._cpu = cpu

    def key(self, spec: MachineSpec) -> str:
        """Return the key of a template for such machines.

        It covers the complete domain description, so any change of the virtual hardware changes the key.
        """
        placeholder = Path("/")
        description = domain_xml(
            replace(spec, machine_id="template"),
            owner="",
            files=QemuFiles(directory=placeholder),
            accelerator=self._accelerator,
            memory_path=placeholder,
            generation=UUID(int=0),
            firmware=placeholder,
        )
        changes = [change for change in (spec.trusted_authority, spec.keyboard_layout) if change]
        return combined_digest(description, spec.image.digest, self._versions, self._cpu, *changes)[:16]

    def find(self, spec: MachineSpec) -> LibvirtSnapshot | None:
        """Return the stored template, verified, or None. Raises: TemplateCorrupt."""
        begin_s = time.monotonic()
        stored = self._store.find(self.key(spec))
        return None if stored is None else self._snapshot(spec, stored, begin_s)

    def find_by_key(self, key: str, spec: MachineSpec) -> LibvirtSnapshot:
        """Return a stored template by its key, verified. Raises: HypervisorError: it does not exist or is damaged."""
        begin_s = time.monotonic()
        stored = self._store.find(key)
        if stored is None:
            raise HypervisorError(f"template {key}: not found; it was removed")
        return self._snapshot(spec, stored, begin_s)

    async def freeze(self, machine: LibvirtMachine, notes: dict[str, str], *, link: LibvirtLink) -> LibvirtSnapshot:
        """Store a paused machine as a template; ends its QEMU.

        Raises:
            HypervisorError, libvirt.libvirtError, OSError: Nothing was stored.
        """
        begin_s = time.monotonic()
        spec = machine.spec
        key = self.key(spec)
        files = await link.call(self._store.begin, key)
        try:
            await machine.monitor.save_state(files.devices)
            stored = await link.call(self._store_machine, machine, files, key, notes)
        except BaseException:
            await link.call(self._store.remove, key)
            raise
        return self._snapshot(spec, stored, begin_s)

    def _store_machine(
        self, machine: LibvirtMachine, files: QemuFiles, key: str, notes: dict[str, str]
    ) -> SnapshotManifest:
        spec = machine.spec
        memory_path = self._store.memory_file(key)
        machine.domain.destroy()
        moved = _copied_files(machine, files)
        for source, target in moved:
            shutil.move(source, target)
            # Forks are backed by it, and it may belong to QEMU's user.
            os.chown(target, os.geteuid(), os.getegid(), follow_symlinks=False)
        machine.memory_path.rename(memory_path)
        disk_count = len(spec.image.disks)
        for seed, disk in zip(files.seeds(disk_count), files.disks(disk_count), strict=True):
            create_overlay(seed, disk, "qcow2")
        manifest = SnapshotManifest(
            key=key,
            image=spec.image.name,
            image_digest=spec.image.digest,
            memory_mib=spec.memory_mib,
            vcpu_count=spec.vcpu_count,
            screen=f"{spec.screen_width_px}x{spec.screen_height_px}",
            accelerator=self._accelerator.value,
            hypervisor=self._versions,
            memory_path=str(memory_path),
            memory_digest=digest_file(memory_path),
            devices_digest=digest_file(files.devices),
            disk_digest=digest_file(files.disk),
            more_digests={target.name: digest_file(target) for _, target in moved[1:]},
            create_time=datetime.now(UTC).isoformat(timespec="seconds"),
            notes=notes,
        )
        self._store.complete(files, manifest)
        return manifest

    def _snapshot(self, spec: MachineSpec, manifest: SnapshotManifest, begin_s: float) -> LibvirtSnapshot:
        took_ms = (time.monotonic() - begin_s) * 1000
        return LibvirtSnapshot(
            files=self._store.files_of(manifest),
            spec=spec,
            digest=manifest.digest,
            disk_digest=combined_digest(spec.image.digest, *manifest.disk_digests),
            memory_path=Path(manifest.memory_path),
            report=CaptureReport(memory_bytes=spec.memory_mib << 20, paused_ms=took_ms, total_ms=took_ms),
            notes=manifest.notes,
        )


def state_prefix(template_state: Path, firmware_vars: bytes) -> bytes:
    """Return what a captured state lacks, header included, so that it loads like a template's.

    QEMU saves a template by migration. Its stream begins with a header and the machine's configuration, and includes
    memory that is not a shared file, such as the UEFI variables. The state of a captured machine
    (`xen-save-devices-state`) has neither; the devices follow. Formats: QEMU's docs/devel/migration.rst,
    migration/savevm.c and migration/ram.c.

    Args:
        template_state: State of the template, whose machines have the same configuration.
        firmware_vars: UEFI variables at the capture; empty for other firmware.
    """
    with template_state.open("rb") as file:
        head = file.read(_PAGE_BYTES)
    try:
        configuration = head[: _configuration_end(head)]
    except (IndexError, struct.error, ValueError) as error:
        raise HypervisorError(f"state {template_state}: not the state of a template: {error}") from error
    return configuration + (_memory_section(_FIRMWARE_VARS, firmware_vars) if firmware_vars else b"")


def _configuration_end(head: bytes) -> int:
    if head[:4] != _MAGIC or head[HEADER_BYTES] != _CONFIGURATION:
        raise ValueError("it does not begin with a configuration")
    at = HEADER_BYTES + 5 + int.from_bytes(head[HEADER_BYTES + 1 : HEADER_BYTES + 5])
    while head[at] == _SUBSECTION:
        name = head[at + 2 : at + 2 + head[at + 1]]
        at += 2 + len(name) + 4
        match name:
            case b"configuration/capabilities":
                (count,) = struct.unpack_from(">I", head, at)
                at += 4
                for _ in range(count):
                    at += 1 + head[at]
            case b"configuration/target-page-bits":
                at += 4
            case _:
                raise ValueError(f"unknown part {name!r}")
    return at


def _memory_section(block: bytes, content: bytes) -> bytes:
    """Return a section with the whole content of one memory block."""
    parts = [bytes([_SECTION_FULL]), struct.pack(">IB", 0, 3), b"ram", struct.pack(">II", 0, _RAM_VERSION)]
    for offset in range(0, len(content), _PAGE_BYTES):
        parts.append(struct.pack(">QB", offset | _RAM_PAGE, len(block)) + block)
        parts.append(content[offset : offset + _PAGE_BYTES])
    return b"".join([*parts, struct.pack(">Q", _RAM_END), struct.pack(">BI", _FOOTER, 0)])


async def load_state(machine: LibvirtMachine, snapshot: LibvirtSnapshot, *, link: LibvirtLink) -> None:
    """Load a snapshot's state into a machine that has none yet. On failure the machine cannot be used.

    Such a machine has mapped its template's memory and opened its overlay on the template's disk, so it can load the
    state of the template or of any capture that descends from it. What a capture needs in addition is put in first: the
    pages that differ, and the captured disks between overlay and template. QEMU activates the disks, and reads the
    overlay's header again, when it has loaded the devices (block.c, `bdrv_activate`).
    """
    waiting = machine.snapshot
    if waiting is None or machine.is_loaded or waiting.template.ref != snapshot.template.ref:
        raise HypervisorError(f"machine {machine.machine_id}: not waiting for a state of {snapshot!r}")
    patch = snapshot.patch
    if patch is None and snapshot.captures:
        raise HypervisorError(f"machine {machine.machine_id}: {snapshot!r} has no pages: it was discarded")
    await machine.set_snapshot(snapshot)
    if patch is not None:
        await asyncio.gather(
            link.call(_write_pages, machine, patch), _set_backing(machine, snapshot.captures, link=link)
        )
    await machine.monitor.load(snapshot.files.devices)
    await link.call(write_record, machine.files.directory, ForkRecord(spec=machine.spec, backing=snapshot.ref))
    machine.is_loaded = True


def _write_pages(machine: LibvirtMachine, patch: MemoryPatch) -> None:
    MemoryMap.of(machine.pid, machine.memory_path).write(patch.extents, patch.pages)


async def _set_backing(machine: LibvirtMachine, captures: Sequence[LibvirtSnapshot], *, link: LibvirtLink) -> None:
    arguments = await link.call(lambda: command_line(machine.pid))
    monitor = machine.monitor
    overlays = machine.files.disks(len(machine.spec.image.disks))
    for index, overlay in enumerate(overlays):
        disks: list[Path] = [capture.files.disks(len(overlays))[index] for capture in captures]
        await link.call(set_backing_file, overlay, disks[-1])
        await monitor.set_backing(overlay_node(arguments, overlay), disks)
