"""Actions, targets and conditions in oracles: parsed to `cuaenv.actions`, `Aimed` and `WaitFor`, and written. Pure.

An action is the one-key form of `cuaenv.action_codec`, and `done` and `fail` may stand alone:

```yaml
- {click: {x: 120, y: 80, count: 2, button: left, modifiers: [ctrl]}}
- {move: {x: 1, y: 2}}
- {drag: {x: 10, y: 20, to_x: 300, to_y: 20}}
- {scroll: {dy: 3, x: 400, y: 300}}
- {mouse_down: {x: 1, y: 2}}      # and mouse_up
- {type: "hello\\n"}
- {press: [ctrl, s]}              # or {press: enter}, or {press: {keys: [a], hold_s: 1.5}}
- {key_down: shift}               # and key_up
- {wait: 1.5}
- done                            # or {done: "the answer"}
- fail                            # or {fail: "why it cannot be done"}
```

A position may have a target, a window or widget that the player looks for. It acts at the coordinates if there is none:

```yaml
- {click: {x: 120, y: 80, target: {window: "^list", role: push-button, name: Save, x: 20, y: 8}}}    # see `Target`
- {drag: {x: 10, y: 20, to_x: 300, to_y: 20, target: {window: Files, x: 5, y: 9}, to_target: {name: Trash}}}
```

A step may end with conditions, which the player checks in the guest before the next step:

```yaml
- {wait_for: {window: {title: Save as}}}                 # see `WindowMatch`
- {wait_for: {file: /home/user/a.txt, timeout_s: 30}}    # not empty, or a directory
- {wait_for: {process: notepad, absent: true}}           # has ended; also for windows and files
```
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Self, TypeVar, cast

from pydantic import Field, ValidationError, model_validator

from cuaenv.action_codec import from_one_key, to_one_key
from cuaenv.actions import Action, Drag
from cuaenv.problems import problem_of
from envd.tasks.fields import GuestPath, Model, Regex, Timeout, WindowMatch

_CONDITION = "wait_for"
_TARGETS = ("target", "to_target")
_M = TypeVar("_M", bound=Model)
_Offset = Annotated[int, Field(ge=0, le=32767)]


class Target(Model):
    """A pixel of a widget in the guest's accessibility tree, or of a window."""

    window: Regex = ""
    """Regular expression, searched for in the window's title; empty for any place on the screen."""
    role: str = ""
    """Role of the widget, such as `push-button`; empty for any. Without role and name: the window itself."""
    name: str = ""
    """Name of the widget; empty for any."""
    x: _Offset = 0
    """Pixels from the left edge of the widget's or window's visible part; its last pixel if it is narrower."""
    y: _Offset = 0
    """Pixels from its top edge."""

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if not (self.window or self.role or self.name):
            raise ValueError("give window, role or name")
        return self


@dataclass(frozen=True, slots=True)
class Aimed:
    """An action of the pointer whose positions follow targets, where the guest shows them."""

    action: Action
    """Has the coordinates for a guest that does not show the target."""
    target: Target | None = None
    """Where it acts, or where a drag starts."""
    to_target: Target | None = None
    """Where a drag ends."""

    def __post_init__(self) -> None:
        for x_name, _, _ in self.positions():
            if getattr(self.action, x_name, None) is None:
                raise ValueError(f"{'to_target' if x_name == 'end_x' else 'target'}: the action has no such position")

    def positions(self) -> Iterator[tuple[str, str, Target]]:
        """Yield the action's fields of x and y that follow a target, and that target."""
        if self.target is not None:
            yield ("start_x", "start_y", self.target) if isinstance(self.action, Drag) else ("x", "y", self.target)
        if self.to_target is not None:
            yield "end_x", "end_y", self.to_target


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


Input = Action | Aimed
OracleAction = Input | WaitFor
OracleSteps = tuple[tuple[OracleAction, ...], ...]
"""Steps, each the actions of one `Step` call and then conditions."""


def split_step(step: Sequence[OracleAction]) -> tuple[tuple[Input, ...], tuple[WaitFor, ...]]:
    """Return the actions and the conditions of a step."""
    conditions = tuple(each for each in step if isinstance(each, WaitFor))
    return tuple(each for each in step if not isinstance(each, WaitFor)), conditions


def without_target(action: Input) -> Action:
    """Return an action at its own coordinates."""
    return action.action if isinstance(action, Aimed) else action


def parse_action(value: object) -> OracleAction:
    """Return the action or condition written as `value`; an action or condition is returned unchanged.

    Raises:
        ValueError: It is not an action; the message says what is wrong.
    """
    if isinstance(value, Action | Aimed | WaitFor):
        return value
    if value in ("done", "fail"):
        value = {value: ""}
    if not isinstance(value, Mapping) or len(value) != 1:
        return from_one_key(value)
    [(name, arguments)] = value.items()
    if name == _CONDITION:
        return _validated(WaitFor, arguments, name)
    if not isinstance(arguments, Mapping) or not arguments.keys() & set(_TARGETS):
        return from_one_key(value)
    plain = from_one_key({name: {key: each for key, each in arguments.items() if key not in _TARGETS}})
    given = [key for key in _TARGETS if key in arguments]
    return Aimed(plain, **{key: _validated(Target, arguments[key], f"{name}.{key}") for key in given})


def _validated(model: type[_M], value: object, field: str) -> _M:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problems = (".".join((field, *map(str, each["loc"]))) + f": {problem_of(each)}" for each in error.errors())
        raise ValueError("; ".join(problems)) from error


def write_action(action: OracleAction) -> dict[str, object]:
    """Return the notation of an action, without default values; `parse_action` reads it back."""
    if isinstance(action, WaitFor):
        return {_CONDITION: action.model_dump(mode="json", exclude_defaults=True, by_alias=True)}
    if not isinstance(action, Aimed):
        return to_one_key(action)
    [(name, arguments)] = to_one_key(action.action).items()
    targets = {key: getattr(action, key) for key in _TARGETS}
    written = {key: each.model_dump(exclude_defaults=True) for key, each in targets.items() if each is not None}
    return {name: {**cast(dict[str, object], arguments), **written}}
