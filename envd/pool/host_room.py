"""How many more machines a pool may start on its host, which has limited memory and disk, and why there is no room.

A part of the state directory's disk stays free. Overlays grow with what guests write: `disk_quota_mib` bounds each
machine, and the reserve bounds all of them. It is for the machines that exist already, and for the daemon's database.
"""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from envd.base.clock import Clock
from envd.base.errors import HypervisorError
from envd.pool.memory import HostMemory, MemoryClaim

#: With less free, QEMU is about to stop the machines that write.
_FULL_BYTES = 64 << 20
#: How often the host's memory and disk are polled while short: nothing notifies the pool when there is more.
HOST_POLL_S = 1.0


class HostDisk:
    """The disk of the state directory, shared by the pools of a daemon: no machine is forked below its reserve."""

    def __init__(self, directory: Path, *, reserve_bytes: int, read: Callable[[], int] | None = None) -> None:
        """Keep `reserve_bytes` free on the disk of a directory; `read` returns the free bytes."""
        self._directory = directory
        self._reserve_bytes = reserve_bytes
        self._read = read or self._free_bytes

    @property
    def is_short(self) -> bool:
        """Whether less than the reserve is free. Raises: HypervisorError: it is not known."""
        return self._read() < self._reserve_bytes

    @property
    def is_full(self) -> bool:
        """Whether machines cannot be used either. Raises: HypervisorError: it is not known."""
        return self._read() < min(_FULL_BYTES, self._reserve_bytes)

    def shortage(self) -> str:
        """Return, for operators, why one more machine does not fit; empty if it does."""
        if not self.is_short:
            return ""
        return (
            f"the disk of {self._directory} is short: {self._read() >> 20} MiB are free, and"
            f" {self._reserve_bytes >> 20} MiB must stay free (limits.disk_reserve_mib); remove files or close episodes"
        )

    def _free_bytes(self) -> int:
        try:
            return shutil.disk_usage(self._directory).free
        except OSError as error:
            raise HypervisorError(f"{self._directory}: the free disk space is not known: {error}") from error


@dataclass(slots=True, eq=False, kw_only=True)
class HostRoom:
    """One pool's view of the memory and disk that it shares with all other pools of the host."""

    memory: HostMemory | None
    """The host's memory; None for unbounded."""
    disk: HostDisk | None
    """The host's disk; None for unbounded."""
    claims: Callable[[], Iterable[MemoryClaim]]
    """Returns the pool's claims on the memory, from `join` to `leave`."""
    expected_bytes: int
    """Private memory that one more machine will reach."""
    capacity: int
    """Machines of the pool; the room on an unbounded host."""
    clock: Clock
    shortage: str = field(default="", init=False)
    """Why the host has no room for one more machine, for operators; empty if none was refused."""
    _shortage_seen_s: float = field(default=0.0, init=False)

    @property
    def disk_is_full(self) -> bool:
        """Whether the host's disk is too full for the machines that exist. Raises: HypervisorError: it is not known."""
        return self.disk is not None and self.disk.is_full

    @property
    def disk_shortage(self) -> str:
        """Why the host's disk has no room for one more machine, for operators; empty if it has. Never raises."""
        try:
            return "" if self.disk is None else self.disk.shortage()
        except HypervisorError as error:
            return str(error)

    def join(self) -> None:
        """Count the pool's claims from now on."""
        if self.memory is not None:
            self.memory.join(self.claims)

    def leave(self) -> None:
        """Stop counting them. Idempotent."""
        if self.memory is not None:
            self.memory.leave(self.claims)

    def count(self) -> int:
        """Return how many more machines fit, which other daemons find taken until `note`.

        Raises:
            HypervisorError: Memory or disk cannot be read.
        """
        if self.disk is not None and self.disk.is_short:
            return 0
        return self.capacity if self.memory is None else self.memory.room(self.expected_bytes)

    def publish(self) -> None:
        """Publish the claims for the host's other daemons."""
        if self.memory is not None:
            self.memory.publish()

    def note(self, *, is_short: bool) -> None:
        """Record whether a machine was wanted for which there was no room, and publish the claims."""
        self.publish()
        self.shortage = ""
        if is_short:
            if self.disk is not None and self.disk.is_short:
                self.shortage = self.disk.shortage()
            elif self.memory is not None:
                self.shortage = self.memory.shortage(self.expected_bytes)
            self._shortage_seen_s = self.clock.monotonic()

    @property
    def poll_at_s(self) -> float | None:
        """When to look for room again; None without a shortage."""
        return self._shortage_seen_s + HOST_POLL_S if self.shortage else None
