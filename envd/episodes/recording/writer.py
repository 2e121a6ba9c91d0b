"""Append records to the files of a directory, within its size limit. Blocks: runs in one thread.

The oldest complete recordings are dropped first. A file that is being written is never dropped.
"""

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from envd.episodes.recording.records import MAGIC, Kind, RecordingUnreadable, packed_json, read_records, trailer

logger = logging.getLogger(__name__)

SUFFIX = ".rec"


class RecordingDirectory:
    """The directory of all recordings of a daemon."""

    def __init__(self, path: Path, *, limit_bytes: int, min_free_bytes: int) -> None:
        """Take a directory, which is created when first needed.

        Args:
            limit_bytes: Most bytes of all recordings.
            min_free_bytes: Space that stays free on its disk: an episode that finds a full disk is lost.
        """
        self.path = path
        self._limit_bytes = limit_bytes
        self._min_free_bytes = min_free_bytes
        self._total_bytes: int | None = None
        self._open: set[Path] = set()

    def open(self, episode_id: str, meta: bytes) -> "RecordingFile":
        """Begin a recording with its META record, or continue one of an earlier daemon. Raises: OSError."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self.path / f"{episode_id}{SUFFIX}"
        self._open.add(path)
        try:
            recording = RecordingFile(self, path)
            recording.append(meta)
        except BaseException:
            self._open.discard(path)
            raise
        return recording

    def make_room(self, size: int) -> None:
        """Drop old recordings until `size` more bytes fit. Raises: OSError: they cannot."""
        if self._total_bytes is None:
            self._total_bytes = sum(_size(path) for path in self.path.glob(f"*{SUFFIX}"))
        if self._total_bytes + size > self._limit_bytes:
            self._drop(self._total_bytes + size - self._limit_bytes)
        if self._total_bytes + size > self._limit_bytes:
            raise OSError(errno.EDQUOT, "the running recordings alone reach recording.limit_gib")
        if shutil.disk_usage(self.path).free - size < self._min_free_bytes:
            raise OSError(errno.ENOSPC, "its disk has less than recording.min_free_gib left")
        self._total_bytes += size

    def closed(self, path: Path) -> None:
        """Allow a file to be dropped."""
        self._open.discard(path)

    def _drop(self, size: int) -> None:
        """Delete the oldest recordings of at least `size` bytes in all, and some more: not one at each write."""
        size += self._limit_bytes // 50
        oldest = sorted(self.path.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
        for path in oldest:
            if size <= 0:
                return
            if path in self._open:
                continue
            freed = _size(path)
            path.unlink(missing_ok=True)
            logger.info("recording %s: dropped for newer ones, %d bytes", path.stem, freed)
            size -= freed
            self._total_bytes = (self._total_bytes or 0) - freed


class RecordingFile:
    """One recording that is being written."""

    def __init__(self, directory: RecordingDirectory, path: Path) -> None:
        self._directory = directory
        self._path = path
        self._file: BinaryIO = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
        try:
            self._continue()
        except BaseException:
            self._file.close()
            raise

    def append(self, records: bytes) -> None:
        """Append records. Raises: OSError: they may be there in part, which readers notice."""
        self._directory.make_room(len(records))
        written = 0
        while written < len(records):
            written += self._file.write(records[written:]) or 0

    def finish(self, time_s: float, end: dict[str, object]) -> None:
        """Append the END record and close the file. Raises: OSError."""
        position = self._file.seek(0, os.SEEK_END)
        self.append(packed_json(Kind.END, time_s, end) + trailer(position))
        self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()
        self._directory.closed(self._path)

    def _continue(self) -> None:
        """Cut off what a crash left of the last record; write the first bytes of a new file."""
        end = 0
        try:
            for record in read_records(self._file, name=self._path.stem):
                end = record.end
        except RecordingUnreadable:
            pass  # new, or damaged from the start
        self._file.truncate(end)
        self._file.seek(end)
        if end == 0:
            self.append(MAGIC)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
