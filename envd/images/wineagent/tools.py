"""Use a tool of an agent as the user: the same requests and responses as the host's script `use-tool` on Windows.

A process reads one request (JSON) from its standard input and prints the response. Each command has a `cmd.exe` of its
own, which reads it as if it were typed. What `set` prints after it is kept in a file, and set again before the next.
"""

import base64
import json
import ntpath
import os
import pwd
import select
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

HEAD_BYTES = TAIL_BYTES = 16_384
MAX_ENTRIES = 1000
_CMD = ("wine64", r"C:\windows\system32\cmd.exe", "/d", "/q", "/k", "rem")
#: Wine's cmd.exe reads and writes the code pages of the United States.
_INPUT, _OUTPUT = "cp437", "cp1252"
_STATE = r"AppData\Local\envd-shell.txt"
#: The variables of the exit code and the directory, and one by which a command's processes are found.
_EXIT, _DIRECTORY, _MARK = "ENVD_EXIT", "ENVD_DIRECTORY", "ENVD_COMMAND"
_READ_BYTES = 65_536

Response = dict[str, Any]


class Tools:
    """The tools of the user of a drive."""

    def __init__(self, drive: Drive) -> None:
        self._drive = drive
        self._home = rf"C:\users\{drive.user.pw_name}"
        self.by_name: dict[str, Callable[..., Response]] = {
            "read": self.read,
            "write": self.write,
            "list": self.list_directory,
            "shell": self.shell,
        }

    def answer(self, request: Response) -> Response:
        """Return the response to a request; `error` says why it failed."""
        try:
            return self.by_name[request.pop("op")](**request)
        except OSError as error:
            return {"error": f"{self._full(request.get('path', ''))}: {error.strerror or error}"}
        except (AgentError, ValueError) as error:
            return {"error": str(error)}

    def read(self, path: str, limit: int) -> Response:
        """Return a file's size and its first bytes. Raises: AgentError, OSError."""
        file, path = self._file(path)
        if file.is_dir():
            raise AgentError(f"{path} is a directory; list it instead")
        if file.exists() and not file.is_file():
            raise AgentError(f"{path} is not a regular file")
        with file.open("rb") as stream:
            data = stream.read(limit)
            return {"path": path, "size": os.fstat(stream.fileno()).st_size, "data": _encoded(data)}

    def write(self, path: str, data: str) -> Response:
        """Replace a file, whole or not at all. Raises: AgentError, OSError."""
        file, path = self._file(path)
        target = file.resolve()
        if target.exists() and not target.is_file():
            raise AgentError(f"{path} is not a regular file")
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent)
        try:
            with open(descriptor, "wb") as stream:
                stream.write(base64.b64decode(data))
            os.chmod(temporary, target.stat().st_mode & 0o7777 if target.exists() else 0o644)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
        return {"path": path}

    def list_directory(self, path: str) -> Response:
        """Return a line for each entry of a directory, and their number. Raises: AgentError, OSError."""
        entries = sorted(self._file(path)[0].iterdir())
        rows = [f"{at.name}/" if at.is_dir() else f"{at.name} ({at.lstat().st_size} bytes)" for at in entries]
        return {"rows": "\n".join(rows[:MAX_ENTRIES]), "count": len(rows)}

    def shell(self, command: str, timeout_s: float) -> Response:
        """Run a command in the directory and with the variables of the one before. Raises: OSError, ValueError."""
        if "\0" in command:
            raise ValueError("a command cannot contain the character U+0000")
        state = self._drive.path(self._full(_STATE))
        kept = [f'set "{_EXIT}=%ERRORLEVEL%"', f'set "{_DIRECTORY}=%CD%"', f'set> "{self._full(_STATE)}"', "exit"]
        lines = [*self._restored(state), *command.splitlines(), *kept]
        try:
            script = "\r\n".join([*lines, ""]).encode(_INPUT)
        except UnicodeEncodeError as error:
            shown = error.object[error.start]
            raise ValueError(f"cmd.exe of this guest cannot read the character {shown}; write it to a file") from None
        output, before = _Output(), _modified(state)
        with tempfile.TemporaryFile() as file:
            file.write(script)
            file.seek(0)
            exit_code = _run(file.fileno(), self._drive.path(self._home), output, time.monotonic() + timeout_s)
        if _modified(state) != before:
            # Debian has only the low 8 bits of a program's exit code.
            exit_code = int(_variables(state).get(_EXIT, "0"))
        ended = {"timed_out": True} if exit_code is None else {"exit_code": exit_code}
        head, tail = _encoded(output.head), _encoded(output.tail)
        return {"head": head, "tail": tail, "left_out_bytes": output.left_out_bytes, **ended}

    def _restored(self, state: Path) -> list[str]:
        """Return the lines that restore the variables and the directory after the last command. Raises: OSError."""
        variables = _variables(state) if state.exists() else {}
        lines = [f'set "{name}={value}"' for name, value in variables.items() if not name.startswith("ENVD_")]
        directory = variables.get(_DIRECTORY, "")
        with suppress(AgentError):
            if self._drive.path(directory).is_dir():
                lines.append(f'cd /d "{directory}"')
        return lines

    def _full(self, path: str) -> str:
        return ntpath.normpath(ntpath.join(self._home, path))

    def _file(self, path: str) -> tuple[Path, str]:
        """Return a file and its full path on Windows. Raises: AgentError."""
        path = self._full(path)
        return self._drive.path(path), path


