"""One daemon per state directory: a lock that the kernel releases when its holder ends for any reason."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from envd.base.errors import ConfigError

_NAME = "lock"


@contextmanager
def locked(state_dir: Path) -> Iterator[None]:
    """Lock `state_dir` against other daemons; creates it if needed.

    Raises:
        ConfigError: Another daemon holds the lock, or the directory cannot be created.
    """
    try:
        # Sockets of guests are below: others may traverse it (libvirt's QEMU user must), but not list it.
        state_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        file = os.open(state_dir / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        reason = "not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise ConfigError(f"state_dir {state_dir}: {reason}; choose another with --state-dir") from error
    try:
        try:
            while not _try_lock(file, fcntl.LOCK_EX):
                # `holder` shares the lock for an instant. A daemon does not share it.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                fcntl.flock(file, fcntl.LOCK_UN)
                time.sleep(0.001)
        except BlockingIOError as error:
            pid = os.read(file, 32).decode("ascii", "replace").strip() or "unknown"
            raise ConfigError(
                f"state_dir {state_dir} is in use by envd, process {pid}; stop it, or choose another with --state-dir"
            ) from error
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode("ascii"), 0)
        yield
    finally:
        # The file stays: without it two daemons could hold locks on two files of the same name.
        os.close(file)


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder(state_dir: Path) -> int | None:
    """Return the process id of the daemon that holds the lock of `state_dir`, or None."""
    try:
        file = os.open(state_dir / _NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if _try_lock(file, fcntl.LOCK_SH):
            return None
        text = os.read(file, 32).decode("ascii", "replace").strip()
        return int(text) if text.isdigit() else None
    finally:
        os.close(file)
