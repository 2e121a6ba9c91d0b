"""Templates stored on this host: found by key, verified before use, limited in size.

Each has a directory named by its key. Its manifest is written last; a directory without one is not a template. Several
daemons may share the directory: one of them boots a template, all fork from the same files. Locks, which the kernel
releases when a daemon ends for any reason, say who boots a template and who uses it. Memory
files may be stored elsewhere, on a tmpfs: they then cause no disk I/O but are lost when the host restarts, and a
template without its memory file is removed when it is looked up.
"""

import asyncio
import fcntl
import logging
import os
import shutil
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from envd.base.errors import TemplateCorrupt
from envd.hypervisor.qemu.snapshots.files import (
    QemuFiles,
    SnapshotManifest,
    disk_usage_bytes,
    read_manifest,
    verify,
    write_manifest,
)

logger = logging.getLogger(__name__)

#: Directories of other hypervisors, whose daemons may share the directory of the templates.
_OF_OTHERS = frozenset({"containers"})

#: How often a daemon looks whether another one has booted the template that both need.
_BOOT_POLL_S = 0.1


class QemuTemplateStore:
    """Templates in one directory, which several daemons may share, each with a `memory_dir` of its own."""

    def __init__(self, directory: Path, *, memory_dir: Path | None = None, limit_bytes: int) -> None:
        """Create missing directories.

        Args:
            memory_dir: Directory of this daemon's memory files; None for one within `directory`.
            limit_bytes: Most disk space of all templates together. The newest is kept even if it is larger.
        """
        self.directory = directory
        self.memory_dir = memory_dir or directory / "memory"
        self._limit_bytes = limit_bytes
        self._used: dict[str, int] = {}
        """File descriptors of the shared locks on the templates that this daemon has used, by key."""
        self._locks_dir = directory / "locks"
        self._locks_dir.mkdir(parents=True, exist_ok=True)
        self.memory_dir.mkdir(parents=True, exist_ok=True)

    def memory_file(self, name: str) -> Path:
        """Return the path of the memory file of a machine that may become a template, or of a template."""
        return self.memory_dir / f"{name}.ram"

    @asynccontextmanager
    async def booting(self, key: str) -> AsyncIterator[None]:
        """Hold while a template is looked up and, if there is none, made: no other daemon does so at the same time."""
        file = self._open_lock(f"{key}.boot")
        try:
            if not _try_lock(file, fcntl.LOCK_EX):
                logger.info("template %s: waiting for another daemon, which makes it", key)
                while not _try_lock(file, fcntl.LOCK_EX):  # noqa: ASYNC110 -- another process unlocks it
                    await asyncio.sleep(_BOOT_POLL_S)
            yield
        finally:
            os.close(file)

    def begin(self, key: str) -> QemuFiles:
        """Return an empty directory for a new template. Raises: OSError."""
        self.remove(key)
        files = QemuFiles(directory=self.directory / key)
        files.directory.mkdir()
        return files

    def files_of(self, manifest: SnapshotManifest) -> QemuFiles:
        return QemuFiles(directory=self.directory / manifest.key)

    def complete(self, files: QemuFiles, manifest: SnapshotManifest) -> None:
        """Complete a template whose other files are written, and prune others to the limit. Raises: OSError."""
        self._use(manifest.key)
        write_manifest(files, manifest)
        self.prune()

    def find(self, key: str) -> SnapshotManifest | None:
        """Return a template, verified, or None. Raises: TemplateCorrupt: it is damaged and has been removed."""
        files = QemuFiles(directory=self.directory / key)
        self._use(key)
        if not files.manifest.exists():
            self._release(key)
            return None
        try:
            manifest = read_manifest(files)
            if not Path(manifest.memory_path).exists():
                logger.info("template %s: removed: its memory file does not exist, as after a restart of the host", key)
                self.remove(key)
                return None
            verify(files, manifest)
        except TemplateCorrupt:
            self.remove(key)
            raise
        os.utime(files.manifest)
        return manifest

    def all(self) -> Iterator[SnapshotManifest]:
        """Yield every complete template, the least recently used first. Unreadable ones are logged and skipped."""
        found: list[SnapshotManifest] = []
        for directory in self.directory.iterdir():
            files = QemuFiles(directory=directory)
            if not files.manifest.exists():
                continue
            try:
                manifest = read_manifest(files)
            except TemplateCorrupt as error:
                logger.warning("%s", error)
                continue
            size_bytes, use_time_s = disk_usage_bytes(*manifest.paths(files)), files.manifest.stat().st_mtime
            found.append(manifest.model_copy(update={"size_bytes": size_bytes, "use_time_s": use_time_s}))
        yield from sorted(found, key=lambda template: template.use_time_s)

    def prune(self, *, limit_bytes: int | None = None) -> list[str]:
        """Remove the least recently used templates until the others fit; returns the removed keys.

        Templates that a live daemon has used stay.
        """
        limit_bytes = self._limit_bytes if limit_bytes is None else limit_bytes
        templates = list(self.all())
        total_bytes = sum(template.size_bytes for template in templates)
        removed = []
        for template in templates:
            if total_bytes <= limit_bytes:
                break
            if self._remove_unused(template.key):
                total_bytes -= template.size_bytes
                removed.append(template.key)
        return removed

    def remove(self, key: str) -> None:
        """Remove a template, if it exists, even if it is in use: it is damaged, or replaced."""
        files = QemuFiles(directory=self.directory / key)
        try:
            Path(read_manifest(files).memory_path).unlink(missing_ok=True)
        except TemplateCorrupt:
            self.memory_file(key).unlink(missing_ok=True)
        shutil.rmtree(files.directory, ignore_errors=True)
        self._release(key)

    def close(self) -> None:
        """Release the templates that this daemon has used."""
        for key in list(self._used):
            self._release(key)

    def sweep(self) -> None:
        """Remove incomplete templates left by killed daemons, and this daemon's memory files without a template."""
        others = {self.directory / name for name in _OF_OTHERS}
        kept = {
            self.directory / "memory",
            self._locks_dir,
            *others,
            *(self.files_of(template).directory for template in self.all()),
        }
        memories = {Path(template.memory_path) for template in self.all()}
        for directory in self.directory.iterdir():
            if directory not in kept:
                self._remove_abandoned(directory)
        for memory in self.memory_dir.glob("*.ram"):
            if memory not in memories:
                memory.unlink(missing_ok=True)

    def stray_memories(self, machine_ids: Collection[str]) -> list[Path]:
        """Return memory files that belong to no template and to none of these machines."""
        known = {Path(template.memory_path) for template in self.all()}
        known |= {self.memory_file(name) for name in machine_ids}
        return [memory for memory in self.memory_dir.glob("*.ram") if memory not in known]

    def _open_lock(self, name: str) -> int:
        # The file stays: without it two daemons could hold locks on two files of the same name.
        return os.open(self._locks_dir / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _use(self, key: str) -> None:
        """Keep a template from being pruned until `_release`, or until this process ends."""
        if key not in self._used:
            self._used[key] = self._open_lock(key)
            # Waits at most for the removal of one template.
            fcntl.flock(self._used[key], fcntl.LOCK_SH)

    def _release(self, key: str) -> None:
        if key in self._used:
            os.close(self._used.pop(key))

    def _remove_unused(self, key: str) -> bool:
        """Remove a template unless a daemon uses it; return whether it was removed."""
        if key in self._used:
            return False
        file = self._open_lock(key)
        try:
            if not _try_lock(file, fcntl.LOCK_EX):
                return False
            self.remove(key)
            return True
        finally:
            os.close(file)

    def _remove_abandoned(self, directory: Path) -> None:
        """Remove an incomplete template unless a daemon is writing it."""
        file = self._open_lock(f"{directory.name}.boot")
        try:
            if _try_lock(file, fcntl.LOCK_EX) and not QemuFiles(directory=directory).manifest.exists():
                shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(file)


def _try_lock(file: int, kind: int) -> bool:
    """Lock an open file unless another process has a lock that excludes it; return whether it is locked."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
