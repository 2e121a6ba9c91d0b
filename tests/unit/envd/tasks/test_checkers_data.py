"""Values in JSON, CSV, INI and XML files: how they are found and compared, and that no file breaks a checker."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from envd.tasks.checker_union import Checker
from envd.tasks.checkers.base import FoundFile
from envd.tasks.checkers.data import DataCheck, judge_data
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


def test_json_is_read_in_the_declared_encodings_and_a_missing_file_scores_zero() -> None:
    data = SETTINGS.encode("utf-16")
    assert judge(data, "json_value", at=["editor", "wrap"], equals=True).score == 1.0
    assert judge(data, "json_value", at=["editor", "wrap"], equals=True, encodings=["utf-8"]).score == 0.0
    for kind, fields in (("json_value", {}), ("xml_value", {"at": "/s"})):
        checker = CHECKER.validate_python({"kind": kind, "path": PATH, "absent": True, **fields})
        assert judge_data(FoundFile("absent"), checker).score == 0.0


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
PARAMETER = '<!DOCTYPE s [<!ENTITY % a SYSTEM "http://127.0.0.1/a"> %a;]><s>x</s>'

SVG = (
    '<?xml version="1.0"?><!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "http://127.0.0.1:9/svg11.dtd">'
    '<svg width="10"/>'
)
PLIST = '<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "a.dtd"><plist><dict><key>a</key><true/></dict></plist>'
FONTS = '<!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd"><fontconfig><dir>~/.fonts</dir></fontconfig>'
ATTRIBUTES = '<!DOCTYPE s [<!ELEMENT s ANY><!ATTLIST s a CDATA "b">]><s>x</s>'
VS_CODE = """// Place your settings here
{
    "editor.fontSize": 14, /* points, */
    "url": "http://a//b", // not a comment in the string
    "odd": "a,]\\\"/* no comment */", "list": [1, 2,],
    "nested": {"a": {"b": true, }, },
}
"""


@pytest.mark.parametrize(
    ("data", "kind", "fields"),
    [
        (SVG, "xml_value", {"at": "/svg/@width", "equals": 10}),
        (PLIST, "xml_value", {"at": "//key", "equals": "a"}),
        (FONTS, "xml_value", {"at": "/fontconfig/dir", "equals": "~/.fonts"}),
        (ATTRIBUTES, "xml_value", {"at": "/s", "equals": "x"}),
        (VS_CODE, "json_value", {"at": ["editor.fontSize"], "equals": 14}),
        (VS_CODE, "json_value", {"at": ["url"], "equals": "http://a//b"}),
        (VS_CODE, "json_value", {"at": ["odd"], "equals": 'a,]"/* no comment */'}),
        (VS_CODE, "json_value", {"at": ["list"], "equals": [1, 2]}),
        (VS_CODE, "json_value", {"at": ["nested"], "equals": {"a": {"b": True}}}),
        ('{"a": 1}\n{"a": 2}\n', "json_value", {"at": [1, "a"], "equals": 2}),
        ('{"a": 1}\n', "json_value", {"at": [0, "a"], "equals": 1, "path": "/home/user/one.jsonl"}),
        ("sep=;\r\na;b\r\n1;2\r\n", "csv_value", {"row": 0, "column": "b", "equals": 2}),
        ("a\n" + "x" * 300_000, "csv_value", {"row": 0, "column": "a", "matches": "x+"}),
        ("k: v\n", "ini_value", {"key": "k", "equals": "v"}),
        ("[s]\nurl: http://a/?b=c\n", "ini_value", {"section": "s", "key": "url", "equals": "http://a/?b=c"}),
        ("a:b = c\n", "ini_value", {"key": "a:b", "equals": "c"}),
        ("k = 80 ; columns\n", "ini_value", {"key": "k", "equals": 80}),
        ("k = a # b\n", "ini_value", {"key": "k", "equals": "a"}),
        ("k = a # b\n", "ini_value", {"key": "k", "equals": "a # b"}),
        ('k = "a ; b" ; c\n', "ini_value", {"key": "k", "equals": "a ; b"}),
        ('k = "say \\"hi\\""\n', "ini_value", {"key": "k", "equals": 'say "hi"'}),
        ('k = "a"\n', "ini_value", {"key": "k", "equals": '"a"'}),
        ("k = a;b;\n", "ini_value", {"key": "k", "equals": "a;b;"}),
    ],
)
def test_files_of_real_programs_are_read_as_they_read_them(data: str, kind: str, fields: dict[str, Any]) -> None:
    outcome = judge(data, kind, **fields)
    assert outcome.score == 1.0, outcome.evidence


@pytest.mark.parametrize(
    ("data", "kind", "fields"),
    [
        (VS_CODE, "json_value", {"at": ["editor.fontSize"], "equals": 14, "strict": True}),
        ('{"a": 1,,}', "json_value", {"at": ["a"], "equals": 1}),
        ("[,]", "json_value", {"equals": []}),
        ('{"a": 1} {"a": 2}', "json_value", {"at": ["a"], "equals": 1}),
        ('{"a": 1}\nnot JSON\n', "json_value", {"at": [0, "a"], "equals": 1}),
        ("1\n2\n", "json_value", {"at": [1], "equals": 2}),
        ('{"a": "// b"', "json_value", {"at": ["a"], "equals": "// b"}),
        ('{"a": 1} /*', "json_value", {"at": ["a"], "equals": 1}),
        ('k = "a"\n', "ini_value", {"key": "k", "equals": "a", "strict": True}),
        ("k = a ; b\n", "ini_value", {"key": "k", "equals": "a", "strict": True}),
        ("k = a;b\n", "ini_value", {"key": "k", "equals": "a"}),
        ('k = "a\nb = 1\n', "ini_value", {"key": "k", "equals": "a"}),
        ("# k: v\n", "ini_value", {"key": "k", "equals": "v"}),
        ("k = a # b\n", "ini_value", {"key": "k", "absent": True}),
        ("k: v\n", "ini_value", {"key": "k", "absent": True}),
    ],
)
def test_reading_as_programs_do_makes_no_other_value_right(data: str, kind: str, fields: dict[str, Any]) -> None:
    outcome = judge(data, kind, **fields)
    assert outcome.score == 0.0, outcome.evidence


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234.50", 1234.5), ("$1,234.50", 1234.5), ("-$5", -5), ("1.234,50", 1234.5), ("1.234.567", 1234567),
        ("1 234,5 €", 1234.5), ("1\xa0234", 1234), ("1'234.5", 1234.5), ("3,5", 3.5), ("12 %", 0.12),
        ("12,5%", 0.125), ("\u22125", -5), ("1,234", 1234), ("1.234", 1.234), ("£ 7", 7), ("1,234,567", 1234567),
        ("1,23,456", None), ("1,2345.6", None), ("12,34.5", None), ("1.234,5.6", None), ("1 2345", None),
        ("1_000", None), ("12 apples", None), ("", None), ("%", None), ("1.234 567", None), ("0x10", None),
    ],
)  # fmt: skip
def test_a_number_of_a_spreadsheet_has_one_value(text: str, number: float | None) -> None:
    data = f'a\n"{text}"\n'
    for wanted in (-5, 0.12, 0.125, 1.234, 3.5, 7, 10, 1234, 1234.5, 1000, 1234567):
        assert judge(data, "csv_value", row=0, column="a", equals=wanted).score == float(wanted == number), wanted
    assert judge(data, "csv_value", row=0, column="a", equals=text).score == 1.0


@pytest.mark.parametrize(
    ("data", "kind", "fields", "words"),
    [
        (b"{", "json_value", {}, "is not JSON"),
        (b"[" * 100_000, "json_value", {}, "is not JSON"),
        (b"9" * 5000, "json_value", {}, "is not JSON"),
        (b"\xff\xfe\x00", "json_value", {}, "are not text"),
        (b"= 1", "ini_value", {"key": "a"}, "is not INI"),
        (b'"a"b\x00', "csv_value", {"row": 0, "column": 0, "header": False}, "not text"),
        (b"<s>", "xml_value", {"at": "/s"}, "is not XML"),
        (b"", "xml_value", {"at": "/s"}, "is not XML"),
        (b"<a>" * 5000, "xml_value", {"at": "/s"}, "is not XML"),
        (ENTITY.encode(), "xml_value", {"at": "/s"}, "declares entities"),
        (OUTSIDE.encode(), "xml_value", {"at": "/s"}, "declares entities"),
        (PARAMETER.encode(), "xml_value", {"at": "/s"}, "declares entities"),
        (b" " * (5 << 20), "json_value", {}, "exceed the limit"),
    ],
)
def test_malformed_data_scores_zero_with_the_reason(data: bytes, kind: str, fields: dict[str, Any], words: str) -> None:
    outcome = judge(data, kind, equals="x", **fields)
    assert outcome.score == 0.0
    assert words in outcome.evidence


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
def test_values_are_compared_as_numbers_if_one_is_expected(
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
