"""The size of a scaled image, by the rule of Qwen's `smart_resize`. Pure.

As in models/qwen2_vl/image_processing_qwen2_vl.py of transformers, both sides are rounded to the nearest multiple; if
that has too many pixels, they are scaled by the square root of the excess and rounded down. Images are never enlarged
beyond that.
"""

import math

#: More than any side.
_ANY_PX = 1 << 30


def fit(
    width_px: int,
    height_px: int,
    *,
    max_width_px: int = 0,
    max_height_px: int = 0,
    max_pixel_count: int = 0,
    multiple_px: int = 0,
) -> tuple[int, int]:
    """Return the size (width, height) to scale to, of about the same aspect ratio; 0 means unlimited.

    Raises:
        ValueError: No multiple of `multiple_px` is within the limits.
    """
    scale = min(
        1.0, max_width_px / width_px if max_width_px else 1.0, max_height_px / height_px if max_height_px else 1.0
    )
    wide, high = width_px * scale, height_px * scale
    step = multiple_px or 1
    most = [(limit or _ANY_PX) // step * step for limit in (max_width_px, max_height_px)]
    if min(most) < step or 0 < max_pixel_count < step * step:
        raise ValueError(f"no image in steps of {step} px is within the limits")
    size = [max(step, round(side / step) * step) for side in (wide, high)]
    if max_pixel_count and size[0] * size[1] > max_pixel_count:
        excess = math.sqrt(wide * high / max_pixel_count)
        size = [max(step, math.floor(side / excess / step) * step) for side in (wide, high)]
        if size[0] * size[1] > max_pixel_count:  # a very long image: the short side cannot shrink below one step
            longer = 0 if size[0] > size[1] else 1
            size[longer] = max_pixel_count // size[1 - longer] // step * step
    return min(size[0], most[0]), min(size[1], most[1])
