"""Any request of a client is a command or a typed error that names a field; any observation decodes or is a fault."""

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from cuaenv.client.errors import SampleVoid
from cuaenv.client.observation import Observation, read_observation
from cuaenv.v1 import env_pb2
from envd.api.convert_requests import (
    argv_of,
    command_timeout_s,
    fork_command,
    forward_request,
    frames_request,
    keep_alive_of,
    port_data_of,
    reset_command,
    step_command,
)
from envd.base.errors import InvalidRequest, Unimplemented
from tests.support.fuzz import corpus, fuzzed, inputs

SCREEN_PX = (1280, 800)
CONVERSIONS: dict[str, tuple[type[Message], Callable[[Any], object]]] = {
    "reset": (env_pb2.ResetRequest, lambda request: reset_command(request, time_remaining_s=None)),
    "fork": (env_pb2.ForkRequest, lambda request: fork_command(request, time_remaining_s=1.0)),
    "step": (env_pb2.StepRequest, lambda request: step_command(request, screen_px=SCREEN_PX)),
    "frames": (env_pb2.StreamFramesRequest, frames_request),
    "keepalive": (env_pb2.KeepAliveRequest, keep_alive_of),
    "forward": (env_pb2.ForwardGuestPortRequest, lambda request: (forward_request(request), port_data_of(request))),
    "command": (env_pb2.RunGuestCommandRequest, lambda request: (argv_of(request), command_timeout_s(request))),
}
numbers = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 200) | st.sampled_from([2**31 - 1, -(2**31), 2**62])


#: By type and depth: making a strategy takes longer than an example.
_strategies: dict[tuple[str, int], st.SearchStrategy[Message]] = {}


def messages(kind: type[Message], depth: int = 3) -> st.SearchStrategy[Message]:
    """Return messages with any subset of the fields set to any values of their types."""
    key = (kind.DESCRIPTOR.full_name, depth)
    if key not in _strategies:
        _strategies[key] = _messages(kind, depth)
    return _strategies[key]


def _messages(kind: type[Message], depth: int) -> st.SearchStrategy[Message]:
    @st.composite
    def build(draw: st.DrawFn) -> Message:
        message = kind()
        for field in message.DESCRIPTOR.fields:
            if draw(st.integers(0, 2)) == 0:
                continue
            if field.message_type is not None:
                if depth == 0 or field.message_type.GetOptions().map_entry:
                    continue
                part = getattr(message, field.name)
                inner = messages(_class_of(field), depth - 1)
                values = [draw(inner) for _ in range(draw(st.integers(1, 2)) if field.is_repeated else 1)]
                for value in values:
                    (part.add() if field.is_repeated else part).MergeFrom(value)
            else:
                value = draw(_scalars(field))
                if field.is_repeated:
                    getattr(message, field.name).extend([value] * draw(st.integers(1, 2)))
                else:
                    setattr(message, field.name, value)
        return message

    return build()


def _class_of(field: Any) -> type[Message]:
    from google.protobuf.message_factory import GetMessageClass

    return GetMessageClass(field.message_type)


def _scalars(field: Any) -> st.SearchStrategy[Any]:
    kinds = field.__class__
    match field.cpp_type:
        case kinds.CPPTYPE_STRING:
            is_bytes = field.type == kinds.TYPE_BYTES
            return st.binary(max_size=20) if is_bytes else st.text(st.characters(codec="utf-8"), max_size=80)
        case kinds.CPPTYPE_BOOL:
            return st.booleans()
        case kinds.CPPTYPE_FLOAT | kinds.CPPTYPE_DOUBLE:
            return st.floats(width=32)
        case kinds.CPPTYPE_UINT32:
            return numbers.map(lambda number: number % 2**32)
        case kinds.CPPTYPE_UINT64:
            return numbers.map(lambda number: number % 2**64)
        case kinds.CPPTYPE_INT64:
            return numbers
        case _:
            return numbers.map(lambda number: (number + 2**31) % 2**32 - 2**31)


def convert(parser: str, data: bytes) -> None:
    kind, conversion = CONVERSIONS[parser]
    try:
        request = kind.FromString(data)
    except DecodeError:
        return
    message = ""
    try:
        conversion(request)
    except (InvalidRequest, Unimplemented) as error:
        message = str(error)
    assert len(message.encode()) < 2000


@pytest.mark.parametrize("parser", CONVERSIONS)
def test_every_request_of_the_corpus_is_a_command(parser: str) -> None:
    kind, conversion = CONVERSIONS[parser]
    for data in corpus(parser):
        assert conversion(kind.FromString(data))


@pytest.mark.parametrize("parser", CONVERSIONS)
@fuzzed(60)
@given(data=st.data())
def test_any_request_is_a_command_or_a_typed_error(parser: str, data: st.DataObject) -> None:
    built = messages(CONVERSIONS[parser][0]).map(lambda message: message.SerializeToString())
    convert(parser, data.draw(inputs(parser) | built))


# What the daemon sends to a client.


def decode(data: bytes, base: Observation | None) -> Observation | None:
    try:
        message = env_pb2.Observation.FromString(data)
    except DecodeError:
        return None
    try:
        return read_observation(message, base)
    except SampleVoid:
        return None


KEYFRAME = decode(corpus("observation")[0], None)


def test_every_observation_of_the_corpus_is_decoded() -> None:
    for data in corpus("observation"):
        found = decode(data, KEYFRAME)
        assert found
        assert found.rgb_HWC.shape == (6, 8, 3)


@fuzzed(100)
@given(inputs("observation"), st.booleans())
def test_any_observation_is_decoded_or_a_typed_error(data: bytes, has_base: bool) -> None:
    found = decode(data, KEYFRAME if has_base else None)
    assert found is None or found.tiles is None or found.tiles.image_id == found.image_id


@fuzzed(60)
@given(messages(env_pb2.Observation).map(lambda message: message.SerializeToString()), st.booleans())
def test_any_fields_of_an_observation_are_decoded_or_a_typed_error(data: bytes, has_base: bool) -> None:
    decode(data, KEYFRAME if has_base else None)
