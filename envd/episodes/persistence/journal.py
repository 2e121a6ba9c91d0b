"""Write-ahead journal: which facts about episodes are persisted, and when, so that a crash leaves them consistent.

Always true, whenever the daemon dies:

* Nothing is done to a guest before the database records, by `begin`, that the request began.
* No response is sent before the database has it; if the write failed, the request remains recorded as begun.
* A response and the episode's state after it are written in one transaction.
"""

import asyncio
import logging
from collections.abc import Iterable

from envd.base.clock import Clock
from envd.base.errors import StoreError
from envd.base.store.statements import AnswerRow, delete_answer, delete_episode, renew_lease, upsert
from envd.base.store.store import Store
from envd.episodes.episode import Episode
from envd.episodes.ledger import RequestKey
from envd.episodes.persistence.records import dump, row_of, without_pixels
from envd.episodes.types import EvaluateResult, OpenedGroup, RollbackResult, StepResult

logger = logging.getLogger(__name__)


class Journal:
    """Persists the episodes of one service."""

    def __init__(self, store: Store, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._tracked: set[str] = set()
        """Episodes in the database: a late write for a closed episode must not recreate its row."""

    def is_tracked(self, episode_id: str) -> bool:
        """Return whether the database has, or is about to have, the episode."""
        return episode_id in self._tracked

    def begin(self, request: RequestKey) -> "asyncio.Future[None]":
        """Record that a request is about to act on a guest.

        Raises:
            StoreError: At once or from the future; the request must not act.
        """
        if self.is_tracked(request.scope):
            return self._store.commit(upsert(self._answer_row(request, "")))
        # The episode was just closed, and its calls are being cancelled.
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    async def opened(self, request: RequestKey, result: OpenedGroup, episodes: Iterable[Episode]) -> None:
        """Persist new episodes and the response that announces them. Raises: StoreError: do not send it."""
        episodes = tuple(episodes)
        self._tracked.update(episode.episode_id for episode in episodes)
        answer = self._answer_row(request, dump(without_pixels(result)))
        await self._store.commit(*(upsert(row_of(episode, self._clock)) for episode in episodes), upsert(answer))

    async def answered(
        self, request: RequestKey, episode: Episode, result: StepResult | EvaluateResult | RollbackResult
    ) -> None:
        """Persist a response and the episode's state after it.

        On failure the request remains recorded as begun, so it is never repeated; the response may be sent.
        """
        if not self.is_tracked(request.scope):
            return
        answer = self._answer_row(request, dump(without_pixels(result)))
        try:
            await self._store.commit(upsert(row_of(episode, self._clock)), upsert(answer))
        except StoreError as error:
            logger.error("episode %s: response not persisted: %s", request.scope, error)  # noqa: TRY400

    def save(self, episode: Episode) -> None:
        """Persist an episode's state soon."""
        if self.is_tracked(episode.episode_id):
            self._store.write_soon(upsert(row_of(episode, self._clock)))

    async def moved(self, episode: Episode) -> None:
        """Persist the machine that an open episode has now. Raises: StoreError: the database has the one before."""
        if self.is_tracked(episode.episode_id):
            await self._store.commit(upsert(row_of(episode, self._clock)))

    def save_lease(self, episode: Episode) -> None:
        """Persist the end of an episode's lease soon."""
        if not self.is_tracked(episode.episode_id):
            return
        left_s = episode.lease.expire_s - self._clock.monotonic()
        expire_time_s = self._clock.now().timestamp() + left_s
        self._store.write_soon(
            renew_lease(episode.episode_id, lease_ttl_s=episode.lease.ttl_s, expire_time_s=expire_time_s)
        )

    def track(self, episode: Episode) -> None:
        self._tracked.add(episode.episode_id)
        self.save(episode)

    def forget(self, episode_id: str) -> None:
        """Delete an episode and its responses."""
        self._tracked.discard(episode_id)
        self._store.write_soon(*delete_episode(episode_id))

    def forget_answer(self, request: RequestKey) -> None:
        """Delete a response, or the record that a request began."""
        if not request.scope or self.is_tracked(request.scope):
            self._store.write_soon(
                delete_answer(kind=request.kind.name, scope=request.scope, request_id=request.request_id)
            )

    def _answer_row(self, request: RequestKey, answer: str) -> AnswerRow:
        return AnswerRow(
            kind=request.kind.name,
            scope=request.scope,
            request_id=request.request_id,
            fingerprint=request.fingerprint,
            answer=answer,
            time_s=self._clock.now().timestamp(),
        )
