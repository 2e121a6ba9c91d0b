"""Parse configuration mappings with pydantic. Errors name the key, its value and the closest known key."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from cuaenv.problems import did_you_mean, problem_of

STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)
"""Refuse unknown keys and convert no types, in models, and in dataclasses as `__pydantic_config__`."""


T = TypeVar("T")
_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")


class ConfigError(ValueError):
    """The configuration is invalid; the message names the key and the remedy. Raised before the first episode."""


def parse(kind: type[T], mapping: Mapping[str, object], *, path: str = "") -> T:
    """Return a mapping, as read from YAML, as a pydantic model or a dataclass.

    Args:
        kind: The model or dataclass. Its nested dataclasses inherit its pydantic configuration.
        mapping: Missing keys have their defaults.

    Raises:
        ConfigError: A key is unknown or missing, or a value is invalid.
    """
    try:
        # In JSON, strict mode accepts lists for tuples and strings for paths.
        return TypeAdapter(kind).validate_json(json_of(mapping))
    except ValidationError as error:
        raise ConfigError(_message(kind, error, path)) from error


def json_of(mapping: Mapping[str, object]) -> str:
    """Return a mapping as canonical JSON; paths are texts. Raises: ConfigError: A value is a date, a set or another."""
    return json.dumps(mapping, sort_keys=True, default=_plain)


def _plain(value: object) -> str:
    if isinstance(value, PurePath):
        return str(value)
    # YAML reads 2026-11-28 as a date, and `!!set` as a set.
    raise ConfigError(f"{value} is a {type(value).__name__}, which no key takes; write a text in quotes")


def _message(kind: type, error: ValidationError, path: str) -> str:
    # A misspelt key first: it explains a missing one.
    first = min(error.errors(include_url=False), key=lambda one: one["type"] not in _UNKNOWN_KEY)
    where = ".".join(filter(None, [path, *map(str, first["loc"])]))
    match first["type"]:
        case "missing":
            return f"{where}: missing; add it"
        case unknown if unknown in _UNKNOWN_KEY:
            *parents, name = first["loc"]
            known = _keys(kind, parents)
            return f"{where}: unknown key{did_you_mean(str(name), known) or '; known keys: ' + ', '.join(known)}"
        case "value_error":
            return f"{where}: {first['ctx']['error']}" if where else str(first["ctx"]["error"])
        case _:
            return f"{where} is {first['input']!r}; it {problem_of(first)}"


def _keys(kind: Any, path: Sequence[int | str]) -> list[str]:
    """Return the keys of the model or dataclass at a path below `kind`."""
    for name in path:
        # An index of a list or a key of a mapping is not a field: the items' class was found with the field.
        if (hint := get_type_hints(kind).get(str(name))) is None:
            continue
        kind = next(one for one in (hint, *get_args(hint)) if is_dataclass(one) or hasattr(one, "model_fields"))
    return list(kind.model_fields) if issubclass(kind, BaseModel) else [one.name for one in fields(kind)]
