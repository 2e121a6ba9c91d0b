"""Perform one step on a desktop: act, settle, observe. Knows no ledgers or leases."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from cuaenv.actions import Action, Done, Fail, ToolAction
from envd.base.aio import LoopThrottle
from envd.base.clock import Clock
from envd.base.config import LimitsConfig, SettlePolicy
from envd.base.errors import EnvdError, InvalidRequest
from envd.episodes.context import Stopwatch
from envd.episodes.episode import Episode
from envd.guest.desktop import Desktop
from envd.guest.display.frames import Frame
from envd.guest.observation import ActionOutcome, Encoding, Observation, ObservationOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Performed:
    """The effect of a step."""

    outcomes: tuple[ActionOutcome, ...]
    last_action: Done | Fail | None
    """The action with which the agent ended the episode, if it did."""
    observation: Observation
    timings_ms: dict[str, float]
    """`input`, `settle` and `observe`."""


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
async def _heartbeat(desktop: Desktop, limits: LimitsConfig) -> AsyncIterator[None]:
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
    settle: SettlePolicy,
    options: ObservationOptions,
    clock: Clock,
    limits: LimitsConfig,
    throttle: LoopThrottle,
    use_tool: Callable[[ToolAction], Awaitable[ActionOutcome]],
) -> Performed:
    """Perform actions in order, up to the first `Done` or `Fail`, then settle and observe.

    A guest that has been silent for `limits.heartbeat_interval_s` is checked for life meanwhile.

    On failure some actions may have been performed: the episode is void.
    """
    watch = Stopwatch(clock)
    before = await desktop.frame() if options.include_screen_change or options.include_grey_difference else None
    outcomes: list[ActionOutcome] = []
    last_action: Done | Fail | None = None
    for action in actions:
        if isinstance(action, Done | Fail):
            last_action = action
            outcomes.append(ActionOutcome())
            break
        outcomes.append(await (use_tool(action) if isinstance(action, ToolAction) else desktop.act(action)))
    watch.lap("input")
    async with _heartbeat(desktop, limits):
        observation = await observe(
            desktop, settle=settle, options=options, since=before, watch=watch, throttle=throttle
        )
    return Performed(
        outcomes=tuple(outcomes), last_action=last_action, observation=observation, timings_ms=watch.timings_ms
    )


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
