"""Processes and files of a guest for callers outside, over a port of its loopback. Runs there.

`python3 -I -S -c PROGRAM start NAME` needs the standard library alone. It prints where the runner NAME of its user
listens (JSON: port, secret), and starts it if it does not run. It lives as long as the guest, and a fork of the guest
copies it with its processes.

A connection is one request: a line of JSON with the secret, `op` and its arguments. The answer is lines of JSON:
`{"ok": ...}` or `{"error": {"code", "message"}}`, whose codes are those of Connect. `start`, `connect` and `watch` send
events after it until the caller ends the connection; `{}` shows that the runner lives. A process continues without
its callers. `read` sends a file after its `ok`; `write` reads chunks, each after its length, the last one empty.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import grp
import hmac
import json
import os
import pwd
import queue
import secrets
import shutil
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
from contextlib import closing, suppress
from datetime import UTC, datetime

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, BinaryIO

    Fields = dict[str, Any]

CHUNK_BYTES = 32768
MAX_CHUNK_BYTES = 1 << 20
MAX_ENTRIES = 20000
#: How many events of a process may wait for a caller; then the process waits.
QUEUED_EVENTS = 64
KEEPALIVE_S = 20.0
#: How long the output of a process that ended is read: a program in the background may keep it open.
DRAIN_S = 0.5
POLL_S = 0.2
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Refused(Exception):
    """A request that cannot be performed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def own_account() -> pwd.struct_passwd:
    return pwd.getpwuid(os.getuid())


def path_of(path: str) -> str:
    """Return an absolute path: others are relative to the user's home directory."""
    if "\0" in path:
        raise Refused("invalid_argument", "a path cannot contain the character U+0000")
    home = own_account().pw_dir
    if path == "~" or path.startswith("~/"):
        path = home + path[1:]
    return os.path.normpath(os.path.join(home, path))


# Processes


