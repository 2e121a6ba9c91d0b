"""State of a fake guest: screen, windows, files, programs, agent and clock.

It is one object so that one deep copy forks all of it. The copy shares unchanged pixels and files with the original.
"""

import copy
from collections.abc import Callable

import numpy as np

from envd.hypervisor.fake.desktop.canvas import Framebuffer, Picture, Rect
from envd.hypervisor.fake.desktop.desktop import DrawnDesktop
from envd.hypervisor.fake.files import GuestFiles
from envd.hypervisor.fake.programs import GuestClock, Programs
from envd.hypervisor.fake.wires.agent import GuestAgent


class Guest:
    """One guest. It boots, with a black screen, until `show_desktop`."""

    def __init__(self, *, width_px: int, height_px: int) -> None:
        self.clock = GuestClock()
        self.files = GuestFiles()
        self.programs = Programs(
            self.files, windows=self._window_manager, clock=self.clock, power_off=self._powered_off
        )
        self.agent = GuestAgent(self.files, self.programs, clock=self.clock)
        self.desktop: DrawnDesktop | None = None
        self.framebuffer = Framebuffer(
            # Not written during boot, so the kernel backs it with one zero page.
            np.zeros((height_px, width_px, 4), np.uint8),
            shared=True,
        )
        self.on_change: Callable[[list[Rect]], None] = _ignore
        """Called with the changed rectangles of the screen. A copy starts without a callback."""
        self.on_power_off: Callable[[], None] = _do_nothing
        """Called when the guest powers off. A copy starts without a callback."""

    def show_desktop(self, start: Picture) -> None:
        """End the boot and start the session. `start` is its first picture, used if it has the screen's size."""
        size = self.framebuffer.bounds
        drawn = (size.w, size.h) == start.size_px
        if drawn:
            self.framebuffer = Framebuffer.on(start)
        self.desktop = DrawnDesktop(self.framebuffer, files=self.files, on_change=self._changed, is_drawn=drawn)
        self._changed([size])

    def resize_screen(self, *, width_px: int, height_px: int) -> None:
        """Change the screen mode."""
        self.framebuffer = Framebuffer(np.zeros((height_px, width_px, 4), np.uint8), shared=False)
        if self.desktop:
            self.desktop.resize(self.framebuffer)

    def copy(self) -> "Guest":
        """Return a guest in the same state. Pixels and files are shared until one of them writes to them."""
        return copy.deepcopy(self, {id(self.on_change): _ignore, id(self.on_power_off): _do_nothing})

    def release(self) -> None:
        """Free its pixels at once.

        The guest is a reference cycle, so they would otherwise wait for a garbage collection.
        """
        self.framebuffer = Framebuffer(np.zeros((0, 0, 4), np.uint8), shared=True)
        if self.desktop:
            self.desktop.framebuffer = self.framebuffer

    # Bound methods, not closures: a deep copy rebinds methods, but a closure keeps the original guest.

    def _changed(self, rects: list[Rect]) -> None:
        self.on_change(rects)

    def _powered_off(self) -> None:
        self.on_power_off()

    def _window_manager(self) -> DrawnDesktop | None:
        return self.desktop


def _ignore(_rects: list[Rect]) -> None:
    pass


def _do_nothing() -> None:
    pass
