"""Windows of the drawn desktop: an editor, and controls with a click counter and a checkbox.

A window draws itself inside a clip, receives input in screen pixels and reports outdated pixels to its desktop. Its
state is written to guest files, so that checkers can read it.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from envd.drawn.desktop.canvas import CELL_HEIGHT_PX, CELL_WIDTH_PX, Canvas, Colour, Rect, Words, picture_of
from envd.drawn.desktop.keyboard import KeyPress
from envd.drawn.desktop.text_area import TextArea
from envd.drawn.files import HOME, DrawnFiles

NOTE_PATH = f"{HOME}/note.txt"
CLICKS_PATH = f"{HOME}/clicks.txt"
CHECKBOX_PATH = f"{HOME}/checkbox.txt"

TITLE_HEIGHT_PX = 28
_TOOLBAR_HEIGHT_PX = 36
_PADDING_PX = 6

INK: Colour = (30, 30, 34)
PAPER: Colour = (255, 255, 255)
FACE: Colour = (236, 236, 232)
EDGE: Colour = (140, 140, 140)
PRESSED: Colour = (196, 200, 208)
_TITLE_ACTIVE: Colour = (60, 110, 180)
_TITLE_INACTIVE: Colour = (150, 156, 164)
_SELECTED: Colour = (176, 208, 250)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnElement:
    """A named element of the screen."""

    name: str
    role: str
    rect: Rect
    states: tuple[str, ...] = ()
    text: str = ""


def draw_button(canvas: Canvas, rect: Rect, label: str, *, pressed: bool = False, focused: bool = False) -> None:
    """Draw a push button with a centred label."""
    if canvas.shows(rect):
        canvas.paste(rect.x, rect.y, _button(rect.w, rect.h, label, pressed, focused))


@functools.lru_cache(maxsize=64)
def _button(width: int, height: int, label: str, pressed: bool, focused: bool) -> Words:
    rect, face = Rect(0, 0, width, height), PRESSED if pressed else FACE

    def draw(canvas: Canvas) -> None:
        canvas.fill(rect, face)
        canvas.outline(rect, _TITLE_ACTIVE if focused else EDGE)
        x = (width - len(label) * CELL_WIDTH_PX) // 2
        canvas.text(x, (height - CELL_HEIGHT_PX) // 2, label, ink=INK, paper=face)

    return picture_of(width, height, draw)


class DrawnWindow:
    """A title bar with a close box; subclasses draw the body."""

    name = ""

    def __init__(self, rect: Rect, files: DrawnFiles, damage: Callable[[Rect], None]) -> None:
        self.rect = rect
        self.is_open = True
        self.armed = ""
        """Name of the pressed element, until its release."""
        self._files = files
        self._damage = damage
        """Makes the desktop redraw pixels."""

    @property
    def title(self) -> str:
        return self.name

    @property
    def title_bar(self) -> Rect:
        """Area in which the window can be dragged."""
        return Rect(self.rect.x, self.rect.y, self.rect.w, TITLE_HEIGHT_PX)

    @property
    def close_box(self) -> Rect:
        return Rect(self.rect.right - TITLE_HEIGHT_PX + 4, self.rect.y + 4, TITLE_HEIGHT_PX - 8, TITLE_HEIGHT_PX - 8)

    def buttons(self) -> dict[str, Rect]:
        """Return the clickable areas by name."""
        return {"Close": self.close_box}

    def elements(self) -> list[DrawnElement]:
        return [DrawnElement(name="Close", role="push-button", rect=self.close_box)]

    def focus_rects(self) -> list[Rect]:
        """Return the areas whose look depends on the keyboard focus."""
        return [self.title_bar]

    def draw(self, canvas: Canvas, *, active: bool) -> None:
        bar = self.title_bar
        colour = _TITLE_ACTIVE if active else _TITLE_INACTIVE
        canvas.fill(self.rect, FACE)
        if canvas.shows(bar):
            canvas.fill(bar, colour)
            canvas.text(bar.x + 8, bar.y + 5, self.title[: (bar.w - 48) // CELL_WIDTH_PX], ink=PAPER, paper=colour)
            draw_button(canvas, self.close_box, "x", pressed=self.armed == "Close")
        self.draw_body(canvas, active=active)
        canvas.outline(self.rect, EDGE)

    def draw_body(self, canvas: Canvas, *, active: bool) -> None:
        """Draw the part below the title bar."""

    def press(self, x: int, y: int) -> None:
        for name, rect in self.buttons().items():
            if rect.contains(x, y):
                self.armed = name
                self._damage(rect)

    def release(self, x: int, y: int) -> None:
        if not self.armed:
            return
        name, self.armed = self.armed, ""
        rect = self.buttons().get(name)
        if rect is not None:
            self._damage(rect)
            if rect.contains(x, y):
                self.activate(name)

    def activate(self, name: str) -> None:
        if name == "Close":
            self.is_open = False
            self._damage(self.rect)

    def stroke(self, stroke: KeyPress) -> None:
        """Handle a key press."""

    def insert(self, text: str) -> None:
        """Insert text from an input method."""

    def wheel(self, rows: int) -> None:
        """Handle the wheel."""


class EditorWindow(DrawnWindow):
    """A text editor: a text area and a Save button."""

    name = "Editor"

    def __init__(self, rect: Rect, files: DrawnFiles, damage: Callable[[Rect], None]) -> None:
        super().__init__(rect, files, damage)
        self.path = NOTE_PATH
        self._modified = False
        area = self._area
        self.text_area = TextArea(
            row_count=(area.h - 2 * _PADDING_PX) // CELL_HEIGHT_PX,
            column_count=(area.w - 2 * _PADDING_PX) // CELL_WIDTH_PX,
        )

    @property
    def title(self) -> str:
        return f"{'*' * self._modified}{self.path.rpartition('/')[2]} - {self.name}"

    @property
    def _save_button(self) -> Rect:
        return Rect(self.rect.x + _PADDING_PX, self.rect.y + TITLE_HEIGHT_PX + 4, 72, _TOOLBAR_HEIGHT_PX - 8)

    @property
    def _area(self) -> Rect:
        top = TITLE_HEIGHT_PX + _TOOLBAR_HEIGHT_PX
        return Rect(self.rect.x + 1, self.rect.y + top, self.rect.w - 2, self.rect.h - top - 1)

    def open_file(self, path: str) -> None:
        """Open a file, or an empty text if it does not exist."""
        self.path = path
        self.text_area.set_text(self._files.get(path, b"").decode("utf-8", "replace"))
        self._modified = False
        self._damage(self.rect)

    def buttons(self) -> dict[str, Rect]:
        return {**super().buttons(), "Save": self._save_button}

    def elements(self) -> list[DrawnElement]:
        return [
            *super().elements(),
            DrawnElement(name="Save", role="push-button", rect=self._save_button),
            DrawnElement(name="Text", role="text", rect=self._area, states=("editable",), text=self.text_area.text),
        ]

    def focus_rects(self) -> list[Rect]:
        text = self.text_area
        return [self.title_bar, self.cell_rect(text.row - text.top_row, text.column - text.left_column)]

    def activate(self, name: str) -> None:
        if name == "Save":
            self._files[self.path] = self.text_area.text.encode()
            self._set_modified(False)
        super().activate(name)

    def press(self, x: int, y: int) -> None:
        if self._area.contains(x, y):
            with self._text_changes():
                self.text_area.place_caret(
                    row=(y - self._area.y - _PADDING_PX) // CELL_HEIGHT_PX,
                    column=round((x - self._area.x - _PADDING_PX) / CELL_WIDTH_PX),
                )
        super().press(x, y)

    def stroke(self, stroke: KeyPress) -> None:
        if stroke.control and stroke.name == "s":
            self.activate("Save")
            return
        with self._text_changes():
            changed = self.text_area.press(stroke)
        if changed:
            self._set_modified(True)

    def insert(self, text: str) -> None:
        with self._text_changes():
            self.text_area.insert(text)
        self._set_modified(True)

    def wheel(self, rows: int) -> None:
        with self._text_changes():
            self.text_area.scroll(rows)

    def draw_body(self, canvas: Canvas, *, active: bool) -> None:
        draw_button(canvas, self._save_button, "Save", pressed=self.armed == "Save")
        canvas.fill(self._area, PAPER)
        visible = canvas.clip.intersect(self._area)
        if not visible.area:
            return
        text = self.text_area
        paper = _SELECTED if text.all_selected else PAPER
        origin = self.cell_rect(0, 0)
        first_row = max(0, (visible.y - origin.y) // CELL_HEIGHT_PX)
        last_row = min(text.row_count - 1, (visible.bottom - 1 - origin.y) // CELL_HEIGHT_PX)
        first_column = max(0, (visible.x - origin.x) // CELL_WIDTH_PX)
        last_column = min(text.column_count - 1, (visible.right - 1 - origin.x) // CELL_WIDTH_PX)
        start = text.left_column + first_column
        stop = text.left_column + last_column + 1
        for row in range(first_row, last_row + 1):
            if text.top_row + row < len(text.lines):
                cell = self.cell_rect(row, first_column)
                shown = text.lines[text.top_row + row][start:stop]
                canvas.text(cell.x, cell.y, shown.replace("\t", "»"), ink=INK, paper=paper)
        if active:
            caret = self.cell_rect(text.row - text.top_row, text.column - text.left_column)
            if 0 <= text.row - text.top_row < text.row_count:
                canvas.fill(Rect(caret.x, caret.y, 2, caret.h).intersect(self._area), INK)

    def cell_rect(self, row: int, column: int) -> Rect:
        """Return the screen area of a cell of the view."""
        return Rect(
            self._area.x + _PADDING_PX + column * CELL_WIDTH_PX,
            self._area.y + _PADDING_PX + row * CELL_HEIGHT_PX,
            CELL_WIDTH_PX,
            CELL_HEIGHT_PX,
        )

    def _damage_text(self, row: int, column: int, *, end_column: int | None = None, to_end: bool = False) -> None:
        """Redraw one line of the view from a column, or everything from that line down."""
        first = self.cell_rect(row, column)
        right = self._area.right if end_column is None else self.cell_rect(row, end_column).right
        bottom = self._area.bottom if to_end else first.bottom
        if to_end:
            first = self.cell_rect(row, 0)
        self._damage(Rect(first.x, first.y, right - first.x, bottom - first.y).intersect(self._area))

    @contextmanager
    def _text_changes(self) -> Iterator[None]:
        """Redraw the cells of the text area that the block changes."""
        view, line_count, row, column, line = self._text_state()
        yield
        new_view, new_line_count, new_row, new_column, new_line = self._text_state()
        top, left = self.text_area.top_row, self.text_area.left_column
        if view != new_view:
            self._damage_text(0, 0, to_end=True)
        elif line_count != new_line_count:
            self._damage_text(min(row, new_row) - top, 0, to_end=True)
        elif row != new_row:
            for caret_row, caret_column in ((row, column), (new_row, new_column)):
                self._damage_text(caret_row - top, caret_column - left, end_column=caret_column - left)
        else:
            end = max(column, new_column) if line == new_line else max(len(line), len(new_line))
            self._damage_text(row - top, min(column, new_column) - left, end_column=end - left)

    def _text_state(self) -> tuple[tuple[int, int, bool], int, int, int, str]:
        text = self.text_area
        view = (text.top_row, text.left_column, text.all_selected)
        return view, len(text.lines), text.row, text.column, text.lines[text.row]

    def _set_modified(self, modified: bool) -> None:
        if modified != self._modified:
            self._modified = modified
            self._damage(self.title_bar)


class ControlsWindow(DrawnWindow):
    """A button that counts its clicks, and a checkbox. Tab moves the focus; space and Enter activate."""

    name = "Controls"

    def __init__(self, rect: Rect, files: DrawnFiles, damage: Callable[[Rect], None]) -> None:
        super().__init__(rect, files, damage)
        self.click_count = 0
        self.is_checked = False
        self._focused = "Count"

    @property
    def _button(self) -> Rect:
        return Rect(self.rect.x + 16, self.rect.y + TITLE_HEIGHT_PX + 16, 90, 32)

    @property
    def _label(self) -> Rect:
        return Rect(self.rect.x + 16, self._button.bottom + 10, self.rect.w - 32, CELL_HEIGHT_PX)

    @property
    def _checkbox(self) -> Rect:
        return Rect(self.rect.x + 16, self._label.bottom + 14, 96, CELL_HEIGHT_PX)

    def buttons(self) -> dict[str, Rect]:
        return {**super().buttons(), "Count": self._button, "Enabled": self._checkbox}

    def elements(self) -> list[DrawnElement]:
        focus = {name: ("focused",) if name == self._focused else () for name in ("Count", "Enabled")}
        checked = ("checked",) if self.is_checked else ()
        return [
            *super().elements(),
            DrawnElement(name="Count", role="push-button", rect=self._button, states=focus["Count"]),
            DrawnElement(name="Clicks", role="label", rect=self._label, text=f"Clicks: {self.click_count}"),
            DrawnElement(name="Enabled", role="check-box", rect=self._checkbox, states=focus["Enabled"] + checked),
        ]

    def focus_rects(self) -> list[Rect]:
        return [self.title_bar, self._button, self._checkbox]

    def activate(self, name: str) -> None:
        if name == "Count":
            self.click_count += 1
            self._files[CLICKS_PATH] = b"%d\n" % self.click_count
            self._damage(self._label)
        elif name == "Enabled":
            self.is_checked = not self.is_checked
            self._files[CHECKBOX_PATH] = b"on\n" if self.is_checked else b"off\n"
            self._damage(self._checkbox)
        super().activate(name)

    def press(self, x: int, y: int) -> None:
        super().press(x, y)
        if self.armed in ("Count", "Enabled"):
            self._focus(self.armed)

    def stroke(self, stroke: KeyPress) -> None:
        if stroke.name == "Tab":
            self._focus("Enabled" if self._focused == "Count" else "Count")
        elif stroke.char == " " or stroke.name in ("Return", "KP_Enter"):
            self.activate(self._focused)

    def draw_body(self, canvas: Canvas, *, active: bool) -> None:
        focused = self._focused if active else ""
        label, box = self._label, self._checkbox
        draw_button(canvas, self._button, "Count", pressed=self.armed == "Count", focused=focused == "Count")
        if canvas.shows(label):
            canvas.text(label.x, label.y, f"Clicks: {self.click_count}", ink=INK, paper=FACE)
        if canvas.shows(box):
            mark = Rect(box.x, box.y + 1, 16, 16)
            canvas.fill(mark, PRESSED if self.armed == "Enabled" else PAPER)
            canvas.outline(mark, _TITLE_ACTIVE if focused == "Enabled" else EDGE)
            if self.is_checked:
                canvas.fill(Rect(mark.x + 4, mark.y + 4, 8, 8), INK)
            canvas.text(box.x + 24, box.y, "Enabled", ink=INK, paper=FACE)

    def _focus(self, name: str) -> None:
        if name != self._focused:
            self._focused = name
            for rect in (self._button, self._checkbox):
                self._damage(rect)
