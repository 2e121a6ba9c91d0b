"""The shadow framebuffer: equal to the server's, and changed only by pixels that differ."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from cuaenv.frames.grid import bounds_of
from cuaenv.region import Region
from envd.base.errors import GuestError, MachineLost
from envd.desktop.display import screen as screen_module
from envd.desktop.display.frames import Frame
from envd.desktop.display.rfb import PixelRect, RfbClient
from envd.desktop.display.screen import Screen
from tests.support.display import FakeDisplay, pseudo_rect


@asynccontextmanager
async def following(display: FakeDisplay, screen: Screen) -> AsyncIterator[asyncio.Task[None]]:
    async def follow() -> None:
        await screen.follow(await RfbClient.connect(*await display.connect()))

    display.requests.clear()
    task = asyncio.create_task(follow())
    try:
        await until(lambda: bool(display.requests) and display.requests[-1].incremental)
        await asyncio.wait_for(screen.wait_complete(), 60)
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, GuestError, MachineLost):
            await task
        await display.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


@pytest.fixture
def display() -> FakeDisplay:
    return FakeDisplay()


@pytest.fixture
async def screen(display: FakeDisplay) -> AsyncIterator[Screen]:
    """Follow the display."""
    screen = Screen()
    async with following(display, screen):
        yield screen


async def refreshing(display: FakeDisplay, screen: Screen) -> asyncio.Task[float]:
    """Freeze the display and start a refresh."""
    display.frozen = True
    refresh = asyncio.create_task(screen.refresh())
    await until(lambda: not display.requests[-1].incremental)
    return refresh


async def test_the_first_frame_is_the_servers_picture() -> None:
    display, screen = FakeDisplay(), Screen()
    display.bgrx_HW[10:20, 30:40] = 0x112233
    async with following(display, screen):
        frame = screen.frame()
        assert (frame.width_px, frame.height_px) == (64, 48) == screen.size
        assert frame.rgb_HWC[15, 35].tolist() == [0x11, 0x22, 0x33]
        assert frame.rgb_HWC[0, 0].tolist() == [0, 0, 0]
        assert not frame.rgb_HWC.flags.writeable
        assert frame.capture_time.tzinfo is not None


async def test_a_frames_id_depends_on_its_size_and_pixels() -> None:
    display, screen = FakeDisplay(32, 16), Screen()
    async with following(display, screen):
        tile = xxhash.xxh3_128(bytes(32 * 16 * 3)).digest()
        assert screen.frame().frame_id == xxhash.xxh3_128(b"32x16" + tile).hexdigest()


async def test_a_frame_is_not_older_than_the_last_refresh(display: FakeDisplay, screen: Screen) -> None:
    before = screen.frame()
    asked = datetime.now(UTC)
    await asyncio.wait_for(screen.refresh(), 60)
    assert before.capture_time < asked <= screen.frame().capture_time
    assert screen.frame().image is before.image


async def test_frames_share_unchanged_tiles() -> None:
    display, screen = FakeDisplay(256, 128), Screen()
    async with following(display, screen):
        before = screen.frame()
        assert screen.frame() is before, "it is copied only after a change"
        display.draw(70, 10, 4, 4, 0xFF0000)
        await until(lambda: screen.frame().frame_id != before.frame_id)
        after = screen.frame()
        assert after.image.changed_tiles(before.image) == [1]
        assert [after.image.tile(i) is before.image.tile(i) for i in range(8)] == [i != 1 for i in range(8)]
        assert before.rgb_HWC.max() == 0


async def test_a_blinking_caret_is_shown_but_does_not_count_as_a_change(display: FakeDisplay, screen: Screen) -> None:
    for count in range(6):
        colour = 0xFF if count % 2 == 0 else 0
        display.draw(5, 5, 1, 16, colour)
        await until(lambda colour=colour: screen.frame().rgb_HWC[5, 5, 2] == colour)  # type: ignore[misc]
        assert screen.change_count == min(count + 1, 2), "those before it was learnt"
    changes = screen.change_count
    display.draw(5, 5, 1, 16, 0x00FF00)
    await until(lambda: screen.change_count > changes)


async def test_ignored_regions_do_not_count_as_a_change(display: FakeDisplay, screen: Screen) -> None:
    clock = (Region(x_px=40, y_px=0, width_px=20, height_px=10),)
    quiet_s = screen.last_change_outside_s(clock)
    changes = screen.change_count
    display.draw(42, 2, 5, 5, 0x0000FF)
    await until(lambda: screen.change_count > changes)
    assert screen.last_change_outside_s(clock) == quiet_s < screen.last_change_outside_s(())
    assert screen.moving_since(quiet_s, clock) == []
    display.draw(38, 2, 5, 5, 0x0000FF)  # half inside, half outside
    await until(lambda: screen.change_count > changes + 1)
    assert screen.last_change_outside_s(clock) == screen.last_change_outside_s(())


async def test_the_changed_event_is_set_by_a_change_and_by_input(display: FakeDisplay, screen: Screen) -> None:
    changed, changed_s = screen.changed, screen.last_change_outside_s(())
    changes = screen.change_count
    display.draw(0, 0, 64, 48, 0)  # the same pixels
    await asyncio.wait_for(screen.refresh(), 60)
    assert not changed.is_set()
    assert (screen.change_count, screen.last_change_outside_s(())) == (changes, changed_s)
    display.draw(1, 1, 1, 1, 9)
    await asyncio.wait_for(changed.wait(), 60)
    changed = screen.changed
    screen.note_input()
    assert changed.is_set()


async def test_a_change_has_the_bounds_of_the_differing_pixels(display: FakeDisplay, screen: Screen) -> None:
    display.bgrx_HW[5, 7] = 0xFF
    display.bgrx_HW[6, 9] = 0xFF
    changes = screen.change_count
    display._dirty.append((0, 0, 64, 48))
    display.answer()
    await until(lambda: screen.change_count > changes)
    assert screen.moving_since(screen.last_change_outside_s(()), ()) == [
        Region(x_px=7, y_px=5, width_px=3, height_px=2)
    ]


async def test_thousands_of_rectangles_are_applied_while_other_tasks_run() -> None:
    display, screen = FakeDisplay(640, 480), Screen()
    async with following(display, screen):
        display.frozen = True
        strips = [(x_px, y_px) for y_px in range(480) for x_px in range(0, 640, 32)]
        for x_px, y_px in strips:
            display.draw(x_px, y_px, 16, 1, x_px * 480 + y_px + 1)
        display.frozen = False
        display.answer()
        turns = 0
        while not screen.change_count:
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 2 * (len(strips) // 512), "those that read and those that apply"
        assert screen.moving_since(screen.last_change_outside_s(()), ()) == [
            Region(x_px=0, y_px=0, width_px=624, height_px=480)
        ]
        assert np.array_equal(screen._bgrx_HW, display.bgrx_HW)
        await asyncio.wait_for(screen.refresh(), 60)


async def test_a_large_rectangle_is_read_in_slices_while_other_tasks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    turns_at: list[int] = []
    turns = 0
    read = RfbClient._read

    async def recorded(client: RfbClient, count: int) -> bytes:
        data = await read(client, count)
        sizes.append(count)
        turns_at.append(turns)
        return data

    monkeypatch.setattr(RfbClient, "_read", recorded)
    noise_HW = np.random.default_rng(1).integers(0, 1 << 32, (1600, 2560), dtype=np.uint32)
    display, screen = FakeDisplay(2560, 1600), Screen()
    display.bgrx_HW[...] = noise_HW
    async with following(display, screen):
        sizes.clear()
        turns_at.clear()
        display.draw(0, 0, 2560, 1600, 1)
        while not screen.change_count:
            await asyncio.sleep(0)
            turns += 1
        slices = [turn for size, turn in zip(sizes, turns_at, strict=True) if size > 1 << 16]
        assert max(sizes) <= 1 << 19
        assert len(slices) >= 1600 * 2560 // (1 << 17)
        assert len(set(slices)) == len(slices), "a turn reads one slice"
        assert np.array_equal(screen._bgrx_HW, display.bgrx_HW)
        assert not (screen._bgrx_HW >> 24).any()


async def test_large_rectangles_are_compared_in_slices_and_answer_a_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    turns = 0

    def recorded(marked_HW: npt.NDArray[np.bool_]) -> tuple[int, int, int, int] | None:
        compared.append((turns, marked_HW.size))
        return bounds_of(marked_HW)

    monkeypatch.setattr(screen_module, "bounds_of", recorded)
    display, screen = FakeDisplay(2560, 1600), Screen()
    async with following(display, screen):
        for step in range(3):
            compared.clear()
            # The strip of the refresh is sent with the other pixels: such an update counts, but is not the answer.
            refresh = await refreshing(display, screen)
            display.draw(0, 0, 2560, 1600, step + 1)
            display.bgrx_HW[9:1000, 7:2551] = np.random.default_rng(step).integers(9, 1 << 24, (991, 2544))
            display.frozen = False
            display.answer()
            while not refresh.done():
                await asyncio.sleep(0)
                turns += 1
            await refresh
            assert np.array_equal(screen._bgrx_HW, display.bgrx_HW)
            assert max(size for _, size in compared) <= 1 << 18
            assert len({turn for turn, _ in compared}) >= 1600 * 2560 // (1 << 18)
    assert screen.moving_since(screen.last_change_outside_s(()), ()) == [
        Region(x_px=0, y_px=0, width_px=2560, height_px=1600)
    ]


async def test_a_large_frame_is_made_in_a_thread_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    display, screen = FakeDisplay(2560, 1600), Screen()
    started, resumed = threading.Event(), threading.Event()
    threads: list[str] = []
    image_of = screen_module._image_of

    def slow(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        started.set()
        assert resumed.wait(60)
        return image_of(*arguments)

    def pixels(frame: Frame) -> set[tuple[int, ...]]:
        return {tuple(map(int, pixel)) for pixel in np.unique(frame.rgb_HWC[:8, :8].reshape(-1, 3), axis=0)}

    async with following(display, screen):
        first = await screen.newest_frame()
        display.draw(0, 0, 2560, 1600, 0x112233)
        await until(lambda: screen.change_count == 1)
        monkeypatch.setattr(screen_module, "_image_of", slow)
        making = asyncio.create_task(screen.newest_frame())
        await asyncio.to_thread(started.wait, 60)
        monkeypatch.setattr(screen_module, "_image_of", image_of)
        display.draw(0, 0, 8, 8, 0x445566)
        await until(lambda: screen.change_count == 2)
        resumed.set()
        frame = await making
        assert threads == [threads[0]]
        assert threads[0] != threading.main_thread().name
        assert pixels(frame) == {(0x11, 0x22, 0x33)}, "painted while the thread copied"
        newest = await screen.newest_frame()
        assert newest is screen.frame()
        assert pixels(newest) == {(0x44, 0x55, 0x66)}
        assert newest.image.changed_tiles(frame.image) == [0]
        assert first.frame_id != frame.frame_id
        # One that is cancelled loses no change, and a frame that is made in between wins.
        display.draw(0, 0, 2560, 1600, 0x778899)
        await until(lambda: screen.change_count == 3)
        cancelled = asyncio.create_task(screen.newest_frame())
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        assert pixels(screen.frame()) == {(0x77, 0x88, 0x99)}
        display.draw(0, 0, 2560, 1600, 0xAABBCC)
        await until(lambda: screen.change_count == 4)
        making = asyncio.create_task(screen.newest_frame())
        await asyncio.sleep(0)
        between = screen.frame()
        assert (await making).frame_id == between.frame_id
        assert screen.frame() is between


async def test_thousands_of_rectangles_complete_a_screen_only_when_every_pixel_was_sent() -> None:
    display, screen = FakeDisplay(640, 480), Screen()
    rects = tuple(
        PixelRect(x, y, np.full((1, 16), y + 1, dtype=np.uint32)) for y in range(480) for x in range(0, 640, 16)
    )
    async with following(display, screen):
        client = screen._client
        assert client is not None
        screen._expect_all()
        screen._apply(client, await screen._composed(rects[:-1]))
        assert not screen.is_complete
        screen._apply(client, rects[-1:])
        assert screen.is_complete


async def test_exactly_one_incremental_request_is_pending_at_any_time(display: FakeDisplay, screen: Screen) -> None:
    display.draw(0, 0, 4, 4, 1)
    await until(lambda: screen.frame().rgb_HWC[0, 0, 2] == 1)
    display.draw(0, 0, 4, 4, 2)
    await until(lambda: screen.frame().rgb_HWC[0, 0, 2] == 2)
    await until(lambda: sum(r.incremental for r in display.requests) == display.update_count)
    assert [r.incremental for r in display.requests[:2]] == [False, True]


async def test_after_a_resize_the_screen_is_black_until_its_pixels_arrive(display: FakeDisplay, screen: Screen) -> None:
    display.frozen = True
    display.resize(80, 60)
    await until(lambda: screen.size == (80, 60))
    assert screen.frame().rgb_HWC.shape == (60, 80, 3)
    whole = asyncio.create_task(screen.wait_complete())
    await asyncio.sleep(0)
    assert not whole.done()
    display.frozen = False
    display.draw(70, 50, 1, 1, 0xFF0000)
    await asyncio.wait_for(whole, 60)
    await until(lambda: screen.frame().rgb_HWC[50, 70].tolist() == [255, 0, 0])


async def test_the_cursor_shape_and_caps_lock_are_recorded(display: FakeDisplay, screen: Screen) -> None:
    assert screen.cursor is None
    display.send(pseudo_rect(-314, 0, 0, 1, 1, bytes(8)), pseudo_rect(-261, 0, 0, 1, 1, b"\x04"))
    await until(lambda: screen.cursor is not None)
    assert screen.caps_lock


async def test_a_refresh_wakes_the_server_and_waits_for_its_answer(display: FakeDisplay, screen: Screen) -> None:
    display.frozen = True
    woken = display.wake_count
    refresh = asyncio.create_task(screen.refresh())
    await until(lambda: not display.requests[-1].incremental)
    display.draw(40, 40, 4, 4, 0xABCDEF)
    assert not refresh.done()
    assert display.wake_count == woken + 1
    display.frozen = False
    display.answer()
    seen_s = await asyncio.wait_for(refresh, 60)
    assert seen_s < screen.last_change_outside_s(())
    assert screen.frame().rgb_HWC[41, 41].tolist() == [0xAB, 0xCD, 0xEF]


async def test_an_update_in_flight_is_not_taken_for_the_answer() -> None:
    display, screen = FakeDisplay(64, 16), Screen()
    async with following(display, screen):
        refresh = await refreshing(display, screen)
        (x_px, y_px, width_px, height_px) = display.requests[-1].area
        raw = display.bgrx_HW.copy()
        raw[...] = 0x123456  # an earlier update that covers the strip, and changes it
        display.send(pseudo_rect(0, 0, 0, 64, 16, raw.tobytes()))
        await until(lambda: screen.frame().rgb_HWC[0, 0].tolist() == [0x12, 0x34, 0x56])
        await asyncio.sleep(0)
        assert not refresh.done()
        display.draw(x_px, y_px, width_px, height_px, 0x123456)
        display.frozen = False
        display.answer()
        await asyncio.wait_for(refresh, 60)


async def test_an_unrequested_full_screen_is_not_taken_for_the_answer() -> None:
    display, screen = FakeDisplay(64, 16), Screen()
    async with following(display, screen):
        refresh = await refreshing(display, screen)
        whole = pseudo_rect(0, 0, 0, 64, 16, display.bgrx_HW.tobytes())  # unchanged, as after a mode switch
        display.send(whole, pseudo_rect(-261, 0, 0, 1, 1, b"\x04"))
        await until(lambda: screen.caps_lock)
        await asyncio.sleep(0)
        assert not refresh.done()
        display.frozen = False
        display.answer()
        await asyncio.wait_for(refresh, 60)


async def test_a_refresh_ends_even_if_its_strip_keeps_changing() -> None:
    display, screen = FakeDisplay(16, 16), Screen()
    async with following(display, screen):
        display.frozen = True
        refresh = asyncio.create_task(screen.refresh())
        for colour in range(1, 4):
            display.bgrx_HW[...] = colour
            display.send(pseudo_rect(0, 0, 0, 16, 16, display.bgrx_HW.tobytes()))
        await asyncio.wait_for(refresh, 60)
        assert screen.frame().rgb_HWC[0, 0, 2] == 3


async def test_concurrent_refreshes_each_get_an_answer(display: FakeDisplay, screen: Screen) -> None:
    seen = await asyncio.wait_for(asyncio.gather(*(screen.refresh() for _ in range(20))), 60)
    assert seen == sorted(seen)


async def test_a_cancelled_refresh_is_removed(display: FakeDisplay, screen: Screen) -> None:
    display.frozen = True
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(screen.refresh(), 0.01)
    display.frozen = False
    await asyncio.wait_for(screen.refresh(), 60)
    assert screen._refreshes == []


async def test_a_refresh_survives_a_resize(display: FakeDisplay, screen: Screen) -> None:
    refresh = await refreshing(display, screen)
    display.resize(20, 20)
    await until(lambda: screen.size == (20, 20))
    display.frozen = False
    display.answer()
    await asyncio.wait_for(refresh, 60)


async def test_the_end_of_the_connection_ends_refreshes() -> None:
    display, screen = FakeDisplay(), Screen()
    async with following(display, screen) as task:
        display.frozen = True
        refresh = asyncio.create_task(screen.refresh())
        await asyncio.sleep(0)
        display.drop()
        with pytest.raises(MachineLost):
            await refresh
        with pytest.raises(MachineLost):
            await task
        with pytest.raises(MachineLost):
            await screen.refresh()


async def test_a_new_connection_with_the_same_picture_does_not_count_as_a_change() -> None:
    display, screen = FakeDisplay(), Screen()
    display.bgrx_HW[3, 3] = 0x00FF00
    async with following(display, screen) as task:
        frame, changes = screen.frame(), screen.change_count
        display.drop()
        with pytest.raises(MachineLost):
            await task
    async with following(display, screen):
        await asyncio.wait_for(screen.refresh(), 60)
        assert screen.frame().image is frame.image
        assert screen.change_count == changes


async def test_the_shadow_equals_the_server_after_random_drawing() -> None:
    display, screen = FakeDisplay(96, 64), Screen()
    random = np.random.default_rng(1)
    async with following(display, screen):
        for _ in range(200):
            x, y = int(random.integers(0, 90)), int(random.integers(0, 60))
            w, h = int(random.integers(1, 97 - x)), int(random.integers(1, 65 - y))
            display.draw(x, y, w, h, int(random.integers(0, 1 << 24)))
            if random.random() < 0.3:
                await asyncio.sleep(0)
        await asyncio.wait_for(screen.refresh(), 60)
        assert np.array_equal(screen._bgrx_HW, display.bgrx_HW)
