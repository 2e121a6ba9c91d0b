"""The HTTP server: one thread per connection. A repeated POST with the same `X-Request-Id` gets the first response."""

import hashlib
import logging
import mmap
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
import urllib.parse
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from . import VERSION
from .gateway import relay
from .guest import Guest
from .messages import MAX_COMMAND_TIMEOUT_S, HttpError, Request, Response
from .routes import respond

MAX_BODY_BYTES = 512 << 20
MAX_IN_MEMORY_BODY_BYTES = 4 << 20
SOCKET_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 10.0
#: A fork has copies of its parent's connections, which lead nowhere: they end when the host does not know them.
KEEPALIVE_IDLE_S = 10

logger = logging.getLogger("guestd")
REPLAY_S = 300.0


class Connection(BaseHTTPRequestHandler):
    """One HTTP connection."""

    server: "Server"
    protocol_version = "HTTP/1.1"
    server_version = f"envd-guestd/{VERSION}"
    #: Another one after each start.
    sys_version = secrets.token_hex(8)
    timeout = SOCKET_TIMEOUT_S
    wbufsize = -1

    @property
    def _is_local(self) -> bool:
        """Whether the connection is one of a Unix socket, which has no options of TCP."""
        return bool(self.request.family == socket.AF_UNIX)

    @property
    def disable_nagle_algorithm(self) -> bool:  # type: ignore[override]
        return not self._is_local

    def do_GET(self) -> None:
        self._respond("GET")

    def do_POST(self) -> None:
        self._respond("POST")

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests: the host logs them."""

    def _respond(self, method: str) -> None:
        url = urllib.parse.urlsplit(self.path)
        try:
            body = self._read_body()
        except HttpError as error:
            # The rest of the body would be parsed as the next request.
            self.close_connection = True
            self._send(error.response())
            return
        if (method, url.path) == ("POST", "/envd/gateway/wait"):
            self._offer_to_gateway()
            return
        query = dict(urllib.parse.parse_qsl(url.query))
        if (method, url.path) == ("POST", "/envd/forward"):
            self._forward(query.get("port", ""))
            return
        request = Request(url.path, query, self.headers.get("Content-Type", ""), body)
        request_id = self.headers.get("X-Request-Id")
        guest, replays = self.server.guest, self.server.replays
        try:
            if self.headers.get("X-Server", self.version_string()) != self.version_string():
                # Its repeat would not be recognised: the record of requests ended with the service that had it.
                raise HttpError(503, "guestd was restarted; the request may have had its effect")  # noqa: TRY301
            if method == "POST" and request_id:
                response = replays.respond(request, request_id, lambda: respond(guest, method, request))
            else:
                response = respond(guest, method, request)
        except HttpError as error:
            response = error.response()
        finally:
            if isinstance(body, mmap.mmap):
                body.close()
        self._send(response)

    def _offer_to_gateway(self) -> None:
        self._switch_protocols()
        self.server.guest.gateway.offer(self.connection)

    def _forward(self, port: str) -> None:
        """Connect to a port of this guest's loopback and relay bytes until both directions have ended."""
        try:
            program = socket.create_connection(("127.0.0.1", int(port)), CONNECT_TIMEOUT_S)
        except (ValueError, OverflowError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self._send(HttpError(502, f"port {port} of the guest: {reason}").response())
            return
        with program:
            program.settimeout(None)
            program.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connection.settimeout(None)
            if not self._is_local:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
            self._switch_protocols()
            upstream = threading.Thread(target=relay, args=(program, self.connection), name="forward", daemon=True)
            upstream.start()
            relay(self.connection, program)
            upstream.join()

    def _switch_protocols(self) -> None:
        self.close_connection = True
        self.connection.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: tunnel\r\nConnection: Upgrade\r\n\r\n")

    def _read_body(self) -> bytes | mmap.mmap:
        if self.headers.get("Origin") is not None:
            raise HttpError(403, "requests from web pages are rejected")
        if self.headers.get("Transfer-Encoding"):
            raise HttpError(411, "Content-Length is required; chunked bodies are not supported")
        try:
            length = int(self.headers.get("Content-Length") or 0)
        except ValueError as error:
            raise HttpError(400, "Content-Length is not a number") from error
        if not 0 <= length <= MAX_BODY_BYTES:
            raise HttpError(413, f"the body has {length} bytes; the limit is {MAX_BODY_BYTES}")
        if length <= MAX_IN_MEMORY_BODY_BYTES:
            body = self.rfile.read(length)
            if len(body) != length:
                raise HttpError(400, "the body ended early")
            return body
        with tempfile.TemporaryFile() as file:
            left = length
            while left and (chunk := self.rfile.read(min(left, 1 << 20))):
                file.write(chunk)
                left -= len(chunk)
            if left:
                raise HttpError(400, "the body ended early")
            file.flush()
            return mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ)

    def _send(self, response: Response) -> None:
        file = response.file
        with suppress(ConnectionError, TimeoutError):
            length = os.fstat(file.fileno()).st_size if file else len(response.body)
            self.send_response(response.status)
            self.send_header("Content-Type", response.content_type)
            self.send_header("Content-Length", str(length))
            if file:
                name = urllib.parse.quote(response.file_name)
                self.send_header("Content-Disposition", f"attachment; filename*=UTF-8''{name}")
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            if file:
                while length and (chunk := file.read(min(length, 1 << 20))):
                    self.wfile.write(chunk)
                    length -= len(chunk)
                # A file that shrank during the transfer must not look complete.
                self.close_connection = self.close_connection or length > 0
            else:
                self.wfile.write(response.body)
            self.wfile.flush()
        if file:
            file.close()


