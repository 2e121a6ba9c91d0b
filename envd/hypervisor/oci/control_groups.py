"""Control groups of containers: limits, freezing and processor time. Versions 1 and 2, and hosts with both.

```text
<hierarchy>/<own group>/envd-<mark>            written by the daemon
  /holder                                      the process of holder.py
  /<machine id>                                its limits; the runtime starts the container here
    /guest                                     everything but the X server: frozen while the machine is paused
    /display                                   the X server
```
The container's root may create groups below `guest` and move processes there, and to `display`, where they are not
frozen. It cannot thaw `guest`, nor change a limit: those files belong to the host's root.
"""

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from envd.base.errors import HypervisorError
from envd.base.sandbox.cgroup import enable_controllers, group_below, write_file
from envd.hypervisor.oci.ids import IdMap

_PERIOD_US: Final = 100_000
#: Processes and threads of one machine. A desktop has about 60.
_MAX_PROCESSES: Final = 4096
#: Groups that a machine's root may create, and how deep. A desktop has about 10.
_MAX_GROUPS, _MAX_GROUP_DEPTH = 1000, 32
#: A group of processes that wait for a disk freezes only when they have what they wait for.
_FREEZE_TIMEOUT_S: Final = 10.0
_FIRST_POLL_S, _LAST_POLL_S = 0.0005, 0.02
_CONTROLLERS: Final = ("memory", "pids", "cpu")
GUEST, DISPLAY = "guest", "display"


def own_groups() -> Mapping[str, Path]:
    """Return this process's group on the host by controller; by an empty name that of version 2, which has all."""
    paths = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    groups = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        root, mount = fields.split()[3:5]
        kind, _, options = rest.split()[:3]
        names = [""] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        groups.update({name: Path(group_below(mount, root, paths[name])) for name in names if name in paths})
    return groups


