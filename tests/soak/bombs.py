"""Files of a hostile guest, for the files that the checker of `fake.yaml` reads: path and content, by name."""

import functools
import io
import struct
import zlib
from collections.abc import Mapping

from PIL import Image

_INI = "/home/user/settings.ini"
_TEXT = "/home/user/words.txt"
_PICTURE = "/home/user/picture"
_JSON = "/home/user/settings.json"
_XML = "/home/user/settings.xml"
_SIDE_PX = 65_000


@functools.cache
def file_bombs() -> Mapping[str, tuple[str, bytes]]:
    """Return all bombs. The first three exceed a judge's CPU time; the others are simply wrong files."""
    return {
        # configparser's own pattern is quadratic in blanks.
        "ini_blanks": (_INI, b"[s]\na" + b" " * 400_000 + b"a"),
        # The checker's pattern is `(a+)+b`.
        "backtracking": (_TEXT, b"a" * 40 + b"!"),
        # Pillow's reader of plain PPM is quadratic in comments.
        "ppm_comments": (_PICTURE, b"P3\n4000 4000\n255\n" + b"#\n" * 2_000_000),
        "png_size": (_PICTURE, _huge_png()),
        "jpeg_size": (_PICTURE, _huge_jpeg()),
        "json_brackets": (_JSON, b"[" * 1_000_000),
        "xml_entities": (_XML, _entities()),
        "xml_depth": (_XML, b"<a>" * 1_000_000),
    }


def _huge_png() -> bytes:
    header = struct.pack(">IIBBBBB", _SIDE_PX, _SIDE_PX, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1 << 22))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def _huge_jpeg() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG")
    data = bytearray(buffer.getvalue())
    size_at = data.index(b"\xff\xc0") + 5
    data[size_at : size_at + 4] = struct.pack(">HH", _SIDE_PX, _SIDE_PX)
    return bytes(data)


def _entities() -> bytes:
    levels = "".join(f'<!ENTITY e{level} "{f"&e{level - 1};" * 10}">' for level in range(1, 12))
    return f'<!DOCTYPE a [<!ENTITY e0 "lol">{levels}]><a>&e11;</a>'.encode()
