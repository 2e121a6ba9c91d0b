"""Control groups that limit memory and processors of a job's processes together. Linux and standard library only.

```text
<hierarchy>/envd-evaluations-<random>   of one program; it holds a lock of it as long as it lives
  /0, /1, ...                           each of one job at a time, with its limits
```
Version 1 and 2, wherever this process may create a group: below its own, or (version 2, where a group with processes
usually cannot have limited groups below it) below the root of the hierarchy, where systemd leaves such groups alone.
Elsewhere a job has only the limits of each of its processes. Version 1 limits memory only.
"""

import ctypes
import fcntl
import os
import signal
import struct
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

_PREFIX = "envd-evaluations-"
_CPU_PERIOD_US = 100_000
#: The file of version 2 that limits a group's memory.
_V2_LIMIT = "memory.max"
_CONTROLLERS = ("memory", "cpu")
#: A group to which more than this part of its limit is charged after its job is not used again. Files that a job read
#: first are charged to it, but can be freed; so this is reached only by what no longer belongs to a process.
_REUSED_SHARE = 1 / 8
_POLL_S = 0.02
#: clone3(2), and its flag, from Linux's headers. glibc has no function for it.
_CLONE3, _CLONE_INTO_CGROUP = 435, 0x2_0000_0000
#: Keeps the interpreter's lock during a call, as os.fork does.
_libc = ctypes.PyDLL(None)


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A directory in which groups with memory limits can be created."""

    directory: str
    limit_file: str
    """The file of a group that limits its memory."""
    limits_cpu: bool = False
    """Whether groups limit processors too."""

    @property
    def is_version_2(self) -> bool:
        return self.limit_file == _V2_LIMIT


class JobGroups:
    """The groups of one program's jobs, which later jobs use again.

    To create or remove a group takes locks of the whole host. When each job had a new group directly below the root, 24
    daemons on 64 processors had 2,500 processes waiting for these locks, and a score took 6 to 12 s.

    Args:
        memory_bytes: Limit of all processes and files of a job.
        cpus: Processors of a job, where the hierarchy limits them.

    Raises:
        OSError: The kernel refused a step; no group is left.
    """

    def __init__(self, hierarchy: Hierarchy, *, memory_bytes: int, cpus: int) -> None:
        self._hierarchy = hierarchy
        self._memory_bytes = memory_bytes
        self._cpus = cpus
        self._created_count = 0
        #: The one that has been free for the longest comes first: the kernel has finished with its last job.
        self._free: deque[ControlGroup] = deque()
        self._discarded: list[ControlGroup] = []
        self._create_directory()

    def take(self) -> "ControlGroup":
        """Return a group without processes for a job, created if none is free.

        Raises:
            OSError: The kernel refused to create one.
        """
        while self._free:
            group = self._free.popleft()
            if group.is_clean():
                return group
            group.kill()
            self._discarded.append(group)
        self._discarded = [group for group in self._discarded if not group.remove()]
        if not os.path.exists(self._directory):
            # Another program of the host may remove groups without processes.
            lock = self._lock
            self._create_directory()
            os.close(lock)
        path = f"{self._directory}/{self._created_count}"
        self._created_count += 1
        return ControlGroup(path, self._hierarchy, memory_bytes=self._memory_bytes, cpus=self._cpus)

    def put_back(self, group: "ControlGroup") -> None:
        """Keep the group of an ended job for a later one."""
        self._free.append(group)

    def unlock(self) -> None:
        """Close the lock's descriptor. A child that is not to hold the lock, nor hand it to a job, calls it first."""
        os.close(self._lock)

    def close(self) -> None:
        """Remove all groups, except those that still have processes, which the next program of this host removes."""
        _remove(self._directory)
        self.unlock()

    def _create_directory(self) -> None:
        self._directory, self._lock = _locked_directory(self._hierarchy.directory)
        if self._hierarchy.is_version_2:
            # Groups below have no state of the other controllers, of which each has some for every processor.
            enable_controllers(self._directory, _CONTROLLERS)


