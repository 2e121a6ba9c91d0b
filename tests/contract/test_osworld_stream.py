"""Connections to a guest's port: real processes relay them to real servers, and real WebSocket clients use them."""

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing

import aiohttp
import pytest
from aiohttp import web

from envd.integrations.osworld.stream import GuestPort
from envd.integrations.osworld.tunnel import RunInGuest


def run(argv: tuple[str, ...], stdin: bytes) -> bytes:
    """Run a command as a guest would; this "guest" shares the host's ports."""
    done = subprocess.run(argv, input=stdin, capture_output=True, check=False)
    if done.returncode:
        raise OSError(done.stderr.decode())
    return done.stdout


def never() -> RunInGuest:
    """Return a way into a guest that is gone."""

    def fail(argv: tuple[str, ...], stdin: bytes) -> bytes:
        raise OSError("the machine is gone")

    return fail


def send_until_refused(connection: socket.socket) -> None:
    """Send until the other side refuses it."""
    while True:
        connection.sendall(b"x" * 65536)


@pytest.fixture
def echo() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
async def devtools() -> AsyncIterator[int]:
    """A server that looks like Chrome's: a page of JSON, and a WebSocket that echoes."""

    async def version(request: web.Request) -> web.Response:
        return web.json_response({"webSocketDebuggerUrl": f"ws://{request.host}/devtools/browser/1"})

    async def browser(request: web.Request) -> web.WebSocketResponse:
        websocket = web.WebSocketResponse(max_msg_size=0)
        await websocket.prepare(request)
        async for message in websocket:
            await websocket.send_bytes(message.data)
        return websocket

    app = web.Application()
    app.add_routes([web.get("/json/version", version), web.get("/devtools/browser/1", browser)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield int(runner.addresses[0][1])
    await runner.cleanup()


async def test_a_websocket_of_the_guest_is_relayed_in_both_directions(devtools: int) -> None:
    port = GuestPort(lambda: run, guest_port=devtools)
    async with aiohttp.ClientSession() as http:
        async with http.get(f"http://127.0.0.1:{port.port}/json/version") as response:
            address = (await response.json())["webSocketDebuggerUrl"]
        # The client connects to the address that the server derives from the request.
        assert address == f"ws://127.0.0.1:{port.port}/devtools/browser/1"
        async with http.ws_connect(address, max_msg_size=0) as websocket:
            for message in (b"first", bytes(range(256)) * 40_000, b"last"):
                await websocket.send_bytes(message)
                assert (await websocket.receive()).data == message
    await asyncio.to_thread(port.close)


def test_closing_the_port_ends_its_connections_and_frees_it(echo: socket.socket) -> None:
    port = GuestPort(lambda: run, guest_port=echo.getsockname()[1])
    with closing(socket.create_connection(("127.0.0.1", port.port))) as client:
        server, _ = echo.accept()
        with server:
            port.close()
            port.close()
            assert client.recv(1) == b""
            # The relay in the guest ends too.
            assert server.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port.port))


def test_an_ended_direction_is_relayed_and_the_other_stays_open(echo: socket.socket) -> None:
    port = GuestPort(lambda: run, guest_port=echo.getsockname()[1])
    with closing(socket.create_connection(("127.0.0.1", port.port))) as client:
        client.sendall(b"request")
        client.shutdown(socket.SHUT_WR)
        server, _ = echo.accept()
        with server, server.makefile("rb") as received:
            assert received.read() == b"request"
            server.sendall(b"response")
        with client.makefile("rb") as answered:
            assert answered.read() == b"response"
    port.close()


def test_the_connection_ends_when_the_guest_does(echo: socket.socket) -> None:
    alive = True

    def connect() -> RunInGuest:
        return lambda argv, stdin: run(argv, stdin) if alive else never()(argv, stdin)

    port = GuestPort(connect, guest_port=echo.getsockname()[1])
    with closing(socket.create_connection(("127.0.0.1", port.port))) as client:
        server, _ = echo.accept()
        with server:
            server.sendall(b"x")
            assert client.recv(1) == b"x"
            alive = False
            server.sendall(b"y")
            with client.makefile("rb") as rest:
                assert rest.read() in (b"", b"y")
    port.close()


@pytest.mark.parametrize("connect", [never, lambda: run])
def test_a_port_on_which_nothing_listens_ends_the_connection(connect: Callable[[], RunInGuest]) -> None:
    with socket.socket() as bound:
        # Bound without listening: no other program can take the port.
        bound.bind(("127.0.0.1", 0))
        port = GuestPort(connect, guest_port=bound.getsockname()[1])
        with closing(socket.create_connection(("127.0.0.1", port.port))) as client:
            assert client.recv(1) == b""
        port.close()


def test_a_client_that_is_gone_does_not_hold_a_silent_server(echo: socket.socket) -> None:
    port = GuestPort(lambda: run, guest_port=echo.getsockname()[1])
    socket.create_connection(("127.0.0.1", port.port)).close()
    server, _ = echo.accept()
    with server:
        # Ended in this direction at once, and in the other after a wait, when writing fails.
        assert server.recv(1) == b""
        with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
            send_until_refused(server)
    port.close()
