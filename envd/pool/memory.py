"""Bound the machines of a host by its memory: what they may still grow by counts as taken.

Forks share their template's memory and grow as they are used, so what is free when one is made says little. Each
machine is expected to hold so much in the end; a host that could not give that to all of them gets no more.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from envd.errors import HypervisorError

#: What QEMU holds beside the guest's memory.
OVERHEAD_MIB = 128

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryClaim:
    """One machine's, or one place's, part of the host's memory."""

    expected_bytes: int
    """What it will hold alone in the end."""
    held_bytes: int = 0
    """What it holds alone now; 0 where that was not measured."""


def machines_that_fit(
    claims: Iterable[MemoryClaim], *, available_bytes: int, reserve_bytes: int, expected_bytes: int
) -> int:
    """Return how many machines more the host can hold.

    Args:
        claims: Every machine and place on the host.
        available_bytes: Memory that the host could give now.
        reserve_bytes: Memory that must remain when all have grown.
        expected_bytes: What one more machine will hold in the end; positive.
    """
    growth_bytes = sum(max(0, claim.expected_bytes - claim.held_bytes) for claim in claims)
    return max(0, (available_bytes - reserve_bytes - growth_bytes) // expected_bytes)


def read_available_bytes(meminfo: Path = _MEMINFO) -> int:
    """Return the memory that the host could give without swapping. Raises: HypervisorError if it does not tell."""
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) << 10
    except (OSError, ValueError) as error:
        raise HypervisorError(f"{meminfo} cannot be read: {error}") from error
    raise HypervisorError(f"{meminfo} does not tell MemAvailable")


class HostMemory:
    """A host's memory, shared by the pools of a daemon."""

    def __init__(self, *, reserve_bytes: int, read: Callable[[], int] = read_available_bytes) -> None:
        """Keep `reserve_bytes` free of what `read` says is available."""
        self.reserve_bytes = reserve_bytes
        self._read = read
        self._claimants: list[Callable[[], Iterable[MemoryClaim]]] = []

    def join(self, claims: Callable[[], Iterable[MemoryClaim]]) -> None:
        """Count what `claims` returns, from now on."""
        self._claimants.append(claims)

    def leave(self, claims: Callable[[], Iterable[MemoryClaim]]) -> None:
        """Count it no longer. Idempotent."""
        if claims in self._claimants:
            self._claimants.remove(claims)

    def room(self, expected_bytes: int) -> int:
        """Return how many machines more, of `expected_bytes` each, the host can hold."""
        return machines_that_fit(
            (claim for claims in self._claimants for claim in claims()),
            available_bytes=self._read(),
            reserve_bytes=self.reserve_bytes,
            expected_bytes=expected_bytes,
        )

    def shortage(self, expected_bytes: int) -> str:
        """Say, for operators, why there is no room for one more."""
        return (
            f"the host's memory is short: {self._read() >> 20} MiB are available, of which {self.reserve_bytes >> 20}"
            f" MiB stay reserved and the rest is for machines that have yet to grow; one more takes"
            f" {expected_bytes >> 20} MiB"
        )
