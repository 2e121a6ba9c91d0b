"""The gateway: lets a guest reach hosts through a proxy.

Guests have no route out of their network. If a pool has an exit, guestd listens on the guest's loopback as an HTTP
proxy and relays each program to a connection that was opened from here. The exit is on this side, because the guest
cannot tamper with it. `HostExit` parses the request, checks the allow list, resolves the name and connects. Addresses
that are not public are rejected unless they are listed themselves: a listed name must not lead into the host's own
network. `envd.integrations.web` has the exit that records and replays.
"""

import asyncio
import logging
import math
import socket
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, Protocol
from urllib.parse import urlsplit

from cuaenv.results import UnrecordedRequest
from envd.base.errors import GuestUnresponsive
from envd.base.streams import close, copy
from envd.desktop.allow_list import AllowList, Destination
from envd.desktop.tunnel import Connect, open_tunnel

logger = logging.getLogger(__name__)

#: Connections kept waiting in the guest, and the limit on all connections of one guest.
_WAITING_COUNT = 4
_MAX_CONNECTIONS = 64
_OPEN_TIMEOUT_S = 20.0
_CONNECT_TIMEOUT_S = 20.0
#: Of the unexpected errors of a gateway, one is logged in this time.
_ERROR_INTERVAL_S = 60.0
#: Limit on rejected destinations logged per pool.
_MAX_LOGGED = 256
#: Threads that look names up. Those of the event loop are for steps: guests choose names whose servers do not answer.
_RESOLVERS: Final = ThreadPoolExecutor(16, thread_name_prefix="resolve")
#: Header of responses that no web server sent (RFC 9209).
PROXY_STATUS = "Proxy-Status"


def parse_head(head: bytes) -> tuple[Destination, bytes]:
    """Parse a proxy request (RFC 9112, section 3.2); return its destination and the bytes to send there first.

    CONNECT opens a tunnel and sends nothing; other requests are rewritten to origin form, with the destination as Host.

    Raises:
        ValueError: The bytes are not a proxy request.
    """
    lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    if any("\r" in line or "\n" in line or line[:1].isspace() for line in lines):
        # Servers differ in what they read here, for example a second Host.
        raise ValueError("lines must end with CR LF and not be folded")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise ValueError("expected METHOD TARGET HTTP/1.1")
    method, target, version = words
    url = urlsplit(f"//{target}" if method == "CONNECT" else target)
    host, port = url.hostname, url.port
    if method == "CONNECT":
        if not host or not port:
            raise ValueError("CONNECT takes HOST:PORT")
        return Destination(host, port), b""
    if url.scheme != "http" or not host:
        raise ValueError("expected an http:// URL; use CONNECT for other schemes")
    kept = [line for line in lines[1:] if line.partition(":")[0].strip().lower() not in _REPLACED]
    name = f"[{host}]" if ":" in host else host
    listed = name if port in {None, 80} else f"{name}:{port}"
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    rewritten = "\r\n".join([f"{method} {path} {version}", f"Host: {listed}", *kept, "Connection: close", "", ""])
    return Destination(host, port or 80), rewritten.encode("latin-1")


#: Headers for one hop, and the one that could name a host other than the checked one.
_REPLACED = {"host", "connection", "keep-alive", "proxy-connection", "proxy-authorization"}

Resolve = Callable[[str, int], Awaitable[list[str]]]


async def _resolve(host: str, port: int) -> list[str]:
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        found = await asyncio.get_running_loop().run_in_executor(_RESOLVERS, look_up)
    except ValueError as error:  # a label that is empty or has more than 63 characters, or NUL
        raise OSError(f"{host[:200]} is not a host name: {error}") from error
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class Exit(Protocol):
    """Serves the proxy requests of guests."""

    @property
    def authority(self) -> str:
        """Certificate of the authority that its guests trust, PEM; empty for none."""

    def take_unrecorded(self, machine_id: str, /) -> tuple[UnrecordedRequest, ...]:
        """Return the requests of a machine's guest that its recording lacked since the last call, oldest first."""

    async def __call__(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, machine_id: str, /
    ) -> None:
        """Serve one connection of a program, whose first request has this head. Raises: OSError: It broke."""


