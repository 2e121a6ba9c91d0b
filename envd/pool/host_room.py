"""How many more machines a pool may start on its host, which has limited memory and disk, and why there is no room.

A part of the state directory's disk stays free. Overlays grow with what guests write: `disk_quota_mib` bounds each
machine, and the reserve bounds all of them. It is for the machines that exist already, and for the daemon's database.
"""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from envd.base.clock import Clock
from envd.base.errors import HypervisorError
from envd.pool.memory import HostMemory, MemoryClaim

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

    def shortage(self) -> str:
        """Return, for operators, why one more machine does not fit."""
        return (
            f"the disk of {self._directory} is short: {self._read() >> 20} MiB are free, and"
            f" {self._reserve_bytes >> 20} MiB must stay free (limits.disk_reserve_mib); remove files or close episodes"
        )

    def _free_bytes(self) -> int:
        try:
            return shutil.disk_usage(self._directory).free
        except OSError as error:
            raise HypervisorError(f"{self._directory}: the free disk space is not known: {error}") from error


class HostRoom:
    """One pool's view of the memory and disk that it shares with all other pools of the host."""

    def __init__(
        self,
        *,
        memory: HostMemory | None,
        disk: HostDisk | None,
        claims: Callable[[], Iterable[MemoryClaim]],
        expected_bytes: int,
        capacity: int,
        clock: Clock,
    ) -> None:
        """Bound the machines of a pool.

        Args:
            memory: The host's memory; None for unbounded.
            disk: The host's disk; None for unbounded.
            claims: Returns the pool's claims on the memory, from `join` to `leave`.
            expected_bytes: Private memory that one more machine will reach.
            capacity: Machines of the pool; the room on an unbounded host.
            clock: Source of time.
        """
        self.shortage = ""
        """Why the host has no room for one more machine, for operators; empty if none was refused."""
        self._shortage_seen_s = 0.0
        self._memory = memory
        self._disk = disk
        self._claims = claims
        self._expected_bytes = expected_bytes
        self._capacity = capacity
        self._clock = clock

    def join(self) -> None:
        """Count the pool's claims from now on."""
        if self._memory is not None:
            self._memory.join(self._claims)

    def leave(self) -> None:
        """Stop counting them. Idempotent."""
        if self._memory is not None:
            self._memory.leave(self._claims)

    def count(self) -> int:
        """Return how many more machines fit, which other daemons find taken until `note`.

        Raises:
            HypervisorError: Memory or disk cannot be read.
        """
        if self._disk is not None and self._disk.is_short:
            return 0
        return self._capacity if self._memory is None else self._memory.room(self._expected_bytes)

    def publish(self) -> None:
        """Publish the claims for the host's other daemons."""
        if self._memory is not None:
            self._memory.publish()

    def note(self, *, is_short: bool) -> None:
        """Record whether a machine was wanted for which there was no room, and publish the claims."""
        self.publish()
        self.shortage = ""
        if is_short:
            if self._disk is not None and self._disk.is_short:
                self.shortage = self._disk.shortage()
            elif self._memory is not None:
                self.shortage = self._memory.shortage(self._expected_bytes)
            self._shortage_seen_s = self._clock.monotonic()

    @property
    def poll_at_s(self) -> float | None:
        """When to look for room again; None without a shortage."""
        return self._shortage_seen_s + HOST_POLL_S if self.shortage else None
