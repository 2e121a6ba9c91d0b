"""Options that several commands share: added to a command by a decorator, instead of written at each."""

import inspect
from collections.abc import Callable, Sequence


def add_parameters(
    wrapper: Callable[..., None], command: Callable[..., None], shared: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    """Return the wrapper with a command's keyword-only parameters and shared ones, for typer; `as_json` is last."""
    own = [each for each in inspect.signature(command).parameters.values() if each.kind is each.KEYWORD_ONLY]
    parameters = sorted([*own, *shared], key=lambda parameter: parameter.name == "as_json")
    # typer reads both.
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper
