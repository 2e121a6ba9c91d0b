"""Compare values from a guest: exactly, as numbers, as text. Pure."""

import json
import math
import re
from typing import Annotated, Self

from pydantic import Field, JsonValue, model_validator

from envd.tasks.fields import Model, Regex
from envd.tasks.text import CheckOutcome, quote

Number = Annotated[float, Field(allow_inf_nan=False)]


class Missing:
    """The type of `MISSING`: a value that does not exist, as opposed to null."""


MISSING = Missing()


class ValueExpectation(Model):
    """An expected value. Exactly one of `equals`, `matches`, `absent`, or bounds."""

    equals: JsonValue = None
    """Any JSON value. For formats that have only text, a number is parsed from it."""
    matches: Regex | None = None
    """Regular expression that the whole text must match."""
    at_least: Number | None = None
    at_most: Number | None = None
    absent: bool = False
    """Whether the value must not exist."""
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-9
    """Largest difference of equal numbers."""

    @model_validator(mode="after")
    def _one_expectation(self) -> Self:
        bounded = self.at_least is not None or self.at_most is not None
        if sum(("equals" in self.model_fields_set, self.matches is not None, bounded, self.absent)) != 1:
            raise ValueError("give exactly one of equals, matches, absent, and at_least with or without at_most")
        return self


def judge_value(found: JsonValue | Missing, expected: ValueExpectation) -> CheckOutcome:
    if isinstance(found, Missing):
        return CheckOutcome(float(expected.absent), "the value does not exist")
    shown = quote(found if isinstance(found, str) else json.dumps(found, ensure_ascii=False))
    if expected.absent:
        return CheckOutcome(0.0, f"is {shown}, expected no value")
    if expected.matches is not None:
        text = found if isinstance(found, str) else json.dumps(found)
        is_match = re.fullmatch(expected.matches, text, re.DOTALL) is not None
        return CheckOutcome(
            float(is_match), f"{shown} {'matches' if is_match else 'does not match'} /{expected.matches}/"
        )
    if expected.at_least is not None or expected.at_most is not None:
        number = _number(found)
        lowest = -math.inf if expected.at_least is None else expected.at_least
        highest = math.inf if expected.at_most is None else expected.at_most
        is_within = number is not None and lowest <= number <= highest
        return CheckOutcome(
            float(is_within), f"{shown} is {'' if is_within else 'not '}a number in [{lowest}, {highest}]"
        )
    if _equal(found, expected.equals, expected.tolerance):
        return CheckOutcome(1.0, f"is {shown}")
    return CheckOutcome(0.0, f"is {shown}, expected {quote(json.dumps(expected.equals, ensure_ascii=False))}")


def _equal(found: JsonValue, wanted: JsonValue, tolerance: float) -> bool:
    if isinstance(wanted, bool) or wanted is None:
        return found is wanted
    if isinstance(wanted, int | float):
        number = _number(found)
        return number is not None and abs(number - wanted) <= tolerance
    if isinstance(wanted, list) and isinstance(found, list):
        return len(wanted) == len(found) and all(map(_equal, found, wanted, [tolerance] * len(wanted)))
    if isinstance(wanted, dict) and isinstance(found, dict):
        return wanted.keys() == found.keys() and all(_equal(found[key], wanted[key], tolerance) for key in wanted)
    return found == wanted


def _number(value: JsonValue) -> float | None:
    """Return a number, parsed from text if necessary; None if it is not a number."""
    # Python reads `1_000` as a number, and no program writes it.
    if isinstance(value, bool) or not isinstance(value, int | float | str) or "_" in str(value):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
