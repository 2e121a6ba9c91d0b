"""A proxy for programs in this guest; the host is its other end and decides what is reachable.

The host leaves open connections here. Each program that connects to the proxy port gets one of them, and bytes are
relayed unchanged in both directions.
"""

import select
import socket
import threading
import time
from collections import deque
from contextlib import suppress

PROXY_PORT = 3128
WAIT_S = 10.0


class _HostConnection:
    """A connection from the host, for one program."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.program: socket.socket | None = None
        self.taken = threading.Event()
        self.downstream_done = threading.Event()
        """All bytes from the host were relayed."""
        self.upstream_done = threading.Event()
        """All bytes from the program were relayed."""


class Gateway:
    """Pairs connections of programs with connections of the host."""

    def __init__(self, port: int = PROXY_PORT) -> None:
        self._port = port
        self._changed = threading.Condition()
        self._waiting: deque[_HostConnection] = deque()
        self._open: set[_HostConnection] = set()
        self._listener: socket.socket | None = None

    def reopen(self) -> int:
        """Listen, and drop existing connections: those of a fork's template lead nowhere. Returns the port."""
        with self._changed:
            for host in self._open:
                with suppress(OSError):
                    host.connection.shutdown(socket.SHUT_RDWR)
                host.taken.set()
            self._waiting.clear()
            if self._listener is None:
                self._listener = socket.create_server(("127.0.0.1", self._port))
                threading.Thread(target=self._listen, args=(self._listener,), name="gateway", daemon=True).start()
            return int(self._listener.getsockname()[1])

    def offer(self, connection: socket.socket) -> None:
        """Offer a connection from the host to programs; returns when both ends are done with it."""
        connection.settimeout(None)
        host = _HostConnection(connection)
        with self._changed:
            self._open.add(host)
            self._waiting.append(host)
            self._changed.notify()
        host.taken.wait()
        if host.program is not None:
            relay(connection, host.program)
            host.downstream_done.set()
            host.upstream_done.wait()
        with self._changed:
            self._open.discard(host)

    def _listen(self, listener: socket.socket) -> None:
        while True:
            program, _address = listener.accept()
            threading.Thread(target=self._serve, args=(program,), name="gateway-program", daemon=True).start()

    def _serve(self, program: socket.socket) -> None:
        with program:
            host = self._take()
            if host is None:
                with suppress(OSError):
                    program.sendall(
                        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                    )
                return
            host.program = program
            host.taken.set()
            relay(program, host.connection)
            host.upstream_done.set()
            host.downstream_done.wait()

    def _take(self) -> _HostConnection | None:
        """Return a waiting connection that is still open, or None after `WAIT_S`."""
        deadline_s = time.monotonic() + WAIT_S
        with self._changed:
            while True:
                while self._waiting:
                    host = self._waiting.popleft()
                    # The host never speaks first, so readable means that it has closed the connection.
                    if not select.select([host.connection], [], [], 0)[0]:
                        return host
                    host.taken.set()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return None


def relay(source: socket.socket, sink: socket.socket) -> None:
    """Copy one direction until its end; an error ends both directions."""
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
