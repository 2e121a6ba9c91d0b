"""Names of the keys of a US keyboard. Pure data and look-ups.

Key names, in any case, with or without `_`, `-` and spaces between the words:

- any single character of the US layout: `a`, `7`, `+`, `?` (some need Shift: see `character`)
- modifiers: `ctrl`/`control`, `shift`, `alt`/`option`, `win`/`super`/`meta`/`cmd`/`command`; each also with `left` or
  `right` after or before it, or X's `_L` and `_R`: `ctrlleft`, `rightalt`, `Super_L`; `altgr` is the right Alt
- `enter`/`return`, `esc`/`escape`, `tab`, `space`, `backspace`, `delete`/`del`, `insert`/`ins`
- `up`, `down`, `left`, `right` (also `arrowup`, `uparrow`, ...), `home`, `end`, `pageup`/`pgup`/`prior`,
  `pagedown`/`pgdn`/`next`
- `f1` to `f24` (QEMU older than 8.0 drops keys above `f12`)
- `capslock`, `numlock`, `scrolllock`, `printscreen`/`print`/`prtsc`, `pause`/`break`, `menu`/`apps`
- keypad: `num0`-`num9` or `kp0`-`kp9`, `add`, `subtract`, `multiply`, `divide`, `decimal`, `kpenter`
- X names of characters: `comma`, `period`, `slash`, `minus`, `plus`, `bracketleft`, ...
- media: `volumeup`, `volumedown`, `volumemute`, `playpause`, `stop`, `nexttrack`, `prevtrack`, `browserback`,
  `browserforward`, `browserrefresh`, `browserhome`, `browsersearch`, `launchmail`, `calculator`, `sleep`, `help`
"""

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
class Stroke:
    """How to type one character on the US layout."""

    key: Key
    shift: bool


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


def _strokes() -> dict[str, Stroke]:
    strokes: dict[str, Stroke] = {}
    for first, plains, shifteds in _CHARACTER_ROWS:
        for scancode, (plain, shifted) in enumerate(zip(plains, shifteds, strict=True), first):
            strokes[shifted] = Stroke(Key(scancode, ord(shifted)), shift=True)
            strokes[plain] = Stroke(Key(scancode, ord(plain)), shift=False)
    strokes["\n"] = Stroke(Key(0x1C, 0xFF0D), shift=False)
    strokes["\t"] = Stroke(Key(0x0F, 0xFF09), shift=False)
    return strokes


def _names() -> dict[str, Key]:
    names: dict[str, Key] = {}
    for line in (files("envd.guest.input") / "keys.txt").read_text(encoding="ascii").splitlines():
        if not line.startswith("#"):
            scancode, keysym, *words = line.split()
            names |= dict.fromkeys(words, Key(int(scancode, 16), int(keysym, 16)))
    names |= {f"f{i + 1}": Key(scancode, 0xFFBE + i) for i, scancode in enumerate(_FUNCTION_SCANCODES)}
    return names


_STROKES = _strokes()
_NAMES = _names()
_SEPARATORS = str.maketrans("", "", "_- ")

SHIFT = _NAMES["shift"]


def character(char: str) -> Stroke | None:
    """Return how to type a character on the US layout (newline is Enter, tab is Tab), or None if it is not on it."""
    return _STROKES.get(char)


def named_key(name: str) -> Stroke | None:
    """Return the key of that name, or None. `Stroke.shift` is set if the name is of a character that needs Shift."""
    if len(name) == 1:
        return character(name)
    normal = name.casefold().translate(_SEPARATORS)
    if key := _NAMES.get(normal):
        return Stroke(key, shift=False)
    if char := _CHARACTER_NAMES.get(normal):
        return character(char)
    return None
