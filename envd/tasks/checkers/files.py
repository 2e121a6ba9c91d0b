"""Checkers of files and directories: text, bytes, absence, entries."""

import base64
import hashlib
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from envd.tasks.checkers.base import MAX_FILE_BYTES, FoundFile, GuestInspector, LeafChecker
from envd.tasks.fields import BOM, Base64, Encodings, GuestPath, Sha256
from envd.tasks.text import CheckOutcome, TextExpectation, decode, judge_text, quote

#: The encoding of the byte order mark, otherwise UTF-8.
DEFAULT_ENCODINGS = (BOM, "utf-8")


class FileCheck(LeafChecker):
    """A checker of one path."""

    runs_before_start: ClassVar[bool] = True

    path: GuestPath

    @property
    def subject(self) -> str:
        return self.path


class FileText(FileCheck, TextExpectation):
    """A file's text. A missing file, or one that is not text in any of `encodings`, scores 0."""

    kind: Literal["file_text"]
    encodings: Encodings = DEFAULT_ENCODINGS
    """Tried in this order; the first that decodes to text without NUL wins. `bom` uses the byte order mark."""

    async def check(self, inspector: GuestInspector) -> CheckOutcome:
        return await inspector.judge(judge_file_text, await inspector.find_file(self.path), self)


class FileBytes(FileCheck):
    """A file's bytes, by digest or value."""

    kind: Literal["file_bytes"]
    sha256: Sha256 | None = None
    base64: Base64 | None = None

    @model_validator(mode="after")
    def _one_expectation(self) -> Self:
        if (self.sha256 is None) == (self.base64 is None):
            raise ValueError("give either sha256 or base64")
        return self

    async def check(self, inspector: GuestInspector) -> CheckOutcome:
        return await inspector.judge(judge_file_bytes, await inspector.find_file(self.path), self)


class FileAbsent(FileCheck):
    """Nothing exists at a path: no file, no directory, no link."""

    kind: Literal["file_absent"]

    async def check(self, inspector: GuestInspector) -> CheckOutcome:
        return judge_absent(await inspector.probe(self.path))


class Directory(FileCheck):
    """A directory's entries. An entry that ends in `/` must be a directory, any other must not be one."""

    kind: Literal["directory"]
    entries: tuple[Annotated[str, Field(pattern=r"^[^/]+/?$")], ...]
    mode: Literal["exactly", "at_least"] = "at_least"

    async def check(self, inspector: GuestInspector) -> CheckOutcome:
        return await inspector.judge(judge_directory, await inspector.list_directory(self.path), self)


def text_of(found: FoundFile, path: str, encodings: Encodings) -> str | CheckOutcome:
    """Return a file's text, or an outcome of 0 with the reason why it has none."""
    if found.kind != "file":
        return not_a_file(found, path)
    decoded = decode(found.data, encodings)
    if decoded is None:
        tried = ", ".join(encodings)
        return CheckOutcome(0.0, f"{path}: {found.size_bytes} bytes are not text in {tried}: {quote(found.data)}")
    return decoded


def judge_file_text(found: FoundFile, checker: FileText) -> CheckOutcome:
    text = text_of(found, checker.path, checker.encodings)
    return text if isinstance(text, CheckOutcome) else judge_text(text, checker)


def judge_file_bytes(found: FoundFile, checker: FileBytes) -> CheckOutcome:
    if found.kind != "file":
        return not_a_file(found, checker.path)
    digest = hashlib.sha256(found.data).hexdigest()
    expected = checker.sha256 or hashlib.sha256(base64.b64decode(checker.base64 or "")).hexdigest()
    evidence = f"{found.size_bytes} bytes with sha256 {digest}"
    return CheckOutcome(1.0, evidence) if digest == expected else CheckOutcome(0.0, f"{evidence}, expected {expected}")


def judge_absent(found: FoundFile) -> CheckOutcome:
    if found.kind == "absent":
        return CheckOutcome(1.0, "nothing exists at the path")
    kind = "something other than a file" if found.kind == "other" else "a file"
    return CheckOutcome(0.0, f"{kind} exists at the path")


def judge_directory(entries: frozenset[str] | None, checker: Directory) -> CheckOutcome:
    if entries is None:
        return CheckOutcome(0.0, f"{checker.path}: no such directory")
    wanted = frozenset(checker.entries)
    missing, extra = sorted(wanted - entries), sorted(entries - wanted)
    if missing or (extra and checker.mode == "exactly"):
        parts = [f"missing: {', '.join(missing)}"] if missing else []
        parts += [f"unexpected: {', '.join(extra)}"] if extra and checker.mode == "exactly" else []
        return CheckOutcome(0.0, f"{'; '.join(parts)}; found: {', '.join(sorted(entries)) or 'nothing'}")
    return CheckOutcome(1.0, f"found: {', '.join(sorted(entries)) or 'nothing'}")


def not_a_file(found: FoundFile, path: str) -> CheckOutcome:
    """Return the outcome of 0 for a path without a readable file."""
    match found.kind:
        case "absent":
            return CheckOutcome(0.0, f"{path}: no such file")
        case "large":
            return CheckOutcome(0.0, f"{path}: {found.size_bytes} bytes exceed the limit of {MAX_FILE_BYTES}")
        case _:
            return CheckOutcome(0.0, f"{path}: not a file")
