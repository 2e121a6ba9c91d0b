"""Carry streams without a backlog: frames are sent one at a time, and the bytes of a guest's port as they are accepted.

A reader of `paced` gets an item only after it acknowledged the previous one, so that it never gets a stale item.
`forwarded` serves `ForwardGuestPort`, between a client's stream and a connection to a guest.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TypeVar

from cuaenv.v1 import env_pb2
from envd.api.convert_requests import port_data_of
from envd.episodes.guest_access import PortConnection

Item = TypeVar("Item")


class AckTracker:
    """The newest item that a reader acknowledged; after its last message, all items count as acknowledged."""

    def __init__(self) -> None:
        self._acknowledged = 0
        self._is_ended = False
        self._changed = asyncio.Event()

    async def track(self, sequences: AsyncIterator[int]) -> None:
        """Process acknowledged sequences until they end. They may be late, repeated or out of order."""
        async for sequence in sequences:
            self._acknowledged = max(self._acknowledged, sequence)
            self._changed.set()
        self._is_ended = True
        self._changed.set()

    async def wait_for(self, sequence: int) -> None:
        """Return when an item has been acknowledged."""
        while self._acknowledged < sequence and not self._is_ended:
            self._changed.clear()
            await self._changed.wait()


async def paced(items: AsyncGenerator[Item, None], acks: AckTracker) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield numbered items, counted from 1, each only after the previous one was acknowledged."""
    sequence = 0
    async with aclosing(items):
        async for item in items:
            sequence += 1
            yield sequence, item
            await acks.wait_for(sequence)


async def forwarded(
    connection: PortConnection,
    first: env_pb2.ForwardGuestPortRequest,
    requests: AsyncIterator[env_pb2.ForwardGuestPortRequest],
) -> AsyncGenerator[env_pb2.ForwardGuestPortResponse, None]:
    """Yield that the connection is open, and then its bytes, while requests go to the guest; until both have ended.

    Nothing is read ahead of the client: the next bytes are read after the transport has accepted the previous ones.
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
