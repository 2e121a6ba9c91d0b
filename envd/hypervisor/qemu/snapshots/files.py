"""Files of a frozen machine: paths, manifest, digests, verification against the manifest, and qcow2 overlays.

Digests are xxh3-128: they detect a damaged disk and distinguish states, but do not protect against someone who can
write to the state directory.
"""

import errno
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envd.base.errors import HypervisorError, TemplateCorrupt
from envd.base.tools import run_tool

_CHUNK_BYTES = 1 << 20
MANIFEST_FORMAT = 1
#: docs/interop/qcow2.txt: magic, version, then the offset (64 bits) and length (32 bits) of the backing file's name.
_MAGIC = b"QFI\xfb"
_NAME_AT = 8
_CLUSTER_BITS_AT = 20
_LONGEST_NAME = 1023
_SIZE_AT = 24
_CRYPT_AT = 32
_FEATURES_AT = 72
_HEADER_BYTES = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class QemuFiles:
    """Paths of one machine's own files, while it runs or once it is frozen."""

    directory: Path

    @property
    def disk(self) -> Path:
        """Its disk: a qcow2 overlay, which is never written again once it is frozen."""
        return self.directory / "disk.qcow2"

    def disks(self, count: int) -> tuple[Path, ...]:
        """Its writable disks, in the order of the image's: `disk`, then the additional ones."""
        return (self.disk, *(self.directory / f"disk{index}.qcow2" for index in range(1, count)))

    @property
    def firmware_vars(self) -> Path:
        """Its own copy of the UEFI variables, if the image boots by UEFI."""
        return self.directory / "vars.fd"

    # While it runs

    @property
    def display_socket(self) -> Path:
        """QEMU's RFB server."""
        return self.directory / "vnc.sock"

    @property
    def agent_socket(self) -> Path:
        """Host end of the guest agent's channel."""
        return self.directory / "agent.sock"

    @property
    def monitor_socket(self) -> Path:
        """QEMU's second monitor, used by envd; libvirt uses the first."""
        return self.directory / "qmp.sock"

    @property
    def console_log(self) -> Path:
        """Output of the guest's serial console."""
        return self.directory / "console.log"

    @property
    def tpm_socket(self) -> Path:
        return self.directory / "tpm.sock"

    @property
    def tpm_state(self) -> Path:
        """State of the machine's TPM, written by swtpm after each change."""
        return self.directory / "tpm" / "tpm2-00.permall"

    # Once it is frozen

    @property
    def manifest(self) -> Path:
        """Describes the rest. Written last: without it the template is incomplete."""
        return self.directory / "snapshot.json"

    @property
    def devices(self) -> Path:
        """The devices' state, in the format of QEMU's migration stream."""
        return self.directory / "devices"

    @property
    def seed(self) -> Path:
        """An empty overlay on `disk`. Copied for each fork, about 20 times as fast as running qemu-img."""
        return self.directory / "overlay.qcow2"

    def seeds(self, count: int) -> tuple[Path, ...]:
        """An empty overlay on each of `disks`."""
        return (self.seed, *(self.directory / f"overlay{index}.qcow2" for index in range(1, count)))


class SnapshotManifest(BaseModel):
    """Description of a stored template. One with unknown or missing fields is corrupt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = MANIFEST_FORMAT
    key: str
    """Digest of everything that the template depends on: image, settings, QEMU, processor."""
    image: str
    image_digest: str
    memory_mib: int
    vcpu_count: int
    screen: str
    """WIDTHxHEIGHT in pixels."""
    accelerator: str
    hypervisor: str
    """Versions of libvirt and QEMU."""
    memory_path: str
    memory_digest: str
    devices_digest: str
    disk_digest: str
    more_digests: dict[str, str] = {}
    """Digests of additional disks and of the UEFI variables, by file name."""
    create_time: str
    """ISO 8601, UTC."""
    notes: dict[str, str]
    size_bytes: Annotated[int, Field(exclude=True)] = 0
    """Disk space of its files. This and its last use are not in the file; lists of templates have them."""
    use_time_s: Annotated[float, Field(exclude=True)] = 0.0
    """Time of its last use, in seconds since 1970."""

    @property
    def digest(self) -> str:
        """Identifies the frozen machine, independent of its paths."""
        parts = (self.key, self.memory_digest, self.devices_digest, self.disk_digest)
        return combined_digest(*parts, *self.more_digests.values())

    @property
    def disk_digests(self) -> tuple[str, ...]:
        """Digests of the disks alone."""
        disks = (digest for name, digest in self.more_digests.items() if name.startswith("disk"))
        return (self.disk_digest, *disks)

    def paths(self, files: QemuFiles) -> tuple[Path, ...]:
        """The template's files, without the manifest."""
        more = tuple(files.directory / name for name in self.more_digests)
        return (Path(self.memory_path), files.devices, files.disk, *more, *files.seeds(len(self.disk_digests)))


