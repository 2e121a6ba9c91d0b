"""Open episodes on one host exactly once, and close those that their caller abandons.

`Reset` and `Fork` are retried under one request id until their outcome is known: the service joins a retry to the
running call, or repeats its response. If the caller is cancelled or times out, or the client is closed, a task here
closes the opening by its request id. If the host cannot be reached, it ends the opening by itself.
"""

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final, Literal

from cuaenv.client.connection import DaemonConnection, closed_error
from cuaenv.client.errors import DeadlineExceeded, EnvError
from cuaenv.client.placement import next_attempt, retry_pause_s
from cuaenv.v1 import env_pb2

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT: Final = timedelta(seconds=5)

OpeningRequest = env_pb2.ResetRequest | env_pb2.ForkRequest


class Opener:
    """Opens episodes at one host."""

    def __init__(self, connection: DaemonConnection, *, changed: Callable[[], None]) -> None:
        """Prepare; `changed` is called whenever an opening ends."""
        self._connection = connection
        self._changed = changed
        self._sent: dict[str, tuple[float, int]] = {}
        self._logging: asyncio.Task[None] | None = None
        self._leftovers: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()

    @property
    def open_count(self) -> int:
        return sum(size for _, size in self._sent.values())

    @property
    def leftover_count(self) -> int:
        """Abandoned calls whose episodes are still to be closed."""
        return len(self._leftovers)

    def sent_count_since(self, time_s: float) -> int:
        """Return how many of the episodes being opened were requested after a time."""
        return sum(size for sent_s, size in self._sent.values() if sent_s > time_s)

    async def open(self, request: OpeningRequest, *, size: int, deadline_s: float, may_abandon: bool) -> Any:
        """Return the response to a `Reset` or `Fork`.

        Args:
            request: Passing the same message again continues the same request.
            deadline_s: Deadline of all attempts, by the loop's clock.
            may_abandon: Stop after the host has been unreachable for `RetryPolicy.reconnect_timeout`.

        Raises:
            EnvError: Nothing was opened, or `next_attempt` returns UNKNOWN.
        """
        method: Literal["Reset", "Fork"] = "Reset" if isinstance(request, env_pb2.ResetRequest) else "Fork"
        policy = self._connection.retry
        loop = asyncio.get_running_loop()
        running: asyncio.Task[Any] | None = None
        lost_s: float | None = None
        began_s = loop.time()
        attempt = 0
        with self._counted(request.request_id, size):
            try:
                while not self._closed.is_set():
                    attempt_s = min(policy.attempt_timeout.total_seconds(), deadline_s - loop.time())
                    running = asyncio.create_task(self._connection.attempt(method, request, timeout_s=attempt_s))
                    await asyncio.wait({running})  # not `await running`: a cancellation must not cancel it
                    error = running.exception()
                    if error is None:
                        return running.result()
                    running = None
                    if self._closed.is_set():
                        break
                    if not isinstance(error, EnvError) or next_attempt(error) != "unknown":
                        raise error
                    now_s = loop.time()
                    lost_s = None if isinstance(error, DeadlineExceeded) else lost_s or now_s
                    pause_s = retry_pause_s(error, attempt=attempt, policy=policy, jitter=random.random()) or 0.0  # noqa: S311
                    give_up_s = (
                        lost_s + policy.reconnect_timeout.total_seconds() if lost_s and may_abandon else deadline_s
                    )
                    left_s = self._connection.left_s(error, began_s=began_s, deadline_s=min(give_up_s, deadline_s))
                    if pause_s >= left_s:
                        raise error
                    self._connection.log_retry(method, error, attempt=attempt, left_s=left_s)
                    await self.pause(pause_s)
                    if loop.time() >= deadline_s:  # the sleep overran
                        raise error
                    attempt += 1
                raise closed_error(self._connection.target)
            except (asyncio.CancelledError, DeadlineExceeded):
                self._abandon(request.request_id, running)
                raise

    async def pause(self, pause_s: float) -> None:
        """Wait before another attempt, until this is closed at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._closed.wait()

    async def aclose(self, timeout_s: float) -> None:
        """End running openings and wait for abandoned ones; after `timeout_s` the rest is left to leases."""
        self._closed.set()
        for request_id in self._sent:
            self._abandon(request_id, None)
        if not self._leftovers:
            return
        _, late = await asyncio.wait(self._leftovers, timeout=timeout_s)
        for task in late:
            task.cancel()
        if late:
            logger.warning("%d abandoned openings at %s are left to their leases", len(late), self._connection.target)
            await asyncio.wait(late)

    @contextlib.contextmanager
    def _counted(self, request_id: str, size: int) -> Iterator[None]:
        self._sent[request_id] = (asyncio.get_running_loop().time(), size)
        if self._logging is None:
            self._logging = asyncio.create_task(log_waits(self._connection), name=f"waits:{self._connection.target}")
        try:
            yield
        finally:
            del self._sent[request_id]
            if not self._sent:
                self._logging.cancel()
                self._logging = None
            self._changed()

    def _abandon(self, request_id: str, running: asyncio.Task[Any] | None) -> None:
        if running is not None:
            running.cancel()
        task = asyncio.create_task(self._close(request_id), name=f"leftover:{request_id}")
        self._leftovers.add(task)
        task.add_done_callback(self._leftovers.discard)

    async def _close(self, request_id: str) -> None:
        """End a call at the service, whatever it has done by now."""
        try:
            await self._connection.call("Close", env_pb2.CloseRequest(opening_id=request_id), _CLOSE_TIMEOUT)
        except EnvError as error:
            logger.warning("opening %s: not closed, leases end its episodes: %s", request_id, error)


_INTERVAL_S: Final = 5.0
_REPEATED_AFTER: Final = 6


async def log_waits(connection: DaemonConnection) -> None:
    """Log every 5 s which of a host's pools have no machine to give, and why, until cancelled; the same every 30 s.

    A pool without machines is a warning, and so is every 30 s the first report of a busy pool: both are visible without
    a configuration of logging. A queue that moves is normal.
    """
    logged: set[str] = set()
    for count in itertools.count():
        await asyncio.sleep(_INTERVAL_S)
        if count % _REPEATED_AFTER == 0:
            logged.clear()
        try:
            request = env_pb2.ListPoolsRequest(include_queue=True)
            pools = (await connection.attempt("ListPools", request, timeout_s=_INTERVAL_S)).pools
        except EnvError:
            continue  # the opening itself logs and reports what is wrong
        for pool in pools:
            is_empty = not pool.idle_count + pool.leased_count
            reason = wait_reason(pool)
            message = f"waiting for pool {pool.name} at {connection.target}: {reason}"
            if reason and message not in logged:
                logger.log(logging.WARNING if is_empty or pool.name not in logged else logging.INFO, message)
                logged |= {message, pool.name}


def wait_reason(pool: env_pb2.Pool) -> str:
    """Return why episodes that a pool should hold wait; empty if none do."""
    if not pool.waiting_count:
        return ""
    problem = f"; {pool.problem}" if pool.problem else ""
    if not pool.idle_count + pool.leased_count:
        return ("starting machines" if pool.template_digest else "preparing the template") + problem
    if pool.queue:
        return pool.queue[0].reason + problem
    machine_count = pool.resident_count or pool.capacity_count
    return f"{pool.waiting_count} episodes in the queue, {pool.leased_count} of {machine_count} machines busy"
