"""A small client of E2B's wire, for tests without its SDKs."""

import base64
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.support.compat import CompatWorld

STREAM = "application/connect+json"
PORT = "49983"


def framed(message: object, flags: int = 0) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(body)) + body


def bash(command: str, **more: object) -> dict[str, Any]:
    """Return the request that starts a command as the SDKs write it."""
    return {"process": {"cmd": "/bin/bash", "args": ["-l", "-c", command], **more}, "stdin": False}


@dataclass(frozen=True, slots=True)
class Ran:
    """What a stream of a process had."""

    pid: int
    stdout: bytes
    stderr: bytes
    end: dict[str, Any]
    error: dict[str, Any]


def ran(events: list[dict[str, Any]]) -> Ran:
    outputs, pid, end, error = {"stdout": b"", "stderr": b""}, 0, {}, {}
    for event in events:
        error = event.get("error", error)
        match event.get("event", {}):
            case {"start": start}:
                pid = start["pid"]
            case {"data": data}:
                for name, text in data.items():
                    outputs[name] += base64.b64decode(text)
            case {"end": found}:
                end = found
    return Ran(pid, outputs["stdout"], outputs["stderr"], end, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class E2bWire:
    """The control plane, as the holder of an API key."""

    http: aiohttp.ClientSession
    url: str
    key: str = "any"

    @classmethod
    def of(cls, world: CompatWorld, key: str = "any") -> "E2bWire":
        return cls(http=world.http, url=f"http://{world.addresses['e2b']}", key=key)

    async def call(self, method: str, path: str, body: object | None = None, **headers: str) -> tuple[int, Any]:
        """Return the status and the JSON of a response; None if it has no body."""
        given = {"X-API-KEY": self.key, **{name.replace("_", "-"): value for name, value in headers.items()}}
        async with self.http.request(method, self.url + path, json=body, headers=given) as response:
            text = await response.read()
            return response.status, json.loads(text) if text else None

    async def create(self, template: str = "base", **fields: object) -> "SandboxWire":
        """Create a sandbox. A refusal fails the test."""
        status, content = await self.call("POST", "/v2/sandboxes", {"templateID": template, "timeout": 60, **fields})
        assert status == 201, content
        return self.sandbox(content)

    def sandbox(self, created: dict[str, Any]) -> "SandboxWire":
        return SandboxWire(
            http=self.http, url=self.url, sandbox_id=created["sandboxID"], token=created["envdAccessToken"]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxWire:
    """The services of one sandbox."""

    http: aiohttp.ClientSession
    url: str
    sandbox_id: str
    token: str

    @property
    def headers(self) -> dict[str, str]:
        return {"E2b-Sandbox-Id": self.sandbox_id, "E2b-Sandbox-Port": PORT, "X-Access-Token": self.token}

    async def ask(self, method: str, body: object, **headers: str) -> tuple[int, Any]:
        """Return the status and the JSON of a unary call."""
        given = {**self.headers, **{name.replace("_", "-"): value for name, value in headers.items()}}
        async with self.http.post(f"{self.url}/{method}", json=body, headers=given) as response:
            return response.status, await response.json()

    @asynccontextmanager
    async def stream(
        self, method: str, body: object, **headers: str
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, AsyncIterator[dict[str, Any]]]]:
        """Call a method whose server streams; yield the response and its messages, the last one with `error`."""
        given = {
            "Content-Type": STREAM,
            **self.headers,
            **{name.replace("_", "-"): each for name, each in headers.items()},
        }
        data = body if isinstance(body, bytes) else framed(body)
        async with self.http.post(f"{self.url}/{method}", data=data, headers=given) as response:

            async def messages() -> AsyncIterator[dict[str, Any]]:
                while True:
                    flags, length = struct.unpack(">BI", await response.content.readexactly(5))
                    content = json.loads(await response.content.readexactly(length))
                    yield content
                    if flags:
                        return

            yield response, messages()

    async def run(self, command: str, *, timeout_ms: int = 20_000, **more: object) -> Ran:
        """Run a command to its end."""
        request = bash(command, **more)
        async with self.stream("process.Process/Start", request, Connect_Timeout_Ms=str(timeout_ms)) as (
            response,
            events,
        ):
            assert response.status == 200, await response.text()
            return ran([event async for event in events])

    async def file(
        self, method: str, path: str, data: object = None, *, kind: str = "application/octet-stream", signed: str = ""
    ) -> tuple[int, bytes]:
        """Upload or download a file."""
        headers = {**self.headers, "Content-Type": kind} if not signed else {}
        url = f"{self.url}/files?path={path}{signed}"
        async with self.http.request(method, url, data=data, headers=headers) as response:
            return response.status, await response.read()
