"""Conversions between Python values and small protobuf messages."""

import uuid
from datetime import timedelta

from google.protobuf.duration_pb2 import Duration

from cuaenv.region import Region
from cuaenv.v1 import env_pb2


def wire_duration(length: timedelta | None) -> Duration | None:
    if length is None:
        return None
    duration = Duration()
    duration.FromTimedelta(length)
    return duration


def wire_rect(region: tuple[int, int, int, int]) -> env_pb2.Rect:
    """Return a `Rect` message from (x, y, width, height) in pixels."""
    x_px, y_px, width_px, height_px = region
    return env_pb2.Rect(x_px=x_px, y_px=y_px, width_px=width_px, height_px=height_px)


def box(rect: env_pb2.Rect) -> tuple[int, int, int, int]:
    """Return (x, y, width, height) in pixels from a `Rect` message."""
    return rect.x_px, rect.y_px, rect.width_px, rect.height_px


def region(rect: env_pb2.Rect) -> Region:
    return Region(x_px=rect.x_px, y_px=rect.y_px, width_px=rect.width_px, height_px=rect.height_px)


def new_id() -> str:
    return str(uuid.uuid4())
