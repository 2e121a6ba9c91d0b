"""Text of the editor: lines, caret and visible part. Pure: no pixels.

Lines do not wrap; the view scrolls sideways. The only possible selection is the entire text.
"""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from envd.drawn.desktop.keyboard import KeyPress
from envd.drawn.parts import Index, StatePart

_SCROLL_COLUMNS = 16


@dataclass(slots=True, kw_only=True, eq=False)
class TextArea(StatePart):
    """Editable text with a view of `row_count` by `column_count` cells."""

    row_count: Index
    column_count: Index
    lines: Annotated[list[str], Field(min_length=1)] = field(default_factory=lambda: [""])
    row: Index = 0
    column: Index = 0
    """The caret's position in the text."""
    top_row: Index = 0
    left_column: Index = 0
    """The first visible cell."""
    all_selected: bool = False

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def set_text(self, text: str) -> None:
        self.lines = text.split("\n")
        self.row = self.column = 0
        self.top_row = self.left_column = 0
        self.all_selected = False

    def place_caret(self, *, row: int, column: int) -> None:
        """Move the caret to a cell of the view, or to the nearest position in the text."""
        self.all_selected = False
        self.row = min(max(0, self.top_row + row), len(self.lines) - 1)
        self.column = min(max(0, self.left_column + column), len(self.lines[self.row]))

    def scroll(self, rows: int) -> None:
        self.top_row = min(max(0, self.top_row + rows), len(self.lines) - 1)

    def insert(self, text: str) -> None:
        """Insert at the caret; replaces the entire text if it is selected."""
        self._drop_selection()
        line = self.lines[self.row]
        head, tail = line[: self.column], line[self.column :]
        new = (head + text).split("\n")
        self.column = len(new[-1])
        new[-1] += tail
        self.lines[self.row : self.row + 1] = new
        self.row += len(new) - 1
        self._show_caret()

    def press(self, stroke: KeyPress) -> bool:
        before = (len(self.lines), self.lines[self.row], self.all_selected)
        if stroke.char:
            self.insert(stroke.char)
        elif stroke.name in ("Return", "KP_Enter"):
            self.insert("\n")
        elif stroke.name == "Tab":
            self.insert("\t")
        elif stroke.control and stroke.name == "a":
            self.all_selected = True
            return False
        elif stroke.name in ("BackSpace", "Delete"):
            self._erase(forward=stroke.name == "Delete")
        else:
            self._move(stroke)
            return False
        return before != (len(self.lines), self.lines[self.row], self.all_selected)

    def _drop_selection(self) -> bool:
        selected = self.all_selected
        if selected:
            self.set_text("")
        return selected

    def _erase(self, *, forward: bool) -> None:
        if self._drop_selection():
            return
        if not forward and not self._step(-1):
            return
        line = self.lines[self.row]
        if self.column < len(line):
            self.lines[self.row] = line[: self.column] + line[self.column + 1 :]
        elif self.row + 1 < len(self.lines):
            self.lines[self.row] += self.lines.pop(self.row + 1)
        self._show_caret()

    def _step(self, direction: int) -> bool:
        column = self.column + direction
        if 0 <= column <= len(self.lines[self.row]):
            self.column = column
        elif 0 <= self.row + direction < len(self.lines):
            self.row += direction
            self.column = 0 if direction > 0 else len(self.lines[self.row])
        else:
            return False
        return True

    def _move(self, stroke: KeyPress) -> None:
        match stroke.name:
            case "Left":
                self._step(-1)
            case "Right":
                self._step(1)
            case "Home":
                self.column = 0
                self.row = 0 if stroke.control else self.row
            case "End":
                self.row = len(self.lines) - 1 if stroke.control else self.row
                self.column = len(self.lines[self.row])
            case "Up" | "Down" | "Page_Up" | "Page_Down":
                rows = self.row_count if stroke.name.startswith("Page") else 1
                self.row += -rows if stroke.name.endswith("Up") else rows
                self.row = min(max(0, self.row), len(self.lines) - 1)
                self.column = min(self.column, len(self.lines[self.row]))
            case _:
                return
        self.all_selected = False
        self._show_caret()

    def _show_caret(self) -> None:
        self.top_row = min(max(self.top_row, self.row - self.row_count + 1), self.row)
        if not self.left_column <= self.column < self.left_column + self.column_count:
            # In steps of several columns: scrolling one at a time would redraw the view for each key.
            past = self.column - self.column_count + _SCROLL_COLUMNS
            self.left_column = 0 if self.column < self.column_count else past // _SCROLL_COLUMNS * _SCROLL_COLUMNS
