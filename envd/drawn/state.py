"""State of a guest as one plain value, from which forks, checkpoints and digests are made."""

import copy
import hashlib
import json
from collections.abc import Collection
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from envd.drawn.desktop.canvas import Colour, Framebuffer, Rect, SharedPicture
from envd.drawn.desktop.desktop import DrawnDesktop
from envd.drawn.desktop.forms import Form, FormWindow
from envd.drawn.desktop.windows import DrawnWindow
from envd.drawn.guest import DrawnGuest
from envd.drawn.outcome import Outcome
from envd.drawn.wires import agent

MAX_SIDE_PX = 8192

_Part = TypeVar("_Part", bound="StatePart")
_Number = Annotated[int, Field(ge=-(1 << 62), le=1 << 62)]
_Index = Annotated[int, Field(ge=0, le=1 << 31)]
_Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
_Pixel = Annotated[int, Field(ge=-MAX_SIDE_PX, le=MAX_SIDE_PX)]
#: Parts that change without the guest.
_TIMES: Any = {"clock": True, "agent": {"processes": {"__all__": {"duration_s", "end_time_s"}}}}


class StatePart(BaseModel):
    """A part of the state, checked only when it is read from a file."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", revalidate_instances="always", ser_json_bytes="base64", val_json_bytes="base64"
    )


class ClockState(StatePart):
    set_to_ns: _Number | None
    run_ns: _Number
    date_offset_ns: _Number


class FilesState(StatePart):
    entropy: bytes
    files: dict[str, bytes]
    directories: set[str]


class ShellState(StatePart):
    directory: str
    variables: dict[str, str]


class ProcessState(StatePart):
    exit_code: _Number
    stdout: bytes
    stderr: bytes
    duration_s: _Seconds
    end_time_s: _Seconds
    has_output: bool


class FileHandleState(StatePart):
    path: str
    mode: str
    data: bytes
    position: _Index


class AgentState(StatePart):
    """The guest agent's programs that run, and its open files, by their numbers."""

    last_number: _Index
    processes: dict[_Index, ProcessState]
    handles: dict[_Index, FileHandleState]


class KeysState(StatePart):
    down: set[Annotated[int, Field(ge=0, le=0xFFFF)]]
    caps_lock: bool


class WindowState(StatePart):
    rect: tuple[_Pixel, _Pixel, _Pixel, _Pixel]
    is_open: bool
    armed: str


class TextState(StatePart):
    row_count: _Index
    column_count: _Index
    lines: Annotated[list[str], Field(min_length=1)]
    row: _Index
    column: _Index
    top_row: _Index
    left_column: _Index
    all_selected: bool


class EditorState(WindowState):
    path: str
    modified: bool
    text_area: TextState


class ControlsState(WindowState):
    click_count: _Index
    is_checked: bool
    focused: str


class FormState(WindowState):
    form: Form
    state_path: str
    values: dict[str, str]
    pressed: list[str]
    focused: str
    open_menu: str
    face: Colour


class DesktopState(StatePart):
    """Everything but the pixels. Its names are those of the stored format."""

    clock: ClockState
    files: FilesState
    clipboard: bytes
    toolbox: ShellState
    agent: AgentState
    keyboard: KeysState
    pointer_position: tuple[_Index, _Index]
    buttons: Annotated[int, Field(ge=0, le=0xFF)]
    controls: ControlsState
    editor: EditorState
    forms: tuple[FormState, ...]
    stack: tuple[int, ...]
    """Indexes of the controls, the editor and the forms, the highest window last."""
    dragged: int | None
    """Index of the window that follows the pointer."""


