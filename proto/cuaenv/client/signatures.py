"""Signatures and documentation of methods that pass their options on to another method."""

import inspect
import re
from collections.abc import Callable, Collection
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def takes_options_of(source: Callable[..., Any], *, without: Collection[str] = ()) -> Callable[[Method], Method]:
    """Return a decorator: `help` shows the options, arguments and errors of `source` instead of `**options`."""

    def decorate(method: Method) -> Method:
        own = inspect.signature(method)
        kept = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        added = [
            each
            for name, each in inspect.signature(source).parameters.items()
            if name not in own.parameters and name not in without
        ]
        method.__signature__ = own.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
        _, heading, sections = inspect.cleandoc(source.__doc__ or "").partition("\n\nArgs:\n")
        for name in without:
            sections = re.sub(rf"^    {name}: .*\n(     .*\n)*", "", sections, flags=re.MULTILINE)
        method.__doc__ = inspect.cleandoc(method.__doc__ or "") + heading + sections
        return method

    return decorate
