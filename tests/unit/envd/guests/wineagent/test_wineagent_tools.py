"""Tools of an agent in a Windows guest: the host's toolbox, and the Wine guest's answers to its script.

A script plays `cmd.exe`: it knows `set`, `cd` and `exit`, and leaves other lines to a shell.
"""

import base64
import json
import os
import pwd
from datetime import timedelta
from pathlib import Path

import pytest

from cuaenv.actions import CallTool, EditFile, ListDirectory, ReadFile, RunShell, WriteFile
from envd.base.errors import GuestError
from envd.desktop import toolbox
from envd.desktop.observation import ActionOutcome
from envd.desktop.session import GuestSession
from envd.guests.powershell import Script, powershell

from .conftest import World

USER = pwd.getpwuid(os.getuid()).pw_name
HOME = rf"C:\users\{USER}"
CMD = """
exec python3 -S -c '
import os, re, subprocess, sys
drive = os.environ["WINEPREFIX"] + "/drive_c"
values, code, directory = {}, 0, "C:\\\\windows"
local = lambda path: drive + path[2:].replace(chr(92), "/").replace("/Windows", "/windows")
for line in sys.stdin.buffer.read().decode("cp437").split("\\r\\n"):
    line = re.sub("%(\\\\w+)%", lambda m: {**values, "ERRORLEVEL": str(code), "CD": directory}.get(m[1], ""), line)
    if found := re.fullmatch("set \\"?(\\\\w+)=(.*?)\\"?", line):
        values[found[1]] = found[2]
    elif found := re.fullmatch("set> \\"(.*)\\"", line):
        open(local(found[1]), "w", encoding="cp1252").writelines(f"{n}={v}\\r\\n" for n, v in values.items())
    elif found := re.fullmatch("cd /d \\"(.*)\\"", line):
        directory = found[1]
    elif found := re.fullmatch("exit ?(\\\\d*)", line):
        sys.exit(int(found[1] or code) & 255)
    elif line:
        code = subprocess.run(["sh", "-c", line], stdin=subprocess.DEVNULL, cwd=local(directory)).returncode
'
"""


class Session:
    """The session of a Windows guest."""

    has_powershell = True

    def __init__(self, world: World) -> None:
        self._world = world
        self.printed: bytes | None = None

    async def use_tool(self, request: bytes, timeout_s: float) -> bytes:
        command = powershell(Script.USE_TOOL, wait_s=f"{timeout_s:g}")
        result = await self._world.agent.run(command, timeout_s=timeout_s, stdin=request)
        if result.exit_code:
            raise GuestError(result.stderr.decode())
        return result.stdout if self.printed is None else self.printed


@pytest.fixture
def home(world: World) -> Path:
    home = world.drive.root / "users" / USER
    (home / "AppData" / "Local").mkdir(parents=True)
    world.program("cmd.exe", CMD)
    return home


@pytest.fixture
def session(world: World) -> Session:
    return Session(world)


@pytest.fixture
def tools(session: Session, home: Path) -> GuestSession:
    assert home.exists()
    return session  # type: ignore[return-value]


async def shell(tools: GuestSession, command: str, timeout_s: float = 30.0) -> ActionOutcome:
    return await toolbox.use(tools, RunShell(command, timedelta(seconds=timeout_s)))


async def test_directory_and_variables_stay_unless_a_command_ends_the_shell(tools: GuestSession, home: Path) -> None:
    (home / "notes").mkdir()
    made = await shell(tools, f'set NAME=Zoë & co\ncd /d "{HOME}\\notes"')
    assert made == ActionOutcome(output="", exit_code=0)
    assert (await shell(tools, "echo '%NAME%' > name.txt; false")).exit_code == 1
    assert (home / "notes" / "name.txt").read_text() == "Zoë & co\n"
    assert (await shell(tools, "set NAME=lost\nexit 3")).exit_code == 3
    assert (await shell(tools, "echo '%NAME%' > name.txt")).exit_code == 0
    assert (home / "notes" / "name.txt").read_text() == "Zoë & co\n"
    (home / "notes" / "name.txt").unlink()
    (home / "notes").rmdir()
    assert (await shell(tools, "pwd")).exit_code == 0, "a directory that is gone is left"


async def test_a_command_that_does_not_end_is_killed_with_the_programs_it_started(
    tools: GuestSession, home: Path
) -> None:
    outcome = await shell(tools, f"echo begun; setsid sleep 1000 & echo $! > {home}/pid; sleep 1000", 3)
    assert (outcome.timed_out, outcome.exit_code, outcome.output) == (True, None, "begun\n")
    status = Path("/proc", (home / "pid").read_text().strip(), "status")
    assert not status.exists() or "State:\tZ" in status.read_text()


async def test_a_program_in_the_background_lives_on_and_delays_nothing(tools: GuestSession, home: Path) -> None:
    outcome = await shell(tools, f"sleep 1000 & echo $! > {home}/pid; echo on")
    assert (outcome.output, outcome.exit_code) == ("on\n", 0)
    os.kill(int((home / "pid").read_text()), 9)


