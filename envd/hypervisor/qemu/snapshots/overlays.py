"""qcow2 overlays: created once with qemu-img, then copied, which takes a fortieth of the time and no fsync.

qemu-img ends with an fsync, which on a busy file system waits for everything written before it: up to 1.5 s was
measured for an overlay of 200 KiB.
"""

import errno
import os
import struct
import subprocess
from pathlib import Path

from envd.base.errors import HypervisorError

#: docs/interop/qcow2.txt: magic, version, then the offset (64 bits) and length (32 bits) of the backing file's name.
_MAGIC = b"QFI\xfb"
_NAME_AT = 8
_CLUSTER_BITS_AT = 20
_LONGEST_NAME = 1023
_CHUNK_BYTES = 1 << 20


def create_overlay(path: Path, base: Path, base_format: str) -> None:
    """Create an empty qcow2 overlay. Raises: HypervisorError: qemu-img failed."""
    command = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(base), "-F", base_format, str(path)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode != 0:
        message = done.stderr.decode(errors="replace").strip()
        raise HypervisorError(f"overlay {path}: qemu-img could not create it: {message}")


def set_backing_file(overlay: Path, backing: Path) -> None:
    """Change the backing file of an overlay made by qemu-img to one of the same size and format.

    Raises:
        HypervisorError: It is not such an overlay, or the name is too long.
    """
    name = os.fsencode(backing)
    with overlay.open("r+b") as file:
        head = file.read(24)
        if len(head) < 24 or head[:4] != _MAGIC:
            raise HypervisorError(f"overlay {overlay}: not a qcow2 file")
        offset, _length = struct.unpack_from(">QI", head, _NAME_AT)
        (cluster_bits,) = struct.unpack_from(">I", head, _CLUSTER_BITS_AT)
        # The name comes last in the first cluster, so a longer one overwrites nothing.
        if not offset or len(name) > _LONGEST_NAME or offset + len(name) > 1 << cluster_bits:
            raise HypervisorError(f"overlay {overlay}: no space for the name of backing file {backing}")
        file.seek(offset)
        file.write(name)
        file.seek(_NAME_AT + 8)
        file.write(struct.pack(">I", len(name)))


def copy_overlay(seed: Path, overlay: Path, backing: Path) -> None:
    """Copy an empty overlay onto a disk that it may name by another path, such as a directory that was moved.

    QEMU describes a disk by more than its path if its backing file is not the one that its header names.

    Raises:
        OSError: See `copy_file`.
        HypervisorError: See `set_backing_file`.
    """
    copy_file(seed, overlay)
    set_backing_file(overlay, backing)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file, also to another file system: shares its blocks if the kernel can, else keeps its holes.

    Does not follow a symbolic link: QEMU, possibly compromised, can replace a machine's disk by one. Raises: OSError.
    """
    with (
        os.fdopen(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as read,
        target.open("xb") as write,
    ):
        size = os.fstat(read.fileno()).st_size
        os.truncate(write.fileno(), size)
        at = 0
        while at < size:
            try:
                begin = os.lseek(read.fileno(), at, os.SEEK_DATA)
            except OSError:  # ENXIO: only a hole follows.
                return
            at = os.lseek(read.fileno(), begin, os.SEEK_HOLE)
            while begin < at:
                begin += _copy_range(read.fileno(), write.fileno(), at - begin, at=begin)


def _copy_range(source: int, target: int, length: int, *, at: int) -> int:
    """Copy at least one byte to the same offset; return the number of bytes copied."""
    try:
        return os.copy_file_range(source, target, length, at, at)
    except OSError as error:
        # Kernels before 5.3 copy within one file system only, later ones between some kinds (copy_file_range(2)).
        if error.errno not in {errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS}:
            raise
        return os.pwrite(target, os.pread(source, min(length, _CHUNK_BYTES), at), at)
