"""Prints the result of a command: JSON or tables, and exit status 1 if it did not pass."""

from typing import Protocol

import typer
from cuaenv.cli.terminal import EXIT_FAILED, emit_json, out
from rich.console import Console


class Result(Protocol):
    """The report of a benchmark, a verification or a demo."""

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
