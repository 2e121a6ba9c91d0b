"""Open episodes and run them; repeat an episode on a new machine if its first one was lost."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, Unpack

from cuaenv.client import AsyncEpisode, Checkpoint, EnvError
from cuaenv.client.tracing import span
from cuaenv.client.view import ResetOptions
from trainer.agent.loop import AgentEpisode, run_episode
from trainer.agent.ownership import ruling_on
from trainer.agent.settings import AgentSettings
from trainer.agent.starts import step_limit, task_id_of
from trainer.agent.types import Conversation, Outcome, Trajectory

logger = logging.getLogger(__name__)

RunEpisode = Callable[[AgentEpisode, Conversation], Coroutine[Any, Any, Trajectory]]
"""Runs an open episode with a conversation. Raises only cancellation."""


class Environments(Protocol):
    """Opens episodes, as `cuaenv.client.AsyncEnvClient` does."""

    def reset(
        self, task: str | Checkpoint, **options: Unpack[ResetOptions]
    ) -> AbstractAsyncContextManager[AgentEpisode]:
        """Open an episode, and close it on exit. Raises: EnvError."""


class GroupEnvironments(Environments, Protocol):
    """Opens groups, too, as `cuaenv.client.AsyncEnvClient` does."""

    def reset_group(
        self, task: str | Checkpoint, *, size: int, **options: Unpack[ResetOptions]
    ) -> AbstractAsyncContextManager[Sequence[AgentEpisode]]:
        """Open episodes of one task in one state, and close them on exit. Raises: EnvError."""


async def run_task(
    environments: Environments,
    start: str | Checkpoint,
    new_conversation: Callable[[], Conversation],
    *,
    settings: AgentSettings,
    pool: str = "",
    attempts: int = 2,
    run: RunEpisode | None = None,
) -> Trajectory:
    """Open and run an episode; if the host lost its machine, retry on a new one.

    `trainer.agent.ownership` decides which losses are retried. An episode lost in every attempt is a FAILED trajectory.
    What no episode can be opened with is raised: a client's `ValueError`, `TypeError` or `OSError`, such as that of an
    unreadable certificate.

    Args:
        start: Id of the task, or a checkpoint to start in; its steps do not count against `settings.max_turns`.
        new_conversation: Creates a new conversation for each attempt.
        pool: Pool to use; empty for the task's own.
        run: Runs an open episode; default `run_episode`.
    """
    options, task = _reset_options(start, settings, pool), task_id_of(start)
    run = run or partial(run_episode, settings=settings)
    for attempt in range(1, attempts + 1):
        opening = _alone(environments.reset(start, **options))
        (trajectory,) = await _run_once(opening, task, [new_conversation()], run)
        trajectory = replace(trajectory, attempt_count=attempt)
        if not ruling_on(trajectory).repeat:
            break
        if attempt < attempts:
            logger.warning("task %s: machine lost (%s); retrying on a new one", task, trajectory.reason)
    return trajectory


async def run_group(
    environments: GroupEnvironments,
    start: str | Checkpoint,
    new_conversation: Callable[[], Conversation],
    *,
    size: int,
    settings: AgentSettings,
    pool: str = "",
    attempts: int = 2,
) -> list[Trajectory]:
    """Run a group of concurrent episodes that start in one state; retry lost members individually.

    Arguments and errors are those of `run_task`. `Trajectory.origin` shows whether a retried member
    started in the same state as the others.
    """
    conversations = [new_conversation() for _ in range(size)]
    task = task_id_of(start)
    opening = environments.reset_group(start, size=size, **_reset_options(start, settings, pool))
    group = await _run_once(opening, task, conversations, partial(run_episode, settings=settings))
    if attempts <= 1:
        return group

    async def retry(first: Trajectory) -> Trajectory:
        if not ruling_on(first).repeat:
            return first
        logger.warning("task %s: machine of a group member lost (%s); retrying on a new one", task, first.reason)
        last = await run_task(
            environments, start, new_conversation, settings=settings, pool=pool, attempts=attempts - 1
        )
        return replace(last, attempt_count=last.attempt_count + 1)

    return await _gather([retry(first) for first in group])


def _reset_options(start: str | Checkpoint, settings: AgentSettings, pool: str) -> ResetOptions:
    limit = step_limit(start, settings.max_turns)
    return {"pool": pool, "max_steps": limit, "view": settings.view, "timeout": settings.reset_timeout}


@asynccontextmanager
async def _alone(opening: AbstractAsyncContextManager[AgentEpisode]) -> AsyncIterator[Sequence[AgentEpisode]]:
    async with opening as episode:
        yield [episode]


async def _run_once(
    opening: AbstractAsyncContextManager[Sequence[AgentEpisode]],
    task: str,
    conversations: Sequence[Conversation],
    run: RunEpisode,
) -> list[Trajectory]:
    started_s = asyncio.get_running_loop().time()
    try:
        # One trace has the reset and all episodes of the group.
        with span("group", task_id=task):
            async with opening as episodes:
                reset_s = asyncio.get_running_loop().time() - started_s
                group = await _gather(
                    [
                        _run_and_close(episode, conversation, run)
                        for episode, conversation in zip(episodes, conversations, strict=True)
                    ]
                )
    except EnvError as error:
        logger.warning("task %s: episode could not be opened: %s", task, error)
        return [
            Trajectory(task_id=task, instruction="", outcome=Outcome.FAILED, reason=type(error).__name__, error=error)
            for _ in conversations
        ]
    return [replace(each, timings_s={**each.timings_s, "reset": reset_s}) for each in group]


async def _run_and_close(episode: AgentEpisode, conversation: Conversation, run: RunEpisode) -> Trajectory:
    trajectory = await run(episode, conversation)
    if isinstance(episode, AsyncEpisode):
        # Release the machine now, before the last member of the group ends.
        await episode.close()
    return trajectory


async def _gather(runs: Sequence[Coroutine[Any, Any, Trajectory]]) -> list[Trajectory]:
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(run) for run in runs]
    return [task.result() for task in running]
