"""Checkers of processes, windows and commands."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from cuaenv.results import CommandResult
from envd.base.errors import GuestError
from envd.desktop.freezing import as_user
from envd.hypervisor.machine import GuestOs
from envd.tasks.checkers.base import QUERY_TIMEOUT_S, GuestInspector, LeafChecker
from envd.tasks.fields import Argv, Timeout, WindowMatch
from envd.tasks.queries import describe_windows, find_window, parse_windows, process_query, query_windows
from envd.tasks.text import CheckOutcome, TextExpectation, judge_text, quote

#: 128 plus the number of SIGKILL.
_KILLED = 137


class Command(LeafChecker):
    """A command's exit code and output. A command that cannot be run is a broken checker, not a score of 0."""

    # It may change the guest.
    runs_before_start: ClassVar[bool] = False

    kind: Literal["command"]
    argv: Argv
    as_root: bool = False
    in_session: bool = False
    """Whether it asks the running session, such as the X server or the session's bus. The agent can forge what these
    answer. By default it runs apart from the session, while the agent's processes are stopped."""
    exit_code: int | None = 0
    """Expected; None accepts any."""
    stdout: TextExpectation | None = None
    timeout_s: Timeout = 30.0

    @model_validator(mode="after")
    def _expects_something(self) -> Self:
        if self.exit_code is None and self.stdout is None:
            raise ValueError("give exit_code, stdout or both")
        return self

    @property
    def subject(self) -> str:
        return " ".join(self.argv)

    def asks_session(self, os: GuestOs) -> bool:
        """See `LeafChecker`: in Windows a command is a program of the session."""
        return self.in_session or os is GuestOs.WINDOWS

    async def check(self, inspector: GuestInspector) -> CheckOutcome:
        if self.as_root or self.asks_session(inspector.os):
            result = await inspector.desktop.run(self.argv, timeout_s=self.timeout_s, as_root=self.as_root)
        else:
            result = await inspector.desktop.run(as_user(self.argv), timeout_s=self.timeout_s, as_root=True)
        if result.exit_code in (126, 127) and self.exit_code != result.exit_code:
            raise GuestError(f"the shell could not run {self.argv[0]}: {quote(result.stderr)}")
        if result.exit_code == _KILLED != self.exit_code:
            raise GuestError(f"{self.argv[0]} was killed (SIGKILL) before it ended; the guest may lack memory")
        return await inspector.judge(judge_command, result, self)


class ProcessRunning(LeafChecker):
    """Whether a program runs, by the name that the kernel shows; in Windows without `.exe`."""

    runs_before_start: ClassVar[bool] = True

    kind: Literal["process"]
    # Linux keeps 15 characters, so a longer name would never match.
    program: Annotated[str, Field(min_length=1, max_length=15)]
    running: bool = True

    @property
    def subject(self) -> str:
        return self.program

    def asks_session(self, os: GuestOs) -> bool:
        """See `LeafChecker`: under Wine a program of the session lists the processes."""
        return os is GuestOs.WINDOWS

    async def check(self, inspector: GuestInspector) -> CheckOutcome:
        listing = await inspector.query(process_query(inspector.os).argv)
        return await inspector.judge(judge_processes, listing.stdout, self)


class WindowPresent(LeafChecker):
    """Whether a window is open."""

    runs_before_start: ClassVar[bool] = True

    kind: Literal["window"]
    window: WindowMatch
    present: bool = True

    @property
    def subject(self) -> str:
        return self.window.title or self.window.wm_class

    def asks_session(self, os: GuestOs) -> bool:  # noqa: ARG002 -- in each
        """See `LeafChecker`: the X server lists them."""
        return True

    async def check(self, inspector: GuestInspector) -> CheckOutcome:
        listing = await query_windows(inspector.desktop, os=inspector.os, timeout_s=QUERY_TIMEOUT_S)
        return await inspector.judge(judge_windows, listing, self)


class PoweredOff(LeafChecker):
    """Whether the guest has powered itself off: the goal of a task. Nothing else can be checked on what is left."""

    runs_before_start: ClassVar[bool] = True

    kind: Literal["powered_off"]

    @property
    def subject(self) -> str:
        """Empty: there is only one machine."""
        return ""

    def asks_session(self, os: GuestOs) -> bool:  # noqa: ARG002 -- in each
        """See `LeafChecker`: it asks nothing of the guest, so nothing has to be stopped for it."""
        return True

    async def check(self, inspector: GuestInspector) -> CheckOutcome:  # noqa: ARG002 -- it runs
        """See `LeafChecker`. A machine that is off is scored by `envd.tasks.evaluate.judge_ended`."""
        return CheckOutcome(0.0, "the machine runs")


def judge_command(result: CommandResult, checker: Command) -> CheckOutcome:
    if checker.exit_code is not None and result.exit_code != checker.exit_code:
        output = quote(result.stderr or result.stdout)
        return CheckOutcome(0.0, f"exit code {result.exit_code}, expected {checker.exit_code}; output {output}")
    if checker.stdout is None:
        return CheckOutcome(1.0, f"exit code {result.exit_code}")
    return judge_text(result.stdout.decode(errors="replace"), checker.stdout)


def judge_windows(listing: bytes, checker: WindowPresent) -> CheckOutcome:
    """Score the list of open windows, as `query_windows` returns it. Raises: GuestError: A line is malformed."""
    windows = parse_windows(listing.decode(errors="replace"))
    is_right = (find_window(windows, checker.window) is not None) == checker.present
    return CheckOutcome(float(is_right), f"open: {describe_windows(windows)}")


def judge_processes(listing: bytes, checker: ProcessRunning) -> CheckOutcome:
    """Score the running programs, from lines of a state and a name. Raises: GuestError: The list is empty."""
    count = count_processes(listing, checker.program)
    return CheckOutcome(float((count > 0) == checker.running), f"{count} processes named {checker.program} are running")


def count_processes(listing: bytes, program: str) -> int:
    """Return how many processes have this name. Raises: GuestError: The list is empty."""
    if not listing.strip():
        raise GuestError("the list of processes is empty, although the program that made it was running")
    rows = [line.split(maxsplit=1) for line in listing.decode(errors="replace").splitlines()]
    # A zombie has ended; only its parent has not collected its status yet.
    return sum(len(row) == 2 and row[1] == program and not row[0].startswith("Z") for row in rows)
