"""Desktop of a fake machine: two windows, forms and a panel, driven by scancodes and a pointer.

Synchronous and deterministic: the same input gives the same pixels. Each event redraws only what it changed and
reports those rectangles.
"""

import functools
from collections.abc import Callable, Mapping

import numpy as np

from envd.drawn.desktop.canvas import Damage, Framebuffer, Rect, Words
from envd.drawn.desktop.forms import Form, FormWindow, read_form
from envd.drawn.desktop.keyboard import DrawnKeyboard
from envd.drawn.desktop.windows import (
    CLICKS_PATH,
    EDGE,
    FACE,
    TITLE_HEIGHT_PX,
    ControlsWindow,
    DrawnElement,
    DrawnWindow,
    EditorWindow,
    draw_button,
)
from envd.drawn.files import DrawnFiles
from envd.tasks.queries import OpenWindow

MIN_WIDTH_PX = 480
MIN_HEIGHT_PX = 320

_PANEL_HEIGHT_PX = 32
_LAUNCHERS = ("Editor", "Controls")
_WHEEL_ROWS = 3
_FIRST_WINDOW_ID = 0x1000001

_LEFT = 1
_WHEEL_UP = 1 << 3
_WHEEL_DOWN = 1 << 4


class DrawnDesktop:
    """Windows, focus and input of one screen, drawn into one framebuffer."""

    def __init__(
        self,
        framebuffer: Framebuffer,
        *,
        files: DrawnFiles,
        on_change: Callable[[list[Rect]], None] = lambda _rects: None,
        on_end: Callable[[str], None] = lambda _cause: None,
        is_drawn: bool = False,
    ) -> None:
        """Start the session; `is_drawn` if the framebuffer already shows the start picture."""
        self.framebuffer = framebuffer
        self.files = files
        self.pointer_position = framebuffer.bounds.center
        self._on_change = on_change
        self._on_end = on_end
        self._damage = Damage()
        self._keyboard = DrawnKeyboard()
        self._buttons = 0
        self._dragged: DrawnWindow | None = None
        width, height = framebuffer.bounds.w, framebuffer.bounds.h
        left = width // 32
        editor_rect = Rect(left, height // 20, width * 53 // 100, height * 60 // 100)
        controls_rect = Rect(editor_rect.right + left, editor_rect.y, width * 30 // 100, 160)
        self.editor = EditorWindow(editor_rect, files, self.damage)
        self.controls = ControlsWindow(controls_rect, files, self.damage)
        self._known: tuple[DrawnWindow, ...] = (self.controls, self.editor)
        self._stack = list(self._known)
        self._drawn_active: DrawnWindow | None = self.editor
        files[CLICKS_PATH] = b"0\n"
        if not is_drawn:
            self.damage(framebuffer.bounds)
            self._flush()

    @property
    def active(self) -> DrawnWindow | None:
        for window in reversed(self._stack):
            if window.is_open:
                return window
        return None

    @property
    def windows(self) -> list[DrawnWindow]:
        """Open windows, the active one last."""
        return [window for window in self._stack if window.is_open]

    def holds_key(self, scancode: int) -> bool:
        return scancode in self._keyboard.down

    @property
    def held_buttons(self) -> list[int]:
        """X numbers of the pressed buttons."""
        return [number + 1 for number in range(5) if self._buttons & 1 << number]

    @property
    def held_modifiers(self) -> list[str]:
        """X names of the active modifiers."""
        return self._keyboard.modifiers

    def elements(self) -> list[DrawnElement]:
        """Return all named elements: the panel, then windows from bottom to top, each followed by its content."""
        launchers = _launchers(self.framebuffer.bounds)
        found = [DrawnElement(name=name, role="push-button", rect=rect) for name, rect in launchers.items()]
        for window in self.windows:
            states = ("active",) if window is self.active else ()
            found.append(DrawnElement(name=window.title, role="frame", rect=window.rect, states=states))
            found += window.elements()
        return found

    def element(self, name: str, *, window: str = "") -> DrawnElement:
        """Return an element of the panel or of a window. Raises: KeyError."""
        owner = ""
        for element in self.elements():
            owner = element.name.rpartition(" - ")[2] if element.role == "frame" else owner
            if element.name == name and owner == window:
                return element
        raise KeyError(f"{window}/{name}")

    # Input

    def key(self, scancode: int, *, down: bool) -> None:
        stroke = self._keyboard.event(scancode, down=down)
        window = self.active
        if stroke is not None and stroke.control and stroke.alt and stroke.name == "Delete":
            self._on_end("REBOOT")
            return
        if stroke is None or window is None:
            return
        if stroke.alt and stroke.name == "F4":
            window.activate("Close")
        else:
            window.stroke(stroke)
        self._flush()

    def type_text(self, text: str) -> None:
        window = self.active
        if window is not None:
            window.insert(text)
        self._flush()

    def pointer(self, x: int, y: int, buttons: int) -> None:
        """Set pointer position and RFB button mask (1 left, 2 middle, 4 right, 8 and 16 wheel)."""
        bounds = self.framebuffer.bounds
        x, y = min(max(0, x), bounds.w - 1), min(max(0, y), bounds.h - 1)
        pressed, released = buttons & ~self._buttons, self._buttons & ~buttons
        old_x, old_y = self.pointer_position
        self.pointer_position, self._buttons = (x, y), buttons
        if self._dragged is not None:
            self._move_window(self._dragged, x - old_x, y - old_y)
        under = next((window for window in reversed(self.windows) if window.rect.contains(x, y)), None)
        if pressed & _LEFT:
            self._press(under, x, y)
        if released & _LEFT:
            self._dragged = None
            for window in self.windows:
                window.release(x, y)
        if under is not None and pressed & (_WHEEL_UP | _WHEEL_DOWN):
            under.wheel(-_WHEEL_ROWS if pressed & _WHEEL_UP else _WHEEL_ROWS)
        self._flush()

    def launch(self, name: str, argument: str = "") -> bool:
        """Open and raise a window by name, the editor with a file. Returns False if no such program exists.

        Raises:
            ValueError: The program is `form`, and the file is not a form.
        """
        if name == "form":
            self._open_form(argument)
            return True
        window = next((window for window in self._stack if window.name.lower() == name.lower()), None)
        if window is None:
            return False
        if not window.is_open:
            window.is_open = True
            self.damage(window.rect)
        self._raise(window)
        if argument and isinstance(window, EditorWindow):
            window.open_file(argument)
        self._flush()
        return True

    def list_windows(self) -> list[OpenWindow]:
        """Return open windows as the window manager lists them, the active one last."""
        return [
            OpenWindow(
                window_id=f"0x{_FIRST_WINDOW_ID + self._known.index(window):08x}",
                wm_class=f"{window.name.lower()}.{window.name}",
                title=window.title,
                box=(window.rect.x, window.rect.y, window.rect.w, window.rect.h),
            )
            for window in self.windows
        ]

    def activate_window(self, title: str) -> bool:
        """Raise the topmost open window with this id (`0x...`) or part of a title. Returns False if none matches."""
        window = self._find_window(title)
        if window is not None:
            self._raise(window)
            self._flush()
        return window is not None

    def close_window(self, title: str) -> bool:
        """Close the topmost open window with this id (`0x...`) or part of a title. Returns False if none matches."""
        window = self._find_window(title)
        if window is not None:
            window.activate("Close")
            self._flush()
        return window is not None

    def resize(self, framebuffer: Framebuffer) -> None:
        """Switch to a framebuffer of another size, at least `MIN_WIDTH_PX` by `MIN_HEIGHT_PX`."""
        self.framebuffer = framebuffer
        for window in self._stack:
            self._move_window(window, 0, 0)
        self.damage(framebuffer.bounds)
        self._flush()

    # Drawing

    def damage(self, rect: Rect) -> None:
        """Redraw these pixels at the end of the event."""
        self._damage.add(rect.intersect(self.framebuffer.bounds))

    def _flush(self) -> None:
        # Every change of the stacking order changes the active window, so this comparison detects all of them.
        if self.active is not self._drawn_active:
            for window in (self._drawn_active, self.active):
                if window is not None and window.is_open:
                    self._damage_focus(window)
            self._drawn_active = self.active
        rects = self._damage.take()
        for rect in rects:
            self._draw(rect)
        if rects:
            self._on_change(rects)

    def _draw(self, rect: Rect) -> None:
        canvas = self.framebuffer.canvas(rect)
        active, windows = self.active, self.windows
        covering = [index for index, window in enumerate(windows) if window.rect.covers(rect)]
        if not covering:
            canvas.paste_rows(_wallpaper(self.framebuffer.bounds.h))
        for window in windows[covering[-1] if covering else 0 :]:  # lower ones are hidden
            if canvas.shows(window.rect):
                window.draw(canvas, active=window is active)
        panel = _panel(self.framebuffer.bounds)
        if canvas.shows(panel):
            canvas.fill(panel, FACE)
            canvas.outline(panel, EDGE)
            for name, launcher in _launchers(self.framebuffer.bounds).items():
                draw_button(canvas, launcher, name)

    # Windows

    def _press(self, window: DrawnWindow | None, x: int, y: int) -> None:
        for name, rect in _launchers(self.framebuffer.bounds).items():
            if rect.contains(x, y):
                self.launch(name)
                return
        if window is None:
            return
        self._raise(window)
        window.press(x, y)
        if not window.armed and window.title_bar.contains(x, y):
            self._dragged = window

    def form_window(self, form: Form, path: str) -> FormWindow:
        """Create a window of this desktop, which is not open on it yet."""
        return FormWindow(form, path, self.files, self.damage, self._on_end)

    def _open_form(self, path: str) -> None:
        form = read_form(path, self.files.get(path, b""))
        for window in self.windows if form.alone else ():
            window.activate("Close")
        opened = self.form_window(form, path)
        self._known = (*self._known, opened)
        self._stack.append(opened)
        self.damage(opened.rect)
        self._flush()

    def _find_window(self, title: str) -> DrawnWindow | None:
        if title.startswith("0x"):
            ids = {window: listed.window_id for window, listed in zip(self.windows, self.list_windows(), strict=True)}
            return next((window for window, id in ids.items() if int(id, 16) == int(title, 16)), None)
        return next((window for window in reversed(self.windows) if title.lower() in window.title.lower()), None)

    def _damage_focus(self, window: DrawnWindow) -> None:
        # Only overlapping windows need a full redraw on a focus change; others keep their shared memory.
        if any(window.rect.intersect(other.rect).area for other in self.windows if other is not window):
            self.damage(window.rect)
        for rect in window.focus_rects():
            self.damage(rect)

    def _raise(self, window: DrawnWindow) -> None:
        self._stack.remove(window)
        self._stack.append(window)

    def _move_window(self, window: DrawnWindow, dx: int, dy: int) -> None:
        bounds = self.framebuffer.bounds
        old = window.rect
        x = min(max(TITLE_HEIGHT_PX - old.w, old.x + dx), bounds.w - TITLE_HEIGHT_PX)
        y = min(max(0, old.y + dy), bounds.h - _PANEL_HEIGHT_PX - TITLE_HEIGHT_PX)
        if (x, y) != (old.x, old.y):
            window.rect = Rect(x, y, old.w, old.h)
            self.damage(old.union(window.rect))


def _panel(screen: Rect) -> Rect:
    return Rect(0, screen.h - _PANEL_HEIGHT_PX, screen.w, _PANEL_HEIGHT_PX)


@functools.lru_cache(maxsize=8)
def _launchers(screen: Rect) -> Mapping[str, Rect]:
    panel = _panel(screen)
    return {name: Rect(6 + index * 106, panel.y + 4, 100, 24) for index, name in enumerate(_LAUNCHERS)}


@functools.lru_cache(maxsize=8)
def _wallpaper(height_px: int) -> Words:
    fade = np.linspace(0, 1, height_px)[:, None]
    top, bottom = np.array([150, 96, 52, 0]), np.array([84, 60, 40, 0])
    return np.asarray(top + (bottom - top) * fade, np.uint8).view(np.uint32)[:, 0]
