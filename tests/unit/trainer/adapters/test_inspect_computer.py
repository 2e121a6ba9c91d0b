"""Calls of inspect_ai's program `computer` as actions."""

from datetime import timedelta

import pytest

from cuaenv.agent_text.values import ParseError
from cuaenv.client import Action, Click, Drag, MouseDown, MouseUp, Move, PressKeys, Scroll, TypeText, Wait
from trainer.adapters.inspect_computer import actions_of, read_call, region_of


@pytest.mark.parametrize(
    ("call", "actions"),
    [
        ("screenshot", []),
        ("zoom --region 1 2 3 4", []),
        ("left_click --coordinate 3 4", [Click(3, 4)]),
        ("triple_click", [Click(count=3)]),
        ("mouse_move --coordinate 3 4", [Move(3, 4)]),
        ("left_mouse_down", [MouseDown()]),
        ("left_mouse_up --coordinate 3 4", [MouseUp(3, 4)]),
        ("left_click_drag --start_coordinate 1 2 --coordinate 3 4", [Drag(1, 2, 3, 4)]),
        ("scroll --coordinate 3 4 --scroll_direction right --scroll_amount 5", [Scroll(dx=5, x=3, y=4)]),
        ("key --text ctrl+s", [PressKeys(("ctrl", "s"))]),
        ("hold_key --text a --duration 2", [PressKeys(("a",), timedelta(seconds=2))]),
        ("type --text hello", [TypeText("hello")]),
        ("wait --duration 1.5", [Wait(timedelta(seconds=1.5))]),
    ],
)
def test_a_call_becomes_actions(call: str, actions: list[Action]) -> None:
    assert actions_of(read_call(call.split())) == actions


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("navigate", "navigate is not available"),
        ("mouse_move", "coordinate must be"),
        ("scroll --scroll_amount 3", "scroll_direction must be"),
        ("scroll --scroll_direction up", "scroll_amount must be a number"),
        ("key", "text must be a text"),
        ("wait", "duration must be a number"),
        ("left_click --coordinate 3", "expected 2 arguments"),
    ],
)
def test_a_wrong_call_is_refused(call: str, error: str) -> None:
    with pytest.raises(ParseError, match=error):
        actions_of(read_call(call.split()))


def test_a_zoom_shows_the_pixels_of_the_screen_under_a_region_of_the_scaled_picture() -> None:
    call = read_call(["zoom", "--region", "10", "20", "30", "41"])
    assert region_of(call, picture=(640, 400), screen=(1280, 800)) == (20, 40, 40, 42)
    assert region_of(call, picture=(30, 41), screen=(100, 100)) == (33, 48, 67, 52)


@pytest.mark.parametrize("region", ["30 20 10 40", "10 40 30 20", "5 5 5 9", "-1 0 9 9", "0 0 641 9", "0 0 9 401"])
def test_a_region_outside_of_the_picture_is_the_models_mistake(region: str) -> None:
    call = read_call(["zoom", "--region", *region.split()])
    with pytest.raises(ParseError, match=r"is not a part of the picture.*at most \[0, 0, 640, 400\]"):
        region_of(call, picture=(640, 400), screen=(1280, 800))


def test_a_zoom_needs_a_region() -> None:
    with pytest.raises(ParseError, match="region None is not a part"):
        region_of(read_call(["zoom"]), picture=(640, 400), screen=(1280, 800))
