"""Desktops as MCP tools, with the clients of the `mcp` package: in memory, by stdio and by HTTP."""

import asyncio
import base64
import io
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.support.desktops import DrawnDesktops
from tests.support.mcp_client import client_of, mcp_client
from trainer.adapters.session import SessionSettings
from trainer.cli.app import app

if TYPE_CHECKING:
    from mcp.client import Client

TASK = "fake/enable"
BOX = {"action": "click", "x": 822, "y": 167}
DONE = {"action": "done"}


@asynccontextmanager
async def connected(desktops: DrawnDesktops, **options: Any) -> "AsyncIterator[Client]":
    settings = SessionSettings.connect(desktops.address, **options)
    async with client_of(settings, task=TASK) as client:
        yield client


def text_of(result: Any) -> str:
    return "\n".join(part.text for part in result.content if part.type == "text")


def picture_of(result: Any) -> Image.Image:
    (part,) = (part for part in result.content if part.type == "image")
    return Image.open(io.BytesIO(base64.b64decode(part.data)))


async def opened(client: "Client", task: str = "") -> str:
    result = await client.call_tool("reset", {"task": task})
    (session,) = re.findall(r"^session: (\S+)$", text_of(result), re.MULTILINE)
    return str(session)


async def play(client: "Client", *actions: dict[str, Any]) -> dict[str, Any]:
    """Return the result of an episode."""
    session = await opened(client)
    for action in actions:
        result = await client.call_tool("step", {"session": session, "actions": [action]})
        assert not result.is_error, text_of(result)
    result = await client.call_tool("evaluate", {"session": session})
    assert not (await client.call_tool("close", {"session": session})).is_error
    return dict(result.structured_content or {})


async def test_the_tools_have_schemas_with_every_action(desktops: DrawnDesktops) -> None:
    async with connected(desktops) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert set(tools) == {"reset", "step", "observe", "evaluate", "close"}
    assert all(tool.description for tool in tools.values())
    assert len(tools["step"].input_schema["properties"]["actions"]["items"]["oneOf"]) == 20


async def test_an_agent_solves_a_task_and_sees_pictures(desktops: DrawnDesktops) -> None:
    async with connected(desktops) as client:
        result = await client.call_tool("reset", {})
        assert "instruction: Check the box Enabled." in text_of(result)
        before = picture_of(result)
        (session,) = re.findall(r"session: (\S+)", text_of(result))
        step = await client.call_tool("step", {"session": session, "actions": [BOX]})
        assert (text_of(step), picture_of(step).size) == ("ok", (1280, 800))
        assert before.tobytes() != picture_of(step).tobytes()
        seen = await client.call_tool("observe", {"session": session})
        assert picture_of(seen).tobytes() == picture_of(step).tobytes()
        end = await client.call_tool("step", {"session": session, "actions": [DONE]})
        assert "The episode has ended (AGENT_DONE)" in text_of(end)
        evaluation = (await client.call_tool("evaluate", {"session": session})).structured_content
        assert evaluation is not None
        assert (evaluation["score"], evaluation["void"]) == (1.0, "")
        assert evaluation["checks"]


async def test_doing_nothing_scores_0(desktops: DrawnDesktops) -> None:
    async with connected(desktops) as client:
        assert (await play(client, DONE))["score"] == 0.0


async def test_a_lost_machine_gives_an_error_and_no_score(desktops: DrawnDesktops) -> None:
    async with connected(desktops) as client:
        session = await opened(client)
        await client.call_tool("step", {"session": session, "actions": [BOX]})
        desktops.kill_used_machines()
        for _ in range(2):
            step = await client.call_tool("step", {"session": session, "actions": [DONE]})
            assert step.is_error
            assert "MACHINE_LOST" in text_of(step)
        evaluation = (await client.call_tool("evaluate", {"session": session})).structured_content
        assert evaluation is not None
        assert evaluation["score"] is None
        assert "MACHINE_LOST" in evaluation["void"]


