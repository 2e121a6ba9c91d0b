"""Parse configuration mappings with pydantic, and find what users replace by their own.

Errors name the key, its value and the closest known key. A setting that can be replaced names one of ours, or theirs as
`module:NAME`. Everything that a name can get wrong is found when settings are read. What own code does wrong later
raises `ExtensionError`, which ends the run: it is neither a failure of the service nor one of the agent.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import PurePath
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from cuaenv.problems import did_you_mean, problem_of

STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)
"""Refuse unknown keys and convert no types, in models, and in dataclasses as `__pydantic_config__`."""


T = TypeVar("T")
_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")


class InputError(ValueError):
    """What the user named or wrote, such as a setting, a file or a choice of tasks, cannot be used.

    The message names it and the remedy. An invalid configuration is refused before the first episode.
    """


class ExtensionError(InputError):
    """Own code that a setting names broke its contract; the message names the setting, the code and the remedy."""


def parse(kind: type[T], mapping: Mapping[str, object], *, path: str = "") -> T:
    """Return a mapping, as read from YAML, as a pydantic model or a dataclass.

    Args:
        kind: The model or dataclass. Its nested dataclasses inherit its pydantic configuration.
        mapping: Missing keys have their defaults.

    Raises:
        InputError: A key is unknown or missing, or a value is invalid.
    """
    try:
        # In JSON, strict mode accepts lists for tuples and strings for paths.
        return TypeAdapter(kind).validate_json(json_of(mapping))
    except ValidationError as error:
        raise InputError(_message(kind, error, path)) from error


def json_of(mapping: Mapping[str, object]) -> str:
    """Return a mapping as canonical JSON; paths are texts. Raises: InputError: A value is a date, a set or another."""
    return json.dumps(mapping, sort_keys=True, default=_plain)


def _plain(value: object) -> str:
    if isinstance(value, PurePath):
        return str(value)
    # YAML reads 2026-11-28 as a date, and `!!set` as a set.
    raise InputError(f"{value} is a {type(value).__name__}, which no key takes; write a text in quotes")


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


def named(field: str, text: str, known: Mapping[str, T]) -> T | Any:
    """Return what a setting names.

    Args:
        field: Name of the setting, for messages.
        text: A key of `known`, or `module:NAME` of anything that Python can import.
        known: Ours, by name.

    Raises:
        InputError: The name is unknown, or cannot be imported.
    """
    if text in known:
        return known[text]
    module, colon, name = text.partition(":")
    if not colon:
        hint = did_you_mean(text, known) or f"; choose one of {', '.join(known)}, or your own as module:NAME"
        raise InputError(f"unknown {field} {text!r}{hint}")
    try:
        found: Any = import_module(module)
    except Exception as error:
        # Code of the module runs, so it can raise anything.
        # A package that contains the module may be what is missing.
        is_not_found = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        remedy = "; install it, or put its directory into PYTHONPATH" if is_not_found else ""
        raise InputError(
            f"{field} {text}: importing {module} failed: {type(error).__name__}: {error}{remedy}"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise InputError(f"{field} {text}: {module} has no {name}{did_you_mean(part, dir(found))}")
        found = getattr(found, part)
    return found


def is_own(text: str) -> bool:
    """Return whether a setting names code of the user's."""
    return ":" in text


def require_call(field: str, text: str, function: object, *given: object, **options: object) -> None:
    """Check that a function or class takes these arguments. Raises: InputError."""
    if not callable(function):
        raise InputError(f"{field} {text}: is a {type(function).__name__}; name a class or a function")
    try:
        inspect.signature(function).bind(*given, **options)
    except TypeError as error:
        raise InputError(f"{field} {text}: it cannot be called as documented: {error}") from error
    except ValueError:
        # Some functions in C have no signature; calling them finds out.
        return


def called(field: str, text: str, function: Callable[..., T], *given: object, **options: object) -> T:
    """Call own code. Raises: ExtensionError: It raised."""
    try:
        return function(*given, **options)
    except Exception as error:
        raise ExtensionError(f"{field} {text}: it raised {type(error).__name__}: {error}") from error
