"""The program of an agent's tools, run on this machine with a real bash and real MCP servers over pipes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from cuaenv.actions import AskUser, CallTool, EditFile, ListDirectory, ReadFile, RunShell, ToolAction, WriteFile
from cuaenv.results import CommandResult
from envd.base.errors import GuestError, GuestServiceEnded, GuestUnresponsive
from envd.desktop import toolbox
from envd.desktop.observation import ActionOutcome
from envd.desktop.session import GuestSession
from envd.desktop.toolbox import PROGRAM, cut


class Session:
    """The session of a guest whose programs run on this machine."""

    has_powershell = False

    def __init__(self, home: Path) -> None:
        self._environ = {"HOME": str(home), "PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
        self.error: Exception | None = None
        self.stdout: bytes | None = None
        self.starting_count = 0

    def guestd(self, purpose: str) -> "Session":
        assert purpose == "use tools"
        return self

    async def session(self) -> None:
        if self.starting_count:
            self.starting_count -= 1
            raise GuestUnresponsive("connection refused")

    async def execute(self, command: Sequence[str], *, timeout_s: float, stdin: bytes) -> CommandResult:
        if self.error is not None:
            raise self.error
        done = subprocess.run(  # noqa: ASYNC221 -- its test waits for nothing else
            command, input=stdin, capture_output=True, check=False, env=self._environ, timeout=timeout_s
        )
        stdout = done.stdout if self.stdout is None else self.stdout
        return CommandResult(exit_code=done.returncode, stdout=stdout, stderr=done.stderr)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    session = Session(tmp_path)
    yield session
    # Its shell ends when its input ends, and so do the MCP servers.
    raw(session, op="shell", command="kill -9 $PPID", timeout_s=10)


@pytest.fixture
def tools(session: Session) -> GuestSession:
    return session  # type: ignore[return-value]


def raw(session: Session, **request: object) -> Mapping[str, Any]:
    command = [sys.executable, "-I", "-S", "-c", PROGRAM]
    done = subprocess.run(
        command, input=json.dumps(request).encode(), capture_output=True, check=False, env=session._environ
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


async def shell(tools: GuestSession, command: str, timeout_s: float = 30.0) -> ActionOutcome:
    return await toolbox.use(tools, RunShell(command, timedelta(seconds=timeout_s)))


async def test_directory_variables_and_functions_stay(tools: GuestSession, tmp_path: Path) -> None:
    assert await shell(tools, "mkdir a; cd a; X='1 2'; f() { echo f$1; }") == ActionOutcome(output="", exit_code=0)
    assert (await shell(tools, 'pwd; echo "$X"; f 3; false')) == ActionOutcome(
        output=f"{tmp_path}/a\n1 2\nf3\n", exit_code=1
    )


async def test_output_and_errors_come_in_their_order_and_input_is_empty(tools: GuestSession) -> None:
    outcome = await shell(tools, "echo a; echo b >&2; cat; echo c")
    assert outcome.output == "a\nb\nc\n"
    assert "syntax error" in ((await shell(tools, "if then")).output or "")


async def test_a_character_of_every_plane_is_kept(tools: GuestSession) -> None:
    text = "".join(chr(plane << 16 | 0x1F3) for plane in range(17))
    assert (await shell(tools, f"echo '{text}'")).output == f"{text}\n"
    await toolbox.use(tools, WriteFile("a.txt", text))
    assert (await toolbox.use(tools, ReadFile("a.txt"))).output == text
    assert (await shell(tools, "printf '\\xff\\0x'")).output == "\ufffd\0x"
    assert "U+0000" in (await shell(tools, "echo a\0b")).error


async def test_a_flood_is_cut_to_its_ends(tools: GuestSession) -> None:
    outcome = await shell(tools, "echo first; head -c 200000000 /dev/zero | tr '\\0' x; echo last")
    assert outcome.output is not None
    assert outcome.output.startswith("first\n")
    assert outcome.output.endswith("last\n")
    assert outcome.left_out_bytes == 200_000_000 + len("first\nlast\n") - 32_768
    assert f"\n[{outcome.left_out_bytes} bytes left out]\n" in outcome.output


async def test_a_command_that_does_not_end_is_killed_and_the_shell_stays(tools: GuestSession) -> None:
    await shell(tools, "X=5")
    outcome = await shell(tools, "echo begun; sleep 1000", 0.3)
    assert (outcome.timed_out, outcome.exit_code) == (True, None)
    assert (outcome.output or "").startswith("begun\n")
    assert (await shell(tools, "echo $X")).output == "5\n"


async def test_a_shell_that_does_not_end_or_ends_is_replaced_and_the_result_says_so(
    tools: GuestSession, tmp_path: Path
) -> None:
    note = f"[the shell ended; the next command starts a new one in {tmp_path}/b, without its variables]"
    looping = await shell(tools, "mkdir b; cd b; X=5; while :; do :; done", 0.3)
    assert (looping.timed_out, looping.output) == (True, note)
    assert (await shell(tools, "echo ${X:-none}; pwd")).output == f"none\n{tmp_path}/b\n"
    for command, code in (("kill -9 $$", 137), ("exit 3", 3), ("exec true", 0), ("set -e; false", 1)):
        outcome = await shell(tools, command)
        assert (outcome.exit_code, outcome.output) == (code, note), command


async def test_a_program_in_the_background_lives_on_and_delays_nothing(tools: GuestSession, tmp_path: Path) -> None:
    started = await shell(tools, "(sleep 0.5; echo late; echo done > late.txt) & setsid sleep 600 & echo $!")
    assert started.exit_code == 0
    assert (await shell(tools, "while [ ! -e late.txt ]; do sleep 0.05; done; cat late.txt")).output == "done\n"
    assert (await shell(tools, f"kill {(started.output or '').strip()}")).exit_code == 0


async def test_a_killed_service_is_the_agents_result_and_starts_again(tools: GuestSession) -> None:
    assert "ended during this action" in (await shell(tools, "kill -9 $PPID")).error
    stopped = await shell(tools, "kill -STOP $PPID; sleep 1000", 0.2)
    assert "did not answer and were ended" in stopped.error
    assert (await shell(tools, "echo again")).output == "again\n"


async def test_files_are_text_of_a_window_or_size_and_type(tools: GuestSession, tmp_path: Path) -> None:
    assert (
        await toolbox.use(tools, WriteFile("~/d/a.txt", "1\n2\n3\n"))
    ).output == f"[wrote 6 bytes to {tmp_path}/d/a.txt]"
    assert (await toolbox.use(tools, ReadFile("d/a.txt", 2, 1))).output == "2\n"
    assert (await toolbox.use(tools, ReadFile("d/a.txt", 3))).output == "3\n"
    assert (await toolbox.use(tools, ReadFile("d/a.txt", 9))).error == f"{tmp_path}/d/a.txt has 4 lines"
    (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    assert (await toolbox.use(tools, ReadFile("x.png"))).output == "[binary file, 9 bytes, image/png]"
    (tmp_path / "big.txt").write_text("é" * 200_000, encoding="utf-8")
    big = await toolbox.use(tools, ReadFile("big.txt"))
    assert big.left_out_bytes == 400_000 - 262_144
    assert (big.output or "").endswith("é\n[137856 bytes left out]")
    assert (await toolbox.use(tools, ListDirectory("~/d"))).output == "a.txt (6 bytes)"
    os.mkfifo(tmp_path / "pipe")
    for path, error in (
        ("absent", f"{tmp_path}/absent: No such file or directory"[len(str(tmp_path)) + 1 :]),
        ("d", "is a directory"),
        ("pipe", "is not a regular file"),
        ("/dev/zero", "is not a regular file"),
        ("a\0b", "null"),
    ):
        assert error in (await toolbox.use(tools, ReadFile(path))).error
    assert "not a regular file" in (await toolbox.use(tools, WriteFile("d", ""))).error


async def test_an_edit_replaces_one_occurrence_and_keeps_everything_else(tools: GuestSession, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"one\r\ntwo\r\ntwo\r\n")
    file.chmod(0o640)
    assert "occurs 2 times" in (await toolbox.use(tools, EditFile("a.txt", "two", "2"))).error
    assert "occurs 0 times" in (await toolbox.use(tools, EditFile("a.txt", "three", "2"))).error
    assert (await toolbox.use(tools, EditFile("a.txt", "one", "1"))).output == f"[edited {file} at line 1]"
    assert file.read_bytes() == b"1\r\ntwo\r\ntwo\r\n"
    assert file.stat().st_mode & 0o777 == 0o640
    file.write_bytes(b"\xff")
    assert "is not UTF-8 text" in (await toolbox.use(tools, EditFile("a.txt", "one", "1"))).error


async def test_a_long_listing_is_cut(tools: GuestSession, tmp_path: Path) -> None:
    for number in range(1005):
        (tmp_path / f"{number:04}").touch()
    listing = (await toolbox.use(tools, ListDirectory("~"))).output or ""
    assert listing.endswith("\n[5 more entries]")
    assert listing.count("(0 bytes)") == 1000


SERVER = """
import json, sys
def send(**message): print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)
tools = [{"name": "add", "description": "Adds.", "inputSchema": {"type": "object"}}]
for line in sys.stdin:
    request = json.loads(line)
    number, params = request.get("id"), request.get("params", {})
    if request.get("method") == "initialize":
        server = {"name": "s", "version": "1"}
        send(id=number, result={"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": server})
    elif request.get("method") == "tools/list":
        send(id=number, result={"tools": TOOLS})
    elif request.get("method") == "tools/call":
        arguments = params["arguments"]
        CALL
