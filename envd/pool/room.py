"""How many more machines fit on a host, which has limited memory and disk, and why one does not.

Forks share their template's memory and grow as they are used, so free memory at the time of a fork does not predict the
need. Each machine is expected to reach a fixed size; none is added if the host could not give all of them that size.

A part of the state directory's disk stays free. Overlays grow with what guests write: `disk_quota_mib` bounds each
machine, and the reserve bounds all of them. It is for the machines that exist already, and for the daemon's database.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from envd.base.aio import Changes
from envd.base.checks import HostCheck, ok, warn
from envd.base.clock import Clock
from envd.base.config import Config, PoolConfig
from envd.base.errors import ConfigError, HypervisorError
from envd.hypervisor.backends import backend_of

#: Memory of QEMU itself, in addition to the guest's.
OVERHEAD_MIB = 128
#: How often the host's memory and disk are polled while short: nothing notifies the pool when there is more.
HOST_POLL_S = 1.0

#: With less free, QEMU is about to stop the machines that write.
_FULL_BYTES = 64 << 20
_MEMINFO = Path("/proc/meminfo")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def booted_bytes(pool: PoolConfig) -> int:
    """Return the private memory that a booted machine reaches: it holds all pages that its guest has touched."""
    return (pool.memory_mib + OVERHEAD_MIB) << 20


def forked_bytes(pool: PoolConfig) -> int:
    """Return the private memory that a fork reaches: it holds the pages that it has changed."""
    return min(booted_bytes(pool), pool.expected_memory_mib << 20)


def growth_of(expected_bytes: int, *, held_bytes: int = 0) -> int:
    """Return the private memory that a machine or a reservation has yet to grow into."""
    return max(0, expected_bytes - held_bytes)


def machines_that_fit(*, growth_bytes: int, available_bytes: int, reserve_bytes: int, expected_bytes: int) -> int:
    """Return how many more machines the host can hold.

    Args:
        growth_bytes: Memory that every machine and reservation on the host has yet to grow into.
        reserve_bytes: Memory that must remain when all have grown.
        expected_bytes: Private memory that one more machine will reach; positive.
    """
    return max(0, (available_bytes - reserve_bytes - growth_bytes) // expected_bytes)


def read_available_bytes(meminfo: Path = _MEMINFO) -> int:
    """Return the memory that the host could give without swapping. Raises: HypervisorError: it is not known."""
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) << 10
    except (OSError, ValueError) as error:
        raise HypervisorError(f"{meminfo} cannot be read: {error}") from error
    raise HypervisorError(f"{meminfo} has no MemAvailable")


def read_free_bytes(directory: Path) -> int:
    """Return the free space of a directory's disk. Raises: HypervisorError: it is not known."""
    try:
        return shutil.disk_usage(directory).free
    except OSError as error:
        raise HypervisorError(f"{directory}: the free disk space is not known: {error}") from error


def host_memory_mib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20


def check_memory(config: Config, *, available_bytes: int, daemon_pid: int | None) -> HostCheck:
    """Check that the memory lets every pool have all of its machines, by the rule that pools start them by."""
    detail = f"{available_bytes / (1 << 30):.1f} GiB available"
    if not backend_of(config.hypervisor.uri).capabilities.runs_guests:
        return ok("memory", f"{detail}; the fake hypervisor's machines take little")
    if daemon_pid is not None:
        # Its machines hold a part of what they need, and it reports a shortage itself.
        return ok("memory", f"{detail} to what process {daemon_pid} has; see its pools below")
    # One machine is booted for the template of each pool; the others are forked from it.
    wanted_bytes = (config.limits.memory_reserve_mib << 20) + sum(
        booted_bytes(pool) + pool.resident * forked_bytes(pool) for pool in config.pools.values() or [PoolConfig()]
    )
    users = f"{len(config.pools)} pools" if config.pools else "a pool of one machine"
    detail += f"; {users} may take {wanted_bytes / (1 << 30):.1f} GiB, limits.memory_reserve_mib included"
    if wanted_bytes > available_bytes:
        return warn(
            "memory",
            detail,
            fix="lower the pools' resident (default: capacity), or expected_memory_mib if machines stay smaller",
        )
    return ok("memory", detail)


