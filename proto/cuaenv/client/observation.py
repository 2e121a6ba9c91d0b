"""Observations, decoded from messages."""

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cuaenv.client.errors import SampleVoid
from cuaenv.v1 import env_pb2
from cuaenv.wire import box, region

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL import Image

    from cuaenv.frames import TiledImage


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """An element of the accessibility tree, as reported by its program. Guest data: do not trust it."""

    role: str
    """Kind, such as `push-button`."""
    name: str
    value: str = ""
    """Its text or number, if that is not its name."""
    states: tuple[str, ...] = ()
    """Such as `focused`, `checked`, `disabled`."""
    box: tuple[int, int, int, int]
    """Left, top, width and height of its visible part, in pixels of the screen."""
    depth: int = 0
    """Number of enclosing elements; 0 for a window."""
    is_actionable: bool = False
    """Whether it can be clicked, typed into or dragged, and is not disabled."""
    mark: int = 0
    """The number that `View.marks` drew; 0 for none."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the agent sees. Parts that were not requested are None, never a blank placeholder."""

    frame_id: str
    """Identifies the pixels of the whole screen: frames with equal ids are equal, in any episode."""
    width_px: int
    """Size of the image, after crop and scaling."""
    height_px: int
    screen_width_px: int
    screen_height_px: int
    capture_time: datetime
    """Timezone-aware, by the host's clock."""
    image_id: str = ""
    """Identifies the pixels of the image; decoded images are checked against it. Empty without pixels."""
    data: bytes = field(default=b"", repr=False)
    """The encoded image if it is a PNG, JPEG or WebP; else empty."""
    tiles: "TiledImage | None" = field(default=None, repr=False)
    """The exact decoded image, for `View(encoding="raw")`."""
    cursor: tuple[int, int] | None = None
    """Pointer position in pixels of the screen, for `View(cursor="reported")`."""
    a11y_tree: str | None = field(default=None, repr=False)
    """The accessibility tree as text, in `View.a11y_format`."""
    a11y_elements: tuple[Element, ...] | None = field(default=None, repr=False)
    """The elements of the tree, for `View.a11y_elements` and `View.marks`: parents before children, the active window
    first."""
    a11y_left_out_count: int = 0
    """Elements left out because there were too many."""
    terminal: str | None = field(default=None, repr=False)
    settled: bool | None = None
    """False if the screen still moved at `Settle.max`; None if the call did not settle."""
    settle_ms: float = 0.0
    moving: tuple[tuple[int, int, int, int], ...] = ()
    """Parts (x, y, width, height) of the screen that still moved at `Settle.max`."""
    timings_ms: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def image(self) -> "Image.Image":
        """The image for Pillow, decoded once. Raises: ValueError: the frame has no pixels."""
        from PIL import Image  # noqa: PLC0415 -- optional: needed for images only

        if self.tiles is not None:
            from cuaenv.frames.pillow import ArrayImage  # noqa: PLC0415 -- PNGs need no numpy

            return ArrayImage(self.tiles)
        if not self.data:
            raise ValueError(
                f"frame {self.frame_id} has no pixels; request them with View(encoding='raw')."
                " A response recorded before a restart of the daemon may have none"
            )
        return Image.open(io.BytesIO(self.data)).convert("RGB")

    @cached_property
    def rgb_HWC(self) -> "npt.NDArray[np.uint8]":  # noqa: N802 -- the array's axes
        """The image as (height, width, 3) 8-bit RGB, made once. Raises: ValueError: the frame has no pixels."""
        import numpy as np  # noqa: PLC0415 -- optional: needed for arrays only

        return np.asarray(self.image, dtype=np.uint8) if self.tiles is None else self.tiles.rgb_HWC()

    def element_at(self, x: int, y: int) -> Element | None:
        """Return the innermost element at a pixel of the screen, in the frontmost window that has one there.

        None if there is none, or if no elements were requested.
        """
        found: Element | None = None
        for element in self.a11y_elements or ():
            if element.depth == 0 and found is not None:
                break
            left, top, width, height = element.box
            if left <= x < left + width and top <= y < top + height:
                found = element
        return found

    @property
    def png(self) -> bytes:
        """The image as PNG, encoded here if it was sent otherwise. Raises: ValueError: the frame has no pixels."""
        if self.data.startswith(b"\x89PNG"):
            return self.data
        buffer = io.BytesIO()
        self.image.save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()


