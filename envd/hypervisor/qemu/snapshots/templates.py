"""Templates stored on this host: found by key, verified before use, limited in size.

Each has a directory named by its key. Its manifest is written last; a directory without one is not a template. Memory
files may be stored elsewhere, on a tmpfs: they then cause no disk I/O but are lost when the host restarts, and a
template without its memory file is removed when it is looked up.
"""

import logging
import os
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from envd.base.errors import TemplateCorrupt
from envd.hypervisor.qemu.snapshots.files import (
    Manifest,
    SnapshotFiles,
    disk_usage_bytes,
    read_manifest,
    verify,
    write_manifest,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTemplate:
    """One template on disk."""

    files: SnapshotFiles
    manifest: Manifest
    size_bytes: int
    use_time_s: float
    """Time of its last use, in seconds since 1970."""


class TemplateStore:
    """Templates in one directory, used by one daemon at a time. `envd image templates list` may read concurrently."""

    def __init__(self, directory: Path, *, memory_dir: Path | None = None, limit_bytes: int) -> None:
        """Create missing directories.

        Args:
            directory: Directory of the templates.
            memory_dir: Directory of their memory files; None for one within `directory`.
            limit_bytes: Most disk space of all templates together. The newest is kept even if it is larger.
        """
        self.directory = directory
        self.memory_dir = memory_dir or directory / "memory"
        self._limit_bytes = limit_bytes
        self._used: set[str] = set()
        directory.mkdir(parents=True, exist_ok=True)
        self.memory_dir.mkdir(parents=True, exist_ok=True)

    def memory_file(self, name: str) -> Path:
        """Return the path of the memory file of a machine that may become a template, or of a template."""
        return self.memory_dir / f"{name}.ram"

    def begin(self, key: str) -> SnapshotFiles:
        """Return an empty directory for a new template. Raises: OSError."""
        self.remove(key)
        files = SnapshotFiles(directory=self.directory / key)
        files.directory.mkdir()
        return files

    def complete(self, files: SnapshotFiles, manifest: Manifest) -> StoredTemplate:
        """Complete a template whose other files are written, and prune others to the limit. Raises: OSError."""
        write_manifest(files, manifest)
        self._used.add(manifest.key)
        self.prune()
        return self._stored(files, manifest)

    def find(self, key: str) -> StoredTemplate | None:
        """Return a template, verified, or None. Raises: TemplateCorrupt: it is damaged and has been removed."""
        files = SnapshotFiles(directory=self.directory / key)
        if not files.manifest.exists():
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
        self._used.add(key)
        os.utime(files.manifest)
        return self._stored(files, manifest)

    def all(self) -> Iterator[StoredTemplate]:
        """Yield every complete template, the least recently used first. Unreadable ones are logged and skipped."""
        found = []
        for directory in self.directory.iterdir():
            files = SnapshotFiles(directory=directory)
            if not files.manifest.exists():
                continue
            try:
                found.append(self._stored(files, read_manifest(files)))
            except TemplateCorrupt as error:
                logger.warning("%s", error)
        yield from sorted(found, key=lambda template: template.use_time_s)

    def prune(self, *, limit_bytes: int | None = None) -> list[str]:
        """Remove the least recently used templates until the others fit; returns the removed keys.

        Templates that this process has used stay.
        """
        limit_bytes = self._limit_bytes if limit_bytes is None else limit_bytes
        templates = list(self.all())
        total_bytes = sum(template.size_bytes for template in templates)
        removed = []
        for template in templates:
            if total_bytes <= limit_bytes:
                break
            if template.manifest.key not in self._used:
                self.remove(template.manifest.key)
                total_bytes -= template.size_bytes
                removed.append(template.manifest.key)
        return removed

    def remove(self, key: str) -> None:
        """Remove a template, if it exists."""
        files = SnapshotFiles(directory=self.directory / key)
        try:
            Path(read_manifest(files).memory_path).unlink(missing_ok=True)
        except TemplateCorrupt:
            self.memory_file(key).unlink(missing_ok=True)
        shutil.rmtree(files.directory, ignore_errors=True)
        self._used.discard(key)

    def sweep(self) -> None:
        """Remove incomplete templates left by a killed daemon."""
        kept = {self.directory / "memory", *(template.files.directory for template in self.all())}
        memories = {Path(template.manifest.memory_path) for template in self.all()}
        for directory in self.directory.iterdir():
            if directory not in kept:
                shutil.rmtree(directory, ignore_errors=True)
        for memory in self.memory_dir.glob("*.ram"):
            if memory not in memories:
                memory.unlink(missing_ok=True)

    def stray_memories(self, machine_ids: Collection[str]) -> list[Path]:
        """Return memory files that belong to no template and to none of these machines."""
        known = {Path(template.manifest.memory_path) for template in self.all()}
        known |= {self.memory_file(name) for name in machine_ids}
        return [memory for memory in self.memory_dir.glob("*.ram") if memory not in known]

    @staticmethod
    def _stored(files: SnapshotFiles, manifest: Manifest) -> StoredTemplate:
        return StoredTemplate(
            files=files,
            manifest=manifest,
            size_bytes=disk_usage_bytes(*manifest.paths(files)),
            use_time_s=files.manifest.stat().st_mtime,
        )
