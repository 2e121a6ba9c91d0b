"""Ports of guests over real gRPC and real sockets: drawn desktops with services of the tests, and the real guestd."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

import aiohttp
import grpc
import pytest

from cuaenv.client import AsyncEnvClient, AsyncEpisode, EnvClient, EnvError, EpisodeNotFound, MachineLost, Wait
from cuaenv.client.errors import error_of
from cuaenv.v1 import env_pb2, env_pb2_grpc
from envd.api.security.guard import MESSAGE_BURST
from envd.base.errors import GuestError, GuestUnresponsive
from envd.base.streams import copy
from envd.desktop.tunnel import open_port
from envd.hypervisor.machine import MachineState
from tests.support.clock import until
from tests.support.local_guestd import LocalGuestd, serve_guestd
from tests.support.served import EnvdProgram
from tests.support.server import FakeServer, serve_fake

TASK = "fake/count-to-five"
ECHO = 7
PORT = 9222
MAX_CONNECTIONS = 32


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with serve_fake(size=2) as server:
        yield server


@pytest.fixture
async def episode(server: FakeServer) -> AsyncIterator[AsyncEpisode]:
    async with AsyncEnvClient(server.address) as client, client.reset(TASK) as episode:
        yield episode


@asynccontextmanager
async def connected(
    episode: AsyncEpisode, port: int
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Forward a port and connect to it once."""
    async with episode.forward(port) as forward:
        reader, writer = await asyncio.open_connection("127.0.0.1", forward.local_port)
        try:
            yield reader, writer
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


@asynccontextmanager
async def streams(server: FakeServer) -> AsyncIterator[Callable[..., Any]]:
    """Yield a function that opens a stream with a first request."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = env_pb2_grpc.CUAEnvStub(channel)

        async def open_stream(**first: Any) -> Any:
            call = stub.ForwardGuestPort()
            await call.write(env_pb2.ForwardGuestPortRequest(**first))
            return call

        yield open_stream


async def failure(call: Any) -> EnvError:
    """Return the error with which a stream ends."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drained(call)
    return error_of(caught.value, host="")


