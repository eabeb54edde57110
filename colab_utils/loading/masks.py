"""Masks from their bits: dense ones, mirrored, and the mask targets of proposals.

What depends on the objects' crops alone is worked out on the CPU, in small tables. What looks at
pixels is a few operations over all objects at once, on the device that the bits are on, in chunks
of bounded memory.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise, repeat
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colab_utils.data.masks import number_within
from colab_utils.errors import ColabUtilsError

Ints = NDArray[np.int64]

CHUNK_BYTES = {"cpu": 64_000_000, "cuda": 256_000_000}  # of memory for what is worked on at once
# that a pixel takes then
DRAWN_BYTES = 64
SAMPLED_BYTES = 16


class MaskBits(NamedTuple):
    """The masks of T objects as in ``PackedMasks``, in tensors; ``crops`` and ``offsets`` stay on
    the CPU.
    """

    bits: Tensor
    """uint8 [bytes]: each mask's crop row by row, one bit a pixel, most significant bit first."""
    crops: Tensor
    """int32 [T, 4]: x0, y0, x1, y1 of each crop in pixels, half open."""
    offsets: Tensor
    """int64 [T + 1]: where each mask's bytes start in ``bits``."""


def split_masks(
    dense: Tensor, sizes: Sequence[Sequence[int]], counts: Sequence[int]
) -> list[Tensor]:
    """Flat memory as the dense masks of each image, uint8 [N, height, width]: views of it.

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
    """Dense masks of each image, on the device that the bits are on.

    Args:
        masks: The packed masks of all T objects.
        sizes: int [B, 2]: height and width of each image in pixels.
        counts: int [B]: objects of each image.

    Returns:
        uint8 [N, height, width] of 0 and 1 for each image; views of one piece of memory.

    Example:
        >>> crops = torch.tensor([[1, 0, 3, 2]], dtype=torch.int32)
        >>> masks = MaskBits(torch.tensor([0b10110000], dtype=torch.uint8), crops, torch.tensor([0, 1]))
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


def draw_masks(masks: MaskBits, dense: Sequence[Tensor], flips: Any = None) -> None:
    """Draw by numpy into the dense masks of each image, uint8 [N, height, width] on the CPU: many
    times as fast as ``_draw_rows`` there. Of the images that ``flips`` has, bool [B], the masks are
    mirrored left to right.
    """
    packed = masks.bits.numpy()
    objects = zip(masks.crops.tolist(), masks.offsets.tolist(), strict=False)
    for image, flip in zip(dense, repeat(False) if flips is None else flips, strict=False):
        # cleared when its turn comes: it is in the cache when it is drawn upon
        for mask in image.zero_().numpy():
            (left, top, right, bottom), start = next(objects)
            height = bottom - top
            width = right - left
            crop = np.unpackbits(packed[start:], count=height * width).reshape(height, width)
            if flip:  # by torch: numpy mirrors a byte at a time
                crop = torch.from_numpy(crop).flip(1).numpy()
                left = mask.shape[1] - right
            mask[top:bottom, left : left + width] = crop


def _draw_rows(masks: MaskBits, sizes: Ints, dense: Tensor) -> None:
    """Draw by torch, all objects' rows at once; ``sizes`` are those of each object's image,
    ``dense`` is flat.
    """
    left, top, right, bottom = masks.crops.numpy().astype(np.int64).T
    # each row of each object: its object, its place in the crop, its width
    of = np.repeat(np.arange(len(top)), bottom - top)
    row = number_within(bottom - top)
    wide = (right - left)[of]
    begins = np.cumsum(wide) - wide
    areas = sizes.prod(1)
    to = (np.cumsum(areas) - areas)[of] + (top[of] + row) * sizes[of, 1] + left[of]
    # with a pixel's number among all drawn ones: its bit, and its place
    table = np.stack([wide, masks.offsets.numpy()[of] * 8 + row * wide - begins, to - begins])
    bits = masks.bits
    most = CHUNK_BYTES[masks.bits.device.type] // DRAWN_BYTES
    cuts = np.searchsorted(begins, np.arange(0, wide.sum() + most, most))
    for first, last in pairwise(np.unique(cuts).tolist()):
        part = send(table[:, first:last], bits.device)
        begin = int(begins[first])
        length = int(wide[first:last].sum())
        pixel = torch.arange(begin, begin + length, device=bits.device)
        bit, place = part[1:].repeat_interleave(part[0], 1, output_size=length).add_(pixel)
        dense[place] = (bits[bit >> 3] >> (7 - (bit & 7)).byte()) & 1


