"""Copies fields of the same names between records: dataclasses, pydantic models and protobuf messages."""

from dataclasses import fields
from datetime import UTC
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
_MISSING = object()


def copied(kind: type[T], *sources: Any, **given: Any) -> T:
    """Return a record whose fields are `given`, or else those of the first source that has one of that name.

    A field that no source has keeps its default. From a message come tuples, dicts, times in UTC and timedeltas, and
    None for an optional field that is not set.
    """
    names = _names(kind)  # type: ignore[arg-type] # every type is hashable
    for source in sources:
        is_message = hasattr(source, "DESCRIPTOR")
        for name in names:
            if name not in given and (value := getattr(source, name, _MISSING)) is not _MISSING:
                given[name] = _plain(source, name, value) if is_message else value
    return kind(**given)


@cache
def _names(kind: Any) -> tuple[str, ...]:
    if hasattr(kind, "DESCRIPTOR"):
        return tuple(kind.DESCRIPTOR.fields_by_name)
    if hasattr(kind, "model_fields"):
        return tuple(kind.model_fields)
    return tuple(field.name for field in fields(kind) if field.init)


def _plain(message: Any, name: str, value: Any) -> Any:
    if hasattr(value, "ToDatetime"):
        return value.ToDatetime(UTC)
    if hasattr(value, "ToTimedelta"):
        return value.ToTimedelta()
    if hasattr(value, "items"):
        return dict(value)
    if hasattr(value, "append"):
        return tuple(value)
    return None if message.DESCRIPTOR.fields_by_name[name].has_presence and not message.HasField(name) else value
