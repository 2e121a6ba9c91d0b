"""The forms of an action: protobuf, JSON object, and the one-key form of oracles. Pure.

| form | example |
|---|---|
| protobuf | `Action(click=Click(at=Point(x=3, y=4), count=2))` |
| JSON object | `{"action": "click", "x": 3, "y": 4, "count": 2}`, with a published schema |
| one key | `{"click": {"x": 3, "y": 4, "count": 2}}`, `{"type": "hello"}`, `{"press": ["ctrl", "s"]}` |

All are derived from the dataclasses of `cuaenv.actions` and the contract's messages of the same names. A field's name
has the same meaning, limits and schema in every action. An action without a message, a message without an action, and
a field that `_FIELDS` lacks fail the import.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from datetime import timedelta
from typing import Any, cast, get_args

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from cuaenv import actions
from cuaenv.actions import Action, Button
from cuaenv.v1 import env_pb2


class BadAction(ValueError):
    """An action is malformed; `field` names the field, such as `click.count`, and `problem` says what is wrong."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


@dataclass(frozen=True, slots=True)
class _Values:
    """The values of a field."""

    schema: Mapping[str, object]
    read: Callable[[Any, str], Any]
    """Returns the checked value of a JSON value; the field's name is for errors. Raises: BadAction."""
    write: Callable[[Any], Any] = lambda value: value
    """Returns the JSON value."""


def _shown(value: float) -> str:
    """Return a number for a message: a JSON integer may have hundreds of digits, and is then no float."""
    text = str(value) if isinstance(value, int) else f"{value:g}"
    return text if len(text) <= 20 else f"{text[:20]}... ({len(text)} digits)"


def _integer(low: int, high: int, description: str) -> _Values:
    def read(value: Any, field: str) -> int:
        is_fraction = isinstance(value, float) and not value.is_integer()
        if isinstance(value, bool) or not isinstance(value, int | float) or is_fraction:
            raise BadAction(field, f"{value!r} is not an integer")
        if not low <= value <= high:
            raise BadAction(field, f"{_shown(value)} is outside [{low}, {high}]")
        return int(value)

    return _Values({"type": "integer", "minimum": low, "maximum": high, "description": description}, read)


