"""Draw numbered boxes over a picture, so that a model can refer to elements by number ("Set of Marks"). Pure.

The numbers are those of `envd.desktop.a11y.with_marks`. They are drawn last, at one size however the picture is scaled.

Source: Yang et al., "Set-of-Mark Prompting Unleashes Extraordinary Visual Grounding in GPT-4V", arXiv:2310.11441.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from cuaenv.region import Region
from envd.desktop.observation import Elements

_FONT_PX = 12
_PADDING_PX = 1
#: Dark enough for white numbers; consecutive colours differ.
_COLOURS = ((200, 30, 30), (20, 90, 200), (10, 120, 50), (150, 40, 160), (170, 85, 0), (0, 110, 120))

Box = tuple[int, int, int, int]
"""(left, top, right, bottom), the last two exclusive."""


class Mark(NamedTuple):
    """A number and the region of the screen that it marks."""

    number: int
    box: Region


def marks_of(elements: Elements | None) -> tuple[Mark, ...]:
    """Return the marks of the elements that have one."""
    return tuple(Mark(element.mark, element.box) for element in elements.items if element.mark) if elements else ()


def draw_marks(rgb_HWC: npt.NDArray[np.uint8], marks: Sequence[Mark], *, region: Region) -> npt.NDArray[np.uint8]:
    """Return a picture of shape (height, width, 3) with marks drawn over it.

    Args:
        marks: Marks in pixels of the screen; those outside of `region` are skipped.
        region: The region of the screen that the picture shows.
    """
    image = Image.fromarray(rgb_HWC)
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(_FONT_PX)
    boxes = [(mark.number, box) for mark in marks if (box := _placed(mark.box, region, image.size)) is not None]
    for number, (left, top, right, bottom) in boxes:
        pen.rectangle((left, top, right - 1, bottom - 1), outline=_colour(number))
    labels: list[Box] = []
    for number, box in boxes:
        text = str(number)
        size = (round(pen.textlength(text, font)) + 2 * _PADDING_PX, _FONT_PX + 2 * _PADDING_PX)
        label = _label_box(box, size, image.size, labels)
        labels.append(label)
        pen.rectangle((label[0], label[1], label[2] - 1, label[3] - 1), fill=_colour(number))
        middle = ((label[0] + label[2]) / 2, (label[1] + label[3]) / 2)
        pen.text(middle, text, fill=(255, 255, 255), font=font, anchor="mm")
    return np.asarray(image)


def _colour(number: int) -> tuple[int, int, int]:
    return _COLOURS[number % len(_COLOURS)]


def _placed(box: Region, region: Region, size: tuple[int, int]) -> Box | None:
    """Return a box of the screen in pixels of the picture; None if it is outside."""
    across, down = size[0] / region.width_px, size[1] / region.height_px
    left = max(0, round((box.x_px - region.x_px) * across))
    top = max(0, round((box.y_px - region.y_px) * down))
    right = min(size[0], round((box.x_px + box.width_px - region.x_px) * across))
    bottom = min(size[1], round((box.y_px + box.height_px - region.y_px) * down))
    return (left, top, right, bottom) if left < right and top < bottom else None


def _label_box(box: Box, size: tuple[int, int], image_size: tuple[int, int], taken: Sequence[Box]) -> Box:
    """Return the box of the number: the first corner that does not overlap another number."""
    left, top, right, bottom = box
    # Right corners first: text in a box starts at its left.
    corners = ((right - size[0], top), (left, top), (right - size[0], bottom - size[1]), (left, bottom - size[1]))
    places = [_kept_within(corner, size, image_size) for corner in corners]
    return next((place for place in places if not any(_overlap(place, other) for other in taken)), places[0])


def _kept_within(corner: tuple[int, int], size: tuple[int, int], image_size: tuple[int, int]) -> Box:
    left = max(0, min(corner[0], image_size[0] - size[0]))
    top = max(0, min(corner[1], image_size[1] - size[1]))
    return left, top, left + size[0], top + size[1]


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