class HostClaims:
    """The memory that the machines of each daemon of a host have yet to grow into.

    Each daemon writes its number to a file of a shared directory and keeps the file locked. The kernel releases the
    lock when the daemon ends, for any reason, and the next reader removes the file.
    """

    def __init__(self, directory: Path) -> None:
        """Join the daemons that use a directory. Raises: ConfigError: it cannot be written."""
        self._directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._mutex = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # Several hosts may mount the directory; only daemons of one boot of this host share its memory.
            self._prefix = f"{_BOOT_ID.read_text(encoding='ascii').strip()}."
            with self.exclusive():
                self._file, self._path = tempfile.mkstemp(prefix=self._prefix, dir=directory)
                fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError as error:
            raise ConfigError(f"{directory}: {error.strerror}; choose another --cache-dir") from error

    def close(self) -> None:
        """Withdraw this daemon's number."""
        with self.exclusive():
            os.unlink(self._path)
        os.close(self._file)
        os.close(self._mutex)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Exclude other daemons from the same section. Do not await in the block."""
        fcntl.flock(self._mutex, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._mutex, fcntl.LOCK_UN)

    def publish(self, growth_bytes: int) -> None:
        """Set this daemon's number."""
        os.pwrite(self._file, b"%020d" % growth_bytes, 0)

    def others_bytes(self) -> int:
        """Return the sum of the other live daemons; call it in `exclusive`."""
        total_bytes = 0
        for path in self._directory.glob(f"{self._prefix}*"):
            if str(path) == self._path:
                continue
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                total_bytes += int(os.read(file, 32) or 0)
            else:
                path.unlink()  # its daemon has ended
            finally:
                os.close(file)
        return total_bytes


