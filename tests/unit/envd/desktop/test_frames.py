"""Images of frames: cropped, scaled, with the pointer drawn, compressed."""

import io
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cuaenv.frames import TiledImage
from cuaenv.frames.size import fit
from cuaenv.region import Region
from envd.base.errors import InvalidRequest
from envd.desktop.display.frames import Frame, compress, draw, picture_of
from envd.desktop.display.rfb import CursorShape
from envd.desktop.observation import CursorMode, Encoding, ObservationOptions, Point

Pixels = npt.NDArray[np.uint8]


def gradient(width_px: int = 150, height_px: int = 100) -> Frame:
    rgb_HWC = np.zeros((height_px, width_px, 3), dtype=np.uint8)
    rgb_HWC[..., 0] = np.arange(width_px)[None, :]
    rgb_HWC[..., 1] = np.arange(height_px)[:, None]
    image = TiledImage.from_rgb(rgb_HWC)
    return Frame(frame_id=image.image_id, image=image, capture_time=datetime(2026, 1, 2, tzinfo=UTC))


@pytest.fixture
def frame() -> Frame:
    return gradient()


def arrow(*, alpha: int = 255, hot: tuple[int, int] = (0, 0)) -> CursorShape:
    rgba_HWC = np.full((4, 3, 4), alpha, dtype=np.uint8)  # white, premultiplied
    return CursorShape(*hot, rgba_HWC)


def drawn(frame: Frame, options: ObservationOptions) -> Pixels:
    return draw(frame, picture_of(frame, options)).rgb_HWC()


def test_a_png_keeps_every_pixel(frame: Frame) -> None:
    data = compress(frame.image, Encoding.PNG)
    assert data.startswith(b"\x89PNG")
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(data)).convert("RGB")), frame.rgb_HWC)


@pytest.mark.parametrize(("encoding", "magic"), [(Encoding.JPEG, b"\xff\xd8"), (Encoding.WEBP, b"RIFF")])
def test_lossy_encodings_are_close_and_quality_has_an_effect(encoding: Encoding, magic: bytes, frame: Frame) -> None:
    fine, coarse = compress(frame.image, encoding, quality=95), compress(frame.image, encoding, quality=5)
    assert fine.startswith(magic)
    seen = np.asarray(Image.open(io.BytesIO(fine)).convert("RGB")).astype(int)
    assert np.abs(seen - frame.rgb_HWC).mean() < 3
    assert len(coarse) < len(fine)


def test_an_unscaled_frame_without_pointer_is_the_frame_itself(frame: Frame) -> None:
    assert draw(frame, picture_of(frame, ObservationOptions())) is frame.image


def test_a_region_is_clipped_to_the_screen(frame: Frame) -> None:
    options = ObservationOptions(region=Region(x_px=60, y_px=-2, width_px=100, height_px=67))
    assert np.array_equal(drawn(frame, options), frame.rgb_HWC[0:65, 60:150])


@pytest.mark.parametrize(
    "region",
    [
        Region(x_px=150, y_px=0, width_px=1, height_px=1),
        Region(x_px=0, y_px=0, width_px=0, height_px=5),
        Region(x_px=0, y_px=0, width_px=5, height_px=-1),
        Region(x_px=-5, y_px=0, width_px=5, height_px=1),
    ],
)
def test_a_region_off_the_screen_is_a_bad_request(region: Region) -> None:
    with pytest.raises(InvalidRequest, match="150x100"):
        picture_of(gradient(), ObservationOptions(region=region))


@pytest.mark.parametrize(
    ("limits", "size"),
    [((75, 0), (75, 50)), ((0, 20), (30, 20)), ((75, 20), (30, 20)), ((1000, 1000), (150, 100)), ((1, 1), (1, 1))],
)
def test_scaling_keeps_the_aspect_ratio_and_never_enlarges(limits: tuple[int, int], size: tuple[int, int]) -> None:
    frame = gradient()
    options = ObservationOptions(max_width_px=limits[0], max_height_px=limits[1])
    picture = picture_of(frame, options)
    assert (picture.width_px, picture.height_px) == size
    assert drawn(frame, options).shape == (size[1], size[0], 3)


