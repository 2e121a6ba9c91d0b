"""Differences of two screens."""

from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuaenv.frames import TiledImage
from cuaenv.region import Region
from envd.desktop.display import change
from envd.desktop.display.change import around, merged, screen_change
from envd.desktop.display.frames import Frame


def shown(rgb_HWC: npt.NDArray[np.uint8]) -> Frame:
    image = TiledImage.from_rgb(rgb_HWC)
    return Frame(frame_id=image.image_id, image=image, capture_time=datetime(2026, 1, 2, tzinfo=UTC))


def grey(value: int, width_px: int = 320, height_px: int = 200) -> npt.NDArray[np.uint8]:
    return np.full((height_px, width_px, 3), value, np.uint8)


def test_equal_screens_have_not_changed() -> None:
    change = screen_change(shown(grey(9)), shown(grey(9)), grey=True)
    assert (change.changed_fraction, change.changed_regions, change.grey_difference) == (0.0, (), 0.0)


def test_the_fraction_counts_pixels_and_regions_are_minimal() -> None:
    before, after = grey(0), grey(0)
    after[10:20, 30:50] = 255  # in one tile
    after[100:101, 60:70, 1] = 1  # over two tiles, in one channel
    old, new = shown(before), shown(after)
    change = screen_change(old, new)
    assert change.changed_fraction == pytest.approx(210 / (320 * 200))
    assert change.base_frame_id == old.frame_id
    assert change.grey_difference is None
    assert set(change.changed_regions) == {
        Region(x_px=30, y_px=10, width_px=20, height_px=10),
        Region(x_px=60, y_px=100, width_px=10, height_px=1),
    }


def test_a_new_size_changes_everything() -> None:
    change = screen_change(shown(grey(0)), shown(grey(0, 100, 50)), grey=True)
    assert change.changed_fraction == 1.0
    assert change.changed_regions == (Region(x_px=0, y_px=0, width_px=100, height_px=50),)
    assert change.grey_difference == 0.0


def test_the_grey_difference_is_a_share_of_white() -> None:
    assert screen_change(shown(grey(0)), shown(grey(255)), grey=True).grey_difference == pytest.approx(1.0)
    assert screen_change(shown(grey(10)), shown(grey(61)), grey=True).grey_difference == pytest.approx(0.2)
    half = grey(0)
    half[:100] = 255
    assert screen_change(shown(grey(0)), shown(half), grey=True).grey_difference == pytest.approx(0.5, abs=0.01)


regions = st.builds(
    Region, x_px=st.integers(0, 50), y_px=st.integers(0, 50), width_px=st.integers(1, 30), height_px=st.integers(1, 30)
)


@given(st.lists(regions, max_size=20), st.integers(1, 20))
def test_merged_regions_contain_all_and_are_within_the_limit(parts: list[Region], limit: int) -> None:
    joined = merged(parts, limit=limit)
    assert len(joined) <= min(limit, len(parts))
    for part in parts:
        assert any(around([part, region]) == region for region in joined)


def test_the_time_to_merge_is_not_quadratic_in_the_number_of_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    comparisons = 0
    fits = change._fits

    def counted(one: Region, other: Region) -> bool:
        nonlocal comparisons
        comparisons += 1
        return fits(one, other)

    monkeypatch.setattr(change, "_fits", counted)
    regions = [Region(x_px=64 * x, y_px=64 * y, width_px=1, height_px=1) for y in range(25) for x in range(40)]
    assert merged(regions, limit=64) == (around(regions),)
    assert comparisons < 64 * 65


def test_adjacent_regions_are_merged() -> None:
    left, right = (Region(x_px=x, y_px=5, width_px=64, height_px=10) for x in (0, 64))
    assert merged([left, right], limit=9) == (Region(x_px=0, y_px=5, width_px=128, height_px=10),)
