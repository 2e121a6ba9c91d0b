"""The daemon of a host in a Ray cluster: it is started once, and adopted by the next process."""

import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from trainer.hosts.daemon import _LAUNCH, DaemonProcess

COMMAND = ["sleep", "1000"]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A host's directory; its daemon is killed at the end."""
    yield tmp_path
    with suppress(OSError, ValueError):
        os.kill(int((tmp_path / "daemon.pid").read_text().split()[0]), signal.SIGKILL)


def test_a_daemon_is_adopted_by_the_next_process_and_not_started_twice(directory: Path) -> None:
    first = DaemonProcess(directory)
    assert first.pid == 0
    first.start(COMMAND, environ=os.environ)
    assert Path(f"/proc/{first.pid}").exists()
    second = DaemonProcess(directory)
    assert second.pid == first.pid
    second.start(COMMAND, environ=os.environ)
    assert second.pid == first.pid


def test_a_daemon_that_a_killed_process_was_starting_is_adopted(directory: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with (directory / "daemon.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # The shell of a process that was killed before it knew the pid.
        launch = f'read -r _ <"{gate}"\n{_LAUNCH}'
        subprocess.run(
            ["setsid", "--fork", "sh", "-c", launch, str(directory / "daemon.pid"), *COMMAND],
            stdin=lock,
            stdout=subprocess.DEVNULL,
            check=True,
        )
    daemon = DaemonProcess(directory)
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(daemon.start, ["false"], environ=os.environ)
        gate.write_text("go\n")
        starting.result()
    assert Path(f"/proc/{daemon.pid}/cmdline").read_bytes().split(b"\0")[:1] == [b"sleep"]


def test_a_daemon_that_ended_is_not_mistaken_for_a_process_with_its_pid(directory: Path) -> None:
    (directory / "daemon.pid").write_text(f"{os.getpid()} 1\n")
    assert DaemonProcess(directory).pid == 0
    (directory / "daemon.pid").write_text("half")
    assert DaemonProcess(directory).pid == 0
    (directory / "daemon.pid").unlink()
