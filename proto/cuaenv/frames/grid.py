"""Geometry of the tile grid. Pure."""

from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from cuaenv.region import Region

#: Side of a tile; tiles at the right and bottom edges may be smaller.
TILE_PX = 64
#: Two regions are joined if the joined region has at most this many times their pixels.
_MAX_JOIN_COST = 1.3


def column_count(width_px: int) -> int:
    return -(-width_px // TILE_PX)


@lru_cache(maxsize=64)
def tile_regions(width_px: int, height_px: int) -> tuple[Region, ...]:
    """Return the regions of an image's tiles, row by row from the top left."""
    return tuple(
        Region(x_px=x_px, y_px=y_px, width_px=min(TILE_PX, width_px - x_px), height_px=min(TILE_PX, height_px - y_px))
        for y_px in range(0, height_px, TILE_PX)
        for x_px in range(0, width_px, TILE_PX)
    )


def touched_tiles(region: Region) -> Iterator[tuple[int, int]]:
    """Yield (row, column) of each tile that a region touches, row by row."""
    for row in range(region.y_px // TILE_PX, -(-(region.y_px + region.height_px) // TILE_PX)):
        for column in range(region.x_px // TILE_PX, -(-(region.x_px + region.width_px) // TILE_PX)):
            yield row, column


def bounds_of(marked_HW: npt.NDArray[np.bool_]) -> tuple[int, int, int, int] | None:
    """Return the bounds (top, bottom, left, right) of the True values, bottom and right exclusive; None without any."""
    # Searching the bytes takes a third of the time of listing the indices with numpy.
    rows = marked_HW.any(axis=1).tobytes()
    top, bottom = rows.find(1), rows.rfind(1) + 1
    if not bottom:
        return None
    columns = marked_HW[top:bottom].any(axis=0).tobytes()
    return top, bottom, columns.find(1), columns.rfind(1) + 1


def joined(regions: Iterable[Region]) -> list[Region]:
    """Join regions that touch left and right within one row of tiles, if that adds few pixels.

    A typed line of text becomes one region instead of ten, which takes a tenth fewer bytes.

    Args:
        regions: At most one per tile and within it, in the order of the tiles.
    """
    found: list[Region] = []
    for region in regions:
        if found and (wider := _joined(found[-1], region)) is not None:
            found[-1] = wider
        else:
            found.append(region)
    return found


def _joined(left: Region, right: Region) -> Region | None:
    if left.x_px + left.width_px != right.x_px or left.y_px // TILE_PX != right.y_px // TILE_PX:
        return None
    top = min(left.y_px, right.y_px)
    bottom = max(left.y_px + left.height_px, right.y_px + right.height_px)
    both = Region(x_px=left.x_px, y_px=top, width_px=left.width_px + right.width_px, height_px=bottom - top)
    pixel_count = left.width_px * left.height_px + right.width_px * right.height_px
    return both if both.width_px * both.height_px <= pixel_count * _MAX_JOIN_COST else None
