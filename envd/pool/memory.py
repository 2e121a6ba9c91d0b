"""Bound the machines of a host by its memory, including the memory that they may still grow into.

Forks share their template's memory and grow as they are used, so free memory at the time of a fork does not predict the
need. Each machine is expected to reach a fixed size; none is added if the host could not give all of them that size.
"""

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from envd.base.config import PoolConfig
from envd.base.errors import ConfigError, HypervisorError

#: Memory of QEMU itself, in addition to the guest's.
OVERHEAD_MIB = 128

_MEMINFO = Path("/proc/meminfo")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryClaim:
    """The claim of one machine, or one reservation, on the host's memory."""

    expected_bytes: int
    """Private memory that it will reach."""
    held_bytes: int = 0
    """Private memory that it has now; 0 if not measured."""


def booted_bytes(pool: PoolConfig) -> int:
    """Return the private memory that a booted machine reaches: it holds all pages that its guest has touched."""
    return (pool.memory_mib + OVERHEAD_MIB) << 20


def forked_bytes(pool: PoolConfig) -> int:
    """Return the private memory that a fork reaches: it holds the pages that it has changed."""
    return min(booted_bytes(pool), pool.expected_memory_mib << 20)


def machines_that_fit(
    claims: Iterable[MemoryClaim], *, available_bytes: int, reserve_bytes: int, expected_bytes: int
) -> int:
    """Return how many more machines the host can hold.

    Args:
        claims: Every machine and reservation on the host.
        reserve_bytes: Memory that must remain when all have grown.
        expected_bytes: Private memory that one more machine will reach; positive.
    """
    return max(0, (available_bytes - reserve_bytes - growth_of(claims)) // expected_bytes)


def growth_of(claims: Iterable[MemoryClaim]) -> int:
    """Return the bytes that the claims have yet to grow into."""
    return sum(max(0, claim.expected_bytes - claim.held_bytes) for claim in claims)


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


def host_memory_mib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20


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


class HostMemory:
    """A host's memory, shared by the pools of a daemon and, with `host`, by all daemons of the host."""

    def __init__(
        self, *, reserve_bytes: int, host: HostClaims | None = None, read: Callable[[], int] = read_available_bytes
    ) -> None:
        """Keep `reserve_bytes` free of the available memory that `read` returns.

        With `host`, the machines of the host's other daemons count too.
        """
        self._host = host
        self.reserve_bytes = reserve_bytes
        self._read = read
        self._claimants: list[Callable[[], Iterable[MemoryClaim]]] = []

    def join(self, claims: Callable[[], Iterable[MemoryClaim]]) -> None:
        self._claimants.append(claims)

    def leave(self, claims: Callable[[], Iterable[MemoryClaim]]) -> None:
        """Stop counting them. Idempotent."""
        if claims in self._claimants:
            self._claimants.remove(claims)

    def room(self, expected_bytes: int) -> int:
        """Return how many more machines of `expected_bytes` each may be started now.

        Other daemons find no room for these until `publish`: call it as soon as the machines are among the claims.
        """
        if self._host is None:
            return self._fitting(expected_bytes, others_bytes=0)
        with self._host.exclusive():
            count = self._fitting(expected_bytes, others_bytes=self._host.others_bytes())
            self._host.publish(growth_of(self._claims()) + count * expected_bytes)
        return count

    def publish(self) -> None:
        """Publish, for the host's other daemons, what the machines of this one have yet to grow into."""
        if self._host is not None:
            self._host.publish(growth_of(self._claims()))

    def _fitting(self, expected_bytes: int, *, others_bytes: int) -> int:
        return machines_that_fit(
            self._claims(),
            available_bytes=self._read() - others_bytes,
            reserve_bytes=self.reserve_bytes,
            expected_bytes=expected_bytes,
        )

    def _claims(self) -> Iterable[MemoryClaim]:
        return (claim for claims in self._claimants for claim in claims())

    def shortage(self, expected_bytes: int) -> str:
        """Return, for operators, why the host has no room for one more machine."""
        return (
            f"the host's memory is short: {self._read() >> 20} MiB are available. {self.reserve_bytes >> 20} MiB of"
            " that stay reserved, and machines have yet to grow into the rest. One more machine takes"
            f" {expected_bytes >> 20} MiB"
        )
