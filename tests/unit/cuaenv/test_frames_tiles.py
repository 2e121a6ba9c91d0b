"""Images as grids of tiles: exact, and cheap if they have much in common."""

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cuaenv.frames import TiledImage
from cuaenv.frames.grid import TILE_PX, bounds_of, joined
from cuaenv.region import Region

Pixels = npt.NDArray[np.uint8]


def noise(width_px: int, height_px: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height_px, width_px, 3), dtype=np.uint8)


sides = st.integers(1, 200)


@given(sides, sides, st.integers(0, 3))
def test_an_image_returns_the_pixels_it_was_made_from(width_px: int, height_px: int, seed: int) -> None:
    rgb_HWC = noise(width_px, height_px, seed)
    image = TiledImage.from_rgb(rgb_HWC)
    assert image.size_px == (width_px, height_px)
    assert np.array_equal(image.rgb_HWC(), rgb_HWC)
    assert not image.rgb_HWC().flags.writeable
    assert sum(len(image.tile(i)) for i in range(image.tile_count)) == rgb_HWC.size


@settings(max_examples=50)
@given(sides, sides, st.data())
def test_a_part_is_a_slice(width_px: int, height_px: int, data: st.DataObject) -> None:
    rgb_HWC = noise(width_px, height_px)
    x, y = data.draw(st.integers(0, width_px - 1)), data.draw(st.integers(0, height_px - 1))
    w, h = data.draw(st.integers(1, width_px - x)), data.draw(st.integers(1, height_px - y))
    part = TiledImage.from_rgb(rgb_HWC).part(Region(x_px=x, y_px=y, width_px=w, height_px=h))
    assert np.array_equal(part, rgb_HWC[y : y + h, x : x + w])


def test_the_id_follows_the_published_formula_and_the_shape() -> None:
    rgb_HWC = noise(100, 70)
    parts = [rgb_HWC[:64, :64], rgb_HWC[:64, 64:], rgb_HWC[64:, :64], rgb_HWC[64:, 64:]]
    digests = b"".join(xxhash.xxh3_128(part.tobytes()).digest() for part in parts)
    assert TiledImage.from_rgb(rgb_HWC).image_id == xxhash.xxh3_128(b"100x70" + digests).hexdigest()
    flat = np.zeros((64, 128, 3), np.uint8)
    assert TiledImage.from_rgb(flat).image_id != TiledImage.from_rgb(flat.reshape(128, 64, 3)).image_id


@settings(max_examples=50)
@given(sides, sides, st.data())
def test_changes_are_found_by_tile(width_px: int, height_px: int, data: st.DataObject) -> None:
    before = noise(width_px, height_px)
    after = before.copy()
    expected = set()
    columns = -(-width_px // TILE_PX)
    for _ in range(data.draw(st.integers(0, 4))):
        x, y = data.draw(st.integers(0, width_px - 1)), data.draw(st.integers(0, height_px - 1))
        after[y, x] = before[y, x] ^ 1
        expected.add(y // TILE_PX * columns + x // TILE_PX)
    old, new = TiledImage.from_rgb(before), TiledImage.from_rgb(after)
    changed = new.changed_tiles(old)
    assert changed == sorted(expected)
    patched = old.with_tiles({index: new.tile(index) for index in changed})
    assert patched.image_id == new.image_id
    assert np.array_equal(patched.rgb_HWC(), after)
    assert np.array_equal(old.rgb_HWC(), before), "images never change"
    untouched = next((i for i in range(new.tile_count) if i not in expected), None)
    assert untouched is None or patched.tile(untouched) is old.tile(untouched), "equal tiles are shared"


@pytest.mark.parametrize("channel", [0, 1, 2], ids=["red", "green", "blue"])
def test_a_pixel_that_differs_in_one_channel_is_found(channel: int) -> None:
    before_HWC = np.zeros((64, 64, 3), np.uint8)
    after_HWC = before_HWC.copy()
    after_HWC[7, 9, channel] = 1
    region, differs_HW = TiledImage.from_rgb(after_HWC).difference(TiledImage.from_rgb(before_HWC), 0)
    assert region == Region(x_px=9, y_px=7, width_px=1, height_px=1)
    assert differs_HW.tolist() == [[True]]


@given(st.sets(st.tuples(st.integers(0, 9), st.integers(0, 14)), max_size=6))
def test_bounds_are_the_smallest_around_all_marks(marks: set[tuple[int, int]]) -> None:
    marked_HW = np.zeros((10, 15), np.bool_)
    for row, column in marks:
        marked_HW[row, column] = True
    if not marks:
        assert bounds_of(marked_HW) is None
        return
    rows, columns = [row for row, _ in marks], [column for _, column in marks]
    assert bounds_of(marked_HW) == (min(rows), max(rows) + 1, min(columns), max(columns) + 1)


def region(x_px: int, y_px: int, width_px: int, height_px: int) -> Region:
    return Region(x_px=x_px, y_px=y_px, width_px=width_px, height_px=height_px)


@pytest.mark.parametrize(
    ("apart", "together"),
    [
        # A line of text over three tiles, with smaller letters in the last.
        ([(10, 70, 54, 16), (64, 70, 64, 16), (128, 72, 30, 12)], [(10, 70, 148, 16)]),
        # A gap of one pixel.
        ([(10, 70, 54, 16), (65, 70, 64, 16)], [(10, 70, 54, 16), (65, 70, 64, 16)]),
        # Adjacent, but at different heights: the joined region would contain many unchanged pixels.
        ([(0, 0, 64, 4), (64, 40, 64, 4)], [(0, 0, 64, 4), (64, 40, 64, 4)]),
        # The end of one row of tiles and the start of the next.
        ([(64, 0, 64, 64), (0, 64, 64, 64)], [(64, 0, 64, 64), (0, 64, 64, 64)]),
        ([(0, 60, 64, 4), (64, 64, 64, 4)], [(0, 60, 64, 4), (64, 64, 64, 4)]),
        ([(0, 0, 64, 64), (64, 64, 1, 1)], [(0, 0, 64, 64), (64, 64, 1, 1)]),
        ([], []),
    ],
)
def test_adjacent_regions_are_joined_if_that_adds_few_pixels(
    apart: list[tuple[int, int, int, int]], together: list[tuple[int, int, int, int]]
) -> None:
    assert joined(region(*box) for box in apart) == [region(*box) for box in together]
