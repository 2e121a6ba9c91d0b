"""Run `envd serve` as a separate process."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path


class ServedDaemon:
    """One `envd serve` process on free ports."""

    def __init__(
        self, state_dir: Path, config_text: str, *, listen: str = "127.0.0.1:0", within: Sequence[str] = ()
    ) -> None:
        """Start it.

        Args:
            state_dir: Its state directory; configuration and log go to the same parent.
            config_text: Configuration as TOML.
            listen: Its address, for a daemon that replaces another.
            within: Prefix of the command line: a program that executes its arguments.
        """
        config = state_dir.parent / f"{state_dir.name}.toml"
        config.write_text(config_text, encoding="utf-8")
        self.log_file = state_dir.parent / f"{state_dir.name}.log"
        command = [sys.executable, "-m", "envd", "serve", "--config", str(config), "--state-dir", str(state_dir)]
        addresses = ["--listen", listen, "--metrics-listen", "127.0.0.1:0"]
        self._log = self.log_file.open("a", encoding="utf-8")
        self.process = subprocess.Popen(
            [*within, *command, *addresses], stdout=subprocess.PIPE, stderr=self._log, text=True, start_new_session=True
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()

    def wait_for(self, pattern: str, *, timeout_s: float = 120.0) -> str:
        """Return the first group of the first output line, past or future, that matches."""

        def found() -> str | None:
            return next((match[1] for line in self.lines if (match := re.search(pattern, line))), None)

        with self._changed:
            assert self._changed.wait_for(lambda: found() is not None, timeout_s), f"{pattern} is not in {self.lines}"
            return found() or ""

    def end(self, number: int = signal.SIGTERM) -> int:
        """Signal the process and return its exit status."""
        self.process.send_signal(number)
        status = self.process.wait(timeout=120)
        self._reader.join(timeout=10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
        return status