def read_observation(message: env_pb2.Observation, base: Observation | None = None) -> Observation:
    """Decode an observation; `base` has the image that the message may refer to.

    Raises:
        SampleVoid: The pixels do not match the image id, or a field is invalid.
    """
    settle = message.settle
    return read_frame(
        message.frame,
        base,
        a11y_tree=message.a11y_tree if message.HasField("a11y_tree") else None,
        a11y_elements=_elements(message.a11y_elements) if message.HasField("a11y_elements") else None,
        a11y_left_out_count=message.a11y_elements.left_out_count,
        terminal=message.terminal if message.HasField("terminal") else None,
        settled=settle.settled if message.HasField("settle") else None,
        settle_ms=settle.settle_ms,
        moving=tuple(box(rect) for rect in settle.moving_regions),
        timings_ms=dict(message.timings_ms),
    )


def read_frame(frame: env_pb2.Frame, base: Observation | None, **more: Any) -> Observation:
    """Decode a frame as an observation; `base` and errors are those of `read_observation`."""
    data, tiles = _pixels(frame, base)
    try:
        capture_time = frame.capture_time.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError) as error:
        raise SampleVoid(
            f"image {frame.image_id}: invalid capture time: {error}", code="DATA_LOSS", reason="FRAME_MISMATCH"
        ) from error
    return Observation(
        frame_id=frame.frame_id,
        width_px=frame.width_px,
        height_px=frame.height_px,
        screen_width_px=frame.screen.width_px,
        screen_height_px=frame.screen.height_px,
        capture_time=capture_time,
        image_id=frame.image_id,
        data=data,
        tiles=tiles,
        cursor=(frame.cursor.x, frame.cursor.y) if frame.HasField("cursor") else None,
        **more,
    )


def _elements(message: env_pb2.A11yElements) -> tuple[Element, ...]:
    return tuple(
        Element(
            role=element.role,
            name=element.name,
            value=element.value,
            states=tuple(element.states),
            box=box(element.box),
            depth=element.depth,
            is_actionable=element.actionable,
            mark=element.mark,
        )
        for element in message.elements
    )


def _pixels(frame: env_pb2.Frame, base: Observation | None) -> tuple[bytes, "TiledImage | None"]:
    """Return `Observation.data` and `Observation.tiles`."""
    kind = frame.WhichOneof("content")
    if kind is None:
        return b"", None
    if kind == "keyframe" and frame.keyframe.encoding != env_pb2.ENCODING_RAW_ZSTD:
        return frame.keyframe.data, None
    if kind == "unchanged" and base and frame.unchanged.base_image_id == base.image_id == frame.image_id:
        return base.data, base.tiles
    try:
        from cuaenv.frames import FrameMismatch, TiledImage  # noqa: PLC0415 -- PNGs need no numpy
    except ImportError as error:
        raise ImportError(
            f"{error.name} is missing: install envd-trainer[trainer], or use View(encoding='png')", name=error.name
        ) from error
    try:
        if kind == "keyframe":
            return b"", TiledImage.unpack(
                frame.keyframe.data, width_px=frame.width_px, height_px=frame.height_px, image_id=frame.image_id
            )
        if base and base.tiles and kind == "tiles" and frame.tiles.base_image_id == base.image_id:
            regions = [region(rect) for rect in frame.tiles.tiles]
            return b"", base.tiles.patched(regions, frame.tiles.data, image_id=frame.image_id)
    except FrameMismatch as error:
        raise SampleVoid(str(error), code="DATA_LOSS", reason="FRAME_MISMATCH") from error
    raise SampleVoid(
        f"image {frame.image_id}: sent as {kind} of a base that is not held", code="DATA_LOSS", reason="FRAME_MISMATCH"
    )
