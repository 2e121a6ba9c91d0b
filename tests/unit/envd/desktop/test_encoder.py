"""Encoded frames, and that a client decodes exactly the pixels of the screen."""

import asyncio
import pickle
import threading
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuaenv.frames import FrameMismatch, TiledImage
from cuaenv.region import Region
from envd.desktop.display import frames
from envd.desktop.display.encoder import FrameEncoder
from envd.desktop.display.frames import Frame
from envd.desktop.display.rfb import CursorShape
from envd.desktop.observation import (
    CursorMode,
    EncodedFrame,
    Encoding,
    Keyframe,
    ObservationOptions,
    Point,
    TileDelta,
    UnchangedImage,
)

RAW = ObservationOptions(encoding=Encoding.RAW_ZSTD)
Pixels = npt.NDArray[np.uint8]


def blank(width_px: int = 320, height_px: int = 200) -> Pixels:
    return np.zeros((height_px, width_px, 3), np.uint8)


def noise(width_px: int = 320, height_px: int = 200, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height_px, width_px, 3), dtype=np.uint8)


def region(x_px: int, y_px: int, width_px: int, height_px: int) -> Region:
    return Region(x_px=x_px, y_px=y_px, width_px=width_px, height_px=height_px)


def shown(rgb_HWC: Pixels) -> Frame:
    image = TiledImage.from_rgb(rgb_HWC)
    return Frame(frame_id=image.image_id, image=image, capture_time=datetime(2026, 1, 2, tzinfo=UTC))


def decoded(sent: EncodedFrame, base: TiledImage | None) -> TiledImage:
    """Decode as a client does."""
    match sent.content:
        case Keyframe(data=data):
            return TiledImage.unpack(data, width_px=sent.width_px, height_px=sent.height_px, image_id=sent.image_id)
        case TileDelta(base_image_id=base_id, tiles=tiles, data=data):
            assert base is not None
            assert base.image_id == base_id
            return base.patched(tiles, data, image_id=sent.image_id)
        case UnchangedImage(base_image_id=base_id):
            assert base is not None
            assert base.image_id == base_id == sent.image_id
            return base
        case None:
            raise AssertionError("no pixels were sent")


@pytest.fixture
def encoder() -> FrameEncoder:
    return FrameEncoder()


async def test_a_small_change_is_sent_as_tiles(encoder: FrameEncoder) -> None:
    before, after = noise(), noise()
    after[70, 130] = 7
    first = await encoder.encode(shown(before), RAW)
    second = await encoder.encode(shown(after), replace(RAW, known_image_id=first.image_id))
    assert isinstance(first.content, Keyframe)
    assert isinstance(second.content, TileDelta)
    assert second.content.tiles == (Region(x_px=130, y_px=70, width_px=1, height_px=1),), "only the differing pixel"
    assert np.array_equal(decoded(second, decoded(first, None)).rgb_HWC(), after)


async def test_an_equal_frame_is_sent_as_unchanged_in_every_encoding(encoder: FrameEncoder) -> None:
    for encoding in (Encoding.RAW_ZSTD, Encoding.PNG, Encoding.JPEG):
        options = ObservationOptions(encoding=encoding)
        first = await encoder.encode(shown(noise()), options)
        again = await encoder.encode(shown(noise()), replace(options, known_image_id=first.image_id))
        assert again.content == UnchangedImage(base_image_id=first.image_id)


@pytest.mark.parametrize("known", ["", "f" * 32])
async def test_an_unknown_base_gives_a_whole_image(known: str) -> None:
    sent = await FrameEncoder().encode(shown(noise()), replace(RAW, known_image_id=known))
    assert isinstance(sent.content, Keyframe)


async def test_an_evicted_base_gives_a_whole_image(encoder: FrameEncoder) -> None:
    first = await encoder.encode(shown(noise()), RAW)
    for seed in range(1, 20):
        await encoder.encode(shown(noise(seed=seed)), RAW)
    late = await encoder.encode(shown(blank()), replace(RAW, known_image_id=first.image_id))
    assert isinstance(late.content, Keyframe)
    assert len(encoder._bases) <= 8
    assert len(encoder._results) <= 8


async def test_another_size_gives_a_whole_image(encoder: FrameEncoder) -> None:
    first = await encoder.encode(shown(noise()), RAW)
    resized = await encoder.encode(shown(noise(640, 480)), replace(RAW, known_image_id=first.image_id))
    assert isinstance(resized.content, Keyframe)
    assert (resized.width_px, resized.height_px) == (640, 480)
    assert decoded(resized, None).rgb_HWC().shape == (480, 640, 3)


