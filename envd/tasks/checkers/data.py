"""Checkers of values in files (JSON, CSV, INI, XML) and in the Windows registry.

Files that an agent leaves behind are untrusted: malformed data, deep nesting or a document type with entities scores 0
and breaks nothing. Files are read as the programs that write them read them: JSON with comments, numbers as a
spreadsheet shows them, quoted entries. What is found must equal what is expected all the same.
"""

import configparser
import csv
import io
import json
import re
from abc import abstractmethod
from contextlib import suppress
from typing import Annotated, ClassVar, Literal, Self

from lxml import etree
from pydantic import Field, JsonValue, model_validator

from envd.base.errors import GuestError
from envd.guests.powershell import Script, powershell
from envd.hypervisor.machine import GuestOs
from envd.tasks.checkers.base import FoundFile, GuestInspector, LeafChecker
from envd.tasks.checkers.files import DEFAULT_ENCODINGS, FileCheck, not_a_file, text_of
from envd.tasks.fields import Encodings
from envd.tasks.text import CheckOutcome, quote
from envd.tasks.values import MISSING, Missing, ValueExpectation, judge_value

#: Limit of parsed files; larger ones would delay the daemon.
MAX_PARSED_BYTES = 4 << 20

FoundValue = JsonValue | Missing


#: The module's limit, 131,072 characters, is less than some cells of documents have.
csv.field_size_limit(MAX_PARSED_BYTES)


class UnreadableError(ValueError):
    """A file is malformed: a fact about the agent's work, not a failure of the checker."""


class DataCheck(FileCheck, ValueExpectation):
    """A checker of one value in a file."""

    encodings: Encodings = DEFAULT_ENCODINGS
    """Tried in this order. XML declares its own encoding."""

    async def check(self, inspector: GuestInspector) -> CheckOutcome:
        found = await inspector.find_file(self.path)
        return await inspector.judge(judge_data, found, self)

    @abstractmethod
    def find(self, data: bytes, text: str) -> FoundValue:
        """Return the value. Raises: UnreadableError."""

    def plain(self, value: str) -> FoundValue:
        """Return the value without the marks that its format allows around it. Either form may be expected."""
        return value

    def read(self, found: FoundFile) -> str | CheckOutcome:
        """Return a file's text, or an outcome of 0 with the reason."""
        return text_of(found, self.path, self.encodings)


class JsonValueAt(DataCheck):
    """A value in a JSON file. JSON lines are a list."""

    kind: Literal["json_value"]
    at: tuple[str | int, ...] = ()
    """Its path: keys, and list indexes from 0, or negative from the end. Empty for the whole document."""
    strict: bool = False
    """Whether comments and commas before a closing bracket, which many programs do not read, are errors."""

    def find(self, data: bytes, text: str) -> FoundValue:  # noqa: ARG002
        value = self._document(text)
        for part in self.at:
            if isinstance(value, dict) and part in value:
                value = value[str(part)]
            elif isinstance(value, list) and isinstance(part, int) and -len(value) <= part < len(value):
                value = value[part]
            else:
                return MISSING
        return value

    def _document(self, text: str) -> JsonValue:
        is_lines = self.path.endswith((".jsonl", ".ndjson"))
        try:
            document: JsonValue = _json_lines(text) if is_lines else json.loads(text)
        except (ValueError, RecursionError) as error:
            readers = (_json_lines,) if self.strict else (_json_lines, _commented_json)
            for read in readers:
                with suppress(ValueError, RecursionError):
                    return read(text)
            raise UnreadableError(f"is not JSON: {error}") from error
        return document


def _json_lines(text: str) -> JsonValue:
    """Return the objects and lists of the lines. Raises: ValueError: A line is something else."""
    values = [json.loads(line) for line in text.split("\n") if line.strip()]
    if not all(isinstance(value, dict | list) for value in values):
        raise ValueError("a line is neither an object nor a list")
    return values


_STRING = r'"(?:[^"\\]|\\.)*+"'
#: A string, a comment, or either without an end.
_COMMENT = re.compile(rf'({_STRING})|//[^\n]*|/\*.*?\*/|("|/\*).*', re.DOTALL)
#: A comma between the end of a value and a closing bracket, or a string.
_LAST_COMMA = re.compile(rf"({_STRING}|[\w\]}}])\s*+,(?=\s*+[\]}}])|({_STRING})", re.DOTALL)


def _string_or_blank(found: re.Match[str]) -> str:
    if found[2]:
        raise ValueError("a string or a comment does not end")
    return found[1] or " "


def _commented_json(text: str) -> JsonValue:
    """Parse JSON with comments and last commas, as editors write it. Raises: ValueError, RecursionError."""
    bare = _COMMENT.sub(_string_or_blank, text)
    document: JsonValue = json.loads(_LAST_COMMA.sub(r"\1\2", bare))
    return document


