"""The guest agent's channel against an agent of the guest's own making."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from envd.base.errors import GuestUnresponsive
from envd.hypervisor.agent_channel import AgentChannel

Respond = Callable[[dict[str, Any]], bytes]


@asynccontextmanager
async def channel_to(respond: Respond) -> AsyncIterator[AgentChannel]:
    """Open a channel to an agent that answers each request with the bytes of `respond`."""

    served: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        served.add(task)
        with suppress(OSError):
            while line := await reader.readline():
                writer.write(respond(json.loads(line.lstrip(b"\xff"))))
                await writer.drain()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        path = Path(directory, "agent.sock")
        server = await asyncio.start_unix_server(serve, str(path))
        channel = AgentChannel(path, machine_id="m-1")
        try:
            yield channel
        finally:
            await channel.close()
            server.close()
            await asyncio.gather(*served)


def answering(answer: bytes, *, before_sync: bytes = b"") -> Respond:
    """Synchronise, after some other data, and give every command this answer."""

    def respond(request: dict[str, Any]) -> bytes:
        if request["execute"] == "guest-sync-delimited":
            return before_sync + b"\xff" + json.dumps({"return": request["arguments"]["id"]}).encode() + b"\n"
        return answer

    return respond


def response(size: int) -> bytes:
    return b'{"return": "' + b"x" * size + b'"}\n'


async def test_an_agent_that_never_answers_the_sync_request_is_given_up_before_the_timeout() -> None:
    async with channel_to(lambda _request: b'\xff{"return": 0}\n' * 5000) as channel:
        with pytest.raises(GuestUnresponsive, match="sync requests"):
            await channel.command("guest-ping", timeout_s=60)


async def test_garbage_before_the_sync_answer_is_bounded() -> None:
    async with channel_to(answering(response(1), before_sync=b"x" * (25 << 20))) as channel:
        with pytest.raises(GuestUnresponsive, match="bytes before the answer to a sync request"):
            await channel.command("guest-ping", timeout_s=60)


async def test_other_tasks_run_while_buffered_sync_answers_are_skipped() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with channel_to(answering(response(1), before_sync=b"\xff\n" * 1000)) as channel:
        counting = asyncio.create_task(count())
        assert await channel.command("guest-ping", timeout_s=60) == "x"
        counting.cancel()
    assert turns >= 1000


async def test_unread_responses_of_earlier_callers_are_skipped() -> None:
    earlier = response(23 << 20) + b'\xff{"return": 0}\n' + response(1)
    async with channel_to(answering(b'{"return": {}}\n', before_sync=earlier)) as channel:
        assert await channel.command("guest-ping", timeout_s=60) == {}


@pytest.mark.parametrize(
    ("command", "limit_bytes"),
    [("guest-ping", 1 << 20), ("guest-exec", 1 << 20), ("guest-file-read", 2 << 20), ("guest-exec-status", 24 << 20)],
)
async def test_a_response_is_limited_by_its_command(command: str, limit_bytes: int) -> None:
    at_limit = response(limit_bytes - len(b'{"return": ""}'))
    async with channel_to(answering(at_limit)) as channel:
        await channel.command(command, timeout_s=60)
    async with channel_to(answering(response(limit_bytes))) as channel:
        with pytest.raises(GuestUnresponsive, match=f"more than {limit_bytes} bytes"):
            await channel.command(command, timeout_s=60)


async def test_a_response_of_millions_of_values_is_rejected_unparsed() -> None:
    bomb = b'{"return": [' + b"[]," * (4 << 20) + b"[]]}\n"
    async with channel_to(answering(bomb)) as channel:
        with pytest.raises(GuestUnresponsive, match="outside of strings"):
            await channel.command("guest-exec-status", timeout_s=60)