async def test_a_change_larger_than_the_whole_image_is_not_sent(encoder: FrameEncoder) -> None:
    striped = blank()
    striped[::2] = 255  # compresses across tile borders
    striped[:, 63::64] = 0  # unchanged columns between all changes
    first = await encoder.encode(shown(blank()), RAW)
    second = await encoder.encode(shown(striped), replace(RAW, known_image_id=first.image_id))
    assert isinstance(second.content, Keyframe)
    assert np.array_equal(decoded(second, None).rgb_HWC(), striped)


async def test_a_moved_pointer_changes_few_tiles() -> None:
    encoder = FrameEncoder()
    frame = replace(shown(noise()), cursor=CursorShape(0, 0, np.full((8, 8, 4), 255, np.uint8)), pointer=Point(10, 10))
    first = await encoder.encode(frame, RAW)
    options = replace(RAW, known_image_id=first.image_id)
    second = await encoder.encode(replace(frame, pointer=Point(200, 100)), options)
    assert first.frame_id == second.frame_id, "the screen is equal"
    assert isinstance(second.content, TileDelta)
    assert len(second.content.tiles) == 2
    image = decoded(second, decoded(first, None)).rgb_HWC()
    assert (image[100:108, 200:208] == 255).all()
    assert np.array_equal(image[10:18, 10:18], frame.rgb_HWC[10:18, 10:18])


async def test_a_reported_pointer_is_not_drawn() -> None:
    shape = CursorShape(0, 0, np.full((8, 8, 4), 255, np.uint8))
    frame = replace(shown(noise()), cursor=shape, pointer=Point(10, 20))
    sent = await FrameEncoder().encode(frame, replace(RAW, cursor=CursorMode.REPORTED))
    assert sent.cursor == Point(10, 20)
    assert sent.image_id == sent.frame_id
    assert (await FrameEncoder().encode(frame, RAW)).cursor is None


async def test_no_pixels_are_encoded_unless_requested() -> None:
    options = ObservationOptions(encoding=Encoding.NONE, max_width_px=160)
    sent = await FrameEncoder().encode(shown(noise()), options)
    assert (sent.content, sent.image_id, sent.width_px, sent.height_px) == (None, "", 160, 100)


async def test_a_scaled_image_is_also_sent_as_tiles(encoder: FrameEncoder) -> None:
    options = replace(RAW, max_width_px=160)
    before, after = noise(640, 400), noise(640, 400)
    after[:8, :8] = 0
    first = await encoder.encode(shown(before), options)
    second = await encoder.encode(shown(after), replace(options, known_image_id=first.image_id))
    assert isinstance(second.content, TileDelta)
    image = decoded(second, decoded(first, None))
    fresh = decoded(await FrameEncoder().encode(shown(after), options), None)
    assert np.array_equal(image.rgb_HWC(), fresh.rgb_HWC())
    assert image.rgb_HWC().shape == (100, 160, 3)