def _seconds(description: str, *, least: str, most: float = actions.MAX_PAUSE_S) -> _Values:
    def read(value: Any, field: str) -> timedelta:
        is_infinite = isinstance(value, float) and not math.isfinite(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or is_infinite:
            raise BadAction(field, f"{value!r} is not a number of seconds")
        if value < 0 or value > most or (value == 0 and least == "exclusiveMinimum"):
            opening = "(" if least == "exclusiveMinimum" else "["
            raise BadAction(field, f"{_shown(value)} s is outside {opening}0 s, {most:g} s]")
        return timedelta(seconds=value)

    schema = {"type": "number", least: 0, "maximum": most, "description": description}
    return _Values(schema, read, timedelta.total_seconds)


def _read_button(value: Any, field: str) -> Button:
    for name in _BUTTONS:
        if value == name:
            return name
    raise BadAction(field, f"{value!r} is not a button; use one of {', '.join(_BUTTONS)}")


def _read_text(value: Any, field: str, *, least: int = 0, most: int = actions.MAX_TEXT_BYTES) -> str:
    if not isinstance(value, str):
        raise BadAction(field, f"{value!r} is not a text")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise BadAction(field, "has half a character") from None
    if size > most:
        raise BadAction(field, f"has {size} bytes; at most {most}")
    if size < least:
        raise BadAction(field, "is empty")
    return value


def _text(description: str, *, least: int = 1, most: int = actions.MAX_TEXT_BYTES) -> _Values:
    def read(value: Any, field: str) -> str:
        return _read_text(value, field, least=least, most=most)

    bounds = {"minLength": least} if least else {}
    return _Values({"type": "string", **bounds, "description": description}, read)


def _read_object(value: Any, field: str) -> str:
    """Return a JSON object, given as such or as text, as text."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadAction(field, f"is not a JSON object: {str(error)[:80]}") from None
    if not isinstance(parsed, Mapping):
        raise BadAction(field, "is not a JSON object")
    return _read_text(text, field)


def _read_key(value: Any, field: str) -> str:
    name = _read_text(value, field)
    if not 1 <= len(name) <= actions.MAX_KEY_NAME_CHARS:
        most = actions.MAX_KEY_NAME_CHARS
        raise BadAction(field, f"has {len(name)} characters; a key's name has 1 to {most}")
    return name


def _keys(description: str, *, least: int) -> _Values:
    def read(value: Any, field: str) -> tuple[str, ...]:
        if isinstance(value, str) or not isinstance(value, Iterable):
            value = (value,)
        names = tuple(value)
        if len(names) > actions.MAX_CHORD_KEY_COUNT:
            raise BadAction(field, f"has {len(names)} keys; at most {actions.MAX_CHORD_KEY_COUNT}")
        if len(names) < least:
            raise BadAction(field, "is empty; name at least one key")
        return tuple(_read_key(name, f"{field}[{index}]") for index, name in enumerate(names))

    bounds = {"minItems": least, "maxItems": actions.MAX_CHORD_KEY_COUNT}
    return _Values({"type": "array", "items": _KEY.schema, **bounds, "description": description}, read, list)


_BUTTONS: Mapping[Button, int] = dict(zip(get_args(Button), env_pb2.Button.values()[1:], strict=True))
_BUTTON = _Values({"type": "string", "enum": list(_BUTTONS)}, _read_button)
_TEXT = _Values({"type": "string"}, _read_text)
_KEY = _Values({"type": "string", "minLength": 1, "maxLength": actions.MAX_KEY_NAME_CHARS}, _read_key)
_X = _integer(0, 32767, "Pixels from the left edge of the picture.")
_Y = _integer(0, 32767, "Pixels from the top edge of the picture.")
_WHEEL = actions.MAX_WHEEL_CLICKS
_MOST_S = actions.MAX_TIMEOUT_S
_MOST_LINES = 1_000_000
_MOST_NAME = 256

#: For each field of an action: its name in JSON, and its values.
_FIELDS: Mapping[str, tuple[str, _Values]] = {
    "x": ("x", _X),
    "y": ("y", _Y),
    "start_x": ("x", _X),
    "start_y": ("y", _Y),
    "end_x": ("to_x", _X),
    "end_y": ("to_y", _Y),
    "button": ("button", _BUTTON),
    "count": ("count", _integer(1, actions.MAX_CLICK_COUNT, "Number of clicks; 2 is a double click.")),
    "modifiers": ("modifiers", _keys('Keys held down, such as ["ctrl"].', least=0)),
    "dy": ("dy", _integer(-_WHEEL, _WHEEL, "Wheel clicks down.")),
    "dx": ("dx", _integer(-_WHEEL, _WHEEL, "Wheel clicks to the right.")),
    "text": ("text", _TEXT),
    "keys": ("keys", _keys('Keys pressed together, such as ["ctrl", "s"].', least=1)),
    "hold": ("hold_s", _seconds("How long the keys are held.", least="minimum")),
    "key": ("key", _KEY),
    "duration": ("seconds", _seconds("How long to wait.", least="exclusiveMinimum")),
    "answer": ("answer", _TEXT),
    "explanation": ("explanation", _TEXT),
    "command": ("command", _text("Command of the shell.")),
    "timeout": ("timeout_s", _seconds("Time after which it is killed.", least="exclusiveMinimum", most=_MOST_S)),
    "path": ("path", _text("Absolute, or relative to the user's home.", most=actions.MAX_PATH_BYTES)),
    "first_line": ("first_line", _integer(1, _MOST_LINES, "First line to read, from 1.")),
    "line_count": ("line_count", _integer(0, _MOST_LINES, "Lines to read; 0 for all.")),
    "content": ("content", _text("Text of the file.", least=0, most=actions.MAX_FILE_BYTES)),
    "old": ("old", _text("Text that occurs exactly once in the file.")),
    "new": ("new", _text("Text in its place.", least=0)),
    "server": ("server", _text("Name of an MCP server of the task.", most=_MOST_NAME)),
    "tool": ("tool", _text("Name of one of its tools; without it, they are listed.", least=0, most=_MOST_NAME)),
    "arguments": ("arguments", _Values({"type": "object"}, _read_object, json.loads)),
    "question": ("question", _text("Question for the user.", most=actions.MAX_QUESTION_BYTES)),
}
#: The contract's name of a position, by the action's field of its x coordinate.
_POINTS = {"x": ("at", "to"), "start_x": ("start",), "end_x": ("end",)}
#: Names in JSON that differ from those in the contract.
_NAMES = {"type_text": "type", "press_keys": "press"}


def _json_name(field: Field[Any]) -> str:
    return _FIELDS[field.name][0]


def _values(field: Field[Any]) -> _Values:
    return _FIELDS[field.name][1]


@dataclass(frozen=True, slots=True)
class ActionForms:
    """The forms of one action."""

    kind: type[Action]
    wire_name: str
    """Its field in the `oneof` of the contract."""
    name: str
    """Its name in JSON."""
    fields: Mapping[str, Field[Any]]
    """Fields by their names in JSON."""
    points: Mapping[str, tuple[Field[Any], Field[Any]]]
    """Its positions, by their names in the contract."""
    others: tuple[Field[Any], ...]
    """The fields that are not part of a position."""

    def schema(self) -> dict[str, object]:
        """Return the schema of the JSON object."""
        properties: dict[str, object] = {"action": {"type": "string", "const": self.name}}
        for name, field in self.fields.items():
            default = {} if field.default in (MISSING, None) else {"default": _values(field).write(field.default)}
            properties[name] = {**_values(field).schema, **default}
        return {
            "type": "object",
            "title": self.kind.__name__,
            "description": (self.kind.__doc__ or "").partition("\n")[0],
            "properties": properties,
            "required": ["action", *(name for name, field in self.fields.items() if field.default is MISSING)],
            "additionalProperties": False,
        }

    def read(self, values: Mapping[str, Any]) -> Action:
        """Return the action with the fields of a JSON object. Raises: BadAction."""
        unknown = next((name for name in values if name not in self.fields), None)
        if unknown is not None:
            remedy = "a colon needs a space" if ":" in unknown else f"{self.name} takes {', '.join(self.fields)}"
            raise BadAction(f"{self.name}.{unknown}", f"is unknown; {remedy}")
        read: dict[str, Any] = {}
        for name, field in self.fields.items():
            if values.get(name) is not None:
                read[field.name] = _values(field).read(values[name], f"{self.name}.{name}")
            elif field.default is MISSING:
                raise BadAction(f"{self.name}.{name}", "is required")
        for x, y in self.points.values():
            if (x.name in read) != (y.name in read):
                raise BadAction(self.name, f"give {_json_name(x)} and {_json_name(y)}, or neither")
        return self.kind(**read)

    def write(self, action: Action) -> dict[str, object]:
        """Return the fields of an action's JSON object, without default values."""
        values = {name: (field, getattr(action, field.name)) for name, field in self.fields.items()}
        return {name: _values(field).write(value) for name, (field, value) in values.items() if value != field.default}

    def own_field(self) -> str | None:
        """Return the field whose value alone is the argument in the one-key form; None for actions of the pointer."""
        return None if self.points else next(iter(self.fields))


def _forms() -> Iterator[ActionForms]:
    kinds = {kind.__name__: kind for kind in get_args(Action)}
    for wire in env_pb2.Action.DESCRIPTOR.oneofs_by_name["kind"].fields:
        message = cast(Descriptor, wire.message_type)
        if message.name not in kinds:
            raise TypeError(f"action {message.name} of the contract is missing in cuaenv.actions.Action")
        kind = kinds.pop(message.name)
        own = {field.name: field for field in fields(kind)}
        points = {
            point: (own[x_name], own[x_name.removesuffix("x") + "y"])
            for x_name, names in _POINTS.items()
            for point in names
            if x_name in own and point in message.fields_by_name
        }
        others = tuple(field for field in own.values() if all(field not in pair for pair in points.values()))
        unread = set(message.fields_by_name) ^ {*points, *(field.name for field in others)}
        if unread:
            raise TypeError(f"action {message.name}: {', '.join(unread)} is not in both the contract and the dataclass")
        by_json_name = {_json_name(field): field for field in own.values()}
        yield ActionForms(kind, wire.name, _NAMES.get(wire.name, wire.name), by_json_name, points, others)
    if kinds:
        raise TypeError(f"the contract has no message for {', '.join(kinds)}")


FORMS: Mapping[str, ActionForms] = {form.name: form for form in _forms()}
"""Actions by name in JSON, in the contract's order."""
SCREEN_FORMS: Mapping[str, ActionForms] = {
    name: form for name, form in FORMS.items() if not issubclass(form.kind, actions.ToolAction)
}
"""Those that use no tool."""
TOOL_KINDS = frozenset(FORMS) - frozenset(SCREEN_FORMS)
"""Names of the others; in the contract they are the same."""
_BY_KIND = {form.kind: form for form in FORMS.values()}
_BY_WIRE_NAME = {form.wire_name: form for form in FORMS.values()}


def to_proto(action: Action) -> env_pb2.Action:
    """Return the protobuf message of an action.

    Raises:
        TypeError: It is not an action.
        ValueError: Only one of x and y is given.
    """
    form = _BY_KIND.get(type(action))
    if form is None:
        raise TypeError(f"{action!r} is not an action; step takes actions such as Click(x=640, y=400)")
    message = getattr(env_pb2, form.kind.__name__)()
    for name, (x_field, y_field) in form.points.items():
        x, y = getattr(action, x_field.name), getattr(action, y_field.name)
        if (x is None) != (y is None):
            raise ValueError(f"x={x} y={y}: incomplete position; give both coordinates or neither")
        if x is not None:
            getattr(message, name).CopyFrom(env_pb2.Point(x=x, y=y))
    for field in form.others:
        value = getattr(action, field.name)
        if isinstance(value, timedelta):
            getattr(message, field.name).FromTimedelta(value)
        elif isinstance(value, tuple):
            getattr(message, field.name).extend(value)
        else:
            setattr(message, field.name, _BUTTONS[value] if field.name == "button" else value)
    return env_pb2.Action(**{form.wire_name: message})


def from_proto(message: env_pb2.Action, *, place: Callable[[int, int], tuple[int, int]] | None = None) -> Action:
    """Return the action of a message.

    Args:
        place: Converts positions. They are not checked: only the guest knows its screen.

    Raises:
        BadAction: A field is missing or out of range; an empty name of the field means the action itself.
    """
    wire_name = message.WhichOneof("kind")
    if wire_name is None:
        raise BadAction("", "has no kind, or one that this release does not know")
    form = _BY_WIRE_NAME[wire_name]
    body: Message = getattr(message, wire_name)
    values: dict[str, Any] = {}
    for name, (x, y) in form.points.items():
        if body.HasField(name):
            point = getattr(body, name)
            values[x.name], values[y.name] = place(point.x, point.y) if place else (point.x, point.y)
        elif x.default is MISSING:
            raise BadAction(f"{wire_name}.{name}", "is required")
    for field in form.others:
        value = _wire_value(body, field, f"{wire_name}.{field.name}")
        if value is not None:
            values[field.name] = _values(field).read(value, f"{wire_name}.{field.name}")
    return form.kind(**values)


def _wire_value(body: Message, field: Field[Any], path: str) -> object:
    """Return the JSON value of a message's field; None if it is unset and has a default."""
    value = getattr(body, field.name)
    is_message = isinstance(value, Message)
    if not (body.HasField(field.name) if is_message else value):
        if field.default is not MISSING:
            return None
        if is_message:
            raise BadAction(path, "is required")
    if is_message:
        return value.seconds + value.nanos / 1e9
    if field.name == "button":
        return next((name for name, number in _BUTTONS.items() if number == value), value)
    return value


def from_json(value: object) -> Action:
    """Return the action of a JSON object; an action is returned unchanged. Raises: BadAction."""
    if isinstance(value, Action):
        return value
    if not isinstance(value, Mapping):
        raise BadAction("action", f"{value!r} is not a JSON object")
    name = value.get("action")
    form = FORMS.get(name) if isinstance(name, str) else None
    if form is None:
        raise BadAction("action", f"unknown action {name!r}; use one of {', '.join(FORMS)}")
    return form.read({key: each for key, each in value.items() if key != "action"})


def to_json(action: Action) -> dict[str, object]:
    """Return the JSON object of an action, without default values."""
    form = _BY_KIND[type(action)]
    return {"action": form.name, **form.write(action)}


def from_one_key(value: object) -> Action:
    """Return the action of the form `{name: argument}`. Raises: BadAction."""
    if not isinstance(value, Mapping) or len(value) != 1:
        raise BadAction("action", f"{value!r} is not one key with its argument, such as {{press: [ctrl, s]}}")
    [(name, argument)] = value.items()
    form = FORMS.get(name)
    if form is None:
        raise BadAction("action", f"unknown action {name!r}; use one of {', '.join(FORMS)}")
    if isinstance(argument, Mapping):
        return form.read(argument)
    own = form.own_field()
    if own is None:
        raise BadAction(name, f"give a mapping with {', '.join(form.fields)}")
    return form.read({own: argument})


def to_one_key(action: Action) -> dict[str, object]:
    """Return the form `{name: argument}` of an action, without default values."""
    form = _BY_KIND[type(action)]
    values = form.write(action)
    own = form.own_field()
    if own is None or values.keys() - {own}:
        return {form.name: values}
    field = form.fields[own]
    return {form.name: _values(field).write(getattr(action, field.name))}
