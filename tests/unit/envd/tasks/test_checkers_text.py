"""How checkers decode and compare text: encodings, newlines, case."""

import codecs

import pytest

from envd.tasks.checkers.base import FoundFile
from envd.tasks.checkers.files import FileText, judge_file_text
from envd.tasks.text import TextExpectation, decode, judge_text

PATH = "/home/user/a.txt"


def check(**rules: object) -> FileText:
    return FileText.model_validate({"kind": "file_text", "path": PATH, **rules})


def score(data: bytes, **rules: object) -> float:
    return judge_file_text(FoundFile("file", data, len(data)), check(**rules)).score


@pytest.mark.parametrize(
    "data",
    [
        "é €\n漢字".encode(),
        "é €\n漢字".encode("utf-8-sig"),
        codecs.BOM_UTF16_LE + "é €\n漢字".encode("utf-16-le"),
        codecs.BOM_UTF16_BE + "é €\n漢字".encode("utf-16-be"),
        codecs.BOM_UTF32_LE + "é €\n漢字".encode("utf-32-le"),
        codecs.BOM_UTF32_BE + "é €\n漢字".encode("utf-32-be"),
    ],
)
def test_the_default_policy_reads_utf8_and_whatever_a_byte_order_mark_names(data: bytes) -> None:
    assert score(data, equals="é €\n漢字") == 1.0


def test_the_order_of_encodings_decides() -> None:
    assert decode("é".encode(), ["utf-8", "cp1252"]) == "é"
    assert decode("é".encode(), ["cp1252", "utf-8"]) == "Ã©"
    assert decode("é".encode("cp1252"), ["utf-8", "cp1252"]) == "é"


def test_utf16_without_a_mark_does_not_decode_as_utf8() -> None:
    data = "plain".encode("utf-16-le")
    assert decode(data, ["utf-8", "utf-16-le"]) == "plain"
    assert decode(data, ["bom", "utf-8"]) is None


def test_a_byte_order_mark_is_kept_unless_the_encodings_handle_it() -> None:
    assert score("x".encode("utf-8-sig"), equals="x", encodings=["utf-8"]) == 0.0
    assert score("x".encode("utf-8-sig"), equals="x", encodings=["utf-8-sig"]) == 1.0


def test_a_truncated_file_with_a_mark_scores_zero_without_an_error() -> None:
    assert score(codecs.BOM_UTF16_LE + b"x", equals="x") == 0.0


def test_bytes_that_are_not_text_score_zero_with_evidence() -> None:
    outcome = judge_file_text(FoundFile("file", b"\xff\x00\x81", 3), check(equals="x"))
    assert outcome.score == 0.0
    assert "3 bytes are not text in bom, utf-8" in outcome.evidence


@pytest.mark.parametrize("data", [b"a\r\nb\r\n", b"a\rb\r", b"a\r\nb"])
def test_line_ends_of_all_systems_are_equal_unless_literal(data: bytes) -> None:
    assert score(data, equals="a\nb\n") == 1.0
    assert score(data, equals="a\nb\n", newlines="literal") == 0.0


def test_literal_line_ends_are_compared_as_they_are() -> None:
    assert score(b"a\r\nb", equals="a\r\nb", newlines="literal") == 1.0
    assert score(b"a\r\nb\r\n", equals="a\r\nb", newlines="literal") == 1.0
    assert score(b"a\r\nb\r\n", equals="a\r\nb", newlines="literal", trailing_newline="strict") == 0.0


def test_one_newline_at_the_end_is_ignored_but_two_are_not() -> None:
    assert score(b"a\n", equals="a") == 1.0
    assert score(b"a", equals="a\n") == 1.0
    assert score(b"a\n\n", equals="a") == 0.0
    assert score(b"a\n", equals="a", trailing_newline="strict") == 0.0


def test_case_counts_unless_it_is_ignored() -> None:
    assert score(b"Hello", equals="hello") == 0.0
    assert score(b"Hello", equals="hello", case="ignore") == 1.0
    assert score(b"STRASSE", contains="straße", case="ignore") == 1.0
    assert score(b"ABC", matches="a.c", case="ignore") == 1.0


def test_contains_finds_text_across_lines() -> None:
    assert score(b"one\r\ntwo three\r\n", contains="one\ntwo") == 1.0
    assert score(b"one two", contains="three") == 0.0


def test_matches_means_the_whole_text() -> None:
    assert score(b"42\n", matches=r"\d+") == 1.0
    assert score(b"x 42", matches=r"\d+") == 0.0
    assert score(b"a\nb", matches="a.b") == 1.0


@pytest.mark.parametrize(("kind", "words"), [("absent", "no such file"), ("other", "not a file"), ("large", "exceed")])
def test_a_path_that_is_not_a_readable_file_scores_zero_with_evidence(kind: str, words: str) -> None:
    outcome = judge_file_text(FoundFile(kind, size_bytes=1 << 40), check(equals="x"))
    assert outcome.score == 0.0
    assert words in outcome.evidence
    assert PATH in outcome.evidence


def test_evidence_names_the_first_difference() -> None:
    outcome = judge_text("same\nwrong line", TextExpectation(equals="same\nright line"))
    assert outcome.score == 0.0
    assert "at character 5 (line 2)" in outcome.evidence
    assert "wrong line" in outcome.evidence
    assert "right line" in outcome.evidence


def test_evidence_of_a_text_that_ends_early_points_at_its_end() -> None:
    assert "at character 3" in judge_text("abc", TextExpectation(equals="abcdef")).evidence
