"""The process that owns the namespaces of a daemon's containers: user ids, mounts and process ids.

A program of the standard library alone, run by `namespace.Namespace`. It is the first process of its process id
namespace. When the daemon ends, however it ends, standard input closes, this process exits, and the kernel ends all
containers and removes all their mounts.

Requests are lines of JSON on standard input, answers and exits lines of JSON on standard output. Each request runs in a
process of its own, so none waits for another.
"""

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

#: Flags of unshare(2), mount(2), umount2(2) and prctl(2), from Linux's headers.
_NEW_USER, _NEW_PID, _NEW_NS = 0x10000000, 0x20000000, 0x00020000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH: Final = 2
_PR_SET_PDEATHSIG: Final = 1
#: Where the namespace has the host's directories, which the containers' root may be unable to reach by their paths.
DIRECTORIES: Final = "/mnt"
#: An answer has at most 4096 bytes, which are written as a whole, so that no other process's gets between (PIPE_BUF). A
#: character takes at most 6 of them.
_MAX_MESSAGE_CHARS: Final = 600
#: A killed process needs time to free its memory.
_KILL_TIMEOUT_S: Final = 5.0
_REMOVAL_TIMEOUT_S: Final = 600.0
_ENOENT, _EINVAL = 2, 22

_libc = ctypes.CDLL(None, use_errno=True)


def main(arguments: Sequence[str]) -> None:
    """Serve; `arguments` are NAME=DIRECTORY of the host's directories that requests use."""
    die_with_parent()
    directories = dict(argument.split("=", 1) for argument in arguments)
    is_root = os.geteuid() == 0
    if is_root:
        # While this process can still reach all of the host's directories.
        check(_libc.unshare(_NEW_NS), "unshare mounts")
        make_private()
        bind(directories)
    check(_libc.unshare(_NEW_USER), "unshare the user namespace")
    answer({"event": "unshared"})
    if not os.read(0, 1):  # until the daemon has written the maps of user ids
        return
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    die_with_parent()  # a change of the user clears it
    check(_libc.unshare(_NEW_NS | _NEW_PID), "unshare mounts and process ids")
    if child := os.fork():
        os.waitpid(child, 0)
        return
    die_with_parent()
    make_private()
    if not is_root:
        bind(directories)
    mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    answer({"event": "ready"})
    serve()


def make_private() -> None:
    mount(None, "/", None, _MS_REC | _MS_PRIVATE)