class ControlGroups:
    """The groups of a daemon's machines."""

    def __init__(self, mark: str, *, ids: IdMap) -> None:
        """Find where groups can be created; `problem` says what is missing. Creates none."""
        self._own = own_groups()
        self._unified = self._own.get("")
        self._mark = f"envd-{mark}"
        self._ids = ids
        self._freezer: Path | None = None
        self.problem = ""
        """Why machines have no groups; empty if they do."""

    def open(self, holder_pid: int) -> None:
        """Create the daemon's groups and move the holder into them. Never raises: see `problem`."""
        try:
            self._open(holder_pid)
        except OSError as error:
            self._freezer = None
            self.problem = f"control groups cannot be created: {error}"

    def _open(self, holder_pid: int) -> None:
        freezer = self._unified or self._own.get("freezer")
        if freezer is None:
            self.problem = "no hierarchy of control groups with a freezer is mounted"
            return
        if self._unified is not None:
            self._enable(self._unified)
        for directory in self._roots():
            directory.mkdir(exist_ok=True)
            self._delegate(directory)
            (directory / "holder").mkdir(exist_ok=True)
            self._delegate(directory / "holder")
            write_file(directory / "holder/cgroup.procs", str(holder_pid))
        if self._unified is not None:
            enable_controllers(str(self._unified / self._mark), _CONTROLLERS)
        self._freezer = freezer / self._mark

    def _enable(self, own: Path) -> None:
        """Have the groups below our own limited, if the host allows it: its processes must be in a group below it."""
        available = (own / "cgroup.controllers").read_text().split()
        wanted = [f"+{controller}" for controller in _CONTROLLERS if controller in available]
        if not wanted:
            return
        with suppress(OSError):
            write_file(own / "cgroup.subtree_control", " ".join(wanted))
            return
        leaf = own / f"{self._mark}-daemon"
        with suppress(OSError):
            leaf.mkdir(exist_ok=True)
            for pid in (own / "cgroup.procs").read_text().split():
                write_file(leaf / "cgroup.procs", pid)
            write_file(own / "cgroup.subtree_control", " ".join(wanted))

    def _roots(self) -> Iterator[Path]:
        """Yield the daemon's group in each hierarchy that it uses, each once."""
        seen = set[tuple[int, int]]()
        for name in ("", *_CONTROLLERS, *(() if self._unified else ("freezer", "cpuacct"))):
            own = self._own.get(name)
            if own is not None and (own.stat().st_ino, own.stat().st_dev) not in seen:
                seen.add((own.stat().st_ino, own.stat().st_dev))
                yield own / self._mark

    @property
    def are_limited(self) -> bool:
        """Whether a machine's memory is limited."""
        root = self._freezer
        return not self.problem and (
            "memory" in self._own
            or (root is not None and "memory" in (root / "cgroup.subtree_control").read_text().split())
        )

    def create(self, machine_id: str, *, memory_mib: int, vcpu_count: int) -> "MachineGroups | None":
        """Create a machine's groups; None if the host has none. Raises: HypervisorError."""
        if self._freezer is None:
            return None
        groups = MachineGroups(
            guest=self._freezer / machine_id / GUEST,
            is_unified=self._unified is not None,
            all=tuple(root / machine_id for root in self._roots()),
            cpu_time=self._cpu_time(machine_id),
        )
        memory_bytes = memory_mib << 20
        limits = (
            ("memory.max", memory_bytes), ("memory.swap.max", 0), ("memory.limit_in_bytes", memory_bytes),
            ("memory.memsw.limit_in_bytes", memory_bytes), ("pids.max", _MAX_PROCESSES),
            ("cpu.max", f"{vcpu_count * _PERIOD_US} {_PERIOD_US}"), ("cpu.cfs_period_us", _PERIOD_US),
            ("cpu.cfs_quota_us", vcpu_count * _PERIOD_US), ("cgroup.max.depth", _MAX_GROUP_DEPTH),
            ("cgroup.max.descendants", _MAX_GROUPS),
        )  # fmt: skip
        try:
            for directory in groups.all:
                directory.mkdir()
                self._delegate(directory)
                for file, value in limits:
                    if (directory / file).exists():
                        write_file(directory / file, str(value))
            for part in (GUEST, DISPLAY):
                (groups.guest.parent / part).mkdir()
                self._delegate(groups.guest.parent / part, contents=True)
        except OSError as error:
            groups.remove()
            raise HypervisorError(f"machine {machine_id}: its control groups: {error}") from error
        return groups

    def _cpu_time(self, machine_id: str) -> Path | None:
        if self._unified is not None:
            return self._unified / self._mark / machine_id / "cpu.stat"
        own = self._own.get("cpuacct")
        return own and own / self._mark / machine_id / "cpuacct.usage"

    def machine_ids(self) -> set[str]:
        """Return the machines whose groups exist."""
        found = set()
        for root in self._roots():
            if root.is_dir():
                found |= {entry.name for entry in root.iterdir() if entry.is_dir()}
        return found - {"holder"}

    def remove(self, machine_id: str) -> None:
        """Remove a machine's groups, whose processes have ended. Idempotent. Raises: OSError: some have not."""
        for root in self._roots():
            _remove_tree(root / machine_id)

    async def close(self) -> None:
        """Remove the daemon's groups when the last process in them has ended, which was killed before. Never raises."""
        deadline_s = time.monotonic() + _FREEZE_TIMEOUT_S
        with suppress(OSError):
            for root in self._roots():
                while not _is_removed(root) and time.monotonic() < deadline_s:  # noqa: ASYNC110 -- no event tells it
                    await asyncio.sleep(_LAST_POLL_S)

    def _delegate(self, directory: Path, *, contents: bool = False) -> None:
        """Let the containers' root move processes here and, with `contents`, create groups here."""
        if os.geteuid() != 0:
            return  # the daemon's user is the containers' root
        files = ("cgroup.procs", "cgroup.threads", *(("cgroup.subtree_control",) if contents else ()))
        for file in files:
            with suppress(FileNotFoundError):
                os.chown(directory / file, self._ids.root_uid, self._ids.root_gid)
        if contents:
            os.chown(directory, self._ids.root_uid, self._ids.root_gid)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineGroups:
    """The groups of one machine."""

    guest: Path
    """Group of everything but the X server, in the hierarchy with the freezer."""
    is_unified: bool
    """Whether the freezer is that of version 2."""
    all: tuple[Path, ...]
    """The machine's group in each hierarchy."""
    cpu_time: Path | None
    """File with the processor time of its processes; None if no controller counts it."""

    @property
    def display(self) -> Path:
        return self.guest.with_name(DISPLAY)

    @property
    def join(self) -> list[str]:
        """The files `cgroup.procs` that the runtime's process enters."""
        return [str(group / "cgroup.procs") for group in self.all]

    async def freeze(self) -> None:
        """Stop all processes but the X server. Raises: OSError, TimeoutError."""
        file, text = ("cgroup.freeze", "1") if self.is_unified else ("freezer.state", "FROZEN")
        write_file(self.guest / file, text)
        deadline_s, poll_s = time.monotonic() + _FREEZE_TIMEOUT_S, _FIRST_POLL_S
        while not self.is_frozen():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self.guest} is not frozen after {_FREEZE_TIMEOUT_S:g} s")
            await asyncio.sleep(poll_s)
            poll_s = min(poll_s * 2, _LAST_POLL_S)

    def thaw(self) -> None:
        """Let them continue. Raises: OSError."""
        file, text = ("cgroup.freeze", "0") if self.is_unified else ("freezer.state", "THAWED")
        write_file(self.guest / file, text)

    def is_frozen(self) -> bool:
        """Return whether all processes but the X server are stopped. Raises: OSError."""
        if self.is_unified:
            return "frozen 1" in (self.guest / "cgroup.events").read_text()
        return (self.guest / "freezer.state").read_text().strip() == "FROZEN"

    def processor_s(self) -> tuple[float, float]:
        """Return the seconds that its processes used a processor, and those in which one waited for one.

        Raises: OSError, ValueError.
        """
        if self.cpu_time is None:
            raise OSError("no hierarchy of control groups counts processor time")
        text = self.cpu_time.read_text()
        if not self.is_unified:
            return int(text) / 1e9, 0.0
        used_s = int(text.split(maxsplit=2)[1]) / 1e6
        with suppress(OSError, IndexError, ValueError):  # a kernel may not measure pressure
            pressure = (self.guest.parent / "cpu.pressure").read_text().split()
            return used_s, int(pressure[4].removeprefix("total=")) / 1e6
        return used_s, 0.0

    @property
    def counts_waits(self) -> bool:
        """Whether the kernel measures how long processes wait, so that one that waits for a processor is not idle."""
        try:
            return bool((self.guest.parent / "cpu.pressure").read_text())
        except OSError:
            return False

    def run_delay_s(self) -> float:
        """Return the seconds that the threads of its processes, those that live, have waited for a processor.

        For kernels that do not measure the waits of groups. Reads a file for each thread.
        """
        waited_ns = 0
        for pid in self.process_ids():
            with suppress(OSError, IndexError):
                for thread in os.scandir(f"/proc/{pid}/task"):
                    waited_ns += int(Path(thread.path, "schedstat").read_text().split()[1])
        return waited_ns / 1e9

    def waited_for_disk_s(self) -> float:
        """Return the seconds in which one of its processes waited for a disk; 0 if unknown. Never raises."""
        try:
            return int((self.guest.parent / "io.pressure").read_text().split()[4].removeprefix("total=")) / 1e6
        except (OSError, IndexError, ValueError):
            return 0.0

    def process_ids(self) -> list[int]:
        """Return its processes, by the host's ids. Raises: OSError."""
        found: list[int] = []
        for directory, _, _ in os.walk(self.guest.parent):
            with suppress(FileNotFoundError):
                found += map(int, Path(directory, "cgroup.procs").read_text().split())
        return found

    def ran_out_of_memory(self) -> bool:
        """Return whether the kernel has ended one of its processes because its memory was full."""
        for group in self.all:
            for file in ("memory.events", "memory.oom_control"):
                with suppress(OSError):
                    for line in (group / file).read_text().splitlines():
                        name, _, count = line.partition(" ")
                        if name == "oom_kill" and int(count):
                            return True
        return False

    def remove(self) -> None:
        """Remove them; their processes have ended. Raises: OSError: some have not."""
        for group in self.all:
            _remove_tree(group)


def _is_removed(group: Path) -> bool:
    try:
        _remove_tree(group)
    except OSError:
        return False
    return True


def _remove_tree(group: Path) -> None:
    for directory, _, _ in os.walk(group, topdown=False):
        with suppress(FileNotFoundError):
            os.rmdir(directory)
