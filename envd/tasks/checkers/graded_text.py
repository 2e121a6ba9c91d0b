"""The five graded checkers of a public Windows suite: each reads one text file and gives 1, 0.5, or less.

The grades are as published, and the published faults are fixed: text may have any encoding that programs of Windows
write (PowerShell 5.1: UTF-16 with a byte order mark and CRLF), a date must exist, and words must be whole words.
`literal: true` restores the published behaviour for comparisons: UTF-8 only, and substrings.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from typing import Literal, Self

from pydantic import model_validator

from envd.tasks.checkers.base import FoundFile, GuestInspector
from envd.tasks.checkers.files import FileCheck, not_a_file, text_of
from envd.tasks.fields import BOM, Encodings
from envd.tasks.text import CheckOutcome, quote

#: cp1252 comes before UTF-16 without a mark: the NULs of UTF-16 rule out cp1252, but any even number of bytes is valid
#: UTF-16.
_WINDOWS_ENCODINGS = (BOM, "utf-8", "cp1252", "utf-16-le")
_DIRECTORIES = ("windows", "users", "program files")
_STEPS = ("step1", "step2")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")

GradedKind = Literal["exact_match", "date_format", "has_windows_dirs", "non_empty", "has_step1_step2"]


class GradedText(FileCheck):
    """A file's text, graded. Empty text, or only white space, scores 0."""

    kind: GradedKind
    text: str | None = None
    """The expected text of `exact_match`, apart from surrounding white space."""
    encodings: Encodings = _WINDOWS_ENCODINGS
    """Tried in this order; unused if `literal`."""
    literal: bool = False
    """Whether to grade as published, faults included."""

    @model_validator(mode="after")
    def _text_if_compared(self) -> Self:
        if (self.kind == "exact_match") != bool(self.text and self.text.strip()):
            raise ValueError("text: exact_match needs a text to compare with, and no other kind takes one")
        return self

    async def check(self, inspector: GuestInspector) -> CheckOutcome:
        return await inspector.judge(judge_graded_text, await inspector.find_file(self.path), self)


def judge_graded_text(found: FoundFile, checker: GradedText) -> CheckOutcome:
    text = _read(found, checker)
    if isinstance(text, CheckOutcome):
        return text
    text = text.strip()
    if not text:
        return CheckOutcome(0.0, f"{checker.path}: empty")
    grade = _GRADERS[checker.kind](text, checker)
    return CheckOutcome(grade.score, f"{grade.evidence}: {quote(text)}")


def _read(found: FoundFile, checker: GradedText) -> str | CheckOutcome:
    if not checker.literal:
        text = text_of(found, checker.path, checker.encodings)
        return text if isinstance(text, CheckOutcome) else text.replace("\r\n", "\n").replace("\r", "\n")
    return found.data.decode("utf-8", errors="replace") if found.kind == "file" else not_a_file(found, checker.path)


def _exact_match(text: str, checker: GradedText) -> CheckOutcome:
    wanted = (checker.text or "").strip()
    if text == wanted:
        return CheckOutcome(1.0, "is the expected text")
    if wanted.lower() in text.lower():
        return CheckOutcome(0.5, "contains the expected text, with other text or in another case")
    return CheckOutcome(0.2, f"differs from {quote(wanted)}")


def _date_format(text: str, checker: GradedText) -> CheckOutcome:
    dates = [found for found in _DATE.findall(text) if checker.literal or _is_date(found)]
    if dates == [text]:
        return CheckOutcome(1.0, "is a date")
    return CheckOutcome(0.5, "contains a date and other text") if dates else CheckOutcome(0.1, "contains no date")


def _has_windows_dirs(text: str, checker: GradedText) -> CheckOutcome:
    count = _count(_DIRECTORIES, text, literal=checker.literal)
    return CheckOutcome((0.1, 0.5, 1.0)[min(count, 2)], f"names {count} of the standard directories of Windows")


def _has_steps(text: str, checker: GradedText) -> CheckOutcome:
    count = _count(_STEPS, text, literal=checker.literal)
    return CheckOutcome((0.1, 0.5, 1.0)[count], f"names {count} of {len(_STEPS)} steps")


_GRADERS: dict[GradedKind, Callable[[str, GradedText], CheckOutcome]] = {
    "exact_match": _exact_match,
    "date_format": _date_format,
    "has_windows_dirs": _has_windows_dirs,
    "non_empty": lambda _text, _checker: CheckOutcome(1.0, "contains text"),
    "has_step1_step2": _has_steps,
}


def _is_date(text: str) -> bool:
    with suppress(ValueError):
        date.fromisoformat(text)
        return True
    return False


def _count(words: tuple[str, ...], text: str, *, literal: bool) -> int:
    text = text.lower()
    if literal:
        return sum(word in text for word in words)
    return sum(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None for word in words)
