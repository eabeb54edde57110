"""Dense masks, expanded from the bits of packed masks.

The pixels are written on the device that holds the bits: on the CPU one mask after the other, on a
GPU by a few operations over all objects at once, in chunks of bounded memory. The small tables for
these operations are computed on the CPU.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colab_utils.data.masks import PackedMasks, number_within
from colab_utils.loading.devices import send

Ints = NDArray[np.int64]

# A chunk takes at most this many bytes of memory on each kind of device.
CHUNK_BYTES = {"cpu": 64_000_000, "cuda": 256_000_000}
# A pixel takes this many bytes of memory while it is drawn on a GPU.
DRAWN_BYTES = 64


class MaskBits(NamedTuple):
    """The packed masks of T objects as tensors, like ``PackedMasks``.

    ``crops`` and ``offsets`` stay on the CPU.
    """

    bits: Tensor
    """uint8 [bytes]: the pixels of each mask's crop, row by row. Each pixel takes one bit, and the
    highest bit of a byte comes first.
    """
    crops: Tensor
    """int32 [T, 4]: x0, y0, x1, y1 of each crop in pixels. x1 and y1 lie outside the crop."""
    offsets: Tensor
    """int64 [T + 1]: the start of each mask's bytes in ``bits``, and the end of the last one."""


def split_masks(
    dense: Tensor, sizes: Sequence[Sequence[int]], counts: Sequence[int]
) -> list[Tensor]:
    """Split flat memory into the dense masks of each image, uint8 [N, height, width], as views.

    Example:
        >>> [part.shape for part in split_masks(torch.zeros(20), [(2, 4), (3, 4)], [1, 1])]
        [torch.Size([1, 2, 4]), torch.Size([1, 3, 4])]
    """
    shapes = [(count, *size) for count, size in zip(counts, sizes, strict=True)]
    parts = dense.split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def expand_masks(
    masks: MaskBits, sizes: Sequence[Sequence[int]], counts: Sequence[int]
) -> list[Tensor]:
    """Expand packed masks into the dense masks of each image, on the device of the bits.

    Args:
        masks: The packed masks of all T objects.
        sizes: int [B, 2]: height and width of each image in pixels.
        counts: int [B]: objects of each image.

    Returns:
        uint8 [N, height, width] of 0 and 1 for each image, as views of one tensor.

    Example:
        >>> crops = torch.tensor([[1, 0, 3, 2]], dtype=torch.int32)
        >>> bits = torch.tensor([0b10110000], dtype=torch.uint8)
        >>> masks = MaskBits(bits, crops, torch.tensor([0, 1]))
        >>> expand_masks(masks, [(2, 4)], [1])[0].tolist()
        [[[0, 1, 0, 0], [0, 1, 1, 0]]]
    """
    total = sum(count * prod(size) for count, size in zip(counts, sizes, strict=True))
    dense = torch.empty(total, dtype=torch.uint8, device=masks.bits.device)
    images = split_masks(dense, sizes, counts)
    if dense.is_cpu:
        draw_masks(masks, images)
    else:
        _draw_rows(masks, np.array(sizes).reshape(-1, 2).repeat(counts, 0), dense.zero_())
    return images


def unpack_masks(packed: PackedMasks, height: int, width: int) -> NDArray[np.uint8]:
    """Unpack the masks of one image to dense ones: uint8 [N, height, width] of 0 and 1.

    Example:
        >>> from colab_utils.data.masks import pack_pixels
        >>> packed = pack_pixels([np.array([[0, 0, 1], [0, 1, 1]])])
        >>> unpack_masks(packed, 2, 3).tolist()
        [[[0, 0, 1], [0, 1, 1]]]
    """
    dense = np.empty((len(packed.crops), height, width), np.uint8)
    draw_masks(packed, [dense])
    return dense


def draw_masks(packed: MaskBits | PackedMasks, dense: Iterable[Tensor | NDArray[np.uint8]]) -> None:
    """Draw packed masks into the dense masks of each image, on the CPU.

    The dense masks, uint8 [N, height, width], may hold anything before.
    """
    bits = np.asarray(packed.bits)
    objects = zip(packed.crops.tolist(), packed.offsets.tolist(), strict=False)
    for image in dense:
        pixels = np.asarray(image)
        # Each image is cleared just before it is drawn, so that drawing finds it in the cache.
        pixels.fill(0)
        for mask in pixels:
            (left, top, right, bottom), start = next(objects)
            height = bottom - top
            width = right - left
            crop = np.unpackbits(bits[start:], count=height * width)
            mask[top:bottom, left:right] = crop.reshape(height, width)


def _draw_rows(masks: MaskBits, sizes: Ints, dense: Tensor) -> None:
    """Draw packed masks into flat dense masks on a GPU, the rows of many objects at once.

    ``sizes``, [T, 2], holds the height and width of each object's image.
    """
    bits = masks.bits
    table = _list_rows(masks, sizes)
    ends = np.cumsum(table[0])
    begins = ends - table[0]
    chunk_pixels = CHUNK_BYTES[bits.device.type] // DRAWN_BYTES
    cuts = np.searchsorted(begins, np.arange(0, table[0].sum() + chunk_pixels, chunk_pixels))
    for first, last in pairwise(np.unique(cuts).tolist()):
        part = send(table[:, first:last], bits.device)
        begin = int(begins[first])
        length = int(ends[last - 1]) - begin
        pixel = torch.arange(begin, begin + length, device=bits.device)
        bit, place = part[1:].repeat_interleave(part[0], 1, output_size=length).add_(pixel)
        dense[place] = (bits[bit >> 3] >> (7 - (bit & 7)).byte()) & 1


def _list_rows(masks: MaskBits, sizes: Ints) -> Ints:
    """List the rows of all objects.

    Returns:
        int64 [3, rows]: the width of each row, and two offsets. All pixels of all rows are numbered
        in order. The number of a pixel plus the first offset is its bit in the packed masks. The
        number plus the second offset is its place in the dense masks.
    """
    left, top, right, bottom = masks.crops.numpy().astype(np.int64).T
    heights = bottom - top
    owner = np.repeat(np.arange(len(top)), heights)
    row = number_within(heights)
    width = (right - left)[owner]
    begins = np.cumsum(width) - width
    areas = sizes.prod(1)
    image_starts = (np.cumsum(areas) - areas)[owner]
    places = image_starts + (top[owner] + row) * sizes[owner, 1] + left[owner]
    first_bits = masks.offsets.numpy()[owner] * 8 + row * width
    return np.stack([width, first_bits - begins, places - begins])
