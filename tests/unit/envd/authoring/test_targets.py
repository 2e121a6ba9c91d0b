"""Targets of oracles: what a press is recorded as, and where it is found again."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cuaenv.client import Element
from envd.authoring.targets import GuestScreen, locate, parse_boxes, target_at
from envd.tasks.oracle import Target
from envd.tasks.queries import OpenWindow

Box = tuple[int, int, int, int]


def element(role: str, name: str, box: Box, *states: str, depth: int = 1) -> Element:
    is_actionable = role not in ("frame", "panel", "label")
    return Element(role=role, name=name, box=box, states=states, depth=depth, is_actionable=is_actionable)


def editor(x: int, y: int, *states: str, title: str = "a.txt (1)") -> list[Element]:
    return [
        element("frame", title, (x, y, 400, 300), *states, depth=0),
        element("panel", "", (x, y, 400, 30)),
        element("push-button", "Save", (x + 10, y + 30, 60, 20)),
        element("push-button", "Save", (x + 90, y + 30, 60, 20)),
        element("label", "", (x + 200, y + 30, 60, 20)),
        element("text", "", (x, y + 60, 400, 240), "editable"),
    ]


DESKTOP = element("frame", "Desktop", (0, 0, 1280, 800), depth=0)


def window(title: str, box: Box) -> OpenWindow:
    return OpenWindow(window_id="0x01", wm_class="xterm.XTerm", title=title, box=box)


def screen(*elements: Element, windows: Sequence[OpenWindow] = ()) -> GuestScreen:
    return GuestScreen(elements=elements, windows=tuple(windows), size_px=(1280, 800))


TITLE = r"^a\.txt \(1\)$"


@pytest.mark.parametrize(
    ("place", "target"),
    [
        ((115, 235), Target(window=TITLE, role="push-button", name="Save", x=5, y=5)),
        # A second widget of the same name, and one without a name, are places in the window.
        ((195, 235), Target(window=TITLE, x=95, y=35)),
        ((310, 235), Target(window=TITLE, x=210, y=35)),
        ((120, 300), Target(window=TITLE, role="text", x=20, y=40)),
        ((300, 210), Target(window=TITLE, x=200, y=10)),
    ],
)
def test_a_press_is_found_again_where_the_window_moved(place: tuple[int, int], target: Target) -> None:
    assert target_at(place, screen(*editor(100, 200, "active"), DESKTOP)) == target
    moved = screen(*editor(500, 300, "active"), DESKTOP)
    assert locate(target, moved) == (place[0] + 400, place[1] + 100)


def test_a_smaller_widget_is_still_hit() -> None:
    target = Target(role="push-button", name="Save", x=50, y=18)
    small = screen(element("push-button", "Save", (7, 8, 20, 10), depth=0))
    assert locate(target, small) == (26, 17)
    assert locate(target, screen()) is None


def test_an_open_menu_covers_what_the_tree_has_later() -> None:
    shown = editor(100, 200, "active")
    shown.insert(1, element("menu-item", "Open", (110, 250, 90, 25)))
    target = target_at((120, 265), screen(*shown))
    assert target == Target(window=TITLE, role="menu-item", name="Open", x=10, y=15)
    popup = [element("menu", "", (120, 260, 90, 60), depth=0), element("menu-item", "Copy", (120, 260, 90, 30))]
    target = target_at((130, 270), screen(*shown, *popup))
    assert target == Target(role="menu-item", name="Copy", x=10, y=10)


def test_a_window_that_only_the_window_manager_knows_is_found_in_its_list() -> None:
    terminal = window("term", (50, 60, 300, 200))
    shown = screen(DESKTOP, windows=[window("Desktop", (0, 0, 1280, 800)), terminal])
    target = target_at((70, 90), shown)
    assert target == Target(window="^term$", x=20, y=30)
    moved = replace(shown, windows=(replace(terminal, box=(400, 300, 300, 200)),))
    assert locate(target, moved) == (420, 330)
    assert locate(target.model_copy(update={"role": "text"}), moved) is None
    shown = screen(windows=[window("term", (-50, -60, 300, 200))])
    assert locate(Target(window="^term$", x=70, y=90), shown) == (20, 30)


def test_what_lies_on_top_is_not_guessed() -> None:
    background, terminal = editor(100, 200), window("term", (110, 210, 300, 200))
    own = window("a.txt (1)", (100, 200, 400, 300))
    assert target_at((120, 235), screen(DESKTOP, *background, windows=[own, terminal])) is None
    named = target_at((120, 235), screen(DESKTOP, *background, windows=[own]))
    assert named == Target(window=TITLE, role="push-button", name="Save", x=10, y=5)
    # Covered by the terminal: nothing of the window behind it.
    behind = target_at((120, 235), screen(*background, windows=[terminal]))
    assert behind == Target(window="^term$", x=10, y=25)
    assert target_at((700, 700), screen(*background)) is None


def test_the_list_of_windows_is_parsed_with_titles_of_blanks_and_lines() -> None:
    listing = "0x01  0 10 20 300 200 xterm.XTerm  guest  a  b\n0x02 -1 0 0 1280 800 pcmanfm.Pcmanfm guest\nmore\n"
    assert list(parse_boxes(listing)) == [
        window("a b", (10, 20, 300, 200)),
        OpenWindow(window_id="0x02", wm_class="pcmanfm.Pcmanfm", title="", box=(0, 0, 1280, 800)),
    ]


@pytest.mark.parametrize(
    "box", [(-500, 200, 300, 200), (900, 4000, 300, 200), (10**30, 10, 9, 9), (70, 90, 0, 5), (70, 90, 40, -3)]
)
def test_a_window_that_claims_to_be_elsewhere_is_not_pressed(box: Box) -> None:
    claimed = window("term", box)
    assert locate(Target(window="^term$", x=20, y=30), screen(DESKTOP, windows=[claimed])) is None
    assert locate(Target(window="^term$", x=20, y=30), GuestScreen(windows=(claimed,))) in (None, (920, 4030))


def test_a_title_without_end_becomes_no_target() -> None:
    """It would make the recorded task as large as the guest likes."""
    (listed,) = parse_boxes(f"0x01  0 50 60 300 200 xterm.XTerm  guest  {'a' * (1 << 20)}\n")
    assert target_at((70, 90), screen(DESKTOP, windows=[listed])) is None
