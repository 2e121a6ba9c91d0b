"""Read fields of requests."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from trainer.gateway.prompts import Item, invalid

T = TypeVar("T")


def objects(value: object, name: str) -> Sequence[Mapping[str, Any]]:
    """Return a list of objects; an absent one is empty. Raises: Refused."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise invalid(f"{name} is not a list of objects")
    return value


def one_of(value: object, kind: type[T], name: str) -> T | None:
    """Return a field of a type, or None if it is absent or null. Raises: Refused."""
    if value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
        return value
    raise invalid(f"{name} is not a {kind.__name__}")


def stops(value: object, name: str) -> tuple[str, ...]:
    """Return stop texts: one, a list, or none. Raises: Refused."""
    given = [value] if isinstance(value, str) else value or []
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise invalid(f"{name} is not a list of texts")
    return tuple(each for each in given if each)


def with_system(text: str, items: Sequence[Item]) -> tuple[Item, ...]:
    """Return items with system messages as one, at the start: chat templates take no other."""
    texts = [text, *("".join(map(str, item.parts)) for item in items if item.role == "system")]
    system = "\n\n".join(each for each in texts if each)
    rest = tuple(item for item in items if item.role != "system")
    return (Item("system", (system,)), *rest) if system else rest
