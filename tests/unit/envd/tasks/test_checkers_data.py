"""Values in JSON, CSV, INI and XML files: how they are found and compared, and that no file breaks a checker."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from envd.tasks.checkers.base import FoundFile
from envd.tasks.checkers.data import DataCheck, judge_data
from envd.tasks.checkers.union import Checker
from envd.tasks.text import CheckOutcome
from envd.tasks.values import ValueExpectation, judge_value

PATH = "/home/user/settings"
CHECKER: TypeAdapter[Any] = TypeAdapter(Checker)


def judge(data: bytes | str, kind: str, **fields: Any) -> CheckOutcome:
    raw = data.encode() if isinstance(data, str) else data
    checker = CHECKER.validate_python({"kind": kind, "path": PATH, **fields})
    assert isinstance(checker, DataCheck)
    return judge_data(FoundFile("file", raw, len(raw)), checker)


SETTINGS = json.dumps({"editor": {"font size": 14, "wrap": True, "recent": ["a", "b"]}, "none": None})


@pytest.mark.parametrize(
    ("at", "equals"),
    [
        (["editor", "font size"], 14),
        (["editor", "font size"], 14.0),
        (["editor", "wrap"], True),
        (["editor", "recent", -1], "b"),
        (["editor", "recent"], ["a", "b"]),
        (["none"], None),
        ([], json.loads(SETTINGS)),
    ],
)
def test_a_json_value_is_found_by_keys_and_indexes(at: list[str | int], equals: object) -> None:
    assert judge(SETTINGS, "json_value", at=at, equals=equals).score == 1.0


@pytest.mark.parametrize(
    ("at", "equals"),
    [
        (["editor", "wrap"], 1),
        (["editor", "font size"], True),
        (["none"], False),
        (["gone"], None),
        (["editor", 0], ""),
    ],
)
def test_booleans_are_not_numbers_and_missing_is_not_null(at: list[str | int], equals: object) -> None:
    assert judge(SETTINGS, "json_value", at=at, equals=equals).score == 0.0


def test_json_is_read_in_the_declared_encodings() -> None:
    data = SETTINGS.encode("utf-16")
    assert judge(data, "json_value", at=["editor", "wrap"], equals=True).score == 1.0
    assert judge(data, "json_value", at=["editor", "wrap"], equals=True, encodings=["utf-8"]).score == 0.0


CSV = 'item,price\r\n"tea, green",3.50\r\ncoffee,4\r\n'


@pytest.mark.parametrize(
    ("fields", "score"),
    [
        ({"row": 0, "column": "price", "equals": 3.5}, 1.0),
        ({"row": 0, "column": "price", "equals": "3.50"}, 1.0),
        ({"row": 1, "column": 0, "equals": "coffee"}, 1.0),
        ({"where": {"item": "tea, green"}, "column": "price", "at_least": 3, "at_most": 4}, 1.0),
        ({"where": {"item": "cocoa"}, "column": "price", "absent": True}, 1.0),
        ({"where": {"colour": "green"}, "column": "price", "equals": 3.5}, 0.0),
        ({"row": 9, "column": "price", "equals": 3.5}, 0.0),
        ({"row": 0, "column": "weight", "equals": 3.5}, 0.0),
        ({"row": 0, "column": 1, "header": False, "equals": "price"}, 1.0),
    ],
)
def test_a_cell_of_csv_is_found_by_row_and_column(fields: dict[str, Any], score: float) -> None:
    assert judge(CSV, "csv_value", **fields).score == score


INI = "top = 1\n# a comment\n[View]\nZoom=150 %\nempty\n[View]\nmode = list\n"


@pytest.mark.parametrize(
    ("fields", "score"),
    [
        ({"key": "top", "equals": 1}, 1.0),
        ({"section": "View", "key": "Zoom", "equals": "150 %"}, 1.0),
        ({"section": "View", "key": "zoom", "absent": True}, 1.0),
        ({"section": "View", "key": "mode", "matches": "list|icons"}, 1.0),
        ({"section": "View", "key": "empty", "equals": ""}, 1.0),
        ({"section": "Other", "key": "mode", "equals": "list"}, 0.0),
    ],
)
def test_an_entry_of_an_ini_file_is_found_by_section_and_key(fields: dict[str, Any], score: float) -> None:
    assert judge(INI, "ini_value", **fields).score == score


@pytest.mark.parametrize(
    ("fields", "score"),
    [
        ({"at": "/s/item[@name='volume']/@value", "equals": 30}, 1.0),
        ({"at": "/s/title", "equals": "A bold one"}, 1.0),
        ({"at": "count(/s/item)", "equals": 2}, 1.0),
        ({"at": "boolean(/s/gone)", "equals": False}, 1.0),
        ({"at": "/s/gone", "absent": True}, 1.0),
        ({"at": "//n:deep", "namespaces": {"n": "urn:n"}, "equals": "x"}, 1.0),
        ({"at": "//n:deep", "namespaces": {"n": "urn:m"}, "equals": "x"}, 0.0),
        ({"at": "n:deep", "equals": "x"}, 0.0),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_an_xml_node_is_found_by_xpath_in_any_encoding(fields: dict[str, Any], score: float, encoding: str) -> None:
    text = (
        f'<?xml version="1.0" encoding="{encoding}"?><s xmlns:n="urn:n"><item name="volume" value="30"/><item/>'
        "<title>A <b>bold</b> one</title><n:deep>x</n:deep></s>"
    )
    assert judge(text.encode(encoding), "xml_value", **fields).score == score


ENTITY = '<!DOCTYPE s [<!ENTITY a "AAAA"><!ENTITY b "&a;&a;&a;&a;">]><s>&b;</s>'
OUTSIDE = '<!DOCTYPE s [<!ENTITY a SYSTEM "file:///etc/passwd">]><s>&a;</s>'


@pytest.mark.parametrize(
    ("data", "kind", "fields", "words"),
    [
        (b"{", "json_value", {}, "is not JSON"),
        (b"[" * 100_000, "json_value", {}, "is not JSON"),
        (b"9" * 5000, "json_value", {}, "is not JSON"),
        (b"\xff\xfe\x00", "json_value", {}, "are not text"),
        (b"= 1", "ini_value", {"key": "a"}, "is not INI"),
        (b'"' + b"a" * 200_000, "csv_value", {"row": 0, "column": 0, "header": False}, "is not CSV"),
        (b"<s>", "xml_value", {"at": "/s"}, "is not XML"),
        (b"", "xml_value", {"at": "/s"}, "is not XML"),
        (b"<a>" * 5000, "xml_value", {"at": "/s"}, "is not XML"),
        (ENTITY.encode(), "xml_value", {"at": "/s"}, "has a document type"),
        (OUTSIDE.encode(), "xml_value", {"at": "/s"}, "has a document type"),
        (b" " * (5 << 20), "json_value", {}, "exceed the limit"),
    ],
)
def test_malformed_data_scores_zero_with_the_reason(data: bytes, kind: str, fields: dict[str, Any], words: str) -> None:
    outcome = judge(data, kind, equals="x", **fields)
    assert outcome.score == 0.0
    assert words in outcome.evidence


def test_a_missing_file_scores_zero_even_if_no_value_is_expected() -> None:
    for kind, fields in (("json_value", {}), ("xml_value", {"at": "/s"})):
        checker = CHECKER.validate_python({"kind": kind, "path": PATH, "absent": True, **fields})
        assert judge_data(FoundFile("absent"), checker).score == 0.0


@pytest.mark.parametrize(
    ("found", "expectation", "score"),
    [
        ("1e-12", {"equals": 0}, 1.0),
        ("1.01", {"equals": 1, "tolerance": 0.1}, 1.0),
        ("nan", {"at_least": 0}, 0.0),
        (True, {"at_least": 0}, 0.0),
        (5, {"matches": "5"}, 1.0),
        ({"a": [1]}, {"equals": {"a": [1.0]}}, 1.0),
        ({"a": [1]}, {"equals": {"a": [1], "b": 2}}, 0.0),
        ("x", {"absent": True}, 0.0),
    ],
)
def test_values_are_compared_as_numbers_if_a_number_is_expected(
    found: Any, expectation: dict[str, Any], score: float
) -> None:
    assert judge_value(found, ValueExpectation.model_validate(expectation)).score == score


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("json_value", {}, "exactly one of equals"),
        ("json_value", {"equals": 1, "absent": True}, "exactly one of equals"),
        ("csv_value", {"equals": 1, "column": 0}, "either row or where"),
        ("csv_value", {"equals": 1, "column": "a", "row": 0, "header": False}, "columns have no names"),
        ("xml_value", {"equals": 1, "at": "///"}, "is not an XPath"),
    ],
)
def test_a_checker_without_a_target_or_expectation_is_rejected(kind: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        CHECKER.validate_python({"kind": kind, "path": PATH, **fields})
