"""Decide when a screen has settled after input. `decide` is pure; `settle` refreshes the shadow and waits.

`Settler` knows when one guest got input, and what of it may not have had its effect yet.

Quiet is proven, never assumed: a screen is quiet for `quiet_ms` only once a refresh *sent* that long after the last
change and the last input was answered. So the frame after a settled step is no older than that refresh, and always
newer than the input, since the first refresh is sent after it. See `Screen.refresh` for the proof, and `RfbClient.wake`
for why a passive viewer would see a change up to 3 s late.

Blinking and changes in ignored regions do not count.

A busy guest may be about to draw: an editor that opens a dialog, a page that loads. So a quiet screen settles only once
the guest's processors are idle too. Some guests never are, so this extends the wait by at most `_MAX_BUSY_FACTOR` times
`quiet_ms`. If the guest was idle before the input and has drawn nothing since, the input probably started a program,
and the limit is `_MAX_START_FACTOR` times `quiet_ms`: a response without the program's window would cost the agent a
step.

The reverse holds as well: a guest that worked after the input and is idle again has nothing left to draw, unless a
program sleeps. With `idle_ms` that is evidence enough, and `quiet_ms` is the rule where there is none. An X server
answers a refresh only after it has handed earlier input to programs, which are runnable from then on. So a container's
guest that is idle has handled the input, however little time that took.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from cuaenv.region import Region
from envd.base.channels import GuestChannels
from envd.base.config import SettlePolicy
from envd.desktop.display.change import merged
from envd.desktop.display.screen import Screen
from envd.desktop.display_connection import DISPLAY_TIMEOUT_S, DisplayConnection
from envd.desktop.observation import SettleResult

# Bounds how late a change is dated: when asked, QEMU compares at once, or 30 ms after its last comparison. A refresh
# costs QEMU one comparison, and us one strip of 16 pixels.
_REFRESH_INTERVAL_S = 0.05
# With `idle_ms`, that is two readings of the processors.
_IDLE_REFRESH_INTERVAL_S = 0.025
# A guest whose processors used more than this share of one host core since the last refresh is busy. An idle desktop
# uses a few hundredths; one that opens a window uses a core or more.
_BUSY_SHARE = 0.35
# It must be idle for about two refreshes.
_IDLE_S = 0.1
# With `idle_ms`, one that used more than this share still works: programs that load or draw use 0.4 of a core and more
# in each 25 ms under TCG, an idle desktop 0.05, with bursts.
_WORKING_SHARE = 0.1
# A guest has handled the input once it used this much more processor time. An input event is an interrupt, and costs
# milliseconds under TCG.
_HANDLED_S = 0.0005
_MAX_BUSY_FACTOR = 5.0
# With the default policy 4.8 s in all, just below `max_ms`. A terminal takes 3 to 5 s to appear under TCG on two cores.
_MAX_START_FACTOR = 15.0
# Shortest interval of two readings that gives a usable share.
_SHORTEST_READING_S = 0.02
#: A screen that has been quiet for this part of `quiet_ms` likely stays quiet.
_LIKELY_QUIET = 0.5
#: Regions that changed within this time are reported as moving.
_MOVING_MS = 500
_MAX_MOVING_REGIONS = 16
#: A GTK button shows for 80 to 100 ms that it was clicked, in which its program sleeps. A guest that is emulated works
#: for longer than that.
_CLICK_MIN_MS = 100


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


def decide(
    policy: SettlePolicy,
    *,
    now_s: float,
    began_s: float,
    input_s: float,
    change_s: float,
    seen_s: float,
    busy_s: float = -math.inf,
    working_s: float | None = None,
    was_idle: bool = False,
) -> bool | float:
    """Return True or False once the outcome is known, else the seconds to wait before the next refresh.

    Args:
        now_s: Monotonic time, as all others.
        began_s: Start of the wait; `max_ms` counts from here.
        input_s: End of the last input; `min_ms` counts from here, and `quiet_ms` at the earliest.
        change_s: Arrival of the last change that counts.
        seen_s: The shadow is no older than this.
        busy_s: Last time the guest was found busy.
        working_s: Last time the guest was found working on the input; None if it is unknown whether it handled it.
        was_idle: Whether the guest is known to have been idle before the input.
    """
    # A change that arrives with a refresh is newer than its request, so only a policy with `quiet_ms` refreshes again.
    quiet_at_s = max(input_s, change_s) + policy.quiet_ms / 1000 if policy.quiet_ms else input_s
    is_starting = was_idle and change_s < input_s
    busy_factor = _MAX_START_FACTOR if is_starting else _MAX_BUSY_FACTOR
    # From the beginning of this wait if the input is older: the agent waited for a guest that was busy then.
    busy_end_s = max(quiet_at_s, began_s) + busy_factor * policy.quiet_ms / 1000
    rested_at_s = min(busy_s + _IDLE_S, busy_end_s)
    settled_at_s, interval_s = max(quiet_at_s, rested_at_s), _REFRESH_INTERVAL_S
    if policy.idle_ms and working_s is not None:
        interval_s = _IDLE_REFRESH_INTERVAL_S
        idle_at_s = max(input_s, change_s, working_s) + policy.idle_ms / 1000
        settled_at_s = min(settled_at_s, idle_at_s)
    settled_at_s = max(settled_at_s, input_s + policy.min_ms / 1000)
    if seen_s >= settled_at_s:
        return True
    deadline_s = began_s + policy.max_ms / 1000
    if now_s >= deadline_s and seen_s >= input_s:
        return False
    return max(0.0, min(settled_at_s, deadline_s, now_s + interval_s) - now_s)


async def settle(
    screen: FollowedScreen,
    policy: SettlePolicy,
    *,
    input_s: float,
    was_idle: bool = False,
    processor_s: Callable[[], float | None] = lambda: None,
    reacts_before_answer: bool = False,
    likely_settled: Callable[[], None] = lambda: None,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> SettleResult:
    """Wait until the screen is quiet after the input at `input_s`: at least one refresh, at most `max_ms`.

    Args:
        input_s: Monotonic time of the last input.
        was_idle: Whether the guest is known to have been idle before the input.
        processor_s: Processor seconds that the guest has wanted so far; None if unknown, then only the screen counts.
        reacts_before_answer: See `GuestChannels`: no processor time need show that the input was handled.
        likely_settled: Called once per picture that will likely be the settled one, before that is known.
    """
    began_s = monotonic()
    change_count = screen.change_count
    notified: asyncio.Event | None = None
    processors = _Processors(processor_s, began_s, handled_s=0.0 if reacts_before_answer else _HANDLED_S)
    while True:
        seen_s = await screen.refresh()
        now_s = monotonic()
        processors.read(now_s)
        change_s = screen.last_change_outside_s(policy.ignored_regions)
        decision = decide(
            policy,
            now_s=now_s,
            began_s=began_s,
            input_s=input_s,
            change_s=change_s,
            seen_s=seen_s,
            busy_s=processors.busy_s,
            working_s=processors.working_s,
            was_idle=was_idle,
        )
        if isinstance(decision, bool):
            since_s = now_s - max(policy.quiet_ms, _MOVING_MS) / 1000
            moving = [] if decision else screen.moving_since(since_s, policy.ignored_regions)
            idle_s = min(_IDLE_S, policy.idle_ms / 1000 or _IDLE_S)
            return SettleResult(
                settled=decision,
                settle_ms=(now_s - began_s) * 1000,
                change_count=screen.change_count - change_count,
                is_idle=processors.busy_s + idle_s <= seen_s,
                moving=merged(moving, limit=_MAX_MOVING_REGIONS),
            )
        quiet_s = seen_s - max(input_s, change_s)
        likely_ms = policy.quiet_ms
        if policy.idle_ms and processors.working_s is not None and processors.working_s < now_s:
            likely_ms = min(policy.idle_ms, likely_ms)
        if notified is not screen.changed and quiet_s >= likely_ms / 1000 * _LIKELY_QUIET:
            notified = screen.changed
            likely_settled()
        await sleep(decision)


class _Processors:
    """Readings of the guest's processor time during one wait."""

    def __init__(self, processor_s: Callable[[], float | None], now_s: float, *, handled_s: float) -> None:
        self._processor_s = processor_s
        self._handled_s = handled_s
        self._read_s = now_s
        self._first_s = self._used_s = processor_s()
        # Until the first reading the guest may be busy, also if the last input is long past.
        self.busy_s = -math.inf if self._first_s is None else now_s + _SHORTEST_READING_S - _IDLE_S
        self._working_s = -math.inf

    @property
    def working_s(self) -> float | None:
        if self._first_s is None or self._used_s is None or self._used_s - self._first_s < self._handled_s:
            return None
        return self._working_s

    def read(self, now_s: float) -> None:
        """Read the processor time, unless the last reading is too recent for a usable share."""
        interval_s = now_s - self._read_s
        if interval_s < _SHORTEST_READING_S:
            return
        before_s, self._used_s = self._used_s, self._processor_s()
        self._read_s = now_s
        if self._used_s is None or before_s is None:
            return
        share = (self._used_s - before_s) / interval_s
        if share > _BUSY_SHARE:
            self.busy_s = now_s
        if share > _WORKING_SHARE:
            self._working_s = now_s


