"""QEMU and swtpm processes: how to find them in /proc by their mark, measure them, kill them and collect them.

What finds and measures reads /proc alone, so that benchmarks and tests can verify pools and machines from outside.
"""

import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from envd.hypervisor.machine import MachineUsage

#: The same number on all architectures (pidfd_getfd(2), Linux 5.6).
_SYS_PIDFD_GETFD = 438
#: A killed process needs time to free its memory.
_KILL_TIMEOUT_S = 10.0
#: A parent that does not collect it within this time may never do so.
_COLLECT_TIMEOUT_S = 0.1
_POLL_S = 0.001
_PF_EXITING = 0x4
_PR_SET_CHILD_SUBREAPER = 36
#: How long another part of this process may take to collect a child of its own before the next look.
_PAUSE_S = 0.05
#: The next look while there are no children; a machine's start takes longer.
_IDLE_S = 1.0
#: A program that we started leaves orphans that look like our own children; their parent collects those sooner.
_LINGER_S = 60.0


def owner_of(state_dir: Path) -> str:
    """Return the owner id that marks everything made for a state directory. Raises: FileNotFoundError: never used."""
    return (state_dir / "owner").read_text().strip()


def marked_processes(owner: str) -> dict[int, str]:
    """Return {process id: machine id} of the QEMU processes that have an owner's mark in their command line."""
    return _find(f"guest=envd-{owner}-")


def tpm_processes(owner: str) -> dict[int, str]:
    """Return {process id: machine id} of the swtpm processes that have an owner's mark in their command line."""
    return _find(tpm_mark(owner))


def tpm_mark(owner: str, machine_id: str = "") -> str:
    """Return the mark of a machine's swtpm process, a part of one of its arguments."""
    return f"prefix=envd-{owner}-{machine_id}"


def _find(mark: str) -> dict[int, str]:
    """Return {process id: rest of the argument up to a comma} of the processes with `mark` in an argument."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue  # It has ended since.
        for argument in arguments:
            _, is_marked, rest = argument.partition(mark.encode())
            if is_marked:
                found[int(entry.name)] = rest.partition(b",")[0].decode()
    return found


def machine_pids(state_dir: Path) -> dict[str, int]:
    """Return {machine id: QEMU's process id} of a state directory's machines; empty if no daemon ever used it."""
    try:
        owner = owner_of(state_dir)
    except FileNotFoundError:
        return {}
    return {machine_id: pid for pid, machine_id in marked_processes(owner).items()}


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process, the program first. Raises: OSError: it has ended."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")


def memory_of(pid: int) -> MachineUsage:
    """Measure a process (proc(5), smaps_rollup). Raises: OSError: it has ended."""
    lines = (line.partition(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    kib = {name: int(rest.split()[0]) for name, _, rest in lines}
    return MachineUsage(pss_bytes=kib["Pss"] << 10, private_dirty_bytes=kib["Private_Dirty"] << 10)


def written_guest_bytes(pid: int) -> int:
    """Return how much of its guest's memory a fork has written. Raises: OSError: the process has ended.

    Written pages of its private mapping of the template's memory file are anonymous; all others are still the file's.
    """
    paths = {
        option.removeprefix("mem-path=").replace("\0", ",")
        for argument in command_line(pid)
        if argument.startswith("memory-backend-file,")
        for option in argument.replace(",,", "\0").split(",")
        if option.startswith("mem-path=")
    }
    total_kib, is_guest = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):  # A mapping's first line: addresses first, path last.
            is_guest = line.split(maxsplit=5)[-1] in paths
        elif is_guest and name == "Anonymous:":
            total_kib += int(rest.split()[0])
    return total_kib << 10


@contextmanager
def killed(pid: int, pid_handle: int) -> Iterator[bool]:
    """Kill a process and keep its sockets open during the block; yields whether it has ended.

    libvirt notices that QEMU has ended when its monitor connection ends, and then sends QEMU a signal. As long as the
    process can still be signalled, which is until its parent has collected it, libvirt sleeps for 200 ms before it
    tries again (virprocess.c, `virProcessKillPainfullyDelay`). So the sockets stay open until it has been collected.

    Without the right to trace the process, its sockets are closed at once.

    Args:
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


@lru_cache(maxsize=1)
def collect_orphans() -> None:
    """Adopt and collect all orphans from now on, in a thread. Calls after the first change nothing.

    libvirt starts QEMU as a daemon, so process 1 would have to collect it, and libvirt counts a process as running
    until then. Process 1 of a container collects late or never: 1.6 s a machine on one host. As a subreaper (prctl(2))
    this process is the parent instead, and collects at once.

    Raises:
        OSError: The kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    threading.Thread(target=_collect_all, name="orphans", daemon=True).start()


def _collect_all() -> None:
    seen: dict[int, float] = {}
    while True:
        try:
            # Returns at once while any child has ended and is not collected.
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            time.sleep(_IDLE_S)
            continue
        ended = _ended_children()
        now_s = time.monotonic()
        seen = {pid: seen.get(pid, now_s) for pid in ended}
        for pid, is_daemon in ended.items():
            if is_daemon or now_s - seen[pid] > _LINGER_S:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        if not all(ended.values()) or not ended:
            time.sleep(_PAUSE_S)


def _ended_children() -> dict[int, bool]:
    """Return {process id: whether it is a daemon} of the children that have ended.

    The leader of a daemon's session is the process in between, which has ended. A child that this process started is
    in our session or leads its own.
    """
    ended = {}
    for listed in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # The thread has ended.
            for pid in map(int, listed.read_text().split()):
                with suppress(OSError):  # It was collected.
                    # The name before the last ")" may contain anything.
                    state, *_, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
                    if state == "Z":
                        ended[pid] = int(session) not in {pid, os.getsid(0)}
    return ended
