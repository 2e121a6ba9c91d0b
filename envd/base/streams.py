"""Helpers for asyncio's streams: copy one direction of a connection, join two connections, close one in time."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

CHUNK_BYTES = 64 << 10
_CLOSE_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 10.0


async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Copy one direction until its end; pending bytes are bounded by the transports' buffers. Raises: OSError."""
    while data := await source.read(CHUNK_BYTES):
        sink.write(data)
        await sink.drain()
    with suppress(OSError):
        if not sink.is_closing():  # uvloop raises RuntimeError then
            sink.write_eof()


async def receive_descriptor(channel: socket.socket, max_bytes: int) -> tuple[bytes, socket.socket | None]:
    """Return the next data of a socket that does not block, and the socket that came with it, if one did."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(channel.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(channel.fileno())
    data, handles, _, _ = socket.recv_fds(channel, max_bytes, 1)
    if not handles:
        return data, None
    received = socket.socket(fileno=handles[0])
    received.setblocking(False)
    return data, received


async def close(writer: asyncio.StreamWriter) -> None:
    """Close a connection; waits a bounded time until pending bytes are sent."""
    writer.close()
    try:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await writer.wait_closed()
    finally:
        # A peer that reads no more would keep it open.
        writer.transport.abort()


@asynccontextmanager
async def relayed(listener: socket.socket, host: str, port: int, *, limit: int) -> AsyncIterator[None]:
    """Join each connection of a listening socket, in any network namespace, with one to an address during the block.

    Args:
        listener: Closed with the block.
        limit: Most connections at once, each with two file descriptors; further ones are reset.
    """
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # One that was accepted just before the end arrives after it.
        if len(tasks) >= limit or not server.is_serving():
            writer.transport.abort()
            return
        task = asyncio.create_task(_join(reader, writer, host, port), name=f"relay:{port}")
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        # A task that is cancelled before it starts runs no `finally`.
        task.add_done_callback(lambda _: writer.transport.abort())

    server = await asyncio.start_server(accept, sock=listener, start_serving=False)
    try:
        await server.start_serving()
        yield
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


async def _join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    # Both ends notice a broken connection themselves.
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            far_reader, far_writer = await asyncio.open_connection(host, port)
        try:
            await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))
        finally:
            # At once: a task that is cancelled before it starts would close nothing.
            writer.close()
            far_writer.close()
            await asyncio.gather(close(writer), close(far_writer))
