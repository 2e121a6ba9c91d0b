"""Step, observe and watch episodes."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Final

from cuaenv.actions import MAX_STEP_S, Action, AskUser, Done, Fail, PressKeys, RunShell, ToolAction, TypeText, Wait
from envd.base.aio import LoopThrottle, race
from envd.base.clock import Clock, wait_until
from envd.base.config import LimitsConfig, SettlePolicy
from envd.base.errors import EvaluatorFailed, GuestEnded, GuestError, MachineLost, StoreError, UserUnavailable
from envd.base.telemetry import traces
from envd.base.telemetry.traces import Stopwatch
from envd.desktop.desktop import Desktop
from envd.desktop.display.frames import Frame
from envd.desktop.observation import ActionOutcome, EncodedFrame, Observation, ObservationOptions, UnchangedImage
from envd.episodes.automatic import AutomaticCheckpointing
from envd.episodes.context import EpisodeContext
from envd.episodes.episode import Episode
from envd.episodes.ledger import STEP, RequestKey
from envd.episodes.progress import EpisodeState
from envd.episodes.registry import EpisodeRegistry
from envd.episodes.types import StepCommand, StepOutcome
from envd.tasks.model import allowed_tools
from envd.tasks.user import Exchange, answer_or_nothing

#: How many steps may start or observe per event-loop iteration: each is up to 1 ms of work. With 256 concurrent
#: clients (`envd bench scale`) a limit of 2 reduces the longest iteration from 100 to 11 ms and costs 3 of 100
#: steps/s.
_STEPS_PER_ITERATION = 2
_OUT_OF_TIME: Final = f"the actions of one step together take at most {MAX_STEP_S:g} s; send the rest in another step"
#: Characters that are typed before the time is looked at again: 50 s by a paced keyboard.
_TYPED_AT_ONCE_CHARS = 1000
#: An action that lacks less is not cut short, so that two waits of 60 s fit.
_TOLERANCE_S = 1.0


class Stepping:
    """The `step`, `observe` and `watch_frames` calls of an episode service."""

    def __init__(self, context: EpisodeContext, automatic: AutomaticCheckpointing) -> None:
        self._context = context
        self._automatic = automatic
        self._throttle = LoopThrottle(_STEPS_PER_ITERATION)

    async def step(self, command: StepCommand) -> StepOutcome:
        """Perform actions in an episode, then observe. Idempotent on `request_id`; one step at a time per episode.

        A cancelled caller leaves the step running, for a retry to join. A failure after the first action started
        voids the episode.

        Raises:
            EpisodeNotFound: No such episode.
            RequestIdReused: The id came before with a different body.
            StaleEpoch: The episode was rolled back.
            EpisodeEnded: The episode accepts no more steps.
            StepIndexMismatch: `step_index` is not the next one.
            InvalidRequest: The requested observation is impossible on this screen.
            MachineLost: The machine is gone; the episode is void.
            GuestUnresponsive, GuestError: The guest failed; the episode is void.
        """
        request = RequestKey(STEP, command.episode_id, command.request_id, command.fingerprint)
        answer = await self._context.once(request, lambda episode: self._step(episode, command, request))
        result = answer.value
        if answer.recovered:
            observation = await self._context.with_pixels(result.observation, command.episode_id, command.observe)
            result = replace(result, observation=observation)
        return replace(result, replayed=True) if answer.replayed else result

    async def _step(self, episode: Episode, command: StepCommand, request: RequestKey) -> StepOutcome:
        context = self._context
        watch, timings_ms = Stopwatch(context.clock), dict[str, float]()
        # One that has ended refuses the step without a machine.
        is_active = episode.progress.state is EpisodeState.ACTIVE
        async with context.call(episode, needs_machine=is_active, watch=watch), episode.lock:
            watch.lap("queue")
            episode.require_step(command.step_index, epoch=command.epoch)
            command.observe.require_region_on(episode.machine.desktop.screen_size)
            try:
                async with self._begun(episode, request) as resume_ms:
                    if resume_ms > 0:
                        watch.lap("resume")
                    acting = Stopwatch(context.clock)
                    outcomes, observation = await self._act_and_observe(episode, command, watch=acting)
                # The machine may have died at the very end of a step that succeeded.
                episode.require_machine()
            except StoreError:
                raise  # the guest was not touched
            except Exception as error:
                raised = await context.registry.lose(episode, error)
                if not isinstance(raised, GuestEnded):
                    context.count_failure(episode, "step", raised)
                    raise raised from error
                failed = ActionOutcome(error=f"the machine ended during this step: {episode.progress.guest_end_cause}")
                outcomes, observation = (failed,) * len(command.actions), await self._last_seen(episode, command)
                episode.progress = episode.progress.after_step(None)
            else:
                timings_ms.update(acting.timings_ms)
                if episode.count_step(_end_of(command.actions)):
                    context.registry.count_end(episode)
                episode.lease.expects_idle = command.expects_idle
                began_ms = watch.total_ms
                if await self._automatic.after_step(episode):
                    timings_ms["checkpoint"] = watch.total_ms - began_ms
        timings_ms = {**watch.timings_ms, **timings_ms, "total": watch.total_ms}
        context.metrics.step_done(pool=episode.spec.pool, timings_ms=timings_ms)
        result = StepOutcome(
            episode=episode.info(context.clock),
            observation=observation,
            outcomes=outcomes,
            timings_ms=timings_ms,
            unrecorded=episode.machine.desktop.take_unrecorded(),
        )
        context.registry.events.stepped(episode, command, result, time=context.clock.now())
        with traces.timed("store"):
            await context.journal.answered(request, episode, result)
        return result

    async def _act_and_observe(
        self, episode: Episode, command: StepCommand, *, watch: Stopwatch
    ) -> tuple[tuple[ActionOutcome, ...], Observation]:
        """Perform a step's actions, then settle and observe. Phases of `watch`: `input`, `settle`, `observe`.

        A guest that has been silent for `limits.heartbeat_interval_s` is checked for life meanwhile.
        """
        context, desktop, options = self._context, episode.machine.desktop, command.observe
        compares = options.include_screen_change or options.include_grey_difference
        before = await desktop.frame() if compares else None
        outcomes = await perform(
            desktop, command.actions, use_tool=partial(use_tool, episode, context=context), watch=watch
        )
        async with heartbeat(desktop, context.limits):
            observation = await observe(
                desktop,
                settle=context.settle_policy(episode, command.settle),
                options=options,
                since=before,
                watch=watch,
                throttle=self._throttle,
            )
        return outcomes, observation

    async def _last_seen(self, episode: Episode, command: StepCommand) -> Observation:
        """Return the last frame that the display of a guest that ended has shown."""
        machine = episode.machine
        frame = machine.desktop.frame_nowait() or machine.frozen.view.frame
        return Observation(frame=await machine.desktop.encode(frame, replace(command.observe, draw_marks=False)))

    async def observe(
        self, episode_id: str, options: ObservationOptions, *, refresh: bool = False, settle: SettlePolicy | None = None
    ) -> Observation:
        """Return the agent's present observation. Changes nothing, not even the lease.

        Raises:
            EpisodeNotFound: No such episode.
            InvalidRequest: The requested observation is impossible on this screen.
            MachineLost: The machine is gone; the episode is void.
            GuestUnresponsive, GuestError: A requested part is unavailable; the episode continues.
        """
        context, throttle = self._context, self._throttle
        episode = context.registry.get(episode_id)
        watch = Stopwatch(context.clock)
        if settle is None and not refresh and not options.asks_guest:
            # A parked episode shows its last screen.
            async with context.registry.call(episode, renews=False):
                episode.require_machine()
                desktop = episode.machine.desktop
                options.require_region_on(desktop.screen_size)
                return await observe(desktop, settle=None, options=options, watch=watch, throttle=throttle)
        async with context.call(episode, renews=False, watch=watch):
            episode.require_machine()
            desktop = episode.machine.desktop
            options.require_region_on(desktop.screen_size)
            async with context.running(episode, watch):
                policy = settle and context.settle_policy(episode, settle)
                return await observe(
                    desktop, settle=policy, options=options, refresh=refresh, watch=watch, throttle=throttle
                )

    async def watch_frames(
        self, episode_id: str, options: ObservationOptions, *, max_rate_hz: float
    ) -> AsyncGenerator[EncodedFrame, None]:
        """Yield an episode's screen at once and on change, until it is closed. Does not renew the lease.

        No frame is read, encoded or buffered ahead of the reader: a slow reader gets the newest frame. If the encoding
        allows it, each frame is a delta to the one yielded before.

        Raises:
            GuestUnresponsive, GuestError: The display does not answer, or answers incorrectly.
        """
        episode = self._context.registry.get(episode_id)
        episode.require_machine()
        options.require_region_on(episode.machine.desktop.screen_size)
        async with aclosing(self.watch_screen(episode_id, max_rate_hz=max_rate_hz)) as frames:
            async for frame in frames:
                encoded = await episode.machine.desktop.encode(frame, options)
                if not isinstance(encoded.content, UnchangedImage):
                    options = replace(options, known_image_id=encoded.image_id)
                    yield encoded

    async def watch_screen(self, episode_id: str, *, max_rate_hz: float) -> AsyncGenerator[Frame, None]:
        """Yield an episode's screen and pointer as `watch_frames` does, not encoded."""
        registry = self._context.registry
        episode = registry.get(episode_id)
        episode.require_machine()
        frames = frames_of(episode, max_rate_hz=max_rate_hz, registry=registry, clock=self._context.clock)
        async with aclosing(frames):
            async for frame in frames:
                yield frame

    @asynccontextmanager
    async def _begun(self, episode: Episode, request: RequestKey) -> AsyncIterator[float]:
        """Persist that a request began while the guest resumes; keep it running during the block; yield `resume_ms`.

        Concurrent: resuming a guest is not a side effect of the request.
        """
        writing = self._context.journal.begin(request)
        try:
            async with episode.machine.running() as resume_ms:
                await writing
                await self._throttle.wait()
                yield resume_ms
        except BaseException:
            # If the guest did not resume, `writing` was not awaited: retrieve its result.
            await asyncio.gather(writing, return_exceptions=True)
            raise


