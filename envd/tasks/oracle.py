"""Actions and conditions in oracles: parsed to `cuaenv.actions` and `WaitFor`, and written back. Pure.

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

A step may end with conditions, which the player checks in the guest before the next step:

```yaml
- {wait_for: {window: {title: Save as}}}                 # see `WindowMatch`
- {wait_for: {file: /home/user/a.txt, timeout_s: 30}}    # not empty, or a directory
- {wait_for: {process: notepad, absent: true}}           # has ended; also for windows and files
```
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from cuaenv.action_codec import from_one_key, to_one_key
from cuaenv.actions import Action
from cuaenv.problems import problem_of
from envd.tasks.fields import GuestPath, Model, Timeout, WindowMatch

_CONDITION = "wait_for"


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


def parse_action(value: object) -> OracleAction:
    """Return the action or condition written as `value`; an action or condition is returned unchanged.

    Raises:
        ValueError: It is not an action; the message says what is wrong.
    """
    if isinstance(value, Action | WaitFor):
        return value
    if value in ("done", "fail"):
        value = {value: ""}
    if not isinstance(value, Mapping) or value.keys() != {_CONDITION}:
        return from_one_key(value)
    try:
        return WaitFor.model_validate(value[_CONDITION])
    except ValidationError as error:
        problems = (".".join((_CONDITION, *map(str, each["loc"]))) + f": {problem_of(each)}" for each in error.errors())
        raise ValueError("; ".join(problems)) from error


def write_action(action: OracleAction) -> dict[str, object]:
    """Return the notation of an action, without default values; `parse_action` reads it back."""
    if isinstance(action, WaitFor):
        return {_CONDITION: action.model_dump(mode="json", exclude_defaults=True, by_alias=True)}
    return to_one_key(action)
