"""A port of the host's loopback that leads to a Unix socket of a container: clients of guestd use URLs."""

import asyncio
import socket
import time
from pathlib import Path

from envd.base.streams import copy
from envd.hypervisor import guest_socket

#: guestd is started again a second after it has ended. In a virtual machine systemd holds its port meanwhile.
_CONNECT_TIMEOUT_S = 10.0
_POLL_S = 0.05
_CHUNK_BYTES = 256 << 10


class Relay:
    """One listening port. Each connection becomes one to the socket."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self) -> int:
        """Listen; return the port. Raises: OSError."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_CHUNK_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Stop to listen and end all connections. Idempotent."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            return
        self._connections.add(task)
        try:
            own = writer.get_extra_info("socket")
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            guest_reader, guest_writer = await self._connect()
            try:
                await asyncio.gather(copy(reader, guest_writer), copy(guest_reader, writer))
            finally:
                guest_writer.close()
        except (OSError, asyncio.CancelledError):
            pass  # the client sees a closed connection
        finally:
            self._connections.discard(task)
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        deadline_s = time.monotonic() + _CONNECT_TIMEOUT_S
        while True:
            try:
                return await guest_socket.connect(self._path, limit=_CHUNK_BYTES)
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(_POLL_S)
