"""One host of several: its state, its load, and the episodes opened there."""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Final

import grpc

from cuaenv.client.connection import DaemonConnection
from cuaenv.client.errors import EnvError, Unavailable
from cuaenv.client.leases import LeaseKeeper
from cuaenv.client.observation import Observation, read_observation
from cuaenv.client.opening import Opener
from cuaenv.client.placement import HostLoad, load_of
from cuaenv.client.results import Pool, read_pool
from cuaenv.v1 import env_pb2

logger = logging.getLogger(__name__)

#: A reset sent less than this before a report of the pools may not be counted in it.
_UNSEEN_S: Final = 0.5
_FIRST_PAUSE_S: Final = 0.2
_MAX_PAUSE_S: Final = 10.0

#: Not the loop's own threads: callers may block all of those until a step returns.
_decoders: Final = ThreadPoolExecutor(4, thread_name_prefix="decoder")


class HostState(Enum):
    """Whether a host is available."""

    #: It has not reported yet.
    UNKNOWN = "unknown"
    #: It reports its pools.
    UP = "up"
    #: It does not respond; polled less and less often.
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatistics:
    """A host as one event loop's client sees it."""

    target: str
    state: HostState
    capacity: int
    """Most machines of its pools; 0 while it is not watched."""
    room: int
    """Machines that it could lease now; negative if more episodes wait than machines are free."""
    episode_count: int
    """Open here, by this client."""
    opening_count: int
    """Being opened, by this client."""
    leftover_count: int
    """Abandoned resets and forks whose episodes are still to be closed."""
    problem: str
    """Why it is not available; empty while it is."""


class Host:
    """One daemon, for one event loop."""

    def __init__(
        self, connection: DaemonConnection, *, keep_alive_interval: timedelta | None, changed: Callable[[], None]
    ) -> None:
        """Prepare; no call is made yet.

        Args:
            keep_alive_interval: Interval of lease renewals; by default a third of the shortest lease.
            changed: Called when its state or load may have changed.
        """
        self.target = connection.target
        self.connection = connection
        self.leases = LeaseKeeper(connection, interval=keep_alive_interval, changed=changed)
        self.opener = Opener(connection, changed=changed)
        self.state = HostState.UNKNOWN
        self.problem: EnvError | None = None
        """Its last error, while it is DOWN."""
        self.last_error: EnvError | None = None
        """Its last error of an opening."""
        self._changed = changed
        self._pools: Sequence[Pool] = ()
        self._reported_s = 0.0
        self._backs_off_until_s: dict[tuple[str, str] | None, float] = {}
        self._pool_by_task: dict[str, str] = {}
        self._watching: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        s = self.statistics()
        load = f" {s.room}/{s.capacity} free" if s.state is HostState.UP else ""
        return f"<Host {s.target} {s.state.value}{load} | {s.episode_count} episodes | {s.opening_count} opening>"

    def watch(self) -> None:
        """Start to watch its pools. Idempotent."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name=f"watch-pools:{self.target}")

    def load(self, task: str = "", pool: str = "") -> HostLoad:
        """Return its load in `pool`, else in the task's own pool if known, else in all pools."""
        unseen_count = self.opener.sent_count_since(self._reported_s - _UNSEEN_S)
        pool = pool or self._pool_by_task.get(task, "")
        return load_of(self._pools, pool=pool, unseen_count=unseen_count)

    def note_pool(self, task: str, pool: str) -> None:
        """Record in which pool a task's episodes are opened here."""
        self._pool_by_task[task] = pool

    def pool_of(self, task: str) -> str:
        """Return the pool in which a task's episodes were opened here; empty if unknown."""
        return self._pool_by_task.get(task, "")

    def back_off(self, pause_s: float, *, because: EnvError, only: tuple[str, str] | None = None) -> None:
        """Open no episodes here for `pause_s`; with `only`, none of that (task, pool)."""
        self._backs_off_until_s[only] = asyncio.get_running_loop().time() + pause_s
        self.last_error = because
        logger.info("%s: no episodes are opened there for %.1f s: %s: %s", self.target, pause_s, because.code, because)

    def backs_off_until_s(self, task: str, pool: str) -> float:
        """Return when such episodes may be requested from it again, by the loop's clock; may be past."""
        return max(self._backs_off_until_s.get(None, 0.0), self._backs_off_until_s.get((task, pool), 0.0))

    async def decode(self, message: env_pb2.Observation, base: Observation | None = None) -> Observation:
        """Decode an observation; arguments and errors are those of `read_observation`.

        An image takes about a millisecond, a third of the loop's time for a turn, so threads decode images.
        """
        if message.frame.WhichOneof("content") is None:
            return read_observation(message, base)
        return await asyncio.get_running_loop().run_in_executor(_decoders, read_observation, message, base)

    def statistics(self) -> HostStatistics:
        load = self.load()
        return HostStatistics(
            target=self.target,
            state=self.state,
            capacity=load.capacity,
            room=load.room,
            episode_count=len(self.leases),
            opening_count=self.opener.open_count,
            leftover_count=self.opener.leftover_count,
            problem=str(self.problem or ""),
        )

    async def aclose(self) -> None:
        """Close the episodes without an owner, then disconnect. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        await self.leases.aclose()
        await self.connection.aclose()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        failure_count = 0
        while True:
            began_s = loop.time()
            try:
                async for message in self.connection.stub().WatchPools(env_pb2.WatchPoolsRequest()):
                    self._note_pools([read_pool(pool, self.target) for pool in message.pools])
                ended = f"{self.target} ended its stream of pools; it is stopping"
                self._note_down(Unavailable(ended, host=self.target))
            except grpc.aio.AioRpcError as failure:
                self._note_down(self.connection.error_of(failure))
            # A stopping daemon sends its pools once more and ends the stream at once.
            if loop.time() - began_s > _MAX_PAUSE_S:
                failure_count = 0
            bound_s = min(_FIRST_PAUSE_S * 2.0**failure_count, _MAX_PAUSE_S)
            await asyncio.sleep(bound_s * random.uniform(0.5, 1.0))  # noqa: S311
            failure_count = min(failure_count + 1, 30)

    def _note_pools(self, pools: Sequence[Pool]) -> None:
        if self.state is HostState.DOWN:
            logger.info("host %s is available again", self.target)
        self.connection.was_reached = True
        self._pools, self._reported_s = pools, asyncio.get_running_loop().time()
        self.state, self.problem = HostState.UP, None
        self._changed()

    def _note_down(self, problem: EnvError) -> None:
        if self.state is not HostState.DOWN:
            logger.warning("host %s is unavailable and gets no new episodes: %s", self.target, problem)
        self._pools = ()
        self.state, self.problem = HostState.DOWN, problem
        self._changed()
