"""An RFB 3.8 client over one stream: parse the server's messages, write a viewer's.

Keeps no picture and decides nothing: `screen.py` holds the pixels, `envd.desktop.input` decides what to press. Server
data is untrusted: every length is bounded before it is read, and protocol errors raise `DisplayError`. The end of the
stream raises `MachineLost`, because a display lives exactly as long as its machine.
"""

import asyncio
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import numpy as np
import numpy.typing as npt

from envd.base.errors import DisplayError, MachineLost

MAX_SIDE_PX = 8192
MAX_SCREEN_PIXELS = 4096 * 4096
MAX_CURSOR_SIDE_PX = 512
#: Firmware and boot loaders use sizes of their own, which a bound on the screen must allow.
_MIN_SIZE_LIMIT_PX = (1280, 1024)
_MAX_TEXT_BYTES = 1 << 20
#: Most pseudo-rectangles (cursor, resize, ...) per update.
_MAX_PSEUDO_RECTS = 64
_CLOSE_TIMEOUT_S = 1.0
#: Size of buffered reads; longer data is read in one call.
_CHUNK_BYTES = 1 << 16
#: Rectangles, and pixels of one rectangle, that are read in one iteration of the event loop: 3 ms and less than 1 ms.
_RECTS_PER_ITERATION = 512
_PIXELS_PER_ITERATION = 1 << 17

_VERSION = b"RFB 003.008\n"
_SECURITY_NONE = 1
#: 32 bits a pixel, depth 24, little endian, true colour, 8 bits each, red at bit 16: in memory B, G, R, X.
_PIXEL_FORMAT = struct.pack(">BBBBHHHBBBxxx", 32, 24, 0, 1, 255, 255, 255, 16, 8, 0)
_RGB_MASK = np.uint32(0x00FFFFFF)

#: A key without a name in `keysyms` (the browser's bookmarks key), so it is never down.
_WAKE_SCANCODE = 0xE6
_WAKE_KEYSYM = 0x1008FF30


class RectEncoding(IntEnum):
    """Supported rectangle types."""

    RAW = 0
    DESKTOP_SIZE = -223
    CURSOR = -239
    POINTER_TYPE_CHANGE = -257
    EXTENDED_KEY_EVENT = -258
    LED_STATE = -261
    EXTENDED_DESKTOP_SIZE = -308
    ALPHA_CURSOR = -314
    CURSOR_POSITION = 0x574D5666


# ALPHA_CURSOR comes before CURSOR: servers use the first one that they know.
# EXTENDED_DESKTOP_SIZE is supported but not requested: with it QEMU adds a size rectangle to each response to a
# non-incremental request, while DESKTOP_SIZE reports the size once per change.
_REQUESTED = (
    RectEncoding.RAW,
    RectEncoding.DESKTOP_SIZE,
    RectEncoding.ALPHA_CURSOR,
    RectEncoding.CURSOR,
    RectEncoding.POINTER_TYPE_CHANGE,
    RectEncoding.EXTENDED_KEY_EVENT,
    RectEncoding.LED_STATE,
    # Sent by TigerVNC when a program moves the pointer: see `_follow_pointer`.
    RectEncoding.CURSOR_POSITION,
)


@dataclass(frozen=True, slots=True, eq=False)
class PixelRect:
    """New pixels of one region of the screen."""

    x_px: int
    y_px: int
    bgrx_HW: npt.NDArray[np.uint32]
    """(height, width); one little-endian B, G, R, 0 word per pixel."""

    @property
    def width_px(self) -> int:
        return int(self.bgrx_HW.shape[1])

    @property
    def height_px(self) -> int:
        return int(self.bgrx_HW.shape[0])


@dataclass(frozen=True, slots=True)
class Resize:
    """The screen has a new size; its pixels are unknown until they are sent."""

    width_px: int
    height_px: int


@dataclass(frozen=True, slots=True, eq=False)
class CursorShape:
    """The pointer's image, drawn by the viewer."""

    hot_x_px: int
    hot_y_px: int
    rgba_HWC: npt.NDArray[np.uint8]
    """(height, width, 4), colours multiplied by alpha; empty for an invisible pointer."""


@dataclass(frozen=True, slots=True)
class KeyboardLeds:
    """The lights of the guest's keyboard."""

    caps_lock: bool


