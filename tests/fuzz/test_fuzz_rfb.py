"""Arbitrary data of a display: an `EnvdError`, in bounded time and memory. The guest controls it through QEMU."""

import asyncio
import struct
import tracemalloc

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from envd.base.errors import EnvdError
from envd.desktop.display.rfb import MAX_CURSOR_SIDE_PX, CursorShape, PixelRect, Rect, RectEncoding, Resize, RfbClient
from tests.support.display import memory_streams
from tests.support.fuzz import fuzzed, inputs, mutated, with_corpus

WIDTH_PX, HEIGHT_PX = 48, 32
GREETING = b"RFB 003.008\n" + b"\x01\x01" + bytes(4) + struct.pack(">HH16xI", WIDTH_PX, HEIGHT_PX, 4) + b"QEMU"

u16 = st.integers(0, 65535)
small = st.integers(0, 64) | u16
#: Bytes of a rectangle's content: none, some, or as many as a small one wants.
contents = st.binary(max_size=64) | st.integers(0, 4096).map(bytes)


def _rect(x_px: int, y_px: int, width_px: int, height_px: int, *, encoding: int, content: bytes) -> bytes:
    return struct.pack(">HHHHi", x_px, y_px, width_px, height_px, encoding) + content


def _whole_rect(width_px: int, height_px: int, encoding: int) -> bytes:
    """A rectangle whose content has exactly its declared size."""
    pixel_bytes = width_px * height_px * 4
    content = {
        RectEncoding.RAW: bytes(pixel_bytes),
        RectEncoding.CURSOR: bytes(pixel_bytes + (width_px + 7) // 8 * height_px),
        RectEncoding.ALPHA_CURSOR: bytes(4 + pixel_bytes),
        RectEncoding.EXTENDED_DESKTOP_SIZE: b"\x01" + bytes(19),
        RectEncoding.LED_STATE: b"\x07",
    }.get(RectEncoding(encoding), b"")
    return _rect(0, 0, width_px, height_px, encoding=encoding, content=content)


encodings = st.sampled_from([int(encoding) for encoding in RectEncoding])
rects = st.builds(
    _rect, small, small, small, small, encoding=encodings | st.integers(-400, 400), content=contents
) | st.builds(_whole_rect, st.integers(0, 40), st.integers(0, 30), encodings)
updates = st.builds(
    lambda count, parts: struct.pack(">BxH", 0, len(parts) if count is None else count) + b"".join(parts),
    st.none() | u16,
    st.lists(rects, max_size=6),
)
others = st.one_of(
    st.builds(lambda count, body: struct.pack(">BxxxH", 1, count) + body, small, contents),
    st.just(b"\x02"),
    st.builds(
        lambda length, body: struct.pack(">BxxxI", 3, length) + body,
        st.integers(0, 80) | st.integers(0, 2**32 - 1),
        contents,
    ),
    st.binary(max_size=8),
)
streams = st.lists(updates | others, max_size=8).map(b"".join)


async def parsed(data: bytes) -> list[Rect]:
    """Return the rectangles parsed from a server that sends `data` and disconnects."""
    (reader, writer), (_, server) = memory_streams()
    server.write(data)
    server.close()
    seen: list[Rect] = []
    try:
        client = await RfbClient.connect(reader, writer)
        while True:
            seen += await client.read_update()
    except EnvdError:
        return seen


def within_bounds(data: bytes) -> list[Rect]:
    """Parse like `parsed`; fails above fixed limits of time and memory, whatever sizes `data` declares."""
    tracemalloc.start()
    try:
        seen = asyncio.run(asyncio.wait_for(parsed(data), 60))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < (4 << 20) + 16 * len(data)
    assert len(seen) <= len(data) // 12, "a rectangle has a header of 12 bytes"
    return seen


def check(seen: list[Rect]) -> None:
    """Check what users of a rectangle rely on."""
    width_px, height_px = WIDTH_PX, HEIGHT_PX
    for rect in seen:
        match rect:
            case Resize():
                width_px, height_px = rect.width_px, rect.height_px
                assert min(width_px, height_px) >= 1
            case PixelRect():
                assert rect.x_px + rect.width_px <= width_px
                assert rect.y_px + rect.height_px <= height_px
                assert not (rect.bgrx_HW >> np.uint32(24)).any()
            case CursorShape():
                assert rect.rgba_HWC.dtype == np.uint8
                assert rect.rgba_HWC.shape[2] == 4
                assert max(rect.rgba_HWC.shape[:2]) <= MAX_CURSOR_SIDE_PX


@fuzzed(80)
@given(mutated(streams))
@example(struct.pack(">BxH", 0, 65535) + _rect(0, 0, 0, 0, encoding=RectEncoding.RAW, content=b"") * 5000)
@example(struct.pack(">BxH", 0, 65) + _whole_rect(8192, 2048, RectEncoding.DESKTOP_SIZE) * 65)
@example(struct.pack(">BxH", 0, 1) + _rect(0, 0, 65535, 65535, encoding=RectEncoding.RAW, content=b""))
@example(struct.pack(">BxH", 0, 1) + _rect(0, 0, 512, 512, encoding=RectEncoding.ALPHA_CURSOR, content=b""))
@example(b"\x02" * 10_000)
def test_arbitrary_data_after_the_handshake_is_handled(data: bytes) -> None:
    check(within_bounds(GREETING + data))


@fuzzed(120)
@with_corpus("rfb")
@given(mutated(st.just(GREETING)) | inputs("rfb"))
@example(b"RFB 003.008\n\x00" + struct.pack(">I", 2**32 - 1) + b"\xff" * 5000)
@example(GREETING[:-4] + b"")
@example(GREETING[:-8] + struct.pack(">I", 2**32 - 1))
def test_an_arbitrary_handshake_is_handled(data: bytes) -> None:
    check(within_bounds(data))
