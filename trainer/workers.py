"""A process that works for this one, and the pipe to it."""

import contextlib
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any


class WorkerProcess:
    """A fresh process that runs a function with its end of the pipe. It ends with this process at the latest."""

    def __init__(self, target: Callable[..., None], *arguments: Any, name: str) -> None:
        """Start it as `target(pipe, *arguments)`; all of it is pickled."""
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        """Our end. Receiving from it raises EOFError once the process has ended."""
        self._process = context.Process(target=target, args=(theirs, *arguments), name=name, daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0

    @property
    def exit_status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.exitcode

    def stop(self, message: object, *, timeout_s: float) -> None:
        """Send its last message and wait for its end; kill it if it takes longer. Closes the pipe."""
        with contextlib.suppress(OSError):
            self.pipe.send(message)
        self._process.join(timeout_s)
        if self._process.is_alive():
            self.kill()
        self.pipe.close()

    def kill(self) -> None:
        """Kill it, and wait for its end. The pipe stays open, for what it had sent."""
        self._process.kill()
        self._process.join()
