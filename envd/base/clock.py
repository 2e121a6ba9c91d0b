"""Time as an argument: monotonic deadlines, timestamps of the host, and waits that tests can advance."""

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol

from envd.base.aio import run_unless


class Clock(Protocol):
    """A source of time."""

    def monotonic(self) -> float:
        """Return seconds since a fixed point; never decreases. For deadlines."""

    def now(self) -> datetime:
        """Return the host's time, timezone-aware. Only for timestamps: it may jump."""

    async def sleep(self, delay_s: float) -> None:
        """Return after `delay_s`, at once if it is not positive."""


class SystemClock:
    """The host's own clocks."""

    def monotonic(self) -> float:
        """See `Clock`."""
        return time.monotonic()

    def now(self) -> datetime:
        """See `Clock`."""
        return datetime.now(UTC)

    async def sleep(self, delay_s: float) -> None:
        """See `Clock`."""
        await asyncio.sleep(max(0.0, delay_s))


async def wait_until(clock: Clock, at_s: float | None, *, or_event: asyncio.Event) -> None:
    """Wait until `clock` reads `at_s` or `or_event` is set; with None, for the event alone."""
    if at_s is None:
        await or_event.wait()
    elif not or_event.is_set():
        await run_unless(or_event, clock.sleep(at_s - clock.monotonic()))
