"""Carry the bytes of `ForwardGuestPort` between a client's stream and a connection to a guest."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from cuaenv.v1 import env_pb2

from envd.api.convert_requests import port_data_of
from envd.episodes.port_connection import PortConnection


async def forwarded(
    connection: PortConnection,
    first: env_pb2.ForwardGuestPortRequest,
    requests: AsyncIterator[env_pb2.ForwardGuestPortRequest],
) -> AsyncGenerator[env_pb2.ForwardGuestPortResponse, None]:
    """Yield that the connection is open, and then its bytes, while requests go to the guest; until both have ended.

    Nothing is read ahead of the client: the next bytes are read after the transport has accepted the previous ones.

    Raises:
        EnvdError: See `PortConnection`, or a request failed, for example because its token was revoked.
    """
    sending = asyncio.create_task(_send(connection, first, requests), name=f"send:{connection!r}")
    try:
        yield env_pb2.ForwardGuestPortResponse()
        while data := await connection.read():
            yield env_pb2.ForwardGuestPortResponse(data=data)
        yield env_pb2.ForwardGuestPortResponse(end_of_data=True)
        await sending
        connection.check()
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def _send(
    connection: PortConnection,
    first: env_pb2.ForwardGuestPortRequest,
    requests: AsyncIterator[env_pb2.ForwardGuestPortRequest],
) -> None:
    try:
        await connection.write(port_data_of(first))
        async for request in requests:
            await connection.write(port_data_of(request))
        connection.write_eof()
    except Exception as error:
        connection.abort(error)
