"""The HTTP service inside one guest, on a loopback port of this process, through commands that are run in the guest.

For clients of OSWorld's, which know a guest by an address. No port of the daemon's host is used: whoever may run
commands in the guest may talk to its service, wherever the daemon runs, and nobody else can. One request, one command.
"""

import socketserver
import threading
from collections.abc import Callable
from http import HTTPStatus
from io import BufferedIOBase

#: Of a guest's own service, and what talks to it: a request on standard input, its answer on standard output.
GUEST_COMMAND = ("bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/5000 && cat >&3 && exec cat <&3")

#: What a command's standard input may hold.
_MAX_REQUEST_BYTES = 32 << 20
_MAX_HEADER_LINES = 200
_MAX_LINE_BYTES = 1 << 16

RunInGuest = Callable[[tuple[str, ...], bytes], bytes]
"""Runs a command in the guest with that standard input; returns its standard output. Raises OSError."""


class GuestTunnel:
    """Listens on a free loopback port from now on, until it is closed.

    Args:
        run: Asked anew for each request, so it may mean another guest by then.
    """

    def __init__(self, run: RunInGuest) -> None:
        self._server = _Server(("127.0.0.1", 0), _Connection)
        self._server.run = run
        self._thread = threading.Thread(target=self._server.serve_forever, name="guest-tunnel", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Listen no more. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    # A request that is still carried ends with its own limit; nobody waits for it.
    block_on_close = False
    run: RunInGuest


class _Connection(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        """Carry one request and its answer."""
        try:
            request = read_request(self.rfile)
            answer = self.server.run(GUEST_COMMAND, request)
            if not answer:
                raise OSError("the guest's service closed the connection")  # noqa: TRY301
        except ValueError as error:
            answer = _refusal(HTTPStatus.BAD_REQUEST, str(error))
        except OSError as error:
            answer = _refusal(HTTPStatus.BAD_GATEWAY, str(error))
        self.wfile.write(answer)


def read_request(stream: BufferedIOBase) -> bytes:
    """Return one HTTP request as it is to be sent on: the same, but that the connection ends with its answer.

    Raises:
        ValueError: It is none, too large, or of no declared length.
        OSError: The connection broke.
    """
    lines = [stream.readline(_MAX_LINE_BYTES)]
    length = 0
    while (line := stream.readline(_MAX_LINE_BYTES)) not in (b"\r\n", b"\n", b""):
        name, _, value = line.partition(b":")
        field = name.strip().lower()
        if field == b"transfer-encoding":
            raise ValueError("requests need a Content-Length")
        if field == b"content-length":
            if not value.strip().isdigit():
                raise ValueError("Content-Length is no number")
            length = int(value)
        if field != b"connection":
            lines.append(line)
        if len(lines) > _MAX_HEADER_LINES:
            raise ValueError("too many header lines")
    if not lines[0].endswith(b"\n") or length > _MAX_REQUEST_BYTES:
        raise ValueError(f"not a request of at most {_MAX_REQUEST_BYTES} bytes")
    body = stream.read(length)
    if len(body) < length:
        raise ValueError("the request ended before its body")
    return b"".join(lines) + b"Connection: close\r\n\r\n" + body


def _refusal(status: HTTPStatus, message: str) -> bytes:
    body = message.encode()
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
