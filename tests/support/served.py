"""Run `envd serve` and other `envd` commands as separate processes.

Each is a fork of one process that has imported the command: starting Python and importing takes 1.4 s of CPU time.
"""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

from envd.cli import main
from tests.support.program import Process, Program, Word

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["envd.cli.serve", "envd.cli.compat", __name__])


class EnvdProgram(Program):
    """One `envd` command in a process of its own."""

    def _start(self, command: Sequence[Word], errors: TextIO | None, env: Mapping[str, str] | None) -> Process:
        return _Fork([str(word) for word in command], errors, {**os.environ, **(env or {})})


class ServedDaemon(EnvdProgram):
    """One `envd serve` process on free ports."""

    def __init__(
        self,
        state_dir: Path,
        config_text: str,
        *flags: str,
        listen: str = "127.0.0.1:0",
        within: Sequence[str] = (),
        **variables: str,
    ) -> None:
        """Start it.

        Args:
            state_dir: Its state directory; configuration and log go to the same parent.
            config_text: Configuration as TOML.
            flags: More flags of the command.
            listen: Its address, for a daemon that replaces another.
            within: Prefix of the command line: a program that executes its arguments.
            variables: Environment variables in addition to this process's.
        """
        config = state_dir.parent / f"{state_dir.name}.toml"
        config.write_text(config_text, encoding="utf-8")
        self.log_file = state_dir.parent / f"{state_dir.name}.log"
        self._within = (*within, sys.executable, "-m", "envd") if within or variables else ()
        command = ["serve", "--config", str(config), "--state-dir", str(state_dir)]
        addresses = ["--listen", listen, "--metrics-listen", "127.0.0.1:0"]
        super().__init__(*command, *addresses, *flags, errors=self.log_file, env=variables)

    def _start(self, command: Sequence[Word], errors: TextIO | None, env: Mapping[str, str] | None) -> Process:
        if not self._within:
            return super()._start(command, errors, env)
        # Libraries read variables when they are imported.
        return Program._start(self, (*self._within, *command), errors, {**os.environ, **(env or {})})


class _Fork:
    """An `envd` command in a fork; like a `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], errors: TextIO | None, env: Mapping[str, str]) -> None:
        output, into = _FORKS.Pipe(duplex=False)
        log = errors and Connection(os.dup(errors.fileno()), readable=False)
        self._process = _FORKS.Process(target=_run, args=(command, into, log, env), daemon=True)
        self._process.start()
        into.close()
        self.stdout = os.fdopen(os.dup(output.fileno()), encoding="utf-8")
        output.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("envd", timeout or 0)
        return status


def _end_with_tests() -> None:
    """End this process when that of the tests has ended, which may have been killed."""
    tests = multiprocessing.parent_process()
    assert tests is not None
    tests.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _run(command: Sequence[str], output: Connection, errors: Connection | None, env: Mapping[str, str]) -> None:
    os.setsid()
    threading.Thread(target=_end_with_tests, daemon=True).start()
    os.dup2(output.fileno(), 1)
    os.dup2((errors or output).fileno(), 2)
    for each in (output, errors):
        if each:
            each.close()
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["envd", *command]
    try:
        main()
    finally:
        atexit._run_exitfuncs()  # forks of multiprocessing end without them, and leave what a daemon removes there
