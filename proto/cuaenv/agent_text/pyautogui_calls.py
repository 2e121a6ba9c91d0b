"""Parse pyautogui calls to typed actions. Nothing is ever executed. Pure.

The source is parsed to a syntax tree that may only contain `pyautogui.NAME(...)` and `time.sleep(...)` with literal
strings, numbers and lists of these, one call per statement, and imports of the two modules, which are ignored. Names,
argument order and directions are pyautogui's: `scroll` is positive upwards, `move` and `drag` are relative to the
pointer. Arguments about speed are ignored.
"""

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Literal, NamedTuple, cast

from cuaenv.actions import (
    MAX_ACTION_COUNT,
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
    Scroll,
    Wait,
)
from cuaenv.agent_text import values
from cuaenv.agent_text.values import ParseError

_ALIASES = {
    "type": "write",
    "typewrite": "write",
    "double_click": "doubleClick",
    "right_click": "rightClick",
    "triple_click": "tripleClick",
    "leftClick": "click",
    "moveRel": "move",
    "dragRel": "drag",
    "vscroll": "scroll",
}
_POINT = ("x", "y")
#: pyautogui's parameters in order, up to the last one that is used.
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "click": (*_POINT, "clicks", "interval", "button"),
    "doubleClick": (*_POINT, "interval", "button"),
    "tripleClick": (*_POINT, "interval", "button"),
    "rightClick": _POINT,
    "middleClick": _POINT,
    "moveTo": _POINT,
    "move": ("xOffset", "yOffset"),
    "dragTo": (*_POINT, "duration", "tween", "button"),
    "drag": ("xOffset", "yOffset", "duration", "tween", "button"),
    "mouseDown": (*_POINT, "button"),
    "mouseUp": (*_POINT, "button"),
    "scroll": ("clicks", *_POINT),
    "hscroll": ("clicks", *_POINT),
    "write": ("message", "interval"),
    "press": ("keys", "presses", "interval"),
    "keyDown": ("key",),
    "keyUp": ("key",),
    "screenshot": (),
    "sleep": ("seconds",),
}
#: Arguments about speed: parsed as literals and ignored.
_PACE = ("interval", "duration", "tween", "logScreenshot", "pause", "_pause", "mouseDownUp")
#: The calls that press a button: its name and the number of clicks.
BUTTON_CALLS: Mapping[str, tuple[str, int]] = {
    "rightClick": ("right", 1),
    "middleClick": ("middle", 1),
    "doubleClick": ("left", 2),
    "tripleClick": ("left", 3),
}
_BUTTONS = {"left": "left", "primary": "left", "middle": "middle", "right": "right", "secondary": "right"}
_MAX_PRESSES = 64
#: Most characters outside of strings and comments: 64 calls have less than half of it. Python's parser holds the
#: interpreter lock for up to 3 ms per 1,000 such characters.
_MAX_CODE_CHARS = 8192
#: Most characters in all: twice the longest text that can be typed.
_MAX_CHARS = 131_072
# A string without an end counts up to where Python's tokenizer fails, so that the search never starts again.
_STRING_OR_COMMENT = re.compile(
    r"""#[^\n]*|(\'\'\'|\"\"\")(?:[^\\]|\\.)*?(?:\1|\Z)|(['"])(?:\\.|(?!\2)[^\\\n])*(?:\2|$|\\?\Z)""",
    re.DOTALL | re.MULTILINE,
)
#: A screenshot follows every action anyway, so an explicit one is a minimal wait.
_LOOK_S = 0.1


class Call(NamedTuple):
    """One action, and the call that it was written as."""

    action: Action
    name: str
    arguments: Mapping[str, object]