@torch.no_grad()
def sample_masks(
    masks: MaskBits,
    objects: Tensor,
    boxes: Tensor,
    *,
    sizes: Tensor,
    counts: Tensor,
    flips: Sequence[bool],
    to_sizes: Sequence[Sequence[int]],
    size: int = 28,
) -> Tensor:
    """Mask targets of R proposals, straight from the bits: memory follows the boxes, not the
    images.

    Bilinear sampling on a regular grid is separable: a target is ``rows @ crop @ columns.T``, where
    a row of either matrix averages the pixels that its samples read.

    Source: ``project_masks_on_boxes`` in torchvision's ``roi_heads``, which calls ``roi_align``
    (sampling ratio -1, not aligned): samples more than a pixel outside the image are 0, others
    outside read its border. Equal within 1e-5 to what they make of dense masks.

    Args:
        masks: The packed masks of all T objects.
        objects: int64 [R]: the object, among the T, of each proposal.
        boxes: float32 [R, 4]: x0, y0, x1, y1 of each proposal in pixels of the image after
            mirroring and resizing. Both are read on the CPU, so if they lie on a GPU this waits for
            it, once.
        sizes: int [B, 2]: height and width of each image in pixels, as stored. On the CPU, as all
            tables here.
        counts: int [B]: objects of each image.
        flips: bool [B]: the images that are mirrored left to right.
        to_sizes: int [B, 2]: height and width in pixels that each image is resized to, its masks by
            nearest neighbour.
        size: Rows and columns of a target; 28 by default, as in Mask R-CNN.

    Returns:
        float32 [R, size, size] of 0 to 1, on the device that the bits are on.

    Raises:
        ColabUtilsError: if a box is not finite.

    Example:
        >>> crops = torch.tensor([[1, 0, 3, 2]], dtype=torch.int32)
        >>> masks = MaskBits(torch.tensor([0b10110000], dtype=torch.uint8), crops, torch.tensor([0, 1]))
        >>> box, sizes = torch.tensor([[0.0, 0.0, 4.0, 2.0]]), torch.tensor([[2, 4]])
        >>> batch = {"sizes": sizes, "counts": torch.tensor([1]), "flips": [False], "to_sizes": [(2, 4)]}
        >>> sample_masks(masks, torch.tensor([0]), box, **batch, size=2).tolist()
        [[[0.625, 0.125], [0.75, 0.25]]]
    """
    of = objects.cpu().numpy()
    corners = boxes.float().cpu().numpy()
    if not np.isfinite(corners).all():
        raise ColabUtilsError(
            "expected finite boxes as proposals, found others. Lower the learning rate."
        )
    images = np.repeat(np.arange(len(counts)), counts)[of]
    crops, offsets = (np.asarray(part, np.int64)[of] for part in (masks.crops, masks.offsets[:-1]))
    starts = corners[:, :2]
    flipped = np.array(flips)[images]
    stored, limits = (np.asarray(part, np.int64)[images, ::-1] for part in (sizes, to_sizes))
    # as nearest_indices works it out
    shrinks = stored.astype(np.float32) / limits.astype(np.float32)
    # as roi_align works it out, in float32, so that the samples lie where its own do
    sides = np.maximum(corners[:, 2:] - starts, np.float32(1))
    steps = sides / np.float32(size)
    grids = np.stack([starts, steps, np.ceil(steps), limits, shrinks], 1).astype(np.float32)
    # the part of each crop that samples can read, as stored
    lows, lasts = (
        edge.clip(0, limits - 1).astype(np.int64) for edge in (starts, starts + sides + 1)
    )
    lows, highs = ((edge.astype(np.float32) * shrinks).astype(np.int64) for edge in (lows, lasts))
    highs += 1
    lows[flipped, 0], highs[flipped, 0] = (stored - highs)[flipped, 0], (stored - lows)[flipped, 0]
    lows = np.maximum(lows, crops[:, :2])
    highs = np.minimum(highs, crops[:, 2:])
    signs = np.where(flipped, -1, 1)

    device = masks.bits.device
    targets = torch.zeros((len(of), size, size), dtype=torch.float32, device=device)
    with torch.autocast(device.type, enabled=False):  # half precision would round the weights
        most = CHUNK_BYTES[device.type] // SAMPLED_BYTES
        for row, low, span in _cut_chunks(
            lows, highs, grids[:, 2].astype(np.int64), size, pixels=most
        ):
            crop = crops[row]
            (x, y) = low.T
            stride = crop[:, 2] - crop[:, 0]
            first = offsets[row] * 8 + (y - crop[:, 1]) * stride + x - crop[:, 0]
            across = np.stack(
                [signs[row], np.where(flipped[row], stored[row, 0] - 1 - x, -x), span[:, 0]]
            )
            down = np.stack([np.ones_like(y), -y, span[:, 1]])
            pixels = _read_pixels(masks.bits, np.stack([first, stride]), span.max(0).tolist())
            both = np.concatenate([across, down], 1)  # in one go: a GPU has fewer calls to wait for
            weights = _weigh_pixels(
                np.concatenate([*grids[row].transpose(2, 0, 1)]).T,
                both,
                (size, max(pixels.shape[1:])),
                device,
            )
            columns, rows = (
                part[..., :count]
                for part, count in zip(weights.chunk(2), pixels.shape[:0:-1], strict=True)
            )
            targets.index_add_(0, send(row, device), rows @ (pixels @ columns.mT))
    return targets


