"""The actions of an agent, their limits, and their text for people. Shared by the client and the daemon.

Positions are integers in the caller's coordinates: the reference size of a request, or guest pixels without one.
In the daemon they are always guest pixels from the top left corner. Positions come first, from the start of the
pointer's path to its end. A field's name means the same in every action; `cuaenv.action_codec` derives the protobuf and
JSON forms from it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import ClassVar, Literal

from cuaenv.argument_types import Checked

__all__ = [
    "Action",
    "AskUser",
    "Button",
    "CallTool",
    "Click",
    "Done",
    "Drag",
    "EditFile",
    "Fail",
    "KeyDown",
    "KeyUp",
    "ListDirectory",
    "MouseDown",
    "MouseUp",
    "Move",
    "PressKeys",
    "ReadFile",
    "RunShell",
    "Scroll",
    "TypeText",
    "Wait",
    "WriteFile",
]

Button = Literal["left", "middle", "right"]
#: What a task or a pool allows.
Tool = Literal["shell", "files", "mcp", "ask_user"]

#: Maximum actions of one `Step`.
MAX_ACTION_COUNT = 64
MAX_CLICK_COUNT = 10
MAX_WHEEL_CLICKS = 100
MAX_CHORD_KEY_COUNT = 8
MAX_KEY_NAME_CHARS = 32
MAX_TEXT_BYTES = 65_536
#: Of the actions of one `Step` together: none begins later, and no wait or command is longer than what is left of it.
MAX_STEP_S = 120.0
#: Of a wait, and of a chord that is held.
MAX_PAUSE_S = 60.0
#: Maximum tool actions of one `Step`.
MAX_TOOL_COUNT = 8
#: Of a command of `RunShell`.
MAX_TIMEOUT_S = 120.0
MAX_PATH_BYTES = 4096
#: A task searches it with patterns, whose time may grow with the square of its length.
MAX_QUESTION_BYTES = 4096
#: Of a file that is read or written.
MAX_FILE_BYTES = 262_144


class _Keyed(Checked):
    """Stores the sequences of key names as tuples; one name alone is one key, not a sequence of letters."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            if field.name in ("keys", "modifiers"):
                names = getattr(self, field.name)
                if isinstance(names, str | Iterable):
                    object.__setattr__(self, field.name, (names,) if isinstance(names, str) else tuple(names))
        # Not super(): a dataclass with slots is another class than the one that the methods were defined in.
        Checked.__post_init__(self)


@dataclass(frozen=True, slots=True)
class Move(Checked):
    """Move the pointer."""

    x: int
    y: int


@dataclass(frozen=True, slots=True)
class Click(_Keyed):
    """Press and release a button `count` times with `modifiers` held; at the pointer if no position is given."""

    x: int | None = None
    y: int | None = None
    button: Button = "left"
    count: int = 1
    modifiers: Sequence[str] = ()


# Not the dataclass's own `__init__`: after a start that may be left out it could not require an end.
@dataclass(frozen=True, slots=True, init=False)
class Drag(_Keyed):
    """Press a button at the start (default: the pointer), move to the end in small steps, release."""

    start_x: int | None = None
    start_y: int | None = None
    end_x: int  # type: ignore[misc]
    end_y: int  # type: ignore[misc]
    button: Button = "left"
    modifiers: Sequence[str] = ()

    def __init__(  # noqa: PLR0917 -- one order of arguments for all actions
        self,
        start_x: int | None = None,
        start_y: int | None = None,
        end_x: int | None = None,
        end_y: int | None = None,
        button: Button = "left",
        modifiers: Sequence[str] = (),
    ) -> None:
        """Raises: TypeError: The end is missing, or an argument has another type."""
        values = (start_x, start_y, end_x, end_y, button, modifiers)
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, name, value)
        self.__post_init__()


@dataclass(frozen=True, slots=True)
class MouseDown(Checked):
    """Press a mouse button and keep it down; at the pointer if no position is given."""

    x: int | None = None
    y: int | None = None
    button: Button = "left"


@dataclass(frozen=True, slots=True)
class MouseUp(Checked):
    """Release a mouse button; at the pointer if no position is given."""

    x: int | None = None
    y: int | None = None
    button: Button = "left"


@dataclass(frozen=True, slots=True)
class Scroll(_Keyed):
    """Turn the wheel by `dy` and `dx` wheel clicks; positive values scroll down and right."""

    x: int | None = None
    y: int | None = None
    dy: int = 0
    dx: int = 0
    modifiers: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class TypeText(Checked):
    """Type Unicode text into the focused widget; newline is Enter, tab is Tab."""

    text: str


@dataclass(frozen=True, slots=True)
class PressKeys(_Keyed):
    """Press a chord such as `["ctrl", "s"]`, hold it for `hold`, release the keys in reverse order.

    One name alone is one key: `PressKeys("enter")`.
    """

    keys: Sequence[str]
    hold: timedelta = timedelta(0)


@dataclass(frozen=True, slots=True)
class KeyDown(Checked):
    """Press a key and keep it down."""

    key: str


@dataclass(frozen=True, slots=True)
class KeyUp(Checked):
    """Release a key."""

    key: str


@dataclass(frozen=True, slots=True)
class Wait(Checked):
    """Wait while the guest runs."""

    duration: timedelta


@dataclass(frozen=True, slots=True)
class Done(Checked):
    """Declare the task done; `answer` is the answer to the task's question, if it has one."""

    answer: str = ""


@dataclass(frozen=True, slots=True)
class Fail(Checked):
    """Declare the task infeasible."""

    explanation: str = ""


