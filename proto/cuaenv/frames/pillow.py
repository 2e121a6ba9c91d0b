"""Arrays as images of Pillow, without copies."""

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image


class ArrayImage(Image.Image):
    """An RGB image whose pixels stay in an array until Pillow itself needs them, which copies them."""

    _rgb_HWC: "npt.NDArray[np.uint8] | None" = None

    def __init__(self, rgb_HWC: "npt.NDArray[np.uint8]") -> None:
        """Take an array of shape (height, width, 3) that nothing changes."""
        super().__init__()
        self._mode = "RGB"
        self._size = rgb_HWC.shape[1], rgb_HWC.shape[0]
        self._rgb_HWC = rgb_HWC

    def load(self) -> Any:
        """Give the pixels to Pillow, which may change them."""
        if self._rgb_HWC is not None:
            self.im = Image.fromarray(self._rgb_HWC).im
            self._rgb_HWC = None
        return super().load()

    @property
    def rgb_HWC(self) -> "npt.NDArray[np.uint8]":  # noqa: N802
        """The pixels, read-only."""
        return np.asarray(self) if self._rgb_HWC is None else self._rgb_HWC


def rgb_of(image: Image.Image) -> "npt.NDArray[np.uint8]":
    """Return an image as (height, width, 3) 8-bit RGB; it must not be changed."""
    if isinstance(image, ArrayImage):
        return image.rgb_HWC
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