class _Output:
    """The first and last bytes of an output."""

    def __init__(self) -> None:
        self.head, self.tail, self.left_out_bytes = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        data = data.decode(_OUTPUT, "replace").encode()
        room = HEAD_BYTES - len(self.head)
        self.head += data[:room]
        self.tail += data[max(0, room) :]
        excess = len(self.tail) - TAIL_BYTES
        if excess > 0:
            del self.tail[:excess]
            self.left_out_bytes += excess


def _run(stdin: int, directory: Path, output: _Output, deadline_s: float) -> int | None:
    """Return the exit code of cmd.exe; None if it was killed at the deadline. Raises: OSError."""
    mark = f"{os.getpid()}-{time.time_ns()}"
    environ = {**os.environ, _MARK: mark}
    del environ["PYTHONPATH"]
    out, theirs = os.pipe()
    process = subprocess.Popen(_CMD, stdin=stdin, stdout=theirs, stderr=theirs, cwd=directory, env=environ)
    os.close(theirs)
    ended = os.pidfd_open(process.pid)
    watched = [out, ended]
    while (left_s := deadline_s - time.monotonic()) > 0:
        ready = select.select(watched, [], [], left_s)[0]
        if out in ready:
            data = os.read(out, _READ_BYTES)
            output.add(data)
            if not data:
                watched.remove(out)
        elif ended in ready:  # a program in the background may keep the output open
            code = process.wait()
            return 128 - code if code < 0 else code
    _kill(f"{_MARK}={mark}".encode())
    process.wait()
    return None


def _kill(mark: bytes) -> None:
    """Kill every process with a variable. Wine's processes are not children of those that start them."""
    found = True
    while found:
        found = False
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in environ.read_bytes().split(b"\0"):
                    os.kill(int(environ.parent.name), signal.SIGKILL)
                    found = True


def _modified(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_mtime_ns
    return 0


def _variables(state: Path) -> dict[str, str]:
    """Return what `set` has printed. Raises: OSError."""
    lines = state.read_bytes().decode(_OUTPUT, "replace").splitlines()
    return {name: value for name, _, value in (line.partition("=") for line in lines) if _is_readable(value)}


def _is_readable(value: str) -> bool:
    with suppress(UnicodeEncodeError):
        return bool(value.encode(_INPUT))
    return False


def _encoded(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def main() -> None:
    """Answer one request of the agent."""
    drive = Drive(Path(os.environ["WINEPREFIX"]), pwd.getpwuid(os.getuid()).pw_name)
    json.dump(Tools(drive).answer(json.loads(sys.stdin.buffer.readline())), sys.stdout)


if __name__ == "__main__":
    main()
