"""Typing of Unicode text through the X server's keyboard map."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from .messages import HttpError
from .processes import TimedLock
from .x11 import X11

_CONTROL_KEYSYMS = {"\n": 0xFF0D, "\r": 0xFF0D, "\t": 0xFF09}
_SHIFT_L = 0xFFE1
_ALT_R, _LEVEL3_SHIFT = 0xFFEA, 0xFE03
#: How long the focused program has to read what was typed before its keys are bound to other characters.
_READ_TIMEOUT_S = 10.0
#: X's keycode of the key with evdev's code 0, and evdev's codes of the main block, where the characters are.
_EVDEV_OFFSET = 8
_MAIN_BLOCK = range(1, 0x59)
#: Keycodes of other keys that Brazilian and Japanese layouts have characters on.
_OTHER_CHARACTER_KEYS = frozenset({97, 132})


@dataclass(frozen=True, slots=True)
class Stroke:
    """One key to press and release."""

    keycode: int
    shifted: bool


@dataclass(slots=True)
class TypingBatch:
    """Strokes that one keyboard map can hold."""

    bindings: dict[int, list[int]] = field(default_factory=dict)
    """Keysyms (unshifted, shifted) of spare keycodes, to be bound before the first stroke."""
    strokes: list[Stroke] = field(default_factory=list)
    rebinds: bool = False
    """Reuses keycodes of characters typed before: clients must have read those first."""


def keysym_of(character: str) -> int:
    """Return the keysym of a character. Raises: HttpError for a character without one."""
    code = ord(character)
    if character in _CONTROL_KEYSYMS:
        return _CONTROL_KEYSYMS[character]
    if 0x20 <= code <= 0x7E or 0xA0 <= code <= 0xFF:
        return code
    if code < 0x100 or 0xD800 <= code <= 0xDFFF:
        raise HttpError(400, f"text: U+{code:04X} cannot be typed; send printable characters, newlines and tabs")
    return 0x01000000 | code


def is_character(keysym: int) -> bool:
    """Return whether a keysym is one that `keysym_of` returns for a printable character."""
    return 0x20 <= keysym <= 0x7E or 0xA0 <= keysym <= 0xFF or 0x01000000 < keysym <= 0x0110FFFF


def typed_by_layout(keyboard: Mapping[int, Sequence[int]]) -> tuple[dict[int, Stroke], dict[int, tuple[int, int]]]:
    """Return how the first layout types each keysym, and the keysyms of the keycodes that `Keyboard.type` bound.

    Bound are those with characters that are on no key of a keyboard, whichever guestd or program bound them.
    """
    layout: dict[int, Stroke] = {}
    bound: dict[int, tuple[int, int]] = {}
    for code, row in keyboard.items():
        is_key = code - _EVDEV_OFFSET in _MAIN_BLOCK or code in _OTHER_CHARACTER_KEYS
        if not is_key and any(row) and all(is_character(keysym) for keysym in row[:2] if keysym):
            bound[code] = (row[0], row[1])
            continue
        for level, keysym in enumerate(row[:2]):
            if keysym:
                layout.setdefault(keysym, Stroke(code, level == 1))
    return layout, bound


def plan_typing(text: str, keyboard: Mapping[int, Sequence[int]]) -> list[TypingBatch]:
    """Decide which keys type `text`, and which spare keycodes to bind for characters that the layout lacks.

    Args:
        keyboard: The current keysyms of each keycode. Characters that earlier calls bound stay bound until their
            keycodes are needed.

    Raises:
        HttpError: A character cannot be typed, or the keyboard map has no spare keycode.
    """
    layout, bound_before = typed_by_layout(keyboard)
    spare = sorted((code for code, row in keyboard.items() if code in bound_before or not any(row)), reverse=True)
    bound: dict[int, Stroke] = {}
    for code in sorted(bound_before):
        for level in (1, 0):
            bound[bound_before[code][level]] = Stroke(code, level == 1)
    free = [Stroke(code, level) for code in spare if code not in bound_before for level in (False, True)]
    batches = [TypingBatch()]
    for character in text.replace("\r\n", "\n"):
        keysym = keysym_of(character)
        stroke = layout.get(keysym) or bound.get(keysym)
        if stroke is None:
            if not free:
                if not spare:
                    raise HttpError(409, f"text: the layout lacks {character!r} and no keycode is spare for it")
                if batches[-1].strokes:
                    batches.append(TypingBatch())
                batches[-1].rebinds = True
                bound.clear()
                free = [Stroke(code, level) for code in spare for level in (False, True)]
            stroke = bound[keysym] = free.pop(0)
            pair = batches[-1].bindings.setdefault(stroke.keycode, [keysym, keysym])
            pair[stroke.shifted] = keysym
        batches[-1].strokes.append(stroke)
    return batches


def consecutive_rows(bindings: Mapping[int, tuple[int, int]]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield (first keycode, rows) for each run of adjacent keycodes, so that the keys between runs stay unchanged."""
    first = 0
    rows: list[tuple[int, int]] = []
    for code in sorted(bindings):
        if rows and code != first + len(rows):
            yield first, rows
            rows = []
        if not rows:
            first = code
        rows.append(bindings[code])
    if rows:
        yield first, rows


