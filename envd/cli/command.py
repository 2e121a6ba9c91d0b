"""The decorator of envd's commands: it builds their options, makes their first argument, and reports their errors."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from envd.cli.terminal import reports_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """The first argument of commands, which is made of several options of the command line."""

    options: Mapping[str, Any]
    """The annotation of each option, by parameter. All are None by default."""
    make: Callable[[dict[str, Any]], object]
    """Returns the argument from the values of the options. Raises: EnvdError."""


def command(
    argument: Argument | None = None, *, options_of: Callable[..., Any] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for commands, which `typer.Typer.command` then registers.

    Their options are their own keyword-only parameters and, instead of their first parameter, those of `argument`. The
    option `--json` comes last. An expected error ends them with one line and an exit status; see `reports_errors`.

    Args:
        options_of: A function whose keyword-only parameters are options too, and whose name and documentation the
            command has. The command gets their values as further keywords.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @reports_errors
        def run(**given: Any) -> None:
            if argument is None:
                function(**given)
            else:
                function(argument.make({name: given.pop(name) for name in argument.options}), **given)

        own = list(inspect.signature(function).parameters.values())
        if argument is not None:
            own = [each for each in own if each.kind is each.KEYWORD_ONLY]
        if options_of is not None:
            others = inspect.signature(options_of).parameters.values()
            own = [*(each for each in others if each.kind is each.KEYWORD_ONLY), *own]
        made = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in (argument.options.items() if argument is not None else ())
        ]
        # A stable sort: `as_json` is last.
        parameters = sorted([*own, *made], key=lambda parameter: parameter.name == "as_json")
        shown = options_of or function
        run.__name__, run.__qualname__, run.__doc__ = shown.__name__, shown.__qualname__, shown.__doc__
        run.__module__ = shown.__module__
        # typer reads both.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate
