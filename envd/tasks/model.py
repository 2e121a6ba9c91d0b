"""What a task is: an instruction, the state it starts from, the checker that scores it, an oracle that solves it.

Frozen data, checked when it is loaded, so that a wrong field, verb or checker is refused before any machine boots.
Setup verbs and checkers are unions told apart by `kind`: a new one is a class here and a branch in `setup.py` or
`checkers.py`. Paths in the guest are absolute, for the same path must mean the same file to the user's session and
to the root agent.
"""

import base64
import binascii
import codecs
import re
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, model_validator

from envd.guest.actions import Action, Done, Fail
from envd.hypervisor.machine import GuestOs
from envd.tasks.oracle import parse_action

#: Pseudo-encoding: decode by the byte order mark, if there is one, and drop the mark.
BOM = "bom"


def _checked_path(path: str) -> str:
    is_windows = re.match(r"[A-Za-z]:[\\/]", path) is not None
    if not (path.startswith("/") or is_windows):
        raise ValueError(f"{path!r} is not absolute; write the whole path, such as /home/user/notes.txt")
    parts = re.split(r"[\\/]" if is_windows else "/", path)
    if "\0" in path or ".." in parts or not any(parts[1:]):
        raise ValueError(f"{path!r} is not a file or directory below the root, without '..'")
    return path


def _checked_regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return pattern


def _checked_encoding(name: str) -> str:
    if name != BOM:
        try:
            codecs.lookup(name)
        except LookupError as error:
            raise ValueError(f"unknown encoding {name!r}") from error
    return name


def _checked_base64(text: str) -> str:
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"not base64: {error}") from error
    return text


GuestPath = Annotated[str, AfterValidator(_checked_path)]
Regex = Annotated[str, AfterValidator(_checked_regex)]
Base64 = Annotated[str, AfterValidator(_checked_base64)]
Argv = Annotated[tuple[str, ...], Field(min_length=1)]
Timeout = Annotated[float, Field(gt=0, le=600, allow_inf_nan=False)]


class Model(BaseModel):
    """Base of all task data: immutable, and unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class WindowMatch(Model):
    """Picks windows by title and class; what is given must match, wherever in the text it stands."""

    title: Regex = ""
    """Regular expression, searched for in the title."""
    wm_class: Regex = Field(default="", alias="class")
    """Regular expression, searched for in `instance.Class`."""

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if not self.title and not self.wm_class:
            raise ValueError("give title, class or both")
        return self


# -- setup verbs ------------------------------------------------------------------------------------------------


class SetupBase(Model):
    """What every setup verb has."""

    # A first program start takes up to a minute in an emulated guest on a busy host.
    timeout_s: Timeout = 180.0
    """Seconds after which the verb, and with it the reset, fails."""


class WriteFile(SetupBase):
    """Write a file as the user, making its parents. Idempotent: an existing file is replaced."""

    kind: Literal["write_file"]
    path: GuestPath
    text: str | None = None
    base64: Base64 | None = None
    encoding: Annotated[str, AfterValidator(_checked_encoding)] = "utf-8"
    """For `text`; `utf-8-sig` and `utf-16` write a byte order mark."""
    newline: Literal["lf", "crlf"] = "lf"
    """What a line feed in `text` becomes."""

    @model_validator(mode="after")
    def _one_content_that_encodes(self) -> Self:
        if (self.text is None) == (self.base64 is None):
            raise ValueError("give either text or base64")
        try:
            self.data()
        except (UnicodeEncodeError, LookupError) as error:
            raise ValueError(f"text cannot be written in {self.encoding}: {error}") from error
        return self

    def data(self) -> bytes:
        """The bytes of the file."""
        if self.text is None:
            return base64.b64decode(self.base64 or "")
        text = self.text.replace("\n", "\r\n") if self.newline == "crlf" else self.text
        return text.encode(self.encoding)


class MakeDirectory(SetupBase):
    """Make a directory and its parents as the user. Idempotent: an existing one is kept."""

    kind: Literal["make_directory"]
    path: GuestPath


class Remove(SetupBase):
    """Remove a file, or a directory with all that is in it. Idempotent: what is not there stays away."""

    kind: Literal["remove"]
    path: GuestPath


class Launch(SetupBase):
    """Start a program and wait for its window. Guarded: nothing is started while such a window is open."""

    kind: Literal["launch"]
    argv: Argv
    window: WindowMatch


class Open(SetupBase):
    """Open a file in a program and wait for its window. Guarded: nothing is started while such a window is open."""

    kind: Literal["open"]
    path: GuestPath
    program: str = "mousepad"
    window: WindowMatch | None = None
    """The window to wait for; by default one whose title holds the file's name."""

    def awaited_window(self) -> WindowMatch:
        """The window that shows the file."""
        name = re.split(r"[\\/]", self.path.rstrip("\\/"))[-1]
        return self.window or WindowMatch(title=re.escape(name))


