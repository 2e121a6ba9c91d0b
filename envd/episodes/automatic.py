"""Checkpoints that episodes store by themselves. They fail no call, and delay it only by the copy of the state.

Each holds that copy in memory until it is on the disk, so an owner has a limited number of them. Above it, a step waits
for some seconds, and then there is no checkpoint.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

from envd.base.aio import Changes, OwnedTasks
from envd.base.clock import wait_until
from envd.base.errors import EnvdError, RateLimited
from envd.episodes.checkpointing import Checkpointing
from envd.episodes.checkpoints.manifest import Manifest
from envd.episodes.context import EpisodeContext
from envd.episodes.episode import Episode
from envd.episodes.progress import CheckpointTrigger
from envd.pool.leased import FrozenDesktop

logger = logging.getLogger(__name__)

#: Copies of one owner that are being written.
MAX_COPIES: Final = 16
#: Longest wait of a step for one of them.
_WAIT_S: Final = 5.0
#: How long a daemon that stops writes those that are left.
_DRAIN_S: Final = 10.0
#: Interval of the log lines about one owner.
_LOG_S: Final = 60.0


class AutomaticCheckpointing:
    """Copies states at the occasions that resets named, and stores them in the background."""

    def __init__(self, context: EpisodeContext, checkpoints: Checkpointing) -> None:
        self._context = context
        self._checkpoints = checkpoints
        self._tasks = OwnedTasks()
        self._copies = Counter[str]()
        """Number of each owner's copies."""
        self._changes = Changes()
        """Notified when there are fewer."""
        self._logged_s: dict[str, float] = {}
        self._omitted = Counter[str]()
        """Failures since the last line, by owner."""

    async def after_step(self, episode: Episode) -> bool:
        """Copy and store the state after a step, if it is an occasion; returns whether it is. Hold the lock."""
        trigger = episode.spec.automatic.after_step(
            episode.progress.step_count, is_done=episode.progress.last_action is not None
        )
        if trigger is not None and await self._waited(episode):
            frozen = None
            try:
                frozen = await self._copy(episode)
            finally:
                if frozen is None:
                    self._release(episode.spec.owner)
            if frozen is not None:
                self._spawn(episode, self._checkpoints.describe(episode, frozen, trigger), frozen)
        return trigger is not None

    async def before_evaluation(self, episode: Episode) -> Callable[[bool], None]:
        """Copy the state before checkers change it, if failures are occasions. The caller holds the episode's lock.

        Call the result with whether the episode failed: only then the copy is stored.
        """
        if CheckpointTrigger.FAILURE not in episode.spec.automatic.on or episode.progress.guest_end_cause:
            return lambda _: None
        frozen = await self._copy(episode)

        def end(is_failure: bool) -> None:
            if frozen is None:
                return
            if is_failure:
                self._keep(episode, self._checkpoints.describe(episode, frozen, CheckpointTrigger.FAILURE), frozen)
            else:
                self._context.states.discard(frozen)

        return end

    def last_use(self, episode: Episode, frozen: FrozenDesktop, trigger: CheckpointTrigger) -> Callable[[], None]:
        """Return what to call after the last fork of a present state: keeps it at an occasion, else discards it."""
        if trigger not in episode.spec.automatic.on:
            return partial(self._context.states.discard, frozen)
        return partial(self._keep, episode, self._checkpoints.describe(episode, frozen, trigger), frozen)

    async def aclose(self) -> None:
        """Store what some seconds suffice for."""
        try:
            async with asyncio.timeout(_DRAIN_S):
                await self._tasks.join()
        except TimeoutError:
            logger.warning("%d automatic checkpoints are not stored: the daemon stops", len(self._tasks))
            await self._tasks.cancel()

    async def _copy(self, episode: Episode) -> FrozenDesktop | None:
        """Copy the state of an episode whose lock the caller holds; None if that failed, which is logged."""
        try:
            return await self._context.pools[episode.spec.pool].freeze(episode.machine)
        except EnvdError as error:
            self._failed(episode, error)
            return None

    async def _waited(self, episode: Episode) -> bool:
        """Wait until an episode's owner may have another copy, and count it; returns whether it may."""
        clock = self._context.clock
        deadline_s = clock.monotonic() + _WAIT_S
        while self._copies[episode.spec.owner] >= MAX_COPIES and clock.monotonic() < deadline_s:
            await wait_until(clock, deadline_s, or_event=self._changes.next)
        return self._counted(episode)

    def _counted(self, episode: Episode) -> bool:
        """Count another copy of an episode's owner; returns whether it may have it."""
        if self._copies[episode.spec.owner] >= MAX_COPIES:
            who = f"token {episode.spec.owner!r}" if episode.spec.owner else "the daemon"
            self._failed(
                episode,
                RateLimited(
                    f"{who}: {MAX_COPIES} of them are being written, the maximum; store fewer, or use a faster disk",
                    retry_after_s=_WAIT_S,
                ),
            )
            return False
        self._copies[episode.spec.owner] += 1
        return True

    def _release(self, owner: str) -> None:
        self._copies[owner] -= 1
        if not self._copies[owner]:
            del self._copies[owner]
        self._changes.notify()

    def _keep(self, episode: Episode, described: Manifest, frozen: FrozenDesktop) -> None:
        """Store a copy and then discard it."""
        if self._counted(episode):
            self._spawn(episode, described, frozen)
        else:
            self._context.states.discard(frozen)

    def _spawn(self, episode: Episode, described: Manifest, frozen: FrozenDesktop) -> None:
        self._tasks.spawn(self._store(episode, described, frozen), name=f"checkpoint:{described.checkpoint_id}")

    async def _store(self, episode: Episode, described: Manifest, frozen: FrozenDesktop) -> None:
        try:
            await self._checkpoints.store(episode, described, frozen)
        except EnvdError as error:
            self._failed(episode, error)
        finally:
            self._context.states.discard(frozen)
            self._release(described.spec.owner)

    def _failed(self, episode: Episode, error: EnvdError) -> None:
        """Count a failure, and log those of an owner once a minute."""
        self._context.count_failure(episode, "checkpoint", error)
        now_s, owner = self._context.clock.monotonic(), episode.spec.owner
        if now_s < self._logged_s.get(owner, -_LOG_S) + _LOG_S:
            self._omitted[owner] += 1
            return
        self._logged_s[owner] = now_s
        omitted = self._omitted.pop(owner, 0)
        more = f" (after {omitted} more of its owner that are not logged)" if omitted else ""
        logger.warning("episode %s: no automatic checkpoint: %s%s", episode.episode_id, error, more)
