"""The view of a stored desktop as a file: screen, pointer and held keys. All functions block."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import zstandard
from pydantic import AwareDatetime, Field, TypeAdapter, ValidationError

from cuaenv.frames import TiledImage
from cuaenv.problems import first_problem, without_path
from envd.base.errors import CheckpointCorrupt
from envd.base.zstd import read_compressed
from envd.desktop.display.frames import Frame
from envd.desktop.display.rfb import MAX_CURSOR_SIDE_PX, MAX_SCREEN_PIXELS, MAX_SIDE_PX, CursorShape
from envd.desktop.display_connection import DesktopView
from envd.desktop.input.plan import HeldInputs

_STATE, _SCREEN, _CURSOR = "view.json", "screen.zst", "cursor.zst"
#: More than its largest content has.
_MAX_STATE_BYTES = 1 << 16

_Side = Annotated[int, Field(ge=1, le=MAX_SIDE_PX)]
_CursorSide = Annotated[int, Field(ge=0, le=MAX_CURSOR_SIDE_PX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cursor:
    hot_x_px: _CursorSide
    hot_y_px: _CursorSide
    shape: tuple[_CursorSide, _CursorSide, Literal[4]]
    """(height, width, 4)."""

    @classmethod
    def of(cls, cursor: CursorShape) -> Self:
        height_px, width_px, _ = cursor.rgba_HWC.shape
        return cls(hot_x_px=cursor.hot_x_px, hot_y_px=cursor.hot_y_px, shape=(height_px, width_px, 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """What is not pixels."""

    width_px: _Side
    height_px: _Side
    capture_time: AwareDatetime
    cursor: _Cursor | None
    caps_lock: bool
    inputs: HeldInputs
    guestd_types: bool
    home: str | None


_ADAPTER = TypeAdapter(_View)


def write_view(view: DesktopView, directory: Path) -> None:
    """Write a view. Raises: OSError."""
    cursor = view.frame.cursor
    state = _View(
        width_px=view.frame.width_px,
        height_px=view.frame.height_px,
        capture_time=view.frame.capture_time,
        cursor=None if cursor is None else _Cursor.of(cursor),
        caps_lock=view.caps_lock,
        inputs=view.inputs,
        guestd_types=view.guestd_types,
        home=view.home,
    )
    (directory / _STATE).write_bytes(_ADAPTER.dump_json(state))
    _write_pixels(directory / _SCREEN, view.frame.rgb_HWC)
    if cursor is not None:
        _write_pixels(directory / _CURSOR, cursor.rgba_HWC)


def read_view(directory: Path, checkpoint_id: str) -> DesktopView:
    """Return a view that `write_view` wrote, perhaps on another host. Raises: CheckpointCorrupt."""
    try:
        with (directory / _STATE).open("rb") as file:
            state = _ADAPTER.validate_json(file.read(_MAX_STATE_BYTES))
        _check(state)
        image = TiledImage.from_rgb(_read_pixels(directory / _SCREEN, (state.height_px, state.width_px, 3)))
        cursor = None
        if state.cursor is not None:
            pixels = _read_pixels(directory / _CURSOR, state.cursor.shape)
            cursor = CursorShape(state.cursor.hot_x_px, state.cursor.hot_y_px, pixels)
    except (OSError, ValueError) as error:
        why = (
            f"{_STATE}: {first_problem(error.errors())}" if isinstance(error, ValidationError) else without_path(error)
        )
        raise CheckpointCorrupt(
            f"checkpoint {checkpoint_id}: its screen cannot be read ({why}); delete the checkpoint"
        ) from error
    frame = Frame(
        frame_id=image.image_id,
        image=image,
        capture_time=state.capture_time,
        cursor=cursor,
        pointer=None if cursor is None else state.inputs.pointer_on(*image.size_px),
    )
    return DesktopView(
        frame=frame, caps_lock=state.caps_lock, inputs=state.inputs, guestd_types=state.guestd_types, home=state.home
    )


def _check(state: _View) -> None:
    """Check that a display could have shown and sent it. Raises: ValueError."""
    if state.width_px * state.height_px > MAX_SCREEN_PIXELS:
        raise ValueError(f"a screen of {state.width_px}x{state.height_px} has more than {MAX_SCREEN_PIXELS} pixels")
    limits = [(state.inputs.buttons, 0xFF)]
    if state.inputs.pointer is not None:
        limits += [(state.inputs.pointer.x_px, MAX_SIDE_PX), (state.inputs.pointer.y_px, MAX_SIDE_PX)]
    for key in state.inputs.keys:
        limits += [(key.scancode, 0xFF), (key.keysym, 0xFFFF_FFFF)]
    if not all(0 <= value <= limit for value, limit in limits):
        raise ValueError("no display accepts its pointer, buttons or keys")


def _write_pixels(path: Path, pixels_HWC: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    path.write_bytes(zstandard.ZstdCompressor(1).compress(np.ascontiguousarray(pixels_HWC).tobytes()))


def _read_pixels(path: Path, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    data = read_compressed(path, max_bytes=math.prod(shape))
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)
