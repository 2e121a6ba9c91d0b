"""Check values from callers against type annotations, so that a wrong type is an error at its origin that names it.

Without it, protobuf and the standard library report internals, a call later. Pure.
"""

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from functools import cache, wraps
from operator import index
from pathlib import Path
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints, is_typeddict

P = ParamSpec("P")
Result = TypeVar("Result")

_WORDS: Mapping[object, str] = {int: "an integer", float: "a number", str: "a text", bool: "True or False"}
_MAX_SHOWN_CHARS = 80
#: Every integer of a request is an `int32`, or an `int64` that the daemon limits to less.
_MIN_INT, _MAX_INT = -(2**31), 2**31 - 1
_SURROGATE = re.compile("[\ud800-\udfff]")


class Checked:
    """Base of dataclasses that check the types of their fields."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Raises: TypeError, ValueError: see `require_types`."""
        kind = type(self)
        hints = _hints(kind)  # type: ignore[arg-type] # every type is hashable
        require_types(kind.__name__, hints, {name: getattr(self, name) for name in hints})


def checks_arguments(method: Callable[P, Result]) -> Callable[P, Result]:
    """Return a method that first checks the types of its arguments, as `require_types` does."""
    signature = inspect.signature(method)
    is_method = "self" in signature.parameters and method.__name__ != "__init__"
    positional = [each.name for each in signature.parameters.values() if each.kind is each.VAR_POSITIONAL]

    @cache
    def hints() -> Mapping[str, Any]:  # later than now: some name classes that are defined below
        return {name: hint for name, hint in _hints(method).items() if name not in positional}

    @wraps(method)
    def call(*args: P.args, **options: P.kwargs) -> Result:
        arguments = signature.bind(*args, **options).arguments
        # Not the base class that defines the method.
        subject = f"{type(args[0]).__name__}.{method.__name__}" if is_method else method.__qualname__
        require_types(subject.removesuffix(".__init__"), hints(), arguments)
        return method(*args, **options)

    return call


def require_types(subject: str, hints: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Check values by their annotations.

    Raises:
        TypeError: One has another type.
        ValueError: One is not among the texts that its annotation lists, or no message of the contract can hold it.
    """
    for name, value in values.items():
        hint = hints.get(name, Any)
        if get_origin(hint) is Unpack and isinstance(value, dict):
            require_types(subject, _hints(get_args(hint)[0]), value)
        elif not _fits(value, hint):
            shown = repr(value)
            shown = shown if len(shown) <= _MAX_SHOWN_CHARS else f"{shown[:_MAX_SHOWN_CHARS]}..."
            if unsendable := _unsendable(value):
                raise ValueError(f"{subject}: {name} is {shown}; {unsendable}")
            is_text = isinstance(value, str) or (_is_collection(value) and all(isinstance(each, str) for each in value))
            kind = ValueError if is_text and "one of" in _named(hint) else TypeError
            raise kind(f"{subject}: {name} is {shown}, not {_named(hint)}{_remedy(name, value, hint)}")


@cache
def _hints(owner: Any) -> Mapping[str, Any]:
    return {name: hint for name, hint in get_type_hints(owner).items() if name != "return"}


def _fits(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in args)
    if origin is Literal:
        return isinstance(value, str) and value in args
    if origin is tuple and Ellipsis not in args:
        # Any sequence of this length: callers pass lists, too.
        return _is_collection(value) and len(value) == len(args) and all(map(_fits, value, args))
    if isinstance(origin, type) and issubclass(origin, Collection) and not issubclass(origin, Mapping):
        return _is_collection(value) and all(_fits(each, args[0]) for each in value)
    kind = origin or hint
    if kind is int:
        return hasattr(value, "__index__") and not isinstance(value, bool) and not _unsendable(value)
    if kind is str:
        return isinstance(value, str) and not _unsendable(value)
    if kind is float:
        return hasattr(value, "__float__") and not isinstance(value, bool)
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False) or is_typeddict(kind):
        return True
    return isinstance(value, kind)


def _unsendable(value: Any) -> str:
    """Describe why protobuf would reject an integer or a text, or an item of a collection; empty if it takes it."""
    if _is_collection(value):
        return next(filter(None, map(_unsendable, value)), "")
    if isinstance(value, str):
        return "a text has no surrogates; remove or replace them" if _SURROGATE.search(value) else ""
    is_integer = hasattr(value, "__index__") and not isinstance(value, bool)
    return f"an integer is {_MIN_INT} to {_MAX_INT}" if is_integer and not _MIN_INT <= index(value) <= _MAX_INT else ""


def _is_collection(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)


def _named(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_named(each) for each in args)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin is tuple and Ellipsis not in args:
        return f"{len(args)} values, {' and '.join(dict.fromkeys(map(_named, args)))} each"
    if origin is not None and args:
        return f"a sequence, with {_named(args[0])} for each item"
    name = getattr(hint, "__name__", str(hint))
    return "None" if hint is type(None) else _WORDS.get(hint, f"{'an' if name[0] in 'AE' else 'a'} {name}")


def _remedy(name: str, value: object, hint: Any) -> str:
    kinds = get_args(hint) or (hint,)
    if timedelta in kinds and isinstance(value, int | float):
        return f"; pass {name}=timedelta(seconds={value!r})"
    if Path in kinds and isinstance(value, str):
        return f"; pass {name}=Path({value!r})"
    if int in kinds and isinstance(value, float):
        return f"; pass {name}={round(value)}" if abs(value) < 1e9 else ""
    return ""
