"""The file systems of images as directories, which containers share: unpacked from an image's disk when first needed.

```text
<cache>/images/<name>/<digest16>/container-<user ids>/    complete, never changed
```
Its files belong to the users of the containers, so each user of the host who runs a daemon has a copy.
"""

import asyncio
import fcntl
import logging
import os
import shutil
from pathlib import Path, PurePosixPath
from typing import Final

from envd.base.errors import HypervisorError
from envd.base.tools import run_tool
from envd.hypervisor.machine import DiskImage, Firmware, GuestOs
from envd.hypervisor.oci.ids import IdMap, name_of
from envd.hypervisor.oci.namespace import Namespace, owner_of_files

logger = logging.getLogger(__name__)

#: Name of the directory of images in the namespace.
IMAGES: Final = "images"
_UNPACK_TIMEOUT_S: Final = 900.0
#: Where Debian has debugfs, and an ordinary user's PATH does not look.
_SYSTEM_PROGRAMS: Final = "/usr/sbin:/sbin"
_X_SERVER: Final = "tigervnc-standalone-server"


def obstacle(image: DiskImage) -> str:
    """Return why containers cannot run an image; empty if they can."""
    if image.os is not GuestOs.LINUX:
        return f"image {image.name}: its guests run {image.os.value}, which a container cannot; use QEMU, the default"
    if image.firmware is Firmware.NONE:
        return ""  # examined when it was imported
    if image.firmware is not Firmware.DIRECT_KERNEL or not image.has_guestd:
        return f"image {image.name}: an imported disk cannot run as a container; use QEMU, the default"
    if not has_package(image, _X_SERVER):
        return (
            f"image {image.name}: it has no {_X_SERVER}, because an earlier version of envd built it; run"
            f" `envd image build {image.name}`"
        )
    return ""


def has_package(image: DiskImage, name: str) -> bool:
    """Return whether a package of Debian is installed in an image."""
    return name in {line.partition(" ")[0] for line in image.packages.splitlines()}


def find_debugfs() -> str:
    """Return the path of debugfs. Raises: HypervisorError: it is not installed."""
    debugfs = shutil.which("debugfs", path=f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_PROGRAMS}")
    if debugfs is None:
        raise HypervisorError("unpacking an image needs debugfs; install the package e2fsprogs")
    return debugfs


def unpacked_directory(image: DiskImage, ids: IdMap) -> Path:
    """Return the directory of an image's files for containers with these user ids, which may not exist yet."""
    return image.disk.parent / f"container-{ids.name}"


def unpacking_obstacle(image: DiskImage, ids: IdMap) -> str:
    """Return why an image's files cannot be unpacked by this user; empty if they can, or are unpacked."""
    directory = image.disk.parent
    if unpacked_directory(image, ids).is_dir():
        return ""
    if not os.access(directory, os.W_OK):
        user = name_of(os.geteuid())
        return (
            f"image {image.name}: {directory} belongs to {name_of(directory.stat().st_uid)}, so {user} cannot unpack it"
            f" there; run `sudo chown {user} {directory}`, or build or import it with a --cache-dir of your own"
        )
    if image.firmware is not Firmware.NONE:
        try:
            find_debugfs()
        except HypervisorError as error:
            return f"image {image.name}: {error}"
    return ""


class ImageFiles:
    """Unpacked images of one daemon."""

    def __init__(self, root: Path, *, ids: IdMap, namespace: Namespace) -> None:
        """Use the images below `root`, which the namespace knows as `IMAGES`."""
        self._root = root
        self._ids = ids
        self._namespace = namespace

    async def directory(self, image: DiskImage) -> PurePosixPath:
        """Return the directory of an image's file system, as a path of the namespace; unpack it if there is none.

        Raises:
            HypervisorError: Containers cannot run it, or it could not be unpacked.
        """
        if problem := obstacle(image) or unpacking_obstacle(image, self._ids):
            raise HypervisorError(problem)
        unpacked = unpacked_directory(image, self._ids)
        try:
            if not unpacked.is_dir():
                await self._unpack(image, unpacked)
        except OSError as error:
            raise HypervisorError(f"image {image.name}: could not be unpacked for containers: {error}") from error
        return self._inside(unpacked)

    def _inside(self, path: Path) -> PurePosixPath:
        return Namespace.inside(IMAGES) / path.resolve().relative_to(self._root.resolve())

    async def _unpack(self, image: DiskImage, unpacked: Path) -> None:
        partial = unpacked.with_name(f".{unpacked.name}")
        raw = unpacked.with_name(f".{unpacked.name}.raw")
        lock = os.open(unpacked.with_name(f".{unpacked.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Another daemon, or another pool of this one, may be unpacking it.
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
            if unpacked.is_dir():
                return
            logger.info("image %s: unpacking its file system for containers", image.name)
            if partial.exists():
                await self._namespace.call("empty", path=str(self._inside(partial)))
            partial.mkdir(exist_ok=True)
            os.chown(partial, *owner_of_files(self._ids))
            # Both programs give each file its owner, as the containers' root.
            if image.firmware is Firmware.NONE:
                command = ["tar", "--extract", "--numeric-owner", "--same-owner", "--preserve-permissions"]
                command += [f"--file={self._inside(image.disk)}", f"--directory={self._inside(partial)}"]
            else:
                # Reads the disk without mounting it.
                command = [find_debugfs(), "-R", f"rdump / {self._inside(partial)}", str(self._inside(raw))]
                convert = ["qemu-img", "convert", "-f", image.disk_format, "-O", "raw", str(image.disk), str(raw)]
                await asyncio.to_thread(run_tool, convert, what=f"unpacking image {image.name}", error=HypervisorError)
                raw.chmod(0o644)
            await self._namespace.call("run", argv=command, timeout_s=_UNPACK_TIMEOUT_S)
            if not os.path.lexists(partial / "usr/bin/Xtigervnc"):
                raise HypervisorError(f"image {image.name}: its disk could not be read; build or import it again")
            partial.rename(unpacked)
        finally:
            raw.unlink(missing_ok=True)
            os.close(lock)
