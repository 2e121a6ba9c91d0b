"""What all checkers share: the inspection of a guest at the end of an episode, and their base class.

The inspection is read-only and uses the commands of the guest's operating system. Every query has a time limit, and
nothing that an agent can leave behind (a directory or a pipe in place of a file, a file of any size) makes a query
fail.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import isabstract
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from cuaenv.actions import Done
from cuaenv.results import CommandResult
from envd.base.errors import GuestError
from envd.guests.powershell import Script, powershell
from envd.hypervisor.machine import GuestOs
from envd.tasks.bridge import TaskBridge
from envd.tasks.fields import AssetRef, Model
from envd.tasks.queries import file_query
from envd.tasks.text import CheckOutcome, quote

if TYPE_CHECKING:
    # Importing it takes half a second, and task data is also read where no desktop exists.
    from envd.desktop.desktop import Desktop

#: Limit of our own queries; each ends at once in a healthy guest.
QUERY_TIMEOUT_S = 30.0

#: Tasks use smaller files, and reading larger ones would delay the daemon.
MAX_FILE_BYTES = 16 << 20

#: A file that is shorter when read than when its size was queried is being written.
_MAX_READS = 3
#: The kernel reports a size for these files that is not that of their content.
_WITHOUT_SIZE = ("/proc/", "/sys/")

#: Also written in `list-directory.ps1`.
_NO_DIRECTORY = 66
_LIST = f'[ -d "$1" ] || exit {_NO_DIRECTORY}; exec find "$1/" -mindepth 1 -maxdepth 1 -printf "%y%f\\0"'


class Judge(Protocol):
    """Runs a pure judge function on what a guest made.

    A daemon passes `envd.daemon.judging.workers.JudgeWorkers`: a file or a picture of a guest can keep a decoder busy
    for hours, fill the memory, or hold the interpreter lock.
    """

    async def __call__(self, function: Callable[..., CheckOutcome], /, *arguments: object) -> CheckOutcome:
        """Return the function's outcome.

        Raises:
            GuestError: The function raised it.
            EvaluatorFailed: It did not end, for which the host may be the reason.
        """


async def judge_directly(function: Callable[..., CheckOutcome], /, *arguments: object) -> CheckOutcome:
    """Run a judge function in this process: for tests of checkers."""
    return function(*arguments)


class FoundFile(NamedTuple):
    """The kind and content of a path."""

    kind: str
    """`absent`, `file`, `large` (a file above the limit) or `other` (a directory, a pipe, a dangling link)."""
    data: bytes = b""
    """The content of a `file`."""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestInspector:
    """A guest to inspect, and how the agent ended the episode. Every method may also raise `MachineLost`."""

    desktop: "Desktop"
    os: GuestOs
    last_action: Done | None = None
    """How the agent ended the episode; None if it did not."""
    bridge: TaskBridge | None = None
    """Runs the evaluators of a foreign suite (OSWorld); None if it is not installed."""
    judge: Judge = judge_directly
    """Runs the `judge_*` function of a checker on what the guest returned."""

    async def probe(self, path: str) -> FoundFile:
        """Return the kind and size of a path, without content. Raises: GuestError, GuestUnresponsive."""
        result = await self.query(file_query(path, self.os).argv)
        output = result.stdout.decode(errors="replace").strip()
        if output in ("absent", "other"):
            return FoundFile(output)
        if not output.isdecimal():
            raise GuestError(f"{path}: malformed response from the guest: {quote(output)}")
        size_bytes = int(output)
        return FoundFile("file" if size_bytes <= MAX_FILE_BYTES else "large", size_bytes=size_bytes)

    async def find_file(self, path: str) -> FoundFile:
        """Return the kind, size and content of a path. Raises: GuestError, GuestUnresponsive."""
        problem = ""
        for _ in range(_MAX_READS):
            found = await self.probe(path)
            if found.kind != "file":
                return found
            data = await self.desktop.read_file(path, max_bytes=MAX_FILE_BYTES)
            if data is None:
                # A program may be replacing it. If it stays away, the next query says so.
                problem = "it vanished while it was read"
                continue
            if len(data) >= found.size_bytes or path.startswith(_WITHOUT_SIZE):
                return found._replace(data=data, size_bytes=len(data))
            problem = f"read {len(data)} of {found.size_bytes} bytes"
        raise GuestError(f"{path}: {problem}; the file keeps changing")

    async def list_directory(self, path: str) -> frozenset[str] | None:
        """Return a directory's entries, subdirectories with a trailing `/`; None if it does not exist."""
        if self.os is GuestOs.WINDOWS:
            argv = powershell(Script.LIST_DIRECTORY, path=path)
        else:
            argv = ("sh", "-c", _LIST, "list-directory", path)
        result = await self.query(argv, allow=(_NO_DIRECTORY,))
        if result.exit_code == _NO_DIRECTORY:
            return None
        *rows, rest = result.stdout.decode(errors="replace").split("\0")
        if rest:
            raise GuestError(f"{path}: the list of its entries is incomplete; it ends with {quote(rest)}")
        return frozenset(f"{row[1:]}/" if row[0] == "d" else row[1:] for row in rows)

    async def query(self, argv: Sequence[str], *, allow: tuple[int, ...] = ()) -> CommandResult:
        """Run one of our own commands as root; its failure is never the agent's.

        Raises:
            GuestError: Its exit code is neither 0 nor one of `allow`.
        """
        result = await self.desktop.run(argv, timeout_s=QUERY_TIMEOUT_S, as_root=True)
        if result.exit_code not in (0, *allow):
            raise GuestError(f"{argv[0]}: exit code {result.exit_code}: {quote(result.stderr)}")
        return result


class CheckBase(Model):
    """Common fields of all checkers."""

    name: str = ""
    """Names the check in results; by default its kind and subject."""


class LeafChecker(CheckBase, ABC):
    """A checker that inspects the guest itself. A pure `judge_*` function next to it scores what it finds, by way of
    `GuestInspector.judge`: what a guest made is never parsed in the daemon's own process."""

    if TYPE_CHECKING:
        kind: str

    #: Guests that it can inspect. A task for another system is rejected before any machine boots.
    systems: ClassVar[frozenset[GuestOs]] = frozenset(GuestOs)
    #: Whether it may run right after the setup, to reject a start that is already solved: it is fast, and changes
    #: and reveals nothing in the guest.
    runs_before_start: ClassVar[bool]
    #: Whether `remember_start` must run at the end of the setup, also in a task without setup verbs.
    remembers_start: ClassVar[bool] = False

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        """Check the definition. Raises: TypeError."""
        if not isabstract(cls) and not hasattr(cls, "runs_before_start"):
            raise TypeError(f"checker {cls.__name__}: runs_before_start is missing; set it to True or False")

    @property
    @abstractmethod
    def subject(self) -> str:
        """What it inspects, for its default name."""

    @abstractmethod
    async def check(self, inspector: GuestInspector) -> CheckOutcome:
        """Inspect the guest and score it.

        Incomplete work of the agent scores below 1. Raises: GuestError, GuestUnresponsive, MachineLost.
        """

    async def remember_start(self, desktop: "Desktop") -> None:
        """Record what it compares the end with. Raises: GuestError, GuestUnresponsive, MachineLost."""

    def asks_session(self, os: GuestOs) -> bool:  # noqa: ARG002 -- for checkers that differ
        """Return whether it needs the running session; all others run while the agent's processes are stopped."""
        return False

    def downloads(self) -> Iterator[AssetRef]:
        """Yield the files that it needs from the host's cache."""
        yield from ()
