"""The tools of an agent inside its guest: a shell, files, and MCP servers. Runs there, with the standard library alone.

`python3 -I -S -c PROGRAM` reads one request (JSON) from its standard input, performs it and prints the result (JSON).
Files are handled by that process. The shell and the MCP servers belong to a service that the first such request
starts; they live as long as the guest, and a fork of the guest copies them. All run as the user of the session.
"""

from __future__ import annotations

import fcntl
import json
import mimetypes
import os
import re
import select
import shlex
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, BinaryIO

    Result = dict[str, Any]

HEAD_BYTES = TAIL_BYTES = 16384
MAX_FILE_BYTES = 262144
#: Lines are counted in so much of a file.
MAX_SCAN_BYTES = 16 << 20
MAX_ENTRIES = 1000
MAX_MESSAGE_BYTES = 4 << 20
#: How long the service may take beyond the limit of a request.
GRACE_S = 5.0
#: How long the shell may take to notice that its command was killed.
KILL_S = 1.0
PROTOCOL_VERSION = "2025-06-18"


class Refused(Exception):
    """A request that cannot be performed; the message is for the agent."""


# Files


def file_at(path: str) -> str:
    return os.path.join(os.path.expanduser("~"), os.path.expanduser(path))


def open_regular(path: str) -> BinaryIO:
    """Open a regular file: a pipe or a device would block."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise Refused(f"{path} is a directory; list it instead")
    if not stat.S_ISREG(mode):
        raise Refused(f"{path} is not a regular file")
    return open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")


def text_of(data: bytes, *, whole: bool) -> str | None:
    """Return UTF-8 text, without a character that the end cuts if `data` is not whole; None if it is not text."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if not whole and error.start > len(data) - 4 and error.reason == "unexpected end of data":
            return data[: error.start].decode()
        return None


def kind_of(path: str, data: bytes) -> str:
    for magic, kind in (
        (b"\x89PNG", "image/png"),
        (b"\xff\xd8\xff", "image/jpeg"),
        (b"%PDF-", "application/pdf"),
        (b"PK\x03\x04", "application/zip"),
        (b"\x1f\x8b", "application/gzip"),
        (b"\x7fELF", "application/x-elf"),
    ):
        if data.startswith(magic):
            return kind
    return mimetypes.guess_type(path)[0] or "application/octet-stream"


def read_file(path: str, first_line: int, line_count: int) -> Result:
    path = file_at(path)
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(scan_bytes(first_line, line_count))
        return shown(path, data, size, first_line, line_count, whole=not file.read(1))


def scan_bytes(first_line: int, line_count: int) -> int:
    """Return how much of a file is needed to show some of its lines."""
    return MAX_SCAN_BYTES if first_line > 1 or line_count > 0 else MAX_FILE_BYTES


def shown(path: str, data: bytes, size: int, first_line: int, line_count: int, *, whole: bool) -> Result:
    """Show lines of a file of which `data` was read, `whole` or its first bytes."""
    text = None if b"\0" in data[:8192] else text_of(data, whole=whole)
    if text is None:
        return {"output": f"[binary file, {size} bytes, {kind_of(path, data)}]"}
    if first_line > 1 or line_count > 0:
        lines = text.split("\n")
        if first_line > len(lines):
            where = "" if whole else f" in its first {len(data) >> 20} MiB"
            raise Refused(f"{path} has {len(lines)} lines{where}")
        last = first_line - 1 + line_count if line_count else len(lines)
        text = "\n".join(lines[first_line - 1 : last]) + ("\n" if last < len(lines) else "")
        unread = size - len(data) if last >= len(lines) and not whole else 0
        data = text.encode()
        kept = data[:MAX_FILE_BYTES].decode(errors="ignore")
        left_out = len(data) - len(kept.encode()) + unread
    else:
        kept, left_out = text, 0 if whole else max(1, size - len(text.encode()))
    note = f"\n[{left_out} bytes left out]" if left_out else ""
    return {"output": kept + note, "left_out_bytes": left_out}


def write_file(path: str, content: str) -> Result:
    path, data = file_at(path), content.encode()
    replace(path, data)
    return written(path, data)


def written(path: str, data: bytes) -> Result:
    return {"output": f"[wrote {len(data)} bytes to {path}]"}


def edit_file(path: str, old: str, new: str) -> Result:
    path = file_at(path)
    with open_regular(path) as file:
        data = file.read(MAX_FILE_BYTES + 1)
    data, result = edited(path, data, old, new)
    replace(path, data)
    return result


