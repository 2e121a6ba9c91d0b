"""How envd's commands end: results and errors as output and exit status, SIGTERM like Ctrl-C."""

import signal
from collections.abc import Collection, Iterable, Sequence
from typing import NoReturn, Protocol

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cuaenv.cli import terminal
from cuaenv.cli.messages import message_of
from cuaenv.cli.terminal import EXIT_FAILED, emit_json, out
from cuaenv.client import EnvError
from envd.base.errors import ConfigError, EnvdError


def _message_of(error: Exception) -> str:
    """Return the text of an error. A directory that cannot be used may be met anywhere."""
    if isinstance(error, PermissionError):
        return f"{error.filename}: permission denied; run as the owner, or choose another --cache-dir or --state-dir"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {str(error.strerror).lower()}"
    return message_of(error)


#: Decorator for commands; see `cuaenv.cli.terminal.reports_errors`.
reports_errors = terminal.reports_errors(
    EnvdError,
    EnvError,
    OSError,
    usage_errors=(ConfigError,),
    reason_of=lambda error: str(getattr(error, "reason", "") or getattr(error, "code", "")),
    message_of=_message_of,
)


def stop_on_sigterm() -> None:
    """Unwind this process on SIGTERM as on Ctrl-C, so that the command cleans up."""

    def stop(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)


class PrintedResult(Protocol):
    """The report of a benchmark, a soak or a demo."""

    @property
    def passed(self) -> bool:
        """Whether the command exits with status 0."""

    def as_json(self) -> dict[str, object]:
        """Return the result as plain data."""

    def print(self, console: Console) -> None:
        """Print the result for people."""


def print_result(result: PrintedResult, *, as_json: bool) -> None:
    """Print a result on standard output. Raises: typer.Exit: it did not pass."""
    if as_json:
        emit_json(result.as_json())
    else:
        result.print(out)
    if not result.passed:
        raise typer.Exit(EXIT_FAILED)


def columns(
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    right: Collection[str] = (),
    whole: Collection[str] = (),
) -> Table:
    """Return a table of a list command. Text that could control a terminal is made visible.

    Args:
        right: Headings of the columns that are aligned to the right.
        whole: Headings of the columns whose cells are never wrapped: what is in them is copied to other commands.
    """
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", no_wrap=heading in whole)
    for row in rows:
        table.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in row))
    return table


def printable(text: str) -> str:
    """Return text of clients without characters that could control a terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
