"""Sessions for code without an event loop: one loop per process, in a thread of its own."""

import atexit
import functools
import os
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from cuaenv.loop_thread import LoopThread

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
    # A forked child has none yet, because threads are not forked.
    with _lock:
        thread = _thread_of(os.getpid())
    return thread.start(work)


_lock = threading.Lock()


@functools.cache
def _thread_of(pid: int) -> LoopThread:  # noqa: ARG001 -- each process has its own
    """Start the thread of this process, which ends with it."""
    thread = LoopThread("sessions")
    atexit.register(thread.close)
    return thread
