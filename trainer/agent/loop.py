"""Play one episode: observe, sample a reply, parse it, act, and evaluate once at the end.

The agent's mistakes (an unparsable reply, a point outside the picture, an unknown key) are reported to it in the next
message and recorded in the facts. Failures of the service (a lost machine, a broken checker, an engine that does not
respond) make the episode FAILED: void, with the error recorded. A guest that the agent ended is scored. Only
cancellation and `ExtensionError`, of own code, are raised.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from cuaenv.agent_text.values import ParseError
from cuaenv.client import (
    Action,
    BadRequest,
    EnvError,
    Evaluation,
    GuestEnded,
    Observation,
    Origin,
    State,
    StepResult,
    View,
)
from cuaenv.client.tracing import span
from trainer.agent import prompts
from trainer.agent.coordinates import CoordinateSpace, points_of, to_screen_points
from trainer.agent.grammars import Parsed
from trainer.agent.ownership import GUEST_ENDED, failure_of
from trainer.agent.prompts import ModelObservation
from trainer.agent.settings import AgentSettings
from trainer.agent.turns import BranchPoint, History, completed_turn, end_of_episode, new_turn
from trainer.agent.types import (
    BudgetExhausted,
    Conversation,
    GenerationAborted,
    Message,
    ModelFailed,
    NoReply,
    Outcome,
    Reply,
    Trajectory,
    Turn,
)
from trainer.config import ExtensionError

logger = logging.getLogger(__name__)


class AgentEpisode(Protocol):
    """The part of `cuaenv.client.AsyncEpisode` that the loop needs."""

    episode_id: str
    task_id: str
    instruction: str
    observation: Observation
    """The latest observation; initially that of a reset with `AgentSettings.view`."""
    origin: Origin
    tools: tuple[str, ...]
    """Tools that it offers."""

    async def step(self, *actions: Action, view: View | None = None, timeout: timedelta = ...) -> StepResult:
        """Perform actions and observe. Raises: EnvError."""

    async def evaluate(self, *, timeout: timedelta = ...) -> Evaluation:
        """Score the episode's final state. Raises: EnvError."""

    async def close(self) -> None:
        """Release the machine. Idempotent; never fails."""


Interrupted = Callable[[BranchPoint], Awaitable[None]]
"""Takes the agent's state between two turns, in which its next reply was aborted."""
OfferBranch = Callable[[int, Reply, Callable[[], BranchPoint]], Awaitable[None]]
"""Takes the number of turns so far, the next reply, and a function that returns the agent's state before it."""
Traced = Callable[[str, Mapping[str, Any]], AbstractContextManager[Callable[[dict[str, Any]], object]]]
"""Traces a block by a name and attributes; the block gets a function that adds attributes."""


@contextmanager
def untraced(_name: str, _attributes: Mapping[str, Any]) -> Iterator[Callable[[dict[str, Any]], object]]:
    """Trace nothing."""
    yield lambda _: None


async def play_episode(
    episode: AgentEpisode,
    conversation: Conversation,
    *,
    settings: AgentSettings,
    branch_point: BranchPoint | None = None,
    offer_branch: OfferBranch | None = None,
    interrupted: Interrupted | None = None,
    traced: Traced = untraced,
) -> Trajectory:
    """Play an episode that was opened with `settings.view`, and evaluate it. The caller closes it.

    Every sampled reply is in the trajectory, also after a failure. Raises only cancellation and `ExtensionError`.

    Args:
        episode: A new episode, or a copy of the machine at `branch_point`.
        conversation: The model; new, or with the rows written up to `branch_point`.
        branch_point: State to continue from; None for a new episode.
        offer_branch: Awaited before each of its turns but the first is performed, when its reply is known. Its duration
            does not count towards `settings.timeout_s`.
        interrupted: Awaited when a reply is aborted, before the trajectory is returned as ABORTED; the machine is
            between two turns then. `play_episode` continues from the state that it gets.
        traced: Traces each step, `env_step`, and the evaluation, `env_evaluate`, in a trainer's own traces.
    """
    playing = _PlayedEpisode(
        episode,
        conversation,
        settings,
        branch_point=branch_point,
        offer_branch=offer_branch,
        interrupted=interrupted,
        traced=traced,
    )
    with span("episode", episode_id=episode.episode_id, task_id=episode.task_id):
        try:
            outcome, reason = await playing.play_turns()
            evaluation = await playing.evaluate()
        except GenerationAborted:
            return playing.trajectory(Outcome.ABORTED, "aborted")
        except NoReply as error:
            logger.warning("episode %s of %s is void: %s", episode.episode_id, episode.task_id, error)
            return playing.trajectory(Outcome.FAILED, f"no_reply_{error.budget}", error=error)
        except (EnvError, ModelFailed) as error:
            logger.warning("episode %s of %s is void: %s", episode.episode_id, episode.task_id, error)
            return playing.trajectory(Outcome.FAILED, type(error).__name__, error=error)
        except ExtensionError:
            # Void, a policy could provoke it to remove its failures.
            raise
        except Exception as error:
            # A bug in one episode must not end the others of this process.
            logger.exception("episode %s of %s is void", episode.episode_id, episode.task_id)
            return playing.trajectory(Outcome.FAILED, type(error).__name__, error=error)
    return playing.trajectory(outcome, reason, evaluation=evaluation)