def read_manifest(files: QemuFiles) -> SnapshotManifest:
    """Read the manifest. Raises: TemplateCorrupt: it is missing or invalid."""
    try:
        return SnapshotManifest.model_validate_json(files.manifest.read_bytes())
    except (OSError, ValidationError) as error:
        raise TemplateCorrupt(f"template {files.directory}: its manifest cannot be read: {error}") from error


def write_manifest(files: QemuFiles, manifest: SnapshotManifest) -> None:
    """Write the manifest, atomically; the template is then complete. Raises: OSError."""
    partial = files.manifest.with_suffix(".part")
    partial.write_text(json.dumps(manifest.model_dump(), indent=1) + "\n")
    partial.replace(files.manifest)


def verify(files: QemuFiles, manifest: SnapshotManifest) -> None:
    """Check every file against the manifest. Raises: TemplateCorrupt: names the file and the problem."""
    digests = {
        Path(manifest.memory_path): manifest.memory_digest,
        files.devices: manifest.devices_digest,
        files.disk: manifest.disk_digest,
        **{files.directory / name: digest for name, digest in manifest.more_digests.items()},
    }
    for path in manifest.paths(files):
        # A seed is an empty overlay, so it has no digest.
        if path not in digests and not path.exists():
            raise TemplateCorrupt(f"template {files.directory}: {path} does not exist")
    for path, digest in digests.items():
        try:
            found = digest_file(path)
        except OSError as error:
            raise TemplateCorrupt(f"template {files.directory}: {path} cannot be read: {error}") from error
        if found != digest:
            raise TemplateCorrupt(f"template {files.directory}: {path.name} has digest {found}, expected {digest}")


def digest_file(path: Path) -> str:
    """Return the xxh3-128 of a file's content, 32 hex digits. A hole has the digest of zeros. Raises: OSError."""
    state = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        state.update(size.to_bytes(8, "little"))
        buffer = np.empty(_CHUNK_BYTES, dtype=np.uint8)
        at = _next_data(file.fileno(), 0, size)
        while at < size:
            at -= at % _CHUNK_BYTES
            length = os.preadv(file.fileno(), [buffer.data], at)
            if buffer[:length].any():
                state.update(at.to_bytes(8, "little"))
                state.update(buffer[:length].data)
            at = _next_data(file.fileno(), at + _CHUNK_BYTES, size)
    return state.hexdigest()


def combined_digest(*parts: str) -> str:
    return xxhash.xxh3_128_hexdigest("\0".join(parts).encode())


def disk_usage_bytes(*paths: Path) -> int:
    """Return the disk space that files use; missing files count as 0."""
    total = 0
    for path in paths:
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def _next_data(descriptor: int, at: int, size: int) -> int:
    """Return the offset of the next byte outside a hole; `size` if there is none."""
    if at >= size:
        return size
    try:
        return os.lseek(descriptor, at, os.SEEK_DATA)
    except OSError:  # ENXIO: only a hole follows.
        return size


def create_overlay(path: Path, base: Path, base_format: str) -> None:
    """Create an empty qcow2 overlay.

    Overlays are created once and then copied, which takes a fortieth of the time: qemu-img ends with an fsync, which on
    a busy file system waits for everything written before it. Up to 1.5 s was measured for an overlay of 200 KiB.
    """
    command = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(base), "-F", base_format, str(path)]
    run_tool(command, what=f"overlay {path}: qemu-img create", error=HypervisorError)


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


def disk_size_bytes(overlay: Path) -> int:
    """Return the size of the disk that an overlay made by qemu-img shows to a guest. Raises: OSError."""
    (size,) = struct.unpack_from(">Q", _header(overlay), _SIZE_AT)
    return int(size)


def require_like(overlay: Path, seed: Path) -> None:
    """Check that an overlay of unknown origin has the size, the encryption and the features of one made by qemu-img.

    One with other features can name an external data file: any file of the host, which the guest would then read.

    Raises:
        OSError: It cannot be read.
        ValueError: It is another kind of file.
    """
    found, expected = _header(overlay), _header(seed)
    for start, end in ((0, _NAME_AT), (_SIZE_AT, _CRYPT_AT + 4), (_FEATURES_AT, _FEATURES_AT + 8)):
        if found[start:end] != expected[start:end]:
            raise ValueError(f"{overlay.name} is not an overlay like the template's: header differs at byte {start}")


def _header(overlay: Path) -> bytes:
    with overlay.open("rb") as file:
        return file.read(_HEADER_BYTES).ljust(_HEADER_BYTES, b"\0")


def copy_overlay(seed: Path, overlay: Path, backing: Path) -> None:
    """Copy an empty overlay onto a disk that it may name by another path, such as a directory that was moved.

    QEMU describes a disk by more than its path if its backing file is not the one that its header names.
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