Rect = PixelRect | Resize | CursorShape | KeyboardLeds


class RfbClient:
    """One connection to an RFB server, opened by `connect`.

    One task reads (`read_update`); any task may write. Messages are sent together by the next `drain` or
    `read_update`: uvloop makes a system call for each write.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        name: str,
        width_px: int,
        height_px: int,
        size_limit_px: tuple[int, int],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._unsent = b""
        """Messages that `_flush` sends."""
        self._arrived = b""
        """Buffered data of the stream; consumed up to `_used`."""
        self._used = 0
        # QEMU scales a position x on a screen of width w to floor(x * 32767 / w); guests scale back to v * w / 32768,
        # rounded down. So x becomes x - 1, and (0, 0) is lost, because a tablet's axes start at 0. On a Linux guest 64
        # of 65 positions were off by exactly one; x + 1 becomes x, up to the last column.
        self._pointer_offset_px = 1 if name.startswith("QEMU") else 0
        self._width_px = width_px
        self._height_px = height_px
        self._size_limit_px = size_limit_px
        self.draws_pointer = name.startswith("TigerVNC")
        """Whether the server draws the pointer into the screen, unless it is where this viewer has put it
        (needRenderedCursor in TigerVNC's common/rfb/VNCSConnectionST.cxx). So a new viewer puts it where it is."""
        self._extended_keys = False
        self._pointer_px: tuple[int, int] | None = None
        self._buttons = 0
        """Position and buttons that were sent last."""
        self._moved_to_px: tuple[int, int] | None = None
        """Where the server has the pointer, of an update that was not handled yet."""
        self.absolute_pointer = True
        """Whether pointer events are absolute; False until the guest has loaded its tablet driver."""

    def __repr__(self) -> str:
        return f"<RfbClient {self._width_px}x{self._height_px}>"

    @classmethod
    async def connect(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        size_limit_px: tuple[int, int] = (MAX_SIDE_PX, MAX_SIDE_PX),
    ) -> Self:
        """Perform the handshake and set pixel format and encodings. On failure the stream is closed.

        Args:
            size_limit_px: Largest (width, height) of the screen; at least 1280x1024 is accepted.

        Raises:
            DisplayError: The server is not an RFB 3.8 server without authentication, or its screen is too large.
            MachineLost: The stream ended.
        """
        width_px, height_px = (
            max(limit, least) for limit, least in zip(size_limit_px, _MIN_SIZE_LIMIT_PX, strict=True)
        )
        limit_px = width_px, height_px
        try:
            name, width_px, height_px = await _handshake(reader, writer, limit_px)
        except BaseException:
            writer.close()
            raise
        return cls(reader, writer, name=name, width_px=width_px, height_px=height_px, size_limit_px=limit_px)

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of the server's screen, in pixels."""
        return self._width_px, self._height_px

    def request(self, *, incremental: bool, area: tuple[int, int, int, int] | None = None) -> None:
        """Request the changes, or all current pixels, of an area (x, y, width, height) or of the whole screen."""
        x_px, y_px, width_px, height_px = area or (0, 0, self._width_px, self._height_px)
        self._write(struct.pack(">BBHHHH", 3, incremental, x_px, y_px, width_px, height_px))

    def key(self, *, keysym: int, scancode: int, down: bool) -> None:
        """Press or release a key. `scancode` is an XT set 1 code; 0x80 is the e0 prefix."""
        if self._extended_keys:
            self._write(struct.pack(">BBHII", 255, 0, down, keysym, scancode))
        else:
            self._write(struct.pack(">BBxxI", 4, down, keysym))

    def pointer(self, x_px: int, y_px: int, *, buttons: int) -> None:
        """Send the pointer's position and the pressed buttons (bit 0 left, 1 middle, 2 right, 3-6 the wheel)."""
        offset_px = self._pointer_offset_px
        self._pointer_px, self._buttons = (x_px, y_px), buttons
        self._write(struct.pack(">BBHH", 5, buttons, x_px + offset_px, y_px + offset_px))

    def wake(self) -> None:
        """Make an idle QEMU compare the guest's screen now, without an effect on the guest.

        QEMU's VNC server compares every 30 ms, and 50 ms later after each comparison without changes, up to every 3 s.
        A client message of a type above 3 (keys, pointer) resets that to 30 ms (ui/vnc.c, `protocol_client_msg`);
        update requests have type 3 and do not. Releasing a key that is not down is such a message, and QEMU drops it
        before any device sees it (ui/kbd-state.c). A pointer event at the current position would work too, but reaches
        the guest's driver. Measured in tests/contract/test_rfb_qemu.py.
        """
        self.key(keysym=_WAKE_KEYSYM, scancode=_WAKE_SCANCODE, down=False)

    async def drain(self) -> None:
        """Send all messages so far, and wait until the write buffer is nearly empty. Raises: MachineLost."""
        self._flush()
        try:
            await self._writer.drain()
        except OSError as error:
            raise MachineLost(f"the display closed its connection: {error}") from error

    async def read_update(self) -> tuple[Rect, ...]:
        """Wait for the next framebuffer update and return its rectangles, all within the screen.

        At most two screens of pixels are held at once.

        Raises:
            DisplayError: The server broke the protocol.
            MachineLost: The stream ended.
        """
        self._flush()
        kept: tuple[Rect, ...] = ()
        while True:
            kind = (await self._read(1))[0]
            match kind:
                case 0:
                    rects = await self._read_rects()
                    if not self._follow_pointer():
                        return kept + rects
                    kept += tuple(rect for rect in rects if not isinstance(rect, PixelRect))
                case 1:  # a colour map, which true colour does not use
                    (count,) = struct.unpack(">xxxH", await self._read(5))
                    await self._read(count * 6)
                case 2:  # a bell
                    pass
                case 3:
                    (length,) = struct.unpack(">xxxI", await self._read(7))
                    if length > _MAX_TEXT_BYTES:
                        raise DisplayError(
                            f"display sent {length} bytes of clipboard; at most {_MAX_TEXT_BYTES} are read"
                        )
                    await self._read(length)
                case _:
                    raise DisplayError(f"display sent an unknown message of type {kind}")

    def _follow_pointer(self) -> bool:
        """Return whether the pointer was moved by a program, and may be drawn into the update that was just read.

        A pointer event with that position moves nothing, but makes it this viewer's. Another whole update follows.
        """
        moved_to_px, self._moved_to_px = self._moved_to_px, None
        if moved_to_px is None or moved_to_px == self._pointer_px:
            return False
        self.pointer(*moved_to_px, buttons=self._buttons)
        self.request(incremental=False)
        self._flush()
        return True

    async def close(self) -> None:
        """Close the connection after everything is sent, or after 1 s. Idempotent; never fails."""
        self._flush()
        self._writer.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._writer.wait_closed()
        except TimeoutError:
            self._writer.transport.abort()
        except OSError:
            pass  # closed either way

    def _write(self, message: bytes) -> None:
        self._unsent += message

    def _flush(self) -> None:
        if self._unsent:
            unsent, self._unsent = self._unsent, b""
            _write(self._writer, unsent)

    async def _read(self, count: int) -> bytes:
        # An update takes about twelve reads of a few bytes, nearly always already buffered.
        begin, self._used = self._used, self._used + count
        if self._used <= len(self._arrived):
            return self._arrived[begin : self._used]
        begun = self._arrived[begin:]
        missing_count = count - len(begun)
        if missing_count > _CHUNK_BYTES:
            self._arrived, self._used = b"", 0
            return begun + await _read(self._reader, missing_count)
        self._arrived, self._used = begun + await _read_some(self._reader, missing_count), count
        return self._arrived[:count]

    async def _read_rects(self) -> tuple[Rect, ...]:
        (count,) = struct.unpack(">xH", await self._read(3))
        rects: list[Rect] = []
        # A correct server sends no pixel twice in one update; twice the screen allows for a resize within it.
        pixel_budget = 2 * self._width_px * self._height_px
        pseudo_count = 0
        for index in range(count):
            if index % _RECTS_PER_ITERATION == _RECTS_PER_ITERATION - 1:
                await asyncio.sleep(0)
            x_px, y_px, width_px, height_px, encoding = struct.unpack(">HHHHi", await self._read(12))
            if encoding == RectEncoding.RAW:
                pixel_budget -= width_px * height_px
                if pixel_budget < 0:
                    raise DisplayError(f"display sent more than two screens of pixels in one update ({self!r})")
                if rect := await self._read_pixels(x_px, y_px, width_px, height_px):
                    rects.append(rect)
                continue
            pseudo_count += 1
            if pseudo_count > _MAX_PSEUDO_RECTS:
                raise DisplayError(f"display sent more than {_MAX_PSEUDO_RECTS} pseudo-rectangles in one update")
            match encoding:
                case RectEncoding.DESKTOP_SIZE:
                    rects.append(self._resized(width_px, height_px))
                case RectEncoding.EXTENDED_DESKTOP_SIZE:
                    screen_count = (await self._read(4))[0]
                    await self._read(screen_count * 16)
                    rects.append(self._resized(width_px, height_px))
                case RectEncoding.CURSOR:
                    rects.append(await self._read_cursor(x_px, y_px, width_px, height_px))
                case RectEncoding.ALPHA_CURSOR:
                    rects.append(await self._read_alpha_cursor(x_px, y_px, width_px, height_px))
                case RectEncoding.POINTER_TYPE_CHANGE:
                    self.absolute_pointer = x_px != 0
                case RectEncoding.EXTENDED_KEY_EVENT:
                    self._extended_keys = True
                case RectEncoding.LED_STATE:
                    lights = (await self._read(1))[0]
                    rects.append(KeyboardLeds(caps_lock=bool(lights & 4)))
                case RectEncoding.CURSOR_POSITION:
                    self._moved_to_px = (x_px, y_px)
                case _:
                    raise DisplayError(f"display sent a rectangle of type {encoding}, which was not requested")
        return tuple(rects)

    def _resized(self, width_px: int, height_px: int) -> Resize:
        _check_size(width_px, height_px, self._size_limit_px)
        self._width_px, self._height_px = width_px, height_px
        return Resize(width_px, height_px)

    async def _read_pixels(self, x_px: int, y_px: int, width_px: int, height_px: int) -> PixelRect | None:
        if x_px + width_px > self._width_px or y_px + height_px > self._height_px:
            raise DisplayError(
                f"display sent pixels outside its screen: {width_px}x{height_px}+{x_px}+{y_px} of {self!r}"
            )
        if not width_px or not height_px:
            return None
        # The fourth byte is undefined (QEMU copies the guest's), so it must not count as a change.
        if width_px * height_px <= _PIXELS_PER_ITERATION:
            words = np.frombuffer(await self._read(width_px * height_px * 4), dtype="<u4")
            return PixelRect(x_px, y_px, (words & _RGB_MASK).reshape(height_px, width_px))
        bgrx_HW = np.empty((height_px, width_px), dtype="<u4")
        row_count = max(1, _PIXELS_PER_ITERATION // width_px)
        for top in range(0, height_px, row_count):
            if top:
                await asyncio.sleep(0)
            rows_HW = bgrx_HW[top : top + row_count]
            words = np.frombuffer(await self._read(rows_HW.nbytes), dtype="<u4")
            np.bitwise_and(words.reshape(rows_HW.shape), _RGB_MASK, out=rows_HW)
        return PixelRect(x_px, y_px, bgrx_HW)

    async def _read_cursor(self, hot_x_px: int, hot_y_px: int, width_px: int, height_px: int) -> CursorShape:
        _check_cursor(width_px, height_px)
        pixels = await self._read(width_px * height_px * 4)
        row_bytes = (width_px + 7) // 8
        mask_bytes = await self._read(row_bytes * height_px)
        bgrx_HWC = np.frombuffer(pixels, dtype=np.uint8).reshape(height_px, width_px, 4)
        bits = np.unpackbits(np.frombuffer(mask_bytes, dtype=np.uint8).reshape(height_px, row_bytes), axis=1)
        mask_HW = bits[:, :width_px]
        rgba_HWC = np.empty((height_px, width_px, 4), dtype=np.uint8)
        rgba_HWC[..., :3] = bgrx_HWC[..., 2::-1] * mask_HW[..., None]
        rgba_HWC[..., 3] = mask_HW * 255
        return CursorShape(hot_x_px, hot_y_px, rgba_HWC)

    async def _read_alpha_cursor(self, hot_x_px: int, hot_y_px: int, width_px: int, height_px: int) -> CursorShape:
        _check_cursor(width_px, height_px)
        (encoding,) = struct.unpack(">i", await self._read(4))
        if encoding != RectEncoding.RAW:
            raise DisplayError(f"display sent a cursor in encoding {encoding}; only raw was requested")
        # The protocol specifies R, G, B, A; QEMU sends ARGB words, which are B, G, R, A in memory (ui/vnc.c,
        # `vnc_cursor_define`), premultiplied by the guest's X server.
        pixels = np.frombuffer(await self._read(width_px * height_px * 4), dtype=np.uint8)
        pixels_HWC = pixels.reshape(height_px, width_px, 4)
        return CursorShape(hot_x_px, hot_y_px, pixels_HWC if self.draws_pointer else pixels_HWC[..., [2, 1, 0, 3]])


def _write(writer: asyncio.StreamWriter, message: bytes) -> None:
    # After the server has disconnected, asyncio's transport drops writes and uvloop's raises RuntimeError. Drop them:
    # `drain` and the reader report the end of the connection.
    if not writer.is_closing():
        writer.write(message)


async def _handshake(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size_limit_px: tuple[int, int]
) -> tuple[str, int, int]:
    version = await _read(reader, len(_VERSION))
    if version != _VERSION:
        raise DisplayError(f"display sent the greeting {version!r}; only RFB 3.8 is supported")
    _write(writer, _VERSION)
    type_count = (await _read(reader, 1))[0]
    if type_count == 0:
        raise DisplayError(f"display accepts no connections: {await _read_reason(reader)}")
    types = await _read(reader, type_count)
    if _SECURITY_NONE not in types:
        raise DisplayError(
            f"display requires authentication (types {list(types)}); configure it without, on a Unix socket"
        )
    _write(writer, bytes([_SECURITY_NONE]))
    (failed,) = struct.unpack(">I", await _read(reader, 4))
    if failed:
        raise DisplayError(f"display rejected the connection: {await _read_reason(reader)}")
    _write(writer, b"\x01")  # shared: an operator's viewer stays connected
    width_px, height_px, name_bytes = struct.unpack(">HH16xI", await _read(reader, 24))
    _check_size(width_px, height_px, size_limit_px)
    if name_bytes > 4096:
        raise DisplayError(f"display has a name of {name_bytes} bytes; at most 4096 are read")
    name = (await _read(reader, name_bytes)).decode("utf-8", "replace")
    _write(writer, struct.pack(">Bxxx", 0) + _PIXEL_FORMAT)
    _write(writer, struct.pack(f">BxH{len(_REQUESTED)}i", 2, len(_REQUESTED), *_REQUESTED))
    return name, width_px, height_px


async def _read(reader: asyncio.StreamReader, count: int) -> bytes:
    try:
        return await reader.readexactly(count)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise MachineLost("the display closed its connection") from error


async def _read_some(reader: asyncio.StreamReader, least_count: int) -> bytes:
    """Return the received part of the next chunk, at least `least_count` bytes."""
    some = b""
    while len(some) < least_count:
        try:
            more = await reader.read(_CHUNK_BYTES)
        except OSError as error:
            raise MachineLost("the display closed its connection") from error
        if not more:
            raise MachineLost("the display closed its connection")
        some += more
    return some


async def _read_reason(reader: asyncio.StreamReader) -> str:
    (length,) = struct.unpack(">I", await _read(reader, 4))
    return (await _read(reader, min(length, 4096))).decode("utf-8", "replace")


def _check_size(width_px: int, height_px: int, limit_px: tuple[int, int]) -> None:
    pixel_count = width_px * height_px
    if not pixel_count or width_px > limit_px[0] or height_px > limit_px[1] or pixel_count > MAX_SCREEN_PIXELS:
        raise DisplayError(
            f"display has a size of {width_px}x{height_px}; at most {limit_px[0]}x{limit_px[1]} and {MAX_SCREEN_PIXELS}"
            " pixels are accepted"
        )


def _check_cursor(width_px: int, height_px: int) -> None:
    if max(width_px, height_px) > MAX_CURSOR_SIDE_PX:
        raise DisplayError(f"display sent a cursor of {width_px}x{height_px}; at most {MAX_CURSOR_SIDE_PX} a side")
