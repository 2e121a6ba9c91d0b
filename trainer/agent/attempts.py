"""Open an episode and play it; repeat it on a new machine if its first one was lost."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, Unpack

from cuaenv.client import Checkpoint, EnvError, Perturb
from cuaenv.client.tracing import span
from cuaenv.client.view import ResetOptions
from trainer.agent.loop import AgentEpisode, play_episode
from trainer.agent.ownership import ruling_on
from trainer.agent.settings import AgentSettings
from trainer.agent.starts import step_limit, task_id_of
from trainer.agent.types import Conversation, Outcome, Trajectory

logger = logging.getLogger(__name__)

PlayEpisode = Callable[[AgentEpisode, Conversation], Coroutine[Any, Any, Trajectory]]
"""Plays an open episode with a conversation. Raises only cancellation, and `ExtensionError` of own code."""


class Environments(Protocol):
    """Opens episodes, as `cuaenv.client.AsyncEnvClient` does."""

    def reset(self, task: str | Checkpoint, **options: Unpack[ResetOptions]) -> Awaitable[AgentEpisode]:
        """Open an episode, which the caller closes; if cancelled, leave none open. Raises: EnvError."""


async def play_task(
    environments: Environments,
    start: str | Checkpoint,
    new_conversation: Callable[[], Conversation],
    *,
    settings: AgentSettings,
    pool: str = "",
    attempts: int = 2,
    perturb: Perturb | None = None,
    play: PlayEpisode | None = None,
) -> Trajectory:
    """Open and play an episode; if the host lost its machine, retry on a new one.

    `trainer.agent.ownership` decides which losses are retried. An episode lost in every attempt is a FAILED trajectory.
    What no episode can be opened with is raised: a client's `ValueError`, `TypeError` or `OSError`, such as that of an
    unreadable certificate.

    Args:
        start: Id of the task, or a checkpoint to start in; its steps do not count against `settings.max_turns`.
        new_conversation: Creates a new conversation for each attempt.
        pool: Pool to use; empty for the task's own.
        perturb: Perturbs the world of the episode.
        play: Plays an open episode; default `play_episode`.
    """
    task, limit = task_id_of(start), step_limit(start, settings.max_turns)
    options = ResetOptions(pool=pool, max_steps=limit, view=settings.view, timeout=settings.reset_timeout)
    if perturb is not None:
        options["perturb"] = perturb
    play = play or partial(play_episode, settings=settings)
    for attempt in range(1, attempts + 1):
        conversation = new_conversation()
        trajectory = await _play_attempt(environments.reset(start, **options), task, conversation, play)
        trajectory = replace(trajectory, attempt_count=attempt)
        if not ruling_on(trajectory).repeat:
            break
        if attempt < attempts:
            logger.warning("task %s: machine lost (%s); retrying on a new one", task, trajectory.reason)
    return trajectory


async def _play_attempt(
    opening: Awaitable[AgentEpisode], task: str, conversation: Conversation, play: PlayEpisode
) -> Trajectory:
    started_s = asyncio.get_running_loop().time()
    # One trace has the reset and the episode.
    with span("group", task_id=task):
        try:
            episode = await opening
        except EnvError as error:
            logger.warning("task %s: episode could not be opened: %s", task, error)
            return Trajectory(
                task_id=task, instruction="", outcome=Outcome.FAILED, reason=type(error).__name__, error=error
            )
        reset_s = asyncio.get_running_loop().time() - started_s
        try:
            trajectory = await play(episode, conversation)
        finally:
            await episode.close()
    return replace(trajectory, timings_s={**trajectory.timings_s, "reset": reset_s})
