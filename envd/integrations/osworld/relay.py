"""Forward connections to a sandbox's loopback listener to one guest's service, and nowhere else."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from yarl import URL

_CHUNK_BYTES = 1 << 16
_CONNECT_TIMEOUT_S = 10.0
#: Concurrent connections of a job; OSWorld uses a few. Each takes two file descriptors of this process.
_MAX_CONNECTIONS = 32


@asynccontextmanager
async def relayed(listener: socket.socket, guest_url: str) -> AsyncIterator[None]:
    """Forward connections of a listening socket, in any network namespace, to the guest until the block ends.

    At most 32 at once; further connections are reset.

    Args:
        listener: Closed with the block.
        guest_url: Of the guest's service, on the host's loopback.
    """
    url = URL(guest_url)
    running: set[asyncio.Task[None] | None] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if len(running) >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        running.add(task)
        try:
            # Both ends notice a broken connection themselves; on cancellation the sandbox is gone.
            with suppress(OSError, TimeoutError, asyncio.CancelledError):
                await _carry(reader, writer, url)
        finally:
            running.discard(task)
            writer.close()

    server = await asyncio.start_server(carry, sock=listener, start_serving=False)
    try:
        await server.start_serving()
        yield
    finally:
        server.close()
        carrying = [task for task in running if task is not None]
        for task in carrying:
            task.cancel()
        if carrying:
            await asyncio.wait(carrying)
        await server.wait_closed()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, url: URL) -> None:
    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
        guest_reader, guest_writer = await asyncio.open_connection(url.host, url.port)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_pump(reader, guest_writer))
            group.create_task(_pump(guest_reader, writer))
    except* OSError as group_error:
        raise group_error.exceptions[0] from None
    finally:
        guest_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
