"""Write images as PNG, reusing the parts of earlier images: between two steps, most of a screen stays the same."""

import struct
import threading
import zlib
from collections import OrderedDict
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

#: Rows that are compressed together. Fewer rows recur more often and compress worse.
_BAND_ROWS: Final = 16
_CACHE_BYTES: Final = 32 << 20
_ADLER_MODULUS: Final = 65521
_SUB_FILTER: Final = 1
#: Where fewer pixels equal their left neighbours, searching for repetitions triples the time and saves no bytes.
_MIN_EQUAL: Final = 0.5
#: Begins a zlib stream; ends it, before its checksum.
_ZLIB_HEADER: Final = b"\x78\x01"
_LAST_BLOCK: Final = b"\x03\x00"


class _Band(NamedTuple):
    chunk: bytes
    """IDAT chunk with complete deflate blocks, which refer to nothing outside of the band."""
    adler: int
    """Checksum of the filtered bytes."""
    filtered_bytes: int


class _Bands:
    """The bands of this process's latest images. For any number of threads."""

    def __init__(self, limit_bytes: int) -> None:
        self._lock = threading.Lock()
        self._bands: OrderedDict[bytes, _Band] = OrderedDict()
        self._limit_bytes = limit_bytes
        self._bytes = 0

    def get(self, rows_HWC: npt.NDArray[np.uint8]) -> _Band:
        """Return some rows of an image as a band."""
        key = xxhash.xxh3_128_digest(rows_HWC.data) + rows_HWC.shape[1].to_bytes(4, "big")
        with self._lock:
            if (found := self._bands.get(key)) is not None:
                self._bands.move_to_end(key)
                return found
        band = _compressed(rows_HWC)
        with self._lock:
            if key not in self._bands:
                self._bands[key] = band
                self._bytes += len(band.chunk)
            while self._bytes > self._limit_bytes:
                self._bytes -= len(self._bands.popitem(last=False)[1].chunk)
        return band


_bands = _Bands(_CACHE_BYTES)


def encode_png(rgb_HWC: npt.NDArray[np.uint8]) -> bytes:
    """Return an 8-bit RGB array of shape (height, width, 3) as PNG.

    Takes time for the rows that differ from all recent images, a fifth of Pillow's.
    """
    height, width, _ = rgb_HWC.shape
    rgb_HWC = np.ascontiguousarray(rgb_HWC)
    bands = [_bands.get(rgb_HWC[top : top + _BAND_ROWS]) for top in range(0, height, _BAND_ROWS)]
    adler = 1
    for band in bands:
        adler = _joined(adler, band.adler, band.filtered_bytes)
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            # 8 bits, RGB, not interlaced.
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
            _chunk(b"IDAT", _ZLIB_HEADER),
            *(band.chunk for band in bands),
            _chunk(b"IDAT", _LAST_BLOCK + adler.to_bytes(4, "big")),
            _chunk(b"IEND", b""),
        )
    )


def _compressed(rows_HWC: npt.NDArray[np.uint8]) -> _Band:
    height, width, _ = rows_HWC.shape
    rows = rows_HWC.reshape(height, width * 3)
    # Each row: its filter, then the differences to the pixels to the left.
    filtered = np.empty((height, 1 + width * 3), np.uint8)
    filtered[:, 0] = _SUB_FILTER
    filtered[:, 1:4] = rows[:, :3]
    np.subtract(rows[:, 3:], rows[:, :-3], out=filtered[:, 4:])
    is_photographic = np.count_nonzero(filtered) > (1 - _MIN_EQUAL) * filtered.size
    strategy = zlib.Z_HUFFMAN_ONLY if is_photographic else zlib.Z_DEFAULT_STRATEGY
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
