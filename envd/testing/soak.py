"""`envd soak` as its users meet it: a process of its own, that tests may go on beside."""

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
    """What an `envd soak --json` says, in files: whoever began it may be another process."""

    def __init__(self, directory: Path) -> None:
        """Look into the directory that it was given."""
        self._said = directory / "soak.json"
        self._log = directory / "soak.log"
        self._status = directory / "status"

    @property
    def log(self) -> str:
        """What it said of its progress, and what it complained of."""
        return self._log.read_text()

    @property
    def status(self) -> int | None:
        """With what it ended; None while it goes on."""
        try:
            return int(self._status.read_text() or 0)
        except FileNotFoundError:
            return None

    def report(self) -> dict[str, Any]:
        """Wait for its end, and return what it tells."""
        while self.status is None:
            time.sleep(_POLL_S)
        assert self._said.stat().st_size, f"the soak ended with {self.status} and no report: {self.log[-4000:]}"
        report: dict[str, Any] = json.loads(self._said.read_text())
        return report


class SoakProcess(SoakRun):
    """A soak on drawn desktops that was begun here."""

    def __init__(self, directory: Path, *flags: str) -> None:
        """Start it.

        Args:
            directory: An empty one, for its state and for what it says.
            flags: Of the command.
        """
        super().__init__(directory)
        command = [sys.executable, "-m", "envd", "soak", "--hypervisor", "fake", "--state-dir", str(directory / "s")]
        # To files: nobody may read along, and a full pipe would hold it up.
        with self._said.open("w") as said, self._log.open("w") as log:
            self._process = subprocess.Popen([*command, "--json", *flags], stdout=said, stderr=log)
        self._waiting = threading.Thread(target=self._note_its_end, daemon=True)
        self._waiting.start()

    def _note_its_end(self) -> None:
        status = self._process.wait()
        partial = self._status.with_suffix(".part")
        partial.write_text(str(status))
        partial.rename(self._status)

    def interrupt(self) -> None:
        """Do what Ctrl-C does: have it end early, with a report; a second time, at once."""
        self._process.send_signal(signal.SIGINT)

    def join(self) -> None:
        """Wait for its end."""
        self._waiting.join()
