"""Local ports that lead to a port of an episode's guest: each connection is one `ForwardGuestPort` stream."""

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc

from cuaenv.client.connection import DaemonConnection, sent_status
from cuaenv.client.errors import (
    AccessDenied,
    BadRequest,
    ClientClosed,
    EnvError,
    GuestRefused,
    NotFound,
    NotSupported,
    SampleVoid,
    error_of,
)
from cuaenv.v1 import env_pb2

logger = logging.getLogger(__name__)

_HOST: Final = "127.0.0.1"
_CHUNK_BYTES: Final = 64 << 10
#: Errors that every later connection would meet too.
_FINAL: Final = (NotFound, AccessDenied, NotSupported, BadRequest, SampleVoid, ClientClosed)


class PortForward:
    """A listener on 127.0.0.1 whose connections lead to one port of a guest, until its context ends."""

    def __init__(self, connection: DaemonConnection, episode_id: str, port: int) -> None:
        self._connection = connection
        self._episode_id = episode_id
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.local_port = 0
        """The port of this host."""
        self.error: EnvError | None = None
        """Why the latest connection failed that did; None if none has."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address} to port {self._port} of {self._episode_id}>"

    @property
    def address(self) -> str:
        """The listener's `HOST:PORT`."""
        return f"{_HOST}:{self.local_port}"

    async def wait(self) -> None:
        """Wait for an error that every later connection would meet too, and raise it.

        Raises:
            EnvError: The episode has ended, its pool allows no access, or the daemon cannot forward ports.
        """
        await asyncio.shield(self._ended)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer), name=f"forward:{self.address}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before it starts runs no `finally`.
        task.add_done_callback(lambda _: writer.close())

    async def aclose(self) -> None:
        """End all connections."""
        self._ended.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._carry(reader, writer)
        except EnvError as error:
            # Programs wait for a port by connecting to it repeatedly.
            level = logging.INFO if isinstance(error, GuestRefused) else logging.WARNING
            logger.log(level, "%s, port %d: %s", self._episode_id, self._port, error)
            self.error = error
            _reset(writer)
            if isinstance(error, _FINAL) and not self._ended.done():
                self._ended.set_exception(error)
                self._ended.exception()  # a forward without a `wait` logs no warning
        except OSError:  # the local program is gone, or the client was closed
            _reset(writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # On the connection that is never replaced: a stream may last as long as its episode.
        call: Any = self._connection.stub().ForwardGuestPort()
        sent = sent_status(call)
        sending: asyncio.Task[None] | None = None
        try:
            await call.write(env_pb2.ForwardGuestPortRequest(episode_id=self._episode_id, port=self._port))
            await call.read()  # the connection is open
            sending = asyncio.create_task(_send(reader, call), name=f"forward-send:{self.address}")
            while (response := await call.read()) is not grpc.aio.EOF:
                writer.write(response.data)
                await writer.drain()
                if response.end_of_data:
                    writer.write_eof()
        except grpc.aio.AioRpcError as failure:
            raise error_of(sent(failure), host=self._connection.target) from failure
        except asyncio.CancelledError:
            # The call was cancelled: by `_send`, or because the channel was closed.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ConnectionAbortedError from None
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            call.cancel()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Reset a connection: the program that opened it must not take this for a regular end."""
    if (own := writer.get_extra_info("socket")) is not None:  # None if the program closed it
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _send(reader: asyncio.StreamReader, call: Any) -> None:
    try:
        while data := await reader.read(_CHUNK_BYTES):
            await call.write(env_pb2.ForwardGuestPortRequest(data=data))
        await call.done_writing()
    except OSError:
        call.cancel()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass  # the call has ended; who reads it reports why


@asynccontextmanager
async def forwarded(
    connection: DaemonConnection, episode_id: str, port: int, *, local_port: int = 0
) -> AsyncIterator[PortForward]:
    """Listen on a port of 127.0.0.1 during the block, and forward its connections to a port of an episode's guest.

    Args:
        port: On the guest's 127.0.0.1.
        local_port: The port to listen on; 0 for a free one.

    Raises:
        ValueError: `port` or `local_port` is not a port.
        OSError: The local port is in use.
    """
    if not 1 <= port <= 65_535 or not 0 <= local_port <= 65_535:
        raise ValueError(f"forward {port} to {local_port}: a port is 1 to 65535")
    forward = PortForward(connection, episode_id, port)
    server = await asyncio.start_server(forward.accept, _HOST, local_port)
    try:
        forward.local_port = server.sockets[0].getsockname()[1]
        yield forward
    finally:
        server.close()
        await forward.aclose()
        await server.wait_closed()
