"""The seccomp filter and the control groups of the sandbox, without a sandbox."""

import os
import platform
import re
import struct
from pathlib import Path

import pytest

from envd.base.sandbox import seccomp
from envd.base.sandbox.cgroup import ControlGroup, Hierarchy, hierarchies

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


def test_a_group_limits_memory_and_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, str] = {}
    monkeypatch.setattr(ControlGroup, "_write", lambda self, file, text: written.update({file: text}))
    monkeypatch.setattr(ControlGroup, "_open", lambda self, file: os.open(os.devnull, os.O_WRONLY))
    group = ControlGroup(Hierarchy(str(tmp_path), "memory.max"), memory_bytes=1 << 30, cpus=2)
    assert (written["memory.max"], written["cpu.max"]) == (str(1 << 30), "200000 100000")
    group.remove()
    assert not list(tmp_path.iterdir())
