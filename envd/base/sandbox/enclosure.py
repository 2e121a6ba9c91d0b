"""A sandbox from which untrusted code reaches nothing of the host. Linux and standard library only.

It has its own namespaces for processes, mounts, network and IPC; a root file system in memory with the system's
libraries and the Python environment, read-only, and a working directory; a loopback network, or none for code that can
create no sockets; no capabilities, no new privileges, a seccomp filter, and limits on memory, CPU time, files and
processes.

Root can always create it. Other users need a kernel that lets them create namespaces.
"""

import ctypes
import fcntl
import os
import platform
import resource
import select
import shutil
import socket
import struct
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from envd.base.sandbox import seccomp

#: Flags of unshare(2) and mount(2), requests of prctl(2) and netdevice(7), from Linux's headers.
_NEW_USER, _NEW_NET, _NEW_PID, _NEW_NS, _NEW_IPC, _NEW_UTS = (
    0x10000000, 0x40000000, 0x20000000, 0x00020000, 0x08000000, 0x04000000,
)  # fmt: skip
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_SIOCSIFFLAGS, _IFF_UP_RUNNING = 0x8914, 0x41
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP = 1, 38, 24
_CAPABILITY_VERSION_3 = 0x20080522
#: System calls without a glibc function.
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}

#: The working directory inside, and the directory of the given files.
WORK = "/work"
CACHE = f"{WORK}/cache"

_SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/sbin")
_SETTINGS = ("/etc/ld.so.cache", "/etc/fonts", "/etc/mime.types", "/etc/localtime")
#: Not /dev/zero: a shared mapping of it is memory that no resource limit counts.
_DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")
#: The usual limit of a main thread. Stacks do not count as data.
_STACK_BYTES = 8 << 20
#: User ids that the host does not use. Each evaluation has its own, so that none can signal or read another.
_FIRST_UID, _UID_COUNT = 0x70000000, 0x10000

_libc = ctypes.CDLL(None, use_errno=True)


class EnclosureError(Exception):
    """A sandbox cannot be created on this host, or one failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resource limits of the code in a sandbox."""

    time_s: float | None
    """Wall-clock time; rounded up, also the CPU time of each process. None if the caller limits both."""
    memory_bytes: int
    """Limit of the data of each process, and of all files together."""
    process_count: int = 128
    """Processes and threads."""
    descriptor_count: int = 512
    """Open files and sockets of each process."""
    file_count: int = 1 << 16
    """Files and directories. The kernel holds about 1 KiB of memory for each."""
    has_sockets: bool = True
    """Whether Unix, TCP and UDP sockets can be created."""


def leave_network() -> bool:
    """Move root's process and its future children into a network with nothing but an interface that is down.

    Returns False, and does nothing, for other users.

    Sandboxes that can create no sockets may share it. Each new network takes locks of the whole host, one kernel thread
    removes them all, and it is a tenth of the processor time of a judge's job.

    Raises:
        SandboxError: The kernel does not allow it.
    """
    if os.geteuid() != 0:
        return False
    _call("unshare", _NEW_NET)
    return True


def separate(number: int, *, shares_network: bool = False) -> None:
    """Move this process and its future children into new namespaces; its next child is process 1 there.

    Args:
        number: Of the evaluation; decides the host name.
        shares_network: Stay in the network of `leave_network`. Else there is a new one with a loopback interface.

    Raises:
        SandboxError: The kernel does not allow it for this user.
    """
    flags = _NEW_PID | _NEW_NS | _NEW_IPC | _NEW_UTS | (0 if shares_network else _NEW_NET)
    if os.geteuid() != 0:
        user, group = os.geteuid(), os.getegid()
        _call("unshare", flags | _NEW_USER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            _write(f"/proc/self/{name}", text)
    else:
        _call("unshare", flags)
    socket.sethostname(f"evaluation-{number}")
    if shares_network:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP_RUNNING))


