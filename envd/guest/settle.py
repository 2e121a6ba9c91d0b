"""Decide when a screen has settled after input. `decide` is pure; `settle` looks and waits.

Quiet is proven, never assumed: `Screen.look` tells up to which moment the shadow is known to be true, and a screen is
quiet for `quiet_ms` only once a look *sent* that long after the last change (or the last input) was answered. So the
frame after a settled step shows nothing older than that look, and always something newer than the input: the first
look is sent after it. See `Screen.look` for why QEMU's answers bear this out, and `RfbClient.wake` for why a
viewer that merely listens would see a change up to 3 s late.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from envd.guest.observation import SettlePolicy, SettleResult
from envd.guest.screen import Screen

# Bounds how late a change is dated: QEMU looks at once when asked, or 30 ms after its last look. Each costs QEMU one
# comparison of what the guest drew, and us one strip of 16 pixels.
_LOOK_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What is known of a screen. Monotonic times in seconds."""

    now_s: float
    began_s: float
    """When the wait began; `max_ms` counts from here."""
    input_s: float
    """When the last input had been handed over; `min_ms` counts from here, and `quiet_ms` at the earliest."""
    change_s: float
    """When the last change arrived."""
    seen_s: float
    """Up to when the shadow is known to be true."""


def decide(policy: SettlePolicy, sight: Sight) -> bool | float:
    """Return whether the screen has settled, once that is known, else for how many seconds to wait before looking."""
    quiet_at_s = max(sight.input_s, sight.change_s) + policy.quiet_ms / 1000
    settled_at_s = max(quiet_at_s, sight.input_s + policy.min_ms / 1000)
    if sight.seen_s >= settled_at_s:
        return True
    give_up_s = sight.began_s + policy.max_ms / 1000
    if sight.now_s >= give_up_s and sight.seen_s >= sight.input_s:
        return False
    return max(0.0, min(settled_at_s, give_up_s, sight.now_s + _LOOK_INTERVAL_S) - sight.now_s)


async def settle(
    screen: Screen,
    policy: SettlePolicy,
    *,
    input_s: float,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> SettleResult:
    """Wait until the screen is quiet after the input at `input_s`, at least by one look and at most `max_ms`.

    Raises:
        MachineLost: The display's connection ended.
    """
    began_s = monotonic()
    change_count = screen.change_count
    while True:
        seen_s = await screen.look()
        now_s = monotonic()
        verdict = decide(
            policy, Sight(now_s=now_s, began_s=began_s, input_s=input_s, change_s=screen.last_change_s, seen_s=seen_s)
        )
        if isinstance(verdict, bool):
            return SettleResult(
                settled=verdict,
                settle_ms=(now_s - began_s) * 1000,
                change_count=screen.change_count - change_count,
            )
        await sleep(verdict)
