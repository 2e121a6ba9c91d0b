"""Turn a frame into the requested image: crop, draw the pointer, scale, draw marks, compress. Pure.

Scaling equals that of a vision model's image processor, so that the processor has nothing left to do: bicubic with
antialiasing, and sizes by `cuaenv.frames.size`.
"""

import io
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import numpy.typing as npt
from PIL import Image

from cuaenv.frames import TiledImage
from cuaenv.frames.size import fit
from cuaenv.region import Region
from envd.base.errors import InvalidRequest
from envd.desktop.display.marks import Mark, draw_marks
from envd.desktop.display.rfb import CursorShape
from envd.desktop.observation import CursorMode, Encoding, ObservationOptions, Point

_FORMATS = {Encoding.PNG: "PNG", Encoding.JPEG: "JPEG", Encoding.WEBP: "WEBP"}


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
