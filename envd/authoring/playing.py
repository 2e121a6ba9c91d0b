"""Plays scripted steps, such as a task's oracle, in an episode of the client."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta

from cuaenv.actions import Action, Wait
from cuaenv.client import AsyncEpisode, Evaluation, GuestEnded, GuestFailed, StepResult
from cuaenv.results import CommandResult
from envd.authoring.targets import resolved
from envd.base import errors
from envd.hypervisor.machine import GuestOs
from envd.tasks.model import Task
from envd.tasks.oracle import Aimed, Input, OracleAction, WaitFor, without_target
from envd.tasks.queries import Query
from envd.tasks.replay import PATIENCE_S, query_of, replay, unmet

Steps = Sequence[tuple[OracleAction, ...]]

#: A guest runs only during calls, so it gets half a second between two queries.
_LET_RUN = (Wait(timedelta(seconds=0.5)),)
#: A screen that settles so soon after a wait does so because the guest's processors are idle: without that evidence it
#: must be quiet for 300 ms.
_IDLE_SETTLE_MS = 250.0
#: An idle guest that has not responded after so long in a row will not.
_MAX_IDLE_S = 3.0
_QUERY_TIMEOUT = timedelta(minutes=2)
_WAITING_STEPS = 10
#: Looks for a target in a guest that runs programs, before its action is performed at its own coordinates.
_MAX_LOOKS = 4


class ConditionNotMet(Exception):
    """A condition of an oracle did not hold in time; the message says what was found instead."""


def max_steps_of(task: Task, *, limit: int) -> int:
    """Return the step limit of an episode that plays a task's oracle: waiting for the guest takes steps too."""
    return min(task.max_steps * _WAITING_STEPS, limit)


async def play(
    episode: AsyncEpisode,
    steps: Steps,
    *,
    os: GuestOs = GuestOs.LINUX,
    runs_guests: bool,
    on_step: Callable[[tuple[Action, ...], StepResult], None],
    max_wait_s: float = math.inf,
) -> None:
    """Play steps, each after the screen has reacted to the one before and the conditions in between hold.

    Args:
        episode: Its observation is the frame before the first step. For steps with conditions, its pool must allow
            access to the guest.
        runs_guests: Whether guest code runs, whose programs take time to react.
        on_step: Called after each step, and after each wait for the screen to change.
        max_wait_s: Limit of each condition, and of each wait for a response, in seconds. If finite, these also end when
            the guest has been idle for 3 s.

    Raises:
        ConditionNotMet: A condition did not hold in time.
    """
    idle_s = 0.0

    async def step(inputs: tuple[Input, ...]) -> str:
        begun: list[Action] = []
        for each in inputs:
            if isinstance(each, Aimed):
                # The actions before it may show, hide or move its target.
                if begun:
                    await perform(tuple(begun))
                begun = [await at_target(each)]
            else:
                begun.append(each)
        return await perform(tuple(begun))

    async def perform(actions: tuple[Action, ...]) -> str:
        nonlocal idle_s
        result = await episode.step(*actions)
        on_step(actions, result)
        is_idle = result.timings_ms.get("settle", math.inf) < _IDLE_SETTLE_MS
        waited_s = sum(action.duration.total_seconds() for action in actions if isinstance(action, Wait))
        idle_s = idle_s + waited_s if is_idle and len(actions) == 1 and waited_s else 0.0
        return result.observation.frame_id

    async def at_target(aimed: Aimed) -> Action:
        for _ in range(looks):
            if (action := await resolved(aimed, episode, os=os)) is not None:
                return action
            if runs_guests:
                await perform(_LET_RUN)
        return without_target(aimed)

    async def run(query: Query) -> CommandResult:
        return await episode.run_command(query.argv, as_root=query.as_root, timeout=_QUERY_TIMEOUT)

    def is_idle() -> bool:
        return math.isfinite(max_wait_s) and idle_s >= _MAX_IDLE_S

    async def wait_for(condition: WaitFor) -> str:
        nonlocal idle_s
        idle_s = 0.0

        async def let_run() -> None:
            if is_idle():
                raise ConditionNotMet(f"waited for {condition} until the guest was idle")
            await perform(_LET_RUN)

        limited = condition.model_copy(update={"timeout_s": min(condition.timeout_s, max_wait_s)})
        await wait_until_met(limited, os=os, run=run, let_run=let_run)
        return (await episode.observe(refresh=True)).frame_id

    looks = _MAX_LOOKS if runs_guests else 1
    first_frame_id = episode.observation.frame_id
    # A fake desktop has reacted before its input call returns.
    patience_s = [wait_s for wait_s in PATIENCE_S if runs_guests and wait_s <= max_wait_s]
    await replay(
        steps, first_frame_id=first_frame_id, step=step, wait_for=wait_for, patience_s=patience_s, is_idle=is_idle
    )


async def play_and_evaluate(
    episode: AsyncEpisode,
    steps: Steps,
    *,
    os: GuestOs,
    runs_guests: bool,
    on_step: Callable[[tuple[Action, ...], StepResult], None],
    max_wait_s: float = math.inf,
    scored_despite: tuple[type[Exception], ...] = (),
) -> tuple[Evaluation, str]:
    """Play steps, then evaluate; see `play`. Return the evaluation and why playing ended early, empty if it did not.

    Args:
        scored_despite: Errors of `play` after which the state is evaluated as it is. Others are raised, and the end of
            the guest by its own act always is: it leaves no state to judge.
    """
    problem = ""
    try:
        await play(episode, steps, os=os, runs_guests=runs_guests, on_step=on_step, max_wait_s=max_wait_s)
    except GuestEnded:
        raise
    except scored_despite as error:
        problem = str(error)
    return await episode.evaluate(), problem


def evidence_of(evaluation: Evaluation) -> list[str]:
    """Return what each check found, as text."""
    return [f"{check.name}: {check.score:g}, {check.evidence}" for check in evaluation.checks]


async def wait_until_met(
    condition: WaitFor,
    *,
    os: GuestOs,
    run: Callable[[Query], Awaitable[CommandResult]],
    let_run: Callable[[], Awaitable[object]],
) -> None:
    """Return once a condition holds.

    Raises:
        ConditionNotMet: It does not hold in time.
    """
    query = query_of(condition, os)
    problem = "the query did not end"
    try:
        async with asyncio.timeout(condition.timeout_s):
            while True:
                # A guest that starts a program may be too busy to answer.
                try:
                    problem = unmet(condition, await run(query))
                except (GuestFailed, errors.GuestUnresponsive, errors.GuestError) as error:
                    problem = str(error)
                if not problem:
                    return
                await let_run()
    except TimeoutError as error:
        raise ConditionNotMet(f"waited {condition.timeout_s:g} s for {condition}: {problem}") from error