class CsvCell(DataCheck):
    """A cell of a CSV file; values are text, or numbers as spreadsheets show them: `$1,234.50`, `1.234,50`, `12 %`."""

    kind: Literal["csv_value"]
    column: str | Annotated[int, Field(ge=0)]
    """Its name in the first row, or its number from 0."""
    row: Annotated[int, Field(ge=0)] | None = None
    """Its number from 0, not counting the header."""
    where: dict[str, str] = {}  # noqa: RUF012 - pydantic copies it
    """Selects the first row with these values, by column name."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    """A first line such as `sep=;` replaces it."""
    header: bool = True
    """Whether the first row names the columns."""

    @model_validator(mode="after")
    def _one_row(self) -> Self:
        if (self.row is None) == (not self.where):
            raise ValueError("give either row or where")
        if not self.header and (self.where or isinstance(self.column, str)):
            raise ValueError("columns have no names: give row and column as numbers")
        return self

    def find(self, data: bytes, text: str) -> FoundValue:  # noqa: ARG002
        declared = _SEPARATOR.match(text)
        delimiter, start = (declared[1], declared.end()) if declared else (self.delimiter, 0)
        try:
            rows = list(csv.reader(io.StringIO(text[start:], newline=""), delimiter=delimiter))
        except csv.Error as error:
            raise UnreadableError(f"is not CSV: {error}") from error
        names = rows.pop(0) if self.header and rows else []
        indexes = {name.strip(): index for index, name in reversed(list(enumerate(names)))}
        column = indexes.get(self.column, -1) if isinstance(self.column, str) else self.column
        wanted = {indexes.get(name, -1): value for name, value in self.where.items()}
        if self.row is not None:
            chosen = rows[self.row : self.row + 1]
        else:
            chosen = [row for row in rows if all(_cell(row, index) == value for index, value in wanted.items())]
        return _cell(chosen[0], column) if chosen else MISSING

    def plain(self, value: str) -> FoundValue:
        """See `DataCheck`: the number that a spreadsheet shows so."""
        number = None if self.matches is not None else shown_number(value)
        return value if number is None else number


_SEPARATOR = re.compile(r'"?sep=([^"\r\n])"?\r?\n', re.IGNORECASE)
_CURRENCY = r"[$\xa2-\xa5\u0e3f\u20a0-\u20cf]?"
_SHOWN = re.compile(
    rf"(?P<sign>[-+\u2212]?){_CURRENCY}\s?(?:"
    r"(?P<plain>\d+(?:\.\d+)?)"
    r"|(?P<english>\d{1,3}(?:,\d{3})+(?:\.\d+)?)"
    r"|(?P<swiss>\d{1,3}(?:[\'\u2019]\d{3})+(?:\.\d+)?)"
    r"|(?P<european>\d+,\d+|\d{1,3}(?P<mark>[. \xa0\u202f])\d{3}(?:(?P=mark)\d{3})*(?:,\d+)?)"
    rf")\s?(?:{_CURRENCY}|(?P<percent>%))",
    re.ASCII,
)


def shown_number(text: str) -> float | None:
    """Return the number that a spreadsheet shows as this text; None for other text.

    `1,234` has thousands and `1.234` a decimal point, in any language: a text has one value.
    """
    found = _SHOWN.fullmatch(text.strip())
    if found is None:
        return None
    if found["european"]:
        digits = re.sub(r"[. \xa0\u202f]", "", found["european"]).replace(",", ".")
    else:
        digits = re.sub(r"[,\'\u2019]", "", found["plain"] or found["english"] or found["swiss"])
    number = float(digits) / (100 if found["percent"] else 1)
    return -number if found["sign"] in {"-", "\u2212"} else number


class IniEntry(DataCheck):
    """An entry of an INI file; values are text. A line without `=` may have `:` in its place."""

    kind: Literal["ini_value"]
    section: str = ""
    """Empty for entries above the first section."""
    key: Annotated[str, Field(min_length=1)]
    strict: bool = False
    """Whether quotes around a value, and ` ;` or ` #` behind it, are part of it, as in files of GTK and systemd."""

    def find(self, data: bytes, text: str) -> FoundValue:  # noqa: ARG002
        value = self._find(text, "=")
        # A key may have `:` in it, so `=` is first.
        return self._find(text, ":") if isinstance(value, Missing) else value

    def plain(self, value: str) -> FoundValue:
        """See `DataCheck`: without quotes and a comment, as programs such as Git, MySQL and PHP read it."""
        if self.strict:
            return value
        if (quoted := _QUOTED.fullmatch(value)) is not None:
            return re.sub(r"\\([\"'\\])", r"\1", quoted[2])
        return re.split(r"\s[;#]", value, maxsplit=1)[0].rstrip()

    def _find(self, text: str, delimiter: str) -> FoundValue:
        parser = configparser.RawConfigParser(
            delimiters=(delimiter,), strict=False, default_section=_DEFAULTS, allow_no_value=True
        )
        # Case-sensitive, as the programs that read such files are.
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        try:
            parser.read_string(f"[{_TOP}]\n{text}")
        except (configparser.Error, AttributeError) as error:
            # Before Python 3.13, an indented line after a key without a value is an AttributeError.
            raise UnreadableError(f"is not INI: {error}") from error
        section = self.section or _TOP
        return parser.get(section, self.key) or "" if parser.has_option(section, self.key) else MISSING


_QUOTED = re.compile(r"""(["'])((?:(?!\1)[^\\]|\\.)*+)\1\s*(?:[;#].*)?""")


class XmlNode(DataCheck):
    """The text of the first node of an XML file that an XPath expression finds."""

    kind: Literal["xml_value"]
    at: Annotated[str, Field(min_length=1)]
    """XPath 1.0, such as `/settings/item[@name='volume']/@value`."""
    namespaces: dict[str, str] = {}  # noqa: RUF012 - pydantic copies it
    """Namespaces of the prefixes in `at`."""

    @model_validator(mode="after")
    def _is_xpath(self) -> Self:
        try:
            etree.XPath(self.at, namespaces=self.namespaces)
        except etree.XPathError as error:
            raise ValueError(f"at: {self.at!r} is not an XPath expression: {error}") from error
        return self

    def read(self, found: FoundFile) -> str | CheckOutcome:
        """See `DataCheck`; the parser decodes the bytes itself."""
        return "" if found.kind == "file" else not_a_file(found, self.path)

    def find(self, data: bytes, text: str) -> FoundValue:  # noqa: ARG002
        root = parse_xml(data)
        try:
            result = etree.XPath(self.at, namespaces=self.namespaces)(root)
        except etree.XPathError as error:
            raise UnreadableError(f"cannot be searched: {error}") from error
        first = result[0] if isinstance(result, list) and result else result
        if isinstance(first, list):
            return MISSING
        if isinstance(first, etree._Element):
            return "".join(str(part) for part in first.itertext())
        return first if isinstance(first, bool | float) else str(first)


def parse_xml(data: bytes) -> etree._Element:
    """Parse untrusted XML: without network access and entities. The document type, if it names one, is not loaded.

    Raises:
        UnreadableError: It is not XML, or declares entities.
    """
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False)
    try:
        root = etree.fromstring(data, parser)
    except (etree.XMLSyntaxError, ValueError) as error:
        raise UnreadableError(f"is not XML: {error}") from error
    declared = root.getroottree().docinfo.internalDTD
    # The stubs lack the method.
    if declared is not None and next(declared.iterentities(), None) is not None:  # type: ignore[union-attr]
        raise UnreadableError("declares entities, which is not allowed")
    return root