@pytest.mark.parametrize(
    ("screen", "multiple", "pixels", "size"),
    [
        # Results of transformers' smart_resize with the same factor and max_pixels.
        ((1920, 1080), 32, 1_003_520, (1312, 736)),
        ((1920, 1080), 28, 1_003_520, (1316, 728)),
        ((1280, 800), 28, 1_003_520, (1260, 784)),
        ((1280, 800), 32, 0, (1280, 800)),
        ((1366, 768), 32, 0, (1376, 768)),
        ((1366, 768), 32, 768 * 1376 - 1, (1344, 768)),
        ((1920, 1080), 0, 500_000, (942, 530)),
    ],
)
def test_a_pixel_limit_gives_the_size_of_a_models_processor(
    screen: tuple[int, int], multiple: int, pixels: int, size: tuple[int, int]
) -> None:
    assert fit(*screen, max_pixel_count=pixels, multiple_px=multiple) == size


@given(
    st.tuples(st.integers(1, 5000), st.integers(1, 5000)),
    st.tuples(st.one_of(st.just(0), st.integers(1, 5000)), st.one_of(st.just(0), st.integers(1, 5000))),
    st.one_of(st.just(0), st.integers(1, 5_000_000)),
    st.integers(0, 64),
)
def test_a_size_is_within_every_limit_or_rejected(
    screen: tuple[int, int], limits: tuple[int, int], max_pixels: int, multiple: int
) -> None:
    max_width, max_height = limits
    try:
        wide, high = fit(
            *screen, max_width_px=max_width, max_height_px=max_height, max_pixel_count=max_pixels, multiple_px=multiple
        )
    except ValueError:
        assert multiple > 1
        return
    assert min(wide, high) >= 1
    assert wide <= (max_width or 10_000)
    assert high <= (max_height or 10_000)
    assert wide * high <= (max_pixels or 10**9)
    assert wide % (multiple or 1) == high % (multiple or 1) == 0


def test_the_pointer_is_drawn_with_its_hot_spot_at_its_position_across_tiles(frame: Frame) -> None:
    pointed = replace(frame, cursor=arrow(hot=(1, 2)), pointer=Point(64, 65))
    seen = drawn(pointed, ObservationOptions()).copy()
    assert (seen[63:67, 63:66] == 255).all()
    assert np.array_equal(frame.rgb_HWC, gradient().rgb_HWC), "the frame itself is as it was"
    seen[63:67, 63:66] = frame.rgb_HWC[63:67, 63:66]
    assert np.array_equal(seen, frame.rgb_HWC), "nothing else changed"


def test_a_translucent_pointer_is_blended_with_the_screen(frame: Frame) -> None:
    seen = drawn(replace(frame, cursor=arrow(alpha=128), pointer=Point(100, 0)), ObservationOptions())
    assert seen[0, 100, 2] == pytest.approx(128, abs=1)
    assert seen[0, 100, 0] == pytest.approx(128 + 100 * 127 / 255, abs=1)


@pytest.mark.parametrize("at", [Point(0, 0), Point(149, 99), Point(149, 0)])
def test_a_pointer_at_the_edge_is_clipped(at: Point) -> None:
    seen = drawn(replace(gradient(), cursor=arrow(), pointer=at), ObservationOptions())
    assert seen[at.y_px, at.x_px].tolist() == [255, 255, 255]


def test_a_pointer_off_the_screen_draws_nothing(frame: Frame) -> None:
    pointed = replace(frame, cursor=arrow(hot=(10, 10)), pointer=Point(0, 0))
    assert draw(pointed, picture_of(pointed, ObservationOptions())) is frame.image


def test_the_pointer_moves_with_the_crop_and_is_drawn_only_on_request() -> None:
    frame = replace(gradient(), cursor=arrow(), pointer=Point(30, 30))
    region = Region(x_px=28, y_px=28, width_px=10, height_px=10)
    assert drawn(frame, ObservationOptions(region=region))[2, 2].tolist() == [255, 255, 255]
    for cursor in (CursorMode.HIDDEN, CursorMode.REPORTED):
        assert np.array_equal(drawn(frame, ObservationOptions(cursor=cursor)), frame.rgb_HWC)


def test_an_invisible_pointer_draws_nothing() -> None:
    shape = CursorShape(0, 0, np.zeros((0, 0, 4), dtype=np.uint8))
    frame = replace(gradient(), cursor=shape, pointer=Point(5, 5))
    seen = drawn(frame, ObservationOptions())
    assert np.array_equal(seen, frame.rgb_HWC)
