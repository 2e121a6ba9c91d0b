"""Measure for how long the event loop did not run, so that nothing expires for callers who were not served."""

import asyncio
import time
from collections.abc import Callable


class LoopLag:
    """The delay of a task that wakes at fixed intervals."""

    def __init__(self, *, interval_s: float = 0.25, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Measure nothing before `run`."""
        self._interval_s = interval_s
        self._monotonic = monotonic
        self._last_s: float | None = None
        self._listeners: list[Callable[[float], None]] = []

    def listen(self, listener: Callable[[float], None]) -> None:
        """Call `listener` with the seconds of each delay, 0 if there was none."""
        self._listeners.append(listener)

    async def run(self) -> None:
        """Measure until cancelled."""
        self._last_s = self._monotonic()
        while True:
            await asyncio.sleep(self._interval_s)
            self.measure()

    def measure(self) -> None:
        """Report the delay since the last measurement.

        After a stall, tasks wake in any order: call this before a decision that a stall must not influence.
        """
        if self._last_s is None:
            return
        now_s = self._monotonic()
        lag_s = max(0.0, now_s - self._last_s - self._interval_s)
        self._last_s = now_s
        for listener in self._listeners:
            listener(lag_s)
