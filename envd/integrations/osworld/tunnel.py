"""An HTTP service of one guest on a loopback port of this process, tunnelled through commands run in the guest.

For OSWorld's clients, which need an address. The tunnel uses no port of the daemon's host: a client that may run
commands in the guest may talk to its service, from any host. Each request is one command.
"""

import socketserver
import threading
from collections.abc import Callable
from http import HTTPStatus
from io import BufferedIOBase

#: Sends a request from standard input to the guest's service on the port in $0, and the response to standard output.
_GUEST_COMMAND = ("bash", "-c", 'exec 3<>"/dev/tcp/127.0.0.1/$0" && cat >&3 && exec cat <&3')

#: The largest standard input of a command.
_MAX_REQUEST_BYTES = 32 << 20
_MAX_HEADER_LINES = 200
_MAX_LINE_BYTES = 1 << 16

RunInGuest = Callable[[tuple[str, ...], bytes], bytes]
"""Runs a command in the guest with that standard input; returns its standard output. Raises OSError."""


class GuestTunnel:
    """Listens on a free loopback port until it is closed.

    Args:
        run: Called for each request, so the guest may change between requests.
        guest_port: Of the service in the guest.
    """

    def __init__(self, run: RunInGuest, *, guest_port: int) -> None:
        self._server = _Server(("127.0.0.1", 0), _Connection)
        self._server.run = run
        self._server.command = (*_GUEST_COMMAND, str(guest_port))
        self._thread = threading.Thread(target=self._server.serve_forever, name="guest-tunnel", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    # A request in progress ends at its own limit; closing does not wait for it.
    block_on_close = False
    run: RunInGuest
    command: tuple[str, ...]


class _Connection(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        """Forward one request and its response."""
        try:
            request = read_request(self.rfile)
            response = self.server.run(self.server.command, request)
            if not response:
                raise OSError("the guest's service closed the connection")  # noqa: TRY301
        except ValueError as error:
            response = _error_response(HTTPStatus.BAD_REQUEST, str(error))
        except OSError as error:
            response = _error_response(HTTPStatus.BAD_GATEWAY, str(error))
        self.wfile.write(response)


def read_request(stream: BufferedIOBase) -> bytes:
    """Return one HTTP request, changed only to close the connection after its response.

    Raises:
        ValueError: It is malformed, too large, or has no declared length.
        OSError: The connection failed.
    """
    lines = [stream.readline(_MAX_LINE_BYTES)]
    length = 0
    while (line := stream.readline(_MAX_LINE_BYTES)) not in (b"\r\n", b"\n", b""):
        name, _, value = line.partition(b":")
        field = name.strip().lower()
        if field == b"transfer-encoding":
            raise ValueError("Transfer-Encoding is not supported; send a Content-Length")
        if field == b"content-length":
            if not value.strip().isdigit():
                raise ValueError("Content-Length is not a number")
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


def _error_response(status: HTTPStatus, message: str) -> bytes:
    body = message.encode()
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
