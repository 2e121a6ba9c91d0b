"""Copies of records: which source wins, and what becomes of a message's values."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from cuaenv.copying import copied
from cuaenv.v1 import env_pb2
from cuaenv.wire import wire_duration


@dataclass(kw_only=True)
class Record:
    run: str
    position: int = 7
    waited: timedelta = timedelta()


class Model(BaseModel):
    run: str
    position: int


@dataclass(kw_only=True)
class Parts:
    create_time: datetime | None = None
    tools: tuple[str, ...] = ()
    timings_ms: dict[str, float] | None = None
    runnable: bool | None = None
    exit_code: int | None = None


def test_given_values_come_before_sources_and_earlier_sources_before_later_ones() -> None:
    first, second = Record(run="first", position=1), Model(run="second", position=2)
    assert copied(Record, first, second, position=3) == Record(run="first", position=3)
    assert copied(Model, second, first) == Model(run="second", position=2)


def test_a_field_that_no_source_has_keeps_its_default_or_is_missed() -> None:
    @dataclass
    class Named:
        run: str

    assert copied(Record, Named("r")) == Record(run="r", position=7)
    with pytest.raises(TypeError, match="run"):
        copied(Record)


def test_a_message_gives_its_fields_of_the_same_names() -> None:
    group = env_pb2.QueuedGroup(run="r", position=2, waited=wire_duration(timedelta(seconds=1.5)))
    assert copied(Record, group) == Record(run="r", position=2, waited=timedelta(seconds=1.5))
    assert copied(env_pb2.QueuedGroup, Model(run="r", position=2)).position == 2


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (env_pb2.Task(tools=["shell"]), Parts(tools=("shell",))),
        (env_pb2.Task(runnable=False), Parts(runnable=False)),
        (env_pb2.StepResponse(timings_ms={"total": 1.0}), Parts(timings_ms={"total": 1.0})),
        (env_pb2.ActionResult(exit_code=0), Parts(exit_code=0)),
        (env_pb2.ActionResult(), Parts()),
    ],
)
def test_values_of_a_message_become_plain_values(message: Any, expected: Parts) -> None:
    assert copied(Parts, message) == expected


def test_times_of_a_message_are_in_utc() -> None:
    episode = env_pb2.Episode()
    episode.create_time.FromSeconds(5)
    assert copied(Parts, episode).create_time == datetime.fromtimestamp(5, UTC)