class Execute(SetupBase):
    """Run a command to its end. Guarded by `unless` where running it twice would differ from once."""

    kind: Literal["execute"]
    argv: Argv
    as_root: bool = False
    expect_exit_code: int = 0
    unless: tuple[str, ...] = ()
    """A command, run in the same way first: where it exits with 0 the work is done already."""


class WaitWindow(SetupBase):
    """Wait until a window is open."""

    kind: Literal["wait_window"]
    window: WindowMatch


class ActivateWindow(SetupBase):
    """Wait until a window is open, then raise it and give it the keyboard focus."""

    kind: Literal["activate_window"]
    window: WindowMatch


class SetClipboard(SetupBase):
    """Put text on the clipboard."""

    kind: Literal["set_clipboard"]
    text: str


SetupVerb = Annotated[
    WriteFile | MakeDirectory | Remove | Launch | Open | Execute | WaitWindow | ActivateWindow | SetClipboard,
    Field(discriminator="kind"),
]


# -- checkers ---------------------------------------------------------------------------------------------------


class TextExpectation(Model):
    """A text to find, and how strictly. Exactly one of `equals`, `contains` and `matches`."""

    equals: str | None = None
    contains: str | None = None
    matches: Regex | None = None
    """Regular expression that the whole text must match; `.` matches newlines too."""
    newlines: Literal["lf", "literal"] = "lf"
    """`lf`: CRLF and lone CR count as LF on both sides."""
    trailing_newline: Literal["ignore", "strict"] = "ignore"
    """`ignore`: one newline at the very end, more or less, makes no difference."""
    case: Literal["exact", "ignore"] = "exact"

    @model_validator(mode="after")
    def _one_expectation(self) -> Self:
        if sum(value is not None for value in (self.equals, self.contains, self.matches)) != 1:
            raise ValueError("give exactly one of equals, contains and matches")
        if self.contains == "":
            raise ValueError("contains must not be empty: every text contains it")
        return self


class CheckBase(Model):
    """What every checker has."""

    name: str = ""
    """Names the check in results; by default its kind and subject."""


class FileText(CheckBase, TextExpectation):
    """A file's text. A missing file, or one that is no text in any of `encodings`, scores 0."""

    kind: Literal["file_text"]
    path: GuestPath
    encodings: Annotated[tuple[Annotated[str, AfterValidator(_checked_encoding)], ...], Field(min_length=1)] = (
        BOM,
        "utf-8",
    )
    """Tried in this order; the first that decodes to text without NUL wins. `bom` goes by the byte order mark."""


class FileBytes(CheckBase):
    """A file's bytes, by digest or value."""

    kind: Literal["file_bytes"]
    path: GuestPath
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    base64: Base64 | None = None

    @model_validator(mode="after")
    def _one_expectation(self) -> Self:
        if (self.sha256 is None) == (self.base64 is None):
            raise ValueError("give either sha256 or base64")
        return self


class FileAbsent(CheckBase):
    """Nothing is at a path: no file, no directory, no link."""

    kind: Literal["file_absent"]
    path: GuestPath


class Directory(CheckBase):
    """A directory's entries. One that ends in `/` must be a directory, any other must not be one."""

    kind: Literal["directory"]
    path: GuestPath
    entries: tuple[Annotated[str, Field(pattern=r"^[^/]+/?$")], ...]
    mode: Literal["exactly", "at_least"] = "at_least"


class Command(CheckBase):
    """A command's exit code and output. One that cannot be run is a broken checker, not a 0."""

    kind: Literal["command"]
    argv: Argv
    as_root: bool = False
    exit_code: int | None = 0
    """Expected; None accepts any."""
    stdout: TextExpectation | None = None
    timeout_s: Timeout = 30.0

    @model_validator(mode="after")
    def _expects_something(self) -> Self:
        if self.exit_code is None and self.stdout is None:
            raise ValueError("give exit_code, stdout or both")
        return self


