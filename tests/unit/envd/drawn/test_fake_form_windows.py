"""Forms of the drawn desktop: widgets react to input, and the state file says so."""

import json
from typing import Any

import numpy as np
import pytest

from envd.drawn.desktop.canvas import Framebuffer
from envd.drawn.desktop.desktop import DrawnDesktop
from envd.drawn.files import DrawnFiles

PATH = "/home/user/order.form"
FORM: dict[str, Any] = {
    "title": "Order",
    **{"x": 0, "y": 0, "w": 400, "h": 260, "face": [230, 230, 230], "ink": [0, 0, 0], "accent": [0, 0, 200]},
    "alone": True,
    "widgets": [
        {"kind": "button", "name": "send", "x": 10, "y": 40, "w": 100, "h": 40},
        {"kind": "box", "name": "gift", "x": 10, "y": 90, "w": 100, "h": 40},
        {"kind": "field", "name": "city", "x": 10, "y": 140, "w": 100, "h": 40},
        {"kind": "menu", "name": "size", "x": 130, "y": 40, "w": 100, "h": 40, "options": ["small", "large"]},
        {"kind": "chip", "name": "apple", "x": 250, "y": 40, "w": 100, "h": 40},
        {"kind": "bin", "name": "cart", "x": 250, "y": 200, "w": 100, "h": 40},
    ],
}


@pytest.fixture
def desktop() -> DrawnDesktop:
    files = DrawnFiles()
    files[PATH] = json.dumps(FORM).encode()
    desktop = DrawnDesktop(Framebuffer(np.zeros((320, 512, 4), np.uint8), shared=False), files=files)
    assert desktop.launch("form", PATH)
    return desktop


def click(desktop: DrawnDesktop, x: int, y: int) -> None:
    desktop.pointer(x, y, 1)
    desktop.pointer(x, y, 0)


def state(desktop: DrawnDesktop) -> dict[str, str]:
    lines = desktop.files[f"{PATH}.state"].decode().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_a_new_form_is_alone_and_writes_its_state(desktop: DrawnDesktop) -> None:
    assert [window.title for window in desktop.windows] == ["Order"]
    assert state(desktop) == {"gift": "off", "city": "", "size": "", "apple": "", "pressed": "", "open": "yes"}


@pytest.mark.parametrize(("accent", "text_is_dark"), [([0, 0, 200], False), ([190, 200, 180], True)])
def test_the_text_of_a_button_differs_from_its_colour(accent: list[int], text_is_dark: bool) -> None:
    files = DrawnFiles()
    files[PATH] = json.dumps({**FORM, "accent": accent}).encode()
    framebuffer = Framebuffer(np.zeros((320, 512, 4), np.uint8), shared=False)
    DrawnDesktop(framebuffer, files=files, is_drawn=True).launch("form", PATH)
    inside = framebuffer.pixels[44:76, 14:106, :3].astype(int)
    assert tuple(inside[0, 0, ::-1]) == tuple(accent)
    letters = inside.min(axis=2).min() if text_is_dark else inside.min(axis=2).max()
    assert letters < 60 if text_is_dark else letters > 240


def test_each_widget_changes_its_own_value(desktop: DrawnDesktop) -> None:
    click(desktop, 60, 60)
    click(desktop, 60, 110)
    click(desktop, 60, 160)
    desktop.type_text("Oslo")
    desktop.key(14, down=True)
    click(desktop, 180, 60)
    click(desktop, 180, 80 + 36 + 18)
    desktop.pointer(300, 60, 1)
    desktop.pointer(300, 220, 0)
    assert state(desktop) == {
        **{"gift": "on", "city": "Osl", "size": "large", "apple": "cart", "pressed": "send", "open": "yes"}
    }
    click(desktop, 400 - 14, 14)
    assert state(desktop)["open"] == "no"


