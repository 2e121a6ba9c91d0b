"""The view of a stored desktop as a file: screen, pointer and held keys. All functions block."""

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from pydantic import TypeAdapter

from cuaenv.copying import copied
from cuaenv.frames import TiledImage
from envd.base.errors import CheckpointCorrupt
from envd.guest.display.frames import Frame
from envd.guest.display.rfb import CursorShape
from envd.guest.input.plan import HeldInputs
from envd.guest.view import DesktopView

_STATE, _SCREEN, _CURSOR = "view.json", "screen.zst", "cursor.zst"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cursor:
    hot_x_px: int
    hot_y_px: int
    shape: tuple[int, ...]
    """(height, width, 4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """What is not pixels."""

    width_px: int
    height_px: int
    capture_time: datetime
    cursor: _Cursor | None
    caps_lock: bool
    inputs: HeldInputs
    guestd_types: bool
    home: str | None


_ADAPTER = TypeAdapter(_View)


def write_view(view: DesktopView, directory: Path) -> None:
    """Write a view. Raises: OSError."""
    cursor = view.cursor
    shape = None if cursor is None else copied(_Cursor, cursor, shape=cursor.rgba_HWC.shape)
    state = copied(_View, view.frame, view, cursor=shape)
    (directory / _STATE).write_bytes(_ADAPTER.dump_json(state))
    _write_pixels(directory / _SCREEN, view.frame.rgb_HWC)
    if cursor is not None:
        _write_pixels(directory / _CURSOR, cursor.rgba_HWC)


def read_view(directory: Path) -> DesktopView:
    """Return a view that `write_view` wrote. Raises: CheckpointCorrupt."""
    try:
        state = _ADAPTER.validate_python(json.loads((directory / _STATE).read_bytes()))
        image = TiledImage.from_rgb(_read_pixels(directory / _SCREEN, (state.height_px, state.width_px, 3)))
        cursor = None
        if state.cursor is not None:
            cursor = copied(CursorShape, state.cursor, rgba_HWC=_read_pixels(directory / _CURSOR, state.cursor.shape))
    except (OSError, ValueError, zstandard.ZstdError) as error:
        raise CheckpointCorrupt(f"stored view {directory}: cannot be read: {error}") from error
    frame = Frame(frame_id=image.image_id, image=image, capture_time=state.capture_time)
    return copied(DesktopView, state, frame=frame, cursor=cursor)


def _write_pixels(path: Path, pixels_HWC: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    path.write_bytes(zstandard.ZstdCompressor(1).compress(np.ascontiguousarray(pixels_HWC).tobytes()))


def _read_pixels(path: Path, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    data = zstandard.ZstdDecompressor().decompress(path.read_bytes())
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)
