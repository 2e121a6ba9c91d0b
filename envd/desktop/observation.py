"""Observations and their options. Plain data."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum

from cuaenv.region import Region
from envd.base.errors import InvalidRequest


class Encoding(Enum):
    """Encoding of a frame's pixels."""

    #: No pixels: only the frame's id, size and time.
    NONE = "none"
    #: 8-bit RGB PNG: lossless.
    PNG = "png"
    #: Baseline JPEG at `ObservationOptions.quality`: lossy.
    JPEG = "jpeg"
    #: WebP at `ObservationOptions.quality`: lossy.
    WEBP = "webp"
    #: 8-bit RGB as one zstd frame, or only the tiles that differ from an image of the client: lossless.
    RAW_ZSTD = "raw_zstd"


class CursorMode(Enum):
    """How the pointer appears in an image."""

    #: Drawn into the pixels.
    DRAWN = "drawn"
    #: Not drawn.
    HIDDEN = "hidden"
    #: Not drawn; its position is reported.
    REPORTED = "reported"


class A11yFormat(Enum):
    """Format of an accessibility tree."""

    #: No tree.
    NONE = "none"
    #: XML as produced by OSWorld's in-guest server.
    OSWORLD_XML = "osworld_xml"
    #: An outline with one line per element; see `envd.desktop.a11y.outline`.
    COMPACT = "compact"


@dataclass(frozen=True, slots=True)
class Point:
    """A pixel of the guest's screen, counted from its top left corner."""

    x_px: int
    y_px: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleResult:
    """Result of settling."""

    settled: bool
    """False if the screen still moved after `max_ms`."""
    settle_ms: float
    change_count: int
    """Framebuffer updates with changed pixels during the wait."""
    is_idle: bool = True
    """False if the guest's processors were still busy."""
    moving: tuple[Region, ...] = ()
    """Regions that still moved after `max_ms`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationOptions:
    """Contents of an observation."""

    encoding: Encoding = Encoding.PNG
    quality: int = 85
    """Quality of the lossy encodings, 1 to 100."""
    region: Region | None = None
    """Crop to this region of the screen; None for all of it."""
    max_width_px: int = 0
    """Scale down to fit; 0 for no limit."""
    max_height_px: int = 0
    max_pixel_count: int = 0
    """Scale down to at most this many pixels; 0 for no limit."""
    size_multiple_px: int = 0
    """Make width and height multiples of this, as a vision model's image processor does; 0 for any size."""
    a11y_format: A11yFormat = A11yFormat.NONE
    a11y_max_chars: int = 8192
    """Longest outline, for `A11yFormat.COMPACT`."""
    include_a11y_elements: bool = False
    draw_marks: bool = False
    """Draw numbered boxes around elements that can be clicked or typed into, and include the elements with numbers."""
    include_terminal: bool = False
    cursor: CursorMode = CursorMode.DRAWN
    known_image_id: str = ""
    """An image that the client has; the frame may be sent as a change to it."""
    include_screen_change: bool = False
    """Whether a step's observation includes what it changed on the screen."""
    include_grey_difference: bool = False
    """Whether a step's observation also includes the mean difference in grey."""

    @property
    def asks_for_tree(self) -> bool:
        return self.a11y_format is not A11yFormat.NONE or self.includes_elements

    @property
    def includes_elements(self) -> bool:
        return self.include_a11y_elements or self.draw_marks

    @property
    def asks_guest(self) -> bool:
        """Whether data other than pixels is requested, which needs a running guest."""
        return self.asks_for_tree or self.include_terminal

    def require_region_on(self, size_px: tuple[int, int]) -> None:
        """Check that the region lies on a screen of (width, height), before any action. Raises: InvalidRequest."""
        region = self.region
        if region is None:
            return
        width_px, height_px = size_px
        if (
            min(region.x_px, region.y_px) < 0
            or min(region.width_px, region.height_px) < 1
            or region.x_px + region.width_px > width_px
            or region.y_px + region.height_px > height_px
        ):
            raise InvalidRequest(
                "observation.region",
                f"{region.width_px}x{region.height_px} at ({region.x_px}, {region.y_px}) is not within the screen of"
                f" {width_px}x{height_px}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyframe:
    """A whole image."""

    encoding: Encoding
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TileDelta:
    """An image as the regions that differ from another image of the same size."""

    base_image_id: str
    tiles: tuple[Region, ...]
    """Regions around the differing pixels; disjoint."""
    data: bytes
    """R, G, B bytes of the regions, row by row, one after the other, as one zstd frame whose dictionary is the same
    regions of the base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnchangedImage:
    """An image equal to another."""

    base_image_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedFrame:
    """An encoded frame."""

    frame_id: str
    """Identifies the pixels of the whole screen, before crop, scale and cursor."""
    image_id: str
    """Identifies the pixels of the image; see `cuaenv.frames.TiledImage`. Empty if no pixels were requested."""
    width_px: int
    height_px: int
    screen_width_px: int
    screen_height_px: int
    capture_time: datetime
    """Timezone-aware host time; the pixels are of this time or later."""
    content: Keyframe | TileDelta | UnchangedImage | None
    """None for `Encoding.NONE`."""
    cursor: Point | None = None
    """Pointer position in guest pixels, for `CursorMode.REPORTED`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenComparison:
    """Difference of two screens, as facts for rewards."""

    base_frame_id: str
    """The earlier frame."""
    changed_fraction: float
    """Share of pixels that differ, in [0, 1]."""
    changed_regions: tuple[Region, ...]
    """Regions that contain all differing pixels."""
    grey_difference: float | None = None
    """Mean absolute difference in 64x64 grey, in [0, 1]; None if not requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class A11yElement:
    """An element of an accessibility tree that is on the screen."""

    role: str
    """Kind by AT-SPI or UI Automation: `push-button`, `frame`."""
    name: str
    value: str
    """Its text or number, if that is not its name."""
    states: tuple[str, ...]
    """The relevant ones, in a fixed order."""
    box: Region
    """Its visible part."""
    depth: int
    """Number of enclosing elements; 0 for a window."""
    is_actionable: bool = False
    """Whether it can be clicked, typed into or dragged, and is not disabled."""
    mark: int = 0
    """The number drawn next to it, from 1; 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class A11yElements:
    """Visible elements: parents before children, the active window first."""

    items: tuple[A11yElement, ...]
    left_out_count: int = 0
    """Elements left out because there were too many."""
    is_cut: bool = False
    """Whether the guest itself left some out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the agent sees after a reset or step. Parts not requested are None, never a blank placeholder."""

    frame: EncodedFrame
    a11y_tree: str | None = None
    a11y_elements: A11yElements | None = None
    terminal: str | None = None
    settle: SettleResult | None = None
    screen_change: ScreenComparison | None = None
    timings_ms: dict[str, float] = field(default_factory=dict)
    """Milliseconds by phase, such as `input`, `settle`, `encode`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionOutcome:
    """The result of one action. An agent's mistake is reported here, never raised."""

    error: str = ""
    """Why the action had no effect or only part of it, as text for the agent; empty if it was performed."""
    input_ms: float = 0.0
    """Time spent on handing the input to the machine, or on a tool."""
    output: str | None = None
    """Result of a tool, as text for the agent; None for other actions."""
    exit_code: int | None = None
    """Exit code of a shell's command that ended."""
    timed_out: bool = False
    """Whether a shell's command did not end in time."""
    left_out_bytes: int = 0
    """Bytes of the result that `output` leaves out."""
