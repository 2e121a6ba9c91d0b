"""Keep a copy of one guest's screen, the shadow, with the times of its changes and how fresh it is.

`rfb.py` has the protocol, `settler.py` decides when a screen has settled. Invariants: the shadow equals the server's
picture at some moment; a change is a pixel that differs, never a mere message; between awaits the shadow is never half
updated.

Blinking, such as a text caret, is a few pixels that alternate between two states without input. A learned blink is
recognized anywhere by its size and its two states: a caret looks the same in the next line. Its pixels stay part of the
picture; only settling does not wait for them.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Never, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from cuaenv.frames import TiledImage
from cuaenv.frames.grid import TILE_PX, bounds_of, column_count, touched_tiles
from cuaenv.region import Region
from envd.base.errors import MachineLost
from envd.desktop.display.change import around, is_within
from envd.desktop.display.frames import Frame
from envd.desktop.display.rfb import CursorShape, KeyboardLeds, PixelRect, Rect, Resize, RfbClient

_RECENT_CHANGES = 256
_MAX_RECTS_PER_CHANGE = 64
#: QEMU tracks changes in strips of 16 pixels.
_STRIP_PX = 16
_MAX_COVERING_UPDATES = 3
#: Pixel rectangles of one update that are applied one by one, about 15 us each. A guest can cause 32,000 on a screen of
#: 1280x800, with a pattern that changes in every second strip of every line.
_MAX_SINGLE_RECTS = 512
#: Pixels that are compared or painted in one iteration of the event loop, about 1 ms.
_PIXELS_PER_ITERATION = 1 << 18
#: Changed tiles that a frame copies in one iteration; a screen of 1280x800 has 260. More are copied in a thread.
_TILES_PER_ITERATION = 400


@dataclass(slots=True, eq=False)
class _ScreenRefresh:
    """One running request to refresh the shadow."""

    strip: Region
    sent_s: float
    sent_time: datetime
    answer: asyncio.Future[float]
    covered_count: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Composed:
    """Many pixel rectangles, or large ones, as the next shadow."""

    bgrx_HW: npt.NDArray[np.uint32]
    region: Region | None
    """Around the pixels that differ from the present shadow; None if none do."""
    pixel_count: int
    """Pixels that were sent; the others are as before."""
    covered: tuple[_ScreenRefresh, ...]
    """Refreshes whose strips were sent together with other pixels."""


class Screen:
    """The shadow of a guest's screen. The owner runs `follow` in a task; other methods may be called concurrently.

    Memory per pixel: 4 bytes for the shadow and 3 for the newest frame, which shares unchanged tiles with earlier
    frames. In addition the latest changes, and at most three screens while an update is read and applied.
    """

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._client: RfbClient | None = None
        self._bgrx_HW: npt.NDArray[np.uint32] = np.zeros((0, 0), dtype=np.uint32)
        self._missing_pixels = 0
        self._complete = asyncio.Event()
        self._frame: Frame | None = None
        self._stale_tiles: set[tuple[int, int]] = set()
        self._copied_tiles: set[tuple[int, int]] = set()
        """Further stale tiles, which a thread copies."""
        self._is_shared = False
        """Whether that thread reads the shadow: the next change is painted on a copy."""
        self._copying = asyncio.Lock()
        self._fresh_time = datetime.now(UTC)
        self.changed = asyncio.Event()
        """Set at the next change of any pixel, or input. Take it before `frame`, and wait on it after."""
        self._blinking = Blinking()
        self.cursor: CursorShape | None = None
        """The pointer's image, or None if the guest draws it into its screen."""
        self.caps_lock = False
        """Whether the guest's Caps Lock light is on."""
        # The latest updates with changed pixels, other than blinking: when each came, on the monotonic clock, and the
        # regions around the pixels that differ, or one around all if there would be more than `_MAX_RECTS_PER_CHANGE`.
        self._changes: deque[tuple[float, list[Region]]] = deque(maxlen=_RECENT_CHANGES)
        self._last_change_s = self._complete_s = monotonic()
        self.change_count = 0
        """Updates with changed pixels so far, other than blinking."""
        self._refreshes: list[_ScreenRefresh] = []
        self._refresh_count = 0

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels; (0, 0) before the first connection."""
        height_px, width_px = self._bgrx_HW.shape
        return width_px, height_px

    def last_change_outside_s(self, ignored: tuple[Region, ...]) -> float:
        """Return the monotonic time of the last change that is not within ignored regions.

        If all known changes are, the time of the oldest of them, or of the connection.
        """
        if not ignored:
            return self._last_change_s
        for time_s, regions in reversed(self._changes):
            if any(not is_within(region, ignored) for region in regions):
                return time_s
        if len(self._changes) == _RECENT_CHANGES:
            oldest_s, _ = self._changes[0]
            return oldest_s
        return self._complete_s

    def moving_since(self, since_s: float, ignored: tuple[Region, ...]) -> list[Region]:
        """Return the regions that changed since a monotonic time, without those within ignored ones."""
        return [
            region
            for time_s, regions in self._changes
            if time_s >= since_s
            for region in regions
            if not is_within(region, ignored)
        ]

    def note_input(self) -> None:
        """Record input to the guest: changes that follow may be its effect, not blinking."""
        self._blinking.interrupted()
        self._notify_changed()

    async def follow(self, client: RfbClient) -> Never:
        """Apply the updates of `client` to the shadow until the connection ends. One call at a time.

        Exactly one incremental request is pending at any time: each update is followed by the next request.
        """
        self._client = client
        if client.size != self.size:
            self._resize(*client.size)
        self._expect_all()
        try:
            client.request(incremental=False)
            while True:
                await client.drain()
                rects = await client.read_update()
                self._apply(client, await self._composed(rects) if _is_large(rects) else rects)
                client.request(incremental=True)
        finally:
            self._client = None
            for refresh in self._refreshes:
                if not refresh.answer.done():
                    refresh.answer.set_exception(MachineLost("the display's connection ended"))

    @property
    def is_complete(self) -> bool:
        """Whether every pixel has been sent since the connection began or the size changed."""
        return self._complete.is_set()

    async def wait_complete(self) -> None:
        """Return once every pixel has been sent since the connection began or the size changed."""
        await self._complete.wait()

    async def refresh(self) -> float:
        """Make the server compare the guest's screen once more, and wait until the result is in the shadow.

        Returns the monotonic time of the request: the shadow is no older, and input written to the same connection
        before this call reached the machine before the comparison.

        QEMU answers a non-incremental request only after its next comparison of the guest's surface, with all changes
        in one update (ui/vnc.c, `vnc_refresh`, `vnc_update_client`). An update already in flight could be mistaken for
        the answer, so each request names its own strip, one line high: an update with only that strip, *unchanged*, is
        the answer. A server sends unchanged pixels unasked only for the whole screen, when the guest changes its mode
        (seen at a reset). If an update has more than the strip, or the strip keeps changing, the third update that
        covers it counts: at most two can have been in flight.
        """
        client = self._client
        if client is None:
            raise MachineLost("the display is not connected")
        refresh = _ScreenRefresh(
            self._next_strip(), self._monotonic(), datetime.now(UTC), asyncio.get_running_loop().create_future()
        )
        self._refreshes.append(refresh)
        try:
            self._send(client, refresh)
            await client.drain()
            return await refresh.answer
        finally:
            self._refreshes.remove(refresh)

    def frame(self) -> Frame:
        """Return the shadow as a frame; only tiles that changed since the last frame are copied.

        Does not wait; see `wait_complete` and `refresh`. Takes 35 ms if all of 2560x1600 pixels have changed.
        """
        stale = self._stale_tiles | self._copied_tiles
        if self._frame is not None and not stale and self._frame.capture_time == self._fresh_time:
            return self._frame
        image = _image_of(self._bgrx_HW, stale, self._frame)
        self._stale_tiles.clear()
        self._copied_tiles = set()
        self._frame = Frame(frame_id=image.image_id, image=image, capture_time=self._fresh_time)
        return self._frame

    async def newest_frame(self) -> Frame:
        """Return `frame`, or after a change of a large screen a frame of now that a thread makes."""
        async with self._copying:
            stale = self._stale_tiles | self._copied_tiles
            is_first = self._frame is None and self._bgrx_HW.size > _TILES_PER_ITERATION * TILE_PX**2
            if len(stale) <= _TILES_PER_ITERATION and not is_first:
                return self.frame()
            before, bgrx_HW, time = self._frame, self._bgrx_HW, self._fresh_time
            self._stale_tiles, self._copied_tiles, self._is_shared = set(), stale, True
            try:
                image = await asyncio.to_thread(_image_of, bgrx_HW, stale, before)
            finally:
                self._is_shared = False
            frame = Frame(frame_id=image.image_id, image=image, capture_time=time)
            if self._copied_tiles is stale:  # no other frame was made, and the size is the same
                self._frame, self._copied_tiles = frame, set()
            return frame

    def _notify_changed(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def _next_strip(self) -> Region:
        width_px, _ = self.size
        index = self._refresh_count % max(1, width_px // _STRIP_PX)
        self._refresh_count += 1
        return Region(x_px=index * _STRIP_PX, y_px=0, width_px=min(_STRIP_PX, width_px), height_px=1)

    def _send(self, client: RfbClient, refresh: _ScreenRefresh) -> None:
        strip = refresh.strip
        client.wake()
        client.request(incremental=False, area=(strip.x_px, strip.y_px, strip.width_px, strip.height_px))

    async def _composed(self, rects: tuple[Rect, ...]) -> tuple[Rect | _Composed, ...]:
        """Return the same update with its pixel rectangles as the next shadow, made in several turns of the loop.

        Lines that may be the answer to a refresh stay as they are. After a resize nothing is composed: QEMU reports a
        new size in an update of its own.
        """
        if any(isinstance(rect, Resize) for rect in rects):
            return rects
        refreshes = tuple(self._refreshes)
        painted = [rect for rect in rects if isinstance(rect, PixelRect)]
        rest: list[Rect | _Composed] = [rect for rect in rects if not isinstance(rect, PixelRect)]
        covered: list[_ScreenRefresh] = []
        pixel_count = iteration_pixels = 0
        is_whole = len(painted) == 1 and painted[0].bgrx_HW.shape == self._bgrx_HW.shape
        bgrx_HW = painted[0].bgrx_HW if is_whole else self._bgrx_HW.copy()
        for index, rect in enumerate(painted):
            if index % _MAX_SINGLE_RECTS == _MAX_SINGLE_RECTS - 1 or iteration_pixels > _PIXELS_PER_ITERATION:
                iteration_pixels = 0
                await asyncio.sleep(0)
            x_px, y_px, (height_px, width_px) = rect.x_px, rect.y_px, rect.bgrx_HW.shape
            iteration_pixels += rect.bgrx_HW.size
            if not is_whole:
                bgrx_HW[y_px : y_px + height_px, x_px : x_px + width_px] = rect.bgrx_HW
            inside = [refresh for refresh in refreshes if _contains(rect, refresh.strip)]
            if inside and height_px == 1:
                rest.append(rect)
                continue
            covered += inside
            pixel_count += rect.bgrx_HW.size
        if pixel_count:
            region = await _difference_in_turns(self._bgrx_HW, bgrx_HW)
            rest.append(_Composed(bgrx_HW, region, pixel_count, tuple(covered)))
        return tuple(rest)

    def _apply(self, client: RfbClient, rects: tuple[Rect | _Composed, ...]) -> None:
        is_new = False
        changed: list[Region] = []
        covered: dict[_ScreenRefresh, bool] = {}
        for rect in rects:
            match rect:
                case PixelRect():
                    for refresh in self._refreshes:
                        if _contains(rect, refresh.strip):
                            covered[refresh] = self._answers(rect, refresh.strip)
                    was_complete = not self._missing_pixels
                    self._count_sent(rect.bgrx_HW.size)
                    if region := self._difference(rect):
                        is_new = True
                        # There is nothing to compare with until every pixel was sent.
                        if was_complete and not self._is_blink(region, rect):
                            changed.append(region)
                        self._paint(rect, region)
                case _Composed(bgrx_HW, composed_region, pixel_count, refreshes):
                    covered.update((refresh, False) for refresh in refreshes if refresh in self._refreshes)
                    was_complete = not self._missing_pixels
                    self._count_sent(pixel_count)
                    if composed_region is not None:
                        is_new = True
                        if was_complete and not self._is_blink(composed_region, PixelRect(0, 0, bgrx_HW)):
                            changed.append(composed_region)
                        self._bgrx_HW, self._is_shared = bgrx_HW, False
                        self._stale_tiles.update(touched_tiles(composed_region))
                case Resize(width_px, height_px):
                    if (width_px, height_px) != self.size:
                        self._resize(width_px, height_px)
                        is_new = True
                        changed = [Region(x_px=0, y_px=0, width_px=width_px, height_px=height_px)]
                        covered.clear()
                        client.request(incremental=False)
                        for refresh in self._refreshes:
                            refresh.strip = self._next_strip()
                            self._send(client, refresh)
                case CursorShape():
                    self.cursor = rect
                case KeyboardLeds():
                    self.caps_lock = rect.caps_lock
        now_s = self._monotonic()
        if changed:
            if len(changed) > _MAX_RECTS_PER_CHANGE:
                changed = [around(changed)]
            self.change_count += 1
            self._last_change_s = now_s
            self._changes.append((now_s, changed))
        if is_new:
            self._fresh_time = max(self._fresh_time, datetime.now(UTC))
            self._notify_changed()
        for refresh, is_answer in covered.items():
            refresh.covered_count += 1
            if is_answer or refresh.covered_count >= _MAX_COVERING_UPDATES:
                if not refresh.answer.done():
                    refresh.answer.set_result(refresh.sent_s)
                    self._fresh_time = max(self._fresh_time, refresh.sent_time)
            else:
                self._send(client, refresh)

    def _resize(self, width_px: int, height_px: int) -> None:
        self._bgrx_HW = np.zeros((height_px, width_px), dtype=np.uint32)
        self._frame = None
        self._is_shared = False
        self._stale_tiles.clear()
        self._copied_tiles = set()
        self._expect_all()

    def _expect_all(self) -> None:
        self._missing_pixels = self._bgrx_HW.size
        self._complete.clear()

    def _answers(self, rect: PixelRect, strip: Region) -> bool:
        """Return whether a rectangle is the answer to a request for `strip`: that line alone, unchanged."""
        row = self._bgrx_HW[rect.y_px, rect.x_px : rect.x_px + rect.width_px]
        first = strip.x_px - rect.x_px
        part = slice(first, first + strip.width_px)
        return rect.height_px == strip.height_px and np.array_equal(rect.bgrx_HW[0, part], row[part])

    def _count_sent(self, pixel_count: int) -> None:
        if self._missing_pixels:
            self._missing_pixels = max(0, self._missing_pixels - pixel_count)
            if not self._missing_pixels:
                self._complete.set()
                self._last_change_s = self._complete_s = self._monotonic()  # earlier changes may have been missed

    def _difference(self, rect: PixelRect) -> Region | None:
        """Return the bounds of a rectangle's differing pixels, or None."""
        target = self._bgrx_HW[rect.y_px : rect.y_px + rect.height_px, rect.x_px : rect.x_px + rect.width_px]
        box = bounds_of(target != rect.bgrx_HW)
        if box is None:
            return None
        top, bottom, left, right = box
        return Region(x_px=rect.x_px + left, y_px=rect.y_px + top, width_px=right - left, height_px=bottom - top)

    def _is_blink(self, region: Region, rect: PixelRect) -> bool:
        top, left = region.y_px - rect.y_px, region.x_px - rect.x_px
        before_HW = self._bgrx_HW[
            region.y_px : region.y_px + region.height_px, region.x_px : region.x_px + region.width_px
        ]
        after_HW = rect.bgrx_HW[top : top + region.height_px, left : left + region.width_px]
        return self._blinking.note(region, before_HW, after_HW)

    def _paint(self, rect: PixelRect, region: Region) -> None:
        if self._is_shared:
            self._bgrx_HW, self._is_shared = self._bgrx_HW.copy(), False
        target = self._bgrx_HW[rect.y_px : rect.y_px + rect.height_px, rect.x_px : rect.x_px + rect.width_px]
        target[...] = rect.bgrx_HW
        self._stale_tiles.update(touched_tiles(region))


