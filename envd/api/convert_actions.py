"""Validate the actions of a request and scale their positions to guest pixels. Pure.

A field that breaks the schema raises `InvalidRequest` with the field's name. What only the guest can judge (a position
outside of the screen, an unknown key name) passes through; the guest reports it as the agent's mistake.
`cuaenv.actions.to_proto` is the other direction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from cuaenv.actions import (
    BUTTONS,
    Action,
    Button,
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
from cuaenv.v1 import env_pb2
from google.protobuf.message import Message

from envd.api.fields import int_in_range, seconds
from envd.base.errors import InvalidRequest
from envd.guest.observation import Point

MAX_ACTION_COUNT = 64
MAX_CHORD_KEY_COUNT = 8
MAX_TEXT_BYTES = 65_536
MAX_PAUSE_S = 60.0
MAX_CLICK_COUNT = 10
MAX_SCROLL_CLICKS = 100
MAX_KEY_NAME_CHARS = 32

_BUTTONS: Mapping["env_pb2.Button.ValueType", Button] = {
    env_pb2.BUTTON_UNSPECIFIED: "left",
    **{value: name for name, value in BUTTONS.items()},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Width and height in pixels, both at least 1."""

    width_px: int
    height_px: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Converts positions in a reference image to pixels of the guest's screen."""

    reference: Size
    screen: Size

    def apply(self, x: int, y: int) -> Point:
        """Return the guest pixel under the centre of the reference pixel.

        A position inside the reference maps to one inside the screen, one outside to one outside.
        """
        return Point(
            _scaled(x, self.reference.width_px, self.screen.width_px),
            _scaled(y, self.reference.height_px, self.screen.height_px),
        )


def _scaled(position: int, reference_px: int, screen_px: int) -> int:
    # floor((position + 0.5) * screen / reference), in integers so that rounding cannot leave the screen.
    return (2 * position + 1) * screen_px // (2 * reference_px)


def actions_from_proto(
    messages: Sequence[env_pb2.Action], *, scale: Scale | None, field: str = "actions"
) -> tuple[Action, ...]:
    """Return the actions of a request; without a scale, positions are guest pixels already.

    Raises:
        InvalidRequest: A field is missing or out of range. The error names it, as in `actions[2].click.count`.
    """
    if not 1 <= len(messages) <= MAX_ACTION_COUNT:
        raise InvalidRequest(field, f"has {len(messages)} items; give 1 to {MAX_ACTION_COUNT}")
    return tuple(_action(message, f"{field}[{index}]", scale) for index, message in enumerate(messages))


def _action(message: env_pb2.Action, field: str, scale: Scale | None) -> Action:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest(field, "has no kind, or one that this release does not know")
    field = f"{field}.{kind}"
    match kind:
        case "move":
            if not message.move.HasField("to"):
                raise InvalidRequest(f"{field}.to", "is required")
            to = _point(message.move.to, scale)
            return Move(to.x_px, to.y_px)
        case "click":
            click = message.click
            x, y = _position(click, scale)
            return Click(
                x,
                y,
                button=_button(click.button, field),
                count=int_in_range(click.count, f"{field}.count", default=1, low=1, high=MAX_CLICK_COUNT),
                modifiers=_keys(click.modifiers, f"{field}.modifiers"),
            )
        case "drag":
            drag = message.drag
            if not drag.HasField("end"):
                raise InvalidRequest(f"{field}.end", "is required")
            start_x, start_y = _position(drag, scale, "start")
            end = _point(drag.end, scale)
            return Drag(
                end.x_px,
                end.y_px,
                start_x,
                start_y,
                button=_button(drag.button, field),
                modifiers=_keys(drag.modifiers, f"{field}.modifiers"),
            )
        case "mouse_down":
            x, y = _position(message.mouse_down, scale)
            return MouseDown(_button(message.mouse_down.button, field), x, y)
        case "mouse_up":
            x, y = _position(message.mouse_up, scale)
            return MouseUp(_button(message.mouse_up.button, field), x, y)
        case "scroll":
            scroll = message.scroll
            x, y = _position(scroll, scale)
            return Scroll(
                dy=int_in_range(scroll.dy, f"{field}.dy", low=-MAX_SCROLL_CLICKS, high=MAX_SCROLL_CLICKS),
                dx=int_in_range(scroll.dx, f"{field}.dx", low=-MAX_SCROLL_CLICKS, high=MAX_SCROLL_CLICKS),
                x=x,
                y=y,
                modifiers=_keys(scroll.modifiers, f"{field}.modifiers"),
            )
        case "type_text":
            return TypeText(_text(message.type_text.text, f"{field}.text"))
        case "press_keys":
            keys = _keys(message.press_keys.keys, f"{field}.keys")
            if not keys:
                raise InvalidRequest(f"{field}.keys", "is empty; name at least one key")
            hold = message.press_keys.hold if message.press_keys.HasField("hold") else None
            hold_s = seconds(hold, f"{field}.hold", default=0.0, low=0.0, high=MAX_PAUSE_S)
            return PressKeys(keys, hold=timedelta(seconds=hold_s))
        case "key_down":
            return KeyDown(_key(message.key_down.key, f"{field}.key"))
        case "key_up":
            return KeyUp(_key(message.key_up.key, f"{field}.key"))
        case "wait":
            duration = message.wait.duration if message.wait.HasField("duration") else None
            return Wait(timedelta(seconds=seconds(duration, f"{field}.duration", above=0.0, high=MAX_PAUSE_S)))
        case "done":
            return Done(_text(message.done.answer, f"{field}.answer"))
        case "fail":
            return Fail(_text(message.fail.explanation, f"{field}.explanation"))


def _text(text: str, field: str) -> str:
    size = len(text.encode())
    if size > MAX_TEXT_BYTES:
        raise InvalidRequest(field, f"has {size} bytes; at most {MAX_TEXT_BYTES}")
    return text


def _point(message: env_pb2.Point, scale: Scale | None) -> Point:
    return Point(message.x, message.y) if scale is None else scale.apply(message.x, message.y)


def _position(message: Message, scale: Scale | None, field: str = "at") -> tuple[int, int] | tuple[None, None]:
    """Return (x, y) of an optional point field; (None, None) if it is absent."""
    if not message.HasField(field):
        return None, None
    point = _point(getattr(message, field), scale)
    return point.x_px, point.y_px


def _button(value: "env_pb2.Button.ValueType", field: str) -> Button:
    if value not in _BUTTONS:
        raise InvalidRequest(f"{field}.button", f"{value} is not a button")
    return _BUTTONS[value]


def _keys(names: Sequence[str], field: str) -> tuple[str, ...]:
    if len(names) > MAX_CHORD_KEY_COUNT:
        raise InvalidRequest(field, f"has {len(names)} keys; at most {MAX_CHORD_KEY_COUNT}")
    return tuple(_key(name, f"{field}[{index}]") for index, name in enumerate(names))


def _key(name: str, field: str) -> str:
    if not 1 <= len(name) <= MAX_KEY_NAME_CHARS:
        raise InvalidRequest(field, f"has {len(name)} characters; a key's name has 1 to {MAX_KEY_NAME_CHARS}")
    return name