class Process:
    """A process that was started here, and the callers that follow its output."""

    def __init__(self, config: Fields) -> None:
        self.config = config
        self.followers: list[queue.Queue[Fields]] = []
        self.lock = threading.Lock()
        self.timed_out = False
        account = own_account()
        cwd = path_of(config.get("cwd") or account.pw_dir)
        if not os.path.isdir(cwd):
            raise Refused("invalid_argument", f"cwd '{cwd}' does not exist")
        env = {"PATH": PATH, **os.environ, "HOME": account.pw_dir, "USER": account.pw_name, **config["envs"]}
        size = config.get("pty")
        pipe, terminal, inner = subprocess.PIPE, -1, -1
        options: Fields = {"stdin": pipe if config["stdin"] else subprocess.DEVNULL, "stdout": pipe, "stderr": pipe}
        if size:
            terminal, inner = os.openpty()
            resize(terminal, size)
            env.setdefault("TERM", "xterm-256color")
            options = dict.fromkeys(("stdin", "stdout", "stderr"), inner)
            options["preexec_fn"] = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        try:
            self.popen = subprocess.Popen(
                [config["cmd"], *config["args"]], cwd=cwd, env=env, start_new_session=True, **options
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            if terminal >= 0:
                os.close(terminal)
            raise Refused("invalid_argument", f"{config['cmd']} cannot be started: {error}") from error
        finally:
            if inner >= 0:
                os.close(inner)
        self.terminal = terminal
        self.stdin = terminal if size else self.popen.stdin.fileno() if self.popen.stdin else -1

    def run(self, timeout_s: float, on_end: Callable[[], None]) -> None:
        """Publish what the process prints and how it ends, from threads."""
        if self.terminal >= 0:
            outputs = {"pty": self.terminal}
        else:
            outputs = {name: getattr(self.popen, name).fileno() for name in ("stdout", "stderr")}
        readers = [threading.Thread(target=self._read, args=each, daemon=True) for each in outputs.items()]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._wait, args=(readers, timeout_s, on_end), daemon=True).start()

    def _read(self, name: str, descriptor: int) -> None:
        # EIO: the other end of a terminal is closed.
        with suppress(OSError):
            while data := os.read(descriptor, CHUNK_BYTES):
                self.publish({name: base64.b64encode(data).decode()})

    def _wait(self, readers: list[threading.Thread], timeout_s: float, on_end: Callable[[], None]) -> None:
        try:
            code = self.popen.wait(timeout_s or None)
        except subprocess.TimeoutExpired:
            self.timed_out = True
            self.send(signal.SIGKILL)
            code = self.popen.wait()
        deadline_s = time.monotonic() + DRAIN_S
        for reader in readers:
            while reader.is_alive() and (time.monotonic() < deadline_s or any(each.full() for each in self.followers)):
                reader.join(0.05)
        on_end()
        self.publish({"end": ending(code, timed_out=self.timed_out)})

    def publish(self, event: Fields) -> None:
        with self.lock:
            followers = list(self.followers)
        for follower in followers:
            while follower in self.followers:
                with suppress(queue.Full):
                    follower.put(event, timeout=1.0)
                    break

    def follow(self) -> queue.Queue[Fields]:
        follower: queue.Queue[Fields] = queue.Queue(QUEUED_EVENTS)
        with self.lock:
            self.followers.append(follower)
        return follower

    def leave(self, follower: queue.Queue[Fields]) -> None:
        with self.lock:
            self.followers.remove(follower)

    def send(self, number: int) -> None:
        """Send a signal to the process and those that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def write(self, data: bytes) -> None:
        if self.stdin < 0:
            raise Refused("failed_precondition", "the process was started without stdin, or it is closed")
        try:
            while data:
                data = data[os.write(self.stdin, data) :]
        except OSError as error:
            raise Refused("internal", f"stdin: {error.strerror}") from error

    def close_stdin(self) -> None:
        if self.terminal >= 0:
            self.write(b"\x04")
        elif self.stdin >= 0 and self.popen.stdin:
            self.stdin = -1
            self.popen.stdin.close()


def ending(code: int, *, timed_out: bool) -> Fields:
    """Return how a process ended, as Go reports it."""
    names = {1: "hangup", 2: "interrupt", 9: "killed", 15: "terminated"}
    status = f"exit status {code}" if code >= 0 else f"signal: {names.get(-code, -code)}"
    exit_code = max(code, -1)
    end = {"exitCode": exit_code, "exited": code >= 0, "status": status, "timedOut": timed_out}
    return end if code == 0 else {**end, "error": status}


def resize(terminal: int, size: Fields) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", int(size["rows"]), int(size["cols"]), 0, 0))


class Processes:
    """The processes that run, by id."""

    def __init__(self) -> None:
        self._by_pid: dict[int, Process] = {}

    def start(self, config: Fields, timeout_s: float) -> Iterator[Fields]:
        process = Process(config)
        follower = process.follow()
        pid = process.popen.pid
        self._by_pid[pid] = process
        process.run(timeout_s, lambda: self._ended(pid))
        return self._events(process, follower)

    def connect(self, pid: int | None, tag: str | None) -> Iterator[Fields]:
        process = self.find(pid, tag)
        return self._events(process, process.follow())

    def _events(self, process: Process, follower: queue.Queue[Fields]) -> Iterator[Fields]:
        try:
            yield {"ok": {"pid": process.popen.pid}}
            while True:
                try:
                    event = follower.get(timeout=KEEPALIVE_S)
                except queue.Empty:
                    event = {}
                yield event
                if "end" in event:
                    return
        finally:
            process.leave(follower)

    def _ended(self, pid: int) -> None:
        del self._by_pid[pid]

    def find(self, pid: int | None, tag: str | None) -> Process:
        for number, process in list(self._by_pid.items()):
            if number == pid or (tag is not None and process.config.get("tag") == tag):
                return process
        raise Refused("not_found", f"process with {'pid' if tag is None else 'tag'} {tag or pid} not found")

    def list(self) -> Fields:
        return {"processes": [{"pid": pid, "config": each.config} for pid, each in list(self._by_pid.items())]}

    def signal(self, pid: int | None, tag: str | None, number: int) -> Fields:
        self.find(pid, tag).send(number)
        return {}

    def input(self, pid: int | None, tag: str | None, data: str) -> Fields:
        self.find(pid, tag).write(base64.b64decode(data))
        return {}

    def close_stdin(self, pid: int | None, tag: str | None) -> Fields:
        self.find(pid, tag).close_stdin()
        return {}

    def resize(self, pid: int | None, tag: str | None, size: Fields) -> Fields:
        terminal = self.find(pid, tag).terminal
        if terminal < 0:
            raise Refused("failed_precondition", "the process has no terminal")
        resize(terminal, size)
        return {}


# Files


def entry(path: str) -> Fields:
    """Return what is at a path; a link has the type and size of its target."""
    own = os.lstat(path)
    found = own
    with suppress(OSError):
        found = os.stat(path)
    kind = "DIRECTORY" if stat.S_ISDIR(found.st_mode) else "FILE" if stat.S_ISREG(found.st_mode) else "UNSPECIFIED"
    fields = {
        "name": os.path.basename(path) or "/",
        "type": f"FILE_TYPE_{kind}",
        "path": path,
        "size": found.st_size,
        "mode": stat.S_IMODE(found.st_mode),
        "permissions": stat.filemode(found.st_mode),
        "owner": name_of(pwd.getpwuid, found.st_uid),
        "group": name_of(grp.getgrgid, found.st_gid),
        "modifiedTime": datetime.fromtimestamp(found.st_mtime, UTC).isoformat().replace("+00:00", "Z"),
    }
    if stat.S_ISLNK(own.st_mode):
        return {**fields, "symlinkTarget": os.path.realpath(path), "isSymlink": True}
    return fields


def name_of(find: Callable[[int], Any], number: int) -> str:
    try:
        return str(find(number)[0])
    except KeyError:
        return str(number)


def stat_path(path: str) -> Fields:
    return {"entry": entry(path_of(path))}


def list_directory(path: str, depth: int) -> Fields:
    path = path_of(path)
    if not os.path.isdir(path):
        os.lstat(path)  # raises if there is nothing
        raise Refused("invalid_argument", f"path is not a directory: {path}")
    entries: list[Fields] = []
    for directory, names, files in os.walk(path):
        level = os.path.relpath(directory, path).count("/") + 1 + (directory != path)
        for name in [*names, *files]:
            with suppress(FileNotFoundError):
                entries.append(entry(os.path.join(directory, name)))
        if level >= max(1, depth):
            names.clear()
        if len(entries) > MAX_ENTRIES:
            raise Refused("resource_exhausted", f"{path} has more than {MAX_ENTRIES} entries; list less of it")
    return {"entries": sorted(entries, key=lambda each: each["path"])}


def make_directory(path: str) -> Fields:
    path = path_of(path)
    if os.path.isdir(path):
        raise Refused("already_exists", f"directory already exists: {path}")
    if os.path.lexists(path):
        raise Refused("invalid_argument", f"path already exists but it is not a directory: {path}")
    os.makedirs(path)
    return {"entry": entry(path)}


def move(source: str, destination: str) -> Fields:
    source, destination = path_of(source), path_of(destination)
    os.lstat(source)
    os.makedirs(os.path.dirname(destination), exist_ok=True)
    os.rename(source, destination)
    return {"entry": entry(destination)}


def remove(path: str) -> Fields:
    path = path_of(path)
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)
    return {}


def opened(path: str) -> BinaryIO:
    path = path_of(path)
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise Refused("invalid_argument", f"path '{path}' is {kind}")
    return open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")


def write(path: str, reader: BinaryIO) -> Fields:
    """Write a file from chunks to a temporary one, and rename it: one that does not arrive whole changes nothing."""
    target = os.path.realpath(path_of(path))
    if os.path.lexists(target) and not os.path.isfile(target):
        raise Refused("invalid_argument", f"path '{target}' is not a regular file")
    os.makedirs(os.path.dirname(target), exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=".envd-", dir=os.path.dirname(target))
    try:
        with open(descriptor, "wb") as file:
            while (length := struct.unpack(">I", exactly(reader, 4))[0]) > 0:
                file.write(exactly(reader, min(length, MAX_CHUNK_BYTES)))
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, os.stat(target).st_mode & 0o7777 if os.path.exists(target) else 0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return {"entry": entry(target)}


def exactly(reader: BinaryIO, count: int) -> bytes:
    data = reader.read(count)
    if len(data) != count:
        raise Refused("aborted", "the caller left before the end of the file")
    return data


def snapshot(path: str, *, recursive: bool) -> dict[str, tuple[int, int, int, int]]:
    """Return the state of everything below a directory."""
    found: dict[str, tuple[int, int, int, int]] = {}
    for directory, names, files in os.walk(path):
        for name in [*names, *files][: MAX_ENTRIES - len(found)]:
            with suppress(OSError):
                at = os.path.join(directory, name)
                state = os.lstat(at)
                # A directory changes with what is in it, which has its own events.
                content = (0, 0) if stat.S_ISDIR(state.st_mode) else (state.st_size, state.st_mtime_ns)
                found[os.path.relpath(at, path)] = (state.st_ino, *content, state.st_mode)
        if not recursive:
            break
    return found


def watch(path: str, recursive: bool) -> Iterator[Fields]:
    path = path_of(path)
    if not os.path.isdir(path):
        os.lstat(path)
        raise Refused("invalid_argument", f"path is not a directory: {path}")
    return changes(path, recursive=recursive)


def changes(path: str, *, recursive: bool) -> Iterator[Fields]:
    """Yield what changes below a directory, found by comparing its state again and again."""
    before, sent_s = snapshot(path, recursive=recursive), time.monotonic()
    yield {"ok": {}}
    while True:
        time.sleep(POLL_S)
        now = snapshot(path, recursive=recursive)
        kept = {state[0] for state in now.values()}
        events = [
            ("RENAME" if state[0] in kept else "REMOVE", each) for each, state in before.items() if each not in now
        ]
        for name, state in now.items():
            old = before.get(name)
            if old is None:
                events.append(("CREATE", name))
            if (old is None and state[1]) or (old is not None and old[:3] != state[:3]):
                events.append(("WRITE", name))
            elif old is not None and old[3] != state[3]:
                events.append(("CHMOD", name))
        for kind, name in events:
            yield {"event": {"name": name, "type": f"EVENT_TYPE_{kind}"}}
        if time.monotonic() - sent_s > KEEPALIVE_S:
            sent_s = time.monotonic()
            yield {}
        before = now


def usage() -> Fields:
    """Return the guest's processors, memory and disk."""
    with open("/proc/meminfo", encoding="ascii") as file:
        memory = {line.partition(":")[0]: int(line.split()[1]) << 10 for line in file}
    disk = os.statvfs("/")
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bfree * disk.f_frsize
    count = os.cpu_count() or 1
    return {
        "cpuCount": count,
        "cpuUsedPct": round(100 * os.getloadavg()[0] / count, 2),
        "memTotal": memory["MemTotal"],
        "memUsed": memory["MemTotal"] - memory["MemAvailable"],
        "memCache": memory.get("Cached", 0),
        "diskTotal": total,
        "diskUsed": total - free,
        "user": own_account().pw_name,
    }


