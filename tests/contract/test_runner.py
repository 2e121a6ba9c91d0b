"""The runner of a guest on this host, and that of a drawn desktop: both answer the same requests alike."""

import asyncio
import base64
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from cuaenv.client import CommandResult
from cuaenv.client.errors import GuestRefused
from envd.integrations.compat.e2b import runner as client
from envd.integrations.compat.e2b.rpc import RpcError
from envd.integrations.compat.e2b.runner import GuestRunner
from tests.support.server import served_client

BASH = {"cmd": "/bin/bash", "envs": {}, "stdin": False}


class LocalGuest:
    """This host as the guest of an episode."""

    episode_id = "local"

    async def run_command(self, argv: Sequence[str], **_: object) -> CommandResult:
        done = await asyncio.to_thread(subprocess.run, [sys.executable, *argv[1:]], capture_output=True, check=False)
        return CommandResult(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    @asynccontextmanager
    async def forward(self, port: int) -> AsyncIterator[SimpleNamespace]:
        refused = GuestRefused("port: Connection refused", code="FAILED_PRECONDITION", reason="GUEST_REFUSED")
        yield SimpleNamespace(local_port=port, error=refused)


def end_runner(name: str) -> None:
    """End the runner of this host that a test started."""
    with socket.socket(socket.AF_UNIX) as connection, suppress(ConnectionRefusedError):
        connection.connect(f"\0envd-runner-{os.getuid()}-{name}")
        packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        os.kill(struct.unpack("3i", packed)[0], signal.SIGKILL)


@pytest.fixture
async def local(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GuestRunner]:
    """The program itself."""
    name, text = uuid4().hex, client._program()[0]
    monkeypatch.setattr(client, "_program", lambda: (text, name))
    runner = GuestRunner(LocalGuest())  # type: ignore[arg-type]
    yield runner
    await runner.aclose()
    end_runner(name)


@pytest.fixture
async def drawn() -> AsyncIterator[GuestRunner]:
    async with served_client(size=1) as (_, envd), envd.reset("fake/count-to-five") as episode:
        runner = GuestRunner(episode)
        yield runner
        await runner.aclose()


@pytest.fixture(params=["local", "drawn"])
def runner(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


async def run(runner: GuestRunner, command: str, *, timeout_s: float = 20.0, **config: object) -> list[dict[str, Any]]:
    config = {**BASH, "args": ["-c", command], **config}
    return [event async for event in runner.events("start", config=config, timeout_s=timeout_s)]


async def refusal(work: Any) -> str:
    with pytest.raises(RpcError) as refused:
        await work
    return refused.value.code


async def test_a_process_prints_and_ends(runner: GuestRunner) -> None:
    started, *printed, ended = await run(runner, "echo $A; cat /none; exit 3", envs={"A": "1"}, cwd="/tmp")  # noqa: S108
    assert started["pid"] > 0
    assert {name for event in printed for name in event} == {"stdout", "stderr"}
    assert ended["end"] == {
        "exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3", "timedOut": False,
    }  # fmt: skip
    assert await refusal(run(runner, "true", cwd="/none")) == "invalid_argument"
    (_, ended) = await run(runner, "sleep 60", timeout_s=0.2)
    assert (ended["end"]["timedOut"], ended["end"]["exitCode"]) == (True, -1)
    assert (await runner.ask("list")) == {"processes": []}


async def test_a_process_reads_and_is_signalled_and_joined(runner: GuestRunner) -> None:
    config = {**BASH, "args": ["-c", "cat"], "stdin": True, "tag": "cat"}
    async with aclosing(runner.events("start", config=config, timeout_s=0)) as events:
        process = {"pid": (await anext(events))["pid"], "tag": None}
        await runner.ask("input", **process, data="YWJj")
        assert await anext(events) == {"stdout": "YWJj"}
    # Its caller left.
    assert [each["pid"] for each in (await runner.ask("list"))["processes"]] == [process["pid"]]
    async with aclosing(runner.events("connect", pid=None, tag="cat")) as events:
        await anext(events)
        await runner.ask("close_stdin", **process)
        assert (await anext(events))["end"]["exitCode"] == 0
    config = {**BASH, "args": ["-c", "sleep 60"]}
    async with aclosing(runner.events("start", config=config, timeout_s=0)) as events:
        process = {"pid": (await anext(events))["pid"], "tag": None}
        assert await refusal(runner.ask("input", **process, data="")) == "failed_precondition"
        await runner.ask("signal", **process, number=15)
        assert (await anext(events))["end"]["status"] == "signal: terminated"
    assert await refusal(runner.ask("signal", **process, number=15)) == "not_found"


async def test_files(runner: GuestRunner, tmp_path: Path) -> None:
    async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    path = f"{tmp_path}/d/file"
    assert (await runner.write(path, chunks(b"one ", b"two")))["entry"]["size"] == 7
    assert b"".join([each async for each in runner.read(path)]) == b"7one two"
    entry = (await runner.ask("stat", path=path))["entry"]
    assert (entry["name"], entry["type"], entry["mode"]) == ("file", "FILE_TYPE_FILE", 0o644)
    assert len((await runner.ask("list_directory", path=str(tmp_path), depth=1))["entries"]) == 1
    assert len((await runner.ask("list_directory", path=str(tmp_path), depth=2))["entries"]) == 2
    await runner.ask("make_directory", path=f"{tmp_path}/e/f")
    assert await refusal(runner.ask("make_directory", path=f"{tmp_path}/e/f")) == "already_exists"
    assert await refusal(runner.ask("make_directory", path=path)) == "invalid_argument"
    assert await refusal(runner.ask("list_directory", path=path, depth=1)) == "invalid_argument"
    assert await refusal(runner.write(f"{tmp_path}/e", chunks(b""))) == "invalid_argument"
    assert await refusal(anext(runner.read(str(tmp_path)))) == "invalid_argument"
    await runner.ask("move", source=f"{tmp_path}/d", destination=f"{tmp_path}/g/h")
    for _ in range(2):
        await runner.ask("remove", path=f"{tmp_path}/g")
    for op in ("stat", "list_directory"):
        more = {"depth": 1} if op == "list_directory" else {}
        assert await refusal(runner.ask(op, path=path, **more)) == "not_found"
    assert (await runner.ask("usage"))["memTotal"] > 0


async def test_changes(runner: GuestRunner, tmp_path: Path) -> None:
    async def chunk() -> AsyncIterator[bytes]:
        yield b"1"

    await runner.ask("make_directory", path=f"{tmp_path}/d/e")
    async with aclosing(runner.events("watch", path=f"{tmp_path}/d", recursive=True)) as events:
        await anext(events)
        await runner.write(f"{tmp_path}/d/e/new", chunk())
        found = [(await anext(events))["event"] for _ in range(2)]
        assert [each["type"] for each in found] == ["EVENT_TYPE_CREATE", "EVENT_TYPE_WRITE"]
        assert {each["name"] for each in found} == {"e/new"}
        await runner.ask("remove", path=f"{tmp_path}/d/e/new")
        assert (await anext(events))["event"] == {"name": "e/new", "type": "EVENT_TYPE_REMOVE"}


async def test_a_terminal(local: GuestRunner) -> None:
    config = {**BASH, "args": ["--norc"], "pty": {"cols": 100, "rows": 30}}
    output = b""
    async with aclosing(local.events("start", config=config, timeout_s=20)) as events:
        process = {"pid": (await anext(events))["pid"], "tag": None}
        await local.ask("resize", **process, size={"cols": 70, "rows": 20})
        await local.ask("input", **process, data="c3R0eSBzaXplOyBleGl0Cg==")  # stty size; exit
        async for event in events:
            output += base64.b64decode(event.get("pty", ""))
    assert b"20 70" in output


async def test_a_runner_that_is_gone_is_started_again(local: GuestRunner) -> None:
    await local.start()
    end_runner(client._program()[1])
    with pytest.raises(GuestRefused):
        await local.ask("list")
    assert await local.ask("list") == {"processes": []}


async def test_a_request_without_the_secret_has_no_answer(local: GuestRunner) -> None:
    await local.start()
    local._secret = "wrong"  # noqa: S105
    with pytest.raises(GuestRefused):
        await local.ask("list")
