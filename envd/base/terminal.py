"""How envd's commands end: results and errors as output and exit status, SIGTERM like Ctrl-C."""

import signal
from typing import NoReturn, Protocol

import typer
from rich.console import Console

from cuaenv.cli import terminal
from cuaenv.cli.terminal import EXIT_FAILED, emit_json, out
from envd.base.errors import ConfigError, EnvdError


def _message_of(error: Exception) -> str:
    """Return the text of an error. A directory that cannot be used may be met anywhere."""
    if isinstance(error, PermissionError):
        return f"{error.filename}: permission denied; run as the owner, or choose another --cache-dir or --state-dir"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {str(error.strerror).lower()}"
    return str(error)


#: Decorator for commands; see `cuaenv.cli.terminal.reports_errors`.
reports_errors = terminal.reports_errors(
    EnvdError,
    OSError,
    usage_errors=(ConfigError,),
    reason_of=lambda error: getattr(error, "reason", ""),
    message_of=_message_of,
)


def stop_on_sigterm() -> None:
    """Unwind this process on SIGTERM as on Ctrl-C, so that the command cleans up."""

    def stop(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)


class Result(Protocol):
    """The report of a benchmark, a soak or a demo."""

    @property
    def passed(self) -> bool:
        """Whether the command exits with status 0."""

    def as_json(self) -> dict[str, object]:
        """Return the result as plain data."""

    def print(self, console: Console) -> None:
        """Print the result for people."""


def print_result(result: Result, *, as_json: bool) -> None:
    """Print a result on standard output. Raises: typer.Exit: it did not pass."""
    if as_json:
        emit_json(result.as_json())
    else:
        result.print(out)
    if not result.passed:
        raise typer.Exit(EXIT_FAILED)
