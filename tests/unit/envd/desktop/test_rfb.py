"""The RFB client: what it sends, parses and rejects."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator

import pytest
import uvloop

from envd.base.errors import GuestError, MachineLost
from envd.desktop.display.rfb import CursorShape, KeyboardLeds, PixelRect, Resize, RfbClient
from tests.support.display import FakeDisplay, SeenKey, SeenRequest, memory_streams, pseudo_rect

GREETING = b"RFB 003.008\n" + b"\x01\x01" + bytes(4) + struct.pack(">HH16xI", 32, 16, 0)


@pytest.fixture
async def display() -> AsyncIterator[FakeDisplay]:
    display = FakeDisplay()
    yield display
    await display.close()


@pytest.fixture
async def client(display: FakeDisplay) -> RfbClient:
    return await RfbClient.connect(*await display.connect())


async def connected(data: bytes, *, greeting: bytes = GREETING) -> RfbClient:
    """Return a client whose server sends `greeting` and `data` and disconnects."""
    (reader, writer), (_, server) = memory_streams()
    server.write(greeting + data)
    server.close()
    return await RfbClient.connect(reader, writer)


def update(*rects: bytes) -> bytes:
    return struct.pack(">BxH", 0, len(rects)) + b"".join(rects)


async def test_a_handshake_returns_the_size_and_requests_raw_pixels_with_extended_keys(
    display: FakeDisplay, client: RfbClient
) -> None:
    await client.read_update()
    assert client.size == (64, 48)
    assert display.encodings[0] == 0
    assert {-223, -258, -257} <= set(display.encodings)
    assert display.encodings.index(-314) < display.encodings.index(-239)


@pytest.mark.parametrize(
    ("greeting", "message"),
    [
        (b"SSH-2.0-OpenSSH\n", "only RFB 3.8"),
        (b"RFB 003.003\n", "only RFB 3.8"),
        (b"RFB 003.008\n\x00" + struct.pack(">I", 4) + b"busy", "busy"),
        (b"RFB 003.008\n\x01\x02", "requires authentication"),
        (b"RFB 003.008\n\x01\x01" + struct.pack(">II", 1, 3) + b"no!", "no!"),
        (b"RFB 003.008\n\x01\x01" + bytes(4) + struct.pack(">HH16xI", 60000, 60000, 0), "60000x60000"),
        (b"RFB 003.008\n\x01\x01" + bytes(4) + struct.pack(">HH16xI", 0, 16, 0), "0x16"),
        (b"RFB 003.008\n\x01\x01" + bytes(4) + struct.pack(">HH16xI", 32, 16, 1 << 31), "2147483648"),
    ],
)
async def test_a_handshake_rejects_an_unusable_server(greeting: bytes, message: str) -> None:
    with pytest.raises(GuestError, match=message):
        await connected(b"", greeting=greeting)


LIMIT_PX = (2560, 1600)


@pytest.mark.parametrize("size_px", [(2561, 16), (16, 1601), (4096, 4096)])
async def test_a_screen_above_the_limit_is_rejected_at_connection_and_on_resize(size_px: tuple[int, int]) -> None:
    greeting = GREETING[:-24] + struct.pack(">HH16xI", *size_px, 0)
    (reader, writer), (_, server) = memory_streams()
    server.write(greeting)
    with pytest.raises(GuestError, match="at most 2560x1600"):
        await RfbClient.connect(reader, writer, size_limit_px=LIMIT_PX)
    (reader, writer), (_, server) = memory_streams()
    server.write(GREETING + update(pseudo_rect(-223, 0, 0, *size_px)))
    client = await RfbClient.connect(reader, writer, size_limit_px=LIMIT_PX)
    with pytest.raises(GuestError, match="at most 2560x1600"):
        await client.read_update()


async def test_the_screen_of_a_boot_loader_is_accepted_whatever_the_limit() -> None:
    (reader, writer), (_, server) = memory_streams()
    server.write(GREETING[:-24] + struct.pack(">HH16xI", 1280, 1024, 0))
    client = await RfbClient.connect(reader, writer, size_limit_px=(640, 400))
    assert client.size == (1280, 1024)


@pytest.mark.parametrize("length", range(len(GREETING)))
async def test_a_connection_that_ends_in_the_handshake_is_a_lost_machine(length: int) -> None:
    with pytest.raises(MachineLost):
        await connected(b"", greeting=GREETING[:length])


async def test_the_fourth_byte_of_pixels_is_masked() -> None:
    rect = struct.pack(">HHHHi", 30, 2, 2, 1, 0) + struct.pack("<II", 0xFF112233, 0x01445566)
    (pixels,) = await (await connected(update(rect))).read_update()
    assert isinstance(pixels, PixelRect)
    assert (pixels.x_px, pixels.y_px, pixels.width_px, pixels.height_px) == (30, 2, 2, 1)
    assert pixels.bgrx_HW.tolist() == [[0x112233, 0x445566]]


async def test_a_resize_changes_the_bounds_of_later_rectangles() -> None:
    client = await connected(update(pseudo_rect(-223, 0, 0, 40, 20), pseudo_rect(0, 39, 19, 1, 1, bytes(4))))
    resize, pixels = await client.read_update()
    assert resize == Resize(40, 20)
    assert isinstance(pixels, PixelRect)
    assert client.size == (40, 20)
    extended = update(pseudo_rect(-308, 0, 0, 40, 20, b"\x01\0\0\0" + bytes(16)))
    assert await (await connected(extended)).read_update() == (Resize(40, 20),)


async def test_pointer_mode_and_keyboard_lights_are_parsed() -> None:
    client = await connected(update(pseudo_rect(-257, 0, 0, 32, 16), pseudo_rect(-261, 0, 0, 1, 1, b"\x04")))
    assert client.absolute_pointer
    assert await client.read_update() == (KeyboardLeds(caps_lock=True),)
    assert not client.absolute_pointer


TIGERVNC = GREETING[:-4] + struct.pack(">I", 8) + b"TigerVNC"
ALPHA = [[[0x11, 0x22, 0x33, 0x80]]]


@pytest.mark.parametrize(
    ("greeting", "rect", "hot", "rgba"),
    [
        (
            GREETING,
            pseudo_rect(-239, 1, 0, 2, 1, struct.pack("<II", 0x112233, 0x445566) + b"\x80"),
            (1, 0),
            [[[0x11, 0x22, 0x33, 255], [0, 0, 0, 0]]],
        ),
        (GREETING, pseudo_rect(-314, 0, 0, 1, 1, bytes(4) + b"\x33\x22\x11\x80"), (0, 0), ALPHA),
        (TIGERVNC, pseudo_rect(-314, 0, 0, 1, 1, bytes(4) + b"\x11\x22\x33\x80"), (0, 0), ALPHA),
        (GREETING, pseudo_rect(-239, 0, 0, 0, 0), (0, 0), []),
    ],
    ids=["mask", "alpha of QEMU", "alpha of TigerVNC, in the protocol's order", "empty"],
)
async def test_a_cursor_becomes_rgba(greeting: bytes, rect: bytes, hot: tuple[int, int], rgba: list[object]) -> None:
    (cursor,) = await (await connected(update(rect), greeting=greeting)).read_update()
    assert isinstance(cursor, CursorShape)
    assert (cursor.hot_x_px, cursor.hot_y_px) == hot
    assert cursor.rgba_HWC.tolist() == rgba


async def test_a_pointer_that_a_program_moved_is_taken_over_and_the_screen_requested_again() -> None:
    (reader, writer), (from_client, server) = memory_streams()
    drawn = pseudo_rect(0, 0, 0, 1, 1, b"\1\1\1\0")
    clean = pseudo_rect(0, 0, 0, 1, 1, b"\2\2\2\0")
    position = pseudo_rect(0x574D5666, 20, 10, 0, 0)
    server.write(TIGERVNC + update(pseudo_rect(-261, 0, 0, 1, 1, b"\x04"), drawn, position) + update(clean))
    client = await RfbClient.connect(reader, writer)
    assert client.draws_pointer
    lights, pixels = await client.read_update()
    assert lights == KeyboardLeds(caps_lock=True)
    assert isinstance(pixels, PixelRect)
    assert pixels.bgrx_HW.tolist() == [[0x020202]], "the pixels with the pointer in them are dropped"
    await client.drain()
    sent = await from_client.read(1 << 16)
    assert sent.endswith(struct.pack(">BBHH", 5, 0, 20, 10) + struct.pack(">BBHHHH", 3, 0, 0, 0, 32, 16))


async def test_a_pointer_that_is_where_it_was_put_causes_no_request() -> None:
    client = await connected(update(pseudo_rect(0x574D5666, 20, 10, 0, 0)), greeting=TIGERVNC)
    client.pointer(20, 10, buttons=0)
    assert await client.read_update() == ()


async def test_bells_colour_maps_and_clipboards_are_skipped() -> None:
    noise = b"\x02" + struct.pack(">BxHH", 1, 0, 2) + bytes(12) + struct.pack(">BxxxI", 3, 5) + b"hello"
    assert await (await connected(noise + update())).read_update() == ()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x09", "unknown message of type 9"),
        (struct.pack(">BxxxI", 3, 0xFFFFFFFF), "clipboard"),
        (update(pseudo_rect(0, 31, 0, 2, 1)), "outside"),
        (update(pseudo_rect(0, 0, 0, 32, 65535)), "two screens"),
        (update(*[pseudo_rect(0, 0, 0, 32, 16, bytes(2048))] * 3), "two screens"),
        (update(pseudo_rect(16, 0, 0, 1, 1)), "type 16"),
        (update(pseudo_rect(-239, 0, 0, 4096, 4096)), "4096x4096"),
        (update(pseudo_rect(-223, 0, 0, 9000, 1)), "9000x1"),
        (update(*[pseudo_rect(-257, 1, 0, 1, 1)] * 100), "pseudo"),
        (update(pseudo_rect(-314, 0, 0, 1, 1, b"\0\0\0\1")), "encoding 1"),
    ],
)
async def test_a_broken_protocol_is_a_guest_error(data: bytes, message: str) -> None:
    client = await connected(data)
    with pytest.raises(GuestError, match=message):
        await client.read_update()


async def test_the_end_of_the_stream_is_a_lost_machine() -> None:
    client = await connected(update(pseudo_rect(0, 0, 0, 32, 16, bytes(100))))
    with pytest.raises(MachineLost):
        await client.read_update()


async def test_keys_are_sent_with_scancodes_only_after_the_server_offers_that(
    display: FakeDisplay, client: RfbClient
) -> None:
    client.key(keysym=0x61, scancode=0x1E, down=True)
    await client.read_update()
    client.key(keysym=0x61, scancode=0x1E, down=True)
    await client.drain()
    await asyncio.sleep(0)
    assert display.keys == [SeenKey(0, 0x61, True), SeenKey(0x1E, 0x61, True)]


async def test_requests_and_pointer_events_are_encoded_by_the_protocol(display: FakeDisplay, client: RfbClient) -> None:
    await client.read_update()
    client.request(incremental=True)
    client.request(incremental=False, area=(16, 0, 16, 1))
    client.pointer(3, 4, buttons=5)
    client.wake()
    (pixels,) = await client.read_update()
    assert display.requests == [SeenRequest(True, (0, 0, 64, 48)), SeenRequest(False, (16, 0, 16, 1))]
    assert [(p.x_px, p.y_px, p.buttons) for p in display.pointers] == [(3, 4, 5)]
    assert display.wake_count == 1
    assert isinstance(pixels, PixelRect)


async def test_positions_are_sent_so_that_qemus_scaling_preserves_them() -> None:
    (reader, writer), (server_reader, server) = memory_streams()
    server.write(GREETING[:-4] + struct.pack(">I", 11) + b"QEMU (desk)")
    client = await RfbClient.connect(reader, writer)
    client.pointer(31, 0, buttons=0)
    await client.close()
    sent = await server_reader.read()
    assert sent.endswith(struct.pack(">BBHH", 5, 0, 32, 1))


async def test_closing_twice_is_harmless() -> None:
    client = await connected(b"")
    await client.close()
    await client.close()
    with pytest.raises(MachineLost):
        await client.read_update()


def test_input_after_a_disconnect_is_a_lost_connection_on_uvloop_too() -> None:
    async def hang_up_then_click() -> None:
        ours, theirs = socket.socketpair()
        theirs.sendall(GREETING)
        client = await RfbClient.connect(*await asyncio.open_unix_connection(sock=ours))
        theirs.close()
        with pytest.raises(MachineLost):
            await client.read_update()
        client.pointer(1, 1, buttons=1)
        client.request(incremental=True)
        client.wake()
        with pytest.raises(MachineLost):
            await client.drain()
        await client.close()

    uvloop.run(hang_up_then_click())
