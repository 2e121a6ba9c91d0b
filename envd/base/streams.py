"""Helpers for asyncio's streams: copy one direction of a connection, and close one within a bounded time."""

import asyncio
from contextlib import suppress

CHUNK_BYTES = 64 << 10
_CLOSE_TIMEOUT_S = 5.0


async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Copy one direction until its end; pending bytes are bounded by the transports' buffers. Raises: OSError."""
    while data := await source.read(CHUNK_BYTES):
        sink.write(data)
        await sink.drain()
    with suppress(OSError):
        sink.write_eof()


async def close(writer: asyncio.StreamWriter) -> None:
    """Close a connection; waits a bounded time until pending bytes are sent."""
    writer.close()
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await writer.wait_closed()
