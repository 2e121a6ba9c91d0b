"""Make a frame into what travels: crop, draw the pointer, scale, encode. Pure, and slow enough for a thread."""

import io
from dataclasses import dataclass

from PIL import Image

from envd.errors import InvalidRequest
from envd.guest.actions import Point
from envd.guest.observation import EncodedFrame, Encoding, Frame, ObservationOptions, Region
from envd.guest.rfb import CursorShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PointerImage:
    """The pointer as it is to be drawn."""

    at: Point
    shape: CursorShape


def encode_frame(frame: Frame, options: ObservationOptions, *, pointer: PointerImage | None = None) -> EncodedFrame:
    """Encode a frame as asked. The pointer is drawn only where its shape is known and `draw_cursor` is set.

    Scaling keeps the aspect ratio and never enlarges.

    Raises:
        InvalidRequest: The region has no pixel on the screen, or a number is out of range.
    """
    region = _clip(options.region, frame)
    size = _fit(region, options)
    data = b""
    if options.encoding is not Encoding.NONE:
        pixels_HWC = frame.rgb_HWC[
            region.y_px : region.y_px + region.height_px, region.x_px : region.x_px + region.width_px
        ]
        image = Image.fromarray(pixels_HWC)
        if pointer is not None and options.draw_cursor and pointer.shape.rgba_HWC.size:
            _draw_pointer(image, pointer, region)
        if image.size != size:
            image = image.resize(size, Image.Resampling.LANCZOS)
        data = _compress(image, options)
    return EncodedFrame(
        frame_id=frame.frame_id,
        width_px=size[0],
        height_px=size[1],
        screen_width_px=frame.width_px,
        screen_height_px=frame.height_px,
        capture_time=frame.capture_time,
        encoding=options.encoding,
        data=data,
    )


def _clip(region: Region | None, frame: Frame) -> Region:
    if region is None:
        return Region(x_px=0, y_px=0, width_px=frame.width_px, height_px=frame.height_px)
    left, top = max(region.x_px, 0), max(region.y_px, 0)
    right = min(region.x_px + region.width_px, frame.width_px)
    bottom = min(region.y_px + region.height_px, frame.height_px)
    if left >= right or top >= bottom:
        raise InvalidRequest(
            "observe.region", f"{region} has no pixel of the {frame.width_px}x{frame.height_px} screen"
        )
    return Region(x_px=left, y_px=top, width_px=right - left, height_px=bottom - top)


def _fit(region: Region, options: ObservationOptions) -> tuple[int, int]:
    if options.max_width_px < 0 or options.max_height_px < 0:
        raise InvalidRequest("observe.max_width_px", "a limit is positive, or 0 for none")
    scale = min(
        1.0,
        options.max_width_px / region.width_px if options.max_width_px else 1.0,
        options.max_height_px / region.height_px if options.max_height_px else 1.0,
    )
    return max(1, round(region.width_px * scale)), max(1, round(region.height_px * scale))


def _draw_pointer(image: Image.Image, pointer: PointerImage, region: Region) -> None:
    left = pointer.at.x_px - pointer.shape.hot_x_px - region.x_px
    top = pointer.at.y_px - pointer.shape.hot_y_px - region.y_px
    # "RGBa" is Pillow's name for colours multiplied by alpha; pasting wants them apart.
    shape = Image.frombytes("RGBa", pointer.shape.rgba_HWC.shape[1::-1], pointer.shape.rgba_HWC.tobytes())
    straight = shape.convert("RGBA")
    image.paste(straight, (left, top), mask=straight)


def _compress(image: Image.Image, options: ObservationOptions) -> bytes:
    buffer = io.BytesIO()
    if options.encoding is Encoding.JPEG:
        if not 1 <= options.jpeg_quality <= 100:
            raise InvalidRequest("observe.jpeg_quality", f"{options.jpeg_quality} is not within 1 to 100")
        image.save(buffer, "JPEG", quality=options.jpeg_quality)
    else:
        # Level 1: 13% larger than the default and faster; on text it hardly matters, on photographs it does.
        image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
