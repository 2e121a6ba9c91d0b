"""Rebuild a screen's exact pixels from what travels: a whole image, or the tiles that changed since another.

An image is a grid of immutable tiles; what two images have in common they share, so a history of screenshots holds
little more than the changes, and checking an image costs what changed. The digest that names an image is published in
`cuaenv/v1/env.proto`, at `Frame.image_id`.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

_TILE_PX = 64
#: No screen has more pixels; what claims to is not believed.
_MAX_PIXELS = 8192 * 8192

Box = tuple[int, int, int, int]
"""x, y, width, height in pixels."""


class FrameMismatch(Exception):
    """What was sent does not add up to the image that it claims to be."""


class TiledImage:
    """One 8-bit RGB image. Never changes; can be pickled."""

    __slots__ = ("_digests", "_tiles", "height_px", "image_id", "width_px")

    def __init__(
        self, width_px: int, height_px: int, tiles: tuple[bytes, ...], digests: tuple[bytes, ...], image_id: str
    ) -> None:
        """Take tiles, row by row, and the digests of their pixels.

        Raises:
            FrameMismatch: They are not the image of that id.
        """
        whole = xxhash.xxh3_128(f"{width_px}x{height_px}".encode())
        whole.update(b"".join(digests))
        if whole.hexdigest() != image_id:
            raise FrameMismatch(f"image {image_id} of {width_px}x{height_px} came out as {whole.hexdigest()}")
        self.width_px = width_px
        self.height_px = height_px
        self.image_id = image_id
        self._tiles = tiles
        self._digests = digests

    def __repr__(self) -> str:
        return f"<TiledImage {self.width_px}x{self.height_px} {self.image_id}>"

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}

    def __setstate__(self, state: dict[str, object]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    @classmethod
    def unpack(cls, data: bytes, *, width_px: int, height_px: int, image_id: str) -> "TiledImage":
        """Read a whole image: rows of RGB bytes as one zstd frame. Raises: FrameMismatch."""
        rgb = _unpacked(data, width_px * height_px * 3)
        rgb_HWC = np.frombuffer(rgb, np.uint8).reshape(height_px, width_px, 3)
        tiles = tuple(rgb_HWC[y : y + h, x : x + w].tobytes() for x, y, w, h in _grid(width_px, height_px))
        return cls(width_px, height_px, tiles, tuple(map(xxhash.xxh3_128_digest, tiles)), image_id)

    def patched(self, boxes: Sequence[Box], data: bytes, *, image_id: str) -> "TiledImage":
        """Return this image with other tiles in some places: their RGB bytes one after the other, as one zstd frame.

        Raises:
            FrameMismatch: The places are not tiles, or the result is not the image of that id.
        """
        columns = -(-self.width_px // _TILE_PX)
        pixels = _unpacked(data, sum(width * height * 3 for _, _, width, height in boxes))
        tiles, digests = list(self._tiles), list(self._digests)
        at = 0
        for box in boxes:
            x, y, width, height = box
            index = y // _TILE_PX * columns + x // _TILE_PX
            if not 0 <= index < len(tiles) or box != self._box(index):
                raise FrameMismatch(f"{box} is no tile of an image of {self.width_px}x{self.height_px}")
            tiles[index] = pixels[at : at + width * height * 3]
            digests[index] = xxhash.xxh3_128_digest(tiles[index])
            at += width * height * 3
        return TiledImage(self.width_px, self.height_px, tuple(tiles), tuple(digests), image_id)

    def rgb_HWC(self) -> npt.NDArray[np.uint8]:  # noqa: N802 -- the array's axes
        """Return the pixels as a new read-only array of shape (height, width, 3)."""
        rgb_HWC = np.empty((self.height_px, self.width_px, 3), np.uint8)
        columns, full = -(-self.width_px // _TILE_PX), self.width_px // _TILE_PX
        for first in range(0, len(self._tiles), columns):  # whole rows at once: a third of the time of tile by tile
            y = first // columns * _TILE_PX
            height = min(_TILE_PX, self.height_px - y)
            row = np.frombuffer(b"".join(self._tiles[first : first + full]), np.uint8)
            side_by_side = row.reshape(full, height, _TILE_PX, 3).transpose(1, 0, 2, 3)
            rgb_HWC[y : y + height, : full * _TILE_PX] = side_by_side.reshape(height, full * _TILE_PX, 3)
            if full < columns:
                last = np.frombuffer(self._tiles[first + full], np.uint8)
                rgb_HWC[y : y + height, full * _TILE_PX :] = last.reshape(height, -1, 3)
        rgb_HWC.flags.writeable = False
        return rgb_HWC

    def _box(self, index: int) -> Box:
        row, column = divmod(index, -(-self.width_px // _TILE_PX))
        x, y = column * _TILE_PX, row * _TILE_PX
        return x, y, min(_TILE_PX, self.width_px - x), min(_TILE_PX, self.height_px - y)


def _grid(width_px: int, height_px: int) -> Iterator[Box]:
    for y in range(0, height_px, _TILE_PX):
        for x in range(0, width_px, _TILE_PX):
            yield x, y, min(_TILE_PX, width_px - x), min(_TILE_PX, height_px - y)


def _unpacked(data: bytes, size: int) -> bytes:
    if not 0 < size <= _MAX_PIXELS * 3:
        raise FrameMismatch(f"{size} bytes of pixels are not to be believed")
    try:
        pixels = zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
    except zstandard.ZstdError as error:
        raise FrameMismatch(f"pixels cannot be unpacked: {error}") from error
    if len(pixels) != size:
        raise FrameMismatch(f"{len(pixels)} bytes of pixels came instead of {size}")
    return pixels
