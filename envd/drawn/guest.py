"""A fake guest: screen, windows, files, programs, agent and clock."""

from collections.abc import Callable

import numpy as np

from envd.drawn.desktop.canvas import Framebuffer, Rect, SharedPicture
from envd.drawn.desktop.desktop import DrawnDesktop
from envd.drawn.files import DrawnFiles
from envd.drawn.programs import GuestClock, Programs
from envd.drawn.wires.agent import DrawnAgent


class DrawnGuest:
    """One guest. It boots until `show_desktop`."""

    def __init__(self, framebuffer: Framebuffer) -> None:
        self.clock = GuestClock()
        self.files = DrawnFiles()
        self.programs = Programs(
            self.files, windows=self._window_manager, clock=self.clock, power_off=self._powered_off
        )
        self.agent = DrawnAgent(self.files, self.programs, clock=self.clock)
        self.desktop: DrawnDesktop | None = None
        self.framebuffer = framebuffer
        self.on_change: Callable[[list[Rect]], None] = _ignore
        """Called with the changed rectangles of the screen."""
        self.on_end: Callable[[str], None] = _ignore
        """Called when the guest powers off or reboots: POWER_OFF or REBOOT."""

    def show_desktop(self, start: SharedPicture) -> None:
        """End the boot and start the session. `start` is its first picture, used if it has the screen's size."""
        size = self.framebuffer.bounds
        drawn = (size.w, size.h) == start.size_px
        if drawn:
            self.framebuffer = Framebuffer.on(start)
        self.start_session(is_drawn=drawn)
        self._changed([size])

    def start_session(self, *, is_drawn: bool) -> DrawnDesktop:
        """Start the session; `is_drawn` if the framebuffer already shows its desktop."""
        self.desktop = DrawnDesktop(
            self.framebuffer, files=self.files, on_change=self._changed, on_end=self._ended, is_drawn=is_drawn
        )
        return self.desktop

    def release(self) -> None:
        """Free its pixels at once.

        The guest is a reference cycle, so they would otherwise wait for a garbage collection.
        """
        self.framebuffer = Framebuffer(np.zeros((0, 0, 4), np.uint8), shared=True)
        if self.desktop:
            self.desktop.framebuffer = self.framebuffer

    def _changed(self, rects: list[Rect]) -> None:
        self.on_change(rects)

    def _powered_off(self) -> None:
        self._ended("POWER_OFF")

    def _ended(self, cause: str) -> None:
        self.on_end(cause)

    def _window_manager(self) -> DrawnDesktop | None:
        return self.desktop


def _ignore(_event: object) -> None:
    pass
