"""The five graded checkers of a public Windows suite: the published grades, and the faults that are fixed."""

import codecs
from typing import Any

import pytest
from pydantic import ValidationError

from envd.tasks.checkers.base import FoundFile
from envd.tasks.checkers.graded_text import GradedText, judge_graded_text

PATH = "C:\\out.txt"


def score(kind: str, data: bytes | str, **fields: Any) -> float:
    raw = data.encode() if isinstance(data, str) else data
    return judge_graded_text(FoundFile("file", raw, len(raw)), graded(kind, **fields)).score


def graded(kind: str, **fields: Any) -> GradedText:
    text = {"text": "Hello World"} if kind == "exact_match" else {}
    return GradedText.model_validate({"kind": kind, "path": PATH, **text, **fields})


#: Each grade of each kind. Both modes agree on all of them.
GRADES = [
    ("exact_match", "  Hello World\n", 1.0),
    ("exact_match", "say HELLO world twice", 0.5),
    ("exact_match", "Goodbye", 0.2),
    ("exact_match", " \n", 0.0),
    ("date_format", "2024-02-29\n", 1.0),
    ("date_format", "today is 2024-02-29", 0.5),
    ("date_format", "29 February", 0.1),
    ("date_format", "", 0.0),
    ("has_windows_dirs", "PerfLogs\nProgram Files\nUsers\nWindows", 1.0),
    ("has_windows_dirs", "only users here", 0.5),
    ("has_windows_dirs", "nothing", 0.1),
    ("has_windows_dirs", "\t", 0.0),
    ("non_empty", "x", 1.0),
    ("non_empty", " \r\n", 0.0),
    ("has_step1_step2", "Step1 done, STEP2 done", 1.0),
    ("has_step1_step2", "step2", 0.5),
    ("has_step1_step2", "third", 0.1),
    ("has_step1_step2", "", 0.0),
]


@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize(("kind", "text", "expected"), GRADES)
def test_each_grade_is_as_published(kind: str, text: str, expected: float, literal: bool) -> None:
    assert score(kind, text, literal=literal) == expected


@pytest.mark.parametrize("kind", ["exact_match", "date_format", "has_windows_dirs", "non_empty", "has_step1_step2"])
@pytest.mark.parametrize("found", ["absent", "other", "large"])
def test_a_path_that_is_not_a_readable_file_scores_zero(kind: str, found: str) -> None:
    assert judge_graded_text(FoundFile(found, size_bytes=1 << 40), graded(kind)).score == 0.0


RIGHT = {
    "exact_match": "Hello World\r\n",
    "date_format": "2024-02-29\r\n",
    "has_windows_dirs": "\r\nPerfLogs\r\nUsers\r\nWindows\r\n",
    "has_step1_step2": "Step1\r\nStep2\r\n",
}


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: codecs.BOM_UTF16_LE + text.encode("utf-16-le"),
        lambda text: text.encode("utf-16-le"),
        lambda text: codecs.BOM_UTF8 + text.encode(),
        lambda text: text.encode("cp1252"),
    ],
    ids=["utf-16 with a mark, as PowerShell 5.1 redirects", "utf-16", "utf-8 with a mark", "the code page"],
)
@pytest.mark.parametrize(("kind", "text"), RIGHT.items())
def test_the_encodings_of_windows_programs_are_read(kind: str, text: str, encode: Any) -> None:
    assert score(kind, encode(text)) == 1.0


UTF_16 = codecs.BOM_UTF16_LE


@pytest.mark.parametrize(
    ("kind", "data", "fields", "expected", "literal"),
    [
        ("exact_match", "café".encode("cp1252"), {"text": "café"}, 1.0, 0.2),
        ("exact_match", UTF_16 + "Hello World\r\n".encode("utf-16-le"), {}, 1.0, 0.2),
        ("date_format", UTF_16 + "2024-02-29".encode("utf-16-le"), {}, 1.0, 0.1),
        ("exact_match", b"one\r\ntwo\r\n", {"text": "one\ntwo"}, 1.0, 0.2),
        ("date_format", b"2024-02-31", {}, 0.1, 1.0),
        ("has_step1_step2", b"step10 step20", {}, 0.1, 1.0),
    ],
    ids=["code page", "utf-16", "utf-16 date", "line ends", "impossible date", "partial words"],
)
def test_a_literal_checker_keeps_the_faults_of_the_published_one(
    kind: str, data: bytes, fields: dict[str, str], expected: float, literal: float
) -> None:
    assert score(kind, data, **fields) == expected
    assert score(kind, data, literal=True, **fields) == literal


@pytest.mark.parametrize(
    "fields", [{"kind": "exact_match"}, {"kind": "exact_match", "text": " "}, {"kind": "non_empty", "text": "x"}]
)
def test_only_exact_match_takes_a_text(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="exact_match"):
        GradedText.model_validate({"path": PATH, **fields})
