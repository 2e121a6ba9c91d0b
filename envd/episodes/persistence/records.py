"""Convert episodes and responses to database rows and back. Pure.

Pixels are not persisted: a frame per step and episode would saturate the disk. After a restart a replayed response
has a frame without content, so the client can tell. The same applies to long guest text and accessibility elements.
"""

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError

from cuaenv.actions import Done, Fail
from cuaenv.copying import copied
from envd.base.clock import Clock
from envd.base.config import SettlePolicy
from envd.base.errors import EvaluatorFailed
from envd.base.store.statements import EpisodeRow
from envd.desktop.observation import Observation
from envd.desktop.view import ConnectionState
from envd.episodes.episode import Episode
from envd.episodes.types import (
    AutomaticCheckpoints,
    EpisodeState,
    EvaluateResult,
    GroupResult,
    Origin,
    RollbackResult,
    StepResult,
)
from envd.tasks.user import Exchange

T = TypeVar("T")
_ASKED = tuple[Exchange, ...]

#: Longest text of a response, such as an accessibility tree, that is persisted.
MAX_TEXT_CHARS: Final = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """Persisted form of an `EvaluatorFailed` verdict."""

    failure: str


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def dump(value: object) -> str:
    """Return a result or another plain dataclass as JSON. Preserves lone surrogates in guest text."""
    adapter = _adapter(type(value))
    try:
        return adapter.dump_json(value).decode()
    except PydanticSerializationError:  # a lone surrogate; this fallback is 10 times slower
        return json.dumps(adapter.dump_python(value, mode="json"))


@lru_cache(maxsize=1024)
def _dump_constant(value: SettlePolicy | Origin | AutomaticCheckpoints) -> str:
    """Return what never changes in an episode's row, which is written after each step."""
    return dump(value)


def load(kind: type[T], text: str) -> T:
    """Return the value that was dumped. Raises: ValueError: not in this release's format."""
    return _adapter(kind).validate_python(json.loads(text))  # type: ignore[no-any-return]


def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def without_pixels(result: T) -> T:
    if isinstance(result, StepResult | RollbackResult):
        return replace(result, observation=_stripped(result.observation))
    if isinstance(result, GroupResult):
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
    return copied(
        EpisodeRow,
        episode,
        task_id=episode.task.task_id,
        settle=_dump_constant(episode.settle),
        origin=_dump_constant(episode.origin),
        create_time_s=episode.create_time.timestamp(),
        machine_id=episode.machine.machine_id,
        state=episode.state.value,
        automatic=_dump_constant(episode.automatic),
        last_action=_dump_action(episode.last_action),
        verdict=_dump_verdict(episode.verdict),
        asked=json.dumps(episode.asked),
        bearings=dump(episode.machine.desktop.connection_state),
        lease_ttl_s=episode.lease.ttl_s,
        expire_time_s=clock.now().timestamp() + left_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSnapshot:
    """The parsed columns of an episode's row."""

    settle: SettlePolicy
    automatic: AutomaticCheckpoints
    origin: Origin
    create_time: datetime
    state: EpisodeState
    last_action: Done | Fail | None
    verdict: EvaluateResult | EvaluatorFailed | None
    asked: tuple[Exchange, ...]
    bearings: ConnectionState


def snapshot_of(row: EpisodeRow) -> EpisodeSnapshot:
    """Parse a row. Raises: ValueError, TypeError, KeyError: not in this release's format."""
    return EpisodeSnapshot(
        settle=load(SettlePolicy, row.settle),
        automatic=load(AutomaticCheckpoints, row.automatic),
        origin=load(Origin, row.origin),
        create_time=datetime.fromtimestamp(row.create_time_s, UTC),
        state=EpisodeState(row.state),
        last_action=_load_action(row.last_action),
        verdict=_load_verdict(row.verdict),
        asked=load(_ASKED, row.asked),
        bearings=load(ConnectionState, row.bearings),
    )


def _dump_action(action: Done | Fail | None) -> str:
    return "" if action is None else json.dumps({"kind": type(action).__name__, "action": json.loads(dump(action))})


def _load_action(text: str) -> Done | Fail | None:
    if not text:
        return None
    loaded = json.loads(text)
    kind: type[Done] | type[Fail] = Done if loaded["kind"] == "Done" else Fail
    return kind(**loaded["action"])


def _dump_verdict(verdict: EvaluateResult | EvaluatorFailed | None) -> str:
    if verdict is None:
        return ""
    return dump(_Failure(failure=str(verdict)) if isinstance(verdict, EvaluatorFailed) else verdict)


def _load_verdict(text: str) -> EvaluateResult | EvaluatorFailed | None:
    if not text:
        return None
    if "failure" in json.loads(text):
        return EvaluatorFailed(load(_Failure, text).failure)
    return load(EvaluateResult, text)
