"""PNG encoding of screenshots."""

import io
import struct
import zlib

from PIL import Image

from envd.guests.guestd.x11 import Cursor, encode_png


def test_a_screen_is_encoded_with_its_pointer_clipped_at_the_edge() -> None:
    width, height = 5, 3
    bgrx = bytes(value for i in range(width * height) for value in (i, 2 * i, 3 * i, 255))
    half_red, clear = 0x80800000, 0
    cursor = Cursor(4, 2, 2, 2, [half_red, clear, clear, clear])
    image = Image.open(io.BytesIO(encode_png(width, height, bgrx, cursor)))
    assert (image.size, image.mode) == ((5, 3), "RGB")
    assert image.getpixel((1, 1)) == (18, 12, 6)
    assert image.getpixel((4, 2)) == (0x80 + 42 * 127 // 255, 28 * 127 // 255, 14 * 127 // 255)


def test_a_png_declares_8_bit_rgb() -> None:
    png = encode_png(1, 1, b"\1\2\3\0", None)
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">IIBB", png[16:26]) == (1, 1, 8, 2)
    data = png[png.index(b"IDAT") + 4 : png.index(b"IEND") - 8]
    assert zlib.decompress(data) == b"\0\3\2\1"