def edited(path: str, data: bytes, old: str, new: str) -> tuple[bytes, Result]:
    """Return a file's new content, and the result. `old` is also found in a file whose lines end with CR LF."""
    if len(data) > MAX_FILE_BYTES:
        raise Refused(f"{path} is larger than {MAX_FILE_BYTES} bytes; edit it with a command")
    if b"\0" in data or text_of(data, whole=True) is None:
        raise Refused(f"{path} is not UTF-8 text")
    if b"\r\n" in data and "\r" not in old:
        old, new = (re.sub("\r?\n", "\r\n", text) for text in (old, new))
    count = data.count(old.encode())
    if count != 1:
        raise Refused(f"the old text occurs {count} times in {path}; give text that occurs once")
    line = data[: data.index(old.encode())].count(b"\n") + 1
    return data.replace(old.encode(), new.encode()), {"output": f"[edited {path} at line {line}]"}


def replace(path: str, data: bytes) -> None:
    """Write a temporary file and rename it, so that a failure leaves the file as it was."""
    target = os.path.realpath(path)
    if os.path.lexists(target) and not os.path.isfile(target):
        raise Refused(f"{path} is not a regular file")
    os.makedirs(os.path.dirname(target), exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=".envd-", dir=os.path.dirname(target))
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, os.stat(target).st_mode & 0o7777 if os.path.exists(target) else 0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def list_directory(path: str) -> Result:
    path = file_at(path)
    rows: list[str] = []
    count = 0
    with os.scandir(path) as entries:
        for entry in entries:
            count += 1
            if count <= MAX_ENTRIES:
                with suppress(OSError):
                    is_directory = entry.is_dir(follow_symlinks=False)
                    size = entry.stat(follow_symlinks=False).st_size
                    rows.append(f"{entry.name}/" if is_directory else f"{entry.name} ({size} bytes)")
    return listed(rows, count)


def listed(rows: list[str], count: int) -> Result:
    """Show the rows of a directory that has `count` entries."""
    cut = Cut()
    cut.add("\n".join(sorted(rows)).encode(errors="surrogateescape"))
    more = f"\n[{count - MAX_ENTRIES} more entries]" if count > MAX_ENTRIES else ""
    return {"output": (cut.text() or "[empty]") + more, "left_out_bytes": cut.left_out}


class Cut:
    """The first and last bytes of an output."""

    def __init__(self, head: bytes = b"", tail: bytes = b"", left_out: int = 0) -> None:
        self._head, self._tail, self.left_out = bytearray(head), bytearray(tail), left_out

    def add(self, data: bytes) -> None:
        room = HEAD_BYTES - len(self._head)
        self._head += data[:room]
        self._tail += data[max(0, room) :]
        excess = len(self._tail) - TAIL_BYTES
        if excess > 0:
            del self._tail[:excess]
            self.left_out += excess

    def text(self) -> str:
        note = f"\n[{self.left_out} bytes left out]\n".encode() if self.left_out else b""
        return (bytes(self._head) + note + bytes(self._tail)).decode("utf-8", "replace")


# The service


