"""Limit the episodes of one client. Callers over the limit wait here, not in a daemon's queue."""

import asyncio
from collections import deque


class EpisodeLimiter:
    """Admits groups whole, in order of arrival. For one event loop; no locks, since code between awaits is atomic."""

    def __init__(self, limit: int | None) -> None:
        """Admit at most `limit` episodes; None for no limit. Raises: ValueError: the limit is below 1."""
        if limit is not None and limit < 1:
            raise ValueError(f"max_episodes {limit} is below 1; give at least 1, or None for no limit")
        self._limit = limit
        self._held_count = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    def __repr__(self) -> str:
        return f"<EpisodeLimiter {self._held_count} of {self._limit}, {self.waiting_count} waiting>"

    @property
    def waiting_count(self) -> int:
        return sum(count for count, admitted in self._queue if not admitted.done())

    async def acquire(self, count: int) -> None:
        """Wait for `count` episodes to be admitted; a cancelled caller holds none.

        Raises:
            ValueError: `count` is above the limit.
        """
        if self._limit is not None and count > self._limit:
            raise ValueError(f"a group of {count} never fits max_episodes={self._limit}; raise it, or open fewer")
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((count, admitted))
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():
                self._held_count -= count
            self._queue = deque(waiting for waiting in self._queue if waiting[1] is not admitted)
            self._admit()
            raise

    def release(self, count: int = 1) -> None:
        """Let others take the places of `count` admitted episodes."""
        self._held_count -= count
        self._admit()

    def _admit(self) -> None:
        while self._queue and (self._limit is None or self._held_count + self._queue[0][0] <= self._limit):
            count, admitted = self._queue.popleft()
            if not admitted.cancelled():
                self._held_count += count
                admitted.set_result(None)
