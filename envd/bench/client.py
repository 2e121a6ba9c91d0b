"""Rebuilds frames in a process of its own, with the trainer's code.

So the pixels do not come from the code that drew them, and the daemon's interpreter lock is not shared.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cuaenv.v1 import env_pb2

from envd.bench.child import Child, run_module
from envd.bench.client_process import REQUEST, RESPONSE
from envd.bench.session import BenchFailed

_MODULE = "envd.bench.client_process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """A frame as the client has it."""

    rebuild_ms: float
    """Time from the encoded bytes to an array of shape (height, width, 3), its image id verified."""
    pixels: bytes
    """R, G, B, row by row; empty unless requested."""


class ClientProcess:
    """Rebuilds frames one after the other, each from the one before, as an episode's client does."""

    def __init__(self, child: Child) -> None:
        self._child = child

    async def rebuild(self, frame: env_pb2.Frame, *, wants_pixels: bool = False) -> Rebuilt:
        """Rebuild a frame: a keyframe, or the changes since the frame before.

        Raises:
            BenchFailed: The frame does not match its image id; the reason is on standard error.
        """
        message = frame.SerializeToString()
        try:
            self._child.stdin.write(REQUEST.pack(wants_pixels, len(message)) + message)
            await self._child.stdin.drain()
            rebuild_ms, size = RESPONSE.unpack(await self._child.stdout.readexactly(RESPONSE.size))
            pixels = await self._child.stdout.readexactly(size)
        except (OSError, EOFError) as error:
            raise BenchFailed(f"image {frame.image_id}: the client could not rebuild it") from error
        return Rebuilt(rebuild_ms=rebuild_ms, pixels=pixels)


@asynccontextmanager
async def open_client() -> AsyncIterator[ClientProcess]:
    """Start a client process; it ends after the block."""
    async with run_module(_MODULE) as child:
        yield ClientProcess(child)