class Window(CheckBase):
    """Whether a window is open."""

    kind: Literal["window"]
    window: WindowMatch
    present: bool = True


class Process(CheckBase):
    """Whether a program runs, by the name that the kernel shows for it."""

    kind: Literal["process"]
    # The kernel keeps 15 characters, so a longer name would never match.
    program: Annotated[str, Field(min_length=1, max_length=15)]
    running: bool = True


class Answer(CheckBase, TextExpectation):
    """The answer that the agent gave with `Done`, without white space around it."""

    kind: Literal["answer"]

    @model_validator(mode="after")
    def _refuses_silence(self) -> Self:
        accepts_nothing = self.matches is not None and re.fullmatch(self.matches, "", re.DOTALL) is not None
        if accepts_nothing or (self.equals is not None and not self.equals.strip()):
            raise ValueError("an empty answer must not be right: an agent that does nothing would score")
        return self


class AllOf(CheckBase):
    """As good as its worst part."""

    kind: Literal["all"]
    checks: Annotated[tuple["Checker", ...], Field(min_length=1)]


class AnyOf(CheckBase):
    """As good as its best part."""

    kind: Literal["any"]
    checks: Annotated[tuple["Checker", ...], Field(min_length=1)]


class WeightedPart(Model):
    """A part of `Weighted`."""

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    check: "Checker"


class Weighted(CheckBase):
    """The mean of its parts by weight: partial credit."""

    kind: Literal["weighted"]
    checks: Annotated[tuple[WeightedPart, ...], Field(min_length=1)]


LeafChecker = FileText | FileBytes | FileAbsent | Directory | Command | Window | Process | Answer
AnyChecker = LeafChecker | AllOf | AnyOf | Weighted
Checker = Annotated[AnyChecker, Field(discriminator="kind")]


def leaves(checker: AnyChecker) -> Iterator[LeafChecker]:
    """Yield the checkers that look at something, in declared order."""
    if isinstance(checker, AllOf | AnyOf):
        for check in checker.checks:
            yield from leaves(check)
    elif isinstance(checker, Weighted):
        for part in checker.checks:
            yield from leaves(part.check)
    else:
        yield checker


# -- task -------------------------------------------------------------------------------------------------------

OracleStep = tuple[Annotated[Action, PlainValidator(parse_action)], ...]


class Task(Model):
    """One task. `Reset` runs `setup`, the agent gets `instruction`, `Evaluate` runs `checker`."""

    task_id: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*/[a-z0-9][a-z0-9_-]*$", max_length=128)]
    """`{suite}/{name}`."""
    version: Annotated[int, Field(ge=1)] = 1
    """Raised when a change makes scores incomparable with earlier ones."""
    instruction: Annotated[str, Field(min_length=1)]
    level: Annotated[int, Field(ge=1, le=5)]
    """Difficulty: 1 one action in one place, 2 one short sequence, 3 several, 4 two applications, 5 planning."""
    tags: tuple[str, ...] = ()
    os: GuestOs = GuestOs.LINUX
    image: str = ""
    """Name of the image that it needs; empty for any with the right operating system."""
    pool: str = ""
    """Pool to run in where the caller names none; empty for the only one that fits."""
    max_steps: Annotated[int, Field(ge=1, le=1000)] = 30
    setup: tuple[SetupVerb, ...] = ()
    freeze_setup: bool = False
    """Whether to keep the state that `setup` leads to, and begin later episodes there without performing it again."""
    checker: Checker | None = None
    """None for infeasible tasks only."""
    oracle: tuple[OracleStep, ...] = ()
    """Steps that solve it, each the actions of one `Step` call; in pixels of a 1280x800 screen."""
    infeasible: bool = False
    """No one can do it: the agent scores 1 by saying so with `Fail`, and 0 otherwise."""

    @model_validator(mode="after")
    def _hangs_together(self) -> Self:
        if self.infeasible != (self.checker is None):
            raise ValueError("a task has a checker, unless it is infeasible")
        if self.freeze_setup and not self.setup:
            raise ValueError("freeze_setup: there is no setup; without one an episode begins as its pool's template")
        if len(self.oracle) > self.max_steps:
            raise ValueError(f"oracle has {len(self.oracle)} steps, more than max_steps {self.max_steps}")
        actions = [action for step in self.oracle for action in step]
        if not all(self.oracle) or any(isinstance(action, Done | Fail) for action in actions[:-1]):
            raise ValueError("oracle: no step is empty, and nothing follows done or fail")
        return self
