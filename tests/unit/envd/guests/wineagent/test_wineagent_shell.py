"""The desktop's helper: started, asked, started again."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from envd.guests.wineagent.drive import AgentError, Drive
from envd.guests.wineagent.shell import Shell, await_screen, set_desktop_size

#: Is ready, then answers each request with a number that counts up; ends at `end`, and does not answer `hang`.
COUNTING = """
import sys
print("ready null", flush=True)
for number, line in enumerate(sys.stdin):
    if line.startswith("end"): break
    if line.startswith("hang"): held = number; continue
    if line.startswith("free"): print("ok", held, flush=True)
    print("ok", number, flush=True)
"""


class EndOfTestError(Exception):
    """Ends the thread of a shell."""


class Helpers:
    """Starts helpers until the test ends."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self._is_ended = False

    def start(self) -> "subprocess.Popen[bytes]":
        """Start a helper."""
        if self._is_ended:
            raise EndOfTestError
        command = [sys.executable, "-S", "-c", COUNTING]
        self._started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return self._started[-1]

    def running_shell(self) -> Shell:
        """Return a shell that keeps a helper running."""
        shell = Shell(self.start)

        def run() -> None:
            with suppress(EndOfTestError):
                shell.run(restart_s=0.01)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()
        assert shell.ready.wait(60)
        return shell

    def end(self) -> None:
        """End all helpers and the shells' threads."""
        self._is_ended = True
        while any(thread.is_alive() for thread in self._threads):
            for process in self._started:
                process.kill()
            for thread in self._threads:
                thread.join(timeout=0.05)


@pytest.fixture
def helpers() -> Iterator[Helpers]:
    helpers = Helpers()
    yield helpers
    helpers.end()


def test_a_helper_that_ends_fails_its_request_and_is_started_again(helpers: Helpers) -> None:
    shell = helpers.running_shell()
    assert shell.ask("count") == 0
    with pytest.raises(AgentError, match="ended"):
        shell.ask("end")
    assert shell.ask("count") == 0


def test_a_late_response_is_not_taken_for_that_of_the_next_request(helpers: Helpers) -> None:
    shell = helpers.running_shell()
    assert shell.ask("count") == 0
    shell.timeout_s = 0.01
    with pytest.raises(AgentError, match="answer"):
        shell.ask("hang")
    shell.timeout_s = 60.0
    assert shell.ask("free") == 2
    assert shell.ask("count") == 3


def test_a_request_before_the_desktop_is_up_fails(helpers: Helpers) -> None:
    with pytest.raises(AgentError, match="starting"):
        Shell(helpers.start, timeout_s=0.01).ask("count")


def test_the_desktop_gets_the_size_of_the_screen(tmp_path: Path) -> None:
    size = await_screen(["echo", "Screen 0: minimum 8 x 8, current 1024 x 768, maximum 9 x 9"], {})
    registry = tmp_path / "user.reg"
    registry.write_bytes(b'[Desktops] 1\n"shell"="1280x800"\n"other"="1280x800"\n')
    set_desktop_size(Drive(tmp_path, "root"), size)
    assert registry.read_bytes() == b'[Desktops] 1\n"shell"="1024x768"\n"other"="1280x800"\n'
