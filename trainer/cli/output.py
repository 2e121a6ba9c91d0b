"""Error reporting and logging of the trainer's commands."""

import logging
from collections.abc import Callable
from logging import StreamHandler
from typing import ParamSpec, TypeVar

from rich.logging import RichHandler

from cuaenv.cli import terminal
from cuaenv.cli.messages import message_of
from cuaenv.client import EnvError
from trainer.config import InputError

P = ParamSpec("P")
R = TypeVar("R")


class UsageError(Exception):
    """Wrong arguments: the message names the flag or file, and the remedy."""


def reports_errors(*expected: type[Exception], to_continue: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that reports `UsageError`, `InputError`, `EnvError` and `expected`.

    Args:
        to_continue: What to do after an interruption; see `terminal.reports_errors`.
    """
    return terminal.reports_errors(
        EnvError,
        InputError,
        *expected,
        usage_errors=(UsageError,),
        reason_of=lambda error: type(error).__name__,
        message_of=message_of,
        to_continue=to_continue,
    )


def log_to_stderr(*, verbose: bool) -> None:
    """Send log lines to standard error: standard output holds only the command's result."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING,
        format="%(name)s: %(message)s",
        # RichHandler wraps at 80 columns without a terminal, which breaks grep.
        handlers=[RichHandler(console=terminal.err, show_path=False) if terminal.err.is_terminal else StreamHandler()],
        force=True,
    )
