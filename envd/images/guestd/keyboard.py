"""Typing of Unicode text through the X server's keyboard map."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .messages import HttpError
from .processes import TimedLock
from .x11 import X11

_CONTROL_KEYSYMS = {"\n": 0xFF0D, "\r": 0xFF0D, "\t": 0xFF09}
_SHIFT_L = 0xFFE1


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


def plan_typing(
    text: str, keyboard: Mapping[int, Sequence[int]], bound_before: Mapping[int, tuple[int, int]]
) -> list[TypingBatch]:
    """Decide which keys type `text`, and which spare keycodes to bind for characters that the layout lacks.

    Args:
        keyboard: The current keysyms of each keycode.
        bound_before: Keycodes that earlier calls bound, with their two keysyms. They stay bound and may be reused.

    Raises:
        HttpError: A character cannot be typed, or the keyboard map has no spare keycode.
    """
    still_bound = {code for code, pair in bound_before.items() if tuple(keyboard.get(code, ())[:2]) == pair}
    spare = sorted((code for code, row in keyboard.items() if code in still_bound or not any(row)), reverse=True)
    layout: dict[int, Stroke] = {}
    for code, row in keyboard.items():
        for level, keysym in enumerate(row[:2]):
            if keysym and code not in still_bound:
                layout.setdefault(keysym, Stroke(code, level == 1))
    bound: dict[int, Stroke] = {}
    for code in sorted(still_bound):
        for level in (1, 0):
            bound[bound_before[code][level]] = Stroke(code, level == 1)
    free = [Stroke(code, level) for code in spare if code not in still_bound for level in (False, True)]
    batches = [TypingBatch()]
    for character in text.replace("\r\n", "\n"):
        keysym = keysym_of(character)
        stroke = layout.get(keysym) or bound.get(keysym)
        if stroke is None:
            if not free:
                if not spare:
                    raise HttpError(500, f"text: the layout lacks {character!r} and no keycode is spare for it")
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
        self._bound: dict[int, tuple[int, int]] = {}

    def type(self, text: str, interval_s: float) -> dict[str, object]:
        """Type `text` into the focused window.

        Returns `typed`, the number of characters, and `acknowledged`: the client confirmed that it has read them all.

        Raises:
            HttpError: A character cannot be typed, or the X server is not reachable. Nothing was typed.
        """
        with self._lock(), X11() as x:
            x.require_xtest()
            keyboard = x.keyboard_map()
            shift = next((code for code, row in keyboard.items() if _SHIFT_L in row[:1]), None)
            if shift is None:
                raise HttpError(500, "the keyboard map has no Shift key")
            batches = plan_typing(text, keyboard, self._bound)
            with x.plain_keyboard():
                for batch in batches:
                    if batch.rebinds and not x.ping_focus(5.0):
                        # The client does not support pings (xterm, for one), so give it time to read its keys.
                        time.sleep(0.5)
                    bindings = {code: (pair[0], pair[1]) for code, pair in batch.bindings.items()}
                    for first, rows in consecutive_rows(bindings):
                        x.bind_keys(first, rows)
                    self._bound.update(bindings)
                    self._press(x, batch.strokes, shift, interval_s)
            return {"typed": len(text), "acknowledged": x.ping_focus(5.0)}

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
