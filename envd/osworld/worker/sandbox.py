"""A place from which evaluator code reaches one guest and nothing else of the host. Linux and standard library alone.

Namespaces of its own for processes, mounts, network and IPC; a root file system in memory that holds the system's
libraries and OSWorld's environment, read-only, and a directory to work in; of all the network a loopback whose listener
leads to the guest; no capabilities, no new privileges, and bounds on memory, processor, files and processes.

Root needs no more than that. Anybody else needs a kernel that lets users make namespaces; whoever can make none gets
no sandbox, and nothing is run without one.
"""

import ctypes
import fcntl
import os
import platform
import resource
import shutil
import socket
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

#: Flags of unshare(2) and mount(2), and requests of prctl(2) and netdevice(7), from Linux's headers.
_NEW_USER, _NEW_NET, _NEW_PID, _NEW_NS, _NEW_IPC, _NEW_UTS = (
    0x10000000, 0x40000000, 0x20000000, 0x00020000, 0x08000000, 0x04000000,
)  # fmt: skip
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_SIOCSIFFLAGS, _IFF_UP_RUNNING = 0x8914, 0x41
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP = 1, 38, 24
_CAPABILITY_VERSION_3 = 0x20080522
#: glibc has no function for these.
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}

#: Where code works inside, and where it finds the files that it is given.
WORK = "/work"
CACHE = f"{WORK}/cache"

_SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/sbin")
_SETTINGS = ("/etc/ld.so.cache", "/etc/fonts", "/etc/mime.types", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
#: Users nobody has: each evaluation is one of its own, so that none may signal or read another.
_FIRST_UID, _UID_COUNT = 0x70000000, 0x10000

_libc = ctypes.CDLL(None, use_errno=True)


class SandboxError(Exception):
    """No sandbox can be made on this host, or one broke."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What code in a sandbox may use."""

    time_s: float
    """Wall clock; also, rounded up, of each process's processor."""
    memory_bytes: int
    """Of each process's data, and of all files."""
    process_count: int = 128
    """Processes and threads."""


def separate(number: int) -> None:
    """Take this process out of the host's namespaces, with all that it will start; its next child is number one there.

    Raises:
        SandboxError: The kernel does not let this user.
    """
    flags = _NEW_NET | _NEW_PID | _NEW_NS | _NEW_IPC | _NEW_UTS
    if os.geteuid() != 0:
        user, group = os.geteuid(), os.getegid()
        _call("unshare", flags | _NEW_USER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            _write(f"/proc/self/{name}", text)
    else:
        _call("unshare", flags)
    socket.sethostname(f"evaluation-{number}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP_RUNNING))


def enclose(number: int, *, visible: Iterable[str], files: Mapping[str, str], limits: Limits) -> None:
    """Leave the host's files behind, and every right: after this, code of any origin may run here.

    Args:
        number: Of the evaluation; decides its user.
        visible: Directories besides the system's that stay, where they are and read-only.
        files: The host's files that are wanted in `CACHE`, by their names there: copies, so that nothing is shared.
        limits: What may be used.

    Raises:
        SandboxError: The kernel refused a step.
    """
    is_root_outside = _is_root_outside()
    user = _FIRST_UID + number % _UID_COUNT if is_root_outside else 0
    _build_root(user, visible=visible, files=files, limits=limits)
    os.chdir(WORK)
    os.environ.clear()
    os.environ.update(HOME=WORK, TMPDIR=WORK, PATH="/usr/local/bin:/usr/bin:/bin", LANG="C.UTF-8", USER="evaluation")
    _limit(limits)
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # those beyond the kernel's last are refused
    if is_root_outside:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _drop_capabilities()
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Be killed when the parent ends, whatever ends it."""
    _call("prctl", _PR_SET_PDEATHSIG, 9, 0, 0, 0)


def _is_root_outside() -> bool:
    """Whether this user is root of the host, not of a namespace of its own making."""
    with open("/proc/self/uid_map") as lines:
        return lines.read().split()[:2] == ["0", "0"]


def _build_root(user: int, *, visible: Iterable[str], files: Mapping[str, str], limits: Limits) -> None:
    """Make a root file system in memory out of parts of the host's, and move into it."""
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    root = "/tmp"  # noqa: S108 - a mount point, in a namespace that nobody else sees
    sources = [path for path in (*_SYSTEM, *_SETTINGS, *_DEVICES, *_outside_system(visible)) if os.path.exists(path)]
    handles = {path: os.open(path, os.O_PATH) for path in sources if not os.path.islink(path)}
    wanted = {name: os.open(path, os.O_RDONLY) for name, path in files.items()}
    links = {path: os.readlink(path) for path in sources if os.path.islink(path)}
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode=0755,size={limits.memory_bytes}")
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
    for directory, _, names in os.walk(root + WORK):
        for path in (directory, *(f"{directory}/{name}" for name in names)):
            os.chown(path, user, user)
    # Where /proc is masked, as in some containers, there is none: nothing here needs it.
    _libc.mount(b"proc", f"{root}/proc".encode(), b"proc", ctypes.c_ulong(_MS_NOSUID | _MS_NODEV), None)
    os.chdir(root)
    # Both roots on one spot: the old one is then what `.` still means, and goes.
    _syscall(_PIVOT_ROOT, b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/")


def _outside_system(visible: Iterable[str]) -> list[str]:
    """Return the directories that are in no other one of the list or the system's, after links are followed."""
    found: list[str] = []
    for path in sorted({os.path.realpath(path) for path in visible}):
        if not any(path == other or path.startswith(f"{other}/") for other in (*_SYSTEM, *found)):
            found.append(path)
    return found


def _bind(handle: int, target: str, *, is_device: bool) -> None:
    """Show what an open handle means at `target`, too; read-only, if it is no device."""
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
        # What restricts a mount already may not be left out when it is mounted anew.
        kept = os.statvfs(target).f_flag & (_MS_NOSUID | _MS_NODEV | 8 | 1024 | 2048)
        _mount("none", target, "", _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | kept)


def _limit(limits: Limits) -> None:
    cpu_s = max(1, int(limits.time_s) + 1)
    for kind, bound in (
        (resource.RLIMIT_CPU, cpu_s),
        # Not the address space: a browser's engine sets aside terabytes of it and uses little.
        (resource.RLIMIT_DATA, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.memory_bytes),
        (resource.RLIMIT_NPROC, limits.process_count),
        (resource.RLIMIT_NOFILE, 512),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        allowed = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
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
        raise SandboxError(f"no sandbox is known for {machine}")
    if _libc.syscall(ctypes.c_long(numbers[machine]), *arguments) != 0:
        _fail(f"system call {numbers[machine]}")


def _fail(what: str) -> None:
    number = ctypes.get_errno()
    raise SandboxError(f"no sandbox: {what}: {os.strerror(number)} ({sys.platform}, user {os.geteuid()})")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