class Shell:
    """A bash that runs one command at a time. One that ended is started again, in its last directory."""

    def __init__(self) -> None:
        self._process: Any = None
        self._directory = os.path.expanduser("~")

    def run(self, command: str, timeout_s: float) -> Result:
        if "\0" in command:
            raise Refused("a command cannot contain the character U+0000")
        self._start_if_ended()
        before = descendants(self._process.pid)
        output, (out, out_end), (status, status_end) = Cut(), os.pipe(), os.pipe()
        ours = f"/proc/{os.getpid()}/fd"
        script = f"eval {shlex.quote(command)} </dev/null >{ours}/{out_end} 2>&1\n"
        script += f"printf '%s\\n' \"$?\" >{ours}/{status_end}\n"
        started = time.monotonic()
        try:
            write_all(self._process.stdin.fileno(), script.encode(), started + timeout_s)
            code = self._await(status, out, output, started + timeout_s)
            timed_out = code is None
            while code is None and time.monotonic() < started + timeout_s + KILL_S:
                for pid in descendants(self._process.pid) - before:
                    with suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                code = self._await(status, out, output, time.monotonic() + 0.05)
            note = self._end() if code is None or self._process.poll() is not None else ""
            (ready,) = struct.unpack("i", fcntl.ioctl(out, termios.FIONREAD, b"\0" * 4))
            while ready > 0 and (data := os.read(out, ready)):
                output.add(data)
                ready -= len(data)
        finally:
            for descriptor in (out_end, status, status_end):
                os.close(descriptor)
            # Programs in the background may write to it later.
            threading.Thread(target=discard, args=(out,), daemon=True).start()
        text = output.text()
        if note:
            text += ("\n" if text and not text.endswith("\n") else "") + note
        result = {"output": text, "left_out_bytes": output.left_out, "timed_out": timed_out}
        return result if timed_out or code is None else {**result, "exit_code": code}

    def _start_if_ended(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with suppress(OSError):
                self._directory = os.readlink(f"/proc/{self._process.pid}/cwd")
            return
        none = subprocess.DEVNULL
        directory = self._directory if os.path.isdir(self._directory) else "/"
        self._process = subprocess.Popen(
            ["/bin/bash", "--norc", "--noprofile"],
            stdin=subprocess.PIPE,
            stdout=none,
            stderr=none,
            cwd=directory,
            start_new_session=True,
        )
        unblock(self._process.stdin)

    def _await(self, status: int, out: int, output: Cut, deadline: float) -> int | None:
        """Return the exit code of the command or of the shell; None at the deadline."""
        ended = os.pidfd_open(self._process.pid)
        try:
            poll = select.poll()
            for descriptor in (status, out, ended):
                poll.register(descriptor, select.POLLIN)
            while (left := deadline - time.monotonic()) > 0:
                ready = {descriptor for descriptor, _ in poll.poll(left * 1000)}
                if out in ready:
                    output.add(os.read(out, 65536))
                elif status in ready:
                    line = os.read(status, 64).split()
                    return int(line[0]) if line and line[0].isdigit() else 255
                elif ended in ready:
                    code: int = self._process.wait()
                    return 128 - code if code < 0 else code
            return None
        finally:
            os.close(ended)

    def _end(self) -> str:
        if self._process.poll() is None:
            with suppress(OSError):
                self._directory = os.readlink(f"/proc/{self._process.pid}/cwd")
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdin.close()
        return f"[the shell ended; the next command starts a new one in {self._directory}, without its variables]"


def descendants(pid: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            children.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    found: set[int] = set()
    left = [pid]
    while left:
        below = children.get(left.pop(), ())
        found.update(below)
        left += below
    return found


def discard(descriptor: int) -> None:
    with open(descriptor, "rb", buffering=0) as pipe:
        while pipe.read(65536):
            pass


def unblock(*pipes: Any) -> None:
    for pipe in pipes:
        os.set_blocking(pipe.fileno(), False)


def write_all(descriptor: int, data: bytes, deadline: float) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    while data:
        if not poll.poll(max(0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        with suppress(BlockingIOError):
            data = data[os.write(descriptor, data) :]


class Server:
    """One MCP server, over its standard input and output."""

    def __init__(self, name: str, command: list[str], timeout_s: float) -> None:
        self._name, self._unread, self._number = name, b"", 0
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=os.path.expanduser("~"),
                start_new_session=True,
            )
        except OSError as error:
            raise Refused(f"MCP server {name} cannot be started: {error}") from error
        self._process: Any = process
        unblock(process.stdin, process.stdout)
        client = {"name": "envd", "version": "1"}
        params = {"protocolVersion": PROTOCOL_VERSION, "capabilities": {}, "clientInfo": client}
        answer = self.request("initialize", params, timeout_s)
        if "result" not in answer:
            raise Refused(f"MCP server {name} refused to start: {json.dumps(answer)[:500]}")
        self._send({"method": "notifications/initialized"}, time.monotonic() + timeout_s)

    def request(self, method: str, params: Result, timeout_s: float) -> Result:
        """Return the response to a request, with `result` or `error`."""
        deadline = time.monotonic() + timeout_s
        self._number += 1
        try:
            self._send({"id": self._number, "method": method, "params": params}, deadline)
            while True:
                message = self._receive(deadline)
                if "method" in message and "id" in message:  # a request of the server
                    refusal = {"code": -32601, "message": "not supported"}
                    self._send({"id": message["id"], "error": refusal}, deadline)
                elif "method" not in message and message.get("id") == self._number:
                    return message
        except TimeoutError:
            raise Refused(f"MCP server {self._name} did not answer within {timeout_s:g} s") from None
        except OSError:
            raise self._ended() from None

    def _send(self, message: Result, deadline: float) -> None:
        data = json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"
        write_all(self._process.stdin.fileno(), data, deadline)

    def _receive(self, deadline: float) -> Result:
        while b"\n" not in self._unread:
            if len(self._unread) > MAX_MESSAGE_BYTES:
                self.close()
                raise Refused(f"MCP server {self._name} sent more than {MAX_MESSAGE_BYTES} bytes, and was ended")
            if not select.select([self._process.stdout], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            data = os.read(self._process.stdout.fileno(), 65536)
            if not data:
                raise self._ended()
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise Refused(f"MCP server {self._name} sent a line that is not a JSON object: {line[:200]!r}")
        return message

    def _ended(self) -> Refused:
        self.close()
        return Refused(f"MCP server {self._name} has ended (exit code {self._process.returncode})")

    def close(self) -> None:
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Service:
    """The shell and the MCP servers of one guest."""

    def __init__(self) -> None:
        self._shell = Shell()
        self._servers: dict[str, Server] = {}
        self.operations: dict[str, Callable[..., Result]] = {
            "shell": self._shell.run,
            "start_server": self.start_server,
            "request": self.request,
        }

    def start_server(self, name: str, command: list[str], timeout_s: float) -> Result:
        if name in self._servers:
            self._servers.pop(name).close()
        self._servers[name] = Server(name, command, timeout_s)
        return {}

    def request(self, server: str, method: str, params: Result, timeout_s: float) -> Result:
        if server not in self._servers:
            names = ", ".join(self._servers) or "none"
            raise Refused(f"no MCP server {server!r} is running; running: {names}")
        return {"message": self._servers[server].request(method, params, timeout_s)}

    def serve(self, listener: socket.socket) -> None:
        while True:
            connection = listener.accept()[0]
            with connection, suppress(OSError, ValueError):
                if credentials(connection)[1] != os.getuid():
                    continue
                request = json.loads(connection.makefile("rb").readline())
                result = performed(self.operations[request.pop("op")], request)
                connection.sendall(json.dumps(result).encode() + b"\n")


def credentials(connection: socket.socket) -> tuple[int, int, int]:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, group = struct.unpack("3i", packed)
    return pid, user, group


def connected() -> socket.socket:
    """Return a connection to the service, which is started if it does not run."""
    address = f"\0envd-toolbox-{os.getuid()}-{os.path.expanduser('~')[-60:]}"
    connection = socket.socket(socket.AF_UNIX)
    with suppress(ConnectionRefusedError):
        connection.connect(address)
        return connection
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    if os.fork() == 0:
        with suppress(BaseException):
            os.setsid()
            connection.close()
            nothing = os.open("/dev/null", os.O_RDWR)
            for number in range(3):
                os.dup2(nothing, number)
            # Here, because connections report the credentials of the process that called it.
            listener.listen(8)
            Service().serve(listener)
        os._exit(1)
    listener.close()
    while True:
        with suppress(ConnectionRefusedError):
            connection.connect(address)
            return connection
        time.sleep(0.005)


def asked(request: Result) -> Result:
    """Return the result of a request to the service."""
    with connected() as connection:
        pid, user, _ = credentials(connection)
        if user != os.getuid():
            raise Refused("the tools of this desktop are not available: another user has their address")
        connection.settimeout(request["timeout_s"] + GRACE_S)
        try:
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer = connection.makefile("rb").readline()
        except TimeoutError:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            raise Refused("the tools of this desktop did not answer and were ended; the next use starts them") from None
        except OSError:
            answer = b""
    if not answer.endswith(b"\n"):
        raise Refused("the tools of this desktop ended during this action, which may have had a part of its effect")
    result: Result = json.loads(answer)
    return result


def performed(operation: Callable[..., Result], request: Result) -> Result:
    try:
        return operation(**request)
    except Refused as refusal:
        return {"error": str(refusal)}
    except OSError as error:
        return {"error": f"{request.get('path', '')}: {error.strerror or error}".removeprefix(": ")}
    except ValueError as error:
        return {"error": str(error)}


def clean(value: object) -> object:
    """Return text without the half characters that stand for bytes of file names that are not UTF-8."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    files: dict[str, Callable[..., Result]] = {
        "read": read_file,
        "write": write_file,
        "edit": edit_file,
        "list": list_directory,
    }
    if request["op"] in files:
        result = performed(files[request.pop("op")], request)
    else:
        result = performed(lambda **_: asked(request), request)
    json.dump({name: clean(value) for name, value in result.items()}, sys.stdout)


if __name__ == "__main__":
    main()
