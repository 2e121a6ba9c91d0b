"""What a recipe may be told, and the error for what it may not."""

import math
from collections.abc import Collection


class RecipeError(ValueError):
    """There is no such recipe, or it does not take that option; the message names what there is."""


def check_number(option: str, value: object, *, low: float, high: float) -> None:
    """Refuse what is no finite number from `low` to `high`.

    Raises:
        RecipeError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RecipeError(f"{option} is {value!r}; give a number from {low:g} to {high:g}")
    if not low <= value <= high:
        raise RecipeError(f"{option} is {value:g}; give a number from {low:g} to {high:g}")


def check_choice(option: str, value: object, choices: Collection[str]) -> None:
    """Refuse what is not among the choices.

    Raises:
        RecipeError: It is not.
    """
    if value not in choices:
        raise RecipeError(f"{option} is {value!r}; choose one of {', '.join(choices)}")
