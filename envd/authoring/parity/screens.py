"""Compare two screens by tiles, and name the causes of differences that say nothing about a desktop. Pure."""

import io
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from PIL import Image

TILE_PX = 64
#: A text caret is a line of at most this width and height.
_CARET_WIDTH_PX, _CARET_HEIGHT_PX = 3, 40
#: GNOME Shell shows the time in the middle of a bar at the top. The images of envd show no clock.
_BAR_HEIGHT_PX, _CLOCK_WIDTH_PX = 32, 240

#: The named causes of differences that do not count.
NAMED_CAUSES = frozenset({"caret", "clock"})


#: Left, top, width and height of pixels.
Box = tuple[int, int, int, int]


def compare(left_png: bytes, right_png: bytes) -> list[tuple[Box, str]]:
    """Return where two screens differ, with the cause; nothing if they are equal.

    A box has all pixels that differ in adjacent tiles. A cause is one of `NAMED_CAUSES`, `size` if the screens have
    unlike sizes, or empty.
    """
    if left_png == right_png:
        return []
    left_HWC, right_HWC = (np.asarray(Image.open(io.BytesIO(png)).convert("RGB")) for png in (left_png, right_png))
    height_px, width_px = left_HWC.shape[:2]
    if left_HWC.shape != right_HWC.shape:
        return [((0, 0, width_px, height_px), "size")]
    differs_HW = (left_HWC != right_HWC).any(axis=2)
    return [(box, cause_of(box, width_px)) for box in _boxes(differs_HW)]


def cause_of(box: Box, width_px: int) -> str:
    """Return the cause of a difference on a screen of this width, by its place and size; empty if it is unknown."""
    left, top, width, height = box
    if width <= _CARET_WIDTH_PX < height <= _CARET_HEIGHT_PX:
        return "caret"
    is_central = abs(left + width / 2 - width_px / 2) <= _CLOCK_WIDTH_PX / 2
    return "clock" if top + height <= _BAR_HEIGHT_PX and width <= _CLOCK_WIDTH_PX and is_central else ""


def _boxes(differs_HW: npt.NDArray[np.bool_]) -> Iterator[Box]:
    """Yield the bounding box of the differing pixels of each group of adjacent tiles, also diagonally adjacent ones."""
    rows, columns = (-(-length // TILE_PX) for length in differs_HW.shape)
    open_tiles = {
        (row, column)
        for row in range(rows)
        for column in range(columns)
        if differs_HW[row * TILE_PX : (row + 1) * TILE_PX, column * TILE_PX : (column + 1) * TILE_PX].any()
    }
    while open_tiles:
        waiting = [min(open_tiles)]
        open_tiles.discard(waiting[0])
        group_HW = np.zeros_like(differs_HW)
        while waiting:
            row, column = waiting.pop()
            tile = slice(row * TILE_PX, (row + 1) * TILE_PX), slice(column * TILE_PX, (column + 1) * TILE_PX)
            group_HW[tile] = differs_HW[tile]
            near = {(row + dy, column + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & open_tiles
            open_tiles -= near
            waiting += near
        ys, xs = np.nonzero(group_HW)
        left, top = int(xs.min()), int(ys.min())
        yield left, top, int(xs.max()) + 1 - left, int(ys.max()) + 1 - top
