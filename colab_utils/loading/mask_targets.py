"""Mask targets of proposals, sampled straight from the masks' bits.

What depends on the boxes alone is worked out on the CPU, in small tables. What looks at pixels is a
few operations over many proposals at once, on the device that the bits are on, in chunks of bounded
memory.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colab_utils.data.masks import number_within
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.masks import CHUNK_BYTES, Ints, MaskBits, send

SAMPLED_BYTES = 16


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
