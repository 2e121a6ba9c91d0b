"""The gateway: the allow list, proxy requests, and real guestd code relaying bytes between sockets."""

import asyncio
import http.client
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from envd.base.config import PoolConfig
from envd.desktop.allow_list import AllowList, Destination
from envd.desktop.gateway import GuestGateway, HostExit, _resolve, parse_head
from envd.guests.guestd import gateway as guest_gateway
from envd.guests.guestd import guest as guest_state
from envd.guests.guestd.server import Server
from tests.support.clock import until

ALLOWED = AllowList(("example.org", "*.example.net", "api.test:8443", "192.0.2.7:81"))


@pytest.mark.parametrize(
    ("host", "port", "expected"),
    [
        ("example.org", 443, True),
        ("EXAMPLE.org.", 80, True),
        ("example.org", 22, False),
        ("www.example.org", 443, False),
        ("a.b.example.net", 443, True),
        ("example.net", 443, False),
        ("badexample.net", 443, False),
        ("api.test", 8443, True),
        ("api.test", 443, False),
        ("192.0.2.7", 81, True),
        ("192.0.2.7", 80, False),
    ],
)
def test_only_listed_addresses_are_allowed(host: str, port: int, expected: bool) -> None:
    assert ALLOWED.allows(Destination(host, port)) is expected


async def test_names_whose_servers_do_not_answer_hold_no_thread_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, begun, answered = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def look_up(*_arguments: object, **_options: object) -> list[object]:
        loop.call_soon_threadsafe(begun.set)
        answered.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    looking = [asyncio.create_task(_resolve(f"{number}.example.net", 80)) for number in range(64)]
    try:
        await begun.wait()
        async with asyncio.timeout(10):
            assert await asyncio.to_thread(threading.active_count)
        assert not any(task.done() for task in looking)
    finally:
        answered.set()
    assert await asyncio.gather(*looking) == [[]] * 64


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.0.1", "::1", "fd00::1"])
def test_a_listed_name_does_not_allow_private_addresses(address: str) -> None:
    destination = Destination("example.org", 80)
    assert not ALLOWED.allows_address(address, destination)
    assert ALLOWED.allows_address("1.1.1.1", destination)
    assert AllowList((*ALLOWED.entries, f"{address}:80")).allows_address(address, destination) is (":" not in address)


def test_every_public_host_is_allowed_and_no_private_address() -> None:
    allowed = AllowList(("192.168.0.1:8080",), every_public_host=True)
    assert allowed.allows(Destination("example.org", 443))
    assert not allowed.allows(Destination("example.org", 25))
    assert allowed.allows_address("1.1.1.1", Destination("example.org", 443))
    assert not allowed.allows_address("192.168.0.1", Destination("example.org", 443))
    assert allowed.allows_address("192.168.0.1", Destination("192.168.0.1", 8080))


@pytest.mark.parametrize(
    "address",
    [
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::a9fe:a9fe",
        "2002:7f00:1::1",
        "::127.0.0.1",
        "::ffff:10.0.0.1",
        "fec0::1",
        "fe80::1%eth0",
        "ff02::1",
        "ff0e::1",
        "224.0.0.1",
        "239.1.2.3",
        "2001:0:7f00:1::1",
        "0.0.0.0",  # noqa: S104
        "::",
    ],
)
def test_an_address_that_leads_to_an_inner_one_is_rejected(address: str) -> None:
    assert not ALLOWED.allows_address(address, Destination("example.org", 80))


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "2606:4700:4700::1111", "64:ff9b::101:101", "::ffff:1.1.1.1", "2002:101:101::1"]
)
def test_a_public_address_is_allowed_also_as_ipv6(address: str) -> None:
    assert ALLOWED.allows_address(address, Destination("example.org", 80))


@pytest.mark.parametrize(
    "entry", ["", "*", "*.", "http://example.org", "example.org:", "example.org:0", "a b", "x:99999"]
)
def test_an_invalid_entry_in_the_configuration_is_an_error(entry: str) -> None:
    with pytest.raises(ValueError, match="is not a host; write a name"):
        PoolConfig(image="desktop", allowed_hosts=(entry,))


def test_entries_of_the_configuration_are_normalized() -> None:
    assert PoolConfig(image="desktop", allowed_hosts=("Example.org", "*.a.test:81", "192.0.2.7")).allowed_hosts == (
        "example.org",
        "*.a.test:81",
        "192.0.2.7",
    )


