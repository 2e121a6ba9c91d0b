"""The fake's RFB server, byte by byte, on an in-memory transport."""

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from envd.drawn.desktop.canvas import Framebuffer, Rect
from envd.drawn.wires.rfb import RfbConnection
from tests.support.faulty import FaultyDisplay
from tests.support.hostile import DisplayAttack, display_update

RAW = 0
DESKTOP_SIZE = -223
CURSOR = -239
POINTER_TYPE_CHANGE = -257
EXTENDED_KEY = -258


class Transport(asyncio.Transport):
    """Buffers written data until it is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def take(self) -> bytes:
        data, self.written = bytes(self.written), bytearray()
        return data


class Picture:
    """A screen that records its input."""

    def __init__(self, *, width_px: int = 8, height_px: int = 4) -> None:
        pixels = np.arange(width_px * height_px * 4, dtype=np.uint8).reshape(height_px, width_px, 4)
        self.framebuffer = Framebuffer(pixels, shared=False)
        self.input: list[tuple[object, ...]] = []

    def key_input(self, scancode: int, *, down: bool) -> None:
        self.input.append(("scancode", scancode, down))

    def keysym_input(self, keysym: int, *, down: bool) -> None:
        self.input.append(("keysym", keysym, down))

    def pointer_input(self, x: int, y: int, buttons: int) -> None:
        self.input.append(("pointer", x, y, buttons))

    def display_closed(self, connection: RfbConnection) -> None:
        self.input.append(("closed",))


class Refresh(asyncio.TimerHandle):
    """A scheduled refresh of the screen."""

    def __init__(self, refresh: Callable[[], None]) -> None:
        self.refresh = refresh
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Viewer:
    """A client after the handshake."""

    def __init__(self, *encodings: int) -> None:
        self.screen = Picture()
        self.transport = Transport()
        self.refreshes: list[Refresh] = []
        self.server = FaultyDisplay(self.screen, name="fake", call_later=self._call_later)
        self.server.connection_made(self.transport)
        self.greeting = b""
        for message in (b"RFB 003.008\n", b"\x01", b"\x01"):
            self.server.data_received(message)
        self.greeting = self.transport.take()
        self.send(struct.pack(f">BxH{len(encodings)}i", 2, len(encodings), *encodings))

    def _call_later(self, delay_s: float, refresh: Callable[[], None]) -> Refresh:
        assert 0 < delay_s < 0.1
        self.refreshes.append(Refresh(refresh))
        return self.refreshes[-1]

    def time_passes(self) -> None:
        """Run the scheduled refreshes."""
        refreshes, self.refreshes = self.refreshes, []
        for due in refreshes:
            if not due.is_cancelled:
                due.refresh()

    def send(self, data: bytes) -> None:
        self.server.data_received(data)

    def request(self, *, incremental: bool, area: tuple[int, int, int, int] = (0, 0, 8, 4)) -> None:
        self.send(struct.pack(">BBHHHH", 3, incremental, *area))

    def rects(self) -> list[tuple[int, int, int, int, int]]:
        """Take sent rectangles (x, y, width, height, encoding)."""
        data = self.transport.take()
        found = []
        at = 0
        while at < len(data):
            kind, count = struct.unpack_from(">BxH", data, at)
            assert kind == 0
            at += 4
            for _ in range(count):
                x, y, w, h, encoding = struct.unpack_from(">HHHHi", data, at)
                at += 12 + {RAW: w * h * 4, CURSOR: w * h * 4 + (w + 7) // 8 * h}.get(encoding, 0)
                found.append((x, y, w, h, encoding))
        return found


@pytest.fixture
def viewer() -> Viewer:
    return Viewer(RAW)


def test_the_handshake_offers_no_authentication_and_sends_the_size() -> None:
    greeting = Viewer().greeting
    assert greeting[:12] == b"RFB 003.008\n"
    assert greeting[12:18] == b"\x01\x01" + bytes(4)
    assert struct.unpack(">HH", greeting[18:22]) == (8, 4)
    assert greeting[22:24] == bytes([32, 24])
    assert greeting[-4:] == b"fake"


@pytest.mark.parametrize(
    ("attack", "count", "first"), [("size", 1, (0, 0, 4096, 4096, DESKTOP_SIZE)), ("flood", 65_535, (0, 0, 1, 1, RAW))]
)
def test_a_hostile_display_answers_until_the_attack_ends(
    attack: DisplayAttack, count: int, first: tuple[int, ...]
) -> None:
    viewer = Viewer(DESKTOP_SIZE)
    viewer.server.answer_with(display_update(attack))
    for _ in range(2):
        viewer.request(incremental=True)
        viewer.time_passes()
        rects = viewer.rects()
        assert (len(rects), rects[0]) == (count, first)
    viewer.server.answer_with(b"")
    viewer.request(incremental=True)
    viewer.time_passes()
    assert viewer.rects() == [(0, 0, 8, 4, RAW)]


def test_messages_may_arrive_in_pieces_and_keys_without_scancodes() -> None:
    viewer = Viewer()
    message = struct.pack(">BBHH", 5, 1, 3, 2) + struct.pack(">BBHII", 255, 0, 1, 0x61, 30)
    for byte in message:
        viewer.send(bytes([byte]))
    assert viewer.screen.input == [("pointer", 3, 2, 1), ("scancode", 30, True)]
    viewer = Viewer()
    viewer.send(struct.pack(">BBxxI", 4, 1, 0x61))
    assert viewer.screen.input == [("keysym", 0x61, True)]


def test_acknowledgements_are_sent_unrequested() -> None:
    viewer = Viewer(RAW, EXTENDED_KEY, POINTER_TYPE_CHANGE, CURSOR)
    rects = viewer.rects()
    assert [rect[4] for rect in rects] == [EXTENDED_KEY, POINTER_TYPE_CHANGE, CURSOR]
    assert rects[1][0] == 1, "the pointer is absolute"


def test_only_changed_pixels_are_sent_and_only_on_request(viewer: Viewer) -> None:
    assert viewer.rects() == []
    viewer.request(incremental=False)
    assert viewer.rects() == [(0, 0, 8, 4, RAW)]
    viewer.request(incremental=True)
    assert viewer.rects() == []
    viewer.server.changed([Rect(1, 1, 2, 1)])
    viewer.time_passes()
    assert viewer.rects() == [(1, 1, 2, 1, RAW)]
    viewer.server.changed([Rect(3, 3, 1, 1)])
    viewer.time_passes()
    assert viewer.rects() == []
    viewer.request(incremental=True)
    viewer.time_passes()
    assert viewer.rects() == [(3, 3, 1, 1, RAW)]


def test_changes_in_quick_succession_are_one_update(viewer: Viewer) -> None:
    viewer.request(incremental=False)
    viewer.request(incremental=True)
    viewer.rects()
    for rect in (Rect(1, 1, 2, 1), Rect(3, 3, 1, 1), Rect(1, 1, 2, 1)):
        viewer.server.changed([rect])
    assert viewer.rects() == []
    assert len(viewer.refreshes) == 1
    viewer.time_passes()
    assert viewer.rects() == [(1, 1, 2, 1, RAW), (3, 3, 1, 1, RAW)]


def test_a_non_incremental_request_is_answered_at_once_with_all_changes(viewer: Viewer) -> None:
    viewer.request(incremental=False)
    viewer.request(incremental=True)
    viewer.rects()
    viewer.server.changed([Rect(1, 1, 2, 1)])
    viewer.request(incremental=False, area=(0, 0, 4, 1))
    assert viewer.rects() == [(1, 1, 2, 1, RAW), (0, 0, 4, 1, RAW)]
    assert viewer.refreshes[0].is_cancelled


def test_a_closed_connection_schedules_no_refresh(viewer: Viewer) -> None:
    viewer.server.changed([Rect(1, 1, 2, 1)])
    viewer.server.connection_lost(None)
    assert viewer.refreshes[0].is_cancelled


def test_a_slow_reader_costs_no_memory_and_gets_the_newest_pixels(viewer: Viewer) -> None:
    viewer.request(incremental=False)
    viewer.transport.take()
    viewer.server.pause_writing()
    for value in range(200):
        viewer.screen.framebuffer.pixels[:] = value
        viewer.server.changed([Rect(value % 8, value % 4, 1, 1)])
        viewer.request(incremental=True)
    assert viewer.transport.take() == b""
    viewer.server.resume_writing()
    data = viewer.transport.take()
    assert 0 < len(data) <= 4 + 8 * 12 + 8 * 4 * 4
    assert data[-4:] == bytes([199]) * 4


def test_a_resize_is_sent_first_and_then_all_pixels() -> None:
    viewer = Viewer(RAW, DESKTOP_SIZE)
    viewer.request(incremental=False)
    viewer.rects()
    viewer.request(incremental=True)
    viewer.screen.framebuffer = Framebuffer(np.zeros((6, 5, 4), np.uint8), shared=False)
    viewer.server.resized()
    assert viewer.rects() == [(0, 0, 5, 6, DESKTOP_SIZE), (0, 0, 5, 6, RAW)]


def test_a_viewer_without_resize_support_is_disconnected(viewer: Viewer) -> None:
    viewer.screen.framebuffer = Framebuffer(np.zeros((6, 5, 4), np.uint8), shared=False)
    viewer.server.resized()
    assert viewer.transport.is_closed


def test_another_pixel_format_or_an_invalid_message_ends_the_connection(viewer: Viewer) -> None:
    viewer.send(struct.pack(">Bxxx", 0) + struct.pack(">BBBBHHHBBBxxx", 16, 16, 1, 1, 31, 63, 31, 11, 5, 0))
    assert viewer.transport.is_closed
    for message in (b"\x63", struct.pack(">BxxxI", 6, 1 << 30), b"\xff\x09"):
        viewer = Viewer()
        viewer.send(message)
        assert viewer.transport.is_closed, message
