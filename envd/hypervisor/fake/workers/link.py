"""The connection between the daemon and a worker: pickled messages with their lengths, over a socket pair.

Both ends are envd's own processes and trust each other; no data of a guest is unpickled as anything but bytes.
"""

import asyncio
import pickle
import struct
from collections.abc import Callable
from typing import Any, cast

_LENGTH = struct.Struct(">I")


class Link(asyncio.Protocol):
    """One end of the connection."""

    def __init__(self, *, on_message: Callable[[Any], None], on_closed: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_closed = on_closed
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    def send(self, message: object) -> None:
        """Send a message; does nothing once the connection is closed."""
        if self._transport is not None:
            data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
            self._transport.write(_LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        """Close the connection once everything is sent. The other end's messages are dropped."""
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start."""
        # An isinstance check is not possible: uvloop's transports do not subclass asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Handle every complete message received so far."""
        received = self._received
        received += data
        at = 0
        while len(received) >= at + _LENGTH.size:
            end = at + _LENGTH.size + _LENGTH.unpack_from(received, at)[0]
            if len(received) < end:
                break
            message = pickle.loads(memoryview(received)[at + _LENGTH.size : end])  # noqa: S301  (of our own process)
            at = end
            self._on_message(message)
        del received[:at]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Report the end."""
        self._transport = None
        self._on_closed()
