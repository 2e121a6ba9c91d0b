"""Output of envd's commands, and how they fail."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.table import Table

from cuaenv.cli import terminal
from envd.base.errors import ImageNotFound
from envd.cli.terminal import reports_errors


@reports_errors
def command(*, error: Exception | None = None, as_json: bool = False) -> str:
    if error is not None:
        raise error
    return "done" if not as_json else "{}"


def test_a_failure_is_one_line_on_standard_error_and_an_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught:
        command(error=ImageNotFound("image 'x' [a] is not there"))
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: image 'x' [a] is not there\n")
    assert caught.value.exit_code == terminal.EXIT_FAILED


def test_a_bug_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        command(error=ZeroDivisionError())
    assert command() == "done"


def test_without_a_terminal_progress_is_a_line_at_the_start_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.progress("image desktop") as report:
        report("installing [main]", 0.01)
        report("installing b", 0.02)
        report("done", 1.0)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["image desktop:   1% installing [main]", "image desktop: 100% done"]


def test_lines_that_other_programs_read_are_not_padded(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("task", "instruction", box=None, pad_edge=False)
    table.add_row("a", "short")
    table.add_row("b", "a longer one")
    terminal.out.print(table)
    assert capsys.readouterr().out == "task  instruction\na     short\nb     a longer one\n"


def test_a_reader_that_has_enough_ends_a_command_without_a_message(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "envd", "certs", str(tmp_path / "certs")]
    read_end, write_end = os.pipe()
    os.close(read_end)

    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)

    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_lost_connection_is_an_error_while_the_output_is_read(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught:
        command(error=BrokenPipeError(errno.EPIPE, "Broken pipe"))
    assert capfd.readouterr().err == "error: [Errno 32] Broken pipe\n"
    assert caught.value.exit_code == terminal.EXIT_FAILED
