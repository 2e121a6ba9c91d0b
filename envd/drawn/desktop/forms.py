"""Forms: windows of the drawn desktop whose widgets are described by a file, for suites with many layouts.

A form is a JSON file in the guest, opened by launching the program `form` with its path. The window writes its state to
the same path with `.state` appended: when it opens and after every change, so that checkers can read it.

```text
lemon: on          a box, a field, a menu or a chip, in the order of the file
pressed: kite rose buttons, in the order in which they were pressed
open: yes
```

Two widgets cannot be undone: an `item` is deleted by a click, and `power` ends the guest.
"""

from collections.abc import Callable
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cuaenv.problems import first_problem
from envd.drawn.desktop.canvas import CELL_HEIGHT_PX, CELL_WIDTH_PX, Canvas, Colour, Rect
from envd.drawn.desktop.keyboard import KeyPress
from envd.drawn.desktop.windows import EDGE, PRESSED, TITLE_HEIGHT_PX, DrawnElement, DrawnWindow
from envd.drawn.files import DrawnFiles

#: Texts are twice as large as those of other windows, so that they stay readable on small screens.
_SCALE = 2
_OPTION_HEIGHT_PX = CELL_HEIGHT_PX * _SCALE
_MARK_PX = 22
_PAPER: Colour = (255, 255, 255)
_INK: Colour = (20, 20, 24)
_ALARM: Colour = (216, 30, 30)
#: From this sum of red, green and blue on, a button's text is dark.
_LIGHT = 480
_DELETED = "deleted"

_Pixel = Annotated[int, Field(ge=0, le=4096)]
_Name = Annotated[str, Field(min_length=1, max_length=40, pattern=r"^[^\n:]+$")]
_ROLES = {
    "button": "push-button",
    "item": "push-button",
    "power": "push-button",
    "box": "check-box",
    "field": "text",
    "menu": "combo-box",
}


class Widget(BaseModel):
    """One widget; its place is relative to the window."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["button", "box", "field", "menu", "chip", "bin", "label", "item", "power"]
    """A `chip` can be dragged to a `bin`."""
    name: _Name
    x: _Pixel
    y: _Pixel
    w: _Pixel
    h: _Pixel
    text: Annotated[str, Field(max_length=65_536)] = ""
    locked: bool = False
    """Whether a field ignores clicks."""
    options: tuple[_Name, ...] = ()
    fill: Colour | None = None
    """A button or item in this colour without a text; None for its name."""
    closes: bool = False
    needed: bool = False
    """Whether the form shows an alarm once this item is deleted."""


class Form(BaseModel):
    """One window."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: _Name
    x: _Pixel
    y: _Pixel
    w: _Pixel
    h: _Pixel
    face: Colour
    ink: Colour
    accent: Colour
    """Colour of buttons, chips and the focus."""
    alone: bool = False
    """Close the other windows when it opens."""
    widgets: tuple[Widget, ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [widget.name for widget in self.widgets if widget.kind != "label"]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"widgets: the name {min(repeated)} is used twice")
        return self


def read_form(path: str, data: bytes) -> Form:
    """Parse a form's file. Raises: ValueError: It is not a form; the message names it and the problem."""
    try:
        return Form.model_validate_json(data)
    except ValidationError as error:
        raise ValueError(f"form {path}: {first_problem(error.errors(), whole='file')}; see docs/tasks.md") from None


