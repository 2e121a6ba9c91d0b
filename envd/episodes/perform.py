"""The parts of a step on a desktop: act, settle, observe. Knows no ledgers or leases."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Final

from cuaenv.actions import MAX_STEP_S, Action, Done, Fail, PressKeys, RunShell, ToolAction, TypeText, Wait
from envd.base.aio import LoopThrottle
from envd.base.config import LimitsConfig, SettlePolicy
from envd.base.errors import EnvdError, InvalidRequest
from envd.base.telemetry.traces import Stopwatch
from envd.desktop.desktop import Desktop
from envd.desktop.display.frames import Frame
from envd.desktop.observation import ActionOutcome, Encoding, Observation, ObservationOptions
from envd.episodes.episode import Episode

_OUT_OF_TIME: Final = f"the actions of one step together take at most {MAX_STEP_S:g} s; send the rest in another step"
#: Characters that are typed before the time is looked at again: 50 s by a paced keyboard.
_TYPED_AT_ONCE_CHARS = 1000
#: An action that lacks less is not cut short, so that two waits of 60 s fit.
_TOLERANCE_S = 1.0


def check_region(options: ObservationOptions, size_px: tuple[int, int]) -> None:
    """Check that the region lies on a screen of (width, height), before any action. Raises: InvalidRequest."""
    region = options.region
    if region is None:
        return
    width_px, height_px = size_px
    if (
        min(region.x_px, region.y_px) < 0
        or min(region.width_px, region.height_px) < 1
        or region.x_px + region.width_px > width_px
        or region.y_px + region.height_px > height_px
    ):
        raise InvalidRequest(
            "observation.region",
            f"{region.width_px}x{region.height_px} at ({region.x_px}, {region.y_px}) is not within the screen of"
            f" {width_px}x{height_px}",
        )


async def observe(
    desktop: Desktop,
    *,
    settle: SettlePolicy | None,
    options: ObservationOptions,
    refresh: bool = False,
    since: Frame | None = None,
    watch: Stopwatch,
    throttle: LoopThrottle,
) -> Observation:
    """Wait until the screen is quiet, if `settle` is given, then observe it when `throttle` admits the call."""
    settled = None
    if settle is not None:
        settled = await desktop.settle(settle, upcoming=options)
        watch.lap("settle")
    await throttle.wait_turn()
    observation = await desktop.observe(options, refresh=refresh, since=since)
    watch.lap("observe")
    return replace(observation, settle=settled, timings_ms={**observation.timings_ms, **watch.timings_ms})


@asynccontextmanager
async def heartbeat(desktop: Desktop, limits: LimitsConfig) -> AsyncIterator[None]:
    """Check a long-silent guest for life during the block, and return with its answer."""
    if desktop.idle_since_response_s <= limits.heartbeat_interval_s:
        yield
        return
    check = asyncio.create_task(desktop.check_alive(timeout_s=limits.hang_timeout_s), name="check-alive")
    try:
        yield
        await check
    finally:
        check.cancel()
        await asyncio.gather(check, return_exceptions=True)


async def perform(
    desktop: Desktop,
    actions: tuple[Action, ...],
    *,
    use_tool: Callable[[ToolAction], Awaitable[ActionOutcome]],
    watch: Stopwatch,
) -> tuple[ActionOutcome, ...]:
    """Perform actions in order, up to the first `Done` or `Fail`. The phase `input` of `watch`, which just started.

    Actions that do not fit into `MAX_STEP_S` are not performed, and their outcomes say so. Otherwise one reply of many
    waits or commands would outlast its client's deadline, and an agent could void its episode.

    On failure some actions may have been performed: the episode is void.
    """
    outcomes: list[ActionOutcome] = []
    for action in actions:
        if isinstance(action, Done | Fail):
            outcomes.append(ActionOutcome())
            break
        outcomes.append(await _act(action, desktop=desktop, use_tool=use_tool, watch=watch))
    watch.lap("input")
    return tuple(outcomes)


async def _act(
    action: Action, *, desktop: Desktop, use_tool: Callable[[ToolAction], Awaitable[ActionOutcome]], watch: Stopwatch
) -> ActionOutcome:
    """Perform an action, or the part of it for which the step has time."""
    outcome, input_ms = None, 0.0
    for part in _parts(action):
        left_s = MAX_STEP_S - watch.total_ms / 1000
        if left_s <= 0:
            what = "not performed" if outcome is None else "cut short"
            return replace(outcome or ActionOutcome(), error=f"{what}: {_OUT_OF_TIME}")
        limited = _limited(part, left_s)
        outcome = await (use_tool(limited) if isinstance(limited, ToolAction) else desktop.act(limited))
        input_ms += outcome.input_ms
        outcome = replace(outcome, input_ms=input_ms)
        if outcome.error:
            break
        if limited is not part and (outcome.timed_out or not isinstance(part, RunShell)):
            return replace(outcome, error=f"cut short: {_OUT_OF_TIME}")
    return outcome or ActionOutcome()


def _parts(action: Action) -> Iterator[Action]:
    if not isinstance(action, TypeText) or len(action.text) <= _TYPED_AT_ONCE_CHARS:
        yield action
        return
    text = action.text.replace("\r\n", "\n")  # one line break, which must not be split
    for start in range(0, len(text), _TYPED_AT_ONCE_CHARS):
        yield TypeText(text[start : start + _TYPED_AT_ONCE_CHARS])


def _limited(action: Action, left_s: float) -> Action:
    """Return an action with the duration that it may have, or the same one if it needs no less."""
    most = timedelta(seconds=left_s + _TOLERANCE_S)
    match action:
        case Wait(duration=duration) if duration > most:
            return Wait(most)
        case PressKeys(keys=keys, hold=hold) if hold > most:
            return PressKeys(keys, most)
        case RunShell(command=command, timeout=timeout) if timeout > most:
            return RunShell(command, most)
    return action


async def with_pixels(observation: Observation, episode: Episode | None, options: ObservationOptions) -> Observation:
    """Return a recorded observation, with its pixels if the screen still shows them. Resumes no guest."""
    if options.encoding is Encoding.NONE or episode is None or episode.machine.lost.is_set():
        return observation
    desktop = episode.machine.desktop
    try:
        frame = await desktop.frame()
        if frame.frame_id != observation.frame.frame_id:
            return observation
        encoded = await desktop.encode(frame, options)
    except EnvdError:
        return observation  # the recorded response is valid even if the machine fails now
    return replace(observation, frame=replace(encoded, capture_time=observation.frame.capture_time))
