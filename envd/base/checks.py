"""What `envd doctor` finds: a `HostCheck` for each thing that it examines, and the checks of programs and directories.

The checks of a room are in that room. Each examines one thing and changes nothing. Standard library alone.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_GIB = 1 << 30
_TOOL_TIMEOUT_S = 10.0
#: A desktop image takes about 1 GiB, its build 4 GiB of scratch space, an episode's overlay about 100 MiB.
_DISK_FAIL_BYTES, _DISK_WARN_BYTES = 1 * _GIB, 8 * _GIB


class Status(Enum):
    """Result of a check."""

    #: No problem.
    OK = "ok"
    #: envd works with limitations.
    WARN = "warn"
    #: envd does not work.
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCheck:
    """One finding."""

    name: str
    status: Status
    detail: str
    """The finding."""
    fix: str = ""
    """The remedy; empty without a problem."""


def ok(name: str, detail: str) -> HostCheck:
    return HostCheck(name=name, status=Status.OK, detail=detail)


def warn(name: str, detail: str, *, fix: str) -> HostCheck:
    return HostCheck(name=name, status=Status.WARN, detail=detail, fix=fix)


def fail(name: str, detail: str, *, fix: str) -> HostCheck:
    return HostCheck(name=name, status=Status.FAIL, detail=detail, fix=fix)


def as_root(command: str) -> str:
    """Return a command that a shell runs as root."""
    return command if os.geteuid() == 0 else f"sudo {command}"


def install_fix(package: str) -> str:
    """Return how to install a package of Debian."""
    return f"`make deps`, or `{as_root(f'apt-get install {package}')}`"


def version_of_program(path: str) -> str:
    """Return the first line that a program prints about its version."""
    run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=True)
    return run.stdout.partition("\n")[0].strip()


def check_tool(
    name: str, *, package: str, purpose: str, needed: bool = True, version_of: Callable[[str], str] = version_of_program
) -> HostCheck:
    """Check that a program is on PATH and prints its version."""
    path = shutil.which(name)
    if path is None:
        status = Status.FAIL if needed else Status.WARN
        return HostCheck(name=name, status=status, detail=f"not found; {purpose}", fix=install_fix(package))
    try:
        return ok(name, f"{version_of(path)} ({path})")
    except (OSError, subprocess.SubprocessError) as error:
        return fail(name, f"{path} does not run: {error}", fix=install_fix(package))


def check_disk(name: str, directory: Path, *, free_bytes: int, writable: bool, reserve_bytes: int = 0) -> HostCheck:
    """Check the free space of a directory, or of its nearest existing parent.

    Args:
        reserve_bytes: Free space without which no machine is forked.
    """
    detail = f"{free_bytes / _GIB:.1f} GiB free in {directory}"
    if not writable:
        return fail(name, f"{directory} is not writable", fix=f"run as its owner, or set {name}")
    if free_bytes < max(_DISK_FAIL_BYTES, reserve_bytes):
        return fail(name, detail, fix=f"free some space, or set {name}")
    if free_bytes < _DISK_WARN_BYTES:
        return warn(name, detail, fix=f"free some space, or set {name}")
    return ok(name, detail)


def check_directory(name: str, directory: Path, *, reserve_bytes: int = 0) -> HostCheck:
    """Check a directory that exists, or that a start creates; see `check_disk`."""
    existing = next(parent for parent in (directory, *directory.parents) if parent.exists())
    free_bytes, writable = shutil.disk_usage(existing).free, os.access(existing, os.W_OK)
    return check_disk(name, existing, free_bytes=free_bytes, writable=writable, reserve_bytes=reserve_bytes)
