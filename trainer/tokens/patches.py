"""Image tensors of Qwen-VL processors: equal to the processor's own, for a sixth of its CPU time.

Rescaling and normalising depend on a pixel's value alone, and patches are the same pixels in another order. So for each
size of image, one picture of noise is given to the processor, and its output yields a table from pixel values to
bfloat16. Unless table and layout reproduce that output to the bit, the processor makes all tensors of that size.
"""

import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from cuaenv.frames.grid import TILE_PX
from cuaenv.region import Region

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL import Image

_VALUES = 256
_CHANNELS = 3


def image_tensors(processor: Any, images: "Sequence[Image.Image]") -> dict[str, Any]:
    """Return an image processor's tensors, joined on dimension 0, floats as bfloat16.

    The trainer casts to bfloat16 anyway; casting here halves the bytes that pass through the rollout process.
    """
    formats = [PatchFormat.of(processor, *image.size) for image in images]
    known = [each for each in formats if each is not None]
    if len(known) < len(images):
        inputs = processor(images=list(images), return_tensors="pt")
        return {key: value.bfloat16() if value.is_floating_point() else value for key, value in inputs.items()}
    import torch  # noqa: PLC0415

    values = _array(sum(each.patch_count for each in known), known[0].patch_values)
    at, earlier = 0, None
    for image, each in zip(images, known, strict=True):
        patches = values[at : at + each.patch_count]
        each.write(image, patches, earlier)
        at, earlier = at + each.patch_count, (image, patches)
    grids = torch.tensor([each.grid_thw for each in known])
    return {"pixel_values": torch.from_numpy(values).view(torch.bfloat16), "image_grid_thw": grids}


def _new_block(count: int) -> "npt.NDArray[np.int16]":
    """Return new memory for tensors."""
    import numpy as np  # noqa: PLC0415

    if not _is_shared:
        # numpy asks for huge pages, which saves half the time of filling so large an array.
        return np.empty(count, np.int16)
    fd = os.memfd_create("pictures")
    os.ftruncate(fd, 2 * count)
    block = np.frombuffer(mmap.mmap(fd, 0), np.int16)
    _shared[block.ctypes.data] = fd
    weakref.finalize(block, _close, block.ctypes.data).atexit = False
    return block


_is_shared = False
#: Files of the blocks that other processes may map, by address.
_shared: dict[int, int] = {}


def share_memory() -> None:
    """Build all tensors of this process in memory that other processes may map."""
    global _is_shared  # noqa: PLW0603 -- once, when a process starts
    _is_shared = True


def shared_by(tensor: Any) -> int | None:
    """Return the descriptor of the file that has a tensor's memory; None if that is not shared."""
    return _shared.get(tensor.data_ptr())


def _close(address: int) -> None:
    os.close(_shared.pop(address))


#: Blocks that no tensor uses, for new tensors: the kernel takes 10 to 33 ms to clear the pages of a picture. A process
#: keeps as much as its tensors took at one time. Finalizers run anywhere, so only atomic operations of a dictionary, by
#: address, are used.
_free: "dict[int, npt.NDArray[np.int16]]" = {}


def _array(rows: int, columns: int) -> "npt.NDArray[np.int16]":
    """Return an array with any content. Its memory is used again when nothing refers to the array, as tensors do."""
    count, block = rows * columns, None
    for address, each in sorted(_free.copy().items(), key=lambda item: item[1].size):
        # Another thread may take it first.
        if count <= each.size <= 2 * count and block is None:
            block = _free.pop(address, None)
    if block is None:
        # Blocks that do not fit are dropped, so that rows of many sizes do not keep the sum of their memory.
        dropped = 0
        with suppress(KeyError):
            while dropped < count:
                dropped += _free.popitem()[1].size
        block = _new_block(count)
    values = block[:count].reshape(rows, columns)
    weakref.finalize(values, _free.__setitem__, block.ctypes.data, block).atexit = False
    return values


