"""What users may replace by their own: a setting names one of ours, or theirs as `module:NAME`.

Everything that a name can get wrong is found when settings are read. What own code does wrong later raises
`ExtensionError`, which ends the run: it is neither a failure of the service nor one of the agent.
"""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar

from cuaenv.problems import did_you_mean
from trainer.config import ConfigError

T = TypeVar("T")


class ExtensionError(ConfigError):
    """Own code that a setting names broke its contract; the message names the setting, the code and the remedy."""


def named(field: str, text: str, known: Mapping[str, T]) -> T | Any:
    """Return what a setting names.

    Args:
        field: Name of the setting, for messages.
        text: A key of `known`, or `module:NAME` of anything that Python can import.
        known: Ours, by name.

    Raises:
        ConfigError: The name is unknown, or cannot be imported.
    """
    if text in known:
        return known[text]
    module, colon, name = text.partition(":")
    if not colon:
        hint = did_you_mean(text, known) or f"; choose one of {', '.join(known)}, or your own as module:NAME"
        raise ConfigError(f"unknown {field} {text!r}{hint}")
    try:
        found: Any = import_module(module)
    except Exception as error:
        # Code of the module runs, so it can raise anything.
        raise ConfigError(f"{field} {text}: importing {module} failed: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{field} {text}: {module} has no {name}{did_you_mean(part, dir(found))}")
        found = getattr(found, part)
    return found


def is_own(text: str) -> bool:
    """Return whether a setting names code of the user's."""
    return ":" in text


def require_call(field: str, text: str, function: object, *given: object, **options: object) -> None:
    """Check that a function or class takes these arguments. Raises: ConfigError."""
    if not callable(function):
        raise ConfigError(f"{field} {text}: is a {type(function).__name__}; name a class or a function")
    try:
        inspect.signature(function).bind(*given, **options)
    except TypeError as error:
        raise ConfigError(f"{field} {text}: it cannot be called as documented: {error}") from error
    except ValueError:
        # Some functions in C have no signature; calling them finds out.
        return


def called(field: str, text: str, function: Callable[..., T], *given: object, **options: object) -> T:
    """Call own code. Raises: ExtensionError: It raised."""
    try:
        return function(*given, **options)
    except Exception as error:
        raise ExtensionError(f"{field} {text}: it raised {type(error).__name__}: {error}") from error
