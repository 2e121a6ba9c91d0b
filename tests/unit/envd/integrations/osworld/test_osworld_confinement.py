"""The seccomp filter and the control groups of the sandbox, without a sandbox."""

import errno
import fcntl
import os
import platform
import re
import struct
import time
from pathlib import Path

import pytest

from envd.base.sandbox import cgroup, seccomp
from envd.base.sandbox.cgroup import Hierarchy, JobGroups, hierarchies

V1_MOUNTS = "30 24 0:35 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V2_MOUNTS = "26 24 0:24 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def run_filter(code: bytes, number: int, *arguments: int, architecture: int = 0xC000003E) -> int:
    """Interpret a filter as the kernel does; return its verdict."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    instructions = list(struct.iter_unpack("=HBBI", code))
    position = accumulator = 0
    while True:
        operation, jump_true, jump_false, value = instructions[position]
        position += 1
        match operation:
            case 0x20:
                accumulator = struct.unpack_from("<I", data, value)[0]
            case 0x54:
                accumulator &= value
            case 0x06:
                return int(value)
            case 0x15 | 0x35 | 0x45:
                holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}
                position += jump_true if holds[operation] else jump_false
            case _:
                raise AssertionError(f"unknown operation {operation:#x}")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_refuses_exactly_the_listed_calls(machine: str) -> None:
    code = seccomp.program(machine)
    column, architecture, clone, mmap, socket = seccomp._MACHINES[machine]
    denied = {numbers[column] for numbers in seccomp._DENIED.values()} | {435}
    for number in range(500):
        verdict = run_filter(code, number, 1 if number == socket else 0, 1, 0, architecture=architecture)
        expected = 0x50026 if number >= 451 or number == 435 else 0x50001 if number in denied else 0x7FFF0000
        assert verdict == expected, number
    assert run_filter(code, clone, 0x10000011, architecture=architecture) == 0x50001
    assert run_filter(code, clone, 0x003D0F00, architecture=architecture) == 0x7FFF0000, "a thread"
    assert run_filter(code, mmap, 0, 1, 3, 0x21, architecture=architecture) == 0x50001
    assert run_filter(code, mmap, 0, 1, 3, 0x22, architecture=architecture) == 0x7FFF0000
    assert run_filter(code, mmap, 0, 1, 3, 0x01, architecture=architecture) == 0x7FFF0000
    assert run_filter(code, socket, 2, 0x80801, 6, architecture=architecture) == 0x7FFF0000
    assert run_filter(code, socket, 2, 3, 1, architecture=architecture) == 0x50001


def test_calls_of_another_instruction_set_kill_the_process() -> None:
    assert run_filter(seccomp.program("x86_64"), 0, architecture=0x40000003) == 0x80000000
    assert run_filter(seccomp.program("x86_64"), 0x40000000) == 0x50026, "x32"
    with pytest.raises(OSError, match="m68k is not supported"):
        seccomp.program("m68k")
    code = seccomp.program("x86_64", has_sockets=False)
    for family, kind in ((1, 1), (2, 1), (10, 2)):
        assert run_filter(code, 41, family, kind, 0) == 0x50001


HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_are_those_of_linuxs_headers(machine: str) -> None:
    header = Path(HEADERS[machine])
    if not header.exists():
        pytest.skip(f"{header} is not installed")
    lines = re.finditer(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    numbers = {line[1]: int(line[2]) for line in lines}
    column, _, *special = seccomp._MACHINES[machine]
    assert special == [numbers[name] for name in ("clone", "mmap", "socket")]
    for name, both in seccomp._DENIED.items():
        # Headers older than Linux 6.1 lack the newest calls; x86-64's own calls are not in the generic header.
        assert numbers.get(name, both[column]) == both[column], name
    assert platform.machine() in seccomp._MACHINES


def test_groups_are_created_below_the_processs_own_or_the_root() -> None:
    found = list(hierarchies("4:memory:/service/x\n1:name=systemd:/\n0::/\n", V1_MOUNTS + V2_MOUNTS))
    assert found == [Hierarchy("/sys/fs/cgroup/memory/service/x", "memory.limit_in_bytes")]
    found = list(hierarchies("0::/system.slice/envd.service\n", V2_MOUNTS))
    directories = ["/sys/fs/cgroup/system.slice/envd.service", "/sys/fs/cgroup"]
    assert found == [Hierarchy(directory, "memory.max") for directory in directories]
    assert list(hierarchies("", V1_MOUNTS + V2_MOUNTS)) == []
    assert list(hierarchies("0::/x\n", "")) == []


@pytest.mark.parametrize("path", ["/docker/a1", "/"])
def test_groups_in_a_container_are_created_below_the_mount(path: str) -> None:
    mounts = V1_MOUNTS.replace(" / /sys", " /docker/a1 /sys")
    assert [found.directory for found in hierarchies(f"4:memory:{path}\n", mounts)] == ["/sys/fs/cgroup/memory"]
    assert [found.directory for found in hierarchies("0::/\n", V2_MOUNTS)] == ["/sys/fs/cgroup"]


class Kernel:
    """Directories as control groups: which files they have, what is written to them, and which can be removed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written: list[tuple[str, str]] = []
        make, remove = os.mkdir, os.rmdir

        def mkdir(path: str, mode: int = 0o777) -> None:
            make(path, mode)
            directory = Path(path)
            for file, text in (
                ("cgroup.subtree_control", "cpu\n"),
                ("cgroup.events", "populated 0\nfrozen 0\n"),
                ("memory.current", "4096\n"),
                ("tasks", ""),
                ("memory.usage_in_bytes", "4096\n"),
            ):
                (directory / file).write_text(text)

        def rmdir(path: str) -> None:
            directory = Path(path)
            if "populated 1" in (directory / "cgroup.events").read_text():
                raise OSError(errno.EBUSY, "processes")
            if not any(entry.is_dir() for entry in directory.iterdir()):
                for file in directory.iterdir():
                    file.unlink()
            remove(path)

        monkeypatch.setattr(os, "mkdir", mkdir)
        monkeypatch.setattr(os, "rmdir", rmdir)
        monkeypatch.setattr(cgroup, "write_file", lambda path, text: self.written.append((path, text)))


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