def hold() -> Iterator[Fields]:
    """Show again and again that the guest runs."""
    event: Fields = {"ok": {}}
    while True:
        yield event
        time.sleep(KEEPALIVE_S)
        event = {}


# The service


class Runner:
    """Answers requests."""

    def __init__(self) -> None:
        self.secret = secrets.token_hex(16)
        processes = Processes()
        self.operations: dict[str, Callable[..., Any]] = {
            "start": processes.start, "connect": processes.connect, "list": processes.list, "signal": processes.signal,
            "input": processes.input, "close_stdin": processes.close_stdin, "resize": processes.resize,
            "stat": stat_path, "list_directory": list_directory, "make_directory": make_directory, "move": move,
            "remove": remove, "watch": watch, "usage": usage, "hold": hold,
        }  # fmt: skip

    def serve(self, listener: socket.socket) -> None:
        while True:
            connection = listener.accept()[0]
            threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as reader, suppress(OSError, ValueError, KeyError):
            connection.settimeout(60)
            request = json.loads(reader.readline(MAX_CHUNK_BYTES * 2))
            if not hmac.compare_digest(str(request.pop("secret", "")), self.secret):
                return
            try:
                self._perform(connection, reader, request)
            except (Refused, OSError) as error:
                send(connection, {"error": refusal(error)})
            finally:
                # Closing it does not end the thread that waits for the caller.
                connection.shutdown(socket.SHUT_RDWR)

    def _perform(self, connection: socket.socket, reader: BinaryIO, request: Fields) -> None:
        operation = request.pop("op")
        if operation == "read":
            with opened(request["path"]) as file:
                send(connection, {"ok": {"size": os.fstat(file.fileno()).st_size}})
                connection.settimeout(None)
                connection.sendfile(file)
        elif operation == "write":
            send(connection, {"ok": write(request["path"], reader)})
        else:
            result = self.operations[operation](**request)
            if isinstance(result, dict):
                send(connection, {"ok": result})
                return
            connection.settimeout(None)
            left = threading.Event()
            threading.Thread(target=wait_for_end, args=(connection, left), daemon=True).start()
            with closing(result):
                for event in result:
                    if left.is_set():
                        return
                    send(connection, event)


