"""Checkpoints that episodes store by themselves. They fail no call, and delay it only by the copy of the state."""

import logging
from collections.abc import Callable
from functools import partial

from envd.base.aio import OwnedTasks
from envd.base.errors import EnvdError
from envd.episodes.checkpoints.calls import Checkpointing
from envd.episodes.checkpoints.store import Checkpoint
from envd.episodes.context import EpisodeContext
from envd.episodes.episode import Episode
from envd.episodes.types import CheckpointTrigger
from envd.pool.leased import FrozenDesktop

logger = logging.getLogger(__name__)


class AutomaticCheckpointing:
    """Copies states at the occasions that resets named, and stores them in the background."""

    def __init__(self, context: EpisodeContext, checkpoints: Checkpointing) -> None:
        self._context = context
        self._checkpoints = checkpoints
        self._tasks = OwnedTasks()

    async def after_step(self, episode: Episode) -> bool:
        """Copy and store the state after a step, if it is an occasion; returns whether it is. Hold the turn."""
        trigger = episode.automatic.after_step(episode.step_count, is_done=episode.last_action is not None)
        if trigger is not None and (frozen := await self._copy(episode)) is not None:
            self._keep(episode, frozen, trigger)
        return trigger is not None

    async def before_evaluation(self, episode: Episode) -> Callable[[bool], None]:
        """Copy the state before checkers change it, if failures are occasions. The caller has the episode's turn.

        Call the result with whether the episode failed: only then the copy is stored.
        """
        if CheckpointTrigger.FAILURE not in episode.automatic.on or episode.guest_end_cause:
            return lambda _: None
        frozen = await self._copy(episode)

        def end(is_failure: bool) -> None:
            if frozen is None:
                return
            if is_failure:
                self._keep(episode, frozen, CheckpointTrigger.FAILURE)
            else:
                self._checkpoints.discard(frozen)

        return end

    def last_use(self, episode: Episode, frozen: FrozenDesktop, trigger: CheckpointTrigger) -> Callable[[], None]:
        """Return what to call after the last fork of a present state: keeps it at an occasion, else discards it."""
        if trigger not in episode.automatic.on:
            return partial(self._checkpoints.discard, frozen)
        return partial(self._spawn, episode, self._checkpoints.describe(episode, frozen, trigger), frozen)

    async def aclose(self) -> None:
        """Wait until all are stored."""
        await self._tasks.join()

    async def _copy(self, episode: Episode) -> FrozenDesktop | None:
        """Copy the state of an episode whose turn the caller has; None if that failed, which is logged."""
        try:
            return await self._context.pools[episode.pool].freeze(episode.machine)
        except EnvdError as error:
            self._failed(episode, error)
            return None

    def _keep(self, episode: Episode, frozen: FrozenDesktop, trigger: CheckpointTrigger) -> None:
        """Store the present state of an episode, and then discard the copy."""
        self._spawn(episode, self._checkpoints.describe(episode, frozen, trigger), frozen)

    def _spawn(self, episode: Episode, described: Checkpoint, frozen: FrozenDesktop) -> None:
        self._tasks.spawn(self._store(episode, described, frozen), name=f"checkpoint:{described.checkpoint_id}")

    async def _store(self, episode: Episode, described: Checkpoint, frozen: FrozenDesktop) -> None:
        try:
            await self._checkpoints.store(episode, described, frozen)
        except EnvdError as error:
            self._failed(episode, error)
        finally:
            self._checkpoints.discard(frozen)

    def _failed(self, episode: Episode, error: EnvdError) -> None:
        logger.warning("episode %s: no automatic checkpoint: %s", episode.episode_id, error)
        self._context.count_failure(episode, "checkpoint", error)
