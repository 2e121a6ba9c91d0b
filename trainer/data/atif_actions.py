"""Actions of ATIF documents: calls of our function `computer`, and of Harbor's agent computer-1. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from cuaenv.action_codec import from_json
from cuaenv.client import Action, Done
from trainer.data.atif import FUNCTION

_CLICKS: Final[Mapping[str, Mapping[str, object]]] = {
    "click": {},
    "double_click": {"count": 2},
    "triple_click": {"count": 3},
    "right_click": {"button": "right"},
    "middle_click": {"button": "middle"},
}
#: Only look, so the picture that follows is what counts.
_LOOKS: Final = frozenset({"screenshot", "cursor_position", "zoom"})
#: Pixels of computer-1's scroll.
_WHEEL_CLICK: Final = 100


class AtifError(ValueError):
    """A document is invalid, or has what a demonstration cannot express; the message names the step."""


def actions_of(function: str, arguments: Mapping[str, Any]) -> list[Action]:
    """Return the actions of a call; none if it only looks.

    Raises:
        AtifError, BadAction: It does not map.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if function == FUNCTION and "action" in given:
        return [from_json(given)]
    if function == "mark_task_complete":
        return [Done(str(given.get("result", "")))]
    kind = given.get("type")
    if function != "computer_action" or not isinstance(kind, str):
        raise AtifError(f"function {function}: not one of {FUNCTION}, computer_action")
    return [] if kind in _LOOKS else [from_json(form) for form in _forms(kind, given)]


def _forms(kind: str, given: Mapping[str, Any]) -> list[dict[str, object]]:
    """Return the JSON objects of an action of computer-1. Raises: AtifError."""
    point: dict[str, object] = {name: given[name] for name in ("x", "y") if name in given}
    held: dict[str, object] = {"modifiers": [given["modifier"]]} if given.get("modifier") else {}
    if kind in _CLICKS:
        return [{"action": "click", **point, "button": given.get("button", "left"), **_CLICKS[kind], **held}]
    match kind:
        case "mouse_down" | "mouse_up":
            return [{"action": kind, **point}]
        case "mouse_move":
            return [{"action": "move", **point}]
        case "type":
            enter: list[dict[str, object]] = (
                [{"action": "press", "keys": ["enter"]}] if given.get("press_enter") else []
            )
            return [{"action": "type", "text": given.get("text", "")}, *enter]
        case "key" | "keypress":
            return [{"action": "press", "keys": _keys(given)}]
        case "key_down" | "key_up":
            return [{"action": kind, "key": key} for key in _keys(given)]
        case "drag":
            return [{"action": "drag", **point, "to_x": given.get("end_x"), "to_y": given.get("end_y")}]
        case "scroll":
            wheel = {"dx": _wheel(given.get("scroll_x", 0)), "dy": _wheel(given.get("scroll_y", 0))}
            return [{"action": "scroll", **point, **wheel, **held}]
        case "wait" | "sleep":
            return [{"action": "wait", "seconds": given.get("duration_seconds") or given.get("duration") or 1}]
        case "done" | "answer" | "terminate":
            return [{"action": "done", "answer": str(given.get("result") or given.get("text") or "")}]
    raise AtifError(f"computer_action {kind}: has no counterpart")


def _keys(given: Mapping[str, Any]) -> list[str]:
    """Return the names of keys; computer-1 also writes chords as one name, such as `ctrl+s`."""
    keys = given.get("keys", [])
    if not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
        raise AtifError(f"keys: {keys!r} is not a list of names")
    return [name for key in keys for name in (key.split("+") if len(key) > 1 else [key])]


def _wheel(pixels: object) -> int:
    """Return clicks of the wheel, as computer-1 makes them. Raises: AtifError."""
    if isinstance(pixels, bool) or not isinstance(pixels, int):
        raise AtifError(f"scroll: {pixels!r} is not a number of pixels")
    clicks = max(1, abs(pixels) // _WHEEL_CLICK) if pixels else 0
    return clicks if pixels > 0 else -clicks
