"""Turn a frame into the requested image: crop, draw the pointer, scale, draw marks, compress. Pure.

Scaling equals that of a vision model's image processor, so that the processor has nothing left to do: bicubic with
antialiasing, and sizes by `cuaenv.frames.size`.

Marks are numbered boxes, so that a model can refer to elements by number ("Set of Marks"). The numbers are those of
`envd.desktop.a11y.with_marks`. They are drawn last, at one size however the picture is scaled.
Source: Yang et al., "Set-of-Mark Prompting Unleashes Extraordinary Visual Grounding in GPT-4V", arXiv:2310.11441.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from cuaenv.frames import TiledImage
from cuaenv.frames.size import fit
from cuaenv.region import Region
from envd.base.errors import InvalidRequest
from envd.desktop.display.rfb import CursorShape
from envd.desktop.observation import A11yElements, CursorMode, Encoding, ObservationOptions, Point

_FONT_PX = 12
_PADDING_PX = 1
#: Dark enough for white numbers; consecutive colours differ.
_COLOURS = ((200, 30, 30), (20, 90, 200), (10, 120, 50), (150, 40, 160), (170, 85, 0), (0, 110, 120))

Box = tuple[int, int, int, int]
"""(left, top, right, bottom), the last two exclusive."""

_FORMATS = {Encoding.PNG: "PNG", Encoding.JPEG: "JPEG", Encoding.WEBP: "WEBP"}


class Mark(NamedTuple):
    """A number and the region of the screen that it marks."""

    number: int
    box: Region


def marks_of(elements: A11yElements | None) -> tuple[Mark, ...]:
    """Return the marks of the elements that have one."""
    return tuple(Mark(element.mark, element.box) for element in elements.items if element.mark) if elements else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A guest's screen at one time."""

    frame_id: str
    """Identifies the pixels; the image's id."""
    image: TiledImage
    """The screen without the pointer, unless the guest draws it into its screen."""
    capture_time: datetime
    """Timezone-aware host time; the pixels are of this time or later."""
    cursor: CursorShape | None = None
    """The pointer's image; None if the guest draws it into its screen."""
    pointer: Point | None = None
    """The pointer's position, if its image is known."""

    @property
    def width_px(self) -> int:
        return self.image.width_px

    @property
    def height_px(self) -> int:
        return self.image.height_px

    @property
    def rgb_HWC(self) -> npt.NDArray[np.uint8]:  # noqa: N802 -- the array's axes
        """The pixels as a read-only array of shape (height, width, 3), 8-bit RGB."""
        return self.image.rgb_HWC()


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureSpec:
    """A checked description of an image to draw from a frame: equal pictures of one frame give equal images."""

    region: Region
    """Within the screen."""
    width_px: int
    height_px: int
    draws_pointer: bool
    marks: tuple[Mark, ...] = ()
    """Numbered boxes to draw over it."""

    @property
    def is_scaled(self) -> bool:
        """Whether its size differs from the region's."""
        return (self.width_px, self.height_px) != (self.region.width_px, self.region.height_px)

    def is_unscaled(self, frame: Frame) -> bool:
        """Whether it is the frame itself except for the pointer; drawing then takes microseconds."""
        is_whole = (self.region.width_px, self.region.height_px) == frame.image.size_px
        return is_whole and not self.is_scaled and not self.marks


def picture_of(
    frame: Frame, options: ObservationOptions, *, marks: tuple[Mark, ...] = (), field: str = "observation"
) -> PictureSpec:
    """Return the picture to draw from a frame. The pointer is drawn only if requested and its shape is known.

    Raises:
        InvalidRequest: The region has no pixel on the screen, or no size fits the limits.
    """
    region = _clip(options.region, frame, field)
    try:
        width_px, height_px = fit(
            region.width_px,
            region.height_px,
            max_width_px=options.max_width_px,
            max_height_px=options.max_height_px,
            max_pixel_count=options.max_pixel_count,
            multiple_px=options.size_multiple_px,
        )
    except ValueError as error:
        raise InvalidRequest(f"{field}.size_multiple_px", str(error)) from error
    has_pointer = frame.cursor is not None and frame.cursor.rgba_HWC.size > 0
    return PictureSpec(
        region=region,
        width_px=width_px,
        height_px=height_px,
        draws_pointer=has_pointer and options.cursor is CursorMode.DRAWN,
        marks=marks,
    )


