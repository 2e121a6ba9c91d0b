"""Write images as PNG, reusing the parts of earlier images: between two steps, most of a screen stays the same."""

import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from cuaenv.frames.image import TiledImage

V = TypeVar("V")
#: Rows that are compressed together. Fewer rows recur more often and compress worse.
_BAND_ROWS: Final = 16
#: 40 KB each for photographs, 1 KB for windows.
_BANDS_KEPT: Final = 1024
#: Rows of tiles have four bands.
_TILE_ROWS_KEPT: Final = _BANDS_KEPT // 4
_ADLER_MODULUS: Final = 65521


class _Band(NamedTuple):
    chunk: bytes
    """IDAT chunk with complete deflate blocks, which refer to nothing outside of the band."""
    adler: int
    """Checksum of the filtered bytes."""
    filtered_bytes: int


_bands: OrderedDict[bytes, _Band] = OrderedDict()
_tile_rows: OrderedDict[bytes, list[_Band]] = OrderedDict()
_lock = threading.Lock()


def encode_png(image: npt.NDArray[np.uint8] | TiledImage) -> bytes:
    """Return an 8-bit RGB array of shape (height, width, 3), or tiles, as PNG.

    Rows of recent images cost nearly nothing; rows of tiles are not even assembled.
    """
    if isinstance(image, TiledImage):
        width, height = image.size_px
        shape = struct.pack(">II", width, height)
        bands = [
            band
            for number, digest in enumerate(image.row_digests())
            for band in _kept(_tile_rows, shape + digest, _TILE_ROWS_KEPT, partial(_bands_of_row, image, number))
        ]
    else:
        height, width, _ = image.shape
        bands = _bands_of(np.ascontiguousarray(image))
    adler = 1
    for band in bands:
        adler = _joined(adler, band.adler, band.filtered_bytes)
    # 8 bits, RGB, not interlaced.
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    # The data are one zlib stream: its header, the bands, an empty last block and the checksum.
    begin, end = _chunk(b"IDAT", b"\x78\x01"), _chunk(b"IDAT", b"\x03\x00" + adler.to_bytes(4, "big"))
    return b"".join((b"\x89PNG\r\n\x1a\n", header, begin, *(band.chunk for band in bands), end, _chunk(b"IEND", b"")))


def _bands_of_row(image: TiledImage, number: int) -> list[_Band]:
    return _bands_of(image.row_HWC(number))


def _bands_of(rgb_HWC: npt.NDArray[np.uint8]) -> list[_Band]:
    found = []
    for top in range(0, rgb_HWC.shape[0], _BAND_ROWS):
        rows_HWC = rgb_HWC[top : top + _BAND_ROWS]
        key = xxhash.xxh3_128_digest(rows_HWC.data) + rows_HWC.shape[1].to_bytes(4, "big")
        found.append(_kept(_bands, key, _BANDS_KEPT, partial(_compressed, rows_HWC)))
    return found


def _kept(cache: OrderedDict[bytes, V], key: bytes, limit: int, make: Callable[[], V]) -> V:
    """Return what a cache has of a key, or make it; the cache keeps those that were used last."""
    with _lock:
        if key in cache:
            cache.move_to_end(key)
            return cache[key]
    value = make()
    with _lock:
        cache[key] = value
        while len(cache) > limit:
            cache.popitem(last=False)
    return value


def _compressed(rows_HWC: npt.NDArray[np.uint8]) -> _Band:
    height, width, _ = rows_HWC.shape
    rows = rows_HWC.reshape(height, width * 3)
    # Each row: the number of the filter "sub", then the differences to the pixels to the left.
    filtered = np.empty((height, 1 + width * 3), np.uint8)
    filtered[:, 0] = 1
    filtered[:, 1:4] = rows[:, :3]
    np.subtract(rows[:, 3:], rows[:, :-3], out=filtered[:, 4:])
    # In photographs, searching for repetitions triples the time and saves no bytes.
    is_photograph = np.count_nonzero(filtered) > filtered.size // 2
    strategy = zlib.Z_HUFFMAN_ONLY if is_photograph else zlib.Z_DEFAULT_STRATEGY
    deflate = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, strategy)
    data = deflate.compress(filtered.data) + deflate.flush(zlib.Z_SYNC_FLUSH)
    return _Band(_chunk(b"IDAT", data), zlib.adler32(filtered.data), filtered.size)


def _chunk(kind: bytes, data: bytes) -> bytes:
    crc = zlib.crc32(data, zlib.crc32(kind))
    return b"".join((len(data).to_bytes(4, "big"), kind, data, crc.to_bytes(4, "big")))


def _joined(first: int, second: int, second_bytes: int) -> int:
    """Return the Adler-32 checksum of two parts, as zlib's adler32_combine."""
    low = (first & 0xFFFF) + (second & 0xFFFF) - 1
    high = (first >> 16) + (second >> 16) + second_bytes * ((first & 0xFFFF) - 1)
    return high % _ADLER_MODULUS << 16 | low % _ADLER_MODULUS
