"""Control groups that limit memory and processors of a job's processes together. Linux and standard library only.

Version 1 and 2, wherever this process may create a group: below its own, or (version 2, where a group with processes
usually cannot have limited groups below it) below the root of the hierarchy, where systemd leaves such groups alone.
Elsewhere a job has only the limits of each of its processes. Version 1 limits memory only.
"""

import ctypes
import os
import signal
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

_PREFIX = "envd-evaluation-"
_CPU_PERIOD_US = 100_000
#: The file of version 2 that limits a group's memory.
_V2_LIMIT = "memory.max"
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


class ControlGroup:
    """A control group with limits of memory and, where the hierarchy has them, of processors.

    Create it where the host's files are visible; no other method needs them.

    Raises:
        OSError: The kernel refused a step; no group is left.
    """

    def __init__(self, hierarchy: Hierarchy, *, memory_bytes: int, cpus: int) -> None:
        self._name = f"{_PREFIX}{os.getpid()}"
        self._entry, self._is_inside = -1, False
        self._has_threads = hierarchy.limit_file != _V2_LIMIT
        self._parent = os.open(hierarchy.directory, os.O_RDONLY | os.O_DIRECTORY)
        os.mkdir(self._name, dir_fd=self._parent)
        try:
            self._write(hierarchy.limit_file, str(memory_bytes))
            # Files of some configurations only: no swap besides, and a group that is out of memory is killed whole.
            for file, text in (
                ("memory.memsw.limit_in_bytes", str(memory_bytes)),
                ("memory.swap.max", "0"),
                ("memory.oom.group", "1"),
                ("cpu.max", f"{cpus * _CPU_PERIOD_US} {_CPU_PERIOD_US}"),
            ):
                with suppress(OSError):
                    self._write(file, text)
            self._entry = self._open("tasks" if self._has_threads else "cgroup.procs")
        except OSError:
            self.remove()
            raise

    def fork(self) -> int:
        """Fork this process, which has one thread, like os.fork. The child calls `enter` first.

        A child that enters a group by `cgroup.procs` waits for all forks of the host that are under way, and often for
        a grace period of the kernel (7 ms), while no process of the host can fork or end. In version 2 the child is
        created in the group; in version 1 its only thread moves by `tasks`, which needs no such lock (0.05 ms).
        """
        if self._has_threads:
            return os.fork()
        group = os.open(self._name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._parent)
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
            os.write(self._entry, b"0")
        os.close(self._entry)
        os.close(self._parent)

    def remove(self) -> None:
        """Remove the group, unless it has processes. Closes its descriptors, so that no sandbox inherits them."""
        with suppress(OSError):
            os.rmdir(self._name, dir_fd=self._parent)
        for handle in (self._entry, self._parent):
            with suppress(OSError):
                os.close(handle)

    def _open(self, file: str) -> int:
        return os.open(f"{self._name}/{file}", os.O_WRONLY, dir_fd=self._parent)

    def _write(self, file: str, text: str) -> None:
        handle = self._open(file)
        try:
            os.write(handle, text.encode())
        finally:
            os.close(handle)


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
    """Return the hierarchy for this process's jobs; None if it can create no group. Removes groups of dead workers."""
    with open("/proc/self/cgroup") as groups, open("/proc/self/mountinfo") as mounts:
        candidates = list(hierarchies(groups.read(), mounts.read()))
    for hierarchy in candidates:
        with suppress(OSError):
            _remove_leftovers(hierarchy.directory)
            if hierarchy.limit_file == _V2_LIMIT:
                for controller in ("+memory", "+cpu"):
                    with suppress(OSError), open(f"{hierarchy.directory}/cgroup.subtree_control", "w") as control:
                        control.write(controller)
            if (found := _tried(hierarchy)) is not None:
                return found
    return None


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
            yield Hierarchy(_below(mount_point, root, version_1), "memory.limit_in_bytes")
        elif kind == "cgroup2" and version_1 is None and "" in own:
            below = _below(mount_point, root, own[""])
            yield Hierarchy(below, _V2_LIMIT)
            if below != mount_point:
                yield Hierarchy(mount_point, _V2_LIMIT)


def _below(mount_point: str, root: str, path: str) -> str:
    """Return the path of a group under a mount point that shows the hierarchy from `root` on."""
    relative = os.path.relpath(path, root)
    return mount_point if relative.startswith(".") else f"{mount_point}/{relative}"


def _tried(hierarchy: Hierarchy) -> Hierarchy | None:
    """Return the hierarchy if a group can be created and entered. A child tries it: this process stays where it is."""
    group = ControlGroup(hierarchy, memory_bytes=1 << 30, cpus=1)
    limits_cpu = os.path.exists(f"{hierarchy.directory}/{_PREFIX}{os.getpid()}/cpu.max")
    child = group.fork()
    if child == 0:
        with suppress(OSError):
            group.enter()
            os._exit(0)
        os._exit(1)
    status = os.waitpid(child, 0)[1]
    group.remove()
    return replace(hierarchy, limits_cpu=limits_cpu) if status == 0 else None


def _remove_leftovers(directory: str) -> None:
    """Remove the empty groups of workers that were killed."""
    for entry in os.listdir(directory):
        if entry.startswith(_PREFIX) and not os.path.exists(f"/proc/{entry.removeprefix(_PREFIX)}"):
            with suppress(OSError):
                os.rmdir(f"{directory}/{entry}")
