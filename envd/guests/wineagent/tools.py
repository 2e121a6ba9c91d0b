"""Use a tool of an agent as the user: the same requests and responses as the host's script `use-tool` on Windows.

A process reads one request (JSON) from its standard input and prints the response. Each command has a `cmd.exe` of its
own, which reads it as if it were typed. What `set` prints after it is kept in a file, and set again before the next.
"""

import base64
import json
import ntpath
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .drive import AgentError, Drive

_END_BYTES = 16_384
_MAX_ENTRIES = 1000
_CMD = ("wine64", r"C:\windows\system32\cmd.exe", "/d", "/q", "/k", "rem")
#: Wine's cmd.exe reads and writes the code pages of the United States.
_INPUT, _OUTPUT = "cp437", "cp1252"
_STATE = r"AppData\Local\envd-shell.txt"
#: By it a command's processes are found: Wine's are not children of those that start them.
_MARK = "ENVD_COMMAND"
_KILL_S = 5.0

Response = dict[str, Any]


class Tools:
    """The tools of the user of a drive. Methods raise AgentError, OSError and ValueError."""

    def __init__(self, drive: Drive) -> None:
        self._drive = drive
        self._home = rf"C:\users\{drive.user.pw_name}"

    def answer(self, request: Response) -> Response:
        """Return the response to a request; `error` says why it failed."""
        operations: dict[str, Callable[..., Response]]
        operations = {"read": self.read, "write": self.write, "list": self.list_directory, "shell": self.shell}
        path = self._full(request.get("path", ""))
        try:
            return operations[request.pop("op")](**request)
        except OSError as error:
            return {"error": f"{path}: {error.strerror or error}"}
        except (AgentError, ValueError) as error:
            return {"error": str(error)}

    def read(self, path: str, limit: int) -> Response:
        """Return a file's size and its first bytes."""
        path = self._full(path)
        with self._drive.path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return {"path": path, "size": size, "data": _base64(file.read(limit))}

    def write(self, path: str, data: str) -> Response:
        """Replace a file, whole or not at all."""
        path = self._full(path)
        target = self._drive.path(path).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".envd-{os.getpid()}")
        try:
            temporary.write_bytes(base64.b64decode(data))
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        return {"path": path}

    def list_directory(self, path: str) -> Response:
        """Return a line for each entry of a directory, and their number."""
        entries = sorted(self._drive.path(self._full(path)).iterdir())
        rows = [f"{at.name}/" if at.is_dir() else f"{at.name} ({at.lstat().st_size} bytes)" for at in entries]
        return {"rows": "\n".join(rows[:_MAX_ENTRIES]), "count": len(rows)}

    def shell(self, command: str, timeout_s: float) -> Response:
        """Run a command in the directory and with the variables of the one before."""
        if "\0" in command:
            raise ValueError("a command cannot contain the character U+0000")
        try:
            lines = [line.encode(_INPUT) for line in command.splitlines()]
        except UnicodeEncodeError as error:
            character = error.object[error.start]
            raise ValueError(f"cmd.exe of this guest cannot read the character {character}") from None
        state = self._full(_STATE)
        before = [line.encode(_INPUT, "replace") for line in self._restored(self._drive.path(state))]
        kept = f'set "ENVD_EXIT=%ERRORLEVEL%"\r\nset "ENVD_DIRECTORY=%CD%"\r\nset> "{state}"\r\nexit %ENVD_EXIT%\r\n'
        script = b"\r\n".join([*before, *lines, kept.encode(_INPUT)])
        return _run(script, self._drive.path(self._home), timeout_s)

    def _restored(self, state: Path) -> list[str]:
        """Return the lines that restore the variables and the directory after the last command."""
        printed = state.read_text(_OUTPUT, "replace").splitlines() if state.exists() else []
        variables = dict(line.split("=", 1) for line in printed if "=" in line)
        directory = variables.get("ENVD_DIRECTORY", "")
        lines = [f'set "{name}={value}"' for name, value in variables.items() if not name.startswith("ENVD_")]
        with suppress(AgentError):
            if self._drive.path(directory).is_dir():
                lines.append(f'cd /d "{directory}"')
        return lines

    def _full(self, path: str) -> str:
        return ntpath.normpath(ntpath.join(self._home, path))


def _run(script: bytes, directory: Path, timeout_s: float) -> Response:
    """Return the ends of what cmd.exe printed, and its exit code or that it was killed."""
    mark = f"{os.getpid()}-{time.time_ns()}"
    environ = {**os.environ, _MARK: mark}
    del environ["PYTHONPATH"]
    # Not a pipe: a program in the background would keep it open.
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as output:
        stdin.write(script)
        stdin.seek(0)
        process = subprocess.Popen(_CMD, stdin=stdin, stdout=output, stderr=output, cwd=directory, env=environ)
        try:
            code = process.wait(timeout_s)
            ended: Response = {"exit_code": 128 - code if code < 0 else code}
        except subprocess.TimeoutExpired:
            _kill(f"{_MARK}={mark}".encode())
            process.wait()
            ended = {"timed_out": True}
        size = output.seek(0, os.SEEK_END)
        ends = (os.pread(output.fileno(), _END_BYTES, at) for at in (0, max(_END_BYTES, size - _END_BYTES)))
        head, tail = (_base64(part.decode(_OUTPUT, "replace").encode()) for part in ends)
    return {"head": head, "tail": tail, "left_out_bytes": max(0, size - 2 * _END_BYTES), **ended}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _kill(mark: bytes) -> None:
    """Kill every process with a variable; gives up on those that start others faster."""
    found, deadline_s = True, time.monotonic() + _KILL_S
    while found and time.monotonic() < deadline_s:
        found = False
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in environ.read_bytes().split(b"\0"):
                    os.kill(int(environ.parent.name), signal.SIGKILL)
                    found = True


if __name__ == "__main__":
    drive = Drive(Path(os.environ["WINEPREFIX"]), pwd.getpwuid(os.getuid()).pw_name)
    json.dump(Tools(drive).answer(json.loads(sys.stdin.buffer.readline())), sys.stdout)