def enclose(number: int, *, visible: Iterable[str], files: Mapping[str, str], limits: Limits, alive: int) -> None:
    """Give up the host's files and all privileges. Afterwards, untrusted code may run in this process.

    Args:
        number: Of the evaluation; decides its user id.
        visible: Directories to keep besides the system's, at their paths and read-only.
        files: Files of the host to copy into `CACHE`, by their names there. Copies, so that nothing is shared.
        alive: Read end of a pipe whose write end only the parent holds. This process ends when the parent does.

    Raises:
        SandboxError: The kernel refused a step.
    """
    die_with_parent()
    is_root_outside = _is_root_outside()
    # If the host runs out of memory, the kernel kills evaluations first. /proc may be read-only in a container.
    with suppress(OSError):
        _write("/proc/self/oom_score_adj", "1000")
    user = _FIRST_UID + number % _UID_COUNT if is_root_outside else 0
    _build_root(user, visible=visible, files=files, limits=limits)
    os.chdir(WORK)
    os.environ.clear()
    os.environ.update(HOME=WORK, TMPDIR=WORK, PATH="/usr/local/bin:/usr/bin:/bin", LANG="C.UTF-8", USER="evaluation")
    _limit(limits)
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # the kernel refuses those it does not have
    if is_root_outside:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _drop_capabilities()
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # Changing the user clears the parent-death signal. The parent may have ended before it is set again.
    die_with_parent()
    if select.select([alive], [], [], 0)[0]:
        os._exit(1)
    os.close(alive)
    try:
        seccomp.install(has_sockets=limits.has_sockets)
    except OSError as error:
        raise EnclosureError(f"sandbox: {error}") from error


