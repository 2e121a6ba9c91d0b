"""A site is recorded through the real proxy, in its sandbox, and replayed without the site."""

import asyncio
import gzip
import os
import re
import signal
import socket
import struct
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cuaenv.results import UnrecordedRequest
from envd.base.config_values import default_cache_dir
from envd.base.errors import ConfigError
from envd.base.sandbox.probe import sandbox_problem
from envd.base.streams import close
from envd.desktop.allow_list import AllowList
from envd.desktop.gateway import HostExit
from envd.integrations.web.environment import AUTHORITY_CERT, PROGRAM, WebEnvironment
from envd.integrations.web.proxy import WebProxy
from envd.integrations.web.recordings import WebRecordings, read_entries
from tests.support.command import CommandOutput, run_envd
from tests.support.web_site import DOWNLOAD, Visitor, open_socket, serve_site

ENVIRONMENT = WebEnvironment(default_cache_dir())
pytestmark = [
    pytest.mark.skipif(not ENVIRONMENT.is_installed, reason="run `envd web install`"),
    pytest.mark.skipif(bool(sandbox_problem()), reason="no sandbox can be created here"),
]


class Running:
    """A proxy, and a port of loopback where it serves the programs of a machine."""

    def __init__(self, proxy: WebProxy, outcomes: Counter[str], ports: dict[str, int]) -> None:
        self.proxy = proxy
        self.outcomes = outcomes
        self.ports = ports

    def visitor(self, machine_id: str = "m0") -> Visitor:
        certificate = (ENVIRONMENT.authority() / AUTHORITY_CERT).read_text()
        return Visitor(f"http://127.0.0.1:{self.ports[machine_id]}", certificate)


Tour = list[tuple[int, str, bytes]]
Start = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def recordings(tmp_path: Path) -> WebRecordings:
    return WebRecordings(tmp_path / "assets")


@asynccontextmanager
async def running_proxy(
    recordings: WebRecordings, *allowed: str, replays: bool = False, machines: int = 1, **options: int
) -> AsyncIterator[Running]:
    outcomes: Counter[str] = Counter()
    proxy = WebProxy(
        "shop",
        recordings=recordings,
        environment=ENVIRONMENT,
        servers=None if replays else HostExit(AllowList(allowed, every_public_host=True)),
        on_request=lambda outcome: outcomes.update([outcome]),
        **options,
    )
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, machine_id: str) -> None:
        try:
            with suppress(OSError, EOFError):
                await proxy(await reader.readuntil(b"\r\n\r\n"), reader, writer, machine_id)
        finally:
            await close(writer)

    def accept(machine_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(serve(reader, writer, machine_id)))

    servers = {}
    try:
        await proxy.start()
        for name in (f"m{index}" for index in range(machines)):
            servers[name] = await asyncio.start_server(partial(accept, name), "127.0.0.1", 0)
        yield Running(proxy, outcomes, {name: each.sockets[0].getsockname()[1] for name, each in servers.items()})
    finally:
        for server in servers.values():
            server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await proxy.aclose()


@pytest.fixture
def start(recordings: WebRecordings) -> Start:
    return partial(running_proxy, recordings)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    with serve_site(tmp_path) as port:
        yield f"https://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tour, bytes]:
    """Record a tour of the site once; return its address, what the tour showed, and the recording."""
    directory = tmp_path_factory.mktemp("stored")
    recordings = WebRecordings(directory)

    async def record(site: str) -> Tour:
        async with running_proxy(recordings, site.removeprefix("https://")) as running:
            shown = await asyncio.to_thread(running.visitor().tour, site)
            assert running.outcomes == {"recorded": 8}
            return shown

    with pytest.MonkeyPatch.context() as patch, serve_site(directory) as port:
        patch.setenv("SSL_CERT_FILE", str(directory / "ca.pem"))
        site = f"https://127.0.0.1:{port}"
        shown = asyncio.run(record(site))
    return site, shown, recordings.path("shop").read_bytes()


