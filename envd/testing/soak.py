"""`envd soak` as its users meet it: a process of its own, that tests may go on beside."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any


class SoakProcess:
    """One `envd soak --json` on drawn desktops."""

    def __init__(self, directory: Path, *flags: str) -> None:
        """Start it.

        Args:
            directory: For its state and for what it says.
            flags: Of the command.
        """
        self._said = directory / "soak.json"
        self._log = directory / "soak.log"
        command = [
            sys.executable,
            "-m",
            "envd",
            "soak",
            "--hypervisor",
            "fake",
            "--state-dir",
            str(directory),
            "--json",
        ]
        # To files: nobody may read along, and a full pipe would hold it up.
        with self._said.open("w") as said, self._log.open("w") as log:
            self.process = subprocess.Popen([*command, *flags], stdout=said, stderr=log, start_new_session=True)

    @property
    def log(self) -> str:
        """What it said of its progress, and what it complained of."""
        return self._log.read_text()

    def report(self) -> dict[str, Any]:
        """Wait for its end, and return what it tells."""
        status = self.process.wait()
        assert self._said.stat().st_size, f"the soak ended with {status} and no report: {self.log[-4000:]}"
        report: dict[str, Any] = json.loads(self._said.read_text())
        return report

    def stop(self) -> None:
        """Have it end at once, if it has not ended yet, as a second Ctrl-C does."""
        while self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                continue
