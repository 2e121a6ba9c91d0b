"""The tool `computer_use` of the Qwen models: its actions and its description for the model. Pure.

Names and arguments are those that Qwen3-VL and Qwen3.5-VL were trained with (QwenLM's computer-use cookbook; OSWorld's
agents for both). `left_click_drag` starts at the pointer; `start_coordinate` is OSWorld's addition. The wheel's amount
is called `pixels` and counts wheel clicks, as `pyautogui.scroll` does on Linux. In a click or a scroll, `text` names
modifier keys, as Qwen3.5-VL writes them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from cuaenv.actions import Button
from cuaenv.agent_text import values
from cuaenv.agent_text.values import ParseError
from cuaenv.client import Action, Click, Done, Drag, Fail, Move, PressKeys, Scroll, TypeText, Wait
from trainer.agent.coordinates import Picture
from trainer.agent.grammars.grammar import Intent, UnsupportedAction, intent

TOOL = "computer_use"

CLICKS: Mapping[str, tuple[Button, int]] = {
    "left_click": ("left", 1),
    "right_click": ("right", 1),
    "middle_click": ("middle", 1),
    "double_click": ("left", 2),
    "triple_click": ("left", 3),
}

#: (dx, dy) of one click of the wheel.
DIRECTIONS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
#: Of grammars with an action that only looks at the screen again.
LOOK = Wait(timedelta(milliseconds=1))

#: Arguments of each action, without `action`.
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "key": ("keys",),
    "type": ("text",),
    "mouse_move": ("coordinate",),
    **dict.fromkeys(CLICKS, ("coordinate", "text")),
    "left_click_drag": ("coordinate", "start_coordinate", "text"),
    "scroll": ("pixels", "coordinate", "text"),
    "hscroll": ("pixels", "coordinate", "text"),
    "wait": ("time",),
    "terminate": ("status",),
    "answer": ("text",),
}


def intent_of(arguments: Mapping[str, object]) -> Intent:
    """Return the action of a call. Raises: ParseError."""
    return call_intent(arguments, ARGUMENTS, action_of)


def call_intent(
    arguments: Mapping[str, object],
    allowed: Mapping[str, Sequence[str]],
    parse: Callable[[str, Mapping[str, object]], Action],
) -> Intent:
    """Return the action of a call whose arguments, without `action`, are among those allowed. Raises: ParseError."""
    kind, rest = chosen(arguments, allowed, "action", TOOL)
    return intent(parse(kind, rest), kind, rest)


def chosen(
    given: Mapping[str, object], allowed: Mapping[str, Sequence[str]], key: str, tool: str
) -> tuple[str, dict[str, object]]:
    """Return what a call of a tool chooses by the argument `key`, and its other arguments, without nulls.

    Raises:
        ParseError: There is no such choice, or it does not take an argument.
    """
    kind = given.get(key)
    if not isinstance(kind, str) or kind not in allowed:
        raise ParseError(f"{tool} has no {key} {values.quoted(kind)}; it has {', '.join(allowed)}")
    rest = {name: value for name, value in given.items() if name != key and value is not None}
    values.check_arguments(rest, allowed[kind], kind)
    return kind, rest


def action_of(kind: str, given: Mapping[str, object]) -> Action:
    """Return the action of a kind with its arguments. Raises: ParseError."""
    match kind:
        case "key":
            return values.key_chord(given.get("keys"))
        case "type":
            return values.type_action(given.get("text"))
        case "mouse_move":
            return Move(*values.point(given.get("coordinate")))
        case "left_click_drag":
            end = values.point(given.get("coordinate"))
            start_x, start_y = optional_point(given, "start_coordinate")
            return Drag(start_x, start_y, *end, modifiers=modifiers(given))
        case "scroll":
            x, y = optional_point(given, "coordinate")
            return Scroll(dy=-values.wheel_clicks(given.get("pixels"), "pixels"), x=x, y=y, modifiers=modifiers(given))
        case "hscroll":
            x, y = optional_point(given, "coordinate")
            return Scroll(dx=values.wheel_clicks(given.get("pixels"), "pixels"), x=x, y=y, modifiers=modifiers(given))
        case "wait":
            return values.wait_action(given.get("time"), "time")
        case "terminate":
            return ending(given.get("status"))
        case "answer":
            return Done(values.text_value(given.get("text"), "text"))
        case _:
            button, count = CLICKS[kind]
            x, y = optional_point(given, "coordinate")
            return Click(x, y, button, count, modifiers(given))


def ending(status: object) -> Action:
    """Return the action that ends the task with a status. Raises: ParseError."""
    if status not in ("success", "failure"):
        raise ParseError(f'status must be "success" or "failure", not {values.quoted(status)}')
    return Done() if status == "success" else Fail()


def optional_point(given: Mapping[str, object], name: str) -> tuple[int, int] | tuple[None, None]:
    """Return the point of an argument; without one the mouse acts at the pointer. Raises: ParseError."""
    return (None, None) if given.get(name) is None else values.point(given[name], name)


def directed_scroll(given: Mapping[str, object], amount: object, *, prefix: str = "") -> Scroll:
    """Return a scroll by an amount of wheel clicks. Raises: ParseError."""
    direction = given.get(f"{prefix}direction")
    if not isinstance(direction, str) or direction not in DIRECTIONS:
        raise ParseError(f"{prefix}direction must be up, down, left or right, not {values.quoted(direction)}")
    if values.number(amount, f"{prefix}amount") < 0:
        raise ParseError(f"{prefix}amount must be positive; use the direction")
    clicks, (dx, dy) = values.wheel_clicks(amount, f"{prefix}amount"), DIRECTIONS[direction]
    x, y = optional_point(given, "coordinate")
    return Scroll(x, y, dy * clicks, dx * clicks, modifiers(given))


def direction_and_amount(action: Scroll) -> tuple[str, int]:
    """Return how far a scroll turns the wheel in its one direction. Raises: UnsupportedAction: It has two."""
    for name, (dx, dy) in DIRECTIONS.items():
        amount = action.dx * dx + action.dy * dy
        if amount > 0 and (action.dx, action.dy) == (dx * amount, dy * amount):
            return name, amount
    raise UnsupportedAction("a scroll has one direction")


def modifiers(given: Mapping[str, object]) -> tuple[str, ...]:
    """Return the keys to hold, which `text` names. Raises: ParseError."""
    text = given.get("text")
    if text is None or text == "":
        return ()
    return tuple(values.key_chord(values.text_value(text, "text").split("+"), "text").keys)


def arguments_of(action: Action) -> dict[str, object]:
    """Return the tool's arguments for an action. Raises: UnsupportedAction."""
    match action:
        case PressKeys() if not action.hold:
            return {"action": "key", "keys": list(action.keys)}
        case TypeText():
            return {"action": "type", "text": action.text}
        case Move():
            return {"action": "mouse_move", "coordinate": [action.x, action.y]}
        case Click():
            for kind, (button, count) in CLICKS.items():
                if (button, count) == (action.button, action.count):
                    return {"action": kind, **point_argument(action.x, action.y), **modifier_argument(action)}
        case Drag() if action.button == "left":
            end = {"action": "left_click_drag", "coordinate": [action.end_x, action.end_y]}
            return {
                **end,
                **point_argument(action.start_x, action.start_y, "start_coordinate"),
                **modifier_argument(action),
            }
        case Scroll() if action.dy and not action.dx:
            return {"action": "scroll", "pixels": -action.dy, **_point_and_modifier_arguments(action)}
        case Scroll() if action.dx and not action.dy:
            return {"action": "hscroll", "pixels": action.dx, **_point_and_modifier_arguments(action)}
        case Wait():
            seconds = action.duration.total_seconds()
            return {"action": "wait", "time": int(seconds) if seconds.is_integer() else seconds}
        case Done():
            return {"action": "answer", "text": action.answer} if action.answer else _terminate("success")
        case Fail():
            return _terminate("failure")
    raise UnsupportedAction(f"{TOOL} cannot express {action}")


