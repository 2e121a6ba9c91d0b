"""PNG encoding of screenshots."""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cursor:
    """A pointer image: premultiplied ARGB; `x`, `y` are its top left corner (not its hot spot)."""

    x: int
    y: int
    width: int
    height: int
    argb: Sequence[int]


def encode_png(width: int, height: int, bgrx: bytes, cursor: Cursor | None) -> bytes:
    """Encode a screen and its pointer as 8-bit RGB, at compression level 1: higher levels cost more time than bytes."""
    rgb = bytearray(width * height * 3)
    for channel in range(3):
        rgb[channel::3] = bgrx[2 - channel :: 4]
    if cursor:
        blend_cursor(rgb, width, height, cursor)
    stride = width * 3
    rows = memoryview(rgb)
    compressor = zlib.compressobj(1)
    data = bytearray()
    for start in range(0, stride * height, stride):
        data += compressor.compress(b"\0")
        data += compressor.compress(rows[start : start + stride])
    data += compressor.flush()

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", bytes(data)) + chunk(b"IEND", b"")


def blend_cursor(rgb: bytearray, width: int, height: int, cursor: Cursor) -> None:
    """Draw the pointer over an RGB screen, clipped at the edges."""
    for row in range(max(0, -cursor.y), min(cursor.height, height - cursor.y)):
        for column in range(max(0, -cursor.x), min(cursor.width, width - cursor.x)):
            pixel = cursor.argb[row * cursor.width + column]
            uncovered = 255 - (pixel >> 24 & 255)
            if uncovered == 255:
                continue
            offset = ((cursor.y + row) * width + cursor.x + column) * 3
            for channel, shift in enumerate((16, 8, 0)):
                mixed = (pixel >> shift & 255) + rgb[offset + channel] * uncovered // 255
                rgb[offset + channel] = min(255, mixed)