async def test_mistakes_are_tool_errors_and_lose_nothing(desktops: DrawnDesktops) -> None:
    async with connected(desktops) as client:
        unknown = await client.call_tool("reset", {"task": "fake/none"})
        assert (unknown.is_error, "TASK_NOT_FOUND" in text_of(unknown)) == (True, True)
        stranger = await client.call_tool("step", {"session": "x", "actions": [DONE]})
        assert (stranger.is_error, "unknown id" in text_of(stranger)) == (True, True)
        session = await opened(client)
        for actions in ([], [{"action": "explode"}], [{"action": "click", "x": "left", "y": 1}], "click"):
            malformed = await client.call_tool("step", {"session": session, "actions": actions})
            assert (malformed.is_error, "actions" in text_of(malformed)) == (True, True)
        wrong = await client.call_tool(
            "step", {"session": session, "actions": [{"action": "press", "keys": ["nokey"]}]}
        )
        assert (wrong.is_error, text_of(wrong).startswith("action 0: ")) == (False, True)
        assert not (await client.call_tool("step", {"session": session, "actions": [BOX, DONE]})).is_error
        late = await client.call_tool("step", {"session": session, "actions": [BOX]})
        assert (late.is_error, "EPISODE_ENDED" in text_of(late)) == (True, True)
        evaluation = (await client.call_tool("evaluate", {"session": session})).structured_content
        assert evaluation is not None
        assert evaluation["score"] == 1.0
        await client.call_tool("close", {"session": session})
        assert (await client.call_tool("observe", {"session": session})).is_error


async def test_a_wrong_token_is_a_tool_error(guarded_address: str) -> None:
    settings = SessionSettings.connect(guarded_address, token="wrong")  # noqa: S106
    async with client_of(settings, task=TASK) as client:
        result = await client.call_tool("reset", {})
    assert (result.is_error, "token" in text_of(result)) == (True, True)


async def test_a_server_without_a_default_task_asks_for_one(desktops: DrawnDesktops) -> None:
    async with client_of(SessionSettings.connect(desktops.address)) as client:
        result = await client.call_tool("reset", {})
        assert (result.is_error, "task is empty" in text_of(result)) == (True, True)


async def test_a_client_that_leaves_or_is_cancelled_leaves_no_session(desktops: DrawnDesktops) -> None:
    async with connected(desktops) as client:
        await opened(client)
        session = await opened(client)
        actions = [BOX, {"action": "wait", "seconds": 60}]
        step = asyncio.create_task(client.call_tool("step", {"session": session, "actions": actions}))
        await asyncio.to_thread(desktops.wait_until, lambda: desktops.used_count > 0)
        step.cancel()
        await asyncio.wait({step})
        assert step.cancelled()
        evaluation = (await client.call_tool("evaluate", {"session": session})).structured_content
        assert evaluation is not None
        assert evaluation["score"] is None


async def test_an_idle_session_is_void(desktops: DrawnDesktops) -> None:
    async with connected(desktops, idle_timeout=timedelta(seconds=0.01)) as client:
        session = await opened(client)
        await asyncio.to_thread(desktops.wait_returned)
        evaluation = (await client.call_tool("evaluate", {"session": session})).structured_content
        assert evaluation is not None
        assert "without a call" in evaluation["void"]


@pytest.mark.long
async def test_the_command_serves_stdio(desktops: DrawnDesktops) -> None:
    from mcp.client.stdio import StdioServerParameters, stdio_client

    command = ["-m", "trainer", "mcp", "--task", TASK]
    environment = {**os.environ, "ENVD_TARGET": desktops.address}
    parameters = StdioServerParameters(command=sys.executable, args=command, env=environment)
    async with mcp_client(stdio_client(parameters)) as client:
        assert (await play(client, BOX, DONE))["score"] == 1.0
        # Left open, and closed at the end of the process.
        await opened(client)


async def test_the_command_serves_http_until_it_is_interrupted(desktops: DrawnDesktops) -> None:
    command = ["-m", "trainer", "mcp", "--envd", desktops.address, "--task", TASK, "--http", "127.0.0.1:0"]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    line = (await process.stderr.readline()).decode()
    (url,) = re.findall(r"serving MCP at (\S+)", line)
    async with mcp_client(url) as client:
        assert (await play(client, DONE))["score"] == 0.0
        await opened(client)
    process.send_signal(signal.SIGINT)
    errors = await process.stderr.read()
    assert await process.wait() == 130
    assert b"interrupted" in errors
    assert b"Traceback" not in errors


def test_http_is_served_on_loopback_only() -> None:
    result = CliRunner().invoke(app, ["mcp", "--http", "0.0.0.0:8000"])
    assert result.exit_code == 2
    assert "not a loopback address" in result.output


@pytest.mark.long
async def test_the_example_on_the_page_runs(run_example: Callable[..., Awaitable[str]]) -> None:
    assert "score: 1.0" in await run_example("MCP")
