"""The compact notation of actions in oracles: parsed to `cuaenv.actions`, and written back. Pure.

An action is one key with its argument, and `done` and `fail` may stand alone:

```yaml
- {click: {x: 120, y: 80, count: 2, button: left, modifiers: [ctrl]}}
- {move: {x: 1, y: 2}}
- {drag: {x: 10, y: 20, to_x: 300, to_y: 20}}
- {scroll: {dy: 3, x: 400, y: 300}}
- {mouse_down: {x: 1, y: 2}}      # and mouse_up
- {type: "hello\\n"}
- {press: [ctrl, s]}              # or {press: enter}
- {key_down: shift}               # and key_up
- {wait: 1.5}
- done                            # or {done: "the answer"}
- fail                            # or {fail: "why it cannot be done"}
```

A step may end with conditions, which the player checks in the guest before the next step:

```yaml
- {wait_for: {window: {title: Save as}}}                 # see `WindowMatch`
- {wait_for: {file: /home/user/a.txt, timeout_s: 30}}    # not empty, or a directory
- {wait_for: {process: notepad, absent: true}}           # has ended; also for windows and files
```
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any, Self

from cuaenv.actions import (
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
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from envd.tasks.fields import GuestPath, Model, Timeout, WindowMatch

_Pixel = Annotated[int, Field(ge=0, lt=1 << 15)]


class _Form(BaseModel):
    """The argument of a pointer action. Fields are those of the action, aliases those of the notation."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class _Move(_Form):
    x: _Pixel
    y: _Pixel


class _Optional(_Form):
    """At a pixel, or at the pointer's position if both coordinates are left out."""

    @model_validator(mode="before")
    @classmethod
    def _both_or_neither(cls, argument: object) -> object:
        if isinstance(argument, Mapping) and (argument.get("x") is None) != (argument.get("y") is None):
            raise ValueError("give x and y, or neither")
        return argument


class _Press(_Optional):
    x: _Pixel | None = None
    y: _Pixel | None = None
    button: Button = "left"


class _Click(_Press):
    count: Annotated[int, Field(ge=1, le=3)] = 1
    modifiers: tuple[str, ...] = ()


class _Drag(_Optional):
    start_x: _Pixel | None = Field(default=None, alias="x")
    start_y: _Pixel | None = Field(default=None, alias="y")
    end_x: _Pixel = Field(alias="to_x")
    end_y: _Pixel = Field(alias="to_y")
    button: Button = "left"
    modifiers: tuple[str, ...] = ()


class _Scroll(_Optional):
    x: _Pixel | None = None
    y: _Pixel | None = None
    dx: int = 0
    dy: int = 0
    modifiers: tuple[str, ...] = ()


class WaitFor(Model):
    """A condition that must hold before the next step. Exactly one of `window`, `file` and `process`."""

    window: WindowMatch | None = None
    file: GuestPath | None = None
    process: Annotated[str, Field(min_length=1)] | None = None
    """The name that the kernel shows; in Windows without `.exe`."""
    absent: bool = False
    """Whether it must not be there."""
    # A program's first start takes up to a minute in an emulated guest on a busy host.
    timeout_s: Timeout = 180.0

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if sum(each is not None for each in (self.window, self.file, self.process)) != 1:
            raise ValueError("give exactly one of window, file and process")
        return self

    def __str__(self) -> str:
        subject = f"a window with {self.window}" if self.window else self.file or f"process {self.process}"
        return f"{subject} to be {'gone' if self.absent else 'there'}"


OracleAction = Action | WaitFor
OracleSteps = tuple[tuple[OracleAction, ...], ...]
"""Steps, each the actions of one `Step` call and then conditions."""


def split_step(step: Sequence[OracleAction]) -> tuple[tuple[Action, ...], tuple[WaitFor, ...]]:
    """Return the actions and the conditions of a step."""
    conditions = tuple(each for each in step if isinstance(each, WaitFor))
    return tuple(each for each in step if not isinstance(each, WaitFor)), conditions


_KEYS = TypeAdapter[tuple[str, ...]](Annotated[tuple[str, ...], Field(min_length=1)])
_TEXT = TypeAdapter[str](str)
_SECONDS = TypeAdapter[float](Annotated[float, Field(gt=0, le=60, allow_inf_nan=False)])

_POINTER: Mapping[str, tuple[type[_Form], type[Action]]] = {
    "move": (_Move, Move),
    "click": (_Click, Click),
    "drag": (_Drag, Drag),
    "scroll": (_Scroll, Scroll),
    "mouse_down": (_Press, MouseDown),
    "mouse_up": (_Press, MouseUp),
}
#: Actions of one text, and the name of its field.
_TEXTS: Mapping[str, tuple[type[Action], str]] = {
    "type": (TypeText, "text"),
    "key_down": (KeyDown, "key"),
    "key_up": (KeyUp, "key"),
    "done": (Done, "answer"),
    "fail": (Fail, "explanation"),
}
_NAMES = (*_POINTER, *_TEXTS, "press", "wait", "wait_for")


def parse_action(value: object) -> OracleAction:
    """Return the action or condition written as `value`; an action or condition is returned unchanged.

    Raises:
        ValueError: It is not an action; the message says what is wrong.
    """
    if isinstance(value, Action | WaitFor):
        return value
    if value in ("done", "fail"):
        value = {value: ""}
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ValueError(f"{value!r} is not an action; write one key with its argument, such as {{press: [ctrl, s]}}")
    [(name, argument)] = value.items()
    if name not in _NAMES:
        raise ValueError(f"unknown action {name!r}; use one of {', '.join(_NAMES)}")
    try:
        return _parse(name, argument)
    except ValidationError as error:
        problems = "; ".join(".".join((name, *map(str, each["loc"]))) + f": {each['msg']}" for each in error.errors())
        raise ValueError(problems) from error


def write_action(action: OracleAction) -> dict[str, object]:
    """Return the notation of an action, without default values; `parse_action` reads it back.

    Raises:
        ValueError: The notation cannot express it: keys held for a time.
    """
    match action:
        case PressKeys() if not action.hold:
            return {"press": list(action.keys)}
        case WaitFor():
            return {"wait_for": action.model_dump(mode="json", exclude_defaults=True, by_alias=True)}
        case Wait():
            return {"wait": action.duration.total_seconds()}
    for name, (kind, field) in _TEXTS.items():
        if isinstance(action, kind):
            return {name: getattr(action, field)}
    for name, (form, kind) in _POINTER.items():
        if isinstance(action, kind):
            return {name: _without_defaults(action, form)}
    raise ValueError(f"oracles cannot express {action}")


def _parse(name: str, argument: object) -> OracleAction:
    if name == "wait_for":
        return WaitFor.model_validate(argument)
    if name in _POINTER:
        form, kind = _POINTER[name]
        values: dict[str, Any] = form.model_validate(argument).model_dump()
        return kind(**values)
    if name in _TEXTS:
        text_kind, field = _TEXTS[name]
        text: dict[str, Any] = {field: _TEXT.validate_python(argument)}
        return text_kind(**text)
    if name == "wait":
        return Wait(timedelta(seconds=_SECONDS.validate_python(argument)))
    return PressKeys(keys=_KEYS.validate_python((argument,) if isinstance(argument, str) else argument))


def _without_defaults(action: Action, form: type[_Form]) -> dict[str, object]:
    written: dict[str, object] = {}
    for name, info in form.model_fields.items():
        value = getattr(action, name)
        if value not in (info.default, []):
            written[info.alias or name] = list(value) if name == "modifiers" else value
    return written
