"""Names of keys, and the keys of characters on the US layout or another. Pure data and look-ups.

Key names, in any case, with or without `_`, `-` and spaces between the words:

- any single character of the layout: `a`, `7`, `+`, `?` (some need Shift: see `character`)
- modifiers: `ctrl`/`control`, `shift`, `alt`/`option`, `win`/`super`/`meta`/`cmd`/`command`; each also with `left` or
  `right` after or before it, or X's `_L` and `_R`: `ctrlleft`, `rightalt`, `Super_L`; `altgr` is the right Alt
- `enter`/`return`, `esc`/`escape`, `tab`, `space`, `backspace`, `delete`/`del`, `insert`/`ins`
- `up`, `down`, `left`, `right` (also `arrowup`, `uparrow`, ...), `home`, `end`, `pageup`/`pgup`/`prior`,
  `pagedown`/`pgdn`/`next`
- `f1` to `f24` (QEMU older than 8.0 drops keys above `f12`)
- `capslock`, `numlock`, `scrolllock`, `printscreen`/`print`/`prtsc`, `pause`/`break`, `menu`/`apps`
- keypad, as with Num Lock on: `num0`-`num9` or `kp0`-`kp9`, `add`, `subtract`, `multiply`, `divide`, `decimal`,
  `kpenter`
- X names of characters: `comma`, `period`, `slash`, `minus`, `plus`, `bracketleft`, ...
- media: `volumeup`, `volumedown`, `volumemute`, `playpause`, `stop`, `nexttrack`, `prevtrack`, `browserback`,
  `browserforward`, `browserrefresh`, `browserhome`, `browsersearch`, `launchmail`, `calculator`, `sleep`, `help`
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the keyboard, with a keysym for the character to produce."""

    scancode: int
    """XT set 1 code of the physical key; 0x80 is the e0 prefix."""
    keysym: int
    """X keysym, for servers without scancodes."""


@dataclass(frozen=True, slots=True)
class CharacterKeys:
    """How to type one character on a layout."""

    key: Key
    shift: bool


#: A keyboard layout: how to type each of its characters, plainly or with Shift.
Layout = Mapping[str, CharacterKeys]


#: Scancode of the first key of a row, characters without Shift, with Shift.
_CHARACTER_ROWS = (
    (0x02, "1234567890-=", "!@#$%^&*()_+"),
    (0x10, "qwertyuiop[]", "QWERTYUIOP{}"),
    (0x1E, "asdfghjkl;'`", 'ASDFGHJKL:"~'),
    (0x2B, "\\zxcvbnm,./", "|ZXCVBNM<>?"),
    (0x39, " ", " "),
)

#: XT codes of F1 to F24. QEMU 7.2 maps those from F13 on to "unmapped".
_FUNCTION_SCANCODES = (
    *range(0x3B, 0x45), 0x57, 0x58,
    0x5D, 0x5E, 0x5F, 0x55, 0x83, 0xF7, 0x84, 0x5A, 0x74, 0xF9, 0x6D, 0x6F,
)  # fmt: skip

#: X names of characters other than letters and digits.
_CHARACTER_NAMES = {
    "exclam": "!", "at": "@", "numbersign": "#", "hash": "#", "dollar": "$", "percent": "%", "asciicircum": "^",
    "caret": "^", "ampersand": "&", "asterisk": "*", "parenleft": "(", "parenright": ")", "minus": "-", "hyphen": "-",
    "underscore": "_", "equal": "=", "equals": "=", "plus": "+", "bracketleft": "[", "bracketright": "]",
    "braceleft": "{", "braceright": "}", "backslash": "\\", "bar": "|", "pipe": "|", "semicolon": ";", "colon": ":",
    "apostrophe": "'", "quoteright": "'", "quote": "'", "quotedbl": '"', "doublequote": '"', "comma": ",", "less": "<",
    "period": ".", "dot": ".", "greater": ">", "slash": "/", "question": "?", "grave": "`", "quoteleft": "`",
    "backtick": "`", "asciitilde": "~", "tilde": "~",
}  # fmt: skip


def _strokes() -> dict[str, CharacterKeys]:
    strokes: dict[str, CharacterKeys] = {}
    for first, plains, shifteds in _CHARACTER_ROWS:
        for scancode, (plain, shifted) in enumerate(zip(plains, shifteds, strict=True), first):
            strokes[shifted] = CharacterKeys(Key(scancode, ord(shifted)), shift=True)
            strokes[plain] = CharacterKeys(Key(scancode, ord(plain)), shift=False)
    strokes["\n"] = CharacterKeys(Key(0x1C, 0xFF0D), shift=False)
    strokes["\t"] = CharacterKeys(Key(0x0F, 0xFF09), shift=False)
    return strokes


def _names() -> dict[str, Key]:
    names: dict[str, Key] = {}
    for line in (files("envd.desktop.input") / "keys.txt").read_text(encoding="ascii").splitlines():
        if not line.startswith("#"):
            scancode, keysym, *words = line.split()
            names |= dict.fromkeys(words, Key(int(scancode, 16), int(keysym, 16)))
    names |= {f"f{i + 1}": Key(scancode, 0xFFBE + i) for i, scancode in enumerate(_FUNCTION_SCANCODES)}
    return names


US = _strokes()
_NAMES = _names()
_SEPARATORS = str.maketrans("", "", "_- ")
#: XT set 1 has evdev's codes on the main block of the keyboard.
_MAIN_BLOCK = range(1, 0x59)

SHIFT = _NAMES["shift"]
NUM_LOCK = _NAMES["numlock"]
MODIFIERS = frozenset(_NAMES[side + name] for side in ("left", "right") for name in ("ctrl", "shift", "alt", "win"))
#: The keys that are digits and a decimal point only while Num Lock is on.
KEYPAD_DIGITS = frozenset(_NAMES[name] for name in ("decimal", *(f"num{digit}" for digit in range(10))))


def layout_of(characters: Mapping[str, tuple[int, bool]]) -> Layout:
    """Return a guest's layout, given evdev's code of each character's key, and whether with Shift."""
    layout = {char: US[char] for char in "\n\t"}
    for char, (code, shift) in characters.items():
        if len(char) == 1 and code in _MAIN_BLOCK:
            layout[char] = CharacterKeys(Key(code, keysym_of(char)), shift)
    return layout


def keysym_of(char: str) -> int:
    """Return the keysym of a printable character."""
    return ord(char) if ord(char) < 0x100 else 0x01000000 | ord(char)


def character(char: str, layout: Layout = US) -> CharacterKeys | None:
    """Return how to type a character on a layout (newline is Enter, tab is Tab), or None if it is not on it."""
    return layout.get(char)


def named_character(name: str) -> str | None:
    """Return the character that a key's name stands for, or None."""
    return name if len(name) == 1 else _CHARACTER_NAMES.get(name.casefold().translate(_SEPARATORS))


def named_key(name: str, layout: Layout = US) -> CharacterKeys | None:
    """Return the key of that name, or None. `shift` is set if the character needs Shift."""
    if char := named_character(name):
        return layout.get(char)
    key = _NAMES.get(name.casefold().translate(_SEPARATORS))
    return None if key is None else CharacterKeys(key, shift=False)