class _PlayedEpisode:
    """An episode that is being played, and the agent's state in it."""

    _history: History
    _observed: ModelObservation
    """The latest observation."""
    _space: CoordinateSpace
    """Coordinate space of the next reply."""

    def __init__(
        self,
        episode: AgentEpisode,
        conversation: Conversation,
        settings: AgentSettings,
        *,
        branch_point: BranchPoint | None,
        offer_branch: OfferBranch | None,
        interrupted: Interrupted | None,
        traced: Traced,
    ) -> None:
        self._branch_point = branch_point
        self._shared_count = branch_point.shared_turn_count if branch_point else 0
        self._interrupted = interrupted
        self._offer_branch = offer_branch
        self._traced = traced
        self._episode = episode
        self._conversation = conversation
        self._settings = settings
        self._offered = episode.tools
        self._grammar = settings.make_grammar(self._offered)
        self._turns: list[Turn] = list(branch_point.turns) if branch_point else []
        self._timings_s = {"model": 0.0, "step": 0.0, "evaluate": 0.0}
        self._pointer: tuple[int, int] | None = branch_point.pointer if branch_point else None
        self._limit = asyncio.timeout(None)
        self._guest_end_cause = ""
        if branch_point is not None:
            self._history, self._observed, self._space = branch_point.history, branch_point.observed, branch_point.space

    def trajectory(
        self, outcome: Outcome, reason: str, *, evaluation: Evaluation | None = None, error: Exception | None = None
    ) -> Trajectory:
        return Trajectory(
            task_id=self._episode.task_id,
            instruction=self._episode.instruction,
            outcome=outcome,
            reason=reason,
            error=error,
            turns=tuple(self._turns),
            shared_turn_count=self._shared_count,
            evaluation=evaluation,
            guest_end_cause=(evaluation.guest_end_cause if evaluation else "") or self._guest_end_cause,
            origin=self._origin,
            episode_id=self._episode.episode_id,
            timings_s=dict(self._timings_s),
        )

    @property
    def _has_replied(self) -> bool:
        """Whether this episode has replies of its own, after those of the episode that it branched from."""
        return len(self._turns) > self._shared_count

    @property
    def _origin(self) -> Origin:
        return self._branch_point.origin if self._branch_point else self._episode.origin

    async def play_turns(self) -> tuple[Outcome, str]:
        """Play until the episode ends; return outcome and reason. FAILED and ABORTED are raised instead."""
        try:
            left_s = self._settings.timeout_s - (self._branch_point.spent_s if self._branch_point else 0.0)
            async with asyncio.timeout(left_s) as self._limit:
                if self._branch_point is None:
                    await self._begin()
                while len(self._turns) < self._settings.max_turns:
                    if (last_step := await self._play_turn()) is not None:
                        return end_of_episode(last_step)
                return Outcome.TRUNCATED, "turns"
        except GuestEnded:
            # It ended before this step, which was not performed.
            self._guest_end_cause = GUEST_ENDED
            return Outcome.TERMINATED, "guest_ended"
        except TimeoutError:
            if not self._limit.expired():
                raise
            if not self._has_replied:
                raise NoReply(f"no reply within timeout_s = {left_s:.0f} s", budget="time") from None
            return Outcome.TRUNCATED, "time"
        except BudgetExhausted as end:
            if not self._has_replied:
                raise NoReply(
                    f"no reply: {end}; raise context_tokens and prompt_tokens, and the server's maximum context length"
                    " (--max-model-len, --context-length)",
                    budget=end.budget,
                ) from end
            return Outcome.TRUNCATED, end.budget

    async def evaluate(self) -> Evaluation:
        with self._timed("evaluate"), self._traced("env_evaluate", {}) as add:
            evaluation = await self._episode.evaluate(timeout=self._settings.evaluate_timeout)
            add({"score": evaluation.score})
        return evaluation

    async def _begin(self) -> None:
        """Give the model the task and the first observation."""
        settings, observation, instruction = self._settings, self._episode.observation, self._episode.instruction
        await self._observe(observation)
        self._history = History(
            prompts.system_message(settings, self._space.picture(), offered=self._offered),
            images_per_row=settings.images_per_row,
            images_kept=settings.images_kept,
            first_image_kept=settings.first_image_kept,
        )
        with self._timed("model"):
            await self._conversation.begin(
                self._history.begin(
                    prompts.task_message(instruction, self._observed, settings),
                    prompts.dropped_task_message(instruction, settings),
                )
            )

    async def _play_turn(self) -> StepResult | None:
        """Sample a reply, perform its actions, and report the result; returns the step if it ended the episode."""
        with span("turn", number=str(len(self._turns) + 1)):
            reply = await self._reply()
            await self._let_branch(reply)
            self._history.reply(reply.text)
            parsed = self._grammar.parse(reply.text, self._space.picture(self._pointer))
            actions, mistake = _placed(parsed, self._space)
            # Before acting, so that a failure cannot lose a sampled reply.
            self._turns.append(new_turn(reply, parsed, actions, observed=self._observed, row=self._history.row))
            step, step_s = None, 0.0
            if actions:
                mistake, step, step_s = await self._act(parsed, actions)
            before = self._observed
            if step is not None:
                await self._observe(step.observation)
            self._turns[-1] = completed_turn(self._turns[-1], self._observed, mistake, step, step_s=step_s)
            if step is not None and step.done:
                if step.end_reason == GUEST_ENDED:
                    self._guest_end_cause = step.guest_end_cause or GUEST_ENDED
                return step
            if len(self._turns) < self._settings.max_turns:
                await self._report(reply, mistake, step, before=before)
        return None

    async def _reply(self) -> Reply:
        try:
            with self._timed("model"):
                return await self._conversation.generate()
        except GenerationAborted:
            if self._interrupted is not None:
                await self._interrupted(self._point(left_s=self._left_s))
            raise

    @property
    def _left_s(self) -> float:
        ends_s = self._limit.when()
        return 0.0 if ends_s is None else ends_s - asyncio.get_running_loop().time()

    def _point(self, *, left_s: float) -> BranchPoint:
        return BranchPoint(
            turns=tuple(self._turns),
            history=self._history.copy(),
            observed=self._observed,
            space=self._space,
            pointer=self._pointer,
            origin=self._origin,
            spent_s=self._settings.timeout_s - left_s,
        )

    async def _let_branch(self, reply: Reply) -> None:
        """Await `offer_branch` in the current state, and stop the episode's clock meanwhile."""
        if self._offer_branch is None or not self._has_replied:
            return
        left_s = self._left_s
        self._limit.reschedule(None)
        await self._offer_branch(len(self._turns), reply, lambda: self._point(left_s=left_s))
        self._limit.reschedule(asyncio.get_running_loop().time() + left_s)

    async def _observe(self, observation: Observation) -> None:
        self._space = CoordinateSpace.of(
            self._settings.units,
            image_px=(observation.width_px, observation.height_px),
            screen_px=(observation.screen_width_px, observation.screen_height_px),
        )
        make = partial(prompts.model_observation, observation, self._space, self._settings)
        # Rendering a tree takes about 10 ms, which would block the other episodes. Pictures stay tiles.
        self._observed = await asyncio.to_thread(make) if observation.a11y_elements else make()

    async def _act(self, parsed: Parsed, actions: tuple[Action, ...]) -> tuple[str, StepResult | None, float]:
        """Perform all actions of a reply, or none. Returns the agent's mistake, the step's result and its seconds."""
        settings, started_s = self._settings, time.monotonic()
        with self._timed("step"):
            try:
                with self._traced("env_step", {"actions": len(actions)}) as add:
                    step = await self._episode.step(*actions, view=settings.view, timeout=settings.step_timeout)
                    add({f"{name}_ms": value for name, value in step.timings_ms.items()})
            except BadRequest as error:
                # Nothing was done. What the agent chose is its mistake, also if its grammar should have refused it.
                if not error.field.startswith("actions"):
                    raise
                return f"{error.args[0]}", None, 0.0
        step_s = time.monotonic() - started_s
        if step.state is State.FAILED:
            raise failure_of(self._episode.episode_id, step.end_reason)
        for action in parsed.actions:
            self._pointer = next(reversed(points_of(action)), self._pointer)
        return "", step, step_s

    async def _report(self, reply: Reply, mistake: str, step: StepResult | None, *, before: ModelObservation) -> None:
        """Send the model the result of its reply."""
        result = prompts.result_text(
            mistake=mistake,
            errors=() if step is None else step.errors,
            cut_off_at=self._settings.reply_tokens if reply.finish == "length" else 0,
        )
        if step is not None:
            names = [fact.kind for fact in self._turns[-1].facts.actions]
            tools = prompts.tool_text(names, step.tool_results, max_chars=self._settings.tool_chars)
            result = f"{result}\n\n{tools}\n\n" if tools else result
        with self._timed("model"):
            if not self._settings.repeat_images and self._observed.is_same_as(before):
                message = Message("user", (f"{result} {prompts.UNCHANGED}",))
                self._history.note(message)
                await self._conversation.append(message)
                return
            message = prompts.observation_message(result, self._observed)
            new_row = self._history.observe(message, Message("user", (f"{result} {prompts.DROPPED}",)))
            if new_row is None:
                await self._conversation.append(message)
            else:
                await self._conversation.begin(new_row)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started_s = time.monotonic()
        try:
            with span("generate" if phase == "model" else phase):
                yield
        finally:
            self._timings_s[phase] += time.monotonic() - started_s


def _placed(parsed: Parsed, space: CoordinateSpace) -> tuple[tuple[Action, ...], str]:
    """Return a reply's actions with points of the screen; none, and the agent's mistake, if one lies outside."""
    try:
        return tuple(to_screen_points(action, space) for action in parsed.actions), parsed.error
    except ParseError as mistake:
        return (), f"{mistake}"