def test_connect_forwards_no_request() -> None:
    assert parse_head(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n") == (
        Destination("example.org", 443),
        b"",
    )


def test_an_absolute_request_is_rewritten_to_origin_form() -> None:
    head = b"GET http://example.org/a?b=c HTTP/1.1\r\nHost: example.org\r\nProxy-Connection: keep-alive\r\nX: y\r\n\r\n"
    destination, first = parse_head(head)
    assert destination == Destination("example.org", 80)
    assert first == b"GET /a?b=c HTTP/1.1\r\nHost: example.org\r\nX: y\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (b"example.org/", b"example.org"),
        (b"example.org:80/", b"example.org"),
        (b"example.org:8080/", b"example.org:8080"),
        (b"[2606:4700::1]/", b"[2606:4700::1]"),
    ],
)
@pytest.mark.parametrize("host", [b"Host: other.test\r\n", b"hOST : other.test\r\nHost: third.test\r\n", b""])
def test_the_host_header_is_always_the_checked_name(target: bytes, expected: bytes, host: bytes) -> None:
    _, first = parse_head(b"GET http://" + target + b" HTTP/1.1\r\n" + host + b"X: y\r\n\r\n")
    assert first == b"GET / HTTP/1.1\r\nHost: " + expected + b"\r\nX: y\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("folded", [b"X: y\r\n Host: other.test", b"X: y\nHost: other.test", b"X: y\rHost: other.test"])
def test_a_header_that_servers_could_read_as_two_is_an_error(folded: bytes) -> None:
    with pytest.raises(ValueError, match="CR LF"):
        parse_head(b"GET http://example.org/ HTTP/1.1\r\n" + folded + b"\r\n\r\n")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"GET / HTTP/1.1", "expected an http:// URL"),
        (b"GET https://example.org/ HTTP/1.1", "expected an http:// URL"),
        (b"CONNECT example.org HTTP/1.1", "CONNECT takes HOST:PORT"),
        (b"CONNECT example.org:99999 HTTP/1.1", "Port out of range"),
        (b"GET http://[ HTTP/1.1", "Invalid IPv6 URL"),
        (b"invalid", "expected METHOD TARGET"),
    ],
)
def test_an_invalid_proxy_request_is_an_error(line: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_head(line + b"\r\n\r\n")


# A guest: guestd's server and gateway, in threads of this process.


class _Guest:
    def __init__(self) -> None:
        self.guest = guest_state.Guest()
        self.guest.gateway = guest_gateway.Gateway(port=0)
        self.server = Server(("127.0.0.1", 0), self.guest)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.server.server_address[1])

    @property
    def proxy_port(self) -> int:
        assert self.guest.gateway._listener is not None
        return int(self.guest.gateway._listener.getsockname()[1])

    def request(self, *, method: str, target: str) -> tuple[int, bytes]:
        """Send a request to the proxy, as a program in the guest does."""
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy_port, timeout=60)
        try:
            connection.request(method, target)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def send(self, data: bytes) -> bytes:
        """Send bytes to the proxy; return all that comes back."""
        with socket.create_connection(("127.0.0.1", self.proxy_port), timeout=60) as connection:
            connection.sendall(data)
            return connection.makefile("rb").read()


@pytest.fixture
def guest() -> Iterator[_Guest]:
    guest = _Guest()
    before = set(threading.enumerate())
    yield guest
    guest.server.shutdown()
    # Host connections that wait for a program keep their sockets open until they are dropped.
    for thread in set(threading.enumerate()) - before:
        while "process_request" in thread.name and thread.is_alive():
            guest.guest.gateway.reopen()
            thread.join(0.01)
    guest.server.server_close()
    guest.thread.join()