class GuestGateway:
    """The gateway of one guest. Call `open` once the guest runs; `close` ends every connection.

    Args:
        guestd: Address on the host of the guest's guestd.
        machine_id: The machine, for the exit and for logs.
    """

    def __init__(
        self, guestd: tuple[str, int], serve: Exit, *, machine_id: str, connect: Connect = asyncio.open_connection
    ) -> None:
        self._guestd = guestd
        self._serve = serve
        self._machine_id = machine_id
        self._connect = connect
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting_count = 0
        self._closed = False
        self._logged_s = -math.inf
        """When an unexpected error was last logged."""

    async def open(self) -> None:
        """Make the proxy available to the guest's programs. Raises: GuestUnresponsive: guestd does not answer."""
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                reader, writer = await open_tunnel(self._guestd, "/envd/gateway/open", connect=self._connect)
                await reader.read()
                await close(writer)
        except (OSError, EOFError, TimeoutError) as error:
            raise GuestUnresponsive(f"guestd on {self._machine_id} did not open its gateway: {error}") from error
        self._refill()

    async def close(self) -> None:
        """End all connections. Idempotent."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _refill(self) -> None:
        while not self._closed and self._waiting_count < _WAITING_COUNT and len(self._tasks) < _MAX_CONNECTIONS:
            self._waiting_count += 1
            task = asyncio.create_task(self._run_connection(), name=f"gateway:{self._machine_id}")
            self._tasks.add(task)
            task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The guest's programs decide how often this happens.
            now_s = time.monotonic()
            is_due = now_s - self._logged_s >= _ERROR_INTERVAL_S
            self._logged_s = now_s if is_due else self._logged_s
            level = logging.ERROR if is_due else logging.DEBUG
            logger.log(level, "%s: a gateway connection failed", self._machine_id, exc_info=error)
        self._refill()

    async def _run_connection(self) -> None:
        """Wait in the guest for one program, and serve it."""
        is_waiting = True
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await open_tunnel(self._guestd, "/envd/gateway/wait", connect=self._connect)
            head = await reader.readuntil(b"\r\n\r\n")
            is_waiting = False
            self._waiting_count -= 1
            self._refill()
            await self._serve(head, reader, writer, self._machine_id)
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            logger.debug("%s: gateway: %s", self._machine_id, error)
            if is_waiting:
                await asyncio.sleep(1.0)  # guestd or the guest is ending: do not retry immediately
        finally:
            if is_waiting:
                self._waiting_count -= 1
            if writer is not None:
                await close(writer)


class HostExit:
    """Connects guests to the hosts of an allow list."""

    authority = ""

    def __init__(
        self, allowed: AllowList, *, connect: Connect = asyncio.open_connection, resolve: Resolve = _resolve
    ) -> None:
        self._allowed = allowed
        self._connect = connect
        self._resolve = resolve
        self._logged: set[str] = set()

    def take_unrecorded(self, machine_id: str) -> tuple[UnrecordedRequest, ...]:  # noqa: ARG002
        """See `Exit`: it has no recording."""
        return ()

    async def __call__(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, machine_id: str
    ) -> None:
        """Serve one connection of a program. Raises: OSError: It broke."""
        try:
            destination, first = parse_head(head)
        except ValueError as error:
            return await send_error(writer, "400 Bad Request", str(error))
        if not self._allowed.allows(destination):
            self._log_rejected(destination, machine_id)
            message = f"{destination} is not in this desktop's list of allowed hosts"
            return await send_error(writer, "403 Forbidden", message)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                far_reader, far_writer = await self._connect_to(destination)
        except PermissionError as error:
            self._log_rejected(destination, machine_id)
            return await send_error(writer, "403 Forbidden", str(error))
        except (OSError, TimeoutError) as error:
            message = f"{destination} cannot be reached: {error or 'timed out'}"
            return await send_error(writer, "502 Bad Gateway", message)
        try:
            if first:
                far_writer.write(first)
            else:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))
        finally:
            await close(far_writer)
        return None

    async def _connect_to(self, destination: Destination) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        addresses = await self._resolve(destination.host, destination.port)
        # Connect to the checked address: resolving the name again could return another one.
        allowed = [address for address in addresses if self._allowed.allows_address(address, destination)]
        if not allowed:
            raise PermissionError(f"{destination} has no public address")
        failure: OSError = ConnectionError("no address answers")
        for address in allowed:
            try:
                return await self._connect(address, destination.port)
            except OSError as error:
                failure = error
        raise failure

    def _log_rejected(self, destination: Destination, machine_id: str) -> None:
        text = str(destination)[:200]
        if text not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(text)
            logger.info("%s: rejected %r, which is not in the list of allowed hosts", machine_id, text)


async def send_error(writer: asyncio.StreamWriter, status: str, message: str) -> None:
    """Send a response of the proxy's own. Raises: OSError."""
    body = f"{message}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}{PROXY_STATUS}: envd\r\nConnection: close\r\n\r\n".encode() + body)
    await writer.drain()
