"""Client of the runner in a sandbox's guest, over a forwarded port: `envd.guests.runner` says what it answers.

The guest is not trusted: what it sends is checked and bounded.
"""

import asyncio
import functools
import hashlib
import json
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from cuaenv.client import AsyncEpisode
from cuaenv.client.errors import GuestFailed, GuestRefused
from cuaenv.client.forwarding import PortForward
from envd import guests
from envd.base import untrusted_json
from envd.integrations.compat.e2b.rpc import CODES, RpcError, ended

Fields = dict[str, Any]

_START_TIMEOUT: Final = timedelta(seconds=30)
#: The largest line: the entries of a directory.
_MAX_LINE_BYTES: Final = 16 << 20
_CHUNK_BYTES: Final = 256 << 10


@functools.cache
def _program() -> tuple[str, str]:
    """Return the runner's program, and a name of its version."""
    text = (Path(guests.__file__).parent / "runner.py").read_text(encoding="utf-8")
    return text, hashlib.sha256(text.encode()).hexdigest()[:16]


class GuestRunner:
    """The runner of one user of a guest. It is started when it is first used, and keeps the guest running."""

    def __init__(self, episode: AsyncEpisode, *, as_root: bool = False) -> None:
        self._episode = episode
        self._as_root = as_root
        self._starting = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._forward: PortForward | None = None
        self._secret = ""
        self._holding: asyncio.Task[None] | None = None

    async def aclose(self) -> None:
        """End all connections. Idempotent."""
        if self._holding is not None:
            self._holding.cancel()
            await asyncio.wait({self._holding})
        self._forward = None
        await self._stack.aclose()

    async def ask(self, op: str, **arguments: object) -> Fields:
        """Return the answer of a request. Raises: RpcError, EnvError."""
        async with self._call(op, arguments) as (reader, _):
            return await self._answer(reader)

    async def events(self, op: str, **arguments: object) -> AsyncGenerator[Fields]:
        """Yield the answer of a request, and then its events until one is its end. Raises: RpcError, EnvError."""
        async with self._call(op, arguments) as (reader, _):
            yield await self._answer(reader)
            while True:
                event = await self._line(reader)
                yield event
                if "end" in event:
                    return

    async def read(self, path: str) -> AsyncGenerator[bytes]:
        """Yield a file: its size as text, then its bytes. Raises: RpcError, EnvError."""
        async with self._call("read", {"path": path}) as (reader, _):
            size = left = _size_of(await self._answer(reader))
            yield str(size).encode()
            while left and (data := await reader.read(min(left, _CHUNK_BYTES))):
                left -= len(data)
                yield data
            if left:
                raise RpcError("internal", f"{path}: it became shorter while it was read")

    async def write(self, path: str, chunks: AsyncIterator[bytes]) -> Fields:
        """Write a file, and return its entry; one that is cut off changes nothing. Raises: RpcError, EnvError."""
        async with self._call("write", {"path": path}) as (reader, writer):
            with suppress(ConnectionError):  # a refusal comes before the end
                async for chunk in chunks:
                    for start in range(0, len(chunk), _CHUNK_BYTES):
                        piece = chunk[start : start + _CHUNK_BYTES]
                        await _send(writer, struct.pack(">I", len(piece)) + piece)
                    if reader.at_eof():
                        break
                await _send(writer, struct.pack(">I", 0))
            return await self._answer(reader)

    async def start(self) -> None:
        """Find the guest's runner, or start it. Raises: EnvError, RpcError."""
        async with self._starting:
            if self._forward is not None:
                return
            program, name = _program()
            done = await self._episode.run_command(
                ["python3", "-I", "-S", "-c", program, "start", name], as_root=self._as_root, timeout=_START_TIMEOUT
            )
            try:
                found = await untrusted_json.parse(done.stdout)
            except ValueError:
                found = None
            match found:
                case {"port": int(port), "secret": str(secret)} if 1 <= port <= 65_535:
                    self._secret = secret
                case _:
                    said = done.stderr.decode("utf-8", "replace").strip()[-200:]
                    raise RpcError(
                        "unimplemented", f"the guest cannot run processes for callers: {said or 'no answer'}"
                    )
            self._forward = await self._stack.enter_async_context(self._episode.forward(port))
            self._holding = asyncio.create_task(self._hold(), name=f"hold:{self._episode.episode_id}")

    async def _hold(self) -> None:
        """Keep the guest running between calls, until the sandbox ends."""
        with suppress(Exception):  # a call reports what is wrong
            async for _ in self.events("hold"):
                pass

    @asynccontextmanager
    async def _call(
        self, op: str, arguments: Fields
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        await self.start()
        forward = self._forward
        if forward is None:
            raise ended("it was killed or reached its time limit")
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", forward.local_port, limit=_MAX_LINE_BYTES)
            request = {"secret": self._secret, "op": op, **arguments}
            writer.write(json.dumps(request).encode() + b"\n")
            with suppress(ConnectionError):
                await writer.drain()
            yield reader, writer
        except (ConnectionError, EOFError) as error:
            if self._forward is None:
                raise ended("it was killed or reached its time limit") from error
            if (refusal := forward.error) is not None:
                if isinstance(refusal, GuestRefused):
                    await self._forget(forward)
                raise refusal from error
            raise GuestFailed("the guest's runner ended", code="DATA_LOSS", reason="GUEST_ERROR") from error
        finally:
            if writer is not None:
                writer.close()

    async def _forget(self, forward: PortForward) -> None:
        """Have the next call start another runner: this one ended."""
        if self._forward is forward:
            await self.aclose()
            self._stack = AsyncExitStack()

    async def _answer(self, reader: asyncio.StreamReader) -> Fields:
        line = await self._line(reader)
        match line:
            case {"ok": dict(answer)}:
                return answer
            case {"error": {"code": str(code), "message": str(message)}} if code in CODES:
                raise RpcError(code, message)
        raise RpcError("internal", "the guest's answer is malformed")

    async def _line(self, reader: asyncio.StreamReader) -> Fields:
        try:
            line = await reader.readuntil(b"\n")
            found = await untrusted_json.parse(line)
        except asyncio.LimitOverrunError:
            raise RpcError("resource_exhausted", f"the answer has more than {_MAX_LINE_BYTES} bytes") from None
        except ValueError:
            raise RpcError("internal", "the guest's answer is not JSON") from None
        if not isinstance(found, dict):
            raise RpcError("internal", "the guest's answer is not an object")
        return found


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send data. Raises: ConnectionError."""
    if writer.is_closing():  # uvloop raises RuntimeError for a write then
        raise ConnectionResetError("the connection is closed")
    writer.write(data)
    await writer.drain()


def _size_of(answer: Fields) -> int:
    size = answer.get("size")
    if not isinstance(size, int) or size < 0:
        raise RpcError("internal", "the guest's answer has no size")
    return size