def _changed(image: "Image.Image", other: "Image.Image", side_px: int) -> "Iterator[tuple[Any, ...]]":
    """Yield rows, columns and pixels, shape (squares, side, side, 3), of squares that differ from those of `other`."""
    import numpy as np  # noqa: PLC0415

    from cuaenv.frames.pillow import rgb_of, source_of  # noqa: PLC0415

    source, known = source_of(image), source_of(other)
    if isinstance(source, np.ndarray) or isinstance(known, np.ndarray) or TILE_PX % side_px:
        whole = Region(x_px=0, y_px=0, width_px=image.width, height_px=image.height)
        parts = [([whole], rgb_of(image), rgb_of(other))]
    else:
        # Those at the right and lower borders have other shapes.
        shape = {index: source.tile_HWC(index).shape for index in source.changed_tiles(known)}
        parts = []
        for _, group in groupby(sorted(shape, key=shape.__getitem__), key=shape.__getitem__):
            indices = [*group]
            mine, its = (np.frombuffer(b"".join(map(each.tile, indices)), np.uint8) for each in (source, known))
            parts.append(([*map(source.tile_region, indices)], mine, its))
    for regions, mine, its in parts:
        across = regions[0].width_px // side_px
        # All at once: each operation that releases the interpreter's lock has to wait for it afterwards.
        pixels, before = (each.reshape(len(regions), -1, side_px, across, side_px * 3) for each in (mine, its))
        numbers, rows, columns = np.nonzero((pixels.view(np.uint16) != before.view(np.uint16)).any(axis=4).any(axis=2))
        squares = pixels[numbers, rows, :, columns].reshape(-1, side_px, side_px, 3)
        origins = np.array([(region.y_px, region.x_px) for region in regions])[numbers] // side_px
        yield rows + origins[:, 0], columns + origins[:, 1], squares


