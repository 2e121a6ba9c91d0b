"""One `envd serve` process that outlives the process that starts it, and is adopted by the next one.

Its pid and start time are in `daemon.pid`, its standard output in `daemon.out`, its log in `daemon.log`.
"""

import fcntl
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

#: Writes its pid and start time, which the program keeps, and then releases the lock, its standard input.
_LAUNCH: Final = """
echo $$ $(cut -d" " -f22 /proc/$$/stat) >"$0.new" && mv "$0.new" "$0" && exec "$@" </dev/null
"""
_LISTENING: Final = re.compile(r"^listening on (\S+)$", re.MULTILINE)
_LAUNCH_TIMEOUT_S: Final = 30.0


class DaemonProcess:
    """The daemon of one directory."""

    def __init__(self, directory: Path) -> None:
        """Adopt the daemon that an earlier process started in `directory`, if it still runs."""
        self._directory = directory
        self._directory.mkdir(parents=True, exist_ok=True)
        self._pid, self._start_ticks = self._known()

    @property
    def pid(self) -> int:
        """Its process id; 0 while it does not run."""
        return self._pid if self._pid and _start_ticks(self._pid) == self._start_ticks else 0

    @property
    def address(self) -> str:
        """HOST:PORT that it listens on; empty until it does."""
        with suppress(OSError):
            found = _LISTENING.findall(self._file("out").read_text(errors="replace"))
            return str(found[-1]) if found else ""
        return ""

    @property
    def last_words(self) -> str:
        """The last line of its log."""
        with suppress(OSError):
            lines = self._file("log").read_text(errors="replace").strip().splitlines()
            return lines[-1] if lines else ""
        return ""

    def start(self, command: Sequence[str], *, environ: Mapping[str, str]) -> None:
        """Start it, or adopt the one that a killed process was starting. Blocks for milliseconds.

        Raises:
            OSError, subprocess.SubprocessError: It could not be started.
        """
        # The launching shell has the lock, too, until it has written its pid: no kill leaves an unknown daemon.
        with self._file("lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._pid, self._start_ticks = self._known()
            if self.pid:
                return
            self._file("pid").unlink(missing_ok=True)
            with self._file("out").open("wb") as out, self._file("log").open("ab") as log:
                # In a session of its own and not our child: Ray kills the children of a worker that exits.
                subprocess.run(
                    ["setsid", "--fork", "sh", "-c", _LAUNCH, str(self._file("pid")), *command],
                    stdin=lock,
                    stdout=out,
                    stderr=log,
                    env=dict(environ),
                    check=True,
                    timeout=_LAUNCH_TIMEOUT_S,
                )
            self._pid, self._start_ticks = self._wait_for_pid()

    def stop(self) -> None:
        if pid := self.pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _known(self) -> tuple[int, int]:
        """Return the pid and start time of the last daemon, which may have ended; zeros if there was none."""
        with suppress(OSError, ValueError):
            pid, start_ticks = map(int, self._file("pid").read_text().split())
            return pid, start_ticks
        return 0, 0

    def _wait_for_pid(self) -> tuple[int, int]:
        until_s = time.monotonic() + _LAUNCH_TIMEOUT_S
        while not (known := self._known())[0]:
            if time.monotonic() > until_s:
                raise subprocess.SubprocessError(f"{self._file('pid')}: no pid appeared; see daemon.log next to it")
            time.sleep(0.005)
        return known

    def _file(self, suffix: str) -> Path:
        return self._directory / f"daemon.{suffix}"


def _start_ticks(pid: int) -> int:
    """Return when a process started, in ticks since the boot; 0 if it does not run."""
    with suppress(OSError, ValueError, IndexError):
        # The name in parentheses may contain spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return 0 if fields[0] == "Z" else int(fields[19])
    return 0
