"""Helpers for asyncio: task ownership, change notification, fair use of the event loop, races and shields."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class OwnedTasks:
    """Tasks that belong to one object and end no later than it does.

    A task that raises is logged here, once: nothing awaits these tasks for a result.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def join(self) -> None:
        """Wait until every task has ended, including tasks that are started meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Cancel every task and wait until all have ended."""
        for task in self._tasks:
            task.cancel()
        await self.join()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("task %s failed", task.get_name(), exc_info=error)


class Changes:
    """Wakes all that wait for the next change of something.

    To miss no change, take `next` before reading the state and wait on it afterwards.
    """

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    @property
    def next(self) -> asyncio.Event:
        """Set at the next `notify`."""
        return self._next

    def notify(self) -> None:
        """Wake all waiters and call every listener."""
        changed, self._next = self._next, asyncio.Event()
        changed.set()
        for listener in self._listeners:
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` at every `notify` from now on. It must neither wait nor cause a change."""
        self._listeners.append(listener)


class LoopThrottle:
    """Admits a limited number of callers in each iteration of the event loop, in order of arrival.

    If all callers started at once they would interleave and all finish late. With fewer of them in progress, each
    iteration is short for everything else on the loop, and a busy processor loses no throughput.
    """

    def __init__(self, width: int) -> None:
        self._width = self._left = width
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Wait until the caller is admitted: at once while fewer than `width` callers came in this iteration."""
        loop = asyncio.get_running_loop()
        if self._left == self._width:
            loop.call_soon(self._admit_more)
        if self._left:
            self._left -= 1
            return
        admitted: asyncio.Future[None] = loop.create_future()
        self._waiting.append(admitted)
        await admitted

    def _admit_more(self) -> None:
        self._left = self._width
        while self._waiting and self._left:
            admitted = self._waiting.popleft()
            if not admitted.done():  # not cancelled
                admitted.set_result(None)
                self._left -= 1
        if self._left < self._width:
            asyncio.get_running_loop().call_soon(self._admit_more)


async def race(*waits: "asyncio.Event | asyncio.Future[Any]", timeout_s: float | None = None) -> None:
    """Wait until an event is set or a future is done, or until `timeout_s` has passed. Cancels none of the futures."""
    futures = [wait for wait in waits if isinstance(wait, asyncio.Future)]
    events = [asyncio.ensure_future(wait.wait()) for wait in waits if isinstance(wait, asyncio.Event)]
    try:
        await asyncio.wait([*futures, *events], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for event in events:
            event.cancel()


async def run_unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, but cancel it once `stop` is set; returns when it has ended. Raises what `work` raises."""
    running = asyncio.ensure_future(work)
    try:
        await race(running, stop)
    finally:
        running.cancel()
        await asyncio.wait({running})
    if not running.cancelled():
        running.result()


async def shielded(work: Awaitable[T], *, undo: Callable[[T], Awaitable[object]] | None = None) -> T:
    """Run `work` to its end even if the caller is cancelled; the cancellation is delivered afterwards.

    `undo` releases the result that a cancelled caller does not get.
    """
    task = asyncio.ensure_future(work)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        # `exception` also marks it as retrieved: the cancellation takes precedence.
        if not task.cancelled() and task.exception() is None and undo is not None:
            await shielded(undo(task.result()))
        raise cancellation
    return task.result()