def open_groups(tmp_path: Path, limit_file: str = "memory.max") -> JobGroups:
    return JobGroups(Hierarchy(str(tmp_path), limit_file), memory_bytes=1 << 30, cpus=2)


def test_a_group_limits_memory_and_processors(tmp_path: Path, kernel: Kernel) -> None:
    groups = open_groups(tmp_path)
    group = groups.take()
    written = dict(kernel.written)
    assert written[f"{group.path}/memory.max"] == str(1 << 30)
    assert written[f"{group.path}/cpu.max"] == "200000 100000"
    # The groups have these controllers only, and none that they had already is written.
    parent = Path(group.path).parent
    controllers = [text for path, text in kernel.written if path == f"{parent}/cgroup.subtree_control"]
    assert (parent.parent, controllers) == (tmp_path, ["+memory"])
    groups.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("limit_file", "file", "text"),
    [
        ("memory.max", "cgroup.events", "populated 1\n"),
        ("memory.max", "memory.current", f"{1 << 28}\n"),
        ("memory.limit_in_bytes", "tasks", "17\n"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", f"{1 << 28}\n"),
    ],
)
def test_a_group_with_processes_or_memory_of_its_last_job_is_not_used_again(
    limit_file: str, file: str, text: str, tmp_path: Path, kernel: Kernel
) -> None:
    groups = open_groups(tmp_path, limit_file)
    first = groups.take()
    groups.put_back(first)
    limits = len(kernel.written)
    assert groups.take() is first
    assert len(kernel.written) == limits
    Path(first.path, file).write_text(text)
    groups.put_back(first)
    second = groups.take()
    assert second is not first
    assert Path(first.path).exists() == (text == "populated 1\n"), "it is removed when it has no process"
    # Once its processes have ended it is removed too.
    if Path(first.path).exists():
        Path(first.path, file).write_text("populated 0\n")
    third = groups.take()
    assert len({first, second, third}) == 3
    assert not Path(first.path).exists()


def test_a_group_that_cannot_be_limited_is_not_left(
    tmp_path: Path, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = open_groups(tmp_path)

    def refuse(path: str, text: str) -> None:
        raise OSError(errno.EINVAL, f"{text} to {path}")

    monkeypatch.setattr(cgroup, "write_file", refuse)
    with pytest.raises(OSError, match=r"memory\.max"):
        groups.take()
    groups.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("kernel")
def test_the_groups_of_ended_programs_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "_candidates", lambda: [Hierarchy(str(tmp_path), "memory.max")])
    os.mkdir(tmp_path / "system.slice")
    live, ended = open_groups(tmp_path), open_groups(tmp_path)
    groups = [Path(groups.take().path) for groups in (live, ended)]
    ended.unlock()
    # Its last job is still ending.
    events = groups[1] / "cgroup.events"
    events.write_text("populated 1\n")
    cgroup.remove_leftovers()
    assert all(group.exists() for group in groups)
    monkeypatch.setattr(time, "sleep", lambda _: events.write_text("populated 0\n"))
    cgroup.remove_leftovers(patience_s=60.0)
    assert [group.parent.exists() for group in groups] == [True, False]
    live.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["system.slice"]


def test_a_group_that_another_program_removes_before_it_is_locked_is_created_again(
    tmp_path: Path, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock
    removed: list[str] = []

    def remove_first(handle: int, operation: int) -> None:
        if not removed:
            removed.append(os.readlink(f"/proc/self/fd/{handle}"))
            os.rmdir(removed[0])
        lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    groups = open_groups(tmp_path)
    assert str(Path(groups.take().path).parent) not in removed
    groups.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("removes_all", [False, True])
@pytest.mark.usefixtures("kernel")
def test_groups_that_another_program_removes_while_no_job_runs_are_created_again(
    removes_all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = open_groups(tmp_path)
    first, second = groups.take(), groups.take()
    groups.put_back(first)
    groups.put_back(second)
    os.rmdir(first.path)
    if removes_all:
        os.rmdir(second.path)
        os.rmdir(Path(second.path).parent)
    taken = groups.take()
    assert (taken is second) != removes_all
    assert Path(taken.path).exists()
    # The directory is locked, as the first was.
    monkeypatch.setattr(cgroup, "_candidates", lambda: [Hierarchy(str(tmp_path), "memory.max")])
    cgroup.remove_leftovers()
    assert Path(taken.path).exists()
    groups.close()
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_listed_has_no_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_candidates", lambda: [Hierarchy(str(tmp_path), "memory.max")])

    def refuse(path: str) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", refuse)
    cgroup.remove_leftovers()