class DrawnState(DesktopState):
    """State of a guest that does not run. Any number of guests start from it; pixels and files are shared."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    picture: Annotated[SharedPicture, Field(exclude=True)]

    @classmethod
    def of(cls, guest: DrawnGuest) -> Self:
        """Return the state of a paused guest. Raises: ValueError: it has not booted."""
        desktop = guest.desktop
        if desktop is None:
            raise ValueError("the guest has not booted")
        known = desktop._known
        return _described(
            cls,
            desktop,
            picture=guest.framebuffer.picture(),
            clock=_described(ClockState, guest.clock),
            files=_described(FilesState, guest.files, directories=set(guest.files.directories)),
            clipboard=guest.programs._clipboard,
            toolbox=_described(ShellState, guest.programs.toolbox),
            agent=_described(
                AgentState,
                guest.agent,
                processes={
                    number: _described(
                        ProcessState, each.outcome, end_time_s=each.end_time_s, has_output=each.has_output
                    )
                    for number, each in guest.agent._processes.items()
                },
                handles={
                    number: _described(FileHandleState, each, data=bytes(each.data))
                    for number, each in guest.agent._handles.items()
                },
            ),
            keyboard=_described(KeysState, desktop._keyboard),
            controls=_described(ControlsState, desktop.controls),
            editor=_described(EditorState, desktop.editor, text_area=_described(TextState, desktop.editor.text_area)),
            forms=tuple(_described(FormState, window) for window in known if isinstance(window, FormWindow)),
            stack=tuple(known.index(window) for window in desktop._stack),
            dragged=None if desktop._dragged is None else known.index(desktop._dragged),
        )

    def build(self) -> DrawnGuest:
        """Return a paused guest in this state. Raises: ValueError: the parts do not fit together."""
        guest = DrawnGuest(Framebuffer.on(self.picture))
        desktop = guest.start_session(is_drawn=True)
        self._restore_windows(desktop)
        guest.clock.stop()
        _restore(guest.clock, self.clock)
        _restore(guest.programs.toolbox, self.toolbox)
        guest.programs._clipboard = self.clipboard
        self._restore_agent(guest.agent)
        # Last: opening windows writes files.
        guest.files.entropy = self.files.entropy
        guest.files._files, guest.files._directories = dict(self.files.files), set(self.files.directories)
        guest.files.share()
        return guest

    def digest(self) -> str:
        """Return the digest (sha256 hex) of everything but clocks and times, which change without the guest."""
        return _digest_of([self.picture.digest, self.model_dump(exclude=_TIMES)])

    def disk_digest(self) -> str:
        """Return the digest (sha256 hex) of the files."""
        return _digest_of(self.files.model_dump())

    def _restore_windows(self, desktop: DrawnDesktop) -> None:
        _restore(desktop.controls, self.controls)
        _restore(desktop.editor.text_area, self.editor.text_area)
        _restore(desktop.editor, self.editor, besides={"text_area"})
        forms = []
        for each in self.forms:
            forms.append(desktop.form_window(each.form, each.state_path.removesuffix(".state")))
            _restore(forms[-1], each)
        known: tuple[DrawnWindow, ...] = (desktop.controls, desktop.editor, *forms)
        if sorted(self.stack) != list(range(len(known))):
            raise ValueError(f"stack {self.stack} of {len(known)} windows")
        desktop._known, desktop._stack = known, [known[index] for index in self.stack]
        desktop._dragged = None if self.dragged is None else known[self.dragged]
        desktop._drawn_active = desktop.active
        _restore(desktop._keyboard, self.keyboard)
        desktop.pointer_position, desktop._buttons = self.pointer_position, self.buttons

    def _restore_agent(self, target: agent.GuestAgent) -> None:
        target._last_number = self.agent.last_number
        target._processes = {
            number: agent.Process(
                Outcome(exit_code=each.exit_code, stdout=each.stdout, stderr=each.stderr, duration_s=each.duration_s),
                each.end_time_s,
                each.has_output,
            )
            for number, each in self.agent.processes.items()
        }
        target._handles = {
            number: agent.OpenFile(each.path, each.mode, bytearray(each.data), each.position)
            for number, each in self.agent.handles.items()
        }


def _described(kind: type[_Part], source: object, **given: Any) -> _Part:
    """Return the part of the state of an object: `given`, and copies of its attributes of the same names."""
    names = kind.model_fields.keys() - given.keys()
    own = {name: copy.copy(getattr(source, _attribute(source, name))) for name in names}
    return kind.model_construct(**given, **own)


def _restore(target: object, part: StatePart, *, besides: Collection[str] = ()) -> None:
    for name, value in part:
        if name not in besides:
            setattr(target, _attribute(target, name), Rect(*value) if name == "rect" else copy.copy(value))


def _attribute(owner: object, name: str) -> str:
    """Return the name of an object's own attribute, which may be private."""
    return name if hasattr(owner, name) else f"_{name}"


def _digest_of(values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=_plain).encode()).hexdigest()


def _plain(value: Any) -> object:
    """Return what JSON does not know, bytes and sets, as plain values."""
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else sorted(value)
