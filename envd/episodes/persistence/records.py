"""Convert episodes and responses to database rows and back. Pure.

Pixels are not persisted: a frame per step and episode would saturate the disk. After a restart a replayed response
has a frame without content, so the client can tell. The same applies to long guest text and accessibility elements.
"""

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError

from envd.base.clock import Clock
from envd.base.store.statements import EpisodeRow
from envd.desktop.observation import Observation
from envd.desktop.view import ConnectionState
from envd.episodes.episode import Episode
from envd.episodes.progress import EpisodeSpec, Progress
from envd.episodes.types import OpenedGroup, RollbackResult, StepResult

T = TypeVar("T")

#: Longest text of a response, such as an accessibility tree, that is persisted.
MAX_TEXT_CHARS: Final = 65_536
#: Fields with text of guests and people, in which a response replaces lone surrogates. Elsewhere they are damage.
_FREE_TEXTS: Final = frozenset(
    {"asked", "cause", "error", "evaluator_error", "evidence", "method", "output", "terminal", "url"} | {"a11y_tree"}
)

_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


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
    if isinstance(result, StepResult | RollbackResult):
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
