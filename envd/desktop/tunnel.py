"""Connections through guestd: to the host's gateway, and to ports of the guest's loopback."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from envd.base.channels import GUESTD_PORT
from envd.base.clock import running_timeout
from envd.base.errors import GuestError, GuestUnresponsive
from envd.desktop.guestd import failure_text

_OPEN_TIMEOUT_S = 20.0
_MAX_ERROR_BYTES = 64 << 10
_HEAD = re.compile(rb"HTTP/1\.[01] (\d{3}) ")

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[str, int], Awaitable[Streams]]


class TunnelRefused(ConnectionError):
    """guestd answered a request for a tunnel with an error, or with something else than HTTP (status 0)."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"guestd returned {status}: {text}")
        self.status = status
        self.text = text


async def open_tunnel(address: tuple[str, int], path: str, *, connect: Connect = asyncio.open_connection) -> Streams:
    """Send a POST to guestd and return the connection after the head of a successful response.

    Raises:
        TunnelRefused: guestd returned an error.
        OSError, EOFError: The connection failed.
    """
    reader, writer = await connect(*address)
    try:
        writer.write(f"POST {path} HTTP/1.1\r\nHost: guest\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        head = _HEAD.match(await reader.readuntil(b"\r\n\r\n"))
        status = int(head[1]) if head else 0
        if status not in {101, 200}:
            body = bytearray()
            while len(body) < _MAX_ERROR_BYTES and (part := await reader.read(_MAX_ERROR_BYTES - len(body))):
                body += part
            raise TunnelRefused(status, failure_text(bytes(body)))  # noqa: TRY301 -- it closes the connection too
    except asyncio.LimitOverrunError as error:
        writer.close()
        raise TunnelRefused(0, str(error)) from error
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def open_port(guestd_url: str, port: int, *, machine_id: str) -> Streams:
    """Connect to a port of a guest's loopback. guestd's own is reached directly, also if it is OSWorld's service.

    Raises:
        GuestError: Nothing listens on the port, or the guest's service cannot forward ports.
    """
    url = urlsplit(guestd_url)
    address = (url.hostname or "", url.port or 0)
    try:
        async with running_timeout(_OPEN_TIMEOUT_S):
            if port == GUESTD_PORT:
                return await asyncio.open_connection(*address)
            return await open_tunnel(address, f"/envd/forward?port={port}")
    except TunnelRefused as error:
        if error.status == 404:
            raise GuestError(
                f"machine {machine_id}: its image's service cannot forward ports; build the image with this release"
            ) from error
        raise GuestError(f"machine {machine_id}: {error.text if error.status else error}") from error
    except (OSError, EOFError, TimeoutError) as error:
        raise GuestUnresponsive(
            f"machine {machine_id}: guestd did not connect to port {port}: {error or 'timed out'}"
        ) from error
