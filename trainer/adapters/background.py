"""Sessions for code without an event loop: one loop per process, in a thread of its own."""

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a session's coroutine from code without an event loop, and return its result.

    Interrupting the caller cancels the coroutine. See `in_background`.
    """
    future = in_background(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def in_background(work: Coroutine[Any, Any, T]) -> "Future[T]":
    """Start a session's coroutine in this process's loop for sessions, which has a thread of its own.

    Sessions of several threads and loops can join one group there. At the end of the process the loop closes its open
    sessions.
    """
    return _Background.of_process().start(work)


class _Background:
    """An event loop in its own thread."""

    _lock = threading.Lock()
    _current: "_Background | None" = None

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="sessions", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    @classmethod
    def of_process(cls) -> "_Background":
        """Return this process's loop; a forked child has none yet, because threads are not forked."""
        with cls._lock:
            if cls._current is None or cls._current._pid != os.getpid():
                cls._current = cls()
            return cls._current

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stopping.wait())

    def _stop(self) -> None:
        if self._pid == os.getpid():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
