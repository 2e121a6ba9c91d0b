"""A TCP port of one guest on a loopback port of this process, for protocols that are not one request and one response.

Chrome's DevTools need it: a WebSocket stays open in both directions. `RunGuestCommand` returns output only when a
command has ended. A relay process in the guest therefore holds the connection, and short commands (`cat`, `dd`) move
the bytes: in an emulated guest a message takes 0.05 s with them, and 0.4 s with a program in Python.
A client that may run commands in the guest may connect to its ports: this needs no other right, and no port of the
daemon's host.
"""

import itertools
import logging
import secrets
import socket
import socketserver
import threading
from collections.abc import Callable
from contextlib import suppress

from envd.integrations.osworld.tunnel import RunInGuest

#: Connects to port argv[1] and serves the directory argv[2] from the background. Each message has a FIFO of its own,
#: and the next one exists before it can end. In `in.N` the first byte is S (send the rest to the port), E (the same,
#: then end the sending direction) or C (close). In `out.N` it is D (data follow), W (none within argv[4] seconds) or
#: E (the connection has ended). A relay that is not asked for argv[3] seconds ends: its client is gone, or the guest
#: is a fork of the client's.
_RELAY = """
import itertools, os, select, shutil, socket, sys, threading, time
port, directory, idle_s, wait_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
try:
    target = socket.create_connection(("127.0.0.1", port), 10)
except OSError as error:
    sys.exit(f"port {port} of the guest: {error.strerror or error}")
target.settimeout(None)
target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
os.mkdir(directory, 0o700)
for name in ("in.0", "out.0"):
    os.mkfifo(f"{directory}/{name}", 0o600)
if os.fork():
    os._exit(0)
os.setsid()
null = os.open(os.devnull, os.O_RDWR)
for descriptor in range(3):
    os.dup2(null, descriptor)
asked_s = time.monotonic()

def end():
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)

def messages(name, mode):
    global asked_s
    path = f"{directory}/{name}.0"
    for number in itertools.count(1):
        following = f"{directory}/{name}.{number}"
        os.mkfifo(following, 0o600)
        with open(path, mode, buffering=0) as fifo:  # waits for a command
            asked_s = time.monotonic()
            os.unlink(path)
            yield fifo
            asked_s = time.monotonic()
        path = following

def receive():
    for fifo in messages("out", "wb"):
        if not select.select([target], [], [], wait_s)[0]:
            message = b"W"
        else:
            message = b"D"
            while len(message) < 4 << 20 and select.select([target], [], [], 0)[0]:
                try:
                    part = target.recv(1 << 20)
                except OSError:
                    part = b""
                if not part:
                    break
                message += part
            if message == b"D":
                message = b"E"
        view = memoryview(message)
        while view:
            view = view[fifo.write(view):]

def send():
    for fifo in messages("in", "rb"):
        verb = fifo.read(1)
        try:
            while part := fifo.read(1 << 20):
                target.sendall(part)
            if verb == b"E":
                target.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the other direction reports the end
        if verb == b"C":
            end()

def run(direction):
    try:
        direction()
    except OSError:
        end()

for direction in (receive, send):
    threading.Thread(target=run, args=(direction,), daemon=True).start()
while time.monotonic() - asked_s < idle_s:
    time.sleep(1)
end()
"""

_START = ("python3", "-I", "-S", "-c", _RELAY)
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
        self._run, self._directory = self.server.connect(), f"/tmp/envd-{secrets.token_hex(16)}"  # noqa: S108 -- the guest's
        self._sent_count = 0
        relay = (str(self.server.guest_port), self._directory, str(_IDLE_S), str(_WAIT_S))
        try:
            self._run((*_START, *relay), b"")
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
            self._send_message("C")

    def _send(self) -> None:
        """Send what the client sends, until it ends its direction."""
        while data := self.request.recv(_MAX_SEND_BYTES):
            self._send_message("S", data)
        self._send_message("E")

    def _receive(self) -> None:
        """Forward what the guest sends, until it ends the connection, or is silent after the client's end."""
        try:
            for number in itertools.count():
                received = self._run(("cat", f"{self._directory}/out.{number}"), b"")
                if not received:
                    raise ConnectionError("the guest closed the connection")
                if received[:1] == b"E" or (received == b"W" and self._client_ended.is_set()):
                    break
                self.request.sendall(received[1:])
        except OSError as error:
            self._report(error)
        _end(self.request)

    def _report(self, error: OSError) -> None:
        logger.info("port %d of the guest: connection ended: %s", self.server.guest_port, error)

    def _send_message(self, verb: str, data: bytes = b"") -> None:
        path = f"{self._directory}/in.{self._sent_count}"
        self._sent_count += 1
        # Without `nocreat` it would make a file, if the relay has ended.
        self._run(("dd", f"of={path}", "bs=1M", "conv=nocreat", "status=none"), verb.encode() + data)


def _end(connection: socket.socket) -> None:
    # It may have ended already.
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
