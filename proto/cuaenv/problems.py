"""Texts for wrong input: misspelt names, and pydantic's errors without its phrases."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

_PHRASES = {
    "Value error, ": "",
    "Assertion failed, ": "",
    "Extra inputs are not permitted": "unknown key",
    "Input should be greater than or equal to": "must be at least",
    "Input should be less than or equal to": "must be at most",
    "Input should": "must",
    "String should": "must",
    ", unable to parse string as an integer": "",
    ", unable to parse string as a number": "",
    # A user's file has no Python types.
    "be a valid tuple": "be a list",
    "be a valid list": "be a list",
    "be a valid set": "be a list",
    "be a valid frozenset": "be a list",
    "be a valid dictionary": "be a mapping",
    "be a valid string": "be a text",
    "Field required": "is missing",
}
#: `Tuple should have at least 1 item after validation, not 0`, and `a mapping or instance of Window`.
_PYTHON = (
    (re.compile(r"\A(?:Tuple|List|Set|Frozenset|Dictionary|Data|Value) should (have .*) after validation"), r"must \1"),
    (re.compile(r" or (?:an )?instance of \w+"), ""),
)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean file_text?`, or an empty string if no known name is similar."""
    match = get_close_matches(name, known, n=1)
    return f"; did you mean {match[0]}?" if match else ""


def without_path(error: Exception) -> str:
    """Return the text of an error that occurred while a file was read, in one line and without its name."""
    if mark := getattr(error, "problem_mark", None):
        return f"line {mark.line + 1}: {getattr(error, 'problem', '')}"
    if isinstance(error, UnicodeDecodeError):
        return f"not a text in UTF-8 (byte {error.start})"
    return getattr(error, "strerror", None) or str(error)


def plain(message: str) -> str:
    """Return a message of pydantic in plain words, such as `must be at most 4096`."""
    for phrase, words in _PHRASES.items():
        message = message.replace(phrase, words, 1)
    for pattern, words in _PYTHON:
        message = pattern.sub(words, message)
    return message


def problem_of(error: Mapping[str, Any]) -> str:
    if error["type"] == "string_type" and isinstance(error.get("input"), int | float):
        return f"must be a text; write {json.dumps(str(error['input']).lower())}"
    if error["type"] == "union_tag_not_found":
        return f"{error['ctx']['discriminator'].strip(chr(39))} is missing"
    if error["type"] != "union_tag_invalid":
        return plain(error["msg"])
    tag, field = error["ctx"]["tag"], error["ctx"]["discriminator"].strip("'")
    known = re.findall(r"'([^']+)'", error["ctx"]["expected_tags"])
    return f"unknown {field} {tag!r}{did_you_mean(tag, known) or '; use one of ' + ', '.join(known)}"


def first_problem(errors: Sequence[Mapping[str, Any]], *, whole: str = "") -> str:
    """Return the first of pydantic's errors with its place, such as `steps.0.kind: is missing`.

    Args:
        whole: Names the place of an error of the whole value.
    """
    place = ".".join(map(str, errors[0]["loc"])) or whole
    return ": ".join(filter(None, (place, problem_of(errors[0]))))
