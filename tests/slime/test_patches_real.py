"""Image tensors by tables equal those of transformers' processors, to the bit."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cuaenv.frames import TiledImage
from cuaenv.frames.pillow import ArrayImage
from trainer.tokens import patches
from trainer.tokens.patches import PatchFormat, image_tensors

pytestmark = pytest.mark.slime

HALF = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
CLIP: dict[str, Any] = {"patch_size": 14}


def processor(**given: Any) -> Any:
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(merge_size=2, size={"shortest_edge": 1024, "longest_edge": 1 << 20}, **given)


def screens(*sizes_px: tuple[int, int]) -> list[Image.Image]:
    rng = np.random.default_rng(1)
    return [ArrayImage(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)) for width, height in sizes_px]


def check_equal(made: dict[str, Any], images: Sequence[Image.Image], real: Any) -> None:
    import torch

    wanted = real(images=[image.copy() for image in images], return_tensors="pt")
    assert set(made) == set(wanted)
    assert made["pixel_values"].dtype == torch.bfloat16
    assert torch.equal(made["pixel_values"], wanted["pixel_values"].bfloat16())
    assert made["image_grid_thw"].dtype == wanted["image_grid_thw"].dtype
    assert torch.equal(made["image_grid_thw"], wanted["image_grid_thw"])


@pytest.mark.parametrize("given", [HALF, CLIP, {**HALF, "merge_size": 4}, {**HALF, "temporal_patch_size": 1}])
@pytest.mark.parametrize("blocks", [(1, 1), (2, 3), (19, 11)])
def test_tensors_by_table_are_the_processors_own(given: dict[str, Any], blocks: tuple[int, int]) -> None:
    from transformers import Qwen2VLImageProcessorPil

    real = Qwen2VLImageProcessorPil(**{"merge_size": 2, "size": {"shortest_edge": 1, "longest_edge": 1 << 20}, **given})
    side_px = real.patch_size * real.merge_size
    width, height = blocks[0] * side_px, blocks[1] * side_px
    assert PatchFormat.of(real, width, height) is not None
    images = screens((width, height), (height, width), (width, height))
    check_equal(image_tensors(real, images), images, real)


@pytest.mark.parametrize("given", [HALF, CLIP])
@pytest.mark.parametrize("of_tiles", [False, True])
def test_rows_that_stay_are_copied_and_those_that_change_are_not(given: dict[str, Any], of_tiles: bool) -> None:
    real = processor(**given)
    side_px = real.patch_size * real.merge_size
    size_px = 3 * side_px, 5 * side_px
    (first,) = screens(size_px)
    second = np.array(first)
    second[side_px * 2 + 1, 3] ^= 255
    third = second.copy()
    third[-1, -1] ^= 255
    (other,) = screens((size_px[1], size_px[0]))
    arrays = [np.array(first), second, second, third, np.array(other), third]
    images = [ArrayImage(TiledImage.from_rgb(each) if of_tiles else each) for each in arrays]
    check_equal(image_tensors(real, images), [Image.fromarray(each) for each in arrays], real)


@pytest.mark.parametrize("size_px", [(70, 50), (1600, 1600), (16, 16)])
def test_images_that_the_processor_resizes_are_left_to_it(size_px: tuple[int, int]) -> None:
    real = processor(**HALF)
    assert PatchFormat.of(real, *size_px) is None
    images = screens(size_px, (64, 64))
    check_equal(image_tensors(real, images), images, real)


def test_a_processor_that_does_more_is_not_replaced_by_a_table() -> None:
    from transformers import Qwen2VLImageProcessorPil

    class Brighter(Qwen2VLImageProcessorPil):  # type: ignore[misc]
        def normalize(self, image: Any, *given: Any, **named: Any) -> Any:
            return super().normalize(image + np.linspace(0, 1, image.shape[-1], dtype=np.float32), *given, **named)

    real = Brighter(merge_size=2, size={"shortest_edge": 1024, "longest_edge": 1 << 20}, **HALF)
    assert PatchFormat.of(real, 64, 64) is None
    images = screens((64, 64))
    check_equal(image_tensors(real, images), images, real)


def test_memory_of_tensors_is_used_again_when_they_are_gone_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_free", {})
    real, (one, other) = processor(**HALF), screens((640, 640), (640, 640))
    first = image_tensors(real, [one])["pixel_values"]
    address, wanted = first.data_ptr(), first.clone()
    view = first[3:]
    del first
    second = image_tensors(real, [other])["pixel_values"]
    assert second.data_ptr() != address, "a view keeps the memory"
    assert (view == wanted[3:]).all()
    del view
    third = image_tensors(real, [one])["pixel_values"]
    assert third.data_ptr() == address
    assert (third == wanted).all()
    assert image_tensors(real, [one])["pixel_values"].data_ptr() not in {address, second.data_ptr()}


def test_memory_of_another_size_is_dropped_when_new_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    free: dict[int, Any] = {}
    monkeypatch.setattr(patches, "_free", free)
    real = processor(**HALF)
    image_tensors(real, screens((640, 640)))
    assert [block.size for block in free.values()] == [640 * 640 * 3 * 2]
    held = image_tensors(real, screens((640, 640), (640, 640), (640, 640)))
    assert not free
    image_tensors(real, screens((64, 64)))
    del held
    assert len(free) == 2