async def test_equal_concurrent_requests_share_one_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    makers: list[int] = []
    original = frames.compress

    def counted(*args: object, **kwargs: object) -> bytes:
        makers.append(threading.get_ident())
        return original(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("envd.desktop.display.encoder.compress", counted)
    encoder, frame = FrameEncoder(), shown(noise())
    sent = await asyncio.gather(*(encoder.encode(frame, ObservationOptions()) for _ in range(10)))
    assert len(makers) == 1
    assert makers[0] != threading.get_ident(), "off the event loop"
    assert all(one.content is sent[0].content for one in sent)


async def test_a_small_change_is_cached_for_later_requests() -> None:
    encoder, before, after = FrameEncoder(), noise(), noise()
    after[0, 0] ^= 255
    cursor = CursorShape(0, 0, np.full((8, 8, 4), 255, np.uint8))
    first, second = (replace(shown(pixels), cursor=cursor, pointer=Point(20, 20)) for pixels in (before, after))
    sent = await encoder.encode(first, RAW)
    options = replace(RAW, known_image_id=sent.image_id)
    ahead = await encoder.encode(second, options)
    later = replace(second, capture_time=datetime(2026, 1, 3, tzinfo=UTC))
    again = await encoder.encode(later, options)
    assert isinstance(again.content, TileDelta)
    assert again.content is ahead.content
    assert again.capture_time == later.capture_time


async def test_a_cancelled_request_does_not_cancel_the_others() -> None:
    encoder, frame = FrameEncoder(), shown(noise(1280, 800))
    cancelled = asyncio.create_task(encoder.encode(frame, RAW))
    remaining = asyncio.create_task(encoder.encode(frame, RAW))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert decoded(await remaining, None).image_id == frame.frame_id
    assert encoder._pending == {}


async def test_a_fork_accepts_images_sent_by_its_parent_as_bases() -> None:
    parent = FrameEncoder()
    before, after = noise(), noise()
    after[0, 0] ^= 255
    first = await parent.encode(shown(before), RAW)
    child = parent.branch()
    changed = await child.encode(shown(after), replace(RAW, known_image_id=first.image_id))
    assert isinstance(changed.content, TileDelta)
    unknown = await parent.encode(shown(before), replace(RAW, known_image_id=changed.image_id))
    assert isinstance(unknown.content, Keyframe), "the parent does not know images of its child"


@settings(max_examples=60)
@given(st.data())
def test_any_history_of_changes_is_decoded_exactly(data: st.DataObject) -> None:
    """Random rectangles, resizes, lost bases, and late or reordered acknowledgements."""

    async def play() -> None:
        encoder = FrameEncoder()
        size = (data.draw(st.integers(1, 300)), data.draw(st.integers(1, 200)))
        screen = noise(*size)
        held: list[TiledImage] = []
        for _ in range(data.draw(st.integers(1, 12))):
            if data.draw(st.integers(0, 9)) == 0:
                size = (data.draw(st.integers(1, 300)), data.draw(st.integers(1, 200)))
                screen = noise(*size, seed=1)
            for _ in range(data.draw(st.integers(0, 3))):
                x, y = data.draw(st.integers(0, size[0] - 1)), data.draw(st.integers(0, size[1] - 1))
                w, h = data.draw(st.integers(1, size[0])), data.draw(st.integers(1, size[1]))
                screen[y : y + h, x : x + w] = data.draw(st.integers(0, 255))
            base = data.draw(st.sampled_from([None, *held]))
            sent = await encoder.encode(shown(screen), replace(RAW, known_image_id=base.image_id if base else ""))
            image = decoded(sent, base)
            assert np.array_equal(image.rgb_HWC(), screen)
            if data.draw(st.booleans()):
                held.append(image)

    asyncio.run(play())


async def test_a_client_rejects_data_that_does_not_match_the_image_id(encoder: FrameEncoder) -> None:
    first = await encoder.encode(shown(noise()), RAW)
    after = noise()
    after[0, 0] ^= 255
    delta = await encoder.encode(shown(after), replace(RAW, known_image_id=first.image_id))
    base = decoded(first, None)
    assert isinstance(first.content, Keyframe)
    assert isinstance(delta.content, TileDelta)
    whole, change, size = first.content.data, delta.content.data, {"width_px": 320, "height_px": 200}
    with pytest.raises(FrameMismatch, match="id"):
        TiledImage.unpack(whole, **size, image_id="0" * 32)
    with pytest.raises(FrameMismatch, match="decompressed"):
        TiledImage.unpack(whole[:100], **size, image_id=first.image_id)
    with pytest.raises(FrameMismatch, match="bytes"):
        TiledImage.unpack(change, **size, image_id=first.image_id)
    with pytest.raises(FrameMismatch, match="accepted"):
        TiledImage.unpack(whole, width_px=1 << 20, height_px=1 << 20, image_id=first.image_id)
    for box in [(640, 640, 1, 1), (0, 0, 0, 1), (-1, 0, 1, 1), (319, 0, 2, 1), (0, 199, 1, 2), (0, 0, 1, 1 << 40)]:
        with pytest.raises(FrameMismatch, match="within"):
            base.patched([region(*box)], change, image_id=delta.image_id)
    with pytest.raises(FrameMismatch, match="overlap"):
        base.patched([region(0, 0, 320, 200), region(0, 0, 1, 1)], change, image_id=delta.image_id)
    with pytest.raises(FrameMismatch, match="id"):
        base.patched([region(64, 0, 1, 1)], change, image_id=delta.image_id)
    other = decoded(await FrameEncoder().encode(shown(blank()), RAW), None)
    with pytest.raises(FrameMismatch, match="id"):
        other.patched([region(0, 0, 1, 1)], change, image_id=delta.image_id)


async def test_a_history_of_images_keeps_no_arrays() -> None:
    encoder, images, known = FrameEncoder(), list[TiledImage](), ""
    for value in range(5):
        screen = noise()
        screen[0, 0] = value
        sent = await encoder.encode(shown(screen), replace(RAW, known_image_id=known))
        known = sent.image_id
        images.append(decoded(sent, images[-1] if images else None))
        array_HWC = images[-1].rgb_HWC()  # with and without the array of the previous image
        assert np.array_equal(array_HWC, screen)
        assert images[-1].rgb_HWC() is array_HWC
        if value == 2:
            del array_HWC
    assert [image._rgb() is not None for image in images if image._rgb] == [False] * 4 + [True]
    copied = pickle.loads(pickle.dumps(images[-1]))  # noqa: S301 -- our own
    assert np.array_equal(copied.rgb_HWC(), screen)