class PatchFormat:
    """How a processor arranges and scales the pixels of images of one size."""

    def __init__(self, processor: Any, width_px: int, height_px: int) -> None:
        """Take the layout from the processor; `probe` makes the table."""
        self._patch_px, self._merge = processor.patch_size, processor.merge_size
        self._repeats = processor.temporal_patch_size
        self._size_px = width_px, height_px
        self._side_px = processor.patch_size * processor.merge_size
        self.grid_thw = 1, height_px // self._patch_px, width_px // self._patch_px
        self.patch_count = self.grid_thw[1] * self.grid_thw[2]
        self.patch_values = _CHANNELS * self._repeats * self._patch_px**2

    @staticmethod
    @lru_cache(maxsize=16)
    def of(processor: Any, width_px: int, height_px: int) -> "PatchFormat | None":
        """Return the format of a size; None if the processor does more than arrange and scale pixels."""
        names = ("patch_size", "merge_size", "temporal_patch_size")
        if not all(isinstance(getattr(processor, name, None), int) for name in names):
            return None
        side_px = processor.patch_size * processor.merge_size
        if width_px % side_px or height_px % side_px or processor.patch_size % 2:
            return None
        found = PatchFormat(processor, width_px, height_px)
        return found if found.probe(processor) else None

    def probe(self, processor: Any) -> bool:
        """Make the table from the processor's output for noise; return whether it explains all of that output."""
        import numpy as np  # noqa: PLC0415
        import torch  # noqa: PLC0415
        from PIL import Image  # noqa: PLC0415

        width, height = self._size_px
        # Every value in every channel.
        values = np.resize(np.arange(_VALUES, dtype=np.uint8), (_CHANNELS, height * width))
        noise_HWC = np.random.default_rng(0).permuted(values, axis=1).T.reshape(height, width, _CHANNELS).copy()
        noise = Image.fromarray(noise_HWC)
        made = processor(images=[noise], return_tensors="pt")
        if set(made) != {"pixel_values", "image_grid_thw"} or made["image_grid_thw"].tolist() != [list(self.grid_thw)]:
            return False
        wanted = made["pixel_values"].bfloat16().contiguous().view(torch.int16).numpy().view(np.uint16)
        if wanted.shape != (self.patch_count, self.patch_values):
            return False
        source = np.empty(wanted.shape, np.uint8)
        self._arrange(noise_HWC, self._cells(source), lambda planes_CNHW: planes_CNHW)
        by_channel = (self.patch_count, _CHANNELS, -1)
        table = np.zeros((_CHANNELS, _VALUES), np.uint16)
        table[np.arange(_CHANNELS)[:, None], source.reshape(by_channel)] = wanted.reshape(by_channel)
        # Pairs of pixels are looked up at once, which halves the time.
        low, high = table[:, None, :].astype(np.uint32), table[:, :, None].astype(np.uint32)
        self._pairs = (low | high << np.uint32(16)).reshape(_CHANNELS, _VALUES**2)
        mine = np.empty(wanted.shape, np.int16)
        self.write(noise, mine)
        return bool((mine.view(np.uint16) == wanted).all())

    def write(
        self,
        image: "Image.Image",
        out: "npt.NDArray[np.int16]",
        earlier: "tuple[Image.Image, npt.NDArray[np.int16]] | None" = None,
    ) -> None:
        """Write the bits of an image's patches as bfloat16, shape (patches, values).

        Args:
            image: Of this size.
            out: Where to.
            earlier: Another image with its patches, which are copied where both are equal.
        """
        import numpy as np  # noqa: PLC0415

        from cuaenv.frames.pillow import rgb_of  # noqa: PLC0415

        def looked_up(planes_CNHW: "npt.NDArray[np.uint8]") -> "npt.NDArray[Any]":
            pairs_CNHW = planes_CNHW.view("<u2")
            values = np.empty(pairs_CNHW.shape, np.uint32)
            for channel, table in enumerate(self._pairs):
                np.take(table, pairs_CNHW[channel], out=values[channel], mode="clip")
            return values.view(np.int16)

        cells, side_px = self._cells(out), self._side_px
        if earlier is None or earlier[0].size != image.size:
            self._arrange(rgb_of(image), cells, looked_up)
            return
        other, known = earlier
        out[...] = known
        for rows, columns, squares_NHWC in _changed(image, other, side_px):
            cells[rows, columns] = self._arranged(squares_NHWC, looked_up)

    def _cells(self, out: "npt.NDArray[Any]") -> "npt.NDArray[Any]":
        """Return patches by row and column of the squares that the model merges.

        One element is one row of a patch's pixels: numpy copies it at once.
        """
        merge, (_, rows, columns) = self._merge, self.grid_thw
        cells = out.reshape(rows // merge, columns // merge, merge, merge, _CHANNELS, self._repeats, -1)
        return cells.view(f"V{self._patch_px * out.itemsize}")

    def _arrange(self, rgb_HWC: "npt.NDArray[np.uint8]", cells: "npt.NDArray[Any]", convert: Any) -> None:
        """Write all squares, by rows, so that what is between pixels and patches stays in the processor's cache."""
        side_px = self._side_px
        for number, row in enumerate(cells):
            strip_HWC = rgb_HWC[number * side_px : (number + 1) * side_px]
            row[...] = self._arranged(strip_HWC.reshape(side_px, -1, side_px, 3).transpose(1, 0, 2, 3), convert)

    def _arranged(self, squares_NHWC: "npt.NDArray[np.uint8]", convert: Any) -> Any:
        """Return squares as an array like `_cells`: patches that the model merges one after the other, repeated."""
        import numpy as np  # noqa: PLC0415

        merge, patch_px = self._merge, self._patch_px
        planes_CNHW = convert(np.ascontiguousarray(squares_NHWC.transpose(3, 0, 1, 2)))
        rows = planes_CNHW.view(f"V{patch_px * planes_CNHW.itemsize}")
        return rows.reshape(_CHANNELS, -1, merge, patch_px, merge).transpose(1, 2, 4, 0, 3)[:, :, :, :, None]
