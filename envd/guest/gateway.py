"""Let a guest reach a few places, and nothing else: a proxy whose far end is here.

Guests have no network that leads anywhere. Where a pool allows some hosts, guestd listens on the guest's own loopback
as an HTTP proxy, and hands what comes to connections that were made from here: what the guest may reach is decided on
this side, where the guest cannot touch it. Names are resolved here, and addresses that are not public are refused
unless they are listed as such: a name in the list must not lead into the host's own network.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from urllib.parse import urlsplit

from envd.errors import GuestUnresponsive
from envd.guest.allow_list import AllowList, Place

_log = logging.getLogger(__name__)

#: Connections kept waiting in the guest, and most that carry something at once.
_WAITING = 4
_MOST = 64
_CHUNK_BYTES = 64 << 10
_ANSWER_S = 20.0
_DIAL_S = 20.0
_CLOSE_S = 5.0
#: Hosts of which is told that they were asked for in vain; after that the guest is not worth listening to.
_MOST_TOLD = 32


class BadRequest(Exception):
    """What a program said is no request to a proxy."""


def parse_head(head: bytes) -> tuple[Place, bytes]:
    """Read a request to a proxy (RFC 9112, section 3.2): where it goes, and what to send there first.

    Of a `CONNECT` nothing is sent on. Any other request is made one to its origin, on a connection of its own.

    Raises:
        BadRequest: It is none.
    """
    lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise BadRequest("expected METHOD TARGET HTTP/1.1")
    method, target, version = words
    try:
        url = urlsplit(f"//{target}" if method == "CONNECT" else target)
        host, port = url.hostname, url.port
    except ValueError as error:
        raise BadRequest(str(error)) from error
    if method == "CONNECT":
        if not host or not port:
            raise BadRequest("CONNECT takes HOST:PORT")
        return Place(host, port), b""
    if url.scheme != "http" or not host:
        raise BadRequest("expected an http:// address; for others there is CONNECT")
    kept = [line for line in lines[1:] if line.partition(":")[0].strip().lower() not in _HOP_BY_HOP]
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    said = "\r\n".join([f"{method} {path} {version}", *kept, "Connection: close", "", ""])
    return Place(host, port or 80), said.encode("latin-1")


_HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "proxy-authorization"}

Dial = Callable[[str, int], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
Resolve = Callable[[str, int], Awaitable[list[str]]]


async def _resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=1)  # SOCK_STREAM
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class Gateway:
    """One guest's way out. `open` once the guest runs; `close` ends every connection."""

    def __init__(
        self,
        guestd: tuple[str, int],
        allowed: AllowList,
        *,
        machine_id: str,
        dial: Dial = asyncio.open_connection,
        resolve: Resolve = _resolve,
    ) -> None:
        """Set one up.

        Args:
            guestd: Address of the guest's guestd on the host.
            allowed: What it may reach.
            machine_id: For logs.
            dial: Opens connections, to the guest and to what it may reach.
            resolve: Finds the addresses of a name.
        """
        self._guestd = guestd
        self._allowed = allowed
        self._machine_id = machine_id
        self._dial = dial
        self._resolve = resolve
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting_count = 0
        self._told: set[str] = set()
        self._closed = False

    def __repr__(self) -> str:
        return (
            f"<Gateway of {self._machine_id} to {len(self._allowed.entries)} places | {len(self._tasks)} connections>"
        )

    async def open(self) -> None:
        """Have the guest's programs find a proxy. Raises: GuestUnresponsive: guestd does not answer."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await self._ask("/envd/gateway/open")
                await reader.read()
                await _end(writer)
        except (OSError, EOFError, TimeoutError) as error:
            raise GuestUnresponsive(f"guestd on {self._machine_id} opens no gateway: {error}") from error
        self._refill()

    async def close(self) -> None:
        """End all connections. Idempotent."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _refill(self) -> None:
        while not self._closed and self._waiting_count < _WAITING and len(self._tasks) < _MOST:
            self._waiting_count += 1
            task = asyncio.create_task(self._carry(), name=f"gateway:{self._machine_id}")
            self._tasks.add(task)
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("gateway of %s broke", self._machine_id, exc_info=error)
        self._refill()

    async def _ask(self, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self._dial(*self._guestd)
        try:
            await self._asked(path, reader, writer)
        except BaseException:
            writer.close()
            raise
        return reader, writer

    @staticmethod
    async def _asked(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"POST {path} HTTP/1.1\r\nHost: guest\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.readuntil(b"\r\n\r\n")
        if answer.split(b" ", 2)[1] not in {b"101", b"200"}:
            raise ConnectionError(answer.split(b"\r\n")[0].decode("latin-1"))

    async def _carry(self) -> None:
        """Wait in the guest for one program, and carry what it and a place say to each other."""
        is_waiting = True
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await self._ask("/envd/gateway/wait")
            head = await reader.readuntil(b"\r\n\r\n")
            is_waiting = False
            self._waiting_count -= 1
            self._refill()
            await self._serve(head, reader, writer)
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            _log.debug("gateway of %s: %s", self._machine_id, error)
            if is_waiting:
                await asyncio.sleep(1.0)  # the guest is going, or guestd is: not to be asked again at once
        finally:
            if is_waiting:
                self._waiting_count -= 1
            if writer is not None:
                await _end(writer)

    async def _serve(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            place, first = parse_head(head)
        except BadRequest as error:
            return await _refuse(writer, "400 Bad Request", str(error))
        if not self._allowed.permits(place):
            self._tell_refused(place)
            return await _refuse(writer, "403 Forbidden", f"{place} is not in this desktop's list of allowed hosts")
        try:
            async with asyncio.timeout(_DIAL_S):
                far_reader, far_writer = await self._reach(place)
        except PermissionError as error:
            self._tell_refused(place)
            return await _refuse(writer, "403 Forbidden", str(error))
        except (OSError, TimeoutError) as error:
            return await _refuse(writer, "502 Bad Gateway", f"{place} cannot be reached: {error or 'no answer'}")
        try:
            if first:
                far_writer.write(first)
            else:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        finally:
            await _end(far_writer)
        return None

    async def _reach(self, place: Place) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        addresses = await self._resolve(place.host, place.port)
        # The address that was looked at is the one that is dialled: a name may stand for another one in an instant.
        permitted = [address for address in addresses if self._allowed.permits_address(address, place)]
        if not permitted:
            raise PermissionError(f"{place} stands for no public address")
        failure: OSError = ConnectionError("no address answers")
        for address in permitted:
            try:
                return await self._dial(address, place.port)
            except OSError as error:
                failure = error
        raise failure

    def _tell_refused(self, place: Place) -> None:
        said = str(place)[:200]
        if said not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(said)
            _log.info("%s: its guest asked for %r, which is not allowed", self._machine_id, said)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Carry one direction to its end; what waits is bounded by the transports' buffers."""
    while data := await source.read(_CHUNK_BYTES):
        sink.write(data)
        await sink.drain()
    with suppress(OSError):
        sink.write_eof()


async def _end(writer: asyncio.StreamWriter) -> None:
    """Close a connection once what was written has left, or soon."""
    writer.close()
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_CLOSE_S):
            await writer.wait_closed()


async def _refuse(writer: asyncio.StreamWriter, status: str, why: str) -> None:
    body = f"{why}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
    await writer.drain()
