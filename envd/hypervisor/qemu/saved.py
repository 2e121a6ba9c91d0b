"""Stores captured machines in files that a later daemon restores: compressed, and independent of other captures.

A capture's memory pages differ from the template's memory file and its devices are complete, so neither depends on
other captures. Its disks may: they are merged down to the template's, so loading takes equally long at any depth.
"""

import secrets
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import numpy as np
import zstandard
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cuaenv.problems import without_path
from envd.base.errors import CheckpointCorrupt, HypervisorError
from envd.base.tools import run_tool
from envd.hypervisor.machine import Firmware
from envd.hypervisor.qemu.capture import captured_snapshot
from envd.hypervisor.qemu.snapshots.files import (
    SnapshotFiles,
    copy_file,
    copy_overlay,
    disk_size_bytes,
    require_like,
    set_backing_file,
)
from envd.hypervisor.qemu.snapshots.pages import size_bytes
from envd.hypervisor.qemu.snapshots.snapshot import CaptureRecord, LibvirtSnapshot, MemoryPatch, write_record

#: Half of the time of level 1 for a third more bytes; a checkpoint waits for this more than for the disk.
_LEVEL = -5
_CHUNK_BYTES = 1 << 20
_COUNT = struct.Struct("<Q")
_LEAST_PAGE_BYTES = 4096
#: More than devices, with their video memory, or UEFI variables take.
_MAX_STATE_BYTES = 1 << 30
_MAX_DESCRIPTION_BYTES = 4096
_STATE = "state.json"
_MEMORY = "memory.zst"