def problem() -> str:
    """Return why this process can create no sandbox; empty if it can. A fork tries it: call it with one thread only."""
    report, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            alive, _ = os.pipe()
            separate(0)
            if os.fork() == 0:
                limits = Limits(time_s=1.0, memory_bytes=1 << 30)
                enclose(0, visible=[], files={}, limits=limits, alive=alive)
            elif status := os.wait()[1]:
                os.write(into, f"its process ended with status {os.waitstatus_to_exitcode(status)}".encode())
        except BaseException as error:
            os.write(into, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(into)
    with open(report, encoding="utf-8") as text:
        found = text.read()
    status = os.waitpid(child, 0)[1]
    return found if status == 0 else f"the attempt ended with status {os.waitstatus_to_exitcode(status)}"


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, for any reason."""
    _call("prctl", _PR_SET_PDEATHSIG, 9, 0, 0, 0)


def _is_root_outside() -> bool:
    """Whether this user is root on the host, not only in its own namespace."""
    with open("/proc/self/uid_map") as lines:
        return lines.read().split()[:2] == ["0", "0"]


def _build_root(user: int, *, visible: Iterable[str], files: Mapping[str, str], limits: Limits) -> None:
    """Build a root file system in memory from parts of the host's, and make it the root."""
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    root = "/tmp"  # noqa: S108 - a mount point in a private namespace
    sources = [path for path in (*_SYSTEM, *_SETTINGS, *_DEVICES, *_outside_system(visible)) if os.path.exists(path)]
    handles = {path: os.open(path, os.O_PATH) for path in sources if not os.path.islink(path)}
    wanted = {name: os.open(path, os.O_RDONLY) for name, path in files.items()}
    links = {path: os.readlink(path) for path in sources if os.path.islink(path)}
    options = f"mode=0755,size={limits.memory_bytes},nr_inodes={limits.file_count}"
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    for path, target in links.items():
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(target, root + path)
    for path, handle in handles.items():
        _bind(handle, root + path, is_device=path in _DEVICES)
    for path, mode in (("/proc", 0o555), ("/tmp", 0o1777), ("/dev/shm", 0o1777), (CACHE, 0o755)):  # noqa: S108
        os.makedirs(root + path, exist_ok=True)
        os.chmod(root + path, mode)
    os.makedirs(root + "/etc", exist_ok=True)
    _write(root + "/etc/hosts", "127.0.0.1 localhost\n")
    _write(root + "/etc/passwd", f"evaluation:x:{user}:{user}::{WORK}:/bin/false\n")
    for name, handle in wanted.items():
        os.makedirs(os.path.dirname(f"{root}{CACHE}/{name}"), exist_ok=True)
        with open(handle, "rb") as original, open(f"{root}{CACHE}/{name}", "wb") as copy:
            shutil.copyfileobj(original, copy)
    os.chown(root + WORK, user, user)
    # Not all of WORK: a visible directory may be below it.
    for directory, _, names in os.walk(root + CACHE):
        for path in (directory, *(f"{directory}/{name}" for name in names)):
            os.chown(path, user, user)
    # Fails if /proc is masked, as in some containers. Nothing here needs it.
    _libc.mount(b"proc", f"{root}/proc".encode(), b"proc", ctypes.c_ulong(_MS_NOSUID | _MS_NODEV), None)
    os.chdir(root)
    # Stacks both roots on one mount point; `.` is then still the old one, which is unmounted.
    _syscall(_PIVOT_ROOT, b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/")


def _outside_system(visible: Iterable[str]) -> list[str]:
    """Return the resolved directories that are not inside another one of the list or of the system's."""
    found: list[str] = []
    for path in sorted({os.path.realpath(path) for path in visible}):
        if not any(path == other or path.startswith(f"{other}/") for other in (*_SYSTEM, *found)):
            found.append(path)
    return found


def _bind(handle: int, target: str, *, is_device: bool) -> None:
    """Bind-mount an open handle at `target`; read-only, except for devices."""
    source = f"/proc/self/fd/{handle}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w"):
            pass
    _mount(source, target, "", _MS_BIND | _MS_REC)
    os.close(handle)
    if not is_device:
        # A remount must keep the restrictions that the mount already has.
        kept = os.statvfs(target).f_flag & (_MS_NOSUID | _MS_NODEV | 8 | 1024 | 2048)
        _mount("none", target, "", _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | kept)


def _limit(limits: Limits) -> None:
    for kind, bound in (
        (resource.RLIMIT_CPU, resource.RLIM_INFINITY if limits.time_s is None else max(1, int(limits.time_s) + 1)),
        # Not RLIMIT_AS: a browser engine reserves terabytes of address space and uses little.
        (resource.RLIMIT_DATA, limits.memory_bytes),
        (resource.RLIMIT_STACK, _STACK_BYTES),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_FSIZE, limits.memory_bytes),
        (resource.RLIMIT_NPROC, limits.process_count),
        (resource.RLIMIT_NOFILE, limits.descriptor_count),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        allowed = min((bound, hard), key=lambda limit: (limit == resource.RLIM_INFINITY, limit))
        resource.setrlimit(kind, (allowed, allowed))


def _drop_capabilities() -> None:
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _syscall(_CAPSET, header, bytes(24))


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = (source.encode(), target.encode(), kind.encode() or None)
    _call("mount", *texts, ctypes.c_ulong(flags), options.encode() or None)


def _call(function: str, *arguments: object) -> None:
    if getattr(_libc, function)(*arguments) != 0:
        _fail(function)


def _syscall(numbers: dict[str, int], *arguments: bytes) -> None:
    machine = platform.machine()
    if machine not in numbers:
        raise EnclosureError(f"sandbox: machine type {machine} is not supported")
    if _libc.syscall(ctypes.c_long(numbers[machine]), *arguments) != 0:
        _fail(f"system call {numbers[machine]}")


def _fail(what: str) -> None:
    number = ctypes.get_errno()
    raise EnclosureError(f"sandbox: {what} failed: {os.strerror(number)} ({sys.platform}, user {os.geteuid()})")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