def draw(frame: Frame, picture: PictureSpec) -> TiledImage:
    """Draw the image. Slow unless `is_unscaled`."""
    image = _with_pointer(frame) if picture.draws_pointer else frame.image
    if picture.is_unscaled(frame):
        return image
    is_whole = (picture.region.width_px, picture.region.height_px) == image.size_px
    rgb_HWC = image.rgb_HWC() if is_whole else image.part(picture.region)
    if picture.is_scaled:
        size = (picture.width_px, picture.height_px)
        rgb_HWC = np.asarray(Image.fromarray(rgb_HWC).resize(size, Image.Resampling.BICUBIC))
    if picture.marks:
        rgb_HWC = draw_marks(rgb_HWC, picture.marks, region=picture.region)
    return TiledImage.from_rgb(rgb_HWC)


def compress(image: TiledImage, encoding: Encoding, *, quality: int = 85) -> bytes:
    """Encode an image as PNG, JPEG or WebP. Slow."""
    buffer = io.BytesIO()
    picture = Image.fromarray(image.rgb_HWC())
    # PNG at level 1 is 13 % larger than at the default, and faster: little on text, much on photographs.
    # WebP at method 0: the default takes about 10 times as long for 10 % fewer bytes.
    picture.save(buffer, _FORMATS[encoding], quality=quality, compress_level=1, method=0)
    return buffer.getvalue()


def _clip(region: Region | None, frame: Frame, field: str) -> Region:
    if region is None:
        return Region(x_px=0, y_px=0, width_px=frame.width_px, height_px=frame.height_px)
    left, top = max(region.x_px, 0), max(region.y_px, 0)
    right = min(region.x_px + region.width_px, frame.width_px)
    bottom = min(region.y_px + region.height_px, frame.height_px)
    if left >= right or top >= bottom:
        raise InvalidRequest(
            f"{field}.region", f"{region} has no pixel of the {frame.width_px}x{frame.height_px} screen"
        )
    return Region(x_px=left, y_px=top, width_px=right - left, height_px=bottom - top)


def _with_pointer(frame: Frame) -> TiledImage:
    image, cursor, at = frame.image, frame.cursor, frame.pointer
    if cursor is None or at is None:
        return image
    shape_HWC = cursor.rgba_HWC
    left, top = at.x_px - cursor.hot_x_px, at.y_px - cursor.hot_y_px
    x, y = max(left, 0), max(top, 0)
    right, bottom = min(left + shape_HWC.shape[1], image.width_px), min(top + shape_HWC.shape[0], image.height_px)
    if x >= right or y >= bottom:
        return image
    covered = Region(x_px=x, y_px=y, width_px=right - x, height_px=bottom - y)
    tiles: dict[int, bytes] = {}
    for index, in_tile, in_covered in image.overlaps(covered):
        tile_HWC = image.tile_HWC(index).copy()
        over_HWC = shape_HWC[y - top : bottom - top, x - left : right - left][in_covered]
        below_HWC = tile_HWC[in_tile]
        # Colours are premultiplied by alpha; rounding as for 8 bits.
        mixed_HWC = over_HWC[..., :3] + (below_HWC * (255 - over_HWC[..., 3:].astype(np.uint16)) + 127) // 255
        below_HWC[...] = np.minimum(mixed_HWC, 255)
        tiles[index] = tile_HWC.tobytes()
    return image.with_tiles(tiles)


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
