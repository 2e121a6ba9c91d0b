"""Keep a part of the state directory's disk free: no machine is forked while less is left.

Overlays grow with what guests write. `disk_quota_mib` bounds each machine, and the reserve bounds all of them: it is
for the machines that exist already, and for the daemon's database.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from envd.base.errors import HypervisorError


class HostDisk:
    """The disk of the state directory, shared by the pools of a daemon."""

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
