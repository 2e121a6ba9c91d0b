"""The server side of one RFB 3.8 connection, as QEMU speaks it: no authentication, raw rectangles, scancodes.

It keeps no frames, only a short list of rectangles changed since the last update. Pixels are copied when they are
sent, so a slow reader gets the newest picture and costs at most one update of memory. Like QEMU, it sends changes at
its next refresh, or at once on a non-incremental request.
"""

import asyncio
import logging
import struct
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol, cast

import numpy as np

from envd.drawn.desktop.canvas import Damage, Framebuffer, Rect

logger = logging.getLogger(__name__)

_VERSION = b"RFB 003.008\n"
_RAW = 0
_DESKTOP_SIZE = -223
_CURSOR = -239
_POINTER_TYPE_CHANGE = -257
_EXTENDED_KEY = -258
# The only supported format: 32 bits, depth 24, little-endian true colour with 8 bits per channel.
_PIXEL_FORMAT = struct.pack(">BBBBHHHBBB3x", 32, 24, 0, 1, 255, 255, 255, 16, 8, 0)
# QEMU refreshes after 30 to 80 ms while the screen changes (ui/vnc.c). A click, which takes 60 ms, is then one update
# for a viewer that requests a refresh.
_REFRESH_S = 0.08

# Arrow of 8x12 pixels: one byte per row, the leftmost pixel in the highest bit.
_CURSOR_ROWS = (0x80, 0xC0, 0xE0, 0xF0, 0xF8, 0xFC, 0xFE, 0xF8, 0xD8, 0x8C, 0x0C, 0x06)


#: Schedules a callback after a delay in seconds.
CallLater = Callable[[float, Callable[[], None]], asyncio.TimerHandle]


class ServedScreen(Protocol):
    """Source of pixels and target of input."""

    @property
    def framebuffer(self) -> Framebuffer:
        """Current picture."""

    def key_input(self, scancode: int, *, down: bool) -> None:
        """Press or release a key."""

    def keysym_input(self, keysym: int, *, down: bool) -> None:
        """Press or release a key given by its keysym."""

    def pointer_input(self, x: int, y: int, buttons: int) -> None:
        """Set pointer position and buttons."""

    def display_closed(self, connection: "RfbConnection") -> None:
        """Handle the end of a connection."""


class _Stage(Enum):
    """Next message expected from the client."""

    #: Its protocol version.
    VERSION = "version"
    #: Its choice of security type.
    SECURITY = "security"
    #: ClientInit.
    INIT = "init"
    #: Ordinary messages.
    MESSAGES = "messages"


