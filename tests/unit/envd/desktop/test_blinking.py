"""Blinking is learned and recognized elsewhere; effects of input are not."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cuaenv.region import Region
from envd.desktop.display.screen import Blinking

CARET = Region(x_px=10, y_px=20, width_px=1, height_px=16)
ON: npt.NDArray[np.uint32] = np.zeros((16, 1), np.uint32)
OFF: npt.NDArray[np.uint32] = np.full((16, 1), 0xFFFFFF, np.uint32)


def learnt() -> Blinking:
    blinking = Blinking()
    assert not blinking.note(CARET, OFF, ON)
    assert not blinking.note(CARET, ON, OFF)
    assert blinking.note(CARET, OFF, ON)
    return blinking


def test_a_caret_is_learned_at_its_third_change() -> None:
    assert learnt().note(CARET, ON, OFF)


def test_a_learned_caret_is_recognized_in_another_region() -> None:
    assert learnt().note(Region(x_px=300, y_px=7, width_px=1, height_px=16), OFF, ON)


def test_other_pixels_in_the_same_region_are_content() -> None:
    blinking = learnt()
    assert not blinking.note(CARET, ON, np.full((16, 1), 0x123456, np.uint32))
    assert not blinking.note(Region(x_px=10, y_px=20, width_px=2, height_px=8), OFF, ON)


def test_a_clock_is_not_blinking() -> None:
    blinking = Blinking()
    faces = [np.full((16, 1), value, np.uint32) for value in range(10)]
    assert not any(blinking.note(CARET, before, after) for before, after in pairwise(faces))


def test_changes_between_inputs_are_not_learned() -> None:
    blinking = Blinking()
    before, after = OFF, ON
    for _ in range(10):
        assert not blinking.note(CARET, before, after)
        blinking.interrupted()  # a checkbox that is ticked and cleared
        before, after = after, before


def test_large_changes_are_content() -> None:
    blinking = Blinking()
    region = Region(x_px=0, y_px=0, width_px=40, height_px=40)
    white, black = np.full((40, 40), 0xFFFFFF, np.uint32), np.zeros((40, 40), np.uint32)
    assert not any(blinking.note(region, *faces) for faces in [(white, black), (black, white)] * 5)


def test_memory_is_bounded() -> None:
    blinking = Blinking()
    for x in range(1000):
        for before, after in [(OFF, ON), (ON, OFF), (OFF, ON)]:
            blinking.note(Region(x_px=x, y_px=0, width_px=1, height_px=16), before ^ np.uint32(x), after ^ np.uint32(x))
        blinking.note(Region(x_px=x, y_px=99, width_px=1, height_px=16), OFF, np.full((16, 1), x + 7, np.uint32))
    assert len(blinking._known) <= 64
    assert len(blinking._candidates) <= 64