class _State(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: Annotated[str, Field(max_length=128)]
    disk_digest: Annotated[str, Field(max_length=128)]


def save(snapshot: LibvirtSnapshot, directory: Path) -> None:
    """Write a capture's state. Blocks. Raises: OSError; HypervisorError: it is not a capture, or qemu-img failed."""
    if snapshot.patch is None:
        raise HypervisorError(f"{snapshot!r} has no pages in memory, so it cannot be stored")
    extents = snapshot.patch.extents
    with (directory / _MEMORY).open("xb") as file, zstandard.ZstdCompressor(_LEVEL).stream_writer(file) as packed:
        packed.write(_COUNT.pack(len(extents)))
        packed.write(extents.tobytes())
        packed.write(snapshot.patch.pages.data)
    for source in _whole_files(snapshot, snapshot.files):
        _pack(source, directory / f"{source.name}.zst")
    template_disks = snapshot.template.files.disks(len(snapshot.spec.image.disks))
    for disk, template_disk in zip(snapshot.files.disks(len(template_disks)), template_disks, strict=True):
        if len(snapshot.captures) == 1:
            _pack(disk, directory / f"{disk.name}.zst")
            continue
        merged = directory / disk.name
        copy_file(disk, merged)
        _merge(merged, template_disk)
        _pack(merged, directory / f"{disk.name}.zst")
        merged.unlink()
    state = _State(digest=snapshot.digest, disk_digest=snapshot.disk_digest)
    (directory / _STATE).write_text(state.model_dump_json())


def restore(template: LibvirtSnapshot, directory: Path, captures_dir: Path) -> LibvirtSnapshot:
    """Return the capture that `save` stored, with files of its own among this daemon's captures. Blocks."""
    files = SnapshotFiles(directory=captures_dir / secrets.token_hex(6))
    files.directory.mkdir(parents=True)
    try:
        with (directory / _STATE).open("rb") as file:
            state = _State.model_validate_json(file.read(_MAX_DESCRIPTION_BYTES))
        patch = _read_memory(directory / _MEMORY, template.spec.memory_mib << 20)
        disks = files.disks(len(template.spec.image.disks))
        for target in _whole_files(template, files):
            _unpack(directory / f"{target.name}.zst", target, max_bytes=_MAX_STATE_BYTES)
        backing, seeds = template.files.disks(len(disks)), files.seeds(len(disks))
        for disk, base, seed, origin in zip(disks, backing, seeds, template.files.seeds(len(disks)), strict=True):
            # Refcounts and tables take less than an eighth.
            largest_bytes = disk_size_bytes(origin) * 9 // 8 + _MAX_STATE_BYTES
            _unpack(directory / f"{disk.name}.zst", disk, max_bytes=largest_bytes)
            require_like(disk, origin)
            set_backing_file(disk, base)
            copy_overlay(origin, seed, disk)
        record = CaptureRecord(
            spec=template.spec, digest=state.digest, disk_digest=state.disk_digest, backing=template.ref
        )
        write_record(files.directory, record)
        return captured_snapshot(files, record, template, patch=patch)
    except BaseException as error:
        shutil.rmtree(files.directory, ignore_errors=True)
        if isinstance(error, ValidationError | zstandard.ZstdError | ValueError | struct.error):
            raise CheckpointCorrupt(
                f"checkpoint {directory.name}: its state cannot be read ({without_path(error)}); delete the checkpoint"
            ) from error
        if isinstance(error, OSError):
            raise HypervisorError(f"checkpoint {directory.name}: its state cannot be restored: {error}") from error
        raise


def _whole_files(snapshot: LibvirtSnapshot, files: SnapshotFiles) -> tuple[Path, ...]:
    """Return the files that do not depend on others: the devices' state, and the UEFI variables if there are any."""
    has_vars = snapshot.spec.image.firmware is Firmware.UEFI
    return (files.devices, files.firmware_vars) if has_vars else (files.devices,)


def _read_memory(path: Path, memory_bytes: int) -> MemoryPatch:
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as packed:
        (count,) = _COUNT.unpack(packed.read(_COUNT.size))
        if count > memory_bytes // _LEAST_PAGE_BYTES:
            raise ValueError(f"{count} extents")
        extents = np.frombuffer(packed.read(count * 16), dtype=np.int64).reshape(count, 2)
        length = size_bytes(extents)
        # Each on its own first: a sum of two may overflow.
        is_outside = (extents < 0).any() or (extents > memory_bytes).any() or (extents.sum(axis=1) > memory_bytes).any()
        if is_outside or length > memory_bytes:
            raise ValueError(f"{length} bytes of memory outside of {memory_bytes}")
        pages = np.empty(length, dtype=np.uint8)
        view, at = pages.data, 0
        while got := packed.readinto(view[at : at + _CHUNK_BYTES]):
            at += got
        if at != length or packed.read(1):
            raise ValueError(f"{at} bytes of memory, expected {length}")
    return MemoryPatch(extents=extents, pages=pages)


def _pack(source: Path, target: Path) -> None:
    with source.open("rb") as read, target.open("xb") as write:
        zstandard.ZstdCompressor(_LEVEL).copy_stream(read, write)


def _unpack(source: Path, target: Path, *, max_bytes: int) -> None:
    """Decompress a file, keeping runs of zeros as holes. Raises: ValueError: it has more than `max_bytes`."""
    length = 0
    with source.open("rb") as read, target.open("xb") as write:
        for chunk in _chunks(read):
            length += len(chunk)
            if length > max_bytes:
                raise ValueError(f"{source.name} has more than {max_bytes} bytes")
            if chunk.count(0) == len(chunk):
                write.seek(len(chunk), 1)
            else:
                write.write(chunk)
        write.truncate()


def _chunks(read: object) -> Iterable[bytes]:
    with zstandard.ZstdDecompressor().stream_reader(read) as packed:  # type: ignore[arg-type]
        while chunk := packed.read(_CHUNK_BYTES):
            yield chunk


def _merge(disk: Path, base: Path) -> None:
    """Merge the disks between `disk` and `base` into `disk`. Raises: HypervisorError."""
    command = ["qemu-img", "rebase", "-q", "-f", "qcow2", "-F", "qcow2", "-b", str(base), str(disk)]
    run_tool(command, what=f"disk {disk}: qemu-img rebase", error=HypervisorError)
