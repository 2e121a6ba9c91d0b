"""The host's client of guestd: against a real guestd without an X server, and against services that fail."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from cuaenv.actions import RunShell, WriteFile
from envd.base.errors import GuestError, GuestUnresponsive, MachineLost
from envd.desktop import toolbox
from envd.desktop.guestd import GuestdClient
from envd.desktop.session import GuestSession
from envd.guests.guestd import VERSION
from tests.support.guestd_contract import Guest, GuestdContract
from tests.support.local_guestd import LocalGuestd, serve_guestd


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGuestd]:
    with ExitStack() as stack:
        yield serve_guestd(stack, tmp_path_factory.mktemp("home"))


@pytest.fixture
async def client(service: LocalGuestd, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GuestdClient]:
    # A proxy that accepts nothing: calls to the loopback must not use it.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with GuestdClient(service.url, lost=asyncio.Event()) as client:
        yield client


class TestGuestdOfLinux(GuestdContract):
    @pytest.fixture
    def guest(self, service: LocalGuestd) -> Guest:
        return Guest(url=service.url, home=str(service.home), read=lambda path: Path(path).read_bytes())


async def test_commands_run_with_binary_input_and_output(client: GuestdClient) -> None:
    result = await client.execute(
        ["sh", "-c", "cat; printf $A >&2; exit 3"], timeout_s=60.0, stdin=b"\0\xff", env={"A": "b"}
    )
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"\0\xff", b"b")
    killed = await client.execute(["sh", "-c", "kill -TERM $$"], timeout_s=60.0)
    assert killed.exit_code == 143


async def test_too_much_output_and_text_without_a_display_are_errors(client: GuestdClient) -> None:
    with pytest.raises(GuestError, match="limit"):
        await client.execute(["head", "-c", str(20 << 20), "/dev/zero"], timeout_s=30)
    with pytest.raises(GuestError, match="DISPLAY is not set"):
        await client.type_text("é")


async def test_without_x_the_session_is_not_ready(client: GuestdClient) -> None:
    session = await client.session()
    assert not session.ready
    assert session.version == VERSION
    assert "DISPLAY" in session.problem


async def test_a_service_that_is_silent_or_absent_is_unresponsive() -> None:
    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(never_answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with GuestdClient(url, lost=asyncio.Event()) as client:
        with pytest.raises(GuestUnresponsive, match=r"within 0\.1 s"):
            await client.session(timeout_s=0.1)
        server.close()
        await server.wait_closed()
        with pytest.raises(GuestUnresponsive, match="broke the connection"):
            await client.session(timeout_s=60.0)
    with pytest.raises(GuestUnresponsive, match="closed"):
        await client.session()


async def test_a_connection_that_breaks_shortly_before_the_machine_is_lost_is_its_loss() -> None:
    lost = asyncio.Event()

    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()
        asyncio.get_running_loop().call_later(0.05, lost.set)

    server = await asyncio.start_server(break_off, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with GuestdClient(url, lost=lost, lost_grace_s=60.0) as client:
        with pytest.raises(MachineLost):
            await client.execute(["true"], timeout_s=60.0)
    server.close()
    await server.wait_closed()


# OSWorld's own service


@pytest.fixture
async def osworld() -> AsyncIterator[tuple[GuestdClient, list[str]]]:
    """A client of a service with OSWorld's routes only, and the requests that the service received."""
    seen: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(f"{request.method} {request.path}")
        match request.path:
            case "/platform":
                return web.Response(text="Linux")
            case "/screenshot":
                return web.Response(body=b"\x89PNG...", content_type="image/png")
            case "/execute" if (await request.json())["command"] == ["die"]:
                assert request.transport
                request.transport.close()
                return web.Response()
            case "/execute":
                return web.json_response({"status": "success", "output": "é\n", "error": "", "returncode": 0})
            case _:
                return web.Response(status=404, text="Not Found")

    runner = web.AppRunner(_application(answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    async with GuestdClient(f"http://{host}:{port}", lost=asyncio.Event()) as client:
        yield client, seen
    await runner.cleanup()


def _application(handler: Any) -> web.Application:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handler)
    return application


async def test_a_screenshot_of_osworlds_service_counts_as_a_ready_session(
    osworld: tuple[GuestdClient, list[str]],
) -> None:
    client, _ = osworld
    session = await client.session()
    assert (session.ready, session.version) == (True, "")
    assert (await client.execute(["echo"], timeout_s=60.0)).stdout == "é\n".encode()
    with pytest.raises(GuestError, match="404"):
        await client.type_text("x")


async def test_a_post_is_not_retried_on_a_service_without_deduplication(
    osworld: tuple[GuestdClient, list[str]],
) -> None:
    client, seen = osworld
    with pytest.raises(GuestUnresponsive, match="broke the connection"):
        await client.execute(["die"], timeout_s=60.0)
    assert seen == ["POST /execute"]


# A service that ended and was restarted


async def test_a_post_that_ended_with_its_service_is_not_repeated(service: LocalGuestd) -> None:
    """The client names the service that it sent a request to, and another one refuses the repeat."""
    named: list[str | None] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        server = {"Server": "envd-guestd/2 first"}
        if request.method == "GET":
            return web.json_response({"x": 1, "y": 2, "buttons": [], "modifiers": []}, headers=server)
        named.append(request.headers.get("X-Server"))
        if len(named) == 1:
            assert request.transport
            request.transport.close()
        return web.json_response({"message": "restarted"}, status=503, headers={"Server": "envd-guestd/2 second"})

    runner = web.AppRunner(_application(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    async with GuestdClient(f"http://{host}:{port}", lost=asyncio.Event()) as client:
        await client.pointer()
        with pytest.raises(GuestUnresponsive, match="restarted"):
            await client.write_file("/home/user/note", b"x")
    await runner.cleanup()
    assert named == [None, "envd-guestd/2 first"]

    headers = {"X-Server": "envd-guestd/2 first", "X-Request-Id": "1"}
    async with aiohttp.ClientSession() as http, http.post(f"{service.url}/execute", headers=headers) as response:
        assert (response.status, "restarted" in await response.text()) == (503, True)


async def test_an_agents_tools_live_on_between_the_commands_that_use_them(client: GuestdClient) -> None:
    class Session:
        has_powershell = False

        def guestd(self, _purpose: str) -> GuestdClient:
            return client

    tools: GuestSession = Session()  # type: ignore[assignment]
    assert (await toolbox.use(tools, RunShell("mkdir -p d; cd d; X=5"))).exit_code == 0
    assert (await toolbox.use(tools, RunShell("echo $X; basename $PWD"))).output == "5\nd\n"
    assert (await toolbox.use(tools, WriteFile("d/a.txt", "é"))).error == ""
    assert (await toolbox.use(tools, RunShell("cat a.txt"))).output == "é"
    ended = await toolbox.use(tools, RunShell("kill -9 $PPID"))
    assert "ended during this action" in ended.error
