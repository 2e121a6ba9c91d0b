"""An event loop in a thread of its own, for callers that have no loop or another one."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

T = TypeVar("T")

_LAST_TASKS_S: Final = 20.0


class LoopThread:
    """An event loop that runs in a daemon thread until it is stopped, or the process ends."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self.pid = os.getpid()
        """The process that it runs in; a forked one has no such thread."""
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine in the loop, and return the future of its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def stop(self) -> None:
        """End the thread, without waiting: the loop cancels its tasks, waits at most 20 s for them, and is closed."""
        self.loop.call_soon_threadsafe(self.loop.stop)

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def close(self, last: Callable[[], Coroutine[Any, Any, object]] | None = None) -> None:
        """Run `last` in the loop, and end the thread. In a forked process, or once it has ended, this does nothing."""
        if self.pid != os.getpid() or self.loop.is_closed():
            return
        try:
            if last is not None:
                self.start(last()).result()
        finally:
            self.stop()
            self.join()

    def _run(self) -> None:
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(self._end())
        finally:
            # Without waiting for the threads of its executor, as `asyncio.Runner` does by one more thread: CPython 3.12
            # starts none while the process ends.
            self.loop.close()

    async def _end(self) -> None:
        if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            # A task that ignores it does not keep the process. Not `gather`, which would hide the errors of their ends.
            await asyncio.wait(tasks, timeout=_LAST_TASKS_S)
        await self.loop.shutdown_asyncgens()