class ControlGroup:
    """A control group with limits of memory and, where the hierarchy has them, of processors.

    Its methods need the host's files.

    Raises:
        OSError: The kernel refused a step; no group is left.
    """

    def __init__(self, path: str, hierarchy: Hierarchy, *, memory_bytes: int, cpus: int) -> None:
        self.path = path
        self._is_version_2 = hierarchy.is_version_2
        self._most_left_bytes = int(memory_bytes * _REUSED_SHARE)
        self._is_inside = False
        os.mkdir(path)
        try:
            self._write(hierarchy.limit_file, str(memory_bytes))
        except OSError:
            self.remove()
            raise
        # Files of some configurations only: no swap besides, and a group that is out of memory is killed whole.
        for file, text in (
            ("memory.memsw.limit_in_bytes", str(memory_bytes)),
            ("memory.swap.max", "0"),
            ("memory.oom.group", "1"),
            ("cpu.max", f"{cpus * _CPU_PERIOD_US} {_CPU_PERIOD_US}"),
        ):
            with suppress(OSError):
                self._write(file, text)

    def fork(self) -> int:
        """Fork this process, which has one thread, like os.fork. The child calls `enter` first.

        A child that enters a group by `cgroup.procs` waits for all forks of the host that are under way, and often for
        a grace period of the kernel (7 ms), while no process of the host can fork or end. In version 2 the child is
        created in the group; in version 1 its only thread moves by `tasks`, which needs no such lock (0.05 ms).
        """
        if not self._is_version_2:
            return os.fork()
        group = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            pid = _fork_into(group)
        finally:
            os.close(group)
        if pid < 0:  # an older kernel, or a container whose seccomp filter refuses it
            return os.fork()
        self._is_inside = pid == 0
        return pid

    def enter(self) -> None:
        """Move this child of `fork` into the group unless it is there. Its future children are there too."""
        if not self._is_inside:
            self._write("cgroup.procs" if self._is_version_2 else "tasks", "0")

    def is_clean(self) -> bool:
        """Whether a job's processes have ended, and what they had in memory is no longer charged to the group."""
        # Another program may have removed it.
        with suppress(OSError):
            if self._is_version_2:
                is_empty, usage_file = "populated 0" in self._read("cgroup.events"), "memory.current"
            else:
                is_empty, usage_file = not self._read("tasks"), "memory.usage_in_bytes"
            return is_empty and int(self._read(usage_file)) <= self._most_left_bytes
        return False

    def kill(self) -> None:
        """Kill the processes of the group, by a file that version 1 and kernels before 5.14 do not have."""
        with suppress(OSError):
            self._write("cgroup.kill", "1")

    def remove(self) -> bool:
        """Remove the group, unless it has processes; return whether it is gone."""
        with suppress(OSError):
            os.rmdir(self.path)
        return not os.path.exists(self.path)

    def _read(self, file: str) -> str:
        return Path(self.path, file).read_text(encoding="ascii")

    def _write(self, file: str, text: str) -> None:
        write_file(f"{self.path}/{file}", text)


def _fork_into(group: int) -> int:
    """Fork this process into an open group; returns like os.fork, or -1 if the kernel refuses.

    The C library's handlers of pthread_atfork(3) do not run: they guard the locks of other threads, and there are none.
    """
    # struct clone_args: flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid,
    # set_tid_size, cgroup.
    arguments = struct.pack("11Q", _CLONE_INTO_CGROUP, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, group)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = _libc.syscall(ctypes.c_long(_CLONE3), arguments, ctypes.c_size_t(len(arguments)))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return pid


def find_hierarchy() -> Hierarchy | None:
    """Return the hierarchy for this process's jobs; None if it can create no group. Removes leftovers first."""
    remove_leftovers()
    for hierarchy in _candidates():
        with suppress(OSError):
            if hierarchy.is_version_2:
                enable_controllers(hierarchy.directory, _CONTROLLERS)
            if (found := _tried(hierarchy)) is not None:
                return found
    return None


def remove_leftovers(patience_s: float = 0.0) -> None:
    """Remove the groups of programs that were killed. Blocks for `patience_s` at most while their last jobs end."""
    deadline = time.monotonic() + patience_s
    for hierarchy in _candidates():
        while not _removed_unlocked(hierarchy.directory) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def shortcoming(hierarchy: Hierarchy | None) -> str:
    """Return what groups of a hierarchy do not limit; empty if nothing."""
    if hierarchy is None:
        return "memory and processors are limited per process only (no writable control group)"
    return "" if hierarchy.limits_cpu else "processors are limited per process only (no cpu.max of control groups v2)"