"""


async def start(tools: GuestSession, call: str, listed: str = "tools") -> None:
    source = SERVER.replace("TOOLS", listed).replace("CALL", call)
    await toolbox.start_server(tools, "notes", [sys.executable, "-c", source])


async def call(tools: GuestSession, tool: str = "add", arguments: str = "{}") -> ActionOutcome:
    return await toolbox.use(tools, CallTool("notes", tool, arguments))


async def test_an_mcp_server_lists_and_runs_its_tools(tools: GuestSession) -> None:
    text = 'send(method="notifications/message", params={}); send(id=7000, method="ping"); '
    text += 'send(id=number, result={"content": [{"type": "text", "text": str(arguments["a"] + 1)}]})'
    await start(tools, text)
    assert (await call(tools, "")).output == 'add: Adds.\n  {"type": "object"}'
    assert (await call(tools, arguments='{"a": 1}')).output == "2"
    assert (await call(tools, arguments='{"a": 2}')).output == "3"


@pytest.mark.parametrize(
    ("server", "error"),
    [
        ('send(id=number, result={"content": [{"type": "text", "text": "no"}], "isError": True})', "reported an error"),
        ('send(id=number, error={"code": -32602, "message": "a is required"})', "a is required"),
        ('send(id=number, result={"content": "text"})', "broke the protocol: content: Input should be a valid list"),
        ("send(id=number, result=[])", "broke the protocol"),
        ("send(id=number)", "broke the protocol"),
        ('print("hello", flush=True)', "sent a line that is not a JSON object: b'hello'"),
        ('print("[" * 100000, flush=True)', "sent a line that is not a JSON object"),
        ("sys.exit(3)", "has ended (exit code 3)"),
        ('sys.stdout.write("x" * (9 << 20)); sys.stdout.flush()', "sent more than 4194304 bytes, and was ended"),
    ],
)
async def test_an_mcp_server_that_fails_or_lies_is_the_agents_result(
    tools: GuestSession, server: str, error: str
) -> None:
    await start(tools, server)
    assert error in (await call(tools)).error


async def test_a_server_whose_list_of_tools_is_malformed_breaks_the_protocol(tools: GuestSession) -> None:
    await start(tools, "pass", listed='[{"name": 5}]')
    assert "broke the protocol: tools.0.name" in (await call(tools, "")).error


async def test_a_server_that_hangs_has_a_limit_and_a_late_response_answers_nothing_else(session: Session) -> None:

    code = 'import time; time.sleep(arguments.get("s", 0)); '
    code += 'send(id=number, result={"content": [{"type": "text", "text": str(number)}]})'
    source = SERVER.replace("TOOLS", "tools").replace("CALL", code)
    raw(session, op="start_server", name="notes", command=[sys.executable, "-c", source], timeout_s=10)

    def request(seconds: float, timeout_s: float) -> Mapping[str, Any]:
        params = {"name": "add", "arguments": {"s": seconds}}
        return raw(session, op="request", server="notes", method="tools/call", params=params, timeout_s=timeout_s)

    assert request(0.5, 0.1) == {"error": "MCP server notes did not answer within 0.1 s"}
    assert request(0, 10)["message"]["result"]["content"][0]["text"] == "3"


async def test_a_server_that_is_missing_is_named(tools: GuestSession) -> None:
    assert (await call(tools)).error == "no MCP server 'notes' is running; running: none"
    with pytest.raises(GuestError, match=r"MCP server notes cannot be started: .*No such file"):
        await toolbox.start_server(tools, "notes", ["/no/such/server"])
    with pytest.raises(GuestError, match="MCP server notes has ended"):
        await toolbox.start_server(tools, "notes", ["false"])


async def test_a_guest_that_lies_or_loses_its_service_is_a_result_and_one_that_is_silent_is_not(
    tools: GuestSession, session: Session
) -> None:
    for stdout in (b"", b"[]", b'{"exit_code": 4294967296}', b'{"output": "' + b"x" * 400_000 + b'"}'):
        session.stdout = stdout
        assert "the desktop's tools failed" in (await shell(tools, "true")).error
    session.error, session.starting_count = GuestServiceEnded("guestd had ended and was restarted"), 2
    assert "the desktop's service ended during this action" in (await shell(tools, "true")).error
    assert session.starting_count == 0, "the next action finds the service"
    session.error = GuestUnresponsive("no answer")
    with pytest.raises(GuestUnresponsive):
        await shell(tools, "true")
    session.error = None


async def test_a_guest_does_not_answer_for_the_user(tools: GuestSession) -> None:
    actions: tuple[ToolAction, ...] = (AskUser("Who?"),)
    with pytest.raises(TypeError):
        await toolbox.use(tools, actions[0])


def test_a_text_is_cut_in_the_middle() -> None:
    assert cut("a" * 32_768) == ("a" * 32_768, 0)
    text, left_out_bytes = cut("a" * 16_384 + "b" * 5 + "c" * 16_384)
    assert (text, left_out_bytes) == ("a" * 16_384 + "\n[5 bytes left out]\n" + "c" * 16_384, 5)
