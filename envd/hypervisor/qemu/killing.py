"""Kills a QEMU process such that libvirt notices without a delay.

libvirt notices that QEMU has ended when its monitor connection ends, and then sends QEMU a signal. As long as the
process can still be signalled, which is until its parent has collected it, libvirt sleeps for 200 ms before it tries
again (virprocess.c, `virProcessKillPainfullyDelay`). So the connections are kept open until it has been collected.
"""

import ctypes
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: The same number on all architectures (pidfd_getfd(2), Linux 5.6).
_SYS_PIDFD_GETFD = 438
#: A killed process needs time to free its memory.
_KILL_TIMEOUT_S = 10.0
#: A parent that does not collect it within this time may never do so.
_COLLECT_TIMEOUT_S = 0.1
_POLL_S = 0.001
_PF_EXITING = 0x4


@contextmanager
def killed(pid: int, pid_handle: int) -> Iterator[bool]:
    """Kill a process and keep its sockets open during the block; yields whether it has ended.

    Without the right to trace the process, its sockets are closed at once.

    Args:
        pid: Its id.
        pid_handle: Its pidfd, which also protects against another process with the same id.
    """
    sockets = _open_sockets(pid, pid_handle)
    try:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pid_handle, signal.SIGKILL)
        has_ended = process_ended(pid_handle, within_s=_KILL_TIMEOUT_S)
        if has_ended:
            _wait_collected(pid_handle)
        yield has_ended
    finally:
        for copy in sockets:
            os.close(copy)


def process_ended(pid_handle: int, *, within_s: float) -> bool:
    """Wait until a process has ended; return whether it has."""
    # The handle is readable once the process has ended; its files are closed a moment earlier.
    watch = select.poll()
    watch.register(pid_handle, select.POLLIN)
    return bool(watch.poll(within_s * 1000))


def process_exits(pid: int) -> bool:
    """Return whether a process has begun to exit. On a busy host its end follows seconds after its sockets closed."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return True
    # The name, in parentheses, may hold spaces. See proc(5) for the flags, and PF_EXITING in Linux's sched.h.
    return bool(int(stat.rpartition(")")[2].split()[6]) & _PF_EXITING)


def _wait_collected(pid_handle: int) -> None:
    deadline_s = time.monotonic() + _COLLECT_TIMEOUT_S
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline_s:
            signal.pidfd_send_signal(pid_handle, 0)
            time.sleep(_POLL_S)


def _open_sockets(pid: int, pid_handle: int) -> list[int]:
    """Return copies of a process's sockets; empty without the right to trace it."""
    libc = ctypes.CDLL(None, use_errno=True)
    copies = []
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # Closed since.
                if os.readlink(entry).startswith("socket:"):
                    copy = libc.syscall(_SYS_PIDFD_GETFD, pid_handle, int(entry.name), 0)
                    if copy >= 0:
                        copies.append(copy)
    return copies
