"""Write-ahead journal: which facts about episodes are persisted, and when, so that a crash leaves them consistent.

Always true, whenever the daemon dies:

* Nothing is done to a guest before the database records, by `begin`, that the request began.
* No response is sent before the database has it; if the write failed, the request remains recorded as begun.
* A response and the episode's state after it are written in one transaction.

Pixels are not persisted: a frame per step and episode would saturate the disk. After a restart a replayed response
has a frame without content, so the client can tell. The same applies to long guest text and accessibility elements.
"""

import asyncio
import json
import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError

from envd.base.clock import Clock
from envd.base.errors import StoreError
from envd.base.store.store import AnswerRow, EpisodeRow, Store, delete_answer, delete_episode, renew_lease, upsert
from envd.desktop.display_connection import ConnectionState
from envd.desktop.observation import Observation
from envd.episodes.episode import Episode
from envd.episodes.ledger import RequestKey
from envd.episodes.progress import EpisodeSpec, Progress
from envd.episodes.types import EvaluateResult, OpenedGroup, RollbackResult, StepOutcome

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Longest text of a response, such as an accessibility tree, that is persisted.
MAX_TEXT_CHARS: Final = 65_536
#: Fields with text of guests and people, in which a response replaces lone surrogates. Elsewhere they are damage.
_FREE_TEXTS: Final = frozenset(
    {"asked", "cause", "error", "evaluator_error", "evidence", "method", "output", "terminal", "url"} | {"a11y_tree"}
)

_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


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
        self, request: RequestKey, episode: Episode, result: StepOutcome | EvaluateResult | RollbackResult
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


def dump(value: object) -> str:
    """Return a result or another plain dataclass as JSON. Preserves lone surrogates in guest text."""
    adapter = _adapter(type(value))
    try:
        return adapter.dump_json(value).decode()
    except PydanticSerializationError:  # a lone surrogate; this fallback is 10 times slower
        return json.dumps(adapter.dump_python(value, mode="json"))


@lru_cache(maxsize=1024)
def _dump_spec(spec: EpisodeSpec) -> str:
    """Return what never changes in an episode's row, which is written after each step."""
    return dump(spec)


def load(kind: type[T], text: str) -> T:
    """Return the value that was dumped. Raises: ValueError: not in this release's format."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if "\\ud" in text.lower() and not _is_valid_text(value):
        raise ValueError("it has a lone surrogate, which no response can contain")
    return _adapter(kind).validate_python(value)  # type: ignore[no-any-return]


def _is_valid_text(value: object) -> bool:
    """Return whether every text outside of `_FREE_TEXTS` is valid Unicode."""
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, dict):
        return all(_is_valid_text(key) and (key in _FREE_TEXTS or _is_valid_text(value[key])) for key in value)
    return not isinstance(value, list) or all(map(_is_valid_text, value))


def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def without_pixels(result: T) -> T:
    if isinstance(result, StepOutcome | RollbackResult):
        return replace(result, observation=_stripped(result.observation))
    if isinstance(result, OpenedGroup):
        return replace(result, observations=tuple(_stripped(observation) for observation in result.observations))
    return result


def _stripped(observation: Observation) -> Observation:
    return replace(
        observation,
        frame=replace(observation.frame, content=None, image_id=""),
        a11y_tree=_if_short(observation.a11y_tree),
        a11y_elements=None,
        terminal=_if_short(observation.terminal),
    )


def _if_short(text: str | None) -> str | None:
    return text if text is not None and len(text) <= MAX_TEXT_CHARS else None


def row_of(episode: Episode, clock: Clock) -> EpisodeRow:
    left_s = episode.lease.expire_s - clock.monotonic()
    return EpisodeRow(
        episode_id=episode.episode_id,
        owner=episode.spec.owner,
        spec=_dump_spec(episode.spec),
        progress=dump(episode.progress),
        epoch=episode.epoch,
        machine_id=episode.machine.machine_id,
        connection=dump(episode.machine.desktop.connection_state),
        lease_ttl_s=episode.lease.ttl_s,
        expire_time_s=clock.now().timestamp() + left_s,
    )


class StoredEpisode(NamedTuple):
    """The values in an episode's row."""

    spec: EpisodeSpec
    progress: Progress
    connection: ConnectionState


def stored_in(row: EpisodeRow) -> StoredEpisode:
    """Parse a row. Raises: ValueError: not in this release's format."""
    return StoredEpisode(
        spec=load(EpisodeSpec, row.spec),
        progress=load(Progress, row.progress),
        connection=load(ConnectionState, row.connection),
    )
