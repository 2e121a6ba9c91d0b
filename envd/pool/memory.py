"""Bound the machines of a host by its memory, including the memory that they may still grow into.

Forks share their template's memory and grow as they are used, so free memory at the time of a fork does not predict the
need. Each machine is expected to reach a fixed size; none is added if the host could not give all of them that size.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from envd.base.errors import HypervisorError

#: Memory of QEMU itself, in addition to the guest's.
OVERHEAD_MIB = 128

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryClaim:
    """The claim of one machine, or one reservation, on the host's memory."""

    expected_bytes: int
    """Private memory that it will reach."""
    held_bytes: int = 0
    """Private memory that it has now; 0 if not measured."""


def machines_that_fit(
    claims: Iterable[MemoryClaim], *, available_bytes: int, reserve_bytes: int, expected_bytes: int
) -> int:
    """Return how many more machines the host can hold.

    Args:
        claims: Every machine and reservation on the host.
        available_bytes: Memory that the host could give now.
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
    """Return the memory that the host has, used or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20


class HostMemory:
    """A host's memory, shared by the pools of a daemon."""

    def __init__(self, *, reserve_bytes: int, read: Callable[[], int] = read_available_bytes) -> None:
        """Keep `reserve_bytes` free of the available memory that `read` returns."""
        self.reserve_bytes = reserve_bytes
        self._read = read
        self._claimants: list[Callable[[], Iterable[MemoryClaim]]] = []

    def join(self, claims: Callable[[], Iterable[MemoryClaim]]) -> None:
        """Count the claims that `claims` returns, from now on."""
        self._claimants.append(claims)

    def leave(self, claims: Callable[[], Iterable[MemoryClaim]]) -> None:
        """Stop counting them. Idempotent."""
        if claims in self._claimants:
            self._claimants.remove(claims)

    def room(self, expected_bytes: int) -> int:
        """Return how many more machines of `expected_bytes` each may be started now."""
        return machines_that_fit(
            self._claims(),
            available_bytes=self._read(),
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
