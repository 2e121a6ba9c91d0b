"""The state of a paused desktop, which its forks start with."""

from dataclasses import dataclass, field, replace

from envd.desktop.display.encoder import FrameEncoder
from envd.desktop.display.frames import Frame
from envd.desktop.display.marks import Mark
from envd.desktop.input.plan import HeldInputs
from envd.desktop.observation import EncodedFrame, ObservationOptions, Point


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionState:
    """State that a new connection to a used desktop cannot discover by itself."""

    pointer: Point | None
    """Last position set; None if it was never set."""
    is_holding: bool
    """Whether a key or button was held. Whether it stays pressed when the connection ends is unknown."""
    guestd_types: bool
    home: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DesktopView:
    """Screen, pointer and keys of a paused machine."""

    frame: Frame
    caps_lock: bool
    inputs: HeldInputs
    guestd_types: bool
    """Whether the guest's service can type."""
    home: str | None
    """The session user's home directory; None if unknown."""
    encoder: FrameEncoder = field(default_factory=FrameEncoder, repr=False, compare=False)
    """Shared by all forks, so a frame is encoded once for all."""

    def with_connection_state(self, state: ConnectionState) -> "DesktopView":
        """Return this view with the state of an earlier connection."""
        inputs = HeldInputs(pointer=state.pointer)
        frame = self.frame
        if frame.cursor is not None:
            frame = replace(frame, pointer=inputs.pointer_on(*self.size_px))
        return replace(self, frame=frame, inputs=inputs, guestd_types=state.guestd_types, home=state.home)

    @property
    def size_px(self) -> tuple[int, int]:
        """(width, height) of the screen."""
        return self.frame.width_px, self.frame.height_px

    async def encode(self, options: ObservationOptions, *, marks: tuple[Mark, ...] = ()) -> EncodedFrame:
        """Encode the frame, with marks drawn over it; once for all forks."""
        return await self.encoder.encode(self.frame, options, marks=marks)
