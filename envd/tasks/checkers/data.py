"""Checkers of values in files (JSON, CSV, INI, XML) and in the Windows registry.

Files that an agent leaves behind are untrusted: malformed data, deep nesting or a document type with entities scores 0
and breaks nothing.
"""

import configparser
import csv
import io
import json
from abc import abstractmethod
from typing import Annotated, ClassVar, Literal, Self

from lxml import etree
from pydantic import Field, JsonValue, model_validator

from envd.base.errors import GuestError
from envd.guest.powershell import Script, powershell
from envd.hypervisor.machine import GuestOs
from envd.tasks.checkers.base import FoundFile, GuestInspector, LeafChecker
from envd.tasks.checkers.files import DEFAULT_ENCODINGS, FileCheck, not_a_file, text_of
from envd.tasks.fields import Encodings
from envd.tasks.text import CheckOutcome, quote
from envd.tasks.values import MISSING, Missing, ValueExpectation, judge_value

#: Limit of parsed files; larger ones would delay the daemon.
MAX_PARSED_BYTES = 4 << 20

FoundValue = JsonValue | Missing


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

    def read(self, found: FoundFile) -> str | CheckOutcome:
        """Return a file's text, or an outcome of 0 with the reason."""
        return text_of(found, self.path, self.encodings)


class JsonValueAt(DataCheck):
    """A value in a JSON file."""

    kind: Literal["json_value"]
    at: tuple[str | int, ...] = ()
    """Its path: keys, and list indexes from 0, or negative from the end. Empty for the whole document."""

    def find(self, data: bytes, text: str) -> FoundValue:  # noqa: ARG002
        try:
            value: JsonValue = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UnreadableError(f"is not JSON: {error}") from error
        for part in self.at:
            if isinstance(value, dict) and part in value:
                value = value[str(part)]
            elif isinstance(value, list) and isinstance(part, int) and -len(value) <= part < len(value):
                value = value[part]
            else:
                return MISSING
        return value


class CsvCell(DataCheck):
    """A cell of a CSV file; values are text."""

    kind: Literal["csv_value"]
    column: str | Annotated[int, Field(ge=0)]
    """Its name in the first row, or its number from 0."""
    row: Annotated[int, Field(ge=0)] | None = None
    """Its number from 0, not counting the header."""
    where: dict[str, str] = {}  # noqa: RUF012 - pydantic copies it
    """Selects the first row with these values, by column name."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
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
        try:
            rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=self.delimiter))
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


class IniEntry(DataCheck):
    """An entry of an INI file; values are text."""

    kind: Literal["ini_value"]
    section: str = ""
    """Empty for entries above the first section."""
    key: Annotated[str, Field(min_length=1)]

    def find(self, data: bytes, text: str) -> FoundValue:  # noqa: ARG002
        parser = configparser.RawConfigParser(
            delimiters=("=",), strict=False, default_section=_DEFAULTS, allow_no_value=True
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
    """Parse untrusted XML: without network access, entities or document types.

    Raises:
        UnreadableError: It is not XML, or has a document type.
    """
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False)
    try:
        root = etree.fromstring(data, parser)
    except (etree.XMLSyntaxError, ValueError) as error:
        raise UnreadableError(f"is not XML: {error}") from error
    if root.getroottree().docinfo.internalDTD is not None:
        raise UnreadableError("has a document type, which is not allowed")
    return root


def judge_data(found: FoundFile, checker: DataCheck) -> CheckOutcome:
    text = checker.read(found)
    if isinstance(text, CheckOutcome):
        return text
    if found.size_bytes > MAX_PARSED_BYTES:
        return CheckOutcome(0.0, f"{checker.path}: {found.size_bytes} bytes exceed the limit of {MAX_PARSED_BYTES}")
    try:
        return judge_value(checker.find(found.data, text), checker)
    except UnreadableError as error:
        return CheckOutcome(0.0, f"{checker.path}: {error}")


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
