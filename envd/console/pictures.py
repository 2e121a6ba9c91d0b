"""The pictures of episodes' screens: each changed frame is encoded once for all viewers, off the event loop.

A picture is made only while somebody views it. Making one neither wakes a machine nor renews a lease, and uses no
encoder of the episode's clients, whose base images it would displace.
"""

import asyncio
import base64
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum

from PIL import Image

from envd.base.errors import EnvdError, GuestError, GuestUnresponsive
from envd.desktop.display.frames import Frame
from envd.episodes.service import EpisodeService

#: One thread encodes about 300 tiles per second.
_THREADS = 2
#: Pause after a display did not answer.
_RETRY_S = 5.0


class PictureSize(Enum):
    """Kinds of pictures: longest width in pixels, most pictures per second, JPEG quality."""

    #: On the wall.
    TILE = (320, 2.0, 70)
    #: In the full view.
    FULL = (1600, 5.0, 85)
    #: In the full view of a person who acts.
    LIVE = (1600, 25.0, 75)

    @property
    def max_width_px(self) -> int:
        """Wider screens are scaled down."""
        return int(self.value[0])

    @property
    def max_rate_hz(self) -> float:
        """Further changes in between are skipped."""
        return self.value[1]

    @property
    def quality(self) -> int:
        """JPEG quality."""
        return self.value[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePicture:
    """A screen, encoded for the page."""

    frame_id: str
    jpeg_base64: str
    screen_px: tuple[int, int]
    pointer_px: tuple[int, int] | None
    """The pointer's position on the screen; None if the guest draws it into its screen."""


@dataclass(eq=False)
class PictureSource:
    """The pictures of one episode in one size, while it has viewers."""

    episode_id: str
    size: PictureSize
    picture: PagePicture | None = None
    """The newest."""
    problem: str = ""
    """Why there are no newer ones; empty while there may be."""


class Pictures:
    """Makes the pictures that viewers subscribe to."""

    def __init__(self, episodes: EpisodeService) -> None:
        self._episodes = episodes
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="console")
        self._sources: dict[tuple[str, PictureSize], PictureSource] = {}
        self._tasks: dict[tuple[str, PictureSize], asyncio.Task[None]] = {}
        self._listeners: dict[tuple[str, PictureSize], list[Callable[[], None]]] = {}

    def subscribe(self, episode_id: str, size: PictureSize, changed: Callable[[], None]) -> PictureSource:
        """Return the source of an episode's pictures; `changed` is called after each change of it."""
        key = (episode_id, size)
        if key not in self._sources:
            source = self._sources[key] = PictureSource(episode_id, size)
            self._listeners[key] = []
            self._tasks[key] = asyncio.create_task(self._follow(source), name=f"console:{episode_id}")
        self._listeners[key].append(changed)
        return self._sources[key]

    def unsubscribe(self, source: PictureSource, changed: Callable[[], None]) -> None:
        """Undo `subscribe`; the last viewer ends the source."""
        key = (source.episode_id, source.size)
        self._listeners[key].remove(changed)
        if not self._listeners[key]:
            self._tasks.pop(key).cancel()
            del self._sources[key], self._listeners[key]

    async def aclose(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._executor.shutdown(wait=True, cancel_futures=True)

    async def _follow(self, source: PictureSource) -> None:
        while True:
            frames = self._episodes.watch_screen(source.episode_id, max_rate_hz=source.size.max_rate_hz)
            try:
                async with aclosing(frames):
                    async for frame in frames:
                        source.picture, source.problem = await self._picture(frame, source), ""
                        self._notify(source)
            except EnvdError as error:
                source.problem = str(error)
                self._notify(source)
                if not isinstance(error, GuestError | GuestUnresponsive):
                    return
            else:
                return  # the episode was closed
            await asyncio.sleep(_RETRY_S)

    async def _picture(self, frame: Frame, source: PictureSource) -> PagePicture:
        known = source.picture
        if known is not None and known.frame_id == frame.frame_id:
            jpeg_base64 = known.jpeg_base64
        else:
            loop = asyncio.get_running_loop()
            jpeg_base64 = await loop.run_in_executor(self._executor, encode, frame, source.size)
        at = None if frame.pointer is None else (frame.pointer.x_px, frame.pointer.y_px)
        return PagePicture(
            frame_id=frame.frame_id, jpeg_base64=jpeg_base64, screen_px=(frame.width_px, frame.height_px), pointer_px=at
        )

    def _notify(self, source: PictureSource) -> None:
        for changed in self._listeners.get((source.episode_id, source.size), ()):
            changed()


def encode(frame: Frame, size: PictureSize) -> str:
    """Return a frame as JPEG in base64, scaled down to the size's width. Takes 2 to 10 ms."""
    image = Image.fromarray(frame.rgb_HWC)
    if image.width > size.max_width_px:
        scaled_px = (size.max_width_px, max(1, round(image.height * size.max_width_px / image.width)))
        image = image.resize(scaled_px, Image.Resampling.BILINEAR, reducing_gap=2.0)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=size.quality, subsampling=0 if size is PictureSize.FULL else 2)
    return base64.b64encode(buffer.getbuffer()).decode("ascii")
