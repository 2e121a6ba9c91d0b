"""Connections of a listener that are joined with others, with real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import pytest_asyncio
import uvloop

from envd.base import streams
from envd.base.streams import copy, relayed

LIMIT = 8


class Service:
    """A service that echoes lines and counts its connections."""

    def __init__(self) -> None:
        self.count = 0
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.count += 1
        while line := await reader.readline():
            writer.write(line)
        writer.close()


@pytest_asyncio.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    server = await asyncio.start_server(service.serve, "127.0.0.1", 0)
    async with server:
        service.port = server.sockets[0].getsockname()[1]
        yield service


async def echo(port: int) -> tuple[bytes, asyncio.StreamWriter]:
    """Open a connection and send a line; return the response, empty if the connection was refused."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with suppress(ConnectionError):
        writer.write(b"line\n")
        return await reader.readline(), writer
    return b"", writer


async def test_connections_beyond_the_limit_are_refused_until_others_end(service: Service) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    port = listener.getsockname()[1]
    writers = []
    async with relayed(listener, "127.0.0.1", service.port, limit=LIMIT):
        for _ in range(LIMIT):
            response, writer = await echo(port)
            assert response == b"line\n"
            writers.append(writer)
        for response, writer in await asyncio.gather(*[echo(port) for _ in range(200)]):
            assert response == b""
            writers.append(writer)
        assert service.count == LIMIT
        writers[0].close()
        async with asyncio.timeout(60):
            while not (await echo_and_close(port)):
                await asyncio.sleep(0.001)
    for writer in writers:
        writer.close()


async def echo_and_close(port: int) -> bytes:
    response, writer = await echo(port)
    writer.close()
    return response


async def test_both_ends_are_closed_however_the_end_of_a_relay_is_interrupted(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing: list[asyncio.StreamWriter] = []
    begun = asyncio.Event()

    async def interrupted(writer: asyncio.StreamWriter) -> None:
        closing.append(writer)
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(streams, "close", interrupted)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    async with relayed(listener, "127.0.0.1", service.port, limit=LIMIT):
        line, writer = await echo(port)
        writer.close()
        await begun.wait()
    assert line
    assert [each.is_closing() for each in closing] == [True, True]


async def test_a_connection_that_is_accepted_as_the_relay_ends_is_closed(service: Service) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with socket.socket() as late:
        async with relayed(listener, "127.0.0.1", service.port, limit=LIMIT):
            late.connect(listener.getsockname())
            # In asyncio of Python 3.11 the connection is accepted now, and its streams are made in the next turn. One
            # turn earlier asyncio itself would leave its transport open.
            for _ in range(3):
                await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert [task for task in asyncio.all_tasks() if task.get_name().startswith("relay:")] == []


def test_a_direction_that_ends_after_its_sink_was_closed_ends_quietly() -> None:
    """uvloop raises RuntimeError where asyncio does not."""

    async def end_late() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            source, (_, sink) = asyncio.StreamReader(), await asyncio.open_connection(sock=ours)
            source.feed_eof()
            sink.close()
            await sink.wait_closed()
            with pytest.raises(RuntimeError, match="closed"):
                sink.write_eof()
            await copy(source, sink)

    uvloop.run(end_late())
