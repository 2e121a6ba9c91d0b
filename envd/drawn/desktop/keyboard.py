"""US keyboard behind QEMU's VNC server: keysyms and XT scancodes in, strokes out.

As in QEMU, a keysym only selects a key; the held modifiers decide the character, so `A` without shift types `a`.
Keysyms missing from the layout are ignored. Held keys do not repeat.
"""

from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from pydantic import Field

from envd.drawn.parts import StatePart

# Scancode set 1; bit 0x80 marks the prefix 0xe0, as in the RFB message.
_ROWS = (
    (2, "1234567890-=", "!@#$%^&*()_+"),
    (16, "qwertyuiop[]", "QWERTYUIOP{}"),
    (30, "asdfghjkl;'`", 'ASDFGHJKL:"~'),
    (43, "\\zxcvbnm,./", "|ZXCVBNM<>?"),
    (57, " ", " "),
)
_CHARS = {
    first + index: (plain, shifted)
    for first, plains, shifteds in _ROWS
    for index, (plain, shifted) in enumerate(zip(plains, shifteds, strict=True))
}
_NAMES = {
    1: "Escape", 14: "BackSpace", 15: "Tab", 28: "Return", 29: "Control_L", 42: "Shift_L", 54: "Shift_R",
    56: "Alt_L", 58: "Caps_Lock", 87: "F11", 88: "F12", 0x9C: "KP_Enter", 0x9D: "Control_R", 0xB8: "Alt_R",
    0xC7: "Home", 0xC8: "Up", 0xC9: "Page_Up", 0xCB: "Left", 0xCD: "Right", 0xCF: "End", 0xD0: "Down",
    0xD1: "Page_Down", 0xD2: "Insert", 0xD3: "Delete", 0xDB: "Super_L", 0xDC: "Super_R", 0xDD: "Menu",
} | {59 + index: f"F{index + 1}" for index in range(10)}  # fmt: skip
_KEYSYMS = {
    0xFE03: 0xB8, 0xFE20: 15, 0xFF08: 14, 0xFF09: 15, 0xFF0D: 28, 0xFF1B: 1, 0xFF50: 0xC7, 0xFF51: 0xCB, 0xFF52: 0xC8,
    0xFF53: 0xCD, 0xFF54: 0xD0, 0xFF55: 0xC9, 0xFF56: 0xD1, 0xFF57: 0xCF, 0xFF63: 0xD2, 0xFF67: 0xDD, 0xFF8D: 0x9C,
    0xFFC8: 87, 0xFFC9: 88, 0xFFE1: 42, 0xFFE2: 54, 0xFFE3: 29, 0xFFE4: 0x9D, 0xFFE5: 58, 0xFFE7: 0xDB, 0xFFE8: 0xDC,
    0xFFE9: 56, 0xFFEA: 0xB8, 0xFFEB: 0xDB, 0xFFEC: 0xDC, 0xFFFF: 0xD3,
} | {0xFFBE + index: 59 + index for index in range(10)}  # fmt: skip
# As with Num Lock on.
_KEYPAD = {code: (char, char) for code, char in zip((0x37, 0xB5, *range(0x47, 0x54)), "*/789-456+1230.", strict=True)}
_KEYSYMS |= {ord(char): code for code, chars in _CHARS.items() for char in chars}

_SHIFT = {42, 54}
_CONTROL = {29, 0x9D}
_ALT = {56, 0xB8}
_SUPER = {0xDB, 0xDC}
_CAPS_LOCK = 58


class KeyPress(NamedTuple):
    """A key press with the modifiers held."""

    name: str
    """The unshifted character, or a name such as `Return`."""
    char: str = ""
    """Character typed; empty for keys without one and while control, alt or super is held."""
    control: bool = False
    shift: bool = False
    alt: bool = False


def scancode_of(keysym: int) -> int | None:
    """Return the XT scancode of a keysym's key, or None if the layout has none."""
    return _KEYSYMS.get(keysym)


@dataclass(slots=True, eq=False)
class DrawnKeyboard(StatePart):
    """Keyboard state."""

    down: set[Annotated[int, Field(ge=0, le=0xFFFF)]] = field(default_factory=set)
    """Scancodes of the held keys."""
    caps_lock: bool = False

    @property
    def modifiers(self) -> list[str]:
        """X names of the active modifiers."""
        held = (("shift", _SHIFT), ("control", _CONTROL), ("mod1", _ALT), ("mod4", _SUPER))
        return [name for name, keys in held if not self.down.isdisjoint(keys)] + ["lock"] * self.caps_lock

    def event(self, scancode: int, *, down: bool) -> KeyPress | None:
        """Press or release a key. Returns the stroke, or None for releases, modifiers and unknown keys."""
        if not down:
            self.down.discard(scancode)
            return None
        self.down.add(scancode)
        if scancode == _CAPS_LOCK:
            self.caps_lock = not self.caps_lock
        if scancode in _SHIFT | _CONTROL | _ALT | _SUPER or scancode == _CAPS_LOCK:
            return None
        shift = not self.down.isdisjoint(_SHIFT)
        control = not self.down.isdisjoint(_CONTROL)
        alt = not self.down.isdisjoint(_ALT)
        if scancode in _NAMES:
            return KeyPress(_NAMES[scancode], control=control, shift=shift, alt=alt)
        chars = _CHARS.get(scancode) or _KEYPAD.get(scancode)
        if chars is None:
            return None
        plain, shifted = chars
        upper = shift != (self.caps_lock and plain.isalpha())
        silent = control or alt or not self.down.isdisjoint(_SUPER)
        return KeyPress(plain, "" if silent else (shifted if upper else plain), control=control, shift=shift, alt=alt)
