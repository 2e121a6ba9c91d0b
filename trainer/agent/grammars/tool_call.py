"""The tool call of Slime-OSWorld: one JSON call of its variant of `computer_use`, points in pixels.

Differences from `computer_use.py`: `click`, `scroll` with a direction and an amount, and drags to `end_coordinate`.
Clicks need a point. The arguments may be given without the tool's name.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta

from cuaenv.agent_text import values
from cuaenv.agent_text.values import ParseError
from cuaenv.client import Action, Click, Done, Drag, Fail, PressKeys, Scroll, TypeText, Wait
from trainer.agent.coordinates import Picture
from trainer.agent.grammars.computer_use import (
    TOOL,
    call_intent,
    directed_scroll,
    direction_and_amount,
    ending,
    optional_point,
)
from trainer.agent.grammars.grammar import Grammar, Intent, UnsupportedAction, only_action
from trainer.agent.grammars.tool_calls import CLOSE, OPEN, json_calls, json_value

_WAIT_S = 2.0
_SCROLL_CLICKS = 3
_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "left_click": ("coordinate",),
    "click": ("coordinate",),
    "right_click": ("coordinate",),
    "double_click": ("coordinate",),
    "type": ("text",),
    "key": ("keys",),
    "scroll": ("direction", "amount", "coordinate"),
    "left_click_drag": ("end_coordinate", "coordinate"),
    "wait": ("time",),
    "terminate": ("status",),
}


class ToolCall(Grammar):
    """`<tool_call>{"name": "computer_use", "arguments": {"action": ...}}</tool_call>`, one a reply."""

    name = "tool-call"
    stop = (CLOSE,)

    def instructions(self, picture: Picture) -> str:
        return (
            f"Act by one tool call at the end of your reply:\n{OPEN}"
            f'{{"name": "{TOOL}", "arguments": {{"action": "left_click", "coordinate": [200, 150]}}}}{CLOSE}\n'
            "The actions and their arguments:\n"
            "- left_click, right_click, double_click: coordinate\n"
            "- left_click_drag: coordinate to drag from (the pointer's place without it), end_coordinate to drag to\n"
            "- type: text; a newline in it is Enter\n"
            '- key: keys, a list such as ["ctrl", "s"], pressed together\n'
            f"- scroll: direction (up, down, left, right), amount in wheel clicks (default {_SCROLL_CLICKS}),"
            " coordinate (the pointer's place without it)\n"
            f"- wait: time in seconds (default {_WAIT_S:g})\n"
            "- terminate: status, success or failure (the task cannot be done)\n"
            f"Coordinates are [x, y] in pixels of the screenshot, which is {picture.width} wide and"
            f" {picture.height} high."
        )

    @staticmethod
    def parse_arguments(arguments: Mapping[str, object]) -> Intent:
        return intent_of(arguments)

    def read(self, text: str, picture: Picture) -> Sequence[Intent]:
        return parse_call(text, picture)

    def write(self, actions: Sequence[Action]) -> str:
        call = {"name": TOOL, "arguments": _arguments_of(only_action(actions, self.name))}
        return f"{OPEN}{json.dumps(call, ensure_ascii=False)}{CLOSE}"


def parse_call(text: str, _picture: Picture) -> Sequence[Intent]:
    """Parse the reply's only call. Raises: ParseError."""
    calls = list(json_calls(text))
    if len(calls) != 1:
        raise ParseError(f"the reply holds {len(calls)} calls; give one")
    call = calls[0]
    if "action" in call:
        return [intent_of(call)]
    values.check_arguments(call, ("name", "arguments"), "a call")
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments = json_value(arguments, "arguments")
    if call.get("name") != TOOL or not isinstance(arguments, dict):
        raise ParseError(f'a call is {{"name": "{TOOL}", "arguments": {{"action": ...}}}}')
    return [intent_of(arguments)]


def intent_of(arguments: Mapping[str, object]) -> Intent:
    """Return the action of a call. Raises: ParseError."""
    return call_intent(arguments, _ARGUMENTS, _action)


def _action(kind: str, given: Mapping[str, object]) -> Action:
    match kind:
        case "right_click":
            return Click(*values.point(given.get("coordinate")), button="right")
        case "double_click":
            return Click(*values.point(given.get("coordinate")), count=2)
        case "type":
            return values.type_action(given.get("text"))
        case "key":
            return values.key_chord(given.get("keys"))
        case "scroll":
            return directed_scroll(given, given.get("amount", _SCROLL_CLICKS))
        case "left_click_drag":
            end = values.point(given.get("end_coordinate"), "end_coordinate")
            x, y = optional_point(given, "coordinate")
            return Drag(x, y, *end)
        case "wait":
            return values.wait_action(given.get("time", _WAIT_S), "time")
        case "terminate":
            return ending(given.get("status"))
        case _:
            return Click(*values.point(given.get("coordinate")))


def _arguments_of(action: Action) -> dict[str, object]:
    match action:
        case Click(button="left", count=1, modifiers=()) if action.x is not None:
            return {"action": "left_click", "coordinate": [action.x, action.y]}
        case Click(button="right", count=1, modifiers=()) if action.x is not None:
            return {"action": "right_click", "coordinate": [action.x, action.y]}
        case Click(button="left", count=2, modifiers=()) if action.x is not None:
            return {"action": "double_click", "coordinate": [action.x, action.y]}
        case TypeText():
            return {"action": "type", "text": action.text}
        case PressKeys() if not action.hold:
            return {"action": "key", "keys": list(action.keys)}
        case Scroll(modifiers=()):
            direction, amount = direction_and_amount(action)
            at = {} if action.x is None else {"coordinate": [action.x, action.y]}
            return {"action": "scroll", "direction": direction, "amount": amount, **at}
        case Drag(button="left", modifiers=()):
            start = {} if action.start_x is None else {"coordinate": [action.start_x, action.start_y]}
            return {"action": "left_click_drag", **start, "end_coordinate": [action.end_x, action.end_y]}
        case Wait():
            seconds = action.duration / timedelta(seconds=1)
            return {"action": "wait", **({} if seconds == _WAIT_S else {"time": seconds})}
        case Done(answer=""):
            return {"action": "terminate", "status": "success"}
        case Fail():
            return {"action": "terminate", "status": "failure"}
        case _:
            raise UnsupportedAction(f"tool-call cannot express {action}")