def policy_after(policy: SettlePolicy, *, may_act_late: bool, was_clicked: bool) -> SettlePolicy:
    """Return the policy for input after which an idle guest may still be about to draw. Pure.

    Args:
        may_act_late: Whether a key can have activated a button.
        was_clicked: Whether a mouse button was pressed in a guest that reacts within milliseconds.
    """
    if may_act_late:
        return policy.model_copy(update={"idle_ms": 0})
    if was_clicked and policy.idle_ms:
        return policy.model_copy(update={"min_ms": max(policy.min_ms, _CLICK_MIN_MS)})
    return policy


class Settler:
    """Waits until the screen of one guest is quiet."""

    def __init__(self, channels: GuestChannels, *, display: DisplayConnection, screen: Screen) -> None:
        self._channels = channels
        self._display = display
        self._screen = screen
        self.may_act_late = False
        """Whether a key since the screen last settled can activate a button; see `acting.may_act_late`."""
        self.was_clicked = False
        """Whether a mouse button was pressed since the screen last settled."""
        self._input_s = self._key_s = self._pointer_s = self._quiet_s = time.monotonic()

    @property
    def is_pointer_pending(self) -> bool:
        """Whether pointer input may not have had its effect yet."""
        return self._pointer_s > self._quiet_s

    @property
    def is_input_pending(self) -> bool:
        """Whether input may not have had its effect yet."""
        return max(self._pointer_s, self._key_s) > self._quiet_s

    def note_input(self, *, pointer: bool = False, keys: bool = False) -> None:
        """Record that input arrives now; neither pointer nor keys for other work in the guest."""
        self._input_s = time.monotonic()
        if pointer:
            self._pointer_s = self._input_s
        if keys:
            self._key_s = self._input_s

    def note_woken(self) -> None:
        """Record that the guest has just started to run: what it shows is newer than all earlier input."""
        self._input_s = self._quiet_s = time.monotonic()

    async def settle(
        self, policy: SettlePolicy, *, was_idle: bool = False, likely_settled: Callable[[], None] = lambda: None
    ) -> SettleResult:
        """Wait until the screen is quiet after the last input; see `settle`."""
        policy = policy_after(
            policy, may_act_late=self.may_act_late, was_clicked=self.was_clicked and self._channels.reacts_before_answer
        )
        result = await self._display.read(
            lambda: settle(
                self._screen,
                policy,
                input_s=self._input_s,
                was_idle=was_idle,
                processor_s=self._channels.processor_s,
                reacts_before_answer=self._channels.reacts_before_answer,
                likely_settled=likely_settled,
            ),
            timeout_s=max(policy.max_ms, policy.min_ms) / 1000 + DISPLAY_TIMEOUT_S,
        )
        if result.settled:
            self._quiet_s = time.monotonic()
            self.may_act_late = self.was_clicked = False
        return result
