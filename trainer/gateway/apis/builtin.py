"""The vendors' own tools as functions, because an open model knows them only by a schema in its prompt.

A call of such a function has the arguments that the vendor's API returns.
"""

from collections.abc import Mapping
from typing import Any

from trainer.agent.grammars.anthropic import ARGUMENTS, BASH, COMPUTER, EDITOR, EDITS
from trainer.agent.grammars.openai import OpenAI
from trainer.gateway.prompts import function_tool, invalid

_TEXT = {"type": "string"}
_NUMBER = {"type": "number"}
_POINT = {"type": "array", "items": {"type": "integer"}}
_WORD = {"type": "string", "enum": ["up", "down", "left", "right"]}
#: Of all actions of Anthropic's computer.
_COMPUTER: Mapping[str, Any] = {
    "action": {"type": "string", "enum": list(ARGUMENTS)},
    "coordinate": {**_POINT, "description": "[x, y] in pixels of the screenshot"},
    "start_coordinate": _POINT,
    "text": {**_TEXT, "description": "text to type, keys such as ctrl+s, or keys to hold during a click"},
    "duration": {**_NUMBER, "description": "seconds of wait and hold_key"},
    "scroll_direction": _WORD,
    "scroll_amount": {**_NUMBER, "description": "clicks of the wheel"},
    "repeat": _NUMBER,
    "region": _POINT,
}
_EDITOR: Mapping[str, Any] = {
    "command": {"type": "string", "enum": [*EDITS, "insert"]},
    "path": _TEXT,
    "view_range": _POINT,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": _NUMBER,
    "insert_text": _TEXT,
}
_BASH: Mapping[str, Any] = {"command": _TEXT, "restart": {"type": "boolean"}}
#: By the start of the type that a request names: name, description, properties, required ones.
_ANTHROPIC: Mapping[str, tuple[str, str, Mapping[str, Any], list[str]]] = {
    "computer_": (COMPUTER, "Use mouse and keyboard of a computer and see its screen.", _COMPUTER, ["action"]),
    "bash_": (BASH, "Run a command in a shell that stays.", _BASH, []),
    "text_editor_": (EDITOR, "View and edit files.", _EDITOR, ["command", "path"]),
}
OPENAI_COMPUTER = "computer"
_POINTS = {"type": "array", "items": {"type": "object", "properties": {"x": _NUMBER, "y": _NUMBER}}}
_ACTION: Mapping[str, Any] = {
    "type": {
        "type": "string",
        "enum": ["click", "double_click", "drag", "keypress", "move", "screenshot", "scroll", "type", "wait"],
    },
    "x": {**_NUMBER, "description": "pixels of the screenshot"},
    "y": _NUMBER,
    "button": {"type": "string", "enum": ["left", "right", "wheel", "back", "forward"]},
    "scroll_x": {**_NUMBER, "description": "pixels, positive to the right"},
    "scroll_y": {**_NUMBER, "description": "pixels, positive downwards"},
    "text": _TEXT,
    "keys": {"type": "array", "items": _TEXT, "description": "keys to press, or to hold during a click"},
    "path": _POINTS,
}


def anthropic_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return one of Anthropic's tools as a function. Raises: Refused: It is unknown."""
    kind = str(tool.get("type"))
    for prefix, (name, description, properties, required) in _ANTHROPIC.items():
        if kind.startswith(prefix):
            size = [tool.get("display_width_px"), tool.get("display_height_px")]
            screen = f" The screen is {size[0]} wide and {size[1]} high." if all(size) else ""
            schema = {"type": "object", "properties": properties, "required": required}
            return function_tool(tool.get("name") or name, description + screen, schema)
    raise invalid(f"a tool has the type {kind[:40]!r}; use functions, computer, bash or text_editor")


def openai_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return OpenAI's computer as a function. Raises: Refused: It is another tool."""
    kind = str(tool.get("type"))
    if kind not in ("computer", "computer_use_preview", "computer-preview"):
        raise invalid(f"a tool has the type {kind[:40]!r}; use functions or computer")
    size = [tool.get("display_width"), tool.get("display_height")]
    screen = f" The screen is {size[0]} wide and {size[1]} high." if all(size) else ""
    action = {"type": "object", "properties": _ACTION, "required": ["type"]}
    actions = {"type": "array", "items": action, "description": "performed in order"}
    schema = {"type": "object", "properties": {"actions": actions}, "required": ["actions"]}
    return function_tool(OPENAI_COMPUTER, f"Use mouse and keyboard of a computer.{screen}", schema)


def checked_actions(arguments: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the actions of a call, with the fields that OpenAI's API always has. Raises: ParseError."""
    given = {"type": "computer_call", **arguments}
    OpenAI({}).intents_of(given)
    return complete_actions(given)


def complete_actions(call: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the actions of a `computer_call`, without nulls and with the fields that the API always has."""
    listed = call.get("actions") or [call.get("action")]
    given = [action for action in listed if isinstance(action, dict)]
    return [_complete({name: value for name, value in action.items() if value is not None}) for action in given]


def _complete(action: Mapping[str, Any]) -> Mapping[str, Any]:
    if action.get("type") == "click":
        return {"button": "left", **action}
    return {"scroll_x": 0, "scroll_y": 0, **action} if action.get("type") == "scroll" else action
