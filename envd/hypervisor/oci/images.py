"""The file systems of images as directories, which containers share: unpacked from an image's disk when first needed.

```text
<cache>/images/<name>/<digest16>/container-<user ids>/    complete, never changed
                                 .container-<user ids>/   being unpacked, or removed
```
Its files belong to the users of the containers, so each user of the host who runs a daemon has a copy.
"""

import asyncio
import fcntl
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Final

from envd.base.errors import HypervisorError
from envd.base.tools import run_tool
from envd.hypervisor.machine import DiskImage, Firmware, GuestOs
from envd.hypervisor.oci.ids import IdMap, name_of, own_ids
from envd.hypervisor.oci.namespace import Namespace, owner_of_files

logger = logging.getLogger(__name__)

#: Name of the directory of images in the namespace.
IMAGES: Final = "images"
_UNPACK_TIMEOUT_S: Final = 900.0
#: Where Debian has debugfs, and an ordinary user's PATH does not look.
_SYSTEM_PROGRAMS: Final = "/usr/sbin:/sbin"
#: An image with it lets the session's user become the container's root.
SUDO: Final = "sudo"
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
    return image.disk.parent / unpacked_directory_name(ids)


def unpacked_directory_name(ids: IdMap) -> str:
    return f"container-{ids.name}"


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
        self._used: dict[Path, int] = {}
        """Locks on the unpacked images that this daemon has used."""

    async def directory(self, image: DiskImage) -> PurePosixPath:
        """Return the directory of an image's file system, as a path of the namespace; unpack it if there is none.

        Raises:
            HypervisorError: Containers cannot run it, or it could not be unpacked.
        """
        if problem := obstacle(image) or unpacking_obstacle(image, self._ids):
            raise HypervisorError(problem)
        unpacked = unpacked_directory(image, self._ids)
        try:
            if unpacked not in self._used:
                used = await asyncio.to_thread(lock, _used_file(unpacked), fcntl.LOCK_SH)
                if self._used.setdefault(unpacked, used) != used:
                    os.close(used)  # another pool was faster
            if not unpacked.is_dir():
                await self._unpack(image, unpacked)
        except OSError as error:
            raise HypervisorError(f"image {image.name}: could not be unpacked for containers: {error}") from error
        return self._inside(unpacked)

    def kept(self, images: Iterable[DiskImage]) -> set[str]:
        """Return the names of the directories of these images, and of those that are current under their names."""
        current = {link.resolve().name for link in self._root.glob("*/current")}
        return current | {image.disk.parent.resolve().name for image in images}

    async def prune(self, images: Iterable[DiskImage]) -> None:
        """Remove the unpacked files of images that neither are among these nor current under their names.

        Those that a daemon uses stay. Never raises: what cannot be removed is logged.
        """
        kept = self.kept(images)
        name = unpacked_directory_name(self._ids)
        for path in [path for each in (name, f".{name}", f".{name}.raw") for path in self._root.glob(f"*/*/{each}")]:
            if path.parent.name in kept or path.parent.is_symlink():
                continue
            try:
                await self._remove_unused(path.with_name(name))
            except (OSError, HypervisorError) as error:
                logger.warning("%s: could not be removed: %s", path, error)

    async def _remove_unused(self, unpacked: Path) -> None:
        """Remove an image's unpacked files, complete or not, unless a daemon uses or unpacks them."""
        partial = unpacked.with_name(f".{unpacked.name}")
        locks: list[int] = []
        try:
            for file in (_used_file(unpacked), _unpacking_file(unpacked)):
                locks.append(lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB))
            unpacked.with_name(f".{unpacked.name}.raw").unlink(missing_ok=True)
            for path in (partial, unpacked):
                if path.is_dir():
                    if path == unpacked:
                        path.rename(partial)
                    await self._namespace.call("empty", path=str(self._inside(partial)))
                    partial.rmdir()
            logger.info("removed %s, which no image in use needs", unpacked)
        except BlockingIOError:
            return
        finally:
            for file_descriptor in locks:
                os.close(file_descriptor)

    def close(self) -> None:
        """Let others remove the images that this daemon has used."""
        while self._used:
            os.close(self._used.popitem()[1])

    def _inside(self, path: Path) -> PurePosixPath:
        return Namespace.inside(IMAGES) / path.resolve().relative_to(self._root.resolve())

    async def _unpack(self, image: DiskImage, unpacked: Path) -> None:
        partial = unpacked.with_name(f".{unpacked.name}")
        raw = unpacked.with_name(f".{unpacked.name}.raw")
        # Another daemon, or another pool of this one, may be unpacking it.
        unpacking = await asyncio.to_thread(lock, _unpacking_file(unpacked), fcntl.LOCK_EX)
        try:
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
            await self._namespace.call("run", argv=[*command], timeout_s=_UNPACK_TIMEOUT_S)
            if not os.path.lexists(partial / "usr/bin/Xtigervnc"):
                raise HypervisorError(f"image {image.name}: its disk could not be read; build or import it again")
            if has_package(image, SUDO):
                # debugfs changes the owner last, which clears the bit.
                program = str(self._inside(partial) / "usr/bin/sudo")
                await self._namespace.call("run", argv=["chmod", "u+s", program], timeout_s=_UNPACK_TIMEOUT_S)
            partial.rename(unpacked)
        finally:
            raw.unlink(missing_ok=True)
            os.close(unpacking)


async def remove_unpacked(root: Path, directory: Path) -> None:
    """Remove what is unpacked below a directory of images, whose files an ordinary user could not remove.

    Raises: ConfigError, HypervisorError, OSError.
    """
    if not os.geteuid():
        return  # root can remove every file
    candidates = (*directory.glob("*container-*"), *directory.glob("*/*container-*"))
    found = {path.resolve() for path in candidates if path.is_dir()}
    if not found:
        return
    namespace = await Namespace.open({IMAGES: root.resolve()}, ids=own_ids())
    try:
        for path in found:
            await namespace.call("empty", path=str(Namespace.inside(IMAGES) / path.relative_to(root.resolve())))
    finally:
        await namespace.aclose()


def lock(file: Path, kind: int) -> int:
    """Create and lock a file; return its descriptor, which holds the lock. Raises: OSError; BlockingIOError."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _used_file(unpacked: Path) -> Path:
    return unpacked.with_name(f".{unpacked.name}.used")


def _unpacking_file(unpacked: Path) -> Path:
    return unpacked.with_name(f".{unpacked.name}.lock")
