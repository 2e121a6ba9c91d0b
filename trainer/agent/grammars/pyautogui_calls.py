"""Parse pyautogui calls to intents, and render actions as such calls. Nothing is ever executed. Pure.

Also the keywords of pyautogui agents for ending a task and waiting: DONE, FAIL and WAIT, in any case.
"""

from datetime import timedelta

from cuaenv.actions import MAX_ACTION_COUNT
from cuaenv.agent_text import pyautogui_calls
from cuaenv.agent_text.pyautogui_calls import BUTTON_CALLS
from cuaenv.client import (
    Action,
    Click,
    Done,
    Drag,
    Fail,
    KeyDown,
    KeyUp,
    MouseDown,
    MouseUp,
    Move,
    PressKeys,
    Scroll,
    TypeText,
    Wait,
)
from trainer.agent.coordinates import Picture
from trainer.agent.grammars.grammar import Intent, UnsupportedAction, intent, split_actions

_WAIT_S = 2.0


def parse_calls(source: str, picture: Picture, *, max_calls: int = MAX_ACTION_COUNT) -> list[Intent]:
    """Return the actions of calls, in order. Raises: ParseError."""
    calls = pyautogui_calls.parse_calls(source, pointer=picture.pointer, max_calls=max_calls)
    return [intent(call.action, call.name, call.arguments) for call in calls]


def render_calls(action: Action) -> list[str]:
    """Return the calls for an action, one per line. Raises: UnsupportedAction."""
    return [_call(part) for part in split_actions(action)]


def _call(action: Action) -> str:
    match action:
        case Move():
            return f"pyautogui.moveTo({action.x}, {action.y})"
        case Click(button=button, count=count):
            name = next((name for name, meant in BUTTON_CALLS.items() if meant == (button, count)), "click")
            more = "" if name != "click" or (button, count) == ("left", 1) else f"clicks={count}, button={button!r}"
            return _call_at(name, action.x, action.y, more)
        case Drag():
            return f"pyautogui.dragTo({action.end_x}, {action.end_y}, button={action.button!r})"
        case MouseDown():
            return _call_at("mouseDown", action.x, action.y, f"button={action.button!r}")
        case MouseUp():
            return _call_at("mouseUp", action.x, action.y, f"button={action.button!r}")
        case Scroll() if action.dy or action.dx:
            name, clicks = ("scroll", -action.dy) if action.dy else ("hscroll", action.dx)
            at = "" if action.x is None else f", x={action.x}, y={action.y}"
            return f"pyautogui.{name}({clicks}{at})"
        case TypeText():
            return f"pyautogui.write({action.text!r})"
        case PressKeys(keys=[key]) if not action.hold:
            return f"pyautogui.press({key!r})"
        case PressKeys() if not action.hold:
            return f"pyautogui.hotkey({', '.join(map(repr, action.keys))})"
        case KeyDown():
            return f"pyautogui.keyDown({action.key!r})"
        case KeyUp():
            return f"pyautogui.keyUp({action.key!r})"
        case Wait():
            return f"time.sleep({action.duration.total_seconds():g})"
        case _:
            raise UnsupportedAction(f"pyautogui cannot express {action}")


def _call_at(name: str, x: int | None, y: int | None, more: str) -> str:
    at = [] if x is None else [f"{x}, {y}"]
    return f"pyautogui.{name}({', '.join([*at, *([more] if more else [])])})"


def keyword(text: str) -> Intent | None:
    """Return the action of a text that is exactly one of the keywords; None otherwise."""
    name = text.strip().upper()
    actions: dict[str, Action] = {"DONE": Done(), "FAIL": Fail(), "WAIT": Wait(timedelta(seconds=_WAIT_S))}
    return intent(actions[name], name, {}) if name in actions else None


def keyword_for(action: Action) -> str | None:
    """Return the keyword of an action; None if it has none."""
    match action:
        case Done(answer=""):
            return "DONE"
        case Fail():
            return "FAIL"
        case Wait() if action.duration == timedelta(seconds=_WAIT_S):
            return "WAIT"
        case _:
            return None