class Server(ThreadingHTTPServer):
    """Serves one guest."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], guest: Guest, *, listening: socket.socket | None = None) -> None:
        super().__init__(address, Connection, bind_and_activate=listening is None)
        if listening is not None:
            self.socket.close()
            self.socket = listening
            self.server_address = listening.getsockname()
        self.guest = guest
        self.replays = Replays()

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """Log an error of a connection, except that the client closed it."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            logger.exception("connection from %s failed", client_address)


@dataclass(slots=True)
class _Entry:
    """A recorded or pending response."""

    digest: bytes
    done: threading.Event = field(default_factory=threading.Event)
    response: Response | None = None
    completed_s: float = 0.0


class Replays:
    """Responses by request id.

    Invariant of the lock: an id is in `_entries` from before its effect until `REPLAY_S` after its response.
    """

    def __init__(self, *, capacity: int = 512, max_bytes: int = 64 << 20) -> None:
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()

    def respond(self, request: Request, request_id: str, produce: Callable[[], Response]) -> Response:
        """Return `produce()`, or the recorded response of the earlier call with this path and id. Raises: HttpError."""
        key = (request.path, request_id)
        digest = hashlib.sha256(request.body).digest()
        with self._lock:
            earlier = self._entries.get(key)
            if earlier is None:
                entry = self._entries[key] = _Entry(digest)
                self._evict()
        if earlier is not None:
            if earlier.digest != digest:
                raise HttpError(409, f"X-Request-Id {request_id} was used with another body; use a new id per request")
            if not earlier.done.wait(MAX_COMMAND_TIMEOUT_S):
                raise HttpError(503, f"X-Request-Id {request_id} is still running; retry later")
            # A response that was not recorded belongs to a call without effect, so this call may have the effect.
            return earlier.response or self.respond(request, request_id, produce)
        try:
            response = produce()
            with self._lock:
                if response.status == 503 or response.file is not None:
                    # The call was rejected before its effect, or it only read: repeating it is harmless.
                    self._entries.pop(key, None)
                else:
                    entry.response = response
                entry.completed_s = time.monotonic()
            return response
        finally:
            entry.done.set()

    def _evict(self) -> None:
        now_s = time.monotonic()
        kept_bytes = sum(len(entry.response.body) for entry in self._entries.values() if entry.response)
        for key, entry in list(self._entries.items()):
            is_full = len(self._entries) > self._capacity or kept_bytes > self._max_bytes
            if entry.response and (is_full or now_s - entry.completed_s > REPLAY_S):
                del self._entries[key]
                kept_bytes -= len(entry.response.body)
