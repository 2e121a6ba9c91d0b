"""Record how a screen reacts to input, and replay settling over the recording. Knows no tasks and no reports.

A recording continues long after the screen has settled, so every policy is judged on the same reaction. Replaying runs
`envd.desktop.settler.settle` itself on a clock that the recording drives.
"""

import asyncio
import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from cuaenv.actions import Action
from cuaenv.frames import TiledImage
from cuaenv.region import Region
from envd.base.config import SettlePolicy
from envd.desktop.acting import clicks, may_act_late
from envd.desktop.desktop import Desktop
from envd.desktop.display.change import around, is_within
from envd.desktop.display.screen import MAX_BLINK_PIXELS, Blinking
from envd.desktop.observation import SettleResult
from envd.desktop.settler import policy_after, settle
from envd.hypervisor.machine import Machine

#: Between two refreshes. QEMU compares the guest's screen at most every 30 ms.
_REFRESH_INTERVAL_S = 0.01
#: Most quiet time that a policy of the benchmark waits for; the screen is watched for that much longer.
_LONGEST_QUIET_S = 1.5
#: A recording ends after this many seconds even if the screen still changes.
_LONGEST_RECORDING_S = 20.0

Pixels = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Refresh:
    """One refresh of the screen, and the processor time that the guest had used when it was answered."""

    sent_s: float
    answered_s: float
    processor_s: float | None


@dataclass(frozen=True, slots=True)
class Change:
    """One change between two refreshes."""

    time_s: float
    region: Region
    is_blink: bool
    """Whether the daemon knew at this time that it was blinking."""
    pixels: tuple[Pixels, Pixels] | None
    """Those of the region before and after; None if it is too large for blinking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecording:
    """The reaction of a screen to the input of one step. Monotonic times in seconds."""

    input_s: float
    may_act_late: bool
    """Result of `envd.desktop.acting.may_act_late` for the input."""
    was_clicked: bool
    """Whether the input pressed a mouse button."""
    reacts_before_answer: bool
    """That of its machine, see `GuestChannels`."""
    refreshes: Sequence[Refresh]
    changes: Sequence[Change]
    content_s: Sequence[float] = ()
    """Times of the changes that are not blinking, in hindsight, nor within ignored regions."""

    def has_change_after(self, time_s: float, *, watch_s: float) -> bool:
        """Whether content changes within `watch_s` after a time."""
        index = bisect_right(self.content_s, time_s)
        return index < len(self.content_s) and self.content_s[index] <= time_s + watch_s


@dataclass(slots=True)
class StepRecorder:
    """Records the steps of one episode, whose guest runs throughout."""

    desktop: Desktop
    machine: Machine
    watch_s: float
    """The screen is watched for at least this long after it has settled."""
    ignored: tuple[Region, ...] = ()
    _blinking: Blinking = field(default_factory=Blinking)
    _steps: list[StepRecording] = field(default_factory=list)

    async def record(self, inputs: Sequence[Action], *, input_s: float, before: TiledImage) -> TiledImage:
        """Record until the screen has not changed for long; return what it shows then."""
        self._blinking.interrupted()
        refreshes: list[Refresh] = []
        changes: list[Change] = []
        shown, content_s = before, input_s
        while True:
            sent_s = time.monotonic()
            image = (await self.desktop.frame(refresh=True)).image
            now_s = time.monotonic()
            refreshes.append(Refresh(sent_s, now_s, self.machine.processor_s()))
            if image.image_id != shown.image_id:
                changes.append(change := self._change(shown, image, now_s))
                content_s = content_s if change.is_blink else now_s
                shown = image
            if now_s > min(content_s + self.watch_s + _LONGEST_QUIET_S, input_s + _LONGEST_RECORDING_S):
                break
            await asyncio.sleep(_REFRESH_INTERVAL_S)
        late = any(map(may_act_late, inputs))
        self._steps.append(
            StepRecording(
                input_s=input_s,
                may_act_late=late,
                was_clicked=any(map(clicks, inputs)),
                reacts_before_answer=self.machine.reacts_before_answer,
                refreshes=refreshes,
                changes=changes,
            )
        )
        return shown

    def steps(self) -> list[StepRecording]:
        """Return the recorded steps, with the changes that were content by all that is known at the end."""
        return [replace(step, content_s=self._content_of(step)) for step in self._steps]

    def _change(self, before: TiledImage, after: TiledImage, time_s: float) -> Change:
        if before.size_px != after.size_px:
            full = Region(x_px=0, y_px=0, width_px=after.size_px[0], height_px=after.size_px[1])
            return Change(time_s, full, is_blink=False, pixels=None)
        region = around([after.changed_region(before, index) for index in after.changed_tiles(before)])
        if region.width_px * region.height_px > MAX_BLINK_PIXELS:
            return Change(time_s, region, is_blink=False, pixels=None)
        pixels = before.part(region).astype(np.uint32), after.part(region).astype(np.uint32)
        return Change(time_s, region, self._blinking.note(region, *pixels), pixels)

    def _content_of(self, step: StepRecording) -> list[float]:
        self._blinking.interrupted()
        return [
            change.time_s
            for change in step.changes
            if not is_within(change.region, self.ignored)
            and (change.pixels is None or not self._blinking.note(change.region, *change.pixels))
        ]


class _RecordedScreen:
    """A screen that shows a recording, on its own clock."""

    def __init__(self, step: StepRecording) -> None:
        self._step = step
        self._sent_s = [each.sent_s for each in step.refreshes]
        self._answered_s = [each.answered_s for each in step.refreshes]
        self._changes = [change for change in step.changes if not change.is_blink]
        self.now_s = step.input_s
        self.changed = asyncio.Event()

    @property
    def change_count(self) -> int:
        return sum(change.time_s <= self.now_s for change in self._changes)

    async def refresh(self) -> float:
        index = bisect_left(self._sent_s, self.now_s)
        if index == len(self._sent_s):
            return self.now_s  # the recording is over
        self.now_s = self._answered_s[index]
        return self._sent_s[index]

    def processor_s(self) -> float | None:
        index = bisect_right(self._answered_s, self.now_s)
        return self._step.refreshes[max(0, index - 1)].processor_s

    def last_change_outside_s(self, ignored: tuple[Region, ...]) -> float:
        seen = (each for each in self._changes if each.time_s <= self.now_s and not is_within(each.region, ignored))
        return max((change.time_s for change in seen), default=-math.inf)

    def moving_since(self, since_s: float, ignored: tuple[Region, ...]) -> list[Region]:
        return [
            each.region
            for each in self._changes
            if since_s <= each.time_s <= self.now_s and not is_within(each.region, ignored)
        ]

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


async def replay_settling(step: StepRecording, policy: SettlePolicy) -> tuple[SettleResult, float]:
    """Return how a recorded screen settles under a policy, and when. Does not wait."""
    screen = _RecordedScreen(step)
    policy = policy_after(
        policy, may_act_late=step.may_act_late, was_clicked=step.was_clicked and step.reacts_before_answer
    )
    result = await settle(
        screen,
        policy,
        input_s=step.input_s,
        was_idle=True,
        processor_s=screen.processor_s,
        reacts_before_answer=step.reacts_before_answer,
        monotonic=screen.monotonic,
        sleep=screen.sleep,
    )
    return result, screen.now_s