class Keyboard:
    """Types Unicode text through XTEST.

    Characters that the layout lacks are bound to spare keycodes before the first key press, and stay bound. A client
    looks a key up in the map when it processes the event: restoring the map earlier would turn the key into nothing or
    into another character.
    """

    def __init__(self) -> None:
        self._lock = TimedLock("the keyboard")

    def state(self) -> dict[str, object]:
        """Return `characters`, evdev's code of each character's key and whether with Shift, and `num_lock`.

        No characters while another layout than the first is active: `type` can type all of them all the same.
        """
        with X11() as x:
            state = x.keyboard_state()
            layout, _ = typed_by_layout(x.keyboard_map()) if state.active_group == 0 else ({}, {})
        characters = {
            chr(keysym & 0xFFFFFF): (code, stroke.shifted)
            for keysym, stroke in layout.items()
            if is_character(keysym) and (code := stroke.keycode - _EVDEV_OFFSET) in _MAIN_BLOCK
        }
        return {"characters": characters, "num_lock": state.num_lock}

    def type(self, text: str, interval_s: float, held: Sequence[int] = ()) -> None:
        """Type `text` into the focused window, while the keys with the keysyms `held` are down.

        Raises:
            HttpError: A character cannot be typed, or the X server is not reachable: nothing was typed. Status 409: the
                keyboard map lacks something, or the focused program did not read the part that was typed.
        """
        typed_count = 0
        with self._lock(), X11() as x:
            x.require_xtest()
            keyboard = x.keyboard_map()
            codes = {row[0]: code for code, row in reversed(keyboard.items()) if row}
            codes.setdefault(_ALT_R, codes.get(_LEVEL3_SHIFT, 0))
            for keysym in (_SHIFT_L, *held):
                if not codes.get(keysym):
                    raise HttpError(409, f"the keyboard map has no key with keysym {keysym:#x}")
            batches = plan_typing(text, keyboard)
            with x.plain_keyboard(), ExitStack() as releases:
                for keysym in held:
                    x.fake_key(codes[keysym], pressed=True)
                    releases.callback(x.fake_key, codes[keysym], pressed=False)
                for batch in batches:
                    # A program may look a key up long after its event, in the map of that time.
                    if batch.rebinds and not x.wait_until_read(_READ_TIMEOUT_S):
                        raise HttpError(
                            409,
                            f"only the first {typed_count} of {len(text)} characters were typed: the focused program"
                            f" did not read its keys within {_READ_TIMEOUT_S:g} s",
                        )
                    bindings = {code: (pair[0], pair[1]) for code, pair in batch.bindings.items()}
                    for first, rows in consecutive_rows(bindings):
                        x.bind_keys(first, rows)
                    self._press(x, batch.strokes, codes[_SHIFT_L], interval_s)
                    typed_count += len(batch.strokes)
            x.ping_focus(_READ_TIMEOUT_S / 2)  # so that the caller sees what the program made of it

    @staticmethod
    def _press(x: X11, strokes: Sequence[Stroke], shift: int, interval_s: float) -> None:
        shifted = False
        try:
            for number, stroke in enumerate(strokes):
                if stroke.shifted != shifted:
                    shifted = stroke.shifted
                    x.fake_key(shift, pressed=shifted)
                x.fake_key(stroke.keycode, pressed=True)
                x.fake_key(stroke.keycode, pressed=False)
                if interval_s:
                    x.sync()
                    time.sleep(interval_s)
                elif number % 64 == 63:
                    x.sync()
        finally:
            if shifted:
                x.fake_key(shift, pressed=False)
        x.sync()