@pytest.fixture
def recorded(stored: tuple[str, Tour, bytes], recordings: WebRecordings) -> tuple[str, Tour]:
    """Put the recorded tour into the recordings; return the site's address, where nothing listens, and the tour."""
    site, shown, content = stored
    recordings.directory.mkdir(parents=True)
    (recordings.directory / "shop.warc.gz").write_bytes(content)
    return site, shown


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replaying(
    stored: tuple[str, Tour, bytes], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    """Replay the tour to 8 machines, for tests that leave the proxy as it was: a start takes 1 s of CPU time."""
    recordings = WebRecordings(tmp_path_factory.mktemp("replayed"))
    recordings.directory.mkdir()
    (recordings.directory / "shop.warc.gz").write_bytes(stored[2])
    async with running_proxy(recordings, replays=True, machines=8) as running:
        yield running


@pytest.fixture
def replay(replaying: Running) -> Running:
    """Return that proxy without the requests of earlier tests."""
    replaying.outcomes.clear()
    for machine_id in replaying.ports:
        replaying.proxy.take_unrecorded(machine_id)
    return replaying


@pytest.mark.asyncio(loop_scope="module")
async def test_a_site_is_replayed_equally_for_8_machines_without_it(
    stored: tuple[str, Tour, bytes], replay: Running
) -> None:
    site, shown, _ = stored
    assert [status for status, _, _ in shown] == [200, 200, 200, 200, 200, 404]
    assert [body for _, _, body in shown][:3] == [b"<h1>Hello, a stranger</h1>"] * 2 + [b"<h1>Hello, someone</h1>"]
    assert shown[4] == (200, f"{site}/file.bin", DOWNLOAD)
    tours = (asyncio.to_thread(replay.visitor(f"m{index}").tour, site) for index in range(8))
    assert await asyncio.gather(*tours) == [shown] * 8
    assert replay.outcomes == {"replayed": 8 * 8}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_that_was_not_recorded_gets_a_page_that_names_it(
    stored: tuple[str, Tour, bytes], replay: Running
) -> None:
    site, visitor = stored[0], replay.visitor()
    status, _, page = await asyncio.to_thread(visitor.open, f"{site}/other?a=<b>")
    assert (status, f"GET {site}/other?a=&lt;b> was not recorded." in page.decode()) == (504, True)
    status, _, page = await asyncio.to_thread(visitor.open, f"{site}/login", b"name=eve")
    assert (status, f"POST {site}/login was not recorded." in page.decode()) == (504, True)
    status, _, page = await asyncio.to_thread(visitor.open, "http://example.org/")
    assert (status, "Not in the web recording shop" in page.decode()) == (504, True)
    assert replay.outcomes == {"not_recorded": 3}
    assert [str(each) for each in replay.proxy.take_unrecorded("m0")] == [
        f"not recorded: GET {site}/other?a=<b>",
        f"not recorded: POST {site}/login",
        "not recorded: GET http://example.org/",
    ]
    assert replay.proxy.take_unrecorded("m0") == ()


@pytest.mark.asyncio(loop_scope="module")
async def test_no_request_hides_those_after_it(
    stored: tuple[str, Tour, bytes], replay: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = stored[0]

    def send() -> None:
        with socket.create_connection(("127.0.0.1", replay.ports["m0"])) as program:
            program.sendall(b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n")
            assert b"504" in program.recv(1 << 16)
            program.sendall(b"%s http://b.example/ HTTP/1.1\r\nHost: b.example\r\n\r\n" % (b"M" * 100_000))
            program.recv(1 << 16)

    await asyncio.to_thread(send)
    # As a worker that a guest has taken over would.
    first = replay.proxy._receive

    async def receive(control: socket.socket) -> dict[str, Any] | None:
        message = await first(control)
        return message and {}

    with monkeypatch.context() as patch:
        patch.setattr(replay.proxy, "_receive", receive)
        for _ in range(2):
            await asyncio.to_thread(replay.visitor("m1").open, f"{site}/malformed")
    # The message that was awaited then is malformed too.
    await asyncio.to_thread(replay.visitor("m1").open, f"{site}/malformed")
    await asyncio.to_thread(replay.visitor("m1").open, f"{site}/left")
    urls = [each.url for each in replay.proxy.take_unrecorded("m1")]
    assert urls[-1] == f"{site}/left"
    assert [(each.method, each.url) for each in replay.proxy.take_unrecorded("m0")] == [
        ("GET", "http://a.example/"),
        ("M" * 16, "http://b.example/"),
    ]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_newest_requests_of_a_guest_are_kept_and_do_not_fill_the_log(
    stored: tuple[str, Tour, bytes], replay: Running, caplog: pytest.LogCaptureFixture
) -> None:
    site, visitor = stored[0], replay.visitor("m1")
    caplog.set_level("INFO", logger="envd.integrations.web.proxy")
    for index in range(22):
        await asyncio.to_thread(visitor.open, f"{site}/{index}")
    kept = replay.proxy.take_unrecorded("m1")
    assert [each.url for each in kept] == [f"{site}/{index}" for index in range(2, 22)]
    assert replay.proxy.take_unrecorded("m0") == ()
    assert caplog.text.count("not_recorded") == 20
    await asyncio.to_thread(visitor.open, f"{site}/next-step")
    assert replay.proxy.take_unrecorded("m1")
    assert "next-step" in caplog.text


async def test_websockets_are_opened_while_recording_and_refused_by_a_replay(
    site: str, start: Start, recordings: WebRecordings
) -> None:
    authority = (ENVIRONMENT.authority() / AUTHORITY_CERT).read_text()
    opened = UnrecordedRequest(kind="websocket", method="GET", url=f"{site}/socket")
    async with start(site.removeprefix("https://")) as running:
        proxy = f"http://127.0.0.1:{running.ports['m0']}"
        assert await asyncio.to_thread(open_socket, proxy, authority, site) == (101, b"")
        assert running.outcomes == {"websocket": 1}
        assert running.proxy.take_unrecorded("m0") == (opened,)
        await asyncio.to_thread(running.visitor().open, f"{site}/home")
    assert [entry["url"] for entry in read_entries(recordings.path("shop"), ENVIRONMENT)] == [f"{site}/home"]
    async with start(replays=True) as running:
        proxy = f"http://127.0.0.1:{running.ports['m0']}"
        status, page = await asyncio.to_thread(open_socket, proxy, authority, site)
        assert (status, b"WebSockets are not replayed" in page) == (501, True)
        assert running.outcomes == {"websocket": 1}
        assert running.proxy.take_unrecorded("m0") == (opened,)


async def test_a_recording_of_2001_is_replayed_with_valid_certificates_and_cookies(
    recorded: tuple[str, Tour], start: Start, recordings: WebRecordings
) -> None:
    site, shown = recorded
    path = recordings.path("shop")
    old = [re.sub(rb"WARC-Date: [^\r]+", b"WARC-Date: 2001-01-01T09:00:00Z", member) for member in members(path)]
    path.write_bytes(b"".join(map(gzip.compress, old)))
    async with start(replays=True) as running:
        visitor = running.visitor()
        assert await asyncio.to_thread(visitor.open, f"{site}/start") == shown[0]
        (cookie,) = visitor.cookies
        left = datetime.fromtimestamp(cookie.expires or 0, UTC) - datetime.now(UTC)
        assert timedelta(minutes=30) < left < timedelta(minutes=90)


def members(path: Path) -> list[bytes]:
    """Return the records of a recording."""
    found, data = [], path.read_bytes()
    while data:
        reader = zlib.decompressobj(wbits=31)
        found.append(reader.decompress(data))
        data = reader.unused_data
    return found


async def test_private_addresses_are_neither_reached_nor_recorded(
    site: str, start: Start, recordings: WebRecordings
) -> None:
    async with start() as running:
        visitor = running.visitor()
        status, _, page = await asyncio.to_thread(visitor.open, f"{site}/home")
        assert (status, b"403 Forbidden" in page) == (502, True)
        status, _, page = await asyncio.to_thread(visitor.open, f"http://{site.removeprefix('https://')}/home")
        assert (status, b"not in this desktop's list of allowed hosts" in page) == (403, True)
    assert recordings.path("shop").stat().st_size == 0


async def test_a_server_with_an_unknown_certificate_is_an_error_page(
    site: str, start: Start, tmp_path: Path, recordings: WebRecordings
) -> None:
    (tmp_path / "ca.pem").write_text((ENVIRONMENT.authority() / AUTHORITY_CERT).read_text())
    async with start(site.removeprefix("https://")) as running:
        status, _, page = await asyncio.to_thread(running.visitor().open, f"{site}/home")
        assert (status, b"Certificate verify failed" in page) == (502, True)
        assert running.outcomes == {"failed": 1}
    assert recordings.path("shop").stat().st_size == 0


async def test_a_full_recording_stays_whole_and_requests_get_an_error_page(
    site: str, start: Start, recordings: WebRecordings
) -> None:
    async with start(site.removeprefix("https://"), max_bytes=1500) as running:
        visitor = running.visitor()
        pages = [(await asyncio.to_thread(visitor.open, f"{site}/random"))[0] for _ in range(4)]
        assert pages == [200, 200, 507, 507]
        assert running.outcomes == {"recorded": 1, "failed": 1}
    assert len(read_entries(recordings.path("shop"), ENVIRONMENT)) == 1


async def test_credentials_are_not_recorded_and_cookies_are(site: str, start: Start, recordings: WebRecordings) -> None:
    async with start(site.removeprefix("https://")) as running:
        visitor = running.visitor()
        visitor._opener.addheaders.append(("Authorization", "Basic secret"))
        await asyncio.to_thread(visitor.open, f"{site}/login", b"name=ann")
    text = b"".join(members(recordings.path("shop")))
    assert b"GET /home" in text
    assert b"secret" not in text
    assert b"Cookie: user=ann" in text
    assert recordings.path("shop").stat().st_mode & 0o777 == 0o600


async def test_a_missing_damaged_or_used_recording_is_an_error_at_start(
    recorded: tuple[str, Tour], start: Start, recordings: WebRecordings
) -> None:
    async def fails(match: str, *, replays: bool) -> None:
        with pytest.raises(ConfigError, match=match):
            async with start(replays=replays):
                pass

    path = recordings.path("shop")
    whole = path.read_bytes()
    with recordings.open("shop", for_recording=False):  # as another daemon does that replays it
        async with start(replays=True):
            await fails("web recording shop: a daemon uses it", replays=False)
    async with start():
        await fails("web recording shop: a daemon uses it", replays=True)
    path.write_bytes(whole[:-20])
    await fails("web recording shop: not a compressed WARC file, or damaged", replays=True)
    await fails("web recording shop: not a compressed WARC file, or damaged", replays=False)
    path.write_bytes(b"")
    await fails("none at all", replays=True)
    path.unlink()
    await fails("web recording shop: not found", replays=True)


def grown(start: bytes, mib: int) -> bytes:
    """Return a gzip member of `start` and blanks, of which one MiB is compressed and then repeated."""
    blanks = b" " * (1 << 20)
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)
    # A full flush makes what follows independent of what precedes it.
    head, body = (compressor.compress(data) + compressor.flush(zlib.Z_FULL_FLUSH) for data in (start, blanks))
    checksum = reduce(lambda so_far, _: zlib.crc32(blanks, so_far), range(mib), zlib.crc32(start))
    end = struct.pack("<LL", checksum, len(start) + (mib << 20))
    return head + body * mib + zlib.compressobj(wbits=-15).flush() + end


@pytest.mark.parametrize(("end_of_head", "mib"), [(b"\r\n", 128), (b"X: ", 320)], ids=["body", "header"])
def test_a_file_that_grows_when_it_is_unpacked_is_refused(
    end_of_head: bytes, mib: int, recordings: WebRecordings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Unpacking as much as the usual 1 GiB takes 8 s.
    less = "from envd.integrations.web import warc\nwarc._MEMORY_BYTES = 256 << 20\n"
    monkeypatch.setattr("envd.integrations.web.recordings.PROGRAM", PROGRAM + less)
    head = (
        b"WARC/1.0\r\nWARC-Type: response\r\nWARC-Record-ID: <urn:uuid:1>\r\nWARC-Date: 2026-01-01T00:00:00Z\r\n"
        b"WARC-Target-URI: http://a.example/\r\nContent-Type: application/http; msgtype=response\r\n"
        b"Content-Length: 2147483648\r\n\r\nHTTP/1.1 200 OK\r\n"
    )
    bomb = tmp_path / "bomb.warc.gz"
    bomb.write_bytes(grown(head + end_of_head, mib))
    assert bomb.stat().st_size < 3 << 20
    with pytest.raises(ConfigError, match=r"a body has more than|of memory to read"):
        recordings.add("bomb", bomb, ENVIRONMENT)
    assert not list(recordings.directory.glob("*"))


async def test_a_proxy_that_was_killed_is_started_again(recorded: tuple[str, Tour], start: Start) -> None:
    site, shown = recorded
    async with start(replays=True) as running:
        process = running.proxy._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        assert await asyncio.to_thread(running.visitor().tour, site) == shown


@pytest.mark.asyncio(loop_scope="module")
async def test_the_proxy_has_no_network_and_no_rights(replay: Running) -> None:
    process = replay.proxy._process
    assert process is not None
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for kind in ("net", "mnt", "pid"):
        assert os.readlink(f"/proc/{child}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{child}/status").read_text().splitlines())
    assert {status[name] for name in ("CapEff", "CapPrm", "CapBnd")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def test_recordings_are_listed_shown_exported_imported_and_removed(recorded: tuple[str, Tour], tmp_path: Path) -> None:
    (tmp_path / "web").symlink_to(default_cache_dir() / "web")

    def web(*words: str) -> CommandOutput:
        return run_envd("web", *words, "--cache-dir", str(tmp_path))

    site, _ = recorded
    assert "shop" in web("list").out
    shown = web("show", "shop").out.splitlines()
    assert shown[0] == f"GET    302         0  {site}/start"
    assert (len(shown), shown[-1][:11]) == (9, "8 exchanges")
    assert f"GET    200    524288  {site}/file.bin" in shown
    file = tmp_path / "shop.warc.gz"
    assert web("export", "shop", str(file)).status == 0
    assert "already exists; choose another name" in web("export", "shop", str(file)).err
    assert "web recording shop: already exists" in web("import", "shop", str(file)).err
    assert web("import", "copy", str(file)).out == "copy: 8 exchanges\n"
    file.write_bytes(file.read_bytes()[:-100])
    assert "damaged" in web("import", "other", str(file)).err
    assert web("rm", "shop").status == 0
    assert "web recording shop: not found; see `envd web list`" in web("rm", "shop").err
    assert [name for name, _ in WebRecordings(tmp_path / "assets").list()] == ["copy"]
    assert "is not 1 to 63 of" in web("show", "../shop").err


def test_without_the_programs_the_command_to_install_them_is_named(tmp_path: Path) -> None:
    (tmp_path / "some.warc.gz").touch()
    done = run_envd("web", "import", "some", str(tmp_path / "some.warc.gz"), "--cache-dir", str(tmp_path))
    assert (done.status, "run `envd web install`" in done.err) == (2, True)
