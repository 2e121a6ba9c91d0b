"""Decode and compare text from a guest: encodings, newlines, case. Pure.

Guest files are untrusted bytes. They are decoded and compared by declared rules, and evidence quotes only a short part.
"""

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

from pydantic import model_validator

from envd.tasks.fields import BOM, Model, Regex

_QUOTE_CHARS = 300

#: UTF-32 first, because its little-endian mark starts with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of one check."""

    name: str
    score: float
    """A value in [0, 1]."""
    evidence: str
    """What was found; in an evaluation at most 2,000 characters."""


class CheckOutcome(NamedTuple):
    """A score and the reason for it."""

    score: float
    """A value in [0, 1]."""
    evidence: str
    parts: tuple[CheckResult, ...] = ()
    """The checks that the score is made of, to report in its place; empty if it is one check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """The score of a state of a task, with the results of its checkers."""

    score: float
    """A value in [0, 1]."""
    checks: tuple[CheckResult, ...]
    timings_ms: dict[str, float] = field(default_factory=dict)
    """Milliseconds of each phase; `envd.episodes` measures them and sets the digest."""
    basis_digest: str = ""
    """Digest of what the score depends on, see `envd.tasks.basis`."""
    cached: bool = False


class TextExpectation(Model):
    """An expected text, and how strictly to compare. Exactly one of `equals`, `contains` and `matches`."""

    equals: str | None = None
    contains: str | None = None
    matches: Regex | None = None
    """Regular expression that the whole text must match; `.` matches newlines too."""
    newlines: Literal["lf", "literal"] = "lf"
    """`lf`: CRLF and lone CR count as LF on both sides."""
    trailing_newline: Literal["ignore", "strict"] = "ignore"
    """`ignore`: one newline at the end of either side does not matter."""
    case: Literal["exact", "ignore"] = "exact"

    @model_validator(mode="after")
    def _one_expectation(self) -> Self:
        if sum(value is not None for value in (self.equals, self.contains, self.matches)) != 1:
            raise ValueError("give exactly one of equals, contains and matches")
        if self.contains == "":
            raise ValueError("contains must not be empty: every text contains it")
        return self

    def accepts_nothing(self) -> bool:
        """Whether an empty text would be right."""
        is_matched = self.matches is not None and re.fullmatch(self.matches, "", re.DOTALL) is not None
        return is_matched or (self.equals is not None and not self.equals.strip())


def judge_text(text: str, expected: TextExpectation) -> CheckOutcome:
    """Score a text by an expectation, with its rules for newlines and case."""
    text = _unify(text, expected)
    if expected.contains is not None:
        needle = _unify(expected.contains, expected)
        found = _fold(needle, expected) in _fold(text, expected)
        return CheckOutcome(float(found), f"{quote(needle)} is {'in' if found else 'not in'} {quote(text)}")
    text = _trim(text, expected)
    if expected.matches is not None:
        flags = re.DOTALL | (re.IGNORECASE if expected.case == "ignore" else 0)
        is_match = re.fullmatch(expected.matches, text, flags) is not None
        verb = "matches" if is_match else "does not match"
        return CheckOutcome(float(is_match), f"{quote(text)} {verb} /{expected.matches}/")
    wanted = _trim(_unify(expected.equals or "", expected), expected)
    if _fold(text, expected) == _fold(wanted, expected):
        return CheckOutcome(1.0, f"is {quote(text)}")
    return CheckOutcome(0.0, f"differs {_first_difference(text, wanted)}")


def decode(data: bytes, encodings: Sequence[str]) -> str | None:
    """Decode bytes by the first encoding that fits, or return None.

    `bom` fits if there is a byte order mark, which it removes. Text with NUL never fits: UTF-16 without a mark would
    otherwise decode as UTF-8 with NULs.
    """
    for encoding in encodings:
        try:
            text = _decode_by_mark(data) if encoding == BOM else data.decode(encoding)
        except UnicodeDecodeError:
            continue
        if text is not None and "\0" not in text:
            return text
    return None


def quote(value: str | bytes) -> str:
    """Return the start of a text in quotes, for evidence and messages."""
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else value
    return repr(text if len(text) <= _QUOTE_CHARS else f"{text[:_QUOTE_CHARS]}…")


def _decode_by_mark(data: bytes) -> str | None:
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding)
    return None


def _unify(text: str, rules: TextExpectation) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n") if rules.newlines == "lf" else text


def _trim(text: str, rules: TextExpectation) -> str:
    if rules.trailing_newline == "strict":
        return text
    return text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")


def _fold(text: str, rules: TextExpectation) -> str:
    return text.casefold() if rules.case == "ignore" else text


def _first_difference(text: str, wanted: str) -> str:
    index = next((i for i, (a, b) in enumerate(zip(text, wanted, strict=False)) if a != b), min(len(text), len(wanted)))
    line = wanted.count("\n", 0, index) + 1
    start = max(0, index - 20)
    found, expected = (quote(value[start : start + 100]) for value in (text, wanted))
    return f"at character {index} (line {line}): found {found}, expected {expected}; full text {quote(text)}"