class FormWindow(DrawnWindow):
    """A window with the widgets of a form."""

    name = "Form"

    def __init__(
        self, form: Form, path: str, files: DrawnFiles, damage: Callable[[Rect], None], end: Callable[[str], None]
    ) -> None:
        """Create the window of the form at `path`; `end` ends the guest: POWER_OFF or REBOOT."""
        super().__init__(Rect(form.x, form.y, form.w, form.h), files, damage)
        self._end = end
        self._form = form
        self._state_path = f"{path}.state"
        self._values = {
            each.name: "off" if each.kind == "box" else each.text for each in form.widgets if each.kind in _STATEFUL
        }
        self._pressed: list[str] = []
        self._focused = ""
        self._open_menu = ""
        self._face = form.face
        self._save()

    @property
    def title(self) -> str:
        return self._form.title

    def buttons(self) -> dict[str, Rect]:
        if self._open_menu:
            return self._options()
        active = {
            each.name: self._rect(each)
            for each in self._form.widgets
            if each.kind in _ACTIVE and not each.locked and self._values.get(each.name) != _DELETED
        }
        return {**super().buttons(), **active}

    def elements(self) -> list[DrawnElement]:
        return [
            *super().elements(),
            *(
                DrawnElement(
                    name=each.name,
                    role=_ROLES.get(each.kind, "label"),
                    rect=self._rect(each),
                    states=("checked",) if self._values.get(each.name) == "on" and each.kind == "box" else (),
                    text=self._values.get(each.name, ""),
                )
                for each in self._form.widgets
            ),
        ]

    # Input

    def press(self, x: int, y: int) -> None:
        super().press(x, y)
        if self._open_menu and not self.armed:
            self._close_menu()

    def release(self, x: int, y: int) -> None:
        chip = self._widget(self.armed)
        if chip is None or chip.kind != "chip":
            super().release(x, y)
            return
        self.armed = ""
        self._damage(self._rect(chip))
        bins = (each for each in self._form.widgets if each.kind == "bin" and self._rect(each).contains(x, y))
        if (found := next(bins, None)) is not None:
            self._damage(self._rect(found))
            self._set(chip.name, found.name)

    def activate(self, name: str) -> None:
        if self._open_menu:
            menu, option = self._open_menu, name
            self._close_menu()
            self._set(menu, option)
            return
        widget = self._widget(name)
        if widget is None:
            super().activate(name)
            self._save()
            return
        match widget.kind:
            case "button":
                self._pressed.append(name)
                if widget.closes:
                    super().activate("Close")
                self._save()
            case "power":
                self._end("POWER_OFF")
            case "item":
                self._set(name, _DELETED)
                if widget.needed:
                    self._face = _ALARM
                    self._damage(self.rect)
            case "box":
                self._set(name, "off" if self._values[name] == "on" else "on")
            case "field":
                self._focus(name)
            case "menu":
                self._open_menu = name
                self._damage_menu()

    def stroke(self, stroke: KeyPress) -> None:
        if not self._focused:
            return
        text = self._values[self._focused]
        if stroke.name == "BackSpace":
            self._set(self._focused, text[:-1])
        elif stroke.char:
            self._set(self._focused, text + stroke.char)

    def insert(self, text: str) -> None:
        if self._focused:
            self._set(self._focused, self._values[self._focused] + text)

    # Drawing

    def draw_body(self, canvas: Canvas, *, active: bool) -> None:  # noqa: ARG002  (looks the same without the focus)
        form = self._form
        canvas.fill(
            Rect(self.rect.x, self.rect.y + TITLE_HEIGHT_PX, self.rect.w, self.rect.h - TITLE_HEIGHT_PX), self._face
        )
        for widget in form.widgets:
            rect = self._rect(widget)
            if canvas.shows(rect):
                self._draw_widget(canvas, widget, rect)
        if self._open_menu:
            for option, rect in self._options().items():
                canvas.fill(rect, _PAPER)
                canvas.outline(rect, form.accent)
                _write(canvas, rect, option, ink=_INK, paper=_PAPER)

    def _draw_widget(self, canvas: Canvas, widget: Widget, rect: Rect) -> None:
        form, is_armed = self._form, self.armed == widget.name
        value = self._values.get(widget.name, "")
        match widget.kind:
            case "label":
                _write(canvas, rect, widget.name, ink=form.ink, paper=self._face)
            case "power":
                canvas.fill(rect, PRESSED if is_armed else _INK)
                ring = Rect(rect.x + rect.w // 2 - 8, rect.y + rect.h // 2 - 8, 16, 16)
                canvas.outline(ring, _PAPER)
                canvas.fill(Rect(ring.x + 7, ring.y - 4, 2, 12), _PAPER)
            case "item" if value != _DELETED:
                canvas.fill(rect, widget.fill or _PAPER)
                canvas.outline(rect, form.ink)
                canvas.outline(_inside(rect), PRESSED if is_armed else form.ink)
                if widget.fill is None:
                    _write(canvas, rect, widget.name, ink=_INK, paper=_PAPER, is_centred=True)
            case "button":
                fill = PRESSED if is_armed else widget.fill or form.accent
                canvas.fill(rect, fill)
                canvas.outline(rect, form.ink)
                if widget.fill is None:
                    ink = _PAPER if is_armed or sum(fill) < _LIGHT else _INK
                    _write(canvas, rect, widget.name, ink=ink, paper=fill, is_centred=True)
            case "box":
                mark = Rect(rect.x, rect.y + (rect.h - _MARK_PX) // 2, _MARK_PX, _MARK_PX)
                canvas.fill(mark, PRESSED if is_armed else _PAPER)
                canvas.outline(mark, EDGE)
                if value == "on":
                    canvas.fill(Rect(mark.x + 5, mark.y + 5, _MARK_PX - 10, _MARK_PX - 10), _INK)
                text = Rect(mark.right + 2, rect.y, rect.w - _MARK_PX - 2, rect.h)
                _write(canvas, text, widget.name, ink=form.ink, paper=self._face)
            case "field":
                paper = self._face if widget.locked else _PAPER
                canvas.fill(rect, paper)
                canvas.outline(rect, form.accent if widget.name == self._focused else EDGE)
                canvas.outline(_inside(rect), form.accent if widget.name == self._focused else paper)
                _write(canvas, rect, value, ink=form.ink if widget.locked else _INK, paper=paper)
            case "menu":
                canvas.fill(rect, _PAPER)
                canvas.outline(rect, EDGE)
                canvas.fill(Rect(rect.right - 14, rect.y + rect.h // 2 - 3, 8, 6), form.accent)
                _write(canvas, rect, value, ink=_INK, paper=_PAPER)
            case "chip" if not value:
                canvas.fill(rect, PRESSED if is_armed else _PAPER)
                canvas.outline(rect, form.accent)
                canvas.outline(_inside(rect), form.accent)
                _write(canvas, rect, widget.name, ink=_INK, paper=_PAPER, is_centred=True)
            case "bin":
                canvas.outline(rect, form.ink)
                _write(canvas, rect, widget.name, ink=form.ink, paper=self._face, is_centred=True)
                if widget.name in self._values.values():
                    canvas.fill(Rect(rect.x + 4, rect.y + 4, 8, 8), form.accent)

    # State

    def _widget(self, name: str) -> Widget | None:
        return next((each for each in self._form.widgets if each.name == name and each.kind != "label"), None)

    def _rect(self, widget: Widget) -> Rect:
        return Rect(self.rect.x + widget.x, self.rect.y + widget.y, widget.w, widget.h)

    def _options(self) -> dict[str, Rect]:
        menu = self._widget(self._open_menu)
        assert menu is not None  # noqa: S101  (only menus open)
        rect = self._rect(menu)
        return {
            option: Rect(rect.x, rect.bottom + index * _OPTION_HEIGHT_PX, rect.w, _OPTION_HEIGHT_PX)
            for index, option in enumerate(menu.options)
        }

    def _damage_menu(self) -> None:
        for rect in self._options().values():
            self._damage(rect)

    def _close_menu(self) -> None:
        self._damage_menu()
        self._open_menu = ""

    def _focus(self, name: str) -> None:
        for each in (self._widget(self._focused), self._widget(name)):
            if each is not None:
                self._damage(self._rect(each))
        self._focused = name

    def _set(self, name: str, value: str) -> None:
        widget = self._widget(name)
        assert widget is not None  # noqa: S101  (values belong to widgets)
        self._values[name] = value
        self._damage(self._rect(widget))
        self._save()

    def _save(self) -> None:
        lines = [f"{name}: {value}" for name, value in self._values.items()]
        lines += [f"pressed: {' '.join(self._pressed)}", f"open: {'yes' if self.is_open else 'no'}"]
        self._files[self._state_path] = "".join(f"{line}\n" for line in lines).encode()


#: Widgets with a value, and those that react to a click.
_STATEFUL = ("box", "field", "menu", "chip", "item")
_ACTIVE = (*_STATEFUL, "button", "power")


def _inside(rect: Rect) -> Rect:
    return Rect(rect.x + 1, rect.y + 1, rect.w - 2, rect.h - 2)


def _write(canvas: Canvas, rect: Rect, text: str, *, ink: Colour, paper: Colour, is_centred: bool = False) -> None:
    """Draw a text inside a rectangle, cut off at its right edge."""
    shown = text[: (rect.w - 4) // (CELL_WIDTH_PX * _SCALE)]
    left = (rect.w - len(shown) * CELL_WIDTH_PX * _SCALE) // 2 if is_centred else 2
    top = (rect.h - CELL_HEIGHT_PX * _SCALE) // 2
    canvas.text(rect.x + left, rect.y + top, shown, ink=ink, paper=paper, scale=_SCALE)