def parse_calls(source: str, *, pointer: tuple[int, int] | None, max_calls: int = MAX_ACTION_COUNT) -> list[Call]:
    """Return the actions of calls, in order; `pointer` is its position before them, if it is known.

    Raises:
        ParseError: The source has something else than calls with literal arguments.
    """
    if len(source) > _MAX_CHARS:
        raise ParseError(f"the code has {len(source)} characters; give at most {_MAX_CHARS}")
    code_chars = len(_STRING_OR_COMMENT.sub("", source))
    if code_chars > _MAX_CODE_CHARS:
        raise ParseError(f"the code has {code_chars} characters outside of strings; give at most {_MAX_CODE_CHARS}")
    try:
        with warnings.catch_warnings():
            # Suppress the parser's warnings of invalid escapes such as '\d'.
            warnings.simplefilter("ignore")
            statements = _parse(source.strip())
    except (SyntaxError, ValueError) as error:
        raise ParseError(f"the code is not valid Python: {str(error)[:80]}") from error
    statements = [statement for statement in statements if not _is_import(statement)]
    if len(statements) > max_calls:
        raise ParseError(f"there are {len(statements)} calls; give at most {max_calls}")
    calls: list[Call] = []
    for statement in statements:
        for one in _parse_statement(statement, pointer):
            calls.append(one)
            pointer = pointer_after(one.action) or pointer
    return calls


def parse_action(text: str, *, pause_s: float, pointer: tuple[int, int] | None) -> list[Action]:
    """Return the actions of OSWorld's form of an action: calls, or WAIT (for `pause_s`), DONE or FAIL.

    Raises:
        ParseError, RecursionError, MemoryError: It is something else.
    """
    match text.strip().upper():
        case "DONE":
            return [Done()]
        case "FAIL":
            return [Fail()]
        case "WAIT":
            return [Wait(timedelta(seconds=max(pause_s, _LOOK_S)))]
    actions = [call.action for call in parse_calls(text, pointer=pointer)]
    if not actions:
        raise ParseError("there is no call")
    return actions


def pointer_after(action: Action) -> tuple[int, int] | None:
    """Return where an action leaves the pointer; None if it does not move it."""
    match action:
        case Drag():
            return action.end_x, action.end_y
        case Move() | Click() | MouseDown() | MouseUp() | Scroll() if action.x is not None and action.y is not None:
            return action.x, action.y
        case _:
            return None


def _parse(source: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except SystemError:
        # CPython 3.11 bug: a garbage collection during ast.parse that parses itself, such as one that formats a
        # traceback, corrupts the parser's recursion counter. The tree is unaffected, so retry once.
        return ast.parse(source).body


def _is_import(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Import) and all(
        alias.name in ("pyautogui", "time") and alias.asname is None for alias in statement.names
    )


def _parse_statement(statement: ast.stmt, pointer: tuple[int, int] | None) -> Sequence[Call]:
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr="sleep")) as call):
            name = "sleep"
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="pyautogui"), attr=name)) as call):
            pass
        case _:
            raise ParseError(
                f"line {statement.lineno} is not a call of pyautogui or time.sleep; only these are allowed"
            )
    positional = [_literal(value) for value in call.args]
    named: dict[str, object] = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in named:
            raise ParseError(f"{name}: arguments must be given one by one")
        named[keyword.arg] = _literal(keyword.value)
    name = _ALIASES.get(name, name)
    if name == "hotkey":
        pressed = positional[0] if len(positional) == 1 and isinstance(positional[0], list) else positional
        if [key for key in named if key not in _PACE]:
            raise ParseError("hotkey takes key names")
        return [Call(values.key_chord(pressed), name, {"keys": pressed})]
    if name not in _PARAMETERS:
        raise ParseError(
            f"pyautogui.{values.quoted(name)[1:-1]} is not among the calls: hotkey, {', '.join(_PARAMETERS)}"
        )
    given = _bind(name, positional, named)
    return [Call(action, name, given) for action in _actions(name, given, pointer)]