def _terminate(status: str) -> dict[str, object]:
    return {"action": "terminate", "status": status}


def point_argument(x: int | None, y: int | None, name: str = "coordinate") -> dict[str, object]:
    """Return the argument of a point; none for the pointer's place."""
    return {} if x is None else {name: [x, y]}


def modifier_argument(action: Click | Drag | Scroll) -> dict[str, object]:
    """Return the argument that names the keys to hold."""
    return {"text": "+".join(action.modifiers)} if action.modifiers else {}


def _point_and_modifier_arguments(action: Scroll) -> dict[str, object]:
    return {**point_argument(action.x, action.y), **modifier_argument(action)}


_MEANINGS = {
    "key": "press `keys` together and release them",
    "type": "type `text` into what has the keyboard focus; a newline in it is Enter",
    "mouse_move": "move the pointer to `coordinate`",
    "left_click": "click the left button at `coordinate`",
    "right_click": "click the right button at `coordinate`",
    "middle_click": "click the middle button at `coordinate`",
    "double_click": "click the left button twice at `coordinate`",
    "triple_click": "click the left button three times at `coordinate`",
    "left_click_drag": "drag with the left button from `start_coordinate`, or from the pointer, to `coordinate`",
    "scroll": "turn the wheel by `pixels` clicks, up if positive, down if negative",
    "hscroll": "turn the wheel sideways by `pixels` clicks, right if positive, left if negative",
    "wait": "let `time` seconds pass",
    "terminate": "end the task: `status` says whether you succeeded, or found that it cannot be done",
    "answer": "end a task that asks a question, with `text` as the answer",
}


def tool_schema(picture: Picture) -> str:
    """Return the tool's JSON schema for the prompt."""
    point = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
    properties: dict[str, Any] = {
        "action": {
            "type": "string",
            "enum": list(_MEANINGS),
            "description": "; ".join(f"{name}: {meaning}" for name, meaning in _MEANINGS.items()),
        },
        "keys": {"type": "array", "items": {"type": "string"}, "description": 'Names of keys, such as "ctrl", "s".'},
        "text": {"type": "string", "description": "What to type or to answer; for clicks and scrolls, keys to hold."},
        "coordinate": {**point, "description": "[x, y] where the mouse acts; without it, where the pointer is."},
        "start_coordinate": {**point, "description": "[x, y] where a drag begins."},
        "pixels": {"type": "number", "description": "Clicks of the wheel."},
        "time": {"type": "number", "description": "Seconds."},
        "status": {"type": "string", "enum": ["success", "failure"]},
    }
    function = {
        "name": TOOL,
        "description": (
            "Use the mouse and the keyboard of a desktop. Coordinates are whole numbers from the top left corner of the"
            f" screenshot: x from 0 to {picture.width - 1}, y from 0 to {picture.height - 1},"
            " whatever its size looks like."
        ),
        "parameters": {"type": "object", "properties": properties, "required": ["action"]},
    }
    return json.dumps({"type": "function", "function": function}, ensure_ascii=False)
