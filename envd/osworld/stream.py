"""A TCP port of one guest on a loopback port of this process, for protocols that are not one request and one response.

Chrome's DevTools need it: a WebSocket stays open in both directions. `RunGuestCommand` returns output only when a
command has ended. A relay process in the guest therefore holds the connection, and short commands move the bytes.
A client that may run commands in the guest may connect to its ports: this needs no other right, and no port of the
daemon's host.
"""

import logging
import secrets
import socket
import socketserver
import threading
from collections.abc import Callable
from contextlib import suppress

from envd.osworld.tunnel import RunInGuest

#: Connects to port argv[1] and serves the Unix socket argv[2] from the background. The first byte that a command sends
#: there is S (send the rest to the port), E (the same, then end the sending direction), R (receive) or C (close).
#: A relay that is not asked for argv[3] seconds ends: its client is gone, or the guest is a fork of the client's.
_RELAY = """
import os, select, socket, sys, threading
port, name, idle_s, wait_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
try:
    target = socket.create_connection(("127.0.0.1", port), 10)
except OSError as error:
    sys.exit(f"port {port} of the guest: {error.strerror or error}")
target.settimeout(None)
target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
server = socket.socket(socket.AF_UNIX)
server.bind("\\0" + name)
server.listen()
server.settimeout(idle_s)
if os.fork():
    os._exit(0)
os.setsid()
null = os.open(os.devnull, os.O_RDWR)
for descriptor in range(3):
    os.dup2(null, descriptor)

def serve(client):
    verb = client.recv(1)
    try:
        if verb == b"R":
            data = b""
            if not select.select([target], [], [], wait_s)[0]:
                client.sendall(b"W")
                return
            while len(data) < 4 << 20 and select.select([target], [], [], 0)[0]:
                part = target.recv(1 << 20)
                if not part:
                    break
                data += part
            client.sendall(b"D" + data if data else b"E")
        elif verb in (b"S", b"E"):
            while part := client.recv(1 << 20):
                target.sendall(part)
            if verb == b"E":
                target.shutdown(socket.SHUT_WR)
            client.sendall(b"D")
    except OSError:
        client.sendall(b"E")
    finally:
        client.close()
    if verb in (b"C", b""):
        os._exit(0)

while True:
    try:
        client, _ = server.accept()
    except TimeoutError:
        os._exit(0)
    threading.Thread(target=serve, args=(client,), daemon=True).start()
"""

#: Sends argv[2] and standard input to the Unix socket argv[1], and prints the response.
_EXCHANGE = """
import shutil, socket, sys
relay = socket.socket(socket.AF_UNIX)
try:
    relay.connect("\\0" + sys.argv[1])
except OSError:
    sys.exit("the guest's end of the connection is closed")
relay.sendall(sys.argv[2].encode())
with relay.makefile("wb") as out:
    shutil.copyfileobj(sys.stdin.buffer, out)
relay.shutdown(socket.SHUT_WR)
with relay.makefile("rb") as answer:
    shutil.copyfileobj(answer, sys.stdout.buffer)
"""

_PYTHON = ("python3", "-I", "-S", "-c")
_IDLE_S, _WAIT_S = 60, 5
_MAX_SEND_BYTES = 4 << 20

logger = logging.getLogger(__name__)


class GuestPort:
    """Listens on a free loopback port until it is closed.

    Args:
        connect: Called for each connection; returns how to run commands in the guest that is current then. The
            connection stays with that guest and ends with it.
        guest_port: In the guest, on its loopback interface.
    """

    def __init__(self, connect: Callable[[], RunInGuest], *, guest_port: int) -> None:
        self._server = _Server(("127.0.0.1", 0), _Connection)
        self._server.connect = connect
        self._server.guest_port = guest_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="guest-port", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening and end all connections. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._server.end_connections()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    # A command in progress ends at its own limit; closing does not wait for it.
    block_on_close = False
    connect: Callable[[], RunInGuest]
    guest_port: int

    def __init__(self, address: tuple[str, int], handler: type["_Connection"]) -> None:
        super().__init__(address, handler)
        self._open: set[socket.socket] = set()
        self._is_ended = False
        self._lock = threading.Lock()

    def add(self, connection: socket.socket) -> None:
        """Track a connection."""
        with self._lock:
            self._open.add(connection)
            if self._is_ended:
                _end(connection)

    def discard(self, connection: socket.socket) -> None:
        """Forget a connection."""
        with self._lock:
            self._open.discard(connection)

    def end_connections(self) -> None:
        """End all connections; their threads follow."""
        with self._lock:
            self._is_ended = True
            for connection in self._open:
                _end(connection)


class _Connection(socketserver.BaseRequestHandler):
    server: _Server
    request: socket.socket

    def setup(self) -> None:
        """Let the server end this connection."""
        self._client_ended = threading.Event()
        self.server.add(self.request)

    def finish(self) -> None:
        """Forget this connection."""
        self.server.discard(self.request)

    def handle(self) -> None:
        """Relay one connection until either side ends it."""
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._run, self._relay = self.server.connect(), f"envd-{secrets.token_hex(16)}"
        relay = (str(self.server.guest_port), self._relay, str(_IDLE_S), str(_WAIT_S))
        try:
            self._run((*_PYTHON, _RELAY, *relay), b"")
        except OSError as error:
            # Clients wait for their port by connecting repeatedly, so this is not a warning.
            logger.info("port %d of the guest: connection refused: %s", self.server.guest_port, error)
            return
        receiver = threading.Thread(target=self._receive, name="guest-port-receiver", daemon=True)
        receiver.start()
        try:
            self._send()
        except OSError as error:
            self._report(error)
            _end(self.request)
        self._client_ended.set()
        receiver.join()
        # The guest, and the relay with it, may be gone.
        with suppress(OSError):
            self._exchange("C")

    def _send(self) -> None:
        """Send what the client sends, until it ends its direction."""
        while data := self.request.recv(_MAX_SEND_BYTES):
            self._exchange("S", data)
        self._exchange("E")

    def _receive(self) -> None:
        """Forward what the guest sends, until it ends the connection, or is silent after the client's end."""
        try:
            while (received := self._exchange("R"))[:1] != b"E":
                if received == b"W" and self._client_ended.is_set():
                    break
                self.request.sendall(received[1:])
        except OSError as error:
            self._report(error)
        _end(self.request)

    def _report(self, error: OSError) -> None:
        logger.info("port %d of the guest: connection ended: %s", self.server.guest_port, error)

    def _exchange(self, verb: str, data: bytes = b"") -> bytes:
        response = self._run((*_PYTHON, _EXCHANGE, self._relay, verb), data)
        if not response and verb != "C":
            raise ConnectionError("the guest closed the connection")
        return response


def _end(connection: socket.socket) -> None:
    # It may have ended already.
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
