"""An RFB server in memory, for tests of RFB clients.

Like QEMU's, it sends changed pixels on request and unchanged ones only for a non-incremental request.
"""

import asyncio
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from envd.base.config import SettlePolicy
from envd.desktop.session import GuestPauses

#: A drawn guest acts at once, so short pauses suffice.
QUICK_PAUSES = GuestPauses(
    first_poll_s=0.001,
    boot_quiet_ms=20,
    boot_reading_s=0.01,
    idle_reading_s=0.01,
    key_pause_s=0.0,
    pointer_poll_s=0.001,
    input_settle=SettlePolicy(quiet_ms=20, idle_ms=0, max_ms=200),
)


@dataclass(frozen=True, slots=True)
class SeenKey:
    """A received key event; `scancode` is 0 in events without one."""

    scancode: int
    keysym: int
    down: bool


@dataclass(frozen=True, slots=True)
class SeenPointer:
    """A received pointer event."""

    x_px: int
    y_px: int
    buttons: int


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A received update request."""

    incremental: bool
    area: tuple[int, int, int, int]


class _Pipe(asyncio.Transport):
    """Feeds written data into a reader, and EOF when closed."""

    def __init__(self, target: asyncio.StreamReader, protocol: asyncio.StreamReaderProtocol) -> None:
        super().__init__()
        self._target = target
        self._protocol = protocol
        self._closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closing:
            self._target.feed_data(bytes(data))

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._target.feed_eof()
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)


class _Writer(asyncio.StreamWriter):
    def __del__(self) -> None:
        """Skip the ResourceWarning: the writer holds no operating system resource."""


def memory_streams() -> tuple[
    tuple[asyncio.StreamReader, asyncio.StreamWriter], tuple[asyncio.StreamReader, asyncio.StreamWriter]
]:
    """Return the two ends of an in-process connection."""
    loop = asyncio.get_running_loop()
    here, there = asyncio.StreamReader(), asyncio.StreamReader()

    def writer(reader: asyncio.StreamReader, target: asyncio.StreamReader) -> asyncio.StreamWriter:
        protocol = asyncio.StreamReaderProtocol(reader)
        return _Writer(_Pipe(target, protocol), protocol, reader, loop)

    return (here, writer(here, there)), (there, writer(there, here))


class FakeDisplay:
    """A screen of `width_px` x `height_px` pixels that viewers can connect to.

    `frozen` holds updates back, as a display does between two refreshes.
    """

    def __init__(self, width_px: int = 64, height_px: int = 48, *, extended_keys: bool = True) -> None:
        self.bgrx_HW: npt.NDArray[np.uint32] = np.zeros((height_px, width_px), dtype="<u4")
        self.keys: list[SeenKey] = []
        self.pointers: list[SeenPointer] = []
        self.requests: list[SeenRequest] = []
        self.update_count = 0
        self.encodings: tuple[int, ...] = ()
        self.wake_count = 0
        self.connection_count = 0
        self.frozen = False
        self._extended_keys = extended_keys
        self._greeting = b"RFB 003.008\n"
        self._dirty: list[tuple[int, int, int, int]] = []
        self._is_requested = False
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._down: set[int] = set()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the viewer's end of a new connection."""
        viewer, (reader, writer) = memory_streams()
        self.connection_count += 1
        self._writer, self._dirty, self._is_requested = writer, [], False
        task = asyncio.create_task(self._serve(reader, writer), name="fake-display")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return viewer

    def draw(self, x_px: int, y_px: int, width_px: int, height_px: int, colour: int) -> None:
        """Fill a rectangle with 0xRRGGBB."""
        self.bgrx_HW[y_px : y_px + height_px, x_px : x_px + width_px] = colour
        self._dirty.append((x_px, y_px, width_px, height_px))
        self.answer()

    def resize(self, width_px: int, height_px: int) -> None:
        """Change the size of the screen, which turns black."""
        self.bgrx_HW = np.zeros((height_px, width_px), dtype="<u4")
        self._dirty = [(0, 0, width_px, height_px)]
        self.send(pseudo_rect(-223, 0, 0, width_px, height_px))

    def send(self, *rects: bytes) -> None:
        """Send an update of encoded rectangles."""
        if self._writer is not None:
            self.update_count += 1
            self._writer.write(struct.pack(">BxH", 0, len(rects)) + b"".join(rects))

    def drop(self) -> None:
        """End the connection."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def answer(self) -> None:
        """Answer a pending request if there are changes."""
        if self.frozen or not self._is_requested or not self._dirty or self._writer is None:
            return
        areas, self._dirty, self._is_requested = self._dirty, [], False
        height_px, width_px = self.bgrx_HW.shape
        if sum(area[2] * area[3] for area in areas) > width_px * height_px:
            areas = [(0, 0, width_px, height_px)]
        self.send(*(self._raw(area) for area in areas))

    async def close(self) -> None:
        """Close all connections and tasks."""
        self.drop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _raw(self, area: tuple[int, int, int, int]) -> bytes:
        x_px, y_px, width_px, height_px = area
        pixels = self.bgrx_HW[y_px : y_px + height_px, x_px : x_px + width_px]
        return struct.pack(">HHHHi", *area, 0) + pixels.astype("<u4").tobytes()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(self._greeting)
            await reader.readexactly(12)
            writer.write(b"\x01\x01")
            await reader.readexactly(1)
            writer.write(bytes(4))
            await reader.readexactly(1)
            height_px, width_px = self.bgrx_HW.shape
            writer.write(struct.pack(">HH16xI", width_px, height_px, 4) + b"fake")
            while True:
                await self._serve_message(reader)
        except asyncio.IncompleteReadError:
            writer.close()

    async def _serve_message(self, reader: asyncio.StreamReader) -> None:
        kind = (await reader.readexactly(1))[0]
        match kind:
            case 0:
                await reader.readexactly(19)
            case 2:
                (count,) = struct.unpack(">xH", await reader.readexactly(3))
                self.encodings = struct.unpack(f">{count}i", await reader.readexactly(4 * count))
                if self._extended_keys and -258 in self.encodings:
                    self.send(pseudo_rect(-258, 0, 0, 1, 1))
            case 3:
                incremental, *area = struct.unpack(">?HHHH", await reader.readexactly(9))
                self.requests.append(SeenRequest(incremental, (area[0], area[1], area[2], area[3])))
                self._is_requested = True
                if not incremental:
                    self._dirty.append((area[0], area[1], area[2], area[3]))
                self.answer()
            case 4:
                down, keysym = struct.unpack(">?xxI", await reader.readexactly(7))
                self._key(SeenKey(0, keysym, down))
            case 5:
                buttons, x_px, y_px = struct.unpack(">BHH", await reader.readexactly(5))
                self.pointers.append(SeenPointer(x_px, y_px, buttons))
            case 255:
                down, keysym, scancode = struct.unpack(">xHII", await reader.readexactly(11))
                self._key(SeenKey(scancode, keysym, bool(down)))
            case _:
                raise AssertionError(f"viewer sent a message of type {kind}")

    def _key(self, key: SeenKey) -> None:
        identity = key.scancode or key.keysym
        if not key.down and identity not in self._down:
            self.wake_count += 1  # QEMU drops the release of a key that is not down
            return
        (self._down.add if key.down else self._down.discard)(identity)
        self.keys.append(key)


def pseudo_rect(  # noqa: PLR0917 (in wire order)
    encoding: int, x: int, y: int, width: int, height: int, payload: Iterable[int] | bytes = b""
) -> bytes:
    """Return the bytes of one rectangle of an update."""
    return struct.pack(">HHHHi", x, y, width, height, encoding) + bytes(payload)
