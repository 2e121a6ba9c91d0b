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
@pytest.mark.parametrize(("found", "expected"), [("absent", 0.0), ("other", 0.0), ("large", 0.0)])
def test_a_path_that_is_not_a_readable_file_scores_zero(kind: str, found: str, expected: float) -> None:
    assert judge_graded_text(FoundFile(found, size_bytes=1 << 40), graded(kind)).score == expected


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


def test_the_code_page_is_used_for_text_that_is_not_utf_8() -> None:
    assert score("exact_match", "café".encode("cp1252"), text="café") == 1.0
    assert score("exact_match", "café".encode("cp1252"), text="café", literal=True) == 0.2


def test_a_utf_16_file_never_scores_if_literal() -> None:
    data = codecs.BOM_UTF16_LE + "Hello World\r\n".encode("utf-16-le")
    assert score("exact_match", data, literal=True) == 0.2
    assert score("date_format", codecs.BOM_UTF16_LE + "2024-02-29".encode("utf-16-le"), literal=True) == 0.1


def test_line_ends_inside_a_text_matter_only_if_literal() -> None:
    text = "one\ntwo"
    assert score("exact_match", "one\r\ntwo\r\n", text=text) == 1.0
    assert score("exact_match", "one\r\ntwo\r\n", text=text, literal=True) == 0.2


def test_impossible_dates_and_partial_words_count_only_if_literal() -> None:
    assert (score("date_format", "2024-02-31"), score("date_format", "2024-02-31", literal=True)) == (0.1, 1.0)
    assert (score("has_step1_step2", "step10 step20"), score("has_step1_step2", "step10 step20", literal=True)) == (
        0.1,
        1.0,
    )


@pytest.mark.parametrize(
    "fields", [{"kind": "exact_match"}, {"kind": "exact_match", "text": " "}, {"kind": "non_empty", "text": "x"}]
)
def test_only_exact_match_takes_a_text(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="exact_match"):
        GradedText.model_validate({"path": PATH, **fields})
