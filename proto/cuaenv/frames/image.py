"""An image as a grid of immutable tiles, each with a digest."""

import weakref
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from cuaenv.frames.codec import FrameMismatch, decompress
from cuaenv.frames.grid import TILE_PX, bounds_of, column_count, tile_regions, touched_tiles
from cuaenv.region import Region

_DIGEST_BYTES = 16

Slices = tuple[slice, slice]
"""Rows and columns."""


class TiledImage:
    """One 8-bit RGB image. Immutable; can be pickled.

    `image_id` names its pixels: the xxh3-128 digest, as 32 hex digits, of `WIDTHxHEIGHT` in ASCII followed by the
    xxh3-128 digests (16 bytes each, big-endian) of its tiles, row by row from the top left. A tile's digest covers its
    pixels' R, G, B bytes, row by row. Images with equal ids have equal pixels.
    """

    __slots__ = ("_base", "_changed", "_digests", "_regions", "_rgb", "_tiles", "height_px", "image_id", "width_px")

    def __init__(self, width_px: int, height_px: int, tiles: tuple[bytes, ...], digests: bytes | None = None) -> None:
        """Take tiles, row by row from the top left; digests are computed if not given."""
        self.width_px = width_px
        self.height_px = height_px
        self._tiles = tiles
        self._regions = tile_regions(width_px, height_px)
        # Joined: the garbage collector would visit each element of a tuple.
        self._digests = b"".join(map(xxhash.xxh3_128_digest, tiles)) if digests is None else digests
        whole = xxhash.xxh3_128(f"{width_px}x{height_px}".encode())
        whole.update(self._digests)
        self.image_id = whole.hexdigest()
        # The array of this image, and that of the image it was derived from with the tiles that differ. Weak: strong
        # references would keep every array of a history of images; while one is alive, copying it takes a third of
        # the time of assembling a new one.
        self._rgb: weakref.ref[npt.NDArray[np.uint8]] | None = None
        self._base: weakref.ref[npt.NDArray[np.uint8]] | None = None
        self._changed: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"<TiledImage {self.width_px}x{self.height_px} {self.image_id}>"

    def __reduce__(self) -> tuple[type["TiledImage"], tuple[object, ...]]:
        return TiledImage, (self.width_px, self.height_px, self._tiles, self._digests)

    @classmethod
    def from_rgb(cls, rgb_HWC: npt.NDArray[np.uint8]) -> "TiledImage":
        """Cut an array of shape (height, width, 3) into tiles."""
        height_px, width_px = rgb_HWC.shape[:2]
        tiles = tuple(
            rgb_HWC[part.y_px : part.y_px + part.height_px, part.x_px : part.x_px + part.width_px].tobytes()
            for part in tile_regions(width_px, height_px)
        )
        return cls(width_px, height_px, tiles)

    @classmethod
    def unpack(cls, data: bytes, *, width_px: int, height_px: int, image_id: str) -> "TiledImage":
        """Decode a whole image: rows of RGB bytes as one zstd frame. Raises: FrameMismatch."""
        rgb = decompress(data, width_px * height_px * 3)
        return cls.from_rgb(np.frombuffer(rgb, np.uint8).reshape(height_px, width_px, 3))._checked(image_id)

    def patched(self, regions: Sequence[Region], data: bytes, *, image_id: str) -> "TiledImage":
        """Return this image with other pixels in some regions.

        Args:
            regions: Within the image, and disjoint.
            data: Their RGB bytes one after the other, as one zstd frame whose dictionary is the current pixels there.
            image_id: Expected id of the result.

        Raises:
            FrameMismatch: A region is not within the image, or the result has another id.
        """
        self._check_regions(regions)
        spans = [[*self.overlaps(region)] for region in regions]
        before = np.empty(sum(region.width_px * region.height_px for region in regions) * 3, np.uint8)
        for part_HWC, overlaps in zip(_parts(before, regions), spans, strict=True):
            for index, in_tile, in_region in overlaps:
                part_HWC[in_region] = self.tile_HWC(index)[in_tile]
        pixels = np.frombuffer(decompress(data, len(before), before=before.data), np.uint8)
        painted: dict[int, npt.NDArray[np.uint8]] = {}
        for part_HWC, overlaps in zip(_parts(pixels, regions), spans, strict=True):
            for index, in_tile, in_region in overlaps:
                if index not in painted:
                    painted[index] = self.tile_HWC(index).copy()
                painted[index][in_tile] = part_HWC[in_region]
        return self.with_tiles({index: tile_HWC.tobytes() for index, tile_HWC in painted.items()})._checked(image_id)

    @property
    def size_px(self) -> tuple[int, int]:
        """(width, height)."""
        return self.width_px, self.height_px

    @property
    def pixel_count(self) -> int:
        return self.width_px * self.height_px

    @property
    def tile_count(self) -> int:
        return len(self._tiles)

    def tile(self, index: int) -> bytes:
        """Return a tile's R, G, B bytes, row by row."""
        return self._tiles[index]

    def tile_HWC(self, index: int) -> npt.NDArray[np.uint8]:  # noqa: N802 -- the array's axes
        """Return a tile as a read-only array of shape (height, width, 3)."""
        region = self._regions[index]
        return np.frombuffer(self._tiles[index], np.uint8).reshape(region.height_px, region.width_px, 3)

    def tile_region(self, index: int) -> Region:
        return self._regions[index]

    def with_tiles(self, tiles: Mapping[int, bytes]) -> "TiledImage":
        """Return an image with other pixels in some tiles; the others are shared."""
        all_tiles, digests = list(self._tiles), bytearray(self._digests)
        for index, pixels in tiles.items():
            all_tiles[index] = pixels
            digests[index * _DIGEST_BYTES : (index + 1) * _DIGEST_BYTES] = xxhash.xxh3_128_digest(pixels)
        image = TiledImage(self.width_px, self.height_px, tuple(all_tiles), bytes(digests))
        image._base, image._changed = self._rgb, tuple(tiles)
        return image

    def changed_tiles(self, base: "TiledImage") -> list[int]:
        """Return the indices of tiles that differ from `base`, an image of the same size, in ascending order."""
        mine, other = (np.frombuffer(image._digests, np.uint64).reshape(-1, 2) for image in (self, base))
        indices: list[int] = np.flatnonzero((mine != other).any(axis=1)).tolist()
        return indices

    def changed_region(self, base: "TiledImage", index: int) -> Region:
        """Return the smallest region of the image around the pixels of a tile that differ from those of `base`.

        `base` is an image of the same size. The tiles must differ.
        """
        return self._compared(base, index)[0]

    def difference(self, base: "TiledImage", index: int) -> tuple[Region, npt.NDArray[np.bool_]]:
        """Return `changed_region` of a tile, and a mask of the pixels in it that differ."""
        region, differs_HWC = self._compared(base, index)
        tile = self._regions[index]
        top, left = region.y_px - tile.y_px, region.x_px - tile.x_px
        part_HWC = differs_HWC[top : top + region.height_px, left : left + region.width_px]
        return region, part_HWC[..., 0] | part_HWC[..., 1] | part_HWC[..., 2]

    def _compared(self, base: "TiledImage", index: int) -> tuple[Region, npt.NDArray[np.bool_]]:
        """Return the region around the pixels of a tile that differ, and a mask of the tile's bytes that do."""
        differs_HWC = self.tile_HWC(index) != base.tile_HWC(index)
        # Flattened: `any(axis=2)` over so short an axis takes seven times as long, and every step does this.
        box = bounds_of(differs_HWC.reshape(differs_HWC.shape[0], -1))
        if box is None:
            raise ValueError(f"tile {index} of {self!r} equals that of {base!r}")
        top, bottom, left, right = box[0], box[1], box[2] // 3, -(-box[3] // 3)
        tile = self._regions[index]
        region = Region(x_px=tile.x_px + left, y_px=tile.y_px + top, width_px=right - left, height_px=bottom - top)
        return region, differs_HWC

    def rgb_HWC(self) -> npt.NDArray[np.uint8]:  # noqa: N802 -- the array's axes
        """Return all pixels as a read-only array of shape (height, width, 3)."""
        cached = self._rgb
        if cached is not None and (cached_HWC := cached()) is not None:
            return cached_HWC
        rgb_HWC = self._assembled()
        rgb_HWC.flags.writeable = False
        self._rgb, self._base = weakref.ref(rgb_HWC), None
        return rgb_HWC

    def row_digests(self) -> list[bytes]:
        """Return a digest of each row of tiles; in images of one size, rows with equal digests have equal pixels."""
        size = column_count(self.width_px) * _DIGEST_BYTES
        return [self._digests[at : at + size] for at in range(0, len(self._digests), size)]

    def row_HWC(self, number: int) -> npt.NDArray[np.uint8]:  # noqa: N802 -- the array's axes
        """Return the pixels of a row of tiles as an array of shape (height, width, 3)."""
        top = number * TILE_PX
        row_HWC = np.empty((min(TILE_PX, self.height_px - top), self.width_px, 3), np.uint8)
        self._write_row(number, row_HWC)
        return row_HWC

    def part(self, region: Region) -> npt.NDArray[np.uint8]:
        """Return the pixels of a region within the image as a new read-only array of shape (height, width, 3)."""
        part_HWC = np.empty((region.height_px, region.width_px, 3), np.uint8)
        for index, in_tile, in_region in self.overlaps(region):
            part_HWC[in_region] = self.tile_HWC(index)[in_tile]
        part_HWC.flags.writeable = False
        return part_HWC

    def overlaps(self, region: Region) -> Iterator[tuple[int, Slices, Slices]]:
        """Yield (index, slices of the tile, slices of the region) for each tile that overlaps a region of the image."""
        columns, left, top = column_count(self.width_px), region.x_px, region.y_px
        for row, column in touched_tiles(region):
            index = row * columns + column
            tile = self._regions[index]
            x0, x1 = max(left, tile.x_px), min(left + region.width_px, tile.x_px + tile.width_px)
            y0, y1 = max(top, tile.y_px), min(top + region.height_px, tile.y_px + tile.height_px)
            in_tile = slice(y0 - tile.y_px, y1 - tile.y_px), slice(x0 - tile.x_px, x1 - tile.x_px)
            yield index, in_tile, (slice(y0 - top, y1 - top), slice(x0 - left, x1 - left))

    def _assembled(self) -> npt.NDArray[np.uint8]:
        base = self._base  # read once: another thread may clear it
        if base is not None and (base_HWC := base()) is not None:
            rgb_HWC = base_HWC.copy()
            for index in self._changed:
                tile = self._regions[index]
                rgb_HWC[tile.y_px : tile.y_px + tile.height_px, tile.x_px : tile.x_px + tile.width_px] = self.tile_HWC(
                    index
                )
            return rgb_HWC
        rgb_HWC = np.empty((self.height_px, self.width_px, 3), np.uint8)
        for number in range(-(-self.height_px // TILE_PX)):
            self._write_row(number, rgb_HWC[number * TILE_PX : (number + 1) * TILE_PX])
        return rgb_HWC

    def _write_row(self, number: int, row_HWC: npt.NDArray[np.uint8]) -> None:
        """Write a row of tiles at once: a third of the time of tile by tile."""
        columns, full = column_count(self.width_px), self.width_px // TILE_PX
        first, height_px = number * columns, row_HWC.shape[0]
        row = np.frombuffer(b"".join(self._tiles[first : first + full]), np.uint8)
        row_HWC[:, : full * TILE_PX] = (
            row.reshape(full, height_px, TILE_PX, 3).transpose(1, 0, 2, 3).reshape(height_px, full * TILE_PX, 3)
        )
        if full < columns:
            row_HWC[:, full * TILE_PX :] = self.tile_HWC(first + full)

    def _checked(self, image_id: str) -> "TiledImage":
        if self.image_id != image_id:
            raise FrameMismatch(f"image {image_id}: decoded pixels have the id {self.image_id}")
        return self

    def _check_regions(self, regions: Sequence[Region]) -> None:
        """Raise FrameMismatch unless regions lie within the image and have no more pixels than it."""
        for region in regions:
            right_px, bottom_px = region.x_px + region.width_px, region.y_px + region.height_px
            is_within = min(region.x_px, region.y_px) >= 0 and right_px <= self.width_px and bottom_px <= self.height_px
            if not is_within or min(region.width_px, region.height_px) < 1:
                raise FrameMismatch(f"{region} is not within an image of {self.width_px}x{self.height_px}")
        if sum(region.width_px * region.height_px for region in regions) > self.pixel_count:
            raise FrameMismatch(f"{len(regions)} regions of an image of {self.width_px}x{self.height_px} overlap")


def _parts(pixels: npt.NDArray[np.uint8], regions: Sequence[Region]) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the pixels of regions that follow one another in an array, each of shape (height, width, 3)."""
    at = 0
    for region in regions:
        count = region.width_px * region.height_px * 3
        yield pixels[at : at + count].reshape(region.height_px, region.width_px, 3)
        at += count