def _literal(node: ast.expr) -> object:
    """Return a literal's value. Raises: ParseError for anything else."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.UnaryOp(op=ast.UAdd(), operand=ast.Constant(value=int() | float() as value)):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            if any(isinstance(item, ast.List | ast.Tuple) for item in items):
                raise ParseError("lists within lists are not allowed")
            return [_literal(item) for item in items]
        case ast.Attribute(value=ast.Name(id="pyautogui"), attr=name) if name.startswith("ease") or name == "linear":
            # A tween, which controls the pointer's acceleration.
            return None
        case _:
            raise ParseError(f"arguments must be literal strings, numbers or lists, not {type(node).__name__}")


def _bind(name: str, positional: Sequence[object], named: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments by name, as Python would bind them, without those about speed."""
    parameters = _PARAMETERS[name]
    # A point may be given as one pair.
    if parameters[:1] == ("x",) and positional and isinstance(positional[0], list) and len(positional[0]) == 2:
        positional = [*positional[0], *positional[1:]]
    if len(positional) > len(parameters):
        # Positional arguments after the last used parameter are about speed.
        positional, beyond = positional[: len(parameters)], positional[len(parameters) :]
        if not all(value is None or isinstance(value, int | float) for value in beyond):
            raise ParseError(f"{name} takes {', '.join(parameters) or 'no arguments'}")
    bound = dict(zip(parameters, positional, strict=False))
    for key, value in named.items():
        if key in bound or (key not in parameters and key not in _PACE):
            takes = ", ".join(parameters) or "no arguments"
            raise ParseError(f"{name} takes {takes}; {values.quoted(key)} is unknown or given twice")
        bound[key] = value
    return {key: value for key, value in bound.items() if key not in _PACE}


def _actions(name: str, given: Mapping[str, object], pointer: tuple[int, int] | None) -> Sequence[Action]:
    match name:
        case "click" | "doubleClick" | "tripleClick" | "rightClick" | "middleClick":
            button, count = BUTTON_CALLS.get(name, ("left", 1))
            if name == "click" and "clicks" in given:
                count = _count(given["clicks"], "clicks", 10)
            x, y = _point(given)
            return [Click(x, y, _button(given, button), count)]
        case "moveTo":
            return [Move(*values.point([given.get("x"), given.get("y")], "the point"))]
        case "move":
            return [Move(*_relative(pointer, given, name))]
        case "dragTo":
            end = values.point([given.get("x"), given.get("y")], "the point")
            return [Drag(None, None, *end, _button(given))]
        case "drag":
            return [Drag(None, None, *_relative(pointer, given, name), _button(given))]
        case "mouseDown":
            x, y = _point(given)
            return [MouseDown(x, y, _button(given))]
        case "mouseUp":
            x, y = _point(given)
            return [MouseUp(x, y, _button(given))]
        case "scroll":
            x, y = _point(given)
            return [Scroll(x, y, dy=-values.wheel_clicks(given.get("clicks"), "clicks"))]
        case "hscroll":
            x, y = _point(given)
            return [Scroll(x, y, dx=values.wheel_clicks(given.get("clicks"), "clicks"))]
        case "write":
            message = given.get("message")
            if isinstance(message, list):
                return [values.key_chord([key]) for key in message]
            return [values.type_action(message, "message")]
        case "press":
            keys = given.get("keys")
            each = [values.key_chord([key]) for key in (keys if isinstance(keys, list) else [keys])]
            return each * _count(given.get("presses", 1), "presses", _MAX_PRESSES)
        case "keyDown":
            return [KeyDown(values.key_name(given.get("key"), "key"))]
        case "keyUp":
            return [KeyUp(values.key_name(given.get("key"), "key"))]
        case "screenshot":
            return [values.wait_action(_LOOK_S, "seconds")]
        case _:
            return [values.wait_action(given.get("seconds"), "seconds")]


def _point(given: Mapping[str, object]) -> tuple[int, int] | tuple[None, None]:
    if given.get("x") is None and given.get("y") is None:
        return None, None
    return values.point([given.get("x"), given.get("y")], "the point")


def _relative(pointer: tuple[int, int] | None, given: Mapping[str, object], name: str) -> tuple[int, int]:
    dx, dy = values.point([given.get("xOffset", 0), given.get("yOffset", 0)], "the offset")
    if pointer is None:
        raise ParseError(f"{name} is relative to the pointer, which has no known position yet; use {name}To")
    return pointer[0] + dx, pointer[1] + dy


def _button(given: Mapping[str, object], default: str = "left") -> Literal["left", "middle", "right"]:
    name = given.get("button", default)
    if not isinstance(name, str) or name not in _BUTTONS:
        raise ParseError(f"button must be left, middle or right, not {values.quoted(name)}")
    return cast(Literal["left", "middle", "right"], _BUTTONS[name])


def _count(value: object, name: str, most: int) -> int:
    count = values.number(value, name)
    if not (count.is_integer() and 1 <= count <= most):
        raise ParseError(f"{name} must be 1 to {most}, not {values.quoted(value)}")
    return int(count)