async def test_a_flood_is_cut_to_its_ends(tools: GuestSession) -> None:
    outcome = await shell(tools, "echo first; head -c 2000000 /dev/zero | tr '\\0' x; echo last")
    assert (outcome.output or "").startswith("first\nx")
    assert (outcome.output or "").endswith("xlast\n")
    assert outcome.left_out_bytes == 2_000_000 + len("first\nlast\n") - 32_768
    assert f"\n[{outcome.left_out_bytes} bytes left out]\n" in (outcome.output or "")


async def test_a_command_that_the_shell_cannot_read_is_refused(tools: GuestSession) -> None:
    assert "cannot read the character 日" in (await shell(tools, "echo 日")).error
    assert "U+0000" in (await shell(tools, "echo a\0b")).error


async def test_files_are_text_of_a_window_or_size_and_type(tools: GuestSession, home: Path) -> None:
    written = await toolbox.use(tools, WriteFile("~\\d\\a.txt", "1\r\n2\r\n日\n"))
    assert written.output == f"[wrote 10 bytes to {HOME}\\d\\a.txt]"
    assert (await toolbox.use(tools, ReadFile("C:/Users/Public/../" + USER + "/D/A.TXT", 2, 1))).output == "2\r\n"
    assert (await toolbox.use(tools, ReadFile("d\\a.txt"))).output == "1\r\n2\r\n日\n"
    assert (await toolbox.use(tools, ReadFile("~/d/a.txt", 9))).error == f"{HOME}\\d\\a.txt has 4 lines"
    (home / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    assert (await toolbox.use(tools, ReadFile("x.png"))).output == "[binary file, 9 bytes, image/png]"
    (home / "big.txt").write_text("é" * 3_000_000, encoding="utf-8")
    big = await toolbox.use(tools, ReadFile("big.txt"))
    assert big.left_out_bytes == 6_000_000 - 262_144
    assert "has 1 lines in its first 4 MiB" in (await toolbox.use(tools, ReadFile("big.txt", 2))).error
    assert (await toolbox.use(tools, ListDirectory("~\\d"))).output == "a.txt (10 bytes)"
    for path, error in (
        ("absent", f"{HOME}\\absent: No such file or directory"),
        ("d", f"{HOME}\\d: Is a directory"),
        ("D:\\x", "The system cannot find the path specified"),
        ("a\0b", "null"),
    ):
        assert error in (await toolbox.use(tools, ReadFile(path))).error
    assert (await toolbox.use(tools, WriteFile("d", "x"))).error == f"{HOME}\\d: Is a directory"
    assert sorted(at.name for at in home.iterdir()) == ["AppData", "Documents", "big.txt", "d", "x.png"], (
        "nothing is left behind"
    )


async def test_an_edit_replaces_one_occurrence_in_lines_that_end_as_on_windows(tools: GuestSession, home: Path) -> None:
    file = home / "a.txt"
    file.write_bytes(b"one\r\ntwo\r\ntwo\r\n")
    assert "occurs 2 times" in (await toolbox.use(tools, EditFile("a.txt", "two", "2"))).error
    assert (
        await toolbox.use(tools, EditFile("a.txt", "one\ntwo", "1\n2"))
    ).output == f"[edited {HOME}\\a.txt at line 1]"
    assert file.read_bytes() == b"1\r\n2\r\ntwo\r\n"
    file.write_bytes(b"\xff")
    assert "is not UTF-8 text" in (await toolbox.use(tools, EditFile("a.txt", "one", "1"))).error


async def test_a_long_listing_is_cut(tools: GuestSession, home: Path) -> None:
    for number in range(1005):
        (home / "AppData" / f"{number:04}").touch()
    listing = (await toolbox.use(tools, ListDirectory("AppData"))).output or ""
    assert listing.endswith("\n[6 more entries]")
    assert listing.count("(0 bytes)") == 1000
    assert (await toolbox.use(tools, ListDirectory("AppData\\0001"))).error == f"{HOME}\\AppData\\0001: Not a directory"


async def test_mcp_servers_are_refused(tools: GuestSession) -> None:
    assert (await toolbox.use(tools, CallTool("notes", "add"))).error == "a Windows guest runs no MCP servers"
    with pytest.raises(GuestError, match="a Windows guest runs no MCP servers"):
        await toolbox.start_server(tools, "notes", ["notes.exe"])


async def test_a_guest_that_lies_is_the_agents_result(tools: GuestSession, session: Session) -> None:
    for printed in (b"", b"[]", b'{"size": -1}', b'{"head": "?"}', json.dumps({"rows": "x" * (1 << 21)}).encode()):
        session.printed = printed
        assert "malformed response" in (await shell(tools, "true")).error
    session.printed = b'{"data": "?", "size": 1, "path": "C:\\\\a"}'
    assert "malformed response" in (await toolbox.use(tools, ReadFile("a"))).error
    session.printed = json.dumps({"data": base64.b64encode(b"x" * 300_000).decode(), "size": 1}).encode()
    assert "malformed response" in (await toolbox.use(tools, ReadFile("a"))).error
    session.printed = json.dumps({"error": "x" * 100_000}).encode()
    assert len((await toolbox.use(tools, ReadFile("a"))).error) <= 2000
