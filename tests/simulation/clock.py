"""A virtual clock with a queue of events."""

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class EventQueue:
    """Calls functions at virtual times, in order; equal times in order of scheduling."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.event_count = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call a function after a delay."""
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._order), call, args))

    def run(self, until_s: float) -> None:
        """Call everything that is due by a time."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, call, args = heapq.heappop(self._events)
            self.event_count += 1
            call(*args)
        self.now_s = until_s
