"""Check the conditions of oracles on the output of guest commands. Pure."""

from typing import Protocol

from envd.base.errors import GuestError
from envd.hypervisor.machine import GuestOs
from envd.tasks.checkers.programs import count_processes
from envd.tasks.oracle import WaitFor
from envd.tasks.queries import (
    Query,
    describe_windows,
    file_query,
    find_window,
    parse_windows,
    process_query,
    window_query,
)
from envd.tasks.text import quote


class Result(Protocol):
    """The result of a command, from the daemon's side or from a client's."""

    @property
    def exit_code(self) -> int:
        """The exit code."""

    @property
    def stdout(self) -> bytes:
        """The output."""

    @property
    def stderr(self) -> bytes:
        """The error output."""


def query_of(condition: WaitFor, os: GuestOs) -> Query:
    """Return the command whose result shows whether a condition holds."""
    if condition.window is not None:
        return window_query(os)
    return process_query(os) if condition.file is None else file_query(condition.file, os)


def unmet(condition: WaitFor, result: Result) -> str:
    """Return why a condition does not hold, by the result of its query; empty if it holds."""
    if result.exit_code:
        return f"exit code {result.exit_code}: {quote(result.stderr)}"
    try:
        is_there, found = _look(condition, result.stdout)
    except GuestError as error:
        return str(error)
    return "" if is_there != condition.absent else found


def _look(condition: WaitFor, output: bytes) -> tuple[bool, str]:
    text = output.decode(errors="replace")
    if condition.window is not None:
        windows = parse_windows(text)
        return find_window(windows, condition.window) is not None, f"open: {describe_windows(windows)}"
    if condition.file is not None:
        size = text.strip()
        # A program creates a file before it writes it. A directory has no size.
        return size == "other" or (size.isdecimal() and int(size) > 0), f"{condition.file}: {quote(size)}"
    count = count_processes(output, condition.process or "")
    return count > 0, f"{count} processes named {condition.process} are running"
