"""A drawn desktop as a file: JSON of a fixed schema, compressed.

A file can come from another host, so it names no class and no code. What is read is checked before it is used, and the
desktop is drawn once with it.
"""

import math
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import zstandard
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cuaenv.problems import problem_of
from envd.base.errors import CheckpointUnusable
from envd.base.zstd import read_compressed
from envd.drawn.desktop.canvas import Colour, Framebuffer, Picture, Rect
from envd.drawn.desktop.desktop import MIN_HEIGHT_PX, MIN_WIDTH_PX, DrawnDesktop
from envd.drawn.desktop.forms import Form, FormWindow
from envd.drawn.desktop.windows import Window
from envd.drawn.files import resolve
from envd.drawn.guest import Guest
from envd.drawn.outcome import Outcome
from envd.drawn.wires import agent

#: Many times as much as a drawn desktop has.
MAX_BYTES = 256 << 20
_MAX_SIDE_PX = 8192
#: First byte of the files of envd 0.2.0, which were pickled.
_PICKLE = b"\x80"

_Part = TypeVar("_Part", bound="_Model")
_Number = Annotated[int, Field(ge=-(1 << 62), le=1 << 62)]
_Index = Annotated[int, Field(ge=0, le=1 << 31)]
_Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
_Pixel = Annotated[int, Field(ge=-_MAX_SIDE_PX, le=_MAX_SIDE_PX)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class _Clock(_Model):
    set_to_ns: _Number | None
    run_ns: _Number
    date_offset_ns: _Number


class _Files(_Model):
    entropy: bytes
    files: dict[str, bytes]
    directories: set[str]


class _Toolbox(_Model):
    directory: str
    variables: dict[str, str]


class _Process(_Model):
    exit_code: _Number
    stdout: bytes
    stderr: bytes
    duration_s: _Seconds
    end_time_s: _Seconds
    has_output: bool


class _OpenFile(_Model):
    path: str
    mode: str
    data: bytes
    position: _Index


class _Agent(_Model):
    """The guest agent's programs that run, and its open files, by their numbers."""

    last_number: _Index
    processes: dict[_Index, _Process]
    handles: dict[_Index, _OpenFile]


class _Keyboard(_Model):
    down: set[Annotated[int, Field(ge=0, le=0xFFFF)]]
    caps_lock: bool


class _Window(_Model):
    rect: tuple[_Pixel, _Pixel, _Pixel, _Pixel]
    is_open: bool
    armed: str


class _TextArea(_Model):
    row_count: _Index
    column_count: _Index
    lines: Annotated[list[str], Field(min_length=1)]
    row: _Index
    column: _Index
    top_row: _Index
    left_column: _Index
    all_selected: bool


class _Editor(_Window):
    path: str
    modified: bool
    text_area: _TextArea


class _Controls(_Window):
    click_count: _Index
    is_checked: bool
    focused: str


class _FormWindow(_Window):
    form: Form
    state_path: str
    values: dict[str, str]
    pressed: list[str]
    focused: str
    open_menu: str
    face: Colour


class _Desktop(_Model):
    format: Literal[1] = 1
    width_px: Annotated[int, Field(ge=MIN_WIDTH_PX, le=_MAX_SIDE_PX)]
    height_px: Annotated[int, Field(ge=MIN_HEIGHT_PX, le=_MAX_SIDE_PX)]
    pixels: bytes
    clock: _Clock
    files: _Files
    clipboard: bytes
    toolbox: _Toolbox
    agent: _Agent
    keyboard: _Keyboard
    pointer_position: tuple[_Index, _Index]
    buttons: Annotated[int, Field(ge=0, le=0xFF)]
    controls: _Controls
    editor: _Editor
    forms: tuple[_FormWindow, ...]
    stack: tuple[int, ...]
    """Indexes of the controls, the editor and the forms, the highest window last."""
    dragged: int | None
    """Index of the window that follows the pointer."""


def write_guest(guest: Guest, path: Path) -> None:
    """Write a guest that does not run. Raises: OSError; ValueError: it has no desktop, or too many files."""
    desktop = guest.desktop
    if desktop is None:
        raise ValueError("the guest has not booted")
    known = desktop._known
    stored = _described(
        _Desktop,
        desktop,
        width_px=guest.framebuffer.bounds.w,
        height_px=guest.framebuffer.bounds.h,
        pixels=guest.framebuffer.pixels.tobytes(),
        clock=_described(_Clock, guest.clock),
        files=_described(_Files, guest.files),
        clipboard=guest.programs._clipboard,
        toolbox=_described(_Toolbox, guest.programs.toolbox),
        agent=_described(
            _Agent,
            guest.agent,
            processes={
                number: _Process(end_time_s=each.end_time_s, has_output=each.has_output, **asdict(each.outcome))
                for number, each in guest.agent._processes.items()
            },
            handles={
                number: _OpenFile(path=each.path, mode=each.mode, data=bytes(each.data), position=each.position)
                for number, each in guest.agent._handles.items()
            },
        ),
        keyboard=_described(_Keyboard, desktop._keyboard),
        controls=_described(_Controls, desktop.controls),
        editor=_described(_Editor, desktop.editor, text_area=_described(_TextArea, desktop.editor.text_area)),
        forms=[_described(_FormWindow, window) for window in known if isinstance(window, FormWindow)],
        stack=[known.index(window) for window in desktop._stack],
        dragged=None if desktop._dragged is None else known.index(desktop._dragged),
    )
    data = stored.model_dump_json().encode()
    if len(data) > MAX_BYTES:
        raise ValueError(f"the guest has {len(data)} bytes; at most {MAX_BYTES} are stored")
    path.write_bytes(zstandard.ZstdCompressor(1).compress(data))


def read_guest(path: Path) -> Guest:
    """Return a guest that `write_guest` wrote. Raises: OSError, ValueError; CheckpointUnusable: of envd 0.2.0."""
    data = read_compressed(path, max_bytes=MAX_BYTES)
    if data.startswith(_PICKLE):
        raise CheckpointUnusable(
            f"checkpoint {path.parent.name}: envd 0.2.0 stored this drawn desktop in a form that is no longer read;"
            " start over, or use a host with envd 0.2.0"
        )
    try:
        stored = _Desktop.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {problem_of(first)}") from error
    shape = (stored.height_px, stored.width_px, 4)
    if len(stored.pixels) != math.prod(shape):
        raise ValueError(f"{len(stored.pixels)} bytes of pixels for a screen of {stored.width_px}x{stored.height_px}")
    guest = Guest(width_px=stored.width_px, height_px=stored.height_px)
    guest.show_desktop(Picture(np.frombuffer(stored.pixels, np.uint8).reshape(shape)))
    assert guest.desktop is not None  # noqa: S101 -- it was just shown
    try:
        _restore(guest, guest.desktop, stored)
    except Exception as error:
        # Such as an open menu that its form does not have: valid parts that do not fit together.
        raise ValueError(f"its desktop cannot be drawn: {error!r}") from error
    return guest


def _restore(guest: Guest, desktop: DrawnDesktop, stored: _Desktop) -> None:
    _take(desktop.controls, stored.controls)
    _take(desktop.editor.text_area, stored.editor.text_area)
    _take(desktop.editor, stored.editor, besides={"text_area"})
    forms = []
    for each in stored.forms:
        forms.append(FormWindow(each.form, each.state_path.removesuffix(".state"), desktop))
        _take(forms[-1], each)
    known: tuple[Window, ...] = (desktop.controls, desktop.editor, *forms)
    if sorted(stored.stack) != list(range(len(known))):
        raise ValueError(f"stack {stored.stack} of {len(known)} windows")
    area = stored.editor.text_area
    if area.column > len(area.lines[area.row]):
        raise ValueError(f"a caret at column {area.column} of a line of {len(area.lines[area.row])} characters")
    for path in (*stored.files.files, *stored.files.directories):
        if path != resolve(path):
            raise ValueError(f"a file or directory {path[:100]!r}, which is not the path of one")
    desktop._known, desktop._stack = known, [known[index] for index in stored.stack]
    desktop._dragged = None if stored.dragged is None else known[stored.dragged]
    _take(desktop._keyboard, stored.keyboard)
    desktop.pointer_position, desktop._buttons = stored.pointer_position, stored.buttons
    guest.clock.stop()
    _take(guest.clock, stored.clock)
    _take(guest.programs.toolbox, stored.toolbox)
    guest.programs._clipboard = stored.clipboard
    guest.agent._last_number = stored.agent.last_number
    guest.agent._processes = {
        number: agent.Process(
            Outcome(exit_code=each.exit_code, stdout=each.stdout, stderr=each.stderr, duration_s=each.duration_s),
            each.end_time_s,
            each.has_output,
        )
        for number, each in stored.agent.processes.items()
    }
    guest.agent._handles = {
        number: agent.OpenFile(each.path, each.mode, bytearray(each.data), each.position)
        for number, each in stored.agent.handles.items()
    }
    guest.files.entropy = stored.files.entropy
    guest.files._files, guest.files._directories = stored.files.files, stored.files.directories
    desktop.resize(Framebuffer(np.zeros_like(guest.framebuffer.pixels), shared=False))
    desktop.framebuffer = guest.framebuffer


def _described(kind: type[_Part], source: object, **given: Any) -> _Part:
    """Return the part of the schema for an object: `given`, and its attributes of the same names."""
    names = kind.model_fields.keys() - given.keys() - {"format"}
    return kind(**given, **{name: getattr(source, _attribute(source, name)) for name in names})


def _take(target: object, part: _Model, *, besides: Collection[str] = ()) -> None:
    for name, value in part:
        if name not in besides:
            setattr(target, _attribute(target, name), Rect(*value) if name == "rect" else value)


def _attribute(owner: object, name: str) -> str:
    """Return the name of an object's own attribute, which may be private."""
    return name if name in vars(owner) else f"_{name}"
