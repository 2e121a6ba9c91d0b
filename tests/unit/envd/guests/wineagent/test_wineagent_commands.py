"""The Wine guest's agent, driven by the host's own client of guest agents."""

import io
import json
import os
import pwd
import time
from typing import Any

import pytest

from envd.base.errors import GuestError, GuestUnresponsive
from envd.guests.wineagent.commands import write_all

from .conftest import World

ANSWER = "C:\\Users\\Public\\Documents\\answer.txt"


async def test_a_file_is_written_and_read_by_its_windows_path_in_any_case(world: World) -> None:
    data = bytes(range(256)) * 8000  # more than one command's share
    await world.agent.write_file(ANSWER, data)
    assert (world.drive.root / "users/Public/Documents/answer.txt").read_bytes() == data
    assert await world.agent.read_file("c:/USERS/public/documents/ANSWER.TXT") == data


@pytest.mark.parametrize("path", [r"C:\Users\Public\none.txt", r"C:\none\none.txt", r"D:\none.txt"])
async def test_a_file_that_does_not_exist_is_absent_as_on_windows(world: World, path: str) -> None:
    assert await world.agent.read_file(path) is None


async def test_a_directory_is_not_a_file_and_parent_directories_stay_on_the_drive(world: World) -> None:
    with pytest.raises(GuestError, match="Access is denied"):
        await world.agent.read_file("C:\\Users")
    await world.agent.write_file("C:\\..\\..\\escaped.txt", b"x")
    assert (world.drive.root / "escaped.txt").read_bytes() == b"x"


async def test_a_program_runs_in_wine_by_name_or_path_with_input_output_and_exit_code(world: World) -> None:
    world.program("greet.exe", 'read name; echo "$1 $name from $PWD"; echo oops >&2; exit 3')
    for path in ("greet", "GREET.EXE", "C:\\Windows\\System32\\greet.exe"):
        result = await world.agent.run([path, "hello"], timeout_s=30, stdin=b"Ada\n")
        directory = world.drive.root / "users" / pwd.getpwuid(os.getuid()).pw_name / "Documents"
        assert result.stdout.decode() == f"hello Ada from {directory}\n"
        assert (result.exit_code, result.stderr) == (3, b"oops\n")


async def test_a_program_that_does_not_exist_is_an_error_and_a_path_of_debian_runs(world: World) -> None:
    for path in ("mspaint", "/bin/none"):
        with pytest.raises(GuestError, match="No such file or directory"):
            await world.agent.run([path], timeout_s=30)
    result = await world.agent.run(["/bin/echo", "C:\\"], timeout_s=30)
    assert result.stdout == b"C:\\\n"


async def test_a_program_that_runs_out_of_time_is_killed(world: World) -> None:
    world.program("hang.exe", "echo $$ > pid.txt; exec sleep 1000")
    pid_file = world.drive.root / "users" / pwd.getpwuid(os.getuid()).pw_name / "Documents" / "pid.txt"
    # A busy host may take longer to start the program.
    timeout_s = 1.0
    while not (pid_file.exists() and pid_file.read_text()):
        with pytest.raises(GuestUnresponsive):
            await world.agent.run(["hang"], timeout_s=timeout_s)
        timeout_s *= 2
    pid = int(pid_file.read_text())
    give_up_s = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < give_up_s:
        await world.agent.ping()
    assert not os.path.exists(f"/proc/{pid}")


async def test_a_wrong_command_is_an_error_and_the_next_one_is_answered(world: World) -> None:
    for line in (b"{", b"[]", b'{"execute":"guest-shutdown"}', b'{"execute":"guest-exec"}', b'{"execute":1}'):
        assert json.loads(world.commands.answer(line))["error"]["desc"]
    await world.agent.ping()
    before_ns = time.time_ns()
    response = json.loads(world.commands.answer(b'{"execute":"guest-get-time"}'))
    assert before_ns <= response["return"] <= time.time_ns()


def test_a_line_without_end_is_discarded_and_a_delimiter_starts_a_new_one(world: World) -> None:
    sync = b'{"execute":"guest-sync-delimited","arguments":{"id":7}}\n'
    parts = iter([b'{"execute":"guest-pi', b"\xff" + sync, b"x" * (5 << 20), b"\n" + sync, b""])
    written: list[bytes] = []
    world.commands.serve(lambda _count: next(parts), written.append)
    assert written == [b'\xff{"return": 7}\n', b'\xff{"return": 7}\n']


class Port(io.RawIOBase):
    """Takes a part of what is written, as a virtio port does."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: Any) -> int:
        part = bytes(data[:32_768])
        self.written += part
        return len(part)


def test_a_response_is_written_whole_to_a_port_that_takes_a_part_at_a_time() -> None:
    port, response = Port(), bytes(range(256)) * 400
    write_all(port, response)
    assert port.written == response