def _end_of(actions: Iterable[Action]) -> Done | Fail | None:
    """Return the action with which the agent ended the episode, if it did; those after it are not performed."""
    return next((action for action in actions if isinstance(action, Done | Fail)), None)


async def use_tool(episode: Episode, action: ToolAction, *, context: EpisodeContext) -> ActionOutcome:
    """Use a tool on the episode's machine, or ask its user.

    Raises:
        UserUnavailable: The model that plays the user answers no question, or the host matches none.
    """
    if action.needs not in allowed_tools(episode.task, episode.pool_tools):
        offered = ", ".join(episode.tools) or "none"
        return ActionOutcome(error=f"{action.needs} is not allowed in this episode; allowed tools: {offered}")
    if not isinstance(action, AskUser):
        return await episode.machine.desktop.use_tool(action)
    user = episode.task.user
    if user is None:
        return ActionOutcome(error="this task has no user to ask")
    if len(episode.progress.asked) >= user.max_questions:
        return ActionOutcome(error=f"the user answers no more than {user.max_questions} questions")

    async def ask(question: str, asked: Sequence[Exchange]) -> str:
        if user.persona:
            if context.user_model is None:
                raise UserUnavailable("the user's model: tasks.user_url is not set")
            return await context.user_model.answer(user.persona, question, asked)
        try:
            return await user.answer(question, asked, judge=context.judge)
        except (EvaluatorFailed, GuestError) as error:
            raise UserUnavailable(f"the user's facts: {error}") from error.__cause__

    answer = await answer_or_nothing(ask, action.question, episode.progress.asked) or user.unknown
    asked = (*episode.progress.asked, Exchange(action.question, answer))
    episode.progress = replace(episode.progress, asked=asked)
    return ActionOutcome(output=answer)


async def frames_of(
    episode: Episode, *, max_rate_hz: float, registry: EpisodeRegistry, clock: Clock
) -> AsyncGenerator[Frame, None]:
    """Yield an episode's screen and pointer at once and after each change, until it is closed. Encodes nothing."""
    while not episode.closed.is_set():
        began_s = clock.monotonic()
        machine = episode.machine
        changed = machine.desktop.changed
        try:
            frame = await machine.desktop.frame()
        except MachineLost as error:
            if episode.closed.is_set():
                return
            if machine is not episode.machine:  # rolled back
                continue
            raise await registry.lose(episode, error) from error
        yield frame
        await race(changed, episode.closed, machine.lost)
        if not episode.closed.is_set():
            await wait_until(clock, began_s + 1 / max_rate_hz, or_event=episode.closed)


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
    await throttle.wait()
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
        outcomes.append(await _perform_one(action, desktop=desktop, use_tool=use_tool, watch=watch))
    watch.lap("input")
    return tuple(outcomes)


async def _perform_one(
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
