"""Answers of a hostile guest, for the faults of a fake machine: through its agent, its guestd and its display.

The fake guest agent has no wire of its own. A hostile one gets a socket with the QEMU backend's client, which has to
withstand it.
"""

import asyncio
import functools
import json
import struct
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from envd.hypervisor.agent_channel import AgentChannel
from tests.support.faulty import Agent

_PIECE = b"[]," * 20_000
#: 23 MiB: just below the agent channel's limit.
_AGENT_PIECE_COUNT = (23 << 20) // len(_PIECE)
#: 12 MiB: just below the limit of an accessibility tree.
_GUESTD_PIECE_COUNT = (12 << 20) // len(_PIECE)
_SLOW_INTERVAL_S = 0.2
_HALF_ANSWER_S = 0.5
_DESKTOP_SIZE = -223

#: How a hostile guest agent answers: bytes without end, 23 MiB of empty lists, or half an answer.
AgentAttack = Literal["endless", "large", "half"]
#: How a hostile guestd answers: 12 MiB of empty lists, 200,000 nested lists, or one byte at a time without end.
GuestdAttack = Literal["large", "nested", "slow"]
#: How a hostile display answers a request: a screen of 4096x4096, or 65,535 rectangles.
DisplayAttack = Literal["size", "flood"]


def hostile_agent(attack: AgentAttack) -> Agent:
    """Return a guest agent that attacks its reader."""
    return functools.partial(_ask_hostile_agent, attack)


async def _ask_hostile_agent(
    attack: AgentAttack, command: str, arguments: Mapping[str, JsonValue] | None, timeout_s: float
) -> JsonValue:
    """Run a command on a guest agent that attacks its reader. Raises: GuestUnresponsive."""
    with tempfile.TemporaryDirectory(prefix="envd-hostile-") as directory:
        socket = Path(directory, "agent")
        server = await asyncio.start_unix_server(functools.partial(_serve_agent, attack), str(socket))
        channel = AgentChannel(socket, machine_id="hostile")
        try:
            return await channel.command(command, arguments, timeout_s=timeout_s)
        finally:
            await channel.close()
            server.close()


async def _serve_agent(attack: AgentAttack, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while line := await reader.readline():
            if attack == "endless":
                await _send(writer, b"\xff\n" * 30_000, count=None)
            request = json.loads(line.lstrip(b"\xff"))
            if request["execute"] == "guest-sync-delimited":
                await _send(writer, b'\xff{"return": %d}\n' % request["arguments"]["id"])
            elif attack == "half":
                await _send(writer, b'{"return": {"pid"')
                await asyncio.sleep(_HALF_ANSWER_S)
                break
            elif request["execute"] == "guest-exec":
                # The answer with the highest limit is that to the next command.
                await _send(writer, b'{"return": {"pid": 1}}\n')
            else:
                await _send(writer, b'{"return": [')
                await _send(writer, _PIECE, count=_AGENT_PIECE_COUNT)
                await _send(writer, b"[]]}\n")
    writer.close()


async def _send(writer: asyncio.StreamWriter, data: bytes, *, count: int | None = 1) -> None:
    """Send data `count` times; None for until the reader closes the connection. Raises: OSError: it has closed it."""
    sent_count = 0
    while count is None or sent_count < count:
        writer.write(data)
        await writer.drain()
        # `drain` returns without a turn of the event loop while the buffer is small.
        await asyncio.sleep(0)
        sent_count += 1


async def guestd_body(attack: GuestdAttack) -> AsyncIterator[bytes]:
    """Yield the pieces of a hostile body."""
    match attack:
        case "large":
            yield b'{"AT": "<a/>", "x": ['
            for _ in range(_GUESTD_PIECE_COUNT):
                yield _PIECE
            yield b"[]]}"
        case "nested":
            yield b"[" * 200_000
        case _:
            while True:
                yield b" "
                await asyncio.sleep(_SLOW_INTERVAL_S)


@functools.cache
def display_update(attack: DisplayAttack) -> bytes:
    """Return a hostile framebuffer update."""
    if attack == "size":
        return struct.pack(">BxHHHHHi", 0, 1, 0, 0, 4096, 4096, _DESKTOP_SIZE)
    count = 0xFFFF
    rects = (struct.pack(">HHHHi4x", index % 256, index // 256, 1, 1, 0) for index in range(count))
    return struct.pack(">BxH", 0, count) + b"".join(rects)
