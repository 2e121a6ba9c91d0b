"""State that the routes share: the screen, the keyboard, accessibility, the recording and the gateway."""

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from .a11y.client import A11yClient
from .gateway import Gateway
from .keyboard import Keyboard
from .messages import HttpError
from .processes import TimedLock
from .x11 import X11, Window


class Guest:
    """One user's desktop session.

    Args:
        wait_windows: Window classes that must show before the session is ready.
    """

    def __init__(self, *, wait_windows: Sequence[str] = ()) -> None:
        self.wait_windows = wait_windows
        self.a11y = A11yClient()
        self.gateway = Gateway()
        self.keyboard = Keyboard()
        self.recording_lock = TimedLock("recording")
        self.recording: tuple[subprocess.Popen[bytes], Path] | None = None
        self.wallpaper: Path | None = None
        self.wallpaper_timeout_s = 15.0
        """Limit of each program that sets the wallpaper."""
        self._screen_lock = TimedLock("the screen")

    def warm_up(self) -> None:
        """Query an accessibility tree as soon as the session is up, so that AT-SPI's services are running."""
        while True:
            with suppress(HttpError), self.x11() as x:
                if x.window_manager() is not None:
                    break
            time.sleep(0.5)
        self.a11y.warm_up()

    @contextmanager
    def x11(self) -> Iterator[X11]:
        """Connect to the X server, one call at a time. Raises: HttpError."""
        with self._screen_lock(), X11() as x:
            yield x

    def windows_or_none(self) -> list[Window] | None:
        """Return the windows, or None while the screen is busy: a call that has started to act must not end in 503."""
        try:
            with self.x11() as x:
                return x.windows()
        except HttpError as error:
            if error.status != 503:
                raise
            return None

    def wait_for_windows(self, condition: Callable[[list[Window]], bool], timeout_s: float) -> bool:
        """Poll the windows until `condition` holds, without holding the screen lock in between."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            windows = self.windows_or_none()
            if windows is not None and condition(windows):
                return True
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.05)