def send(connection: socket.socket, event: Fields) -> None:
    connection.sendall(json.dumps(event).encode(errors="replace") + b"\n")


def wait_for_end(connection: socket.socket, left: threading.Event) -> None:
    """Note that the caller left; what is sent to it fails then."""
    with suppress(OSError):
        while connection.recv(4096):
            pass
    left.set()
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def refusal(error: Exception) -> Fields:
    if isinstance(error, Refused):
        return {"code": error.code, "message": str(error)}
    invalid = (NotADirectoryError, IsADirectoryError)
    codes: list[tuple[Any, str]] = [(FileNotFoundError, "not_found"), (PermissionError, "permission_denied")]
    codes += [(FileExistsError, "already_exists"), (invalid, "invalid_argument")]
    code = next((code for kinds, code in codes if isinstance(error, kinds)), "internal")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        code = "resource_exhausted"
    where, text = getattr(error, "filename", None), getattr(error, "strerror", None) or str(error)
    return {"code": code, "message": f"{where}: {text}" if where else text}


def start(name: str) -> Fields:
    """Return where the runner listens; start it if it does not run."""
    address = f"\0envd-runner-{os.getuid()}-{name}"
    while True:
        with socket.socket(socket.AF_UNIX) as connection, suppress(ConnectionRefusedError):
            connection.connect(address)
            if not is_own(connection):
                raise Refused("permission_denied", "another user has the address of the runner")
            return dict(json.loads(connection.makefile("rb").readline()))
        with suppress(OSError):
            begin(address)
        time.sleep(0.005)


def is_own(connection: socket.socket) -> bool:
    """Return whether the other end is the same user's."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", packed)[1] == os.getuid())


def begin(address: str) -> None:
    """Start the runner. Raises: OSError: another one has the address."""
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        listener.bind(address)
        if os.fork():
            return  # the child listens
        with suppress(BaseException):
            os.setsid()
            os.chdir(own_account().pw_dir)
            nothing = os.open("/dev/null", os.O_RDWR)
            for number in range(3):
                os.dup2(nothing, number)
            port = socket.create_server(("127.0.0.1", 0), backlog=64)
            runner = Runner()
            threading.Thread(target=runner.serve, args=(port,), daemon=True).start()
            described = json.dumps({"port": port.getsockname()[1], "secret": runner.secret}).encode() + b"\n"
            listener.listen(8)
            while True:
                with listener.accept()[0] as connection, suppress(OSError):
                    if is_own(connection):
                        connection.sendall(described)
        os._exit(1)


if __name__ == "__main__":
    print(json.dumps(start(sys.argv[2])))