def hierarchies(groups: str, mounts: str) -> Iterator[Hierarchy]:
    """Yield the directories in which groups might be created, best first.

    Args:
        groups: The content of /proc/self/cgroup.
        mounts: The content of /proc/self/mountinfo.
    """
    own = {controllers: path for _, controllers, path in (line.split(":", 2) for line in groups.splitlines())}
    version_1 = next((path for controllers, path in own.items() if "memory" in controllers.split(",")), None)
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        root, mount_point = left.split()[3:5]
        kind, _, options = right.split()[:3]
        if kind == "cgroup" and version_1 is not None and "memory" in options.split(","):
            yield Hierarchy(group_below(mount_point, root, version_1), "memory.limit_in_bytes")
        elif kind == "cgroup2" and version_1 is None and "" in own:
            below = group_below(mount_point, root, own[""])
            yield Hierarchy(below, _V2_LIMIT)
            if below != mount_point:
                yield Hierarchy(mount_point, _V2_LIMIT)


def group_below(mount_point: str, root: str, path: str) -> str:
    """Return the path of a group under a mount point that shows the hierarchy from `root` on."""
    relative = os.path.relpath(path, root)
    return mount_point if relative.startswith(".") else f"{mount_point}/{relative}"


def _candidates() -> list[Hierarchy]:
    with open("/proc/self/cgroup") as groups, open("/proc/self/mountinfo") as mounts:
        return list(hierarchies(groups.read(), mounts.read()))


def _tried(hierarchy: Hierarchy) -> Hierarchy | None:
    """Return the hierarchy if a group can be created and entered. A child tries it: this process stays where it is."""
    groups = JobGroups(hierarchy, memory_bytes=1 << 30, cpus=1)
    try:
        group = groups.take()
        child = group.fork()
        if child == 0:
            with suppress(OSError):
                group.enter()
                os._exit(0)
            os._exit(1)
        status = os.waitpid(child, 0)[1]
        return replace(hierarchy, limits_cpu=os.path.exists(f"{group.path}/cpu.max")) if status == 0 else None
    finally:
        groups.close()


def enable_controllers(directory: str, controllers: Iterable[str]) -> None:
    """Give the groups below one of version 2 these controllers, as far as the group has them itself."""
    file = f"{directory}/cgroup.subtree_control"
    with open(file) as enabled:
        names = enabled.read().split()
    for controller in controllers:
        if controller not in names:
            with suppress(OSError):
                write_file(file, f"+{controller}")


def _locked_directory(parent: str) -> tuple[str, int]:
    """Create a group for a program's groups; return it with the descriptor by which this process has it locked."""
    while True:
        directory = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        # Another program may take it for a leftover, and remove it, before it is locked.
        with suppress(FileNotFoundError):
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(directory):
                return directory, lock
            os.close(lock)


def _removed_unlocked(parent: str) -> bool:
    """Remove the groups of ended programs, which hold no lock; return False if some still have processes."""
    try:
        entries = os.listdir(parent)
    except OSError:
        # A directory that this process cannot list has no groups for it.
        return True
    is_done = True
    for entry in entries:
        if entry.startswith(_PREFIX):
            # Of another user, locked, or removed by another program.
            with suppress(OSError):
                lock = os.open(f"{parent}/{entry}", os.O_RDONLY | os.O_DIRECTORY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    is_done &= _remove(f"{parent}/{entry}")
                finally:
                    os.close(lock)
    return is_done


def _remove(directory: str) -> bool:
    """Remove a program's group and those of its jobs, unless they have processes; return whether it is gone."""
    with suppress(OSError):
        write_file(f"{directory}/cgroup.kill", "1")
    # Another program may remove it at the same time.
    with suppress(OSError):
        for group in [entry.path for entry in os.scandir(directory) if entry.is_dir()]:
            with suppress(OSError):
                os.rmdir(group)
        os.rmdir(directory)
    return not os.path.exists(directory)


def write_file(path: str | Path, text: str) -> None:
    """Write to a file of the kernel, which is neither created nor truncated. Raises: OSError."""
    with open(os.open(path, os.O_WRONLY), "w", encoding="ascii") as file:
        file.write(text)