def _cut_chunks(
    lows: Ints, highs: Ints, grids: Ints, size: int, *, pixels: int
) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Proposals of like sizes together, the largest in blocks of rows: their numbers, first pixels
    (x, y), lengths.
    """
    width, height = (highs - lows).clip(0).T
    most = (pixels // width.clip(1)).clip(1)
    blocks = -(-height // most) * (width > 0)
    row = np.repeat(np.arange(len(lows)), blocks)
    low = lows[row]
    span = np.stack([width, most], 1)[row]
    low[:, 1] += number_within(blocks) * most[row]
    span[:, 1] = np.minimum(span[:, 1], highs[row, 1] - low[:, 1])
    order = np.argsort(span.max(1))
    while len(order):
        padded = np.maximum.accumulate(span[order])
        samples = np.maximum.accumulate(grids[row[order]])
        cost = (padded.prod(1) + size * (padded + 4 * samples).sum(1)) * np.arange(
            1, len(order) + 1
        )
        chunk, order = np.split(order, [max(1, int(np.searchsorted(cost, pixels, "right")))])
        yield row[chunk], low[chunk], span[chunk]


def _read_pixels(bits: Tensor, lines: Ints, shape: tuple[int, int]) -> Tensor:
    """Blocks of pixels: float32 [k, height, width or up to 7 more] of 0 and 1; what is beyond a
    crop is anything.

    ``lines`` is [2, k]: each block's first bit, and how many bits further its next row starts.
    """
    first, stride = send(lines, bits.device)[..., None]
    start = first + stride * torch.arange(shape[1], device=bits.device)
    places = (start >> 3)[..., None] + torch.arange(-(-shape[0] // 8) + 1, device=bits.device)
    pairs = bits[places.clamp_(max=len(bits) - 1)].int()
    # a row starts at any bit of a byte: move it to the first
    lined = ((pairs[..., :-1] << 8 | pairs[..., 1:]) >> (8 - (start & 7))[..., None]) & 255
    numbers = torch.arange(256, device=bits.device)
    shifts = torch.arange(7, -1, -1, device=bits.device)
    return torch.nn.functional.embedding(lined, ((numbers[:, None] >> shifts) & 1).float()).flatten(
        2
    )


def _weigh_pixels(
    grid: NDArray[np.float32], reach: Ints, shape: tuple[int, int], device: torch.device
) -> Tensor:
    """What each pixel of a block counts in each row, or column, of a target: float32 [k, size,
    pixels].

    Args:
        grid: [5, k]: where the box starts, the side of a bin, samples in a bin, pixels of the
            image, and how many stored pixels go into one of these.
        reach: [3, k]: pixel p of the stored image is ``first * p + second`` of the block, if that
            is below ``third``.
        shape: size and pixels: those of the longest block, or more.
        device: where to make it.
    """
    start, side, count, limit, shrink = send(grid, device)[..., None, None]
    sign, edge, length = send(reach, device)[..., None, None]
    number = torch.arange(int(grid[2].max()), dtype=torch.float32, device=device) + 0.5
    place = (
        start
        + torch.arange(shape[0], dtype=torch.float32, device=device)[:, None] * side
        + number * side / count
    )
    weight = ((number < count) & (place >= -1) & (place <= limit)) / count
    place = place.clamp_(min=0).minimum(limit - 1)
    share = place.frac()
    weights = torch.zeros((len(start), *shape), dtype=torch.float32, device=device)
    for pixel, part in ((place.long(), 1 - share), (place.long() + 1, share)):
        at = sign * (pixel * shrink).long() + edge
        inside = (at >= 0) & (at < length)
        weights.scatter_add_(2, at.clamp_(0, shape[1] - 1), weight * part * inside)
    return weights


def flip_boxes(boxes: Tensor, widths: Tensor | float) -> Tensor:
    """Boxes mirrored left to right: float [..., 4], x0, y0, x1, y1 in pixels; ``widths``: of the
    images, one or [...].

    Example:
        >>> flip_boxes(torch.tensor([[1.0, 0.0, 3.0, 2.0]]), 10).tolist()
        [[7.0, 0.0, 9.0, 2.0]]
    """
    x0, y0, x1, y1 = boxes.unbind(-1)
    return torch.stack([widths - x1, y0, widths - x0, y1], -1)


def send(values: Tensor | NDArray[Any], device: torch.device | str) -> Tensor:
    """A tensor, or a numpy array, on a device; not copied where it is there already.

    To a GPU it goes through pinned memory, and the call returns at once: a copy from other memory
    would wait for all that the GPU still has to do, and leave it without work until the next call
    arrives. Source: ``cudaMemcpyAsync`` in NVIDIA's CUDA runtime API, "API synchronization
    behavior".

    Example:
        >>> send(np.array([1, 2]), "cpu")
        tensor([1, 2])
    """
    tensor = (
        torch.from_numpy(np.ascontiguousarray(values)) if isinstance(values, np.ndarray) else values
    )
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
