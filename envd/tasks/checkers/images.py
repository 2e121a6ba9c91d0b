"""The checker of pictures: how similar two pictures are."""

import base64
import io
from typing import Annotated, Literal, Self

import numpy
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field, model_validator

from envd.tasks.checkers.base import FoundFile, GuestInspector
from envd.tasks.checkers.files import FileCheck, not_a_file
from envd.tasks.fields import Base64, GuestPath
from envd.tasks.text import CheckOutcome

#: Tasks use smaller pictures, and a small file can decompress into a picture that fills the memory.
MAX_PIXELS = 16_000_000
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM")

Pixels = NDArray[numpy.uint8]
"""Array of shape (height, width, 3)."""


class ImageLike(FileCheck):
    """A picture is similar to a reference."""

    kind: Literal["image_like"]
    base64: Base64 | None = None
    """The reference: the bytes of a file."""
    guest_path: GuestPath | None = None
    """The reference: a file in the guest, which the agent could have changed."""
    min_similarity: Annotated[float, Field(gt=0, le=1)] = 0.98
    """1 minus the mean difference of the pixels' channels as a fraction of their range. Pictures of different sizes are
    not similar."""

    @model_validator(mode="after")
    def _one_reference(self) -> Self:
        if (self.base64 is None) == (self.guest_path is None):
            raise ValueError("give either base64 or guest_path")
        if self.base64 is not None and isinstance(read_pixels(base64.b64decode(self.base64)), str):
            raise ValueError("base64: not a picture")
        return self

    async def check(self, inspector: GuestInspector) -> CheckOutcome:
        found = await inspector.find_file(self.path)
        if self.guest_path is None:
            reference = FoundFile("file", base64.b64decode(self.base64 or ""))
        else:
            reference = await inspector.find_file(self.guest_path)
        return await inspector.judge(judge_image, found, reference, self)


def judge_image(found: FoundFile, reference: FoundFile, checker: ImageLike) -> CheckOutcome:
    """Score a picture's similarity to a reference."""
    pictures = []
    for file, path in ((found, checker.path), (reference, checker.guest_path or "the reference")):
        if file.kind != "file":
            return not_a_file(file, path)
        pixels = read_pixels(file.data)
        if isinstance(pixels, str):
            return CheckOutcome(0.0, f"{path}: {pixels}")
        pictures.append(pixels)
    one, other = pictures
    if one.shape != other.shape:
        sizes = [f"{pixels.shape[1]}x{pixels.shape[0]}" for pixels in pictures]
        return CheckOutcome(0.0, f"{sizes[0]} pixels, expected {sizes[1]}")
    similarity = 1.0 - float(numpy.abs(one.astype(numpy.int16) - other).mean()) / 255.0
    is_similar = similarity >= checker.min_similarity
    return CheckOutcome(float(is_similar), f"similarity {similarity:.4f}, required {checker.min_similarity:g}")


def read_pixels(data: bytes) -> Pixels | str:
    """Return a picture's pixels as (height, width, 3), or what is wrong with it."""
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                return f"{image.width}x{image.height} pixels exceed the limit of {MAX_PIXELS}"
            return numpy.asarray(image.convert("RGB"))
    except MemoryError:
        raise  # the caller knows how much memory there was
    # Decoders raise most kinds of errors for malformed bytes.
    except Exception as error:
        return f"is not a picture: {error}"
