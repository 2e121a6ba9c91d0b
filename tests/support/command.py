"""Run `envd` commands in the test process, which saves about 1 s of start-up per command."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import typer
from typer.testing import CliRunner

from envd.cli.app import app


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutput:
    """Exit status and output of a command."""

    status: int
    out: str
    err: str


def run_envd(*words: str, **variables: str) -> CommandOutput:
    """Run an `envd` command to its end. Environment variables named ENVD_* are unset unless given."""
    return run_app(app, *words, **variables)


def run_app(app: typer.Typer, *words: str, **variables: str) -> CommandOutput:
    """Run a command of `app`, as `run_envd` does."""
    unset = dict.fromkeys(name for name in os.environ if name.startswith("ENVD_"))
    with restored_logging():
        done = CliRunner().invoke(app, words, prog_name="envd", env={**unset, **variables}, catch_exceptions=False)
    return CommandOutput(status=done.exit_code, out=done.stdout, err=done.stderr)


@contextmanager
def restored_logging() -> Iterator[None]:
    """Restore the logging configuration that the block changes, as a command does."""
    root, own = logging.getLogger(), logging.getLogger("envd")
    handlers, levels = root.handlers[:], (root.level, own.level)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(levels[0])
        own.setLevel(levels[1])
