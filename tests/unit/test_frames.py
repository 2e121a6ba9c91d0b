"""Frames as they travel: cropped, scaled, with the pointer drawn, encoded."""

import io
from datetime import UTC, datetime

import numpy as np
import pytest
from PIL import Image

from envd.errors import InvalidRequest
from envd.guest.actions import Point
from envd.guest.frames import PointerImage, encode_frame
from envd.guest.observation import EncodedFrame, Encoding, Frame, ObservationOptions, Region
from envd.guest.rfb import CursorShape


def gradient(width_px: int = 64, height_px: int = 48) -> Frame:
    rgb_HWC = np.zeros((height_px, width_px, 3), dtype=np.uint8)
    rgb_HWC[..., 0] = np.arange(width_px)[None, :]
    rgb_HWC[..., 1] = np.arange(height_px)[:, None]
    rgb_HWC.flags.writeable = False
    return Frame(frame_id="id", rgb_HWC=rgb_HWC, capture_time=datetime(2026, 1, 2, tzinfo=UTC))


def arrow(*, alpha: int = 255, hot: tuple[int, int] = (0, 0)) -> CursorShape:
    rgba_HWC = np.full((4, 3, 4), alpha, dtype=np.uint8)  # white, premultiplied
    return CursorShape(*hot, rgba_HWC)


def pixels(encoded: EncodedFrame) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.asarray(Image.open(io.BytesIO(encoded.data)).convert("RGB"))


def test_a_png_keeps_every_pixel() -> None:
    frame = gradient()
    encoded = encode_frame(frame, ObservationOptions())
    assert np.array_equal(pixels(encoded), frame.rgb_HWC)
    assert (encoded.width_px, encoded.height_px) == (64, 48)
    assert (encoded.screen_width_px, encoded.screen_height_px) == (64, 48)
    assert (encoded.frame_id, encoded.capture_time) == ("id", frame.capture_time)
    assert encoded.data.startswith(b"\x89PNG")


def test_a_jpeg_is_close_and_its_quality_counts() -> None:
    frame = gradient()
    fine = encode_frame(frame, ObservationOptions(encoding=Encoding.JPEG, jpeg_quality=95))
    coarse = encode_frame(frame, ObservationOptions(encoding=Encoding.JPEG, jpeg_quality=5))
    assert fine.data.startswith(b"\xff\xd8")
    assert np.abs(pixels(fine).astype(int) - frame.rgb_HWC).mean() < 3
    assert len(coarse.data) < len(fine.data)


def test_no_encoding_means_no_bytes_and_still_a_size() -> None:
    encoded = encode_frame(gradient(), ObservationOptions(encoding=Encoding.NONE, max_width_px=32))
    assert encoded.data == b""
    assert (encoded.width_px, encoded.height_px) == (32, 24)


def test_a_region_is_cropped_to_what_is_on_the_screen() -> None:
    frame = gradient()
    encoded = encode_frame(frame, ObservationOptions(region=Region(x_px=60, y_px=-2, width_px=10, height_px=5)))
    assert np.array_equal(pixels(encoded), frame.rgb_HWC[0:3, 60:64])


@pytest.mark.parametrize(
    "region",
    [
        Region(x_px=64, y_px=0, width_px=1, height_px=1),
        Region(x_px=0, y_px=0, width_px=0, height_px=5),
        Region(x_px=0, y_px=0, width_px=5, height_px=-1),
        Region(x_px=-5, y_px=0, width_px=5, height_px=1),
    ],
)
def test_a_region_off_the_screen_is_a_bad_request(region: Region) -> None:
    with pytest.raises(InvalidRequest, match="64x48"):
        encode_frame(gradient(), ObservationOptions(region=region))


@pytest.mark.parametrize(
    ("limits", "size"),
    [((32, 0), (32, 24)), ((0, 12), (16, 12)), ((32, 12), (16, 12)), ((1000, 1000), (64, 48)), ((1, 1), (1, 1))],
)
def test_scaling_keeps_the_shape_and_never_enlarges(limits: tuple[int, int], size: tuple[int, int]) -> None:
    encoded = encode_frame(gradient(), ObservationOptions(max_width_px=limits[0], max_height_px=limits[1]))
    assert (encoded.width_px, encoded.height_px) == size
    assert pixels(encoded).shape == (size[1], size[0], 3)


def test_the_pointer_is_drawn_with_its_hot_spot_on_its_place() -> None:
    frame = gradient()
    pointer = PointerImage(at=Point(10, 20), shape=arrow(hot=(1, 2)))
    drawn = pixels(encode_frame(frame, ObservationOptions(), pointer=pointer))
    assert (drawn[18:22, 9:12] == 255).all()
    assert np.array_equal(frame.rgb_HWC, gradient().rgb_HWC)
    drawn = drawn.copy()
    drawn[18:22, 9:12] = frame.rgb_HWC[18:22, 9:12]
    assert np.array_equal(drawn, frame.rgb_HWC)


def test_a_translucent_pointer_lets_the_screen_through() -> None:
    pointer = PointerImage(at=Point(0, 0), shape=arrow(alpha=128))
    drawn = pixels(encode_frame(gradient(), ObservationOptions(), pointer=pointer))
    assert drawn[0, 0, 2] == pytest.approx(128, abs=1)


@pytest.mark.parametrize("at", [Point(0, 0), Point(63, 47), Point(63, 0)])
def test_a_pointer_at_the_edge_is_cut_off(at: Point) -> None:
    drawn = pixels(encode_frame(gradient(), ObservationOptions(), pointer=PointerImage(at=at, shape=arrow())))
    assert drawn[at.y_px, at.x_px].tolist() == [255, 255, 255]


def test_the_pointer_moves_with_the_crop_and_is_not_drawn_unasked() -> None:
    pointer = PointerImage(at=Point(30, 30), shape=arrow())
    region = Region(x_px=28, y_px=28, width_px=10, height_px=10)
    drawn = pixels(encode_frame(gradient(), ObservationOptions(region=region), pointer=pointer))
    assert drawn[2, 2].tolist() == [255, 255, 255]
    plain = encode_frame(gradient(), ObservationOptions(draw_cursor=False), pointer=pointer)
    assert np.array_equal(pixels(plain), gradient().rgb_HWC)


def test_an_invisible_pointer_draws_nothing() -> None:
    shape = CursorShape(0, 0, np.zeros((0, 0, 4), dtype=np.uint8))
    drawn = pixels(encode_frame(gradient(), ObservationOptions(), pointer=PointerImage(at=Point(5, 5), shape=shape)))
    assert np.array_equal(drawn, gradient().rgb_HWC)


@pytest.mark.parametrize("quality", [0, 101, -1])
def test_a_quality_out_of_range_is_a_bad_request(quality: int) -> None:
    with pytest.raises(InvalidRequest, match="jpeg_quality"):
        encode_frame(gradient(), ObservationOptions(encoding=Encoding.JPEG, jpeg_quality=quality))
