"""What an agent sees, and how it asks to see it. Plain data."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum

import numpy as np
import numpy.typing as npt


class Encoding(Enum):
    """How a frame's pixels travel."""

    #: No pixels, only the frame's id, size and time.
    NONE = "none"
    #: 8-bit RGB PNG: lossless.
    PNG = "png"
    #: Baseline JPEG at `ObservationOptions.jpeg_quality`: lossy.
    JPEG = "jpeg"


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A rectangle of the guest's screen, in pixels."""

    x_px: int
    y_px: int
    width_px: int
    height_px: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SettlePolicy:
    """When a screen counts as settled after input. Times in milliseconds."""

    quiet_ms: int = 300
    """The screen must not have changed for this long."""
    min_ms: int = 0
    """Never return sooner than this after the last input."""
    max_ms: int = 5000
    """Return after this long even if the screen still moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleResult:
    """How settling went."""

    settled: bool
    """False when `max_ms` ran out while the screen still moved."""
    settle_ms: float
    change_count: int
    """Framebuffer updates with changed pixels that arrived meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationOptions:
    """What to put into an observation."""

    encoding: Encoding = Encoding.PNG
    jpeg_quality: int = 85
    region: Region | None = None
    """Crop to this part of the screen; None for all of it."""
    max_width_px: int = 0
    """Scale down to fit; 0 for no limit."""
    max_height_px: int = 0
    include_a11y_tree: bool = False
    include_terminal: bool = False
    draw_cursor: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One image of a guest's screen."""

    frame_id: str
    """Names the pixels: xxh3-128 over size and RGB bytes, as 32 hex digits. Equal ids look the same."""
    rgb_HWC: npt.NDArray[np.uint8]
    """(height, width, 3), 8-bit RGB, without the pointer; read-only."""
    capture_time: datetime
    """Timezone-aware host time."""

    @property
    def width_px(self) -> int:
        """Width in pixels."""
        return int(self.rgb_HWC.shape[1])

    @property
    def height_px(self) -> int:
        """Height in pixels."""
        return int(self.rgb_HWC.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedFrame:
    """A frame as it travels."""

    frame_id: str
    """Id of the full source frame, before crop, scale and cursor."""
    width_px: int
    height_px: int
    screen_width_px: int
    screen_height_px: int
    capture_time: datetime
    encoding: Encoding
    data: bytes
    """Empty for `Encoding.NONE`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the agent sees after a reset or step. What was not asked for is None, never a blank stand-in."""

    frame: EncodedFrame
    a11y_tree: str | None = None
    terminal: str | None = None
    settle: SettleResult | None = None
    timings_ms: dict[str, float] = field(default_factory=dict)
    """Milliseconds by phase, such as `input`, `settle`, `encode`."""