class ToolAction(Checked):
    """An action that uses a tool instead of screen, mouse and keyboard."""

    __slots__ = ()
    needs: ClassVar[Tool]
    """What the task or pool must allow."""


@dataclass(frozen=True, slots=True)
class RunShell(ToolAction):
    """Run a command in the episode's shell, whose working directory and variables stay."""

    needs: ClassVar[Tool] = "shell"
    command: str
    timeout: timedelta = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class ReadFile(ToolAction):
    """Read a text file, or `line_count` of its lines (0 for all) from `first_line`; of other files, size and type."""

    needs: ClassVar[Tool] = "files"
    path: str
    first_line: int = 1
    line_count: int = 0


@dataclass(frozen=True, slots=True)
class WriteFile(ToolAction):
    """Write a text file, with the directories above it; an existing file is replaced."""

    needs: ClassVar[Tool] = "files"
    path: str
    content: str


@dataclass(frozen=True, slots=True)
class EditFile(ToolAction):
    """Replace the text `old`, which occurs exactly once in a text file, by `new`."""

    needs: ClassVar[Tool] = "files"
    path: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class ListDirectory(ToolAction):
    """List a directory with the sizes of its files."""

    needs: ClassVar[Tool] = "files"
    path: str


@dataclass(frozen=True, slots=True)
class CallTool(ToolAction):
    """Call a tool of an MCP server of the task; without `tool`, list the server's tools."""

    needs: ClassVar[Tool] = "mcp"
    server: str
    tool: str = ""
    arguments: str = "{}"
    """A JSON object."""


@dataclass(frozen=True, slots=True)
class AskUser(ToolAction):
    """Ask the task's user a question."""

    needs: ClassVar[Tool] = "ask_user"
    question: str


Action = (
    Move
    | Click
    | Drag
    | MouseDown
    | MouseUp
    | Scroll
    | TypeText
    | PressKeys
    | KeyDown
    | KeyUp
    | Wait
    | Done
    | Fail
    | RunShell
    | ReadFile
    | WriteFile
    | EditFile
    | ListDirectory
    | CallTool
    | AskUser
)


#: Longer texts are cut: a page of typed text would hide the other actions.
_MAX_CHARS = 200
#: Of a keyboard without a service in the guest, whose queue is slow.
_TYPED_CHARS_PER_S = 20
_TIMES = {1: "", 2: "double ", 3: "triple "}


def longest(actions: Sequence[Action]) -> timedelta:
    """Return how long the waits, held chords, texts and tools of a step may last together, on a guest that answers."""
    seconds = 0.0
    for action in actions:
        match action:
            case Wait(duration=duration) | PressKeys(hold=duration) | RunShell(timeout=duration):
                seconds += duration.total_seconds()
            case TypeText(text=text):
                seconds += len(text) / _TYPED_CHARS_PER_S
            case ToolAction():
                seconds += MAX_STEP_S
    return timedelta(seconds=min(seconds, MAX_STEP_S))


def action_text(action: Action) -> str:
    """Return an action as text for people, such as `click 40,60` or `press ctrl+s`."""
    match action:
        case Move(x=x, y=y):
            return f"move {x},{y}"
        case Click():
            times = _TIMES.get(action.count, f"{action.count}-fold ")
            button = "" if action.button == "left" else f"{action.button} "
            return f"{_prefix(action.modifiers)}{times}{button}click{_at(action.x, action.y)}"
        case Drag():
            start = _at(action.start_x, action.start_y)
            return f"{_prefix(action.modifiers)}drag{start} to {action.end_x},{action.end_y}"
        case MouseDown(button=button, x=x, y=y):
            return f"hold {button} button{_at(x, y)}"
        case MouseUp(button=button, x=x, y=y):
            return f"release {button} button{_at(x, y)}"
        case Scroll():
            return f"{_prefix(action.modifiers)}scroll {action.dx:+d},{action.dy:+d}{_at(action.x, action.y)}"
        case TypeText(text=text):
            return f"type {shortened(text)!r}"
        case PressKeys(keys=keys, hold=hold):
            duration = f" for {hold.total_seconds():g} s" if hold else ""
            return f"press {'+'.join(keys)}{duration}"
        case KeyDown(key=key):
            return f"hold key {key}"
        case KeyUp(key=key):
            return f"release key {key}"
        case Wait(duration=duration):
            return f"wait {duration.total_seconds():g} s"
        case Done(answer=answer):
            return f"done {shortened(answer)!r}" if answer else "done"
        case Fail(explanation=explanation):
            return f"fail {shortened(explanation)!r}" if explanation else "fail"
        case RunShell(command=command):
            return f"run {shortened(command)!r}"
        case ReadFile(path=path):
            return f"read {shortened(path)!r}"
        case WriteFile(path=path, content=content):
            return f"write {shortened(path)!r}: {shortened(content)!r}"
        case EditFile(path=path, old=old, new=new):
            return f"edit {shortened(path)!r}: {shortened(old)!r} to {shortened(new)!r}"
        case ListDirectory(path=path):
            return f"list {shortened(path)!r}"
        case CallTool(server=server, tool=""):
            return f"list tools of {shortened(server)}"
        case CallTool(server=server, tool=tool, arguments=arguments):
            return f"call {shortened(server)} {shortened(tool)} {shortened(arguments)}"
        case AskUser(question=question):
            return f"ask {shortened(question)!r}"


def _at(x: int | None, y: int | None) -> str:
    return "" if x is None else f" {x},{y}"


def _prefix(modifiers: Sequence[str]) -> str:
    return "".join(f"{key}+" for key in modifiers)


def shortened(text: str) -> str:
    """Return a text for people, cut if it is long."""
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}… ({len(text)} characters)"
