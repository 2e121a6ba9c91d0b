"""The drawn desktop without connections: effects of input on files and pixels."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envd.desktop.input.keysyms import character, named_key
from envd.drawn.desktop.canvas import Damage, Framebuffer, Rect, SharedPicture
from envd.drawn.desktop.desktop import DrawnDesktop
from envd.drawn.desktop.keyboard import DrawnKeyboard, scancode_of
from envd.drawn.desktop.windows import CHECKBOX_PATH, CLICKS_PATH, NOTE_PATH
from envd.drawn.files import DrawnFiles

SHIFT = 42
CONTROL = 29
ALT = 56


class Session:
    """A desktop with helpers for input."""

    def __init__(self, *, width_px: int = 640, height_px: int = 400) -> None:
        self.files = DrawnFiles()
        self.changed: list[Rect] = []
        pixels = np.zeros((height_px, width_px, 4), np.uint8)
        self.desktop = DrawnDesktop(Framebuffer(pixels, shared=False), files=self.files, on_change=self.changed.extend)
        self.changed.clear()

    @property
    def pixels(self) -> bytes:
        return self.desktop.framebuffer.pixels.tobytes()

    def press(self, scancode: int, *, held: tuple[int, ...] = ()) -> None:
        for code in (*held, scancode):
            self.desktop.key(code, down=True)
        for code in (scancode, *reversed(held)):
            self.desktop.key(code, down=False)

    def name(self, key: str, *, held: tuple[int, ...] = ()) -> None:
        stroke = named_key(key)
        assert stroke is not None
        self.press(stroke.key.scancode, held=held)

    def type(self, text: str) -> None:
        for char in text:
            stroke = character(char)
            assert stroke is not None, char
            self.press(stroke.key.scancode, held=(SHIFT,) if stroke.shift else ())

    def click(self, name: str, *, window: str = "", count: int = 1) -> None:
        x, y = self.desktop.element(name, window=window).rect.center
        for _ in range(count):
            for buttons in (0, 1, 0):
                self.desktop.pointer(x, y, buttons)

    def redraw(self) -> bytes:
        self.desktop.resize(self.desktop.framebuffer)
        return self.pixels


@pytest.fixture
def session() -> Session:
    return Session()


def test_the_start_picture_is_the_same_every_time() -> None:
    assert Session().pixels == Session().pixels
    assert len(np.unique(np.frombuffer(Session().pixels, np.uint32))) > 100


def test_text_typed_and_saved_with_the_button_is_in_the_file(session: Session) -> None:
    text = "Hello, World!\n\tTabs & (symbols) ~`'\"\\ 0123\n"
    session.type(text)
    assert NOTE_PATH not in session.files
    session.click("Save", window="Editor")
    assert session.files[NOTE_PATH] == text.encode()


def test_unicode_text_from_an_input_method_is_saved_as_utf_8(session: Session) -> None:
    session.desktop.type_text("€ é 漢字 😀")
    session.press(31, held=(CONTROL,))
    assert session.files[NOTE_PATH].decode() == "€ é 漢字 😀"
    assert session.desktop.element("note.txt - Editor", window="Editor")


def test_editing_keys_move_and_erase(session: Session) -> None:
    session.type("one\ntwo")
    for key in ("up", "home", "delete", "end", "backspace", "down", "left", "left", "left"):
        session.name(key)
    session.type("X")
    assert session.desktop.editor.text_area.text == "Xn\ntwo"
    session.press(30, held=(CONTROL,))
    session.type("z")
    assert session.desktop.editor.text_area.text == "z"


def test_a_click_in_the_text_places_the_caret(session: Session) -> None:
    session.type("abcdef")
    cell = session.desktop.editor.cell_rect(0, 2)
    for buttons in (1, 0):
        session.desktop.pointer(cell.x, cell.y + 4, buttons)
    session.type("-")
    assert session.desktop.editor.text_area.text == "ab-cdef"


def test_the_counter_counts_every_click_once(session: Session) -> None:
    assert session.files[CLICKS_PATH] == b"0\n"
    session.click("Count", window="Controls", count=7)
    assert session.files[CLICKS_PATH] == b"7\n"
    assert session.desktop.element("Clicks", window="Controls").text == "Clicks: 7"


def test_a_press_released_elsewhere_clicks_nothing(session: Session) -> None:
    x, y = session.desktop.element("Count", window="Controls").rect.center
    session.desktop.pointer(x, y, 1)
    session.desktop.pointer(x, y + 200, 1)
    session.desktop.pointer(x, y + 200, 0)
    assert session.files[CLICKS_PATH] == b"0\n"


def test_the_checkbox_and_the_counter_work_by_keyboard(session: Session) -> None:
    session.click("Enabled", window="Controls")
    assert session.files[CHECKBOX_PATH] == b"on\n"
    session.name("space")
    assert session.files[CHECKBOX_PATH] == b"off\n"
    session.name("tab")
    session.name("enter")
    assert session.files[CLICKS_PATH] == b"1\n"


def test_keys_go_to_the_window_that_was_clicked(session: Session) -> None:
    session.click("Count", window="Controls")
    session.type("abc")
    assert session.desktop.editor.text_area.text == ""
    session.click("Text", window="Editor")
    session.type("abc")
    assert session.desktop.editor.text_area.text == "abc"


def test_a_closed_window_is_hidden_until_it_is_launched(session: Session) -> None:
    before = session.pixels
    session.click("Close", window="Editor")
    assert [window.name for window in session.desktop.windows] == ["Controls"]
    session.click("Editor")
    assert [window.name for window in session.desktop.windows] == ["Controls", "Editor"]
    assert session.pixels == before
    session.name("f4", held=(ALT,))
    assert [window.name for window in session.desktop.windows] == ["Controls"]


def test_a_window_is_dragged_by_its_title_bar(session: Session) -> None:
    before = session.desktop.editor.rect
    x, y = before.x + 100, before.y + 10
    for point in ((x, y), (x + 30, y + 20), (x + 50, y + 60)):
        session.desktop.pointer(*point, 1)
    session.desktop.pointer(x + 50, y + 60, 0)
    session.desktop.pointer(x, y, 0)
    after = session.desktop.editor.rect
    assert (after.x - before.x, after.y - before.y) == (50, 60)


def test_the_wheel_scrolls_the_text(session: Session) -> None:
    session.type("\n" * 40)
    top = session.desktop.editor.text_area.top_row
    x, y = session.desktop.element("Text", window="Editor").rect.center
    for buttons in (8, 0, 8, 0, 16, 0):
        session.desktop.pointer(x, y, buttons)
    assert session.desktop.editor.text_area.top_row == top - 3


def test_the_editor_opens_the_file_given_at_launch(session: Session) -> None:
    session.files["/home/user/list.txt"] = b"milk\n"
    assert session.desktop.launch("editor", "/home/user/list.txt")
    session.name("end", held=(CONTROL,))
    session.type("bread")
    session.press(31, held=(CONTROL,))
    assert session.files["/home/user/list.txt"] == b"milk\nbread"
    assert not session.desktop.launch("no-such-program")


def test_one_key_changes_a_few_pixels_only(session: Session) -> None:
    session.type("a")
    session.changed.clear()
    session.type("b")
    assert 0 < sum(rect.area for rect in session.changed) < 1000


def test_ignored_input_draws_nothing(session: Session) -> None:
    session.desktop.pointer(630, 200, 0)
    session.desktop.pointer(630, 200, 1)
    session.desktop.pointer(630, 200, 0)
    session.press(SHIFT)
    assert session.changed == []


def test_a_desktop_follows_a_resize(session: Session) -> None:
    session.desktop.resize(Framebuffer(np.zeros((600, 800, 4), np.uint8), shared=False))
    assert session.changed == [Rect(0, 0, 800, 600)]
    session.click("Count", window="Controls")
    assert session.files[CLICKS_PATH] == b"1\n"


EVENTS = st.one_of(
    st.tuples(st.just("point"), st.integers(0, 639), st.integers(0, 399), st.sampled_from([0, 1, 1, 8, 16])),
    st.tuples(st.just("press"), st.sampled_from([30, 28, 15, 14, 57, 0xC8, 0xD0, 0xCB, 0xC7, 0xCF, 0xD3, 0xD1])),
    st.tuples(st.just("held"), st.sampled_from([30, 31, 0xC7, 0xCF])),
    st.tuples(st.just("type"), st.text(max_size=60)),
    st.tuples(st.just("click"), st.sampled_from(["Editor", "Controls"])),
)


@settings(max_examples=60)
@given(st.lists(EVENTS, max_size=25))
def test_a_partial_redraw_gives_the_same_picture_as_a_full_one(events: list[tuple[str, int, int, int]]) -> None:
    session = Session()
    for kind, *arguments in events:
        match kind, arguments:
            case "point", [x, y, buttons]:
                session.desktop.pointer(x, y, buttons)
            case "press", [code]:
                session.press(code)
            case "held", [code]:
                session.press(code, held=(CONTROL,))
            case "type", [text]:
                session.desktop.type_text(str(text))
            case "click", [name]:
                session.click(str(name))
    incremental = session.pixels
    assert incremental == session.redraw()


def test_a_keysym_only_selects_a_key_as_in_qemu() -> None:
    keyboard = DrawnKeyboard()
    assert scancode_of(ord("A")) == scancode_of(ord("a")) == 30
    assert scancode_of(ord("€")) is None
    stroke = keyboard.event(30, down=True)
    assert stroke is not None
    assert stroke.char == "a"
    keyboard.event(SHIFT, down=True)
    shifted = keyboard.event(30, down=True)
    assert shifted is not None
    assert shifted.char == "A"


@pytest.mark.parametrize("char", [chr(code) for code in range(32, 127)])
def test_every_key_of_the_layout_types_its_character(char: str) -> None:
    stroke = character(char)
    assert stroke is not None
    keyboard = DrawnKeyboard()
    if stroke.shift:
        keyboard.event(SHIFT, down=True)
    pressed = keyboard.event(stroke.key.scancode, down=True)
    assert pressed is not None
    assert pressed.char == char


def test_damage_keeps_few_rectangles_and_loses_nothing() -> None:
    damage = Damage()
    rects = [Rect(10 * index, 7 * index % 50, 5, 5) for index in range(100)]
    for rect in rects:
        damage.add(rect)
        assert len(damage.rects) <= Damage.LIMIT
    kept = damage.take()
    assert all(any(big.intersect(rect) == rect for big in kept) for rect in rects)
    assert damage.take() == []


def test_framebuffers_share_a_picture_until_they_draw() -> None:
    picture = SharedPicture(np.full((100, 200, 4), 7, np.uint8))
    first, second = (Framebuffer.on(picture) for _ in range(2))
    assert first.private_bytes == 0
    assert first.picture() is picture, "no new picture without drawing"
    first.canvas(Rect(0, 10, 50, 5)).fill(Rect(0, 0, 200, 100), (1, 2, 3))
    assert first.private_bytes == 5 * 200 * 4
    assert first.pixels[12, 3].tolist() == [3, 2, 1, 0]
    assert (second.pixels == 7).all()
    assert (first.pixels[9] == 7).all()
    drawn = first.picture()
    assert drawn is not picture
    assert (Framebuffer.on(drawn).pixels == first.pixels).all()
    assert first.picture() is drawn
