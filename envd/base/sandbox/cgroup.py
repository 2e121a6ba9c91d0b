"""Control groups that limit memory and processors of a job's processes together. Linux and standard library only.

Version 1 and 2, wherever this process may create a group: below its own, or (version 2, where a group with processes
usually cannot have limited groups below it) below the root of the hierarchy, where systemd leaves such groups alone.
Elsewhere a job has only the limits of each of its processes. Version 1 limits memory only.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

_PREFIX = "envd-evaluation-"
_CPU_PERIOD_US = 100_000


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
        self._processes = -1
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
            self._processes = self._open("cgroup.procs")
        except OSError:
            self.remove()
            raise

    def enter(self) -> None:
        """Move this process into the group, and with it its future children."""
        os.write(self._processes, b"0")
        os.close(self._processes)
        os.close(self._parent)

    def remove(self) -> None:
        """Remove the group, unless it has processes. Closes its descriptors, so that no sandbox inherits them."""
        with suppress(OSError):
            os.rmdir(self._name, dir_fd=self._parent)
        for handle in (self._processes, self._parent):
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


def find_hierarchy() -> Hierarchy | None:
    """Return the hierarchy for this process's jobs; None if it can create no group. Removes groups of dead workers."""
    with open("/proc/self/cgroup") as groups, open("/proc/self/mountinfo") as mounts:
        candidates = list(hierarchies(groups.read(), mounts.read()))
    for hierarchy in candidates:
        with suppress(OSError):
            _remove_leftovers(hierarchy.directory)
            if hierarchy.limit_file == "memory.max":
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
            yield Hierarchy(below, "memory.max")
            if below != mount_point:
                yield Hierarchy(mount_point, "memory.max")


def _below(mount_point: str, root: str, path: str) -> str:
    """Return the path of a group under a mount point that shows the hierarchy from `root` on."""
    relative = os.path.relpath(path, root)
    return mount_point if relative.startswith(".") else f"{mount_point}/{relative}"


def _tried(hierarchy: Hierarchy) -> Hierarchy | None:
    """Return the hierarchy if a group can be created and entered. A child tries it: this process stays where it is."""
    group = ControlGroup(hierarchy, memory_bytes=1 << 30, cpus=1)
    limits_cpu = os.path.exists(f"{hierarchy.directory}/{_PREFIX}{os.getpid()}/cpu.max")
    child = os.fork()
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
