"""Arbitrary responses of a guest agent, as bytes or JSON: an `EnvdError`, in bounded time. The guest is untrusted."""

import asyncio
import json
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cuaenv.results import CommandResult
from envd.base.errors import EnvdError, GuestError
from envd.desktop.agent import GuestAgent
from envd.hypervisor.agent_channel import AgentChannel
from tests.support.fuzz import corpus, fuzzed, inputs, json_values
from tests.support.stubs import StubChannels

DEEP = "[" * 20_000 + "]" * 20_000
#: Nothing that a guest says makes a message longer than this.
MAX_MESSAGE_CHARS = 4000

#: What the agent's answers hold where all is well, so that a wrong part is met behind right ones.
PROPER: dict[str, Any] = {
    "pid": 7,
    "exited": True,
    "exitcode": 0,
    "out-data": "YQ==",
    "err-data": "",
    "count": 1,
    "eof": True,
    "buf-b64": "YQ==",
    "id": "debian",
    "pretty-name": "Debian",
}
answers = json_values | st.dictionaries(st.sampled_from([*PROPER, "signal", "out-truncated"]), json_values).map(
    lambda wrong: {**PROPER, **wrong}
)


def check_message(error: EnvdError) -> None:
    """An error message quotes the guest, but always truncated."""
    assert len(str(error)) <= MAX_MESSAGE_CHARS


class FuzzedChannels(StubChannels):
    """Returns prepared responses in order, then an error."""

    def __init__(self, answers: list[Any]) -> None:
        super().__init__()
        self._answers = answers

    def answer(self, command: str, fields: dict[str, Any], timeout_s: float) -> Any:
        if not self._answers:
            raise GuestError(f"{command}: enough")
        return self._answers.pop(0)


CALLS: dict[str, Callable[[GuestAgent], Awaitable[object]]] = {
    "run": lambda agent: agent.run(["id"], timeout_s=0.01, stdin=b"x"),
    "read_file": lambda agent: agent.read_file("/a", timeout_s=0.01, max_bytes=1000),
    "write_file": lambda agent: agent.write_file("/a", b"abc", timeout_s=0.01),
    "set_time": lambda agent: agent.set_time(10**18, timeout_s=0.01),
}


@fuzzed(100)
@given(st.sampled_from(sorted(CALLS)), st.lists(answers | st.integers(0, 9), max_size=5))
@example("run", [PROPER, {**PROPER, "out-data": "é"}])
@example("read_file", [1, {"buf-b64": "é", "count": 1}])
@example("run", [{"pid": "x" * 100_000}])
@example("write_file", [1, {"count": -1}])
def test_arbitrary_responses_of_the_agent_are_handled(call: str, responses: list[Any]) -> None:
    async def ask() -> object:
        return await asyncio.wait_for(CALLS[call](GuestAgent(FuzzedChannels(responses))), 60)

    try:
        result = asyncio.run(ask())
    except EnvdError as error:
        check_message(error)
    else:
        assert isinstance(result, CommandResult | bytes | None)


# On the wire


def serve(listener: socket.socket, replies: list[bytes]) -> None:
    """Answer each line of each connection with the next reply, then disconnect. Ends when the listener is shut down."""
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with suppress(OSError), connection, connection.makefile("rb") as lines:
                for reply in replies:
                    if not lines.readline():
                        break
                    connection.sendall(reply)


async def exchange(directory: str, replies: list[bytes], *, skip_limit_bytes: int = 1 << 20) -> None:
    """Call over a socket whose other end sends one reply per line and then disconnects."""
    path = Path(directory, "agent.sock")
    # In a thread: asyncio accepts a connection some iterations after its client is gone, perhaps after the loop's end.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        serving = threading.Thread(target=serve, args=(listener, replies))
        serving.start()
        channel = AgentChannel(path, machine_id="m-1", skip_limit_bytes=skip_limit_bytes)
        try:
            for _ in range(2):
                try:
                    await channel.command("guest-ping", timeout_s=0.01)
                except EnvdError as error:
                    check_message(error)
        finally:
            await channel.close()
            listener.shutdown(socket.SHUT_RDWR)
            await asyncio.to_thread(serving.join)


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


SYNCED = b"\xff" + _line({"return": 1})
replies = (
    st.binary(max_size=60)
    | json_values.map(_line)
    | st.just(SYNCED)
    | st.builds(lambda v: _line({"return": v}), json_values)
)


@fuzzed(40)
@given(st.lists(replies | inputs("agent"), max_size=4), st.booleans())
@example([DEEP.encode() + b"\n"], True)
@example([_line({"error": {"desc": "x" * 100_000}})], True)
@example([b"x" * 5000], False)
@example([b"\xff" + DEEP.encode() + b"\n"], False)
@example([b"\xff" + b"x" * 5000 + b"\n"], False)
def test_arbitrary_data_on_the_agents_socket_is_handled(responses: list[bytes], synced: bool) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        replies, limit_bytes = ([SYNCED, *responses], 1 << 20) if synced else (responses, 4096)
        asyncio.run(asyncio.wait_for(exchange(directory, replies, skip_limit_bytes=limit_bytes), 60))


@pytest.mark.parametrize("data", corpus("agent"))
def test_every_response_of_the_corpus_is_handled(data: bytes) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        asyncio.run(asyncio.wait_for(exchange(directory, [data]), 60))
