"""Other systems' protocols on drawn desktops in this process, and a client that speaks JSON."""

import base64
import io
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from PIL import Image

from envd.api.security.http import require_local_host_name, tls_context
from envd.api.security.tokens import NewToken, new_token
from envd.base.config import SecurityConfig
from envd.integrations.compat.server import PROTOCOLS, serve_compat
from envd.integrations.compat.sessions import Sessions
from envd.tasks.model import Task
from tests.support.faulty import Faults
from tests.support.server import FakeServer, serve_fake


@dataclass(frozen=True, slots=True, kw_only=True)
class CompatWorld:
    """The servers, and a client of one address."""

    server: FakeServer
    addresses: dict[str, str]
    http: aiohttp.ClientSession

    async def call(
        self, protocol: str, path: str, body: object | None = None, *, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Send a GET, or a POST with a JSON body; return the status and the JSON of the response."""
        url = f"http://{self.addresses[protocol]}{path}"
        method = "GET" if body is None else "POST"
        async with self.http.request(method, url, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def ok(self, protocol: str, path: str, body: object | None = None) -> Any:
        """Return the JSON of a successful response."""
        status, content = await self.call(protocol, path, body)
        assert status == 200, content
        return content

    async def refused(self, protocol: str, path: str, body: object | None = None) -> tuple[int, str]:
        """Return the status and the reason of an error; it has no score."""
        status, content = await self.call(protocol, path, body)
        assert status >= 400, content
        assert set(content) == {"error", "reason"}
        return status, content["reason"]


@asynccontextmanager
async def compat_world(
    *,
    size: int = 1,
    capacity: int | None = None,
    faults: Faults | None = None,
    security: SecurityConfig | None = None,
    extra_tasks: Iterable[Task] = (),
) -> AsyncIterator[CompatWorld]:
    """Serve every protocol on free ports."""
    async with serve_fake(
        size=size, capacity=capacity, faults=faults, security=security, extra_tasks=extra_tasks
    ) as server:
        sessions = Sessions(server.service, max_lease_ttl_s=3600.0, max_steps=1000)
        checks = [require_local_host_name()] if security is None else []
        tls = None if security is None else tls_context(security, on_stale=lambda _: None)
        free = dict.fromkeys(PROTOCOLS, "127.0.0.1:0")
        async with (
            serve_compat(free, sessions, server.server.guard, tls=tls, middlewares=checks) as addresses,
            aiohttp.ClientSession() as http,
        ):
            yield CompatWorld(server=server, addresses=addresses, http=http)


@asynccontextmanager
async def guarded_world(directory: Path) -> AsyncIterator[tuple[CompatWorld, NewToken, NewToken]]:
    """Serve every protocol to two callers, alice and bob, each with a token."""
    alice, bob = new_token("alice", "run"), new_token("bob", "run")
    path = directory / "tokens"
    path.write_text(f"{alice.line}\n{bob.line}\n", encoding="utf-8")
    path.chmod(0o600)
    async with compat_world(size=2, security=SecurityConfig(tokens_file=path)) as world:
        yield world, alice, bob


def picture_of(text: str) -> Image.Image:
    """Return a picture from its PNG in base64."""
    return Image.open(io.BytesIO(base64.b64decode(text)))