def bind(directories: Mapping[str, str]) -> None:
    handles = {name: os.open(path, os.O_PATH) for name, path in directories.items()}
    mount("tmpfs", DIRECTORIES, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755,size=64k")
    for name, handle in handles.items():
        target = f"{DIRECTORIES}/{name}"
        Path(target).mkdir()
        mount(f"/proc/self/fd/{handle}", target, None, _MS_BIND | _MS_REC)
        os.close(handle)


def serve() -> None:
    """Run requests until standard input ends; then all processes of the namespace end with this one."""
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    unread = b""
    requests: dict[int, Mapping[str, Any]] = {}
    while True:
        readable, _, _ = select.select([0, woken], [], [])
        if woken in readable:
            with suppress(BlockingIOError):
                os.read(woken, 4096)
            reap(requests)
        if 0 in readable:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                return
            *lines, unread = (unread + chunk).split(b"\n")
            for line in lines:
                request = json.loads(line)
                requests[start(request)] = request


def reap(requests: dict[int, Mapping[str, Any]]) -> None:
    """Report every process that has ended: first processes of containers, and those of requests.

    Args:
        requests: The requests that run, by process. One that was killed, for lack of memory say, has not answered.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        code = os.waitstatus_to_exitcode(status)
        answer({"event": "exit", "pid": pid, "status": code})
        request = requests.pop(pid, None)
        if request and code:
            error = f"the process of the request {request['do']} ended with {code}"
            answer({"event": "answer", "id": request["id"], "error": error})


def start(request: Mapping[str, Any]) -> int:
    """Run a request in a process of its own, and return that."""
    if child := os.fork():
        return child
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        result = {"result": _REQUESTS[request["do"]](**request["arguments"])}
    except BaseException as error:
        known = isinstance(error, OSError | RuntimeError | subprocess.TimeoutExpired)
        result = {"error": (str(error) if known else traceback.format_exc())[-_MAX_MESSAGE_CHARS:]}
    answer({"event": "answer", "id": request["id"], **result})
    os._exit(0)


# Requests


def run(*, argv: Sequence[str], timeout_s: float) -> None:
    """Run a program to its end."""
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    if done.returncode:
        text = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise RuntimeError(f"{argv[0]}: exit code {done.returncode}: {text[-_MAX_MESSAGE_CHARS:] or 'no message'}")


def try_overlay(*, directory: str) -> None:
    """Mount an overlay in a directory, and remove it again. Raises: OSError: the kernel or file system cannot."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        Path(scratch, "lower").mkdir()
        mount_overlay(Path(scratch), lower=f"{scratch}/lower")
        try:
            Path(scratch, "root/written").touch()
        finally:
            unmount(f"{scratch}/root")


def launch(*, runtime: str, state: str, bundle: str, name: str, lower: str, join: Sequence[str]) -> int:
    """Mount a container's file system and start it; return its first process.

    Args:
        lower: Directories under the container's own, of which the first is the highest, as overlayfs takes them.
        join: Files `cgroup.procs` of the control groups to enter.
    """
    root = Path(bundle)
    mount_overlay(root, lower=lower)
    for group in join:
        Path(group).write_text("0")
    command = [runtime, "--root", state, "run", "--detach", "--no-new-keyring", "--pid-file", f"{root}/pid"]
    with (root / "runtime.log").open("ab") as log:
        done = subprocess.run(
            # The kernel allows a user 200 keys (kernel.keys.maxkeys), and seccomp refuses keyctl to guests anyway.
            [*command, "--bundle", bundle, name],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=False,
        )
    if done.returncode:
        text = (root / "runtime.log").read_text(errors="replace").strip()
        raise RuntimeError(f"{runtime}: exit code {done.returncode}: {text[-_MAX_MESSAGE_CHARS:] or 'no message'}")
    return int((root / "pid").read_text())


def stop(*, runtime: str, state: str, bundle: str, name: str, pid: int | None) -> None:
    """End a container's processes and unmount its file system, whose files stay. Idempotent.

    Args:
        pid: Its first process, if that has not ended; without it the runtime polls for the end of the processes, which
            takes a tenth of a second.
    """
    if pid is not None and is_first(pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        deadline_s = time.monotonic() + _KILL_TIMEOUT_S
        while is_first(pid) and time.monotonic() < deadline_s:
            time.sleep(0.002)
    done = subprocess.run(
        [runtime, "--root", state, "delete", "--force", name],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{runtime}: exit code {done.returncode}: {done.stderr.decode(errors='replace')[-500:]}")
    if _libc.umount2(f"{bundle}/root".encode(), _MNT_DETACH) and (number := ctypes.get_errno()) not in {
        _ENOENT,
        _EINVAL,
    }:
        raise OSError(number, f"unmount {bundle}/root: {os.strerror(number)}")


def is_first(pid: int) -> bool:
    """Return whether a process is the first of a container, and has not ended: its number may be another's by now."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return fields.get("NSpid", "").split()[1:] == ["1"] and not fields["State"].strip().startswith(("Z", "X"))


def empty(*, path: str) -> None:
    """Remove what is in a directory, if that exists. The directory itself is the daemon's."""
    with suppress(FileNotFoundError):
        entries = [entry.path for entry in os.scandir(path)]
        # Not shutil.rmtree, which fails at directories that a guest has nested a thousand times.
        run(argv=["rm", "-rf", "--", *entries], timeout_s=_REMOVAL_TIMEOUT_S)


def keep(*, source: str, target: str) -> None:
    """Move a directory, also to another file system."""
    try:
        os.rename(source, target)
    except OSError:
        run(argv=["cp", "-a", source, target], timeout_s=600)
        shutil.rmtree(source)


def disk_usage(*, path: str) -> int:
    """Return the disk space in bytes that a directory uses; what disappears meanwhile does not count."""
    # Not os.walk, which sees neither what is nested a thousand times nor what has a path of more than 4096 bytes.
    done = subprocess.run(["du", "-s", "-k", "--", path], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    kib, _, _ = done.stdout.partition(b"\t")
    return int(kib or 0) << 10


_REQUESTS: Mapping[str, Callable[..., Any]] = {
    "run": run,
    "try_overlay": try_overlay,
    "launch": launch,
    "stop": stop,
    "empty": empty,
    "keep": keep,
    "disk_usage": disk_usage,
}

# System calls


def answer(message: Mapping[str, Any]) -> None:
    os.write(1, json.dumps(message, ensure_ascii=False).encode(errors="replace") + b"\n")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    def encoded(text: str | None) -> bytes | None:
        return None if text is None else text.encode()

    status = _libc.mount(encoded(source), target.encode(), encoded(kind), ctypes.c_ulong(flags), options.encode())
    check(status, f"mount {kind or 'privately'} on {target}")


def mount_overlay(directory: Path, *, lower: str) -> None:
    """Mount an overlay at `root` in a directory, whose own files are in `upper`."""
    for name in ("upper", "work", "root"):
        (directory / name).mkdir()
    options = f"lowerdir={lower},upperdir={directory}/upper,workdir={directory}/work,userxattr"
    mount("overlay", f"{directory}/root", "overlay", _MS_NODEV, options)


def unmount(path: str) -> None:
    """Unmount a file system, if one is mounted there."""
    if _libc.umount2(path.encode(), _MNT_DETACH) and (number := ctypes.get_errno()) not in {_ENOENT, _EINVAL}:
        raise OSError(number, f"unmount {path}: {os.strerror(number)}")


def die_with_parent() -> None:
    check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "prctl")


def check(status: int, what: str) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main(sys.argv[1:])
