"""Wine's desktop: starts its helper `envdshell.exe`, again each time it ends, and asks it for what only it can see.

The helper's source (`/usr/src/envd`) describes the requests. It answers in order, so a request that was given up only
leaves one response to discard.
"""

import json
import logging
import queue
import re
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO

from .drive import AgentError, Drive

logger = logging.getLogger(__name__)

HELPER = r"C:\windows\system32\envdshell.exe"
#: Between two starts of the helper.
_SCREEN_POLL_S = 0.2
_ENDED = "the desktop ended, and starts again"


class Shell:
    """The session's desktop.

    Args:
        start: Starts the helper with pipes to its standard input and output.
        timeout_s: Limit of a request, and of the helper's start before it.
    """

    def __init__(self, start: Callable[[], "subprocess.Popen[bytes]"], *, timeout_s: float = 60.0) -> None:
        self.ready = threading.Event()
        """Set while the taskbar shows and the helper answers."""
        self._start = start
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._stdin: IO[bytes] | None = None
        self._waiting: deque[queue.SimpleQueue[str]] = deque()

    def ask(self, word: str, *arguments: str) -> object:
        """Return the helper's response to a request.

        Raises:
            AgentError: The helper reports an error, ended, or does not answer in time.
        """
        fields = [word, *(argument.encode("utf-8", "surrogatepass").hex() or "-" for argument in arguments)]
        line = f"{' '.join(fields)}\n".encode()
        answer: queue.SimpleQueue[str] = queue.SimpleQueue()
        if not self.ready.wait(self.timeout_s):
            raise AgentError("the desktop is starting; try again later")
        with self._lock:
            try:
                if self._stdin is None:
                    raise AgentError(_ENDED)
                self._waiting.append(answer)
                self._stdin.write(line)
                self._stdin.flush()
            except OSError:
                raise AgentError(_ENDED) from None
        try:
            status, _, text = answer.get(timeout=self.timeout_s).partition(" ")
        except queue.Empty:
            raise AgentError(f"the desktop did not answer a request within {self.timeout_s:g} s") from None
        if status != "ok":
            raise AgentError(text or _ENDED)
        return json.loads(text)

    def run(self, *, restart_s: float = 1.0) -> None:
        """Keep the helper running; never returns."""
        while True:
            try:
                self.run_once()
            except OSError:
                logger.exception("the desktop's helper could not be started")
            time.sleep(restart_s)

    def run_once(self) -> None:
        """Start the helper and pass its responses on until it ends. Raises: OSError: It cannot be started."""
        # Closing its input sends what was written to it when it ended.
        with suppress(BrokenPipeError), self._start() as process:
            with self._lock:
                self._stdin = process.stdin
            for line in process.stdout or ():
                self._receive(line.decode("ascii", "replace").strip())
            self.ready.clear()
            with self._lock:
                self._stdin = None
                for answer in self._waiting:
                    answer.put("")
                self._waiting.clear()
        logger.warning("the desktop's helper ended with status %s; starting it again", process.returncode)

    def _receive(self, line: str) -> None:
        if line.startswith("ready"):
            self.ready.set()
        elif self._waiting:
            self._waiting.popleft().put(line)


def await_screen(query: Sequence[str], environ: dict[str, str]) -> tuple[int, int]:
    """Return the X screen's (width, height) as soon as there is one, from the output of `query`, xrandr's command."""
    while True:
        shown = subprocess.run(query, env=environ, capture_output=True, text=True, check=False)
        match = re.search(r"current (\d+) x (\d+)", shown.stdout)
        if match:
            return int(match[1]), int(match[2])
        time.sleep(_SCREEN_POLL_S)


def set_desktop_size(drive: Drive, size_px: tuple[int, int]) -> None:
    """Make Wine's desktop as large as the screen. Wine must not run: it would overwrite the file. Raises: OSError."""
    file = drive.prefix / "user.reg"
    registry = file.read_bytes()
    size = b'"shell"="%dx%d"' % size_px
    file.write_bytes(re.sub(rb'^"shell"="\d+x\d+"', size, registry, flags=re.MULTILINE))
