"""Rows of training tables as tasks: our own, OSWorld's task_config, or a graded target with its prompt."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field

from envd.hypervisor.machine import GuestOs
from envd.tasks.checkers.graded_text import GradedKind
from envd.tasks.fields import Model, task_name
from envd.tasks.formats.documents import parse_json
from envd.tasks.formats.entries import Fields, NamedFields, TaskFormatError
from envd.tasks.systems import task_systems

_SYSTEMS = {"ubuntu": GuestOs.LINUX, "linux": GuestOs.LINUX, "windows": GuestOs.WINDOWS}


def read_row(row: Mapping[str, object]) -> NamedFields:
    """Read a row. Other columns are ignored.

    Args:
        row: Has `task`, one of our tasks; or `task_config`, one of OSWorld's; or is one of OSWorld's itself; or has
            `prompt` and `target`, a graded task. All may be nested in `metadata` at any depth, and be JSON text.

    Raises:
        TaskFormatError, ValidationError: It contains no task, or an invalid one.
    """
    for level in _levels(row):
        if level.get("task") is not None:
            return _read_own(_mapping(level["task"], "task"))
        if level.get("task_config") is not None:
            return _read_config(_mapping(level["task_config"], "task_config"), level)
        if level.get("target") is not None:
            return _read_graded(level)
        if "evaluator" in level:
            return _read_config(level, level)
    raise TaskFormatError(f"no task, task_config or target among the columns {', '.join(map(str, row)) or '(none)'}")


def _levels(row: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Yield a row and its nested metadata, outermost first."""
    level: object = row
    while isinstance(level, Mapping):
        yield level
        nested = level.get("metadata")
        level = _mapping(nested, "metadata") if isinstance(nested, str) and nested.strip() else nested


def _read_config(config: Mapping[str, object], level: Mapping[str, object]) -> NamedFields:
    read = next((system.read_task for system in task_systems() if system.read_task), None)
    if read is None:
        raise TaskFormatError("a task of OSWorld; this installation lacks envd.integrations.osworld")
    return task_name(str(config.get("id", ""))), lambda: read(config, _os(level))


def _read_own(task: Mapping[str, object]) -> NamedFields:
    if not isinstance(task.get("name"), str):
        raise TaskFormatError("a task must have a name", "task")
    fields = {key: value for key, value in task.items() if key != "name"}
    return str(task["name"]), lambda: fields


class _ExpectedResult(Model):
    """The expected result of a graded task."""

    text: str = ""
    output_path: str
    checker: GradedKind
    task_type: Annotated[str, Field(min_length=1)]
    difficulty: Annotated[int, Field(ge=1, le=5)]


def _read_graded(row: Mapping[str, object]) -> NamedFields:
    target = _ExpectedResult.model_validate(_mapping(row["target"], "target"))
    instruction = _instruction(row.get("prompt") or row.get("messages"))
    checker: Fields = {"kind": target.checker, "path": target.output_path}
    # Only exact_match compares with a text; for the others the column holds an example, or nothing.
    if target.checker == "exact_match":
        checker["text"] = target.text
    fields: Fields = {
        "instruction": instruction,
        "level": target.difficulty,
        "tags": (target.task_type,),
        "os": GuestOs.WINDOWS,
        "checker": checker,
    }
    # These rows have no names. A digest of the content gives the same name in every file, so that splits agree.
    identity = json.dumps([instruction, target.model_dump()], sort_keys=True)
    return f"t-{hashlib.sha256(identity.encode()).hexdigest()[:12]}", lambda: fields


def _instruction(prompt: object) -> str:
    """Return the user's last message. A prompt is text, or a list of messages."""
    if isinstance(prompt, str) and prompt.strip():
        return prompt.strip()
    messages = prompt if isinstance(prompt, list) else []
    contents = [each.get("content") for each in messages if isinstance(each, Mapping) and each.get("role") == "user"]
    if contents and isinstance(contents[-1], str) and contents[-1].strip():
        return contents[-1].strip()
    raise TaskFormatError("must be text, or messages whose last user message is text", "prompt")


def _os(level: Mapping[str, object]) -> GuestOs | None:
    config = level.get("env_config")
    named = config.get("os_type") if isinstance(config, Mapping) else level.get("os_type")
    if named is None:
        return None
    if str(named).lower() not in _SYSTEMS:
        raise TaskFormatError(f"{named!r} is neither Ubuntu nor Windows", "os_type")
    return _SYSTEMS[str(named).lower()]


def _mapping(value: object, field: str) -> Mapping[str, object]:
    """Return an object, parsed if it is JSON text. Raises: TaskFormatError."""
    try:
        value = parse_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise TaskFormatError(str(error), field) from error
    if not isinstance(value, Mapping):
        raise TaskFormatError("not an object", field)
    return _without_nulls(value)


def _without_nulls(value: Mapping[str, object]) -> Mapping[str, object]:
    """Return an object without null fields: a table has a null for every field that only other rows have."""

    def clean(part: object) -> object:
        if isinstance(part, Mapping):
            return {key: clean(each) for key, each in part.items() if each is not None}
        return [clean(each) for each in part] if isinstance(part, list | tuple) else part

    return {key: clean(part) for key, part in value.items() if part is not None}
