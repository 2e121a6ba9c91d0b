"""How checkers decode and compare text: encodings, newlines, case."""

import codecs

import pytest

from envd.tasks.checkers.base import FoundFile
from envd.tasks.checkers.files import FileText, judge_file_text
from envd.tasks.text import TextExpectation, decode, judge_text

PATH = "/home/user/a.txt"


def check(**rules: object) -> FileText:
    return FileText.model_validate({"kind": "file_text", "path": PATH, **rules})


TEXT = "é €\n漢字"


@pytest.mark.parametrize(
    ("data", "rules", "expected"),
    [
        # UTF-8, and whatever a byte order mark names.
        (TEXT.encode(), {"equals": TEXT}, 1.0),
        (TEXT.encode("utf-8-sig"), {"equals": TEXT}, 1.0),
        (codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"), {"equals": TEXT}, 1.0),
        (codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"), {"equals": TEXT}, 1.0),
        (codecs.BOM_UTF32_LE + TEXT.encode("utf-32-le"), {"equals": TEXT}, 1.0),
        (codecs.BOM_UTF32_BE + TEXT.encode("utf-32-be"), {"equals": TEXT}, 1.0),
        (codecs.BOM_UTF16_LE + b"x", {"equals": "x"}, 0.0),
        # The mark is kept unless the encodings handle it.
        ("x".encode("utf-8-sig"), {"equals": "x", "encodings": ["utf-8"]}, 0.0),
        ("x".encode("utf-8-sig"), {"equals": "x", "encodings": ["utf-8-sig"]}, 1.0),
        # Line ends of all systems are equal unless literal.
        (b"a\r\nb\r\n", {"equals": "a\nb\n"}, 1.0),
        (b"a\rb\r", {"equals": "a\nb\n"}, 1.0),
        (b"a\r\nb", {"equals": "a\nb\n"}, 1.0),
        (b"a\r\nb\r\n", {"equals": "a\nb\n", "newlines": "literal"}, 0.0),
        (b"a\rb\r", {"equals": "a\nb\n", "newlines": "literal"}, 0.0),
        (b"a\r\nb", {"equals": "a\nb\n", "newlines": "literal"}, 0.0),
        (b"a\r\nb", {"equals": "a\r\nb", "newlines": "literal"}, 1.0),
        (b"a\r\nb\r\n", {"equals": "a\r\nb", "newlines": "literal"}, 1.0),
        (b"a\r\nb\r\n", {"equals": "a\r\nb", "newlines": "literal", "trailing_newline": "strict"}, 0.0),
        # One newline at the end is ignored, but two are not.
        (b"a\n", {"equals": "a"}, 1.0),
        (b"a", {"equals": "a\n"}, 1.0),
        (b"a\n\n", {"equals": "a"}, 0.0),
        (b"a\n", {"equals": "a", "trailing_newline": "strict"}, 0.0),
        (b"Hello", {"equals": "hello"}, 0.0),
        (b"Hello", {"equals": "hello", "case": "ignore"}, 1.0),
        (b"STRASSE", {"contains": "straße", "case": "ignore"}, 1.0),
        (b"ABC", {"matches": "a.c", "case": "ignore"}, 1.0),
        # `contains` finds text across lines, and `matches` means the whole text.
        (b"one\r\ntwo three\r\n", {"contains": "one\ntwo"}, 1.0),
        (b"one two", {"contains": "three"}, 0.0),
        (b"42\n", {"matches": r"\d+"}, 1.0),
        (b"x 42", {"matches": r"\d+"}, 0.0),
        (b"a\nb", {"matches": "a.b"}, 1.0),
    ],
)
def test_text_is_compared_by_the_rules_of_its_check(data: bytes, rules: dict[str, object], expected: float) -> None:
    assert judge_file_text(FoundFile("file", data, len(data)), check(**rules)).score == expected


@pytest.mark.parametrize(
    ("data", "encodings", "text"),
    [
        ("é".encode(), ["utf-8", "cp1252"], "é"),
        ("é".encode(), ["cp1252", "utf-8"], "Ã©"),
        ("é".encode("cp1252"), ["utf-8", "cp1252"], "é"),
        ("plain".encode("utf-16-le"), ["utf-8", "utf-16-le"], "plain"),
        ("plain".encode("utf-16-le"), ["bom", "utf-8"], None),
    ],
)
def test_the_order_of_encodings_decides(data: bytes, encodings: list[str], text: str | None) -> None:
    assert decode(data, encodings) == text


def test_bytes_that_are_not_text_score_zero_with_evidence() -> None:
    outcome = judge_file_text(FoundFile("file", b"\xff\x00\x81", 3), check(equals="x"))
    assert outcome.score == 0.0
    assert "3 bytes are not text in bom, utf-8" in outcome.evidence


@pytest.mark.parametrize(("kind", "words"), [("absent", "no such file"), ("other", "not a file"), ("large", "exceed")])
def test_a_path_that_is_not_a_readable_file_scores_zero_with_evidence(kind: str, words: str) -> None:
    outcome = judge_file_text(FoundFile(kind, size_bytes=1 << 40), check(equals="x"))
    assert outcome.score == 0.0
    assert words in outcome.evidence
    assert PATH in outcome.evidence


def test_evidence_names_the_first_difference() -> None:
    outcome = judge_text("same\nwrong line", TextExpectation(equals="same\nright line"))
    assert outcome.score == 0.0
    assert all(part in outcome.evidence for part in ("at character 5 (line 2)", "wrong line", "right line"))
    assert "at character 3" in judge_text("abc", TextExpectation(equals="abcdef")).evidence
