"""Decide when a screen has settled after input. `decide` is pure; `settle` refreshes the shadow and waits.

Quiet is proven, never assumed: a screen is quiet for `quiet_ms` only once a refresh *sent* that long after the last
change and the last input was answered. So the frame after a settled step is no older than that refresh, and always
newer than the input, since the first refresh is sent after it. See `Screen.refresh` for the proof, and `RfbClient.wake`
for why a passive viewer would see a change up to 3 s late.

Blinking and changes in ignored regions do not count.

A busy guest may be about to draw: an editor that opens a dialog, a page that loads. So a quiet screen settles only once
the guest's processors are idle too, after at most `_MAX_BUSY_FACTOR` times `quiet_ms` more: some guests never are.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from cuaenv.region import Region

from envd.guest.display.change import merged
from envd.guest.observation import SettlePolicy, SettleResult

# Bounds how late a change is dated: when asked, QEMU compares at once, or 30 ms after its last comparison. A refresh
# costs QEMU one comparison, and us one strip of 16 pixels.
_REFRESH_INTERVAL_S = 0.05
# A guest whose processors used more than this share of one host core since the last refresh is busy. An idle desktop
# uses a few hundredths; one that opens a window uses a core or more.
_BUSY_SHARE = 0.35
# It must be idle for about two refreshes.
_IDLE_S = 0.1
_MAX_BUSY_FACTOR = 5.0
# Shortest interval of two readings that gives a usable share.
_SHORTEST_READING_S = 0.02
#: A screen that has been quiet for this part of `quiet_ms` likely stays quiet.
_LIKELY_QUIET = 0.5
#: Regions that changed within this time are reported as moving.
_MOVING_MS = 500
_MAX_MOVING_REGIONS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleState:
    """Observed state of a screen. Monotonic times in seconds."""

    now_s: float
    began_s: float
    """Start of the wait; `max_ms` counts from here."""
    input_s: float
    """End of the last input; `min_ms` counts from here, and `quiet_ms` at the earliest."""
    change_s: float
    """Arrival of the last change that counts."""
    seen_s: float
    """The shadow is no older than this."""
    busy_s: float = -math.inf
    """When the guest was last found busy."""


class FollowedScreen(Protocol):
    """The part of `Screen` that settling needs."""

    @property
    def change_count(self) -> int:
        """Updates with changed pixels so far, other than blinking."""

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change."""

    def last_change_outside_s(self, ignored: tuple[Region, ...]) -> float:
        """Return the monotonic time of the last change that is not within ignored regions."""

    def moving_since(self, since_s: float, ignored: tuple[Region, ...]) -> list[Region]:
        """Return the regions that changed since a monotonic time, without those within ignored ones."""

    async def refresh(self) -> float:
        """Bring the shadow up to date; return the monotonic time that it is no older than. Raises: MachineLost."""


def decide(policy: SettlePolicy, state: SettleState) -> bool | float:
    """Return True or False once the outcome is known, else the seconds to wait before the next refresh."""
    # A change that arrives with a refresh is newer than its request, so only a policy with `quiet_ms` refreshes again.
    quiet_at_s = max(state.input_s, state.change_s) + policy.quiet_ms / 1000 if policy.quiet_ms else state.input_s
    rested_at_s = min(state.busy_s + _IDLE_S, quiet_at_s + _MAX_BUSY_FACTOR * policy.quiet_ms / 1000)
    settled_at_s = max(quiet_at_s, rested_at_s, state.input_s + policy.min_ms / 1000)
    if state.seen_s >= settled_at_s:
        return True
    deadline_s = state.began_s + policy.max_ms / 1000
    if state.now_s >= deadline_s and state.seen_s >= state.input_s:
        return False
    return max(0.0, min(settled_at_s, deadline_s, state.now_s + _REFRESH_INTERVAL_S) - state.now_s)


async def settle(
    screen: FollowedScreen,
    policy: SettlePolicy,
    *,
    input_s: float,
    processor_s: Callable[[], float | None] = lambda: None,
    likely_settled: Callable[[], None] = lambda: None,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> SettleResult:
    """Wait until the screen is quiet after the input at `input_s`: at least one refresh, at most `max_ms`.

    Args:
        screen: The screen, being followed.
        policy: When the screen counts as quiet.
        input_s: Monotonic time of the last input.
        processor_s: CPU seconds used by the guest so far; None if unknown, then only the screen counts.
        likely_settled: Called once per picture that will likely be the settled one, before that is known.
        monotonic: The monotonic clock.
        sleep: Sleeps for seconds.

    Raises:
        MachineLost: The display's connection ended.
    """
    began_s = monotonic()
    change_count = screen.change_count
    busy_s = -math.inf
    notified: asyncio.Event | None = None
    read_s, used_s = began_s, processor_s()
    while True:
        seen_s = await screen.refresh()
        now_s = monotonic()
        if now_s - read_s >= _SHORTEST_READING_S:
            before_s, used_s = used_s, processor_s()
            if used_s is not None and before_s is not None and used_s - before_s > _BUSY_SHARE * (now_s - read_s):
                busy_s = now_s
            read_s = now_s
        change_s = screen.last_change_outside_s(policy.ignored)
        state = SettleState(
            now_s=now_s, began_s=began_s, input_s=input_s, change_s=change_s, seen_s=seen_s, busy_s=busy_s
        )
        decision = decide(policy, state)
        if isinstance(decision, bool):
            moving = (
                [] if decision else screen.moving_since(now_s - max(policy.quiet_ms, _MOVING_MS) / 1000, policy.ignored)
            )
            return SettleResult(
                settled=decision,
                settle_ms=(now_s - began_s) * 1000,
                change_count=screen.change_count - change_count,
                moving=merged(moving, limit=_MAX_MOVING_REGIONS),
            )
        quiet_s = seen_s - max(input_s, change_s)
        if notified is not screen.changed and quiet_s >= policy.quiet_ms / 1000 * _LIKELY_QUIET:
            notified = screen.changed
            likely_settled()
        await sleep(decision)
