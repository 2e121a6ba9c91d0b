"""Child processes: commands that run to their end, and programs that outlive the call; a lock with a time limit."""

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

from .messages import HttpError

MAX_OUTPUT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class CompletedCommand:
    """Result of a command that ended."""

    returncode: int
    stdout: bytes
    stderr: bytes
    truncated: bool
    """Output beyond `MAX_OUTPUT_BYTES` was dropped."""


class _PipeReader(threading.Thread):
    """Reads a pipe to its end and keeps the first bytes. It outlives the command if a grandchild holds the pipe."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(daemon=True, name="pipe-reader")
        self._stream = stream
        self.kept = bytearray()
        self.truncated = False
        self.start()

    def run(self) -> None:
        with self._stream:
            while chunk := os.read(self._stream.fileno(), 65536):
                room = MAX_OUTPUT_BYTES - len(self.kept)
                self.kept += chunk[:room]
                self.truncated = self.truncated or len(chunk) > room


def _write_stdin(stream: IO[bytes], data: bytes) -> None:
    with suppress(BrokenPipeError), stream:
        stream.write(data)


def _wait_for_exit(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait without polling: `Popen.wait(timeout)` sleeps up to 50 ms past the end."""
    descriptor = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(descriptor)


def _start(command: Sequence[str] | str, **options: Any) -> "subprocess.Popen[bytes]":
    if not command:
        raise HttpError(400, "the command is empty")
    try:
        return subprocess.Popen(command, start_new_session=True, user=os.geteuid(), group=os.getegid(), **options)
    except (OSError, ValueError) as error:
        raise HttpError(500, f"{command!r} cannot be started: {error}") from error


def kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_command(
    command: Sequence[str] | str,
    *,
    timeout_s: float,
    shell: bool = False,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    merge: bool = False,
) -> CompletedCommand:
    """Run a command to its end; `merge` redirects stderr to stdout.

    A grandchild that stays in the background keeps running and does not delay the return.

    Raises:
        HttpError: The command could not be started, or was killed with its process group after `timeout_s`.
    """
    process = _start(
        command,
        shell=shell,
        stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merge else subprocess.PIPE,
        env={**os.environ, **env} if env else None,
        cwd=cwd,
    )
    readers = [_PipeReader(stream) for stream in (process.stdout, process.stderr) if stream]
    if process.stdin:
        threading.Thread(target=_write_stdin, args=(process.stdin, stdin), daemon=True, name="stdin").start()
    try:
        exited = _wait_for_exit(process, timeout_s)
    except BaseException:
        kill_group(process)
        raise
    if not exited:
        kill_group(process)
        osworld_fields = {"output": "", "error": "TimeoutExpired", "returncode": -1, "return_code": -1}
        raise HttpError(500, f"Command timed out after {timeout_s:g} seconds.", timed_out=True, **osworld_fields)
    process.wait()
    # The readers end immediately unless a grandchild has inherited the pipes.
    deadline_s = time.monotonic() + 0.5
    for reader in readers:
        reader.join(max(0.0, deadline_s - time.monotonic()))
    stdout, stderr = (bytes(readers[0].kept), b"" if merge else bytes(readers[1].kept))
    return CompletedCommand(process.returncode, stdout, stderr, any(reader.truncated for reader in readers))


def launch(command: Sequence[str] | str, *, shell: bool = False) -> subprocess.Popen[bytes]:
    """Start a program that outlives the call; a thread reaps it when it ends. Raises: HttpError."""
    none = subprocess.DEVNULL
    process = _start(command, shell=shell, stdin=none, stdout=none, stderr=none)
    threading.Thread(target=process.wait, daemon=True, name=f"reap:{process.pid}").start()
    return process


class TimedLock:
    """A mutex for the resource `name`; a call that waits longer than its timeout raises HttpError 503."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, timeout_s: float = 30.0) -> Iterator[None]:
        if not self._lock.acquire(timeout=timeout_s):
            raise HttpError(503, f"{self._name} has been busy for {timeout_s:g} s; retry later")
        try:
            yield
        finally:
            self._lock.release()