def _is_large(rects: tuple[Rect, ...]) -> bool:
    pixel_count = sum(rect.bgrx_HW.size for rect in rects if isinstance(rect, PixelRect))
    return len(rects) > _MAX_SINGLE_RECTS or pixel_count > _PIXELS_PER_ITERATION


async def _difference_in_turns(before_HW: npt.NDArray[np.uint32], after_HW: npt.NDArray[np.uint32]) -> Region | None:
    """Return the bounds of the pixels that differ; None if none do."""
    height_px, width_px = before_HW.shape
    row_count = max(1, _PIXELS_PER_ITERATION // width_px)
    found: list[Region] = []
    for y_px in range(0, height_px, row_count):
        await asyncio.sleep(0)
        if box := bounds_of(before_HW[y_px : y_px + row_count] != after_HW[y_px : y_px + row_count]):
            top, bottom, left, right = box
            found.append(Region(x_px=left, y_px=y_px + top, width_px=right - left, height_px=bottom - top))
    return around(found) if found else None


def _image_of(bgrx_HW: npt.NDArray[np.uint32], stale: Collection[tuple[int, int]], frame: Frame | None) -> TiledImage:
    """Return a shadow as an image that shares all but the stale tiles with those of `frame`, of the same size."""
    if frame is None or len(stale) * 2 > frame.image.tile_count:
        return TiledImage.from_rgb(_rgb_of(bgrx_HW))
    before = frame.image
    if not stale:
        return before
    columns = column_count(before.width_px)
    tiles: dict[int, bytes] = {}
    for row, column in stale:
        index = row * columns + column
        part = before.tile_region(index)
        tile_HW = bgrx_HW[part.y_px : part.y_px + part.height_px, part.x_px : part.x_px + part.width_px]
        tiles[index] = _rgb_of(tile_HW).tobytes()
    return before.with_tiles(tiles)


def _rgb_of(bgrx_HW: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    bgrx_HWC = bgrx_HW.view(np.uint8).reshape(*bgrx_HW.shape, 4)
    rgb_HWC = np.empty((*bgrx_HW.shape, 3), dtype=np.uint8)
    for channel in range(3):  # by channel: a fifth of the time of one reversed slice
        rgb_HWC[..., channel] = bgrx_HWC[..., 2 - channel]
    return rgb_HWC


def _contains(rect: PixelRect, part: Region) -> bool:
    return (
        rect.x_px <= part.x_px
        and rect.y_px <= part.y_px
        and rect.x_px + rect.width_px >= part.x_px + part.width_px
        and rect.y_px + rect.height_px >= part.y_px + part.height_px
    )


#: Larger changes are content.
MAX_BLINK_PIXELS = 1024
#: Alternations of one region: 3 are a caret that disappeared, appeared and disappeared.
_LEARNED_AFTER = 3
_MAX_KNOWN = 64

K = TypeVar("K")
V = TypeVar("V")
BlinkStates = tuple[int, int, frozenset[bytes]]


class Blinking:
    """The known blinks of one screen, at most 64."""

    def __init__(self) -> None:
        self._candidates: OrderedDict[Region, tuple[bytes, bytes, int]] = OrderedDict()
        """Regions that changed: both states, and how often each has alternated between them."""
        self._known: OrderedDict[BlinkStates, None] = OrderedDict()

    def note(self, region: Region, before_HW: npt.NDArray[np.uint32], after_HW: npt.NDArray[np.uint32]) -> bool:
        """Record that a region changed from one picture to another; return whether that is a known blink."""
        if region.width_px * region.height_px > MAX_BLINK_PIXELS:
            return False
        before, after = _digest(before_HW), _digest(after_HW)
        states = (region.width_px, region.height_px, frozenset((before, after)))
        if states in self._known:
            self._known.move_to_end(states)
            return True
        *last_states, count = self._candidates.pop(region, (b"", b"", 0))
        count = count + 1 if last_states == [after, before] else 1
        if count < _LEARNED_AFTER:
            _keep(self._candidates, region, (before, after, count))
            return False
        _keep(self._known, states, None)
        return True

    def interrupted(self) -> None:
        """Discard candidates after input: the next changes may be its effect."""
        self._candidates.clear()


def _digest(pixels_HW: npt.NDArray[np.uint32]) -> bytes:
    return xxhash.xxh3_128_digest(np.ascontiguousarray(pixels_HW).data)


def _keep(known: OrderedDict[K, V], key: K, value: V) -> None:
    known[key] = value
    if len(known) > _MAX_KNOWN:
        known.popitem(last=False)
