"""Readers of request fields."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .messages import HttpError

MAX_COMMAND_TIMEOUT_S = 3600.0


def expand_path(path: object) -> Path:
    """Return an absolute path; `~` and `$NAME` are expanded for the session's user. Raises: HttpError."""
    if not isinstance(path, str) or not path or "\0" in path:
        raise HttpError(400, f"a path is required, not {path!r}")
    return Path(os.path.abspath(os.path.expandvars(os.path.expanduser(path))))


def read_command(data: Mapping[str, Any]) -> tuple[list[str] | str, bool]:
    """Return the fields `command` and `shell`. A string is split unless a shell runs it.

    Raises:
        HttpError: The command is missing, or neither a string nor a list of strings.
    """
    shell = bool(data.get("shell", False))
    command = data.get("command")
    if not command or not (
        isinstance(command, str) or (isinstance(command, list) and all(isinstance(word, str) for word in command))
    ):
        raise HttpError(400, "command: a non-empty string or list of strings is required")
    if isinstance(command, str):
        if shell:
            return command, True
        try:
            command = shlex.split(command)
        except ValueError as error:
            raise HttpError(400, f"command: {error}") from error
    return [os.path.expanduser(word) if word.startswith("~/") else word for word in command], shell


def read_seconds(
    data: Mapping[str, Any], key: str, default_s: float, *, maximum_s: float = MAX_COMMAND_TIMEOUT_S
) -> float:
    """Return a duration in seconds. Raises: HttpError."""
    value = data.get(key, default_s)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= maximum_s:
        raise HttpError(400, f"{key}: a number between 0 and {maximum_s:g} is required, not {value!r}")
    return float(value)
