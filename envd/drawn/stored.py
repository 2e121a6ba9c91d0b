"""A drawn desktop as a file: JSON of a fixed schema, compressed.

A file can come from another host, so it names no class and no code. What is read is checked before it is used, and the
desktop is drawn once with it.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import zstandard
from pydantic import Field, TypeAdapter, ValidationError

from cuaenv.problems import first_problem
from envd.base.errors import CheckpointUnusable
from envd.base.zstd import read_compressed
from envd.drawn.desktop.canvas import Framebuffer, SharedPicture
from envd.drawn.desktop.desktop import MIN_HEIGHT_PX, MIN_WIDTH_PX
from envd.drawn.files import resolve
from envd.drawn.parts import MAX_SIDE_PX, StatePart
from envd.drawn.state import DESKTOP, DesktopState, DrawnState

#: Many times as much as a drawn desktop has.
MAX_BYTES = 256 << 20
#: First byte of the files of envd 0.2.0, which were pickled.
_PICKLE = b"\x80"


@dataclass(frozen=True, kw_only=True)
class _Header(StatePart):
    format: Literal[1] = 1
    width_px: Annotated[int, Field(ge=MIN_WIDTH_PX, le=MAX_SIDE_PX)]
    height_px: Annotated[int, Field(ge=MIN_HEIGHT_PX, le=MAX_SIDE_PX)]
    pixels: bytes


@dataclass(frozen=True, kw_only=True)
class _StoredState(DesktopState, _Header):
    """The fields of the header are checked first."""


_HEADER = TypeAdapter(_Header)
_STORED = TypeAdapter(_StoredState)


def write_state(state: DrawnState, path: Path) -> None:
    """Write the state of a guest. Raises: OSError; ValueError: the format does not allow it, such as too many files."""
    width_px, height_px = state.picture.size_px
    pixels = state.picture.copy().tobytes()
    header = _Header(width_px=width_px, height_px=height_px, pixels=pixels)
    # One object with the fields of both: the pixels are 5 MB, of which `json` would make two more copies.
    data = _HEADER.dump_json(header)[:-1] + b"," + DESKTOP.dump_json(state.desktop)[1:]
    if len(data) > MAX_BYTES:
        raise ValueError(f"the guest has {len(data)} bytes; at most {MAX_BYTES} are stored")
    path.write_bytes(zstandard.ZstdCompressor(1).compress(data))


def read_state(path: Path) -> DrawnState:
    """Return a state that `write_state` wrote. Raises: OSError, ValueError; CheckpointUnusable: of envd 0.2.0."""
    data = read_compressed(path, max_bytes=MAX_BYTES)
    if data.startswith(_PICKLE):
        raise CheckpointUnusable(
            f"checkpoint {path.parent.name}: envd 0.2.0 stored this drawn desktop in a form that is no longer read;"
            " start over, or use a host with envd 0.2.0"
        )
    try:
        stored = _STORED.validate_json(data)
    except ValidationError as error:
        raise ValueError(first_problem(error.errors())) from error
    shape = (stored.height_px, stored.width_px, 4)
    if len(stored.pixels) != math.prod(shape):
        raise ValueError(f"{len(stored.pixels)} bytes of pixels for a screen of {stored.width_px}x{stored.height_px}")
    picture = SharedPicture(np.frombuffer(stored.pixels, np.uint8).reshape(shape))
    state = DrawnState(picture=picture, desktop=replace(stored, pixels=b""))
    try:
        _check(state)
    except Exception as error:
        # Such as an open menu that its form does not have: valid parts that do not fit together.
        raise ValueError(f"its desktop cannot be drawn: {error!r}") from error
    return state


def _check(state: DrawnState) -> None:
    """Check that a guest can have this state, by drawing it. Raises: Exception."""
    area = state.desktop.editor.text_area
    if area.column > len(area.lines[area.row]):
        raise ValueError(f"a caret at column {area.column} of a line of {len(area.lines[area.row])} characters")
    for path in (*state.desktop.files.files, *state.desktop.files.directories):
        if path != resolve(path):
            raise ValueError(f"a file or directory {path[:100]!r}, which is not the path of one")
    guest = state.build()
    if guest.desktop is not None:
        guest.desktop.resize(Framebuffer(np.zeros_like(guest.framebuffer.pixels), shared=False))
