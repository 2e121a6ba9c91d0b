"""Files with secrets: refused if other users can read them, and reloaded when they change.

If a file becomes invalid while the daemon runs, its last valid content stays in use; a log line and a metric report it.
"""

import logging
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from envd.base.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Files of tokens, certificates and keys are smaller.
MAX_BYTES = 1 << 20

#: `stat` fields that change with the file's content; None if the file does not exist.
_Stamp = tuple[int, ...] | None


def read_file(path: Path, *, setting: str) -> bytes:
    """Return the content of a file. Raises: ConfigError: it cannot be read, or is too large."""
    return _read(path, setting=setting, is_secret=False)


def read_secret(path: Path, *, setting: str) -> bytes:
    """Return the content of a file that only its owner can write and only its owner and group can read.

    Raises:
        ConfigError: It cannot be read, is too large, or is not private.
    """
    return _read(path, setting=setting, is_secret=True)


def _read(path: Path, *, setting: str, is_secret: bool) -> bytes:
    try:
        with path.open("rb") as file:
            # fstat, not stat: check the same file that is read, even if the path is replaced.
            status = os.fstat(file.fileno())
            problem = _exposure(status) if is_secret else ""
            if problem:
                raise ConfigError(f"{setting}: {path} {problem}; run: chmod 600 {path}")
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{setting}: {path} is larger than {MAX_BYTES} bytes")
    return content


def _exposure(status: os.stat_result) -> str:
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o007 or mode & 0o020:
        return f"has mode {mode:04o}, which lets other users read it or its group change it"
    if status.st_uid not in {0, os.geteuid()}:
        return f"is owned by user {status.st_uid}, not by envd's own user or root"
    return ""


class Reloaded(Generic[T]):
    """A value parsed from files, reloaded when they change."""

    def __init__(
        self, setting: str, paths: Sequence[Path], read: Callable[[], T], *, on_stale: Callable[[bool], None]
    ) -> None:
        """Read the files for the first time.

        Args:
            on_stale: Called after each change with whether an older value is still in use.

        Raises:
            ConfigError: The files are invalid.
        """
        self._setting = setting
        self._paths = tuple(paths)
        self._read = read
        self._on_stale = on_stale
        # Before reading, so that a change in between is detected.
        self._stamps = self._stat()
        self._value = read()
        on_stale(False)

    def get(self) -> T:
        """Return the value of the newest valid files. Costs one `stat` per file."""
        stamps = self._stat()
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                self._value = self._read()
            except ConfigError as error:
                logger.error("%s; the previous content stays in use", error)  # noqa: TRY400 -- not a bug
                self._on_stale(True)
            else:
                logger.info("%s: reloaded after a change", self._setting)
                self._on_stale(False)
        return self._value

    def _stat(self) -> tuple[_Stamp, ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
