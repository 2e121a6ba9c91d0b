"""PNGs from arrays, and arrays as images of Pillow."""

import io
import pickle
import zlib

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from cuaenv.frames import TiledImage, png
from cuaenv.frames.pillow import ArrayImage, png_of, rgb_of
from cuaenv.frames.png import encode_png


def noise(width_px: int, height_px: int, *, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height_px, width_px, 3), dtype=np.uint8)


def plain(width_px: int, height_px: int) -> npt.NDArray[np.uint8]:
    image = Image.new("RGB", (width_px, height_px), (40, 90, 160))
    ImageDraw.Draw(image).text((2, 2), "File Edit View", fill=(255, 255, 255))
    return np.array(image)


@pytest.mark.parametrize("make", [noise, plain])
@pytest.mark.parametrize("size_px", [(1, 1), (3, 16), (64, 17), (200, 100), (1280, 800)])
def test_a_png_has_the_arrays_pixels(make: object, size_px: tuple[int, int]) -> None:
    assert callable(make)
    rgb_HWC = make(*size_px)
    with Image.open(io.BytesIO(encode_png(rgb_HWC))) as image:
        image.load()
        assert (image.mode, image.size) == ("RGB", size_px)
        assert np.array_equal(np.asarray(image), rgb_HWC)


@pytest.mark.parametrize("size_px", [(1, 1), (64, 64), (70, 130), (1280, 800)])
def test_tiles_are_written_as_the_array_that_they_show(size_px: tuple[int, int]) -> None:
    rgb_HWC = noise(*size_px)
    assert encode_png(TiledImage.from_rgb(rgb_HWC)) == encode_png(rgb_HWC)


def test_rows_of_tiles_are_assembled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assembled = list[int]()
    assemble = TiledImage.row_HWC

    def counted(image: TiledImage, number: int) -> npt.NDArray[np.uint8]:
        assembled.append(number)
        return assemble(image, number)

    monkeypatch.setattr(TiledImage, "row_HWC", counted)
    png._tile_rows.clear()
    rgb_HWC = noise(130, 200, seed=2)
    encode_png(TiledImage.from_rgb(rgb_HWC))
    assert assembled == [0, 1, 2, 3]
    rgb_HWC[130, 7] ^= 255
    changed = TiledImage.from_rgb(rgb_HWC)
    with Image.open(io.BytesIO(encode_png(changed))) as image:
        assert np.array_equal(np.asarray(image), rgb_HWC)
    assert assembled == [0, 1, 2, 3, 2]
    # Tiles of other shapes may have the same bytes.
    encode_png(TiledImage.from_rgb(noise(32, 64)))
    with Image.open(io.BytesIO(encode_png(TiledImage.from_rgb(noise(32, 64).reshape(32, 64, 3))))) as image:
        assert image.size == (64, 32)


def test_an_array_that_is_not_contiguous_is_written_as_it_is_indexed() -> None:
    rgb_HWC = noise(40, 30)[::2, ::-1]
    with Image.open(io.BytesIO(encode_png(rgb_HWC))) as image:
        assert np.array_equal(np.asarray(image), rgb_HWC)


def test_only_rows_that_changed_are_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    compressed = list[int]()
    compress = png._compressed

    def counted(rows_HWC: npt.NDArray[np.uint8]) -> png._Band:
        compressed.append(len(rows_HWC))
        return compress(rows_HWC)

    monkeypatch.setattr(png, "_compressed", counted)
    png._bands.clear()
    first = noise(64, 80, seed=1)
    second = first.copy()
    second[40, 5] ^= 255
    encode_png(first)
    assert compressed == [16] * 5
    with Image.open(io.BytesIO(encode_png(second))) as image:
        assert np.array_equal(np.asarray(image), second)
    assert compressed == [16] * 6
    # The same bytes in rows of another width are another band.
    encode_png(first.reshape(40, 128, 3))
    assert len(compressed) == 9


def test_the_latest_bands_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(png, "_BANDS_KEPT", 3)
    png._bands.clear()
    for seed in (1, 2, 3, 1, 4):
        encode_png(noise(64, 16, seed=seed))
    kept = list(png._bands.values())
    assert kept == [png._compressed(noise(64, 16, seed=seed)) for seed in (3, 1, 4)]


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_checksums_are_joined_as_by_zlib(first: bytes, second: bytes) -> None:
    assert png._joined(zlib.adler32(first), zlib.adler32(second), len(second)) == zlib.adler32(first + second)


def test_an_array_image_is_an_image_of_pillow() -> None:
    rgb_HWC = noise(33, 20)
    image = ArrayImage(rgb_HWC)
    assert isinstance(image, Image.Image)
    assert (image.mode, image.size, image.width, image.height) == ("RGB", (33, 20), 33, 20)
    assert rgb_of(image) is rgb_HWC
    wanted = Image.fromarray(rgb_HWC)
    assert ArrayImage(rgb_HWC).resize((16, 10)).tobytes() == wanted.resize((16, 10)).tobytes()
    assert pickle.loads(pickle.dumps(ArrayImage(rgb_HWC))).tobytes() == wanted.tobytes()  # noqa: S301
    assert ArrayImage(rgb_HWC).copy() == wanted
    assert np.array_equal(np.asarray(ArrayImage(rgb_HWC)), rgb_HWC)


def test_an_image_of_tiles_is_an_image_of_pillow() -> None:
    rgb_HWC = noise(70, 65)
    tiles = TiledImage.from_rgb(rgb_HWC)
    image = ArrayImage(tiles)
    assert (image.mode, image.size) == ("RGB", (70, 65))
    assert image.source is tiles
    assert np.array_equal(rgb_of(image), rgb_HWC)
    assert png_of(image) == encode_png(rgb_HWC)
    assert pickle.loads(pickle.dumps(ArrayImage(tiles))).tobytes() == rgb_HWC.tobytes()  # noqa: S301
    image.putpixel((69, 64), (1, 2, 3))
    assert rgb_of(image)[64, 69].tolist() == [1, 2, 3]
    assert np.array_equal(tiles.rgb_HWC(), rgb_HWC)


def test_drawing_on_an_array_image_changes_it_alone() -> None:
    rgb_HWC = noise(8, 8)
    before = rgb_HWC.copy()
    image = ArrayImage(rgb_HWC)
    image.putpixel((3, 2), (1, 2, 3))
    ImageDraw.Draw(image).point((4, 4), fill=(7, 8, 9))
    assert np.array_equal(rgb_HWC, before)
    assert rgb_of(image)[2, 3].tolist() == [1, 2, 3]
    assert rgb_of(image)[4, 4].tolist() == [7, 8, 9]
