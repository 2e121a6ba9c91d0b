"""SIGINT ends a command with one line, while it is imported, by `make`, and where a shell had it ignored."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cuaenv.cli.interrupts import heed_interrupts

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _restored_handler() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_an_interrupt_is_heeded(
    handler: Callable[..., object] | signal.Handlers, capfd: pytest.CaptureFixture[str]
) -> None:
    signal.signal(signal.SIGINT, handler)
    with pytest.raises(SystemExit) as ended, heed_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert ended.value.code == 128 + signal.SIGINT
    assert capfd.readouterr().err == "interrupted\n"


def test_a_handler_of_the_process_is_kept() -> None:
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    with heed_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert received == [signal.SIGINT]


@pytest.mark.parametrize("program", ["envd", "trainer"])
def test_commands_heed_interrupts_while_they_are_imported(program: str, tmp_path: Path) -> None:
    # The first import after the handler waits here until the signal comes.
    (tmp_path / "typer.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from {program}.cli import main; main()"
    background = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", code]
    with subprocess.Popen(background, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        begun_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
    assert (process.returncode, error) == (128 + signal.SIGINT, b"interrupted\n")
    assert time.monotonic() - begun_s < 30


def has_interrupt(pid: int, name: str) -> bool:
    """Return whether SIGINT is in a set of a process: `SigCgt`, the signals that it catches, or `ShdPnd`, pending."""
    status = Path(f"/proc/{pid}/status").read_text()
    signals = next(line.split()[1] for line in status.splitlines() if line.startswith(f"{name}:"))
    return bool(int(signals, 16) & 1 << signal.SIGINT - 1)


def test_make_reports_no_error_of_an_interrupted_quickstart(tmp_path: Path) -> None:
    """Ctrl-C reaches make, its shell and the command."""
    program = tmp_path / "bin/envd"
    program.parent.mkdir()
    # It prints the process ids of make's shell and its own, and ends at SIGTERM.
    program.write_text(f"""#!{sys.executable}
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGINT, signal.SIGTERM}})
print(os.getppid(), os.getpid(), flush=True)
signal.sigtimedwait({{signal.SIGTERM}}, 60)
sys.exit(130 if signal.SIGINT in signal.sigpending() else 1)
""")
    program.chmod(0o755)
    make = ["make", "-f", str(ROOT / "Makefile"), "quickstart", f"VENV={tmp_path}", "REAL="]
    with subprocess.Popen(
        make, cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        shell, command = map(int, process.stdout.readline().split())
        # Bash catches SIGINT while it waits for a command (jobs.c, `wait_for`). Before that, SIGINT ends it.
        while not has_interrupt(shell, "SigCgt"):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        # Make's handler waits for its shell. If that ends before, GNU make 4.3 can say `wait: No child processes`.
        while has_interrupt(process.pid, "ShdPnd"):
            time.sleep(0.01)
        os.kill(command, signal.SIGTERM)
        output, _ = process.communicate()
    assert (process.returncode, output) == (-signal.SIGINT, b"")
    program.write_text("#!/bin/bash\nexit 1\n")
    failed = subprocess.run(make, check=False, cwd=ROOT, capture_output=True)
    assert failed.returncode == 2
