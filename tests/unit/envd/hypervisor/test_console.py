"""Detection of a kernel panic in a guest's console output, and the size of its log."""

import os
from pathlib import Path

import pytest

from envd.hypervisor.qemu.machine import MAX_LOG_BYTES, SerialConsole

PANIC = b"[   12.345678] Kernel panic - not syncing: sysrq triggered crash\r\n[   12.345679] CPU: 0 PID: 612\r\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "console.log"


def append(log: Path, output: bytes) -> None:
    with log.open("ab") as file:
        file.write(output)


def test_a_panic_is_found_once_with_its_reason(log: Path) -> None:
    console = SerialConsole(log)
    assert console.panic() == "", "the file does not exist yet"
    append(log, b"Debian GNU/Linux 12 desktop ttyS0\r\n")
    assert console.panic() == ""
    append(log, PANIC)
    assert console.panic() == "sysrq triggered crash"
    assert console.panic() == ""


def test_a_panic_is_found_when_split_between_reads_and_followed_by_much_output(log: Path) -> None:
    console = SerialConsole(log)
    append(log, PANIC[:40])
    console.panic()
    append(log, PANIC[40:])
    assert console.panic() == "sysrq triggered crash"
    fresh = SerialConsole(log)
    append(log, b"x" * (60 << 10))
    assert fresh.panic() == "sysrq triggered crash"


def test_at_most_the_last_64_kib_of_output_are_read(log: Path) -> None:
    console = SerialConsole(log)
    append(log, PANIC + b"\0\xff\n" * (1 << 20))
    assert console.panic() == ""


def test_a_panic_reason_is_bounded_and_printable(log: Path) -> None:
    append(log, b"Kernel panic - not syncing: \xff" + b"y" * 10_000 + b"\n")
    reason = SerialConsole(log).panic()
    assert len(reason) == 120
    assert reason.startswith("\N{REPLACEMENT CHARACTER}yyy")
    append(log, b"Kernel panic - not syncing: \n")
    assert SerialConsole(log).panic() == "no reason given"


def test_a_large_log_is_emptied_and_its_panic_is_still_reported(log: Path) -> None:
    console = SerialConsole(log)
    append(log, b"x" * MAX_LOG_BYTES)
    console.trim()
    assert log.stat().st_size == MAX_LOG_BYTES
    append(log, PANIC)
    console.trim()
    assert log.stat().st_size == 0
    assert console.panic() == "sysrq triggered crash"
    assert console.panic() == ""
    append(log, PANIC.replace(b"sysrq", b"once more"))
    assert console.panic() == "once more triggered crash"


def test_a_log_replaced_by_a_link_or_a_pipe_is_neither_read_nor_emptied(log: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    append(other, PANIC + b"x" * MAX_LOG_BYTES + PANIC)
    for replace in (log.symlink_to, log.hardlink_to):
        replace(other)
        console = SerialConsole(log)
        console.trim()
        assert console.panic() == ""
        log.unlink()
    os.mkfifo(log)
    SerialConsole(log).trim()
    assert SerialConsole(log).panic() == ""
    assert other.stat().st_size == MAX_LOG_BYTES + 2 * len(PANIC)


def test_the_last_lines_are_printable(log: Path) -> None:
    assert SerialConsole(log).tail() == ""
    append(log, b"x" * 5000 + b"\n" + b"".join(b"line %d\x1b[31m\r\n\r\n" % number for number in range(9)) + b"\xff\n")
    lines = [*(f"line {number}[31m" for number in range(5, 9)), "\N{REPLACEMENT CHARACTER}"]
    assert SerialConsole(log).tail() == " | ".join(lines)
