"""Rebuilds frames in a process of its own, with the trainer's code, and measures the time it takes.

So the pixels do not come from the code that drew them, and the daemon's interpreter lock is not shared. The child runs
this module as a program, which therefore imports no daemon.
"""

import struct
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import BinaryIO

from cuaenv.frames import TiledImage
from cuaenv.v1 import env_pb2
from cuaenv.wire import region
from envd.bench.child import Child, run_module
from envd.bench.report import BenchFailed

#: Whether pixels are wanted, and the length of the `Frame` message that follows.
_REQUEST = struct.Struct("!?I")
#: `rebuild_ms`, and the length of the pixels that follow.
_RESPONSE = struct.Struct("!dI")


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
        message = frame.SerializeToString()
        try:
            self._child.stdin.write(_REQUEST.pack(wants_pixels, len(message)) + message)
            await self._child.stdin.drain()
            rebuild_ms, size = _RESPONSE.unpack(await self._child.stdout.readexactly(_RESPONSE.size))
            pixels = await self._child.stdout.readexactly(size)
        except (OSError, EOFError) as error:
            raise BenchFailed(f"image {frame.image_id}: the client could not rebuild it") from error
        return Rebuilt(rebuild_ms=rebuild_ms, pixels=pixels)


@asynccontextmanager
async def open_client() -> AsyncIterator[ClientProcess]:
    async with run_module(__name__) as child:
        yield ClientProcess(child)


def _serve(requests: BinaryIO, responses: BinaryIO) -> None:
    """Rebuild each frame from the one before, until the input ends. Raises: FrameMismatch, ValueError."""
    image: TiledImage | None = None
    while header := requests.read(_REQUEST.size):
        wants_pixels, size = _REQUEST.unpack(header)
        frame = env_pb2.Frame.FromString(requests.read(size))
        kind, data = frame.WhichOneof("content"), frame.keyframe.data or frame.tiles.data
        base_image_id = frame.tiles.base_image_id or frame.unchanged.base_image_id
        regions = [region(rect) for rect in frame.tiles.tiles]
        begin_s = time.perf_counter()
        if kind == "keyframe":
            width_px, height_px = frame.width_px, frame.height_px
            image = TiledImage.unpack(data, width_px=width_px, height_px=height_px, image_id=frame.image_id)
        elif image is None or image.image_id != base_image_id:
            raise ValueError(f"image {frame.image_id}: its base is {base_image_id}, but this client has {image!r}")
        elif kind == "tiles":
            image = image.patched(regions, data, image_id=frame.image_id)
        # The array stays referenced until the next one is made, which copies the unchanged parts from it.
        rgb_HWC = image.rgb_HWC()
        rebuild_ms = (time.perf_counter() - begin_s) * 1000
        pixels = rgb_HWC.tobytes() if wants_pixels else b""
        responses.write(_RESPONSE.pack(rebuild_ms, len(pixels)) + pixels)
        responses.flush()


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