async def drained(call: Any) -> None:
    """Read a stream to its end."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_bytes_flow_both_ways_until_each_side_has_ended_its_direction(
    server: FakeServer, episode: AsyncEpisode
) -> None:
    received = bytearray()

    async def service(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        received.extend(await reader.read())
        writer.write(b"after your end")
        writer.write_eof()

    server.hypervisor.services[PORT] = service
    async with connected(episode, PORT) as (reader, writer):
        assert await reader.readexactly(5) == b"hello"
        writer.write(b"all that I send")
        writer.write_eof()
        assert await reader.read() == b"after your end"
    assert received == b"all that I send"


async def test_the_guest_may_end_its_direction_first(server: FakeServer, episode: AsyncEpisode) -> None:
    received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def service(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write_eof()
        received.set_result(await reader.read())

    server.hypervisor.services[PORT] = service
    async with connected(episode, PORT) as (reader, writer):
        assert await reader.read() == b""
        writer.write(b"still sending")
        writer.write_eof()
        assert await received == b"still sending"


async def test_64_mib_come_back_unchanged(episode: AsyncEpisode) -> None:
    block = bytes(range(256)) * 4096
    async with connected(episode, ECHO) as (reader, writer):

        async def send() -> None:
            for _ in range(64):
                writer.write(block)
                await writer.drain()
            writer.write_eof()

        sending = asyncio.create_task(send())
        for _ in range(64):
            assert await reader.readexactly(len(block)) == block
        assert await reader.read() == b""
        await sending


async def test_a_program_that_speaks_http_and_websockets_is_reached(server: FakeServer, episode: AsyncEpisode) -> None:
    async def devtools(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        if request.path == "/json/version":
            return aiohttp.web.json_response({"webSocketDebuggerUrl": f"ws://{request.host}/devtools"})
        websocket = aiohttp.web.WebSocketResponse()
        await websocket.prepare(request)
        async for message in websocket:
            await websocket.send_str(message.data)
        return websocket

    app = aiohttp.web.Application()
    app.router.add_route("GET", "/{path:.*}", devtools)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
    port: int = runner.addresses[0][1]

    async def service(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))
        finally:
            far_writer.close()

    server.hypervisor.services[PORT] = service
    async with episode.forward(PORT) as forward, aiohttp.ClientSession() as http:
        async with http.get(f"http://{forward.address}/json/version") as response:
            address = (await response.json())["webSocketDebuggerUrl"]
        assert address == f"ws://{forward.address}/devtools"
        async with http.ws_connect(address) as websocket:
            for text in ("first", "x" * 300_000, "last"):
                await websocket.send_str(text)
                assert await websocket.receive_str() == text
    await runner.cleanup()


async def test_a_port_without_a_program_resets_the_connection_and_works_once_one_listens(
    server: FakeServer, episode: AsyncEpisode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "cuaenv.client.forwarding")
    async with episode.forward(PORT) as forward:
        reader, writer = await asyncio.open_connection("127.0.0.1", forward.local_port)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        assert f"port {PORT} of the guest: Connection refused" in caplog.text
        server.hypervisor.services[PORT] = server.hypervisor.services[ECHO]
        reader, writer = await asyncio.open_connection("127.0.0.1", forward.local_port)
        writer.write(b"now")
        assert await reader.readexactly(3) == b"now"
        writer.close()
    async with streams(server) as open_stream:
        error = await failure(await open_stream(episode_id=episode.episode_id, port=PORT + 1))
        assert error.reason == "GUEST_REFUSED"


async def test_a_reader_that_stops_stops_the_guest_and_no_other_call(server: FakeServer, episode: AsyncEpisode) -> None:
    sent = 0

    async def service(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        while sent < 64 << 20:
            writer.write(bytes(1 << 20))
            sent += 1 << 20
            await writer.drain()

    server.hypervisor.services[PORT] = service
    async with connected(episode, PORT) as (reader, _):
        assert await reader.readexactly(1) == b"\0"
        progress = [-1]
        while sent > progress[-1]:
            progress.append(sent)
            await episode.step(Wait(timedelta(milliseconds=50)))
        assert sent < 32 << 20
        left = (64 << 20) - 1
        while left:
            left -= len(await reader.readexactly(min(left, 1 << 20)))
        assert await reader.read() == b""


async def test_a_killed_guest_ends_its_connections_and_the_episode_is_void(
    server: FakeServer, episode: AsyncEpisode
) -> None:
    async with episode.forward(ECHO) as forward, streams(server) as open_stream:
        call = await open_stream(episode_id=episode.episode_id, port=ECHO)
        await call.read()
        reader, writer = await asyncio.open_connection("127.0.0.1", forward.local_port)
        writer.write(b"!")
        assert await reader.readexactly(1) == b"!"
        found = server.service.find(episode.episode_id)
        assert found is not None
        server.hypervisor.machines[found.machine.machine_id].kill("killed by a test")
        assert (await failure(call)).reason == "MACHINE_LOST"
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        with pytest.raises(MachineLost, match="killed by a test"):
            await forward.wait()


async def test_a_connection_ends_with_its_episode_and_so_does_the_forward(
    server: FakeServer, episode: AsyncEpisode
) -> None:
    async with connected(episode, ECHO) as (reader, writer), episode.forward(ECHO) as forward:
        writer.write(b"!")
        assert await reader.readexactly(1) == b"!"
        await episode.close()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        _, late = await asyncio.open_connection("127.0.0.1", forward.local_port)
        with pytest.raises(EpisodeNotFound, match="closed at"):
            await forward.wait()
        late.close()


async def test_an_open_connection_keeps_the_guest_running_and_only_bytes_renew_the_lease(server: FakeServer) -> None:
    async with (
        AsyncEnvClient(server.address, keep_alive_interval=timedelta(hours=1)) as client,
        client.reset(TASK, lease_ttl=timedelta(seconds=10)) as episode,
        streams(server) as open_stream,
    ):
        found = server.service.find(episode.episode_id)
        assert found is not None
        machine = server.hypervisor.machines[found.machine.machine_id]
        call = await open_stream(episode_id=episode.episode_id, port=ECHO)
        await call.read()
        assert machine.state is MachineState.RUNNING
        assert not found.lease.in_call
        opened_s = found.lease.expire_s
        # At most once a second.
        while found.lease.expire_s == opened_s:
            await call.write(env_pb2.ForwardGuestPortRequest(data=b"!"))
            assert (await call.read()).data == b"!"
        await call.done_writing()
        await drained(call)
        await until(lambda: machine.state is MachineState.PAUSED)


async def test_a_connection_without_bytes_is_closed_after_its_idle_timeout(
    server: FakeServer, episode: AsyncEpisode
) -> None:
    async with streams(server) as open_stream:
        call = await open_stream(episode_id=episode.episode_id, port=ECHO, idle_timeout=timedelta(seconds=1))
        await call.read()
        error = await failure(call)
    assert error.reason == "GUEST_REFUSED"
    assert "closed after 1 s without bytes" in str(error)


async def test_a_client_that_stops_reading_keeps_the_guest_running_no_longer_than_the_idle_timeout(
    server: FakeServer, episode: AsyncEpisode
) -> None:
    async def service(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(bytes(1 << 20))
            await writer.drain()

    server.hypervisor.services[PORT] = service
    found = server.service.find(episode.episode_id)
    assert found is not None
    machine = server.hypervisor.machines[found.machine.machine_id]
    async with streams(server) as open_stream:
        call = await open_stream(episode_id=episode.episode_id, port=PORT, idle_timeout=timedelta(seconds=1))
        await call.read()
        await until(lambda: machine.state is MachineState.PAUSED)
        assert server.metrics.port_connections.labels(pool="fake")._value.get() == 0
        assert (await failure(call)).reason == "GUEST_REFUSED"


async def test_an_episode_has_a_limited_number_of_connections(server: FakeServer, episode: AsyncEpisode) -> None:
    async with streams(server) as open_stream:
        calls = [await open_stream(episode_id=episode.episode_id, port=ECHO) for _ in range(MAX_CONNECTIONS)]
        for call in calls:
            await call.read()
        assert (await failure(await open_stream(episode_id=episode.episode_id, port=ECHO))).reason == "RATE_LIMITED"
        await calls[0].done_writing()
        await drained(calls[0])
        another = await open_stream(episode_id=episode.episode_id, port=ECHO)
        assert not (await another.read()).data
        open_count = server.metrics.port_connections.labels(pool="fake")
        assert open_count._value.get() == MAX_CONNECTIONS
        for call in (*calls, another):
            call.cancel()
        await until(lambda: open_count._value.get() == 0)


@pytest.mark.parametrize("port", [PORT, PORT + 1], ids=["unread by the guest", "unread by the client"])
async def test_cancelled_connections_with_unread_bytes_leave_no_descriptors_and_no_tracebacks(
    server: FakeServer,
    episode: AsyncEpisode,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    port: int,
) -> None:
    monkeypatch.setattr("envd.base.streams._CLOSE_TIMEOUT_S", 0.05)
    may_end = asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_end.wait()

    async def talkative(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(32 << 20))
        await may_end.wait()
        writer.transport.abort()

    server.hypervisor.services |= {PORT: deaf, PORT + 1: talkative}
    found = server.service.find(episode.episode_id)
    assert found is not None
    opened: list[asyncio.StreamWriter] = []

    async def open_port(number: int) -> Any:
        opened.append((both := await open_original(number))[1])
        return both

    open_original = found.machine.desktop.open_port
    monkeypatch.setattr(found.machine.desktop, "open_port", open_port)

    async def fill(call: Any) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError, asyncio.InvalidStateError):
            while True:
                await call.write(env_pb2.ForwardGuestPortRequest(data=bytes(100_000)))

    open_count = server.metrics.port_connections.labels(pool="fake")
    async with streams(server) as open_stream:
        calls = [await open_stream(episode_id=episode.episode_id, port=port) for _ in range(MAX_CONNECTIONS)]
        for call in calls:
            await call.read()
        filling = [asyncio.create_task(fill(call)) for call in calls] if port == PORT else []
        is_full = [writer.transport.get_write_buffer_size for writer in opened] if port == PORT else []
        await until(lambda: all(size() for size in is_full))
        for call in calls:
            call.cancel()
        await until(lambda: open_count._value.get() == 0)
        await asyncio.gather(*filling)
    assert len(opened) == MAX_CONNECTIONS
    assert [writer for writer in opened if writer.get_extra_info("socket").fileno() != -1] == []
    assert [record for record in caplog.records if record.exc_info] == []
    may_end.set()


async def test_messages_of_bytes_wait_above_their_rate(server: FakeServer, episode: AsyncEpisode) -> None:
    count = MESSAGE_BURST + 200
    async with streams(server) as open_stream:
        call = await open_stream(episode_id=episode.episode_id, port=ECHO)
        await call.read()

        async def send() -> None:
            for _ in range(count):
                await call.write(env_pb2.ForwardGuestPortRequest(data=b"!"))
            await call.done_writing()

        sending = asyncio.create_task(send())
        received = 0
        while (response := await call.read()) is not grpc.aio.EOF:
            received += len(response.data)
        assert received == count
        await sending


@pytest.mark.parametrize(
    ("first", "field"),
    [
        ({"port": 0}, "port"),
        ({"port": 65_536}, "port"),
        ({"port": ECHO, "idle_timeout": timedelta(seconds=0.5)}, "idle_timeout"),
        ({"port": ECHO, "data": bytes((128 << 10) + 1)}, "data"),
    ],
)
async def test_a_bad_field_is_named(
    first: dict[str, Any], field: str, server: FakeServer, episode: AsyncEpisode
) -> None:
    async with streams(server) as open_stream:
        error = await failure(await open_stream(episode_id=episode.episode_id, **first))
    assert (error.reason, error.field) == ("BAD_FIELD", field)


async def test_a_pool_without_guest_access_is_refused(
    server: FakeServer, episode: AsyncEpisode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.pool, "settings", server.pool.settings.model_copy(update={"allow_guest_access": False}))
    async with streams(server) as open_stream:
        error = await failure(await open_stream(episode_id=episode.episode_id, port=ECHO))
    assert error.reason == "ACCESS_DENIED"


async def test_a_listed_episode_of_another_client_can_be_forwarded(server: FakeServer, episode: AsyncEpisode) -> None:
    async with AsyncEnvClient(server.address) as other:
        (info,) = await other.list_episodes()
        async with other.forward(info, ECHO) as forward:
            reader, writer = await asyncio.open_connection("127.0.0.1", forward.local_port)
            writer.write(b"!")
            assert await reader.readexactly(1) == b"!"
            writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", forward.local_port)


async def test_the_synchronous_client_forwards_to_a_given_local_port(server: FakeServer) -> None:
    def play() -> bytes:
        with socket.create_server(("127.0.0.1", 0)) as free:
            local_port = free.getsockname()[1]
        with (
            EnvClient(server.address) as client,
            client.reset(TASK) as episode,
            episode.forward(ECHO, local_port=local_port) as forward,
            socket.create_connection(("127.0.0.1", local_port)) as connection,
        ):
            assert forward.address == f"127.0.0.1:{local_port}"
            connection.sendall(b"!")
            return connection.recv(1)

    assert await asyncio.to_thread(play) == b"!"


async def test_a_port_that_is_none_or_in_use_is_an_error(episode: AsyncEpisode) -> None:
    with pytest.raises(ValueError, match="a port is 1 to 65535"):
        async with episode.forward(0):
            pass
    async with episode.forward(ECHO) as forward:
        with pytest.raises(OSError, match="address already in use"):
            async with episode.forward(ECHO, local_port=forward.local_port):
                pass


# The real guestd


@pytest.fixture(scope="module")
def guestd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGuestd]:
    with ExitStack() as stack:
        yield serve_guestd(stack, tmp_path_factory.mktemp("guest") / "home")


async def test_the_real_guestd_connects_to_its_loopback_and_relays_both_directions(guestd: LocalGuestd) -> None:
    async def service(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello" + await reader.read())
        writer.close()

    async with await asyncio.start_server(service, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await open_port(guestd.url, port, machine_id="m-1")
        writer.write(b", guest")
        writer.write_eof()
        assert await reader.read() == b"hello, guest"
        writer.close()
    with pytest.raises(GuestError, match=f"machine m-1: port {port} of the guest: Connection refused"):
        await open_port(guestd.url, port, machine_id="m-1")


async def test_the_port_of_the_guests_service_needs_no_forwarding_by_it(guestd: LocalGuestd) -> None:
    reader, writer = await open_port(guestd.url, 5000, machine_id="m-1")
    writer.write(b"GET /platform HTTP/1.0\r\n\r\n")
    assert b"200 OK" in await reader.readline()
    writer.close()


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (b"HTTP/1.0 404 NOT FOUND\r\n\r\n<html>", GuestError, "cannot forward ports; build the image"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n" + b"x" * (1 << 20), GuestError, "x" * 2000),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", GuestError, "guestd returned 0"),
        (b"HTTP/1.1 101 " + b"x" * (1 << 20), GuestError, "guestd returned 0: Separator is not found"),
        (b"", GuestUnresponsive, "did not connect to port 1: "),
    ],
)
async def test_any_other_answer_of_the_guest_is_a_typed_error(answer: bytes, error: type[Exception], text: str) -> None:
    async def service(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(service, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(error, match=text):
            await open_port(url, 1, machine_id="m-1")


# The command


async def test_the_command_prints_the_local_address_and_ends_with_the_episode(
    server: FakeServer, episode: AsyncEpisode
) -> None:
    command = ("forward", episode.episode_id, str(ECHO), "--envd", server.address)
    with EnvdProgram(*command) as forward:
        address = await asyncio.to_thread(forward.wait_for, r"^(\S+:\d+)$")
        host, _, port = address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"!")
        assert await reader.readexactly(1) == b"!"
        await episode.close()
        assert await asyncio.to_thread(forward.wait) == 1
        writer.close()
        assert f"error: episode {episode.episode_id}: closed at" in forward.output


async def test_the_command_reports_an_unknown_episode_and_a_port_in_use(
    server: FakeServer, episode: AsyncEpisode
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        local_port = used.getsockname()[1]
        for arguments, status, text in (
            (("ep-unknown", "80"), 1, "error: episode ep-unknown: "),
            ((episode.episode_id, "80", "--local", str(local_port)), 2, f"--local {local_port}: cannot listen"),
        ):
            with EnvdProgram("forward", *arguments, "--envd", server.address) as forward:
                assert await asyncio.to_thread(forward.wait) == status
                assert text in forward.output