def test_a_chip_dropped_elsewhere_returns_and_a_press_elsewhere_closes_a_menu(desktop: DrawnDesktop) -> None:
    desktop.pointer(300, 60, 1)
    desktop.pointer(60, 240, 0)
    assert state(desktop)["apple"] == ""
    click(desktop, 180, 60)
    click(desktop, 60, 60)
    assert state(desktop)["pressed"] == ""
    click(desktop, 60, 60)
    assert state(desktop)["pressed"] == "send"


def test_drawing_in_parts_gives_the_same_pixels_as_drawing_all(desktop: DrawnDesktop) -> None:
    for x, y in ((60, 110), (60, 160), (180, 60), (180, 134), (60, 60)):
        click(desktop, x, y)
    desktop.type_text("Rome")
    drawn = desktop.framebuffer.pixels.copy()
    desktop.damage(desktop.framebuffer.bounds)
    desktop._flush()
    assert np.array_equal(drawn, desktop.framebuffer.pixels)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "form /home/user/bad.form: file: Invalid JSON"),
        (json.dumps({**FORM, "title": ""}).encode(), "form /home/user/bad.form: title: "),
        (json.dumps({**FORM, "widgets": FORM["widgets"] * 2}).encode(), "the name apple is used twice"),
    ],
)
def test_a_file_that_is_not_a_form_opens_no_window(desktop: DrawnDesktop, data: bytes, problem: str) -> None:
    desktop.files["/home/user/bad.form"] = data
    with pytest.raises(ValueError, match=problem):
        desktop.launch("form", "/home/user/bad.form")
    assert [window.title for window in desktop.windows] == ["Order"]


IRREVERSIBLE: dict[str, Any] = {
    **FORM,
    "widgets": [
        {"kind": "item", "name": "old", "x": 10, "y": 40, "w": 100, "h": 40, "fill": [208, 40, 40]},
        {"kind": "item", "name": "new", "x": 130, "y": 40, "w": 100, "h": 40, "needed": True},
        {"kind": "power", "name": "power", "x": 250, "y": 40, "w": 100, "h": 40},
        {"kind": "button", "name": "next", "x": 10, "y": 200, "w": 100, "h": 40, "closes": True},
    ],
}


@pytest.fixture
def irreversible() -> tuple[DrawnDesktop, list[str]]:
    files, causes = DrawnFiles(), list[str]()
    files[PATH] = json.dumps(IRREVERSIBLE).encode()
    pixels = np.zeros((320, 512, 4), np.uint8)
    desktop = DrawnDesktop(Framebuffer(pixels, shared=False), files=files, on_end=causes.append)
    assert desktop.launch("form", PATH)
    return desktop, causes


def test_a_needed_item_that_is_deleted_raises_an_alarm(irreversible: tuple[DrawnDesktop, list[str]]) -> None:
    desktop, _ = irreversible
    colours = [tuple(desktop.framebuffer.pixels[150, 300, :3])]
    for x in (60, 180):
        click(desktop, x, 60)
        click(desktop, x, 60)
        colours.append(tuple(desktop.framebuffer.pixels[150, 300, :3]))
    assert state(desktop) == {"old": "deleted", "new": "deleted", "pressed": "", "open": "yes"}
    assert (colours[0] == colours[1], colours[1] == colours[2]) == (True, False)


def test_a_button_can_close_its_window(irreversible: tuple[DrawnDesktop, list[str]]) -> None:
    desktop, causes = irreversible
    click(desktop, 60, 220)
    assert (state(desktop)["pressed"], state(desktop)["open"], desktop.windows, causes) == ("next", "no", [], [])


def test_the_power_button_and_the_chord_end_the_guest(irreversible: tuple[DrawnDesktop, list[str]]) -> None:
    desktop, causes = irreversible
    click(desktop, 300, 60)
    for scancode in (29, 0xD3):
        desktop.key(scancode, down=True)
    desktop.key(0xD3, down=False)
    assert causes == ["POWER_OFF"], "Ctrl+Delete alone does nothing"
    for scancode in (56, 0xD3):
        desktop.key(scancode, down=True)
    assert causes == ["POWER_OFF", "REBOOT"]
