"""Validate the values that models write, within the limits of the service. Pure; each function raises `ParseError`.

An invalid value is refused with a message for the agent. Wheel clicks and waits are clamped instead, because the
maximum has the same effect: `MAX_WHEEL_CLICKS` reaches the end of any page.
"""

import math
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta

from cuaenv.actions import (
    MAX_CHORD_KEY_COUNT,
    MAX_KEY_NAME_CHARS,
    MAX_PAUSE_S,
    MAX_TEXT_BYTES,
    MAX_WHEEL_CLICKS,
    PressKeys,
    TypeText,
    Wait,
)


class ParseError(Exception):
    """The reply, or a part of it, does not follow the grammar; the message is for the agent."""


def number(value: object, name: str) -> float:
    """Return a finite number of at most 1e9."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParseError(f"{name} must be a number, not {quoted(value)}")
    try:
        finite = math.isfinite(value)
    except OverflowError:
        finite = False
    if not finite or abs(value) > 1e9:
        raise ParseError(f"{name} must be a number of a sensible size, not {quoted(value)}")
    return float(value)


def point(value: object, name: str = "coordinate") -> tuple[int, int]:
    """Return (x, y) of a pair of numbers."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise ParseError(f"{name} must be [x, y], not {quoted(value)}")
    return round(number(value[0], f"{name}'s x")), round(number(value[1], f"{name}'s y"))


def wheel_clicks(value: object, name: str) -> int:
    """Return wheel clicks, clamped."""
    clicks = round(number(value, name))
    if clicks == 0:
        raise ParseError(f"{name} must be at least 1 or at most -1, not {quoted(value)}")
    return max(-MAX_WHEEL_CLICKS, min(MAX_WHEEL_CLICKS, clicks))


def wait_action(value: object, name: str, *, most_s: float = MAX_PAUSE_S) -> Wait:
    """Return a wait, clamped."""
    seconds = number(value, name)
    if seconds <= 0:
        raise ParseError(f"{name} must be more than 0 seconds, not {quoted(value)}")
    return Wait(timedelta(seconds=max(0.001, min(seconds, most_s))))


def text_value(value: object, name: str) -> str:
    """Return a string that can be encoded and is not too long."""
    if not isinstance(value, str):
        raise ParseError(f"{name} must be a text, not {quoted(value)}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ParseError(f"{name} holds half a character") from None
    if size > MAX_TEXT_BYTES:
        raise ParseError(f"{name} has {size} bytes; at most {MAX_TEXT_BYTES}")
    return value


def type_action(value: object, name: str = "text") -> TypeText:
    text = text_value(value, name)
    if not text:
        raise ParseError(f"{name} is empty; there is nothing to type")
    return TypeText(text)


def key_chord(value: object, name: str = "keys") -> PressKeys:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ParseError(f'{name} must be a list of key names such as ["ctrl", "s"], not {quoted(value)}')
    if not 1 <= len(value) <= MAX_CHORD_KEY_COUNT:
        raise ParseError(f"{name} must name 1 to {MAX_CHORD_KEY_COUNT} keys, not {len(value)}")
    return PressKeys(tuple(key_name(key, name) for key in value))


#: Key names of QEMU's monitor that differ from the service's.
_MONITOR_KEYS = {"ret": "enter", "spc": "space", "grave_accent": "grave", "kp_enter": "kpenter"}


def monitor_chord(text: str) -> PressKeys:
    """Return the action of a chord as QEMU's monitor writes it, such as `ctrl-s`; spaces count as dashes."""
    names = [name for name in re.split(r"[\s-]+", text) if name]
    return key_chord([_MONITOR_KEYS.get(name.lower(), name) for name in names], "sendkey")


def key_name(value: object, name: str) -> str:
    key = text_value(value, name)
    if not 1 <= len(key) <= MAX_KEY_NAME_CHARS:
        raise ParseError(f"{name}: the name of a key has 1 to {MAX_KEY_NAME_CHARS} characters, not {len(key)}")
    return key


def check_arguments(arguments: Mapping[str, object], allowed: Sequence[str], what: str) -> None:
    """Refuse unknown arguments instead of ignoring them."""
    unknown = [name for name in arguments if name not in allowed]
    if unknown:
        takes = ", ".join(allowed) or "no arguments"
        raise ParseError(f"{what} takes {takes}; not {', '.join(quoted(name) for name in unknown[:3])}")


def quoted(value: object) -> str:
    """Return a short form of any value for a message to the agent."""
    match value:
        case None | bool() | float():
            return str(value)
        case int():
            return str(value) if -(10**12) < value < 10**12 else "so large a number"
        case str():
            kept = value if len(value) <= 40 else value[:40] + "..."
            return repr(kept.encode("utf-8", "backslashreplace").decode())
        case _:
            return f"a {type(value).__name__}"