@pytest.fixture
async def origin() -> AsyncIterator[int]:
    """A server that returns the request line of each connection and closes it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = head.split(b"\r\n")[0]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield int(server.sockets[0].getsockname()[1])


def gateway_to(guest: _Guest, *entries: str) -> GuestGateway:
    return GuestGateway(guest.address, HostExit(AllowList(entries)), machine_id="m")


async def test_a_program_reaches_only_listed_addresses(guest: _Guest, origin: int) -> None:
    gateway = gateway_to(guest, f"127.0.0.1:{origin}", f"localhost.test:{origin}")
    await gateway.open()
    try:
        for number in range(12):  # more than are kept waiting
            response = await asyncio.to_thread(
                guest.request, method="GET", target=f"http://127.0.0.1:{origin}/{number}"
            )
            assert response == (200, f"GET /{number} HTTP/1.1".encode())
        status, message = await asyncio.to_thread(guest.request, method="GET", target="http://example.org/")
        assert (status, message) == (403, b"example.org:80 is not in this desktop's list of allowed hosts\n")
        status, _ = await asyncio.to_thread(guest.request, method="GET", target="/")
        assert status == 400
    finally:
        await gateway.close()


async def test_a_listed_name_with_a_private_address_is_rejected(guest: _Guest, origin: int) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    serve = HostExit(AllowList((f"rebound.test:{origin}",)), resolve=resolve)
    gateway = GuestGateway(guest.address, serve, machine_id="m")
    await gateway.open()
    try:
        status, message = await asyncio.to_thread(guest.request, method="GET", target=f"http://rebound.test:{origin}/")
        assert (status, message) == (403, f"rebound.test:{origin} has no public address\n".encode())
    finally:
        await gateway.close()


@pytest.mark.parametrize(
    "name", ["a" * 64 + ".test", "a..test", ".test", "a\0.test", "\u00e9" * 60 + ".test", "-.test"]
)
async def test_a_name_that_no_server_can_have_is_not_reached_and_not_an_error_of_the_host(
    name: str, guest: _Guest, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = gateway_to(guest, "*.test")
    await gateway.open()
    try:
        target = f"CONNECT {name}:443 HTTP/1.1\r\n\r\n".encode("latin-1")
        answers = [await asyncio.to_thread(guest.send, target) for _ in range(8)]
        assert all(
            answer.startswith((b"HTTP/1.1 502 Bad Gateway\r\n", b"HTTP/1.1 403", b"HTTP/1.1 400")) for answer in answers
        ), answers
    finally:
        await gateway.close()
    assert not [record for record in caplog.records if record.exc_info]


async def test_an_unexpected_error_of_a_gateway_is_logged_once_a_minute(
    guest: _Guest, caplog: pytest.LogCaptureFixture
) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        raise ZeroDivisionError("a bug")

    gateway = GuestGateway(guest.address, HostExit(AllowList(("a.test:443",)), resolve=resolve), machine_id="m")
    await gateway.open()
    try:
        for _ in range(8):
            assert await asyncio.to_thread(guest.send, b"CONNECT a.test:443 HTTP/1.1\r\n\r\n") == b""
    finally:
        await gateway.close()
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


async def test_a_tunnel_relays_bytes_in_both_directions(guest: _Guest, origin: int) -> None:
    gateway = gateway_to(guest, f"127.0.0.1:{origin}")
    await gateway.open()

    def exchange() -> bytes:
        with socket.create_connection(("127.0.0.1", guest.proxy_port), timeout=60) as program:
            program.sendall(f"CONNECT 127.0.0.1:{origin} HTTP/1.1\r\n\r\n".encode())
            assert program.recv(100).startswith(b"HTTP/1.1 200 ")
            program.sendall(b"hello\r\n\r\n")
            received = b""
            while data := program.recv(1000):
                received += data
            return received

    try:
        assert (await asyncio.to_thread(exchange)).endswith(b"\r\n\r\nhello")
    finally:
        await gateway.close()


async def test_opening_a_forks_gateway_drops_connections_of_its_template(guest: _Guest, origin: int) -> None:
    stale = []
    for _ in range(3):
        connection = http.client.HTTPConnection(*guest.address, timeout=60)
        connection.request("POST", "/envd/gateway/wait")
        assert connection.sock.recv(1000).startswith(b"HTTP/1.1 101 ")
        stale.append(connection)
    # guestd answers before it offers the connection.
    await until(lambda: len(guest.guest.gateway._waiting) == len(stale))
    gateway = gateway_to(guest, f"127.0.0.1:{origin}")
    await gateway.open()
    try:
        response = await asyncio.to_thread(guest.request, method="GET", target=f"http://127.0.0.1:{origin}/x")
        assert response == (200, b"GET /x HTTP/1.1")
        assert [connection.sock.recv(1) for connection in stale] == [b"", b"", b""]
    finally:
        await gateway.close()
        for connection in stale:
            connection.close()


async def test_a_closed_gateway_has_no_connections(guest: _Guest) -> None:
    gateway = gateway_to(guest)
    await gateway.open()
    await gateway.close()
    assert not gateway._tasks
