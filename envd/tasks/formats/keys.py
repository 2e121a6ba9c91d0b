"""The keys that a part of a task may have, to suggest one for a key that is unknown."""

from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel

from envd.tasks.formats.documents import Location
from envd.tasks.model import Task

#: Keys of a task in a file in place of `task_id`.
_OF_FILES = frozenset({"name", "parameters"})


def keys_at(location: Location) -> set[str]:
    """Return the keys of the part at a location within a task; locations are those of pydantic's errors."""
    if not location:
        return _keys(Task) - {"task_id"} | _OF_FILES
    models: set[type[BaseModel]] = {Task}
    for part in location:
        # Of a union, a location names the member by its kind.
        of_kind = {each for each in models if part in get_args(_annotation(each, "kind"))}
        if len(models) > 1 and of_kind:
            models = of_kind
        elif isinstance(part, str):
            models = {model for each in models for model in _models_in(_annotation(each, part))}
    return {key for each in models for key in _keys(each)}


def _keys(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def _annotation(model: type[BaseModel], key: str | int) -> Any:
    name = next((name for name, field in model.model_fields.items() if key in (name, field.alias)), "")
    # Not the field's own annotation, in which names of later classes are not resolved.
    return get_type_hints(model).get(name)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
