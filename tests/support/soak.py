"""Run `make soak` as a separate process in parallel with tests."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_POLL_S = 0.2


class SoakRun:
    """Output files of an `python -m tests.soak --json`, which another process may have started."""

    def __init__(self, directory: Path) -> None:
        """Read the directory given to the soak."""
        self._report = directory / "soak.json"
        self._log = directory / "soak.log"
        self._status = directory / "status"

    @property
    def log(self) -> str:
        """Its progress messages and errors."""
        return self._log.read_text()

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        try:
            return int(self._status.read_text() or 0)
        except FileNotFoundError:
            return None

    def report(self) -> dict[str, Any]:
        """Wait for its end and return its report."""
        while self.status is None:
            time.sleep(_POLL_S)
        assert self._report.stat().st_size, f"the soak ended with {self.status} and no report: {self.log[-4000:]}"
        report: dict[str, Any] = json.loads(self._report.read_text())
        return report


class SoakProcess(SoakRun):
    """A soak on fake desktops, started by this process."""

    def __init__(self, directory: Path, *flags: str) -> None:
        """Start it.

        Args:
            directory: An empty directory for its state and output.
            flags: Further command-line flags.
        """
        super().__init__(directory)
        command = [sys.executable, "-m", "tests.soak", "--hypervisor", "fake", "--state-dir", str(directory / "s")]
        # To files: there may be no reader, and a full pipe would block it.
        with self._report.open("w") as report, self._log.open("w") as log:
            self._process = subprocess.Popen([*command, "--json", *flags], stdout=report, stderr=log)
        self._waiting = threading.Thread(target=self._write_status, daemon=True)
        self._waiting.start()

    def _write_status(self) -> None:
        status = self._process.wait()
        partial = self._status.with_suffix(".part")
        partial.write_text(str(status))
        partial.rename(self._status)

    def interrupt(self) -> None:
        """Send SIGINT: it ends early with a report, or at once the second time."""
        self._process.send_signal(signal.SIGINT)

    def join(self) -> None:
        """Wait for its end."""
        self._waiting.join()