class RfbConnection(asyncio.Protocol):
    """One client connection to one screen."""

    def __init__(self, screen: ServedScreen, *, name: str, call_later: CallLater) -> None:
        """Serve a screen; `call_later` is the event loop's."""
        self._screen = screen
        self._call_later = call_later
        self._name = name
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._stage = _Stage.VERSION
        self._encodings: frozenset[int] = frozenset()
        self._acks: list[bytes] = []
        self._size = (0, 0)
        self._damage = Damage()
        self._is_requested = False
        self._is_write_paused = False
        self._refresh: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Drop the connection at once, as when QEMU exits."""
        if self._transport is not None:
            self._transport.abort()

    def changed(self, rects: list[Rect]) -> None:
        for rect in rects:
            self._damage.add(rect)
        self._schedule_refresh()

    def resized(self) -> None:
        self._damage.take()
        self._damage.add(self._screen.framebuffer.bounds)
        self._send_update()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # An isinstance check is not possible: uvloop's transports do not subclass asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(_VERSION)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        self._cancel_refresh()
        self._screen.display_closed(self)

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        """Send pending changes in one update: the client has caught up."""
        self._is_write_paused = False
        self._send_update()

    def data_received(self, data: bytes) -> None:
        self._received += data
        while self._received and self._transport is not None:
            length = self._message_length()
            if length == 0:
                self._reject(self._received)
                return
            if len(self._received) < length:
                return
            message = bytes(self._received[:length])
            del self._received[:length]
            self._handle(message)

    # Handshake and messages

    def _message_length(self) -> int:
        """Return the next message's length, or of the prefix needed to know it; 0 if the message is invalid."""
        match self._stage:
            case _Stage.VERSION:
                return len(_VERSION)
            case _Stage.SECURITY | _Stage.INIT:
                return 1
            case _Stage.MESSAGES:
                return _length_of(self._received)

    def _handle(self, message: bytes) -> None:
        match self._stage:
            case _Stage.VERSION:
                self._send(b"\x01\x01")
                self._stage = _Stage.SECURITY
            case _Stage.SECURITY:
                self._send(bytes(4))
                self._stage = _Stage.INIT
            case _Stage.INIT:
                bounds = self._screen.framebuffer.bounds
                self._size = (bounds.w, bounds.h)
                self._damage.add(bounds)
                name = self._name.encode()
                self._send(struct.pack(">HH", *self._size) + _PIXEL_FORMAT + struct.pack(">I", len(name)) + name)
                self._stage = _Stage.MESSAGES
            case _Stage.MESSAGES:
                self._on_message(message)

    def _on_message(self, message: bytes) -> None:
        match message[0]:
            case 0:
                if message[4:] != _PIXEL_FORMAT:
                    self._reject(message)
            case 2:
                self._set_encodings(frozenset(struct.unpack_from(f">{(len(message) - 4) // 4}i", message, 4)))
            case 3:
                incremental, x, y, w, h = struct.unpack_from(">BHHHH", message, 1)
                self._is_requested = True
                if incremental:
                    self._schedule_refresh()
                else:
                    self._damage.add(Rect(x, y, w, h).intersect(self._screen.framebuffer.bounds))
                    self._send_update()
            case 4:
                down, keysym = struct.unpack_from(">BxxI", message, 1)
                self._screen.keysym_input(keysym, down=bool(down))
            case 5:
                buttons, x, y = struct.unpack_from(">BHH", message, 1)
                self._screen.pointer_input(x, y, buttons)
            case 255:
                down, _keysym, scancode = struct.unpack_from(">HII", message, 2)
                self._screen.key_input(scancode, down=bool(down))

    def _set_encodings(self, encodings: frozenset[int]) -> None:
        new = encodings - self._encodings
        self._encodings = encodings
        bounds = self._screen.framebuffer.bounds
        # QEMU acknowledges these encodings with a rectangle without pixels.
        if _EXTENDED_KEY in new:
            self._acks.append(_header(Rect(0, 0, bounds.w, bounds.h), _EXTENDED_KEY))
        if _POINTER_TYPE_CHANGE in new:
            self._acks.append(_header(Rect(1, 0, bounds.w, bounds.h), _POINTER_TYPE_CHANGE))
        if _CURSOR in new:
            self._acks.append(self._cursor())
        self._send_update()

    # Updates

    def _schedule_refresh(self) -> None:
        if self._damage.rects and self._refresh is None and self._transport is not None:
            self._refresh = self._call_later(_REFRESH_S, self._send_update)

    def _cancel_refresh(self) -> None:
        if self._refresh is not None:
            self._refresh.cancel()
            self._refresh = None

    def _send_update(self) -> None:
        self._cancel_refresh()
        if self._transport is None or self._is_write_paused or self._stage is not _Stage.MESSAGES:
            return
        # QEMU sends sizes and acknowledgements unrequested, pixels only on request.
        bounds = self._screen.framebuffer.bounds
        if self._size != (bounds.w, bounds.h):
            if _DESKTOP_SIZE not in self._encodings:
                logger.warning("%s: display connection closed: the client does not support resizing", self._name)
                self._transport.close()
                return
            self._size = (bounds.w, bounds.h)
            self._send_update_of(1, [_header(bounds, _DESKTOP_SIZE)])
        if self._acks:
            self._send_update_of(len(self._acks), self._acks)
            self._acks = []
        if self._is_requested and self._damage.rects:
            self._is_requested = False
            self._send_pixels()

    def _send_pixels(self) -> None:
        pixels, rects = self._screen.framebuffer.pixels, self._damage.take()
        parts: list[bytes | memoryview] = []
        for rect in rects:
            # Rows of the whole width are not copied here.
            rows = np.ascontiguousarray(pixels[rect.y : rect.bottom, rect.x : rect.right])
            parts += (_header(rect, _RAW), rows.data)
        self._send_update_of(len(rects), parts)

    def _send_update_of(self, rect_count: int, parts: Sequence[bytes | memoryview]) -> None:
        self._send(b"".join((struct.pack(">BxH", 0, rect_count), *parts)))

    def _cursor(self) -> bytes:
        height, width = len(_CURSOR_ROWS), 8
        mask = np.unpackbits(np.array(_CURSOR_ROWS, np.uint8)[:, None], axis=1)
        pixels = np.zeros((height, width, 4), np.uint8)
        return _header(Rect(0, 0, width, height), _CURSOR) + pixels.tobytes() + np.packbits(mask, axis=1).tobytes()

    def _reject(self, received: bytes | bytearray) -> None:
        logger.warning("%s: display connection closed: invalid message %s", self._name, bytes(received[:20]).hex())
        self.close()

    def _send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def _header(rect: Rect, encoding: int) -> bytes:
    return struct.pack(">HHHHi", *rect, encoding)


def _length_of(received: bytearray) -> int:
    kind, have = received[0], len(received)
    match kind:
        case 0:
            return 20
        case 2:
            return 4 if have < 4 else 4 + 4 * int.from_bytes(received[2:4], "big")
        case 3:
            return 10
        case 4:
            return 8
        case 5:
            return 6
        case 255:
            return 2 if have < 2 else {0: 12}.get(received[1], 0)
        case _:
            return 0
