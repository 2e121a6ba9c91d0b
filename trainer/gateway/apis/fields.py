"""Read fields of requests."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, TypeVar

from trainer.gateway.prompts import ChatItem, invalid

T = TypeVar("T")


def objects(value: object, name: str) -> Sequence[Mapping[str, Any]]:
    """Return a list of objects; an absent one is empty. Raises: ApiError."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise invalid(f"{name} is not a list of objects")
    return value


def one_of(value: object, kind: type[T], name: str) -> T | None:
    """Return a field of a type, or None if it is absent or null. Raises: ApiError."""
    if value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
        return value
    raise invalid(f"{name} is not a {kind.__name__}")


def token_limit(value: object, name: str) -> int | None:
    """Return a limit of a reply's tokens, or None if it is absent or null. Raises: ApiError."""
    limit = one_of(value, int, name)
    if limit is not None and limit < 1:
        raise invalid(f"{name} is {limit}, which is less than 1; leave it out for no limit of the request")
    return limit


def stops(value: object, name: str) -> tuple[str, ...]:
    """Return stop texts: one, a list, or none. Raises: ApiError."""
    given = [value] if isinstance(value, str) else value or []
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise invalid(f"{name} is not a list of texts")
    return tuple(each for each in given if each)


def with_system(text: str, items: Sequence[ChatItem]) -> tuple[ChatItem, ...]:
    """Return items with the system messages at their start as one; a later one becomes a user's.

    Chat templates take one system message, at the start.
    """
    leading = list(takewhile(lambda item: item.role == "system", items))
    texts = [text, *("".join(map(str, item.parts)) for item in leading)]
    system = "\n\n".join(each for each in texts if each)
    rest = [ChatItem("user", item.parts) if item.role == "system" else item for item in items[len(leading) :]]
    return (ChatItem("system", (system,)), *rest) if system else tuple(rest)