class HostRoom:
    """The room on a host, shared by the pools of a daemon and, with `claims`, by all daemons of the host."""

    def __init__(
        self,
        *,
        memory_reserve_bytes: int | None = None,
        claims: HostClaims | None = None,
        directory: Path | None = None,
        disk_reserve_bytes: int = 0,
        read_memory: Callable[[], int] = read_available_bytes,
        read_disk: Callable[[Path], int] = read_free_bytes,
    ) -> None:
        """Bound the machines of a host; by default neither its memory nor its disk bounds them.

        Args:
            memory_reserve_bytes: Memory that stays free; None if memory is unbounded.
            claims: Those of the host's other daemons, whose machines count too.
            directory: A directory of the disk on which no machine is forked below the reserve; None for unbounded.
            disk_reserve_bytes: Free space that stays on it.
            read_memory: Returns the memory that is available.
            read_disk: Returns the free space of a directory's disk.
        """
        self._memory_reserve_bytes = memory_reserve_bytes
        self._claims = claims
        self._directory = directory
        self._disk_reserve_bytes = disk_reserve_bytes
        self._read_memory = read_memory
        self._read_disk = read_disk
        self._growths: list[Callable[[], int]] = []

    def join(self, growth: Callable[[], int]) -> None:
        """Count what the machines of a pool have yet to grow into, in bytes, from now on."""
        self._growths.append(growth)

    def leave(self, growth: Callable[[], int]) -> None:
        """Stop counting them. Idempotent."""
        if growth in self._growths:
            self._growths.remove(growth)

    @property
    def disk_is_short(self) -> bool:
        """Whether less than the reserve is free on the disk. Raises: HypervisorError: it is not known."""
        return self._directory is not None and self._read_disk(self._directory) < self._disk_reserve_bytes

    @property
    def disk_is_full(self) -> bool:
        """Whether machines that exist cannot use the disk either. Raises: HypervisorError: it is not known."""
        limit_bytes = min(_FULL_BYTES, self._disk_reserve_bytes)
        return self._directory is not None and self._read_disk(self._directory) < limit_bytes

    def count(self, expected_bytes: int, *, most: int) -> int:
        """Return how many more machines of `expected_bytes` each may be started now; `most` if nothing bounds them.

        Other daemons find no room for these until `publish`: call it as soon as the machines are counted.

        Raises:
            HypervisorError: Memory or disk cannot be read.
        """
        if self.disk_is_short:
            return 0
        if self._memory_reserve_bytes is None:
            return most
        if self._claims is None:
            return self._fitting(expected_bytes, self._memory_reserve_bytes, others_bytes=0)
        with self._claims.exclusive():
            count = self._fitting(expected_bytes, self._memory_reserve_bytes, others_bytes=self._claims.others_bytes())
            self._claims.publish(self._growth_bytes + count * expected_bytes)
        return count

    def publish(self) -> None:
        """Publish, for the host's other daemons, what the machines of this one have yet to grow into."""
        if self._claims is not None:
            self._claims.publish(self._growth_bytes)

    def shortage(self, expected_bytes: int) -> str:
        """Return, for operators, why one more machine has no room. Raises: HypervisorError: it is not known."""
        if self.disk_is_short:
            return self._disk_text()
        if self._memory_reserve_bytes is None:
            return ""
        return (
            f"the host's memory is short: {self._read_memory() >> 20} MiB are available."
            f" {self._memory_reserve_bytes >> 20} MiB of that stay reserved, and machines have yet to grow into the"
            f" rest. One more machine takes {expected_bytes >> 20} MiB"
        )

    @property
    def disk_shortage(self) -> str:
        """Why the disk has no room for one more machine, for operators; empty if it has. Never raises."""
        try:
            return self._disk_text() if self.disk_is_short else ""
        except HypervisorError as error:
            return str(error)

    def _disk_text(self) -> str:
        free_bytes = 0 if self._directory is None else self._read_disk(self._directory)
        return (
            f"the disk of {self._directory} is short: {free_bytes >> 20} MiB are free, and"
            f" {self._disk_reserve_bytes >> 20} MiB must stay free (limits.disk_reserve_mib); remove files or close"
            " episodes"
        )

    def _fitting(self, expected_bytes: int, reserve_bytes: int, *, others_bytes: int) -> int:
        return machines_that_fit(
            growth_bytes=self._growth_bytes,
            available_bytes=self._read_memory() - others_bytes,
            reserve_bytes=reserve_bytes,
            expected_bytes=expected_bytes,
        )

    @property
    def _growth_bytes(self) -> int:
        return sum(growth() for growth in self._growths)


@dataclass(slots=True, eq=False, kw_only=True)
class PoolRoom:
    """One pool's use of the room on its host: how many machines it may add, and whether it waits for room."""

    host: HostRoom
    growth: Callable[[], int]
    """Returns the bytes that the pool's machines have yet to grow into, which `host` counts while the pool runs."""
    expected_bytes: int
    """Private memory that one more machine will reach."""
    resident: int
    """Machines of the pool; the room on an unbounded host."""
    clock: Clock
    shortage: str = field(default="", init=False)
    """Why the host has no room for one more machine, for operators; empty if none was refused."""
    _shortage_seen_s: float = field(default=0.0, init=False)

    def count(self) -> int:
        """Return how many more machines fit, which other daemons find taken until `note`.

        Raises:
            HypervisorError: Memory or disk cannot be read.
        """
        return self.host.count(self.expected_bytes, most=self.resident)

    def note(self, *, is_short: bool) -> None:
        """Record whether a machine was wanted for which there was no room, and publish the growth."""
        self.host.publish()
        self.shortage = ""
        if is_short:
            self.shortage = self.host.shortage(self.expected_bytes)
            self._shortage_seen_s = self.clock.monotonic()

    async def wait(self, pool_has_room: Callable[[], bool], *, changes: Changes) -> None:
        """Return when there is room for a machine, in the pool and on the host; notify `changes` until then."""
        while True:
            if not pool_has_room():
                await changes.next.wait()
                continue
            self.note(is_short=not self.count())
            if not self.shortage:
                return
            changes.notify()
            await self.clock.sleep(HOST_POLL_S)

    @property
    def poll_at_s(self) -> float | None:
        """When to look for room again; None without a shortage."""
        return self._shortage_seen_s + HOST_POLL_S if self.shortage else None
