"""E2B's interface on a real desktop in a container, through the whole daemon and its process of the protocol."""

import asyncio
import base64
import io
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from PIL import Image

from tests.support.containers import desktop_image
from tests.support.e2b import E2bWire, bash
from tests.support.served import ServedDaemon

pytestmark = [pytest.mark.native, pytest.mark.timeout(300)]

CONFIG = """\
compat = ["e2b=127.0.0.1:0"]
[hypervisor]
uri = "oci:"
[pools.desktop]
size = 1
capacity = 2
allow_guest_access = true
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Return the address at which a daemon with containers serves the protocol."""
    desktop_image()
    with (
        tempfile.TemporaryDirectory(prefix="envd-oci-", dir="/var/tmp") as directory,
        ServedDaemon(Path(directory) / "state", CONFIG) as daemon,
    ):
        yield daemon.wait_for(r"protocol e2b on http://(\S+)")


@pytest.fixture
async def e2b(address: str) -> AsyncIterator[E2bWire]:
    async with aiohttp.ClientSession() as http:
        yield E2bWire(http=http, url=f"http://{address}")


async def test_commands_files_ports_and_the_desktop(e2b: E2bWire) -> None:
    sandbox = await e2b.create("desktop", envVars={"A": "1"})
    done = await sandbox.run("echo $A $USER $(pwd); cat /none; exit 3")
    assert (done.stdout, done.end["exitCode"]) == (b"1 user /home/user\n", 3)
    assert b"No such file" in done.stderr
    assert (await sandbox.run("sleep 60", timeout_ms=300)).error["code"] == "deadline_exceeded"
    root = "Basic " + base64.b64encode(b"root:").decode()
    async with sandbox.stream("process.Process/Start", bash("id -u"), Authorization=root) as (_, events):
        output = [event async for event in events]
    assert {"event": {"data": {"stdout": base64.b64encode(b"0\n").decode()}}} in output
    terminal = {"process": {"cmd": "/bin/bash", "args": ["-c", "stty size"]}, "pty": {"size": {"cols": 70, "rows": 20}}}
    async with sandbox.stream("process.Process/Start", terminal) as (_, events):
        printed = [event["event"]["data"]["pty"] async for event in events if "data" in event.get("event", {})]
    assert b"20 70" in b"".join(map(base64.b64decode, printed))
    assert (await sandbox.file("POST", "www/index.html", b"page"))[0] == 200
    entry = (await sandbox.ask("filesystem.Filesystem/Stat", {"path": "www/index.html"}))[1]["entry"]
    assert (entry["owner"], entry["permissions"], entry["size"]) == ("user", "-rw-r--r--", 4)
    async with sandbox.stream("process.Process/Start", bash("python3 -u -m http.server 8000 -d www")) as (_, events):
        await anext(events)
        await anext(events)  # it prints that it serves
        async with e2b.http.get(e2b.url, headers={"Host": f"8000-{sandbox.sandbox_id}.localhost"}) as response:
            assert await response.read() == b"page"
    await sandbox.run("xdotool mousemove --sync 200 100")
    assert b"x:200 y:100" in (await sandbox.run("xdotool getmouselocation")).stdout
    # The guest's own program agrees.
    assert b"x:200 y:100" in (await sandbox.run("xdotool getmouselocation;")).stdout
    assert (await sandbox.run("scrot --pointer /tmp/a.png")).end["exitCode"] == 0
    picture = Image.open(io.BytesIO((await sandbox.file("GET", "/tmp/a.png"))[1]))  # noqa: S108
    assert picture.size == (1280, 800)
    status, refused = await e2b.call("POST", f"/sandboxes/{sandbox.sandbox_id}/pause", {})
    assert (status, "cannot be copied" in refused["message"]) == (501, True)
    status, refused = await e2b.call("POST", "/v2/sandboxes", {"templateID": "desktop", "autoPause": True})
    assert (status, "autoPause: pool desktop" in refused["message"]) == (501, True)
    assert (await e2b.call("DELETE", f"/sandboxes/{sandbox.sandbox_id}"))[0] == 204


async def test_a_sandbox_whose_guest_powers_off_is_missing(e2b: E2bWire) -> None:
    sandbox = await e2b.create("desktop")
    root = "Basic " + base64.b64encode(b"root:").decode()
    async with sandbox.stream("process.Process/Start", bash("poweroff"), Authorization=root) as (_, events):
        with suppress(aiohttp.ClientPayloadError, asyncio.IncompleteReadError):
            async for _ in events:
                pass
    path = f"/sandboxes/{sandbox.sandbox_id}"
    async with asyncio.timeout(60):
        while (await e2b.call("GET", path))[0] == 200:
            await asyncio.sleep(0.1)
    for method, call, body in (("GET", path, None), ("POST", f"{path}/timeout", {}), ("POST", f"{path}/connect", {})):
        assert (await e2b.call(method, call, body))[0] == 404
    # SDKs take it for a sandbox that is missing.
    assert (await sandbox.ask("filesystem.Filesystem/Stat", {"path": "."}))[0] == 502
    assert await e2b.call("POST", f"{path}/evaluate", {}) == (200, {"reward": 0.0})
    assert (await e2b.call("DELETE", path))[0] == 204