def judge_data(found: FoundFile, checker: DataCheck) -> CheckOutcome:
    text = checker.read(found)
    if isinstance(text, CheckOutcome):
        return text
    if found.size_bytes > MAX_PARSED_BYTES:
        return CheckOutcome(0.0, f"{checker.path}: {found.size_bytes} bytes exceed the limit of {MAX_PARSED_BYTES}")
    try:
        value = checker.find(found.data, text)
    except UnreadableError as error:
        return CheckOutcome(0.0, f"{checker.path}: {error}")
    outcome = judge_value(value, checker)
    if outcome.score < 1 and isinstance(value, str) and (plain := checker.plain(value)) != value:
        return max(outcome, judge_value(plain, checker), key=lambda judged: judged.score)
    return outcome


#: Section names that cannot occur in a file.
_TOP, _DEFAULTS = "\0top", "\0default"


def _cell(row: list[str], index: int) -> str | Missing:
    return row[index] if 0 <= index < len(row) else MISSING


class Registry(LeafChecker, ValueExpectation):
    """A value of the registry."""

    systems: ClassVar[frozenset[GuestOs]] = frozenset({GuestOs.WINDOWS})
    runs_before_start: ClassVar[bool] = True

    kind: Literal["registry"]
    key: Annotated[str, Field(pattern=r"^HKEY_(CURRENT_USER|LOCAL_MACHINE|CLASSES_ROOT|USERS)\\[^\x00]+$")]
    """Such as `HKEY_CURRENT_USER\\Control Panel\\Desktop`; the current user is the one who is logged in."""
    value: str = ""
    """Its name; empty for the key's default value."""

    @property
    def subject(self) -> str:
        """The key and the value's name."""
        return f"{self.key}\\{self.value}" if self.value else self.key

    def asks_session(self, os: GuestOs) -> bool:  # noqa: ARG002 -- in each
        """See `LeafChecker`: under Wine a program of the session reads it."""
        return True

    async def check(self, inspector: GuestInspector) -> CheckOutcome:
        hive, _, key = self.key.partition("\\")
        result = await inspector.query(powershell(Script.QUERY_REGISTRY, hive=hive, key=key, name=self.value))
        return await inspector.judge(judge_registry, result.stdout, self)


def judge_registry(stdout: bytes, checker: Registry) -> CheckOutcome:
    """Score the response to the query of a value. Raises: GuestError: It is malformed."""
    try:
        response = json.loads(stdout)
        found, value = response["found"], response["value"]
    except (ValueError, TypeError, KeyError) as error:
        raise GuestError(f"registry query: malformed response from the guest: {quote(stdout)}") from error
    return judge_value(value if found is True else MISSING, checker)
