"""Forwarded ports on real guests, through OSWorld's provider: a server in each guest, and the client's connections."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from envd.integrations.osworld.desktop_machines import EnvdProvider
from tests.support.real_desktops import osworld_machines

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

#: Serves /json/version, with the guest's name, and a WebSocket that echoes text frames of up to 125 bytes.
SERVER = """
import base64, hashlib, http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path == "/json/version":
            body = json.dumps({"Browser": sys.argv[1]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        while head := self.rfile.read(2):
            mask, data = self.rfile.read(4), self.rfile.read(head[1] & 127)
            plain = sys.argv[1].encode() + bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
            self.wfile.write(bytes([0x81, len(plain)]) + plain)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 9222), Handler)
if os.fork():
    os._exit(0)
os.setsid()
server.serve_forever()
"""
#: Releases the command's pipes, so that it ends.
START = 'exec python3 -c "$0" "$1" </dev/null >/dev/null 2>&1'


@pytest.fixture
async def address(cache_dir: Path, template_dir: Path, vm_state_dir: Path) -> AsyncIterator[str]:
    directories = {"cache_dir": cache_dir, "template_dir": template_dir, "state_dir": vm_state_dir}
    async with osworld_machines(3, "desktop", **directories) as address:
        yield address


def chromium(provider: EnvdProvider) -> str:
    """Return the address of the DevTools port."""
    host, _, port, _, _ = provider.get_ip_address("envd").split(":")
    return f"{host}:{port}"


async def start_server(http: aiohttp.ClientSession, provider: EnvdProvider, name: str) -> None:
    """Start a server in the guest that answers with the name, as OSWorld's setup starts Chrome."""
    host, service, *_ = provider.get_ip_address("envd").split(":")
    command = {"command": ["bash", "-c", START, SERVER, name]}
    async with http.post(f"http://{host}:{service}/setup/execute", json=command) as response:
        assert (await response.json())["returncode"] == 0


async def echoed(websocket: aiohttp.ClientWebSocketResponse) -> str:
    """Return the response to a message."""
    await websocket.send_str("!")
    return await websocket.receive_str()


async def test_each_fork_has_its_own_devtools_and_a_connection_ends_with_its_machine(address: str) -> None:
    one, two = (EnvdProvider(address, pool="desktop") for _ in range(2))
    async with aiohttp.ClientSession() as http:
        try:
            for provider, name in ((one, "one"), (two, "two")):
                await asyncio.to_thread(provider.start_emulator, "envd", True)
                await start_server(http, provider, name)
                async with http.get(f"http://{chromium(provider)}/json/version") as response:
                    assert await response.json() == {"Browser": name}
            async with (
                http.ws_connect(f"http://{chromium(one)}/devtools") as first,
                http.ws_connect(f"http://{chromium(two)}/devtools") as second,
            ):
                assert list(await asyncio.gather(echoed(first), echoed(second))) == ["one!", "two!"]
                # A fork in mid-connection leaves the connection with the parent.
                await asyncio.to_thread(one.save_state, "envd", "connected")
                assert await echoed(first) == "one!"
                # The machine of the first connection is destroyed; its fork has the same server.
                await asyncio.to_thread(one.revert_to_snapshot, "envd", "connected")
                ended = await first.receive()
                assert ended.type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)
                async with http.ws_connect(f"http://{chromium(one)}/devtools") as third:
                    assert await echoed(third) == "one!"
                assert await echoed(second) == "two!"
        finally:
            for provider in (one, two):
                await asyncio.to_thread(provider.stop_emulator, "envd")
