"""Arrays and tiles as images of Pillow, without copies."""

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from cuaenv.frames.image import TiledImage
from cuaenv.frames.png import encode_png


class ArrayImage(Image.Image):
    """An RGB image whose pixels stay in an array, or in tiles, until Pillow itself needs them, which copies them."""

    _source: "npt.NDArray[np.uint8] | TiledImage | None" = None

    def __init__(self, source: "npt.NDArray[np.uint8] | TiledImage") -> None:
        """Take tiles, or an array of shape (height, width, 3) that nothing changes."""
        super().__init__()
        self._mode = "RGB"
        self._size = source.size_px if isinstance(source, TiledImage) else (source.shape[1], source.shape[0])
        self._source = source

    def load(self) -> Any:
        """Give the pixels to Pillow, which may change them."""
        if self._source is not None:
            self.im = Image.fromarray(rgb_of(self)).im
            self._source = None
        return super().load()

    @property
    def source(self) -> "npt.NDArray[np.uint8] | TiledImage":
        """The pixels, read-only: tiles, or an array of shape (height, width, 3)."""
        return np.asarray(self) if self._source is None else self._source


def source_of(image: Image.Image) -> "npt.NDArray[np.uint8] | TiledImage":
    """Return an image's tiles, or the image as (height, width, 3) 8-bit RGB; it must not be changed."""
    if isinstance(image, ArrayImage):
        return image.source
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def rgb_of(image: Image.Image) -> "npt.NDArray[np.uint8]":
    """Return an image as (height, width, 3) 8-bit RGB; it must not be changed."""
    source = source_of(image)
    return source.rgb_HWC() if isinstance(source, TiledImage) else source


def png_of(image: Image.Image) -> bytes:
    return encode_png(source_of(image))
