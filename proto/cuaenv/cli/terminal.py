"""Output of commands: results on standard output, progress and errors on standard error."""

import functools
import json
import os
import re
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ParamSpec, Protocol, TypeVar

import typer
from rich.console import Console, ConsoleDimensions
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

P = ParamSpec("P")
R = TypeVar("R")

#: Width of output that is not shown on a terminal: tables must not wrap or cut ids that other programs read.
_FILE_WIDTH = 1000


class _Console(Console):
    """A console that does not wrap lines unless it writes to a terminal or COLUMNS is set."""

    @property
    def size(self) -> ConsoleDimensions:
        """Columns and lines."""
        size = super().size
        return size if self.is_terminal or "COLUMNS" in os.environ else size._replace(width=_FILE_WIDTH)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, but pad no line with spaces unless it is shown on a terminal."""
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as printed:
            super().print(*objects, **options)
        self.file.write(re.sub(r" +$", "", printed.get(), flags=re.MULTILINE))
        self.file.flush()


# No emoji: rich would take `:abc:` in addresses and paths for one.
out = _Console(highlight=False, emoji=False)
err = _Console(stderr=True, highlight=False, emoji=False)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]

#: Exit status of a command that failed, that has wrong arguments or configuration, and that was interrupted.
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

#: If standard error is not a terminal, progress is at most one line per interval.
_LINE_INTERVAL_S = 10.0


class ProgressReport(Protocol):
    """Receives the progress of a long task."""

    def __call__(self, stage: str, done: float, total: int | None = None) -> None:
        """Report the current stage and the amount done: a fraction, or with `total` a count."""


def program(name: str) -> str:
    """Return how a shell calls a program of this environment: by its name, or by its path if PATH lacks it."""
    path = Path(sys.executable).with_name(name)
    if shutil.which(name) == str(path):
        return name
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def emit_json(value: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")
    sys.stdout.flush()


def emit(value: Mapping[str, object], text: str, *, as_json: bool) -> None:
    """Print a command's result: one JSON object, or text for people."""
    if as_json:
        emit_json(value)
    else:
        out.print(text, markup=False, soft_wrap=True)


def reports_errors(
    *expected: type[Exception],
    usage_errors: tuple[type[Exception], ...],
    reason_of: Callable[[Exception], str],
    message_of: Callable[[Exception], str] = str,
    to_continue: str = "",
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that turns expected errors into one red line and an exit status.

    With `--json` it also prints them as a JSON object. It passes on all other errors: they are bugs.

    Args:
        expected: Errors to report, besides `usage_errors`.
        usage_errors: Errors that exit with `EXIT_USAGE`; all others exit with `EXIT_FAILED`.
        to_continue: What to do after an interruption, such as `repeat the command to continue`; empty for none.
    """

    def decorate(command: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(command)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return command(*args, **kwargs)
            except KeyboardInterrupt:
                err.print("[bold red]interrupted[/]" + (f"; {escape(to_continue)}" if to_continue else ""))
                raise typer.Exit(EXIT_INTERRUPTED) from None
            except (*expected, *usage_errors) as error:
                if isinstance(error, BrokenPipeError) and _lost_its_reader():
                    raise  # typer ends the command without a message
                err.print(f"[bold red]error:[/] {escape(message_of(error))}", soft_wrap=True)
                if kwargs.get("as_json"):
                    emit_json({"error": {"reason": reason_of(error), "message": message_of(error)}})
                raise typer.Exit(EXIT_USAGE if isinstance(error, usage_errors) else EXIT_FAILED) from error

        return wrapper

    return decorate


def _lost_its_reader() -> bool:
    """Return whether standard output is a pipe whose reader, such as `head`, has ended."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


@contextmanager
def progress(title: str) -> Iterator[ProgressReport]:
    """Show a progress bar on a terminal, otherwise a line at most every 10 s."""
    if not err.is_terminal:
        yield _lines(title)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[stage]}"),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(escape(title), total=None, amount="", stage="")

        def report(stage: str, done: float, total: int | None = None) -> None:
            amount = _amount(done, total)
            bar.update(task, completed=done, total=total or 1, amount=amount, stage=escape(stage[:48]))

        yield report


def _lines(title: str) -> ProgressReport:
    last_s = -_LINE_INTERVAL_S

    def report(stage: str, done: float, total: int | None = None) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= _LINE_INTERVAL_S or done >= (total or 1):
            last_s = now_s
            err.print(f"{escape(title)}: {_amount(done, total)} {escape(stage)}", soft_wrap=True)

    return report


def _amount(done: float, total: int | None) -> str:
    return f"{done:4.0%}" if total is None else f"{done}/{total}"
