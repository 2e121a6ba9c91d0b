"""What a desktop shows, and what is held down on it, while its machine stands still: what its forks begin with."""

from collections import OrderedDict
from dataclasses import dataclass, field

from envd.guest.frames import PointerImage, encode_frame
from envd.guest.input import HeldInputs
from envd.guest.observation import EncodedFrame, Frame, ObservationOptions
from envd.guest.rfb import CursorShape

#: Ways of asking for the same frame; a training run has one, an evaluation beside it another.
_KEPT_ENCODINGS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DesktopView:
    """The screen, the pointer and the keys of a machine that stands still."""

    frame: Frame
    cursor: CursorShape | None
    """The pointer's image; None where the guest draws it into its screen."""
    caps_lock: bool
    inputs: HeldInputs
    guestd_types: bool
    """Whether the guest's service can type."""
    home: str | None
    """The session user's home directory, where it is known."""
    _encoded: OrderedDict[ObservationOptions, EncodedFrame] = field(
        default_factory=OrderedDict, init=False, repr=False, compare=False
    )

    @property
    def size_px(self) -> tuple[int, int]:
        """(width, height) of the screen."""
        return self.frame.width_px, self.frame.height_px

    def encode(self, options: ObservationOptions) -> EncodedFrame:
        """Encode the frame as asked: once, however many forks show it.

        Raises:
            InvalidRequest: The options make no sense for this screen.
        """
        # Two threads may both encode; they come to the same bytes.
        if (encoded := self._encoded.get(options)) is None:
            pointer = None
            if self.cursor is not None:
                width_px, height_px = self.size_px
                pointer = PointerImage(at=self.inputs.pointer_on(width_px, height_px), shape=self.cursor)
            encoded = self._encoded[options] = encode_frame(self.frame, options, pointer=pointer)
            while len(self._encoded) > _KEPT_ENCODINGS:
                self._encoded.popitem(last=False)
        return encoded

    def encoded(self, options: ObservationOptions) -> EncodedFrame | None:
        """Return the frame if it was encoded so before."""
        return self._encoded.get(options)
