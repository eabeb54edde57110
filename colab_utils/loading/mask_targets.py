"""Mask targets of proposals for Mask R-CNN's loss, sampled from the bits of packed masks.

Small tables of the boxes are computed on the CPU. The pixels are read on the device of the bits, by
a few operations over many proposals at once, in chunks of bounded memory.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colab_utils.data.masks import number_within
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.masks import CHUNK_BYTES, Ints, MaskBits, send

SAMPLED_BYTES = 16
"""Sampling takes this many bytes of memory for each pixel."""


class _Proposals(NamedTuple):
    """Tables of R proposals, on the CPU."""

    crops: Ints
    """int64 [R, 4]: x0, y0, x1, y1 of each mask's crop in stored pixels."""
    first_bits: Ints
    """int64 [R]: place of each mask's first bit among all bits."""
    stored: Ints
    """int64 [R, 2]: width and height of each stored image in pixels."""
    flipped: NDArray[np.bool_]
    """bool [R]: whether the image is mirrored."""
    sides: NDArray[np.float32]
    """float32 [R, 2]: width and height of each box in pixels, at least 1."""
    grids: NDArray[np.float32]
    """float32 [R, 5, 2]: the five values of ``grid`` in `_weigh_pixels`, for x and for y."""

    def take(self, rows: Ints) -> "_Proposals":
        tables: list[Any] = [table[rows] for table in self]
        return _Proposals(*tables)


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
    """Return the mask targets of R proposals, sampled from the bits.

    The memory grows with the size of the boxes, not of the images. Bilinear sampling on a regular
    grid is separable: a target is ``rows @ crop @ columns.T``. For each row of the target, ``rows``
    holds the weights of the crop's rows. For each column of the target, ``columns`` holds the
    weights of the crop's columns.

    Source: ``project_masks_on_boxes`` in torchvision's ``roi_heads``, which calls ``roi_align``
    (sampling ratio -1, not aligned). Samples more than one pixel outside the image are 0. Samples
    nearer to the image read its border. The result equals torchvision's on dense masks within 1e-5.

    Args:
        masks: The packed masks of all T objects.
        objects: int64 [R]: index of each proposal's object among the T.
        boxes: float32 [R, 4]: x0, y0, x1, y1 of each proposal, in pixels of the mirrored and
            resized image. ``objects`` and ``boxes`` are read on the CPU. If they are on a GPU, the
            call waits for the GPU.
        sizes: int [B, 2]: height and width of each stored image in pixels. ``sizes``, ``counts``,
            ``flips`` and ``to_sizes`` are on the CPU.
        counts: int [B]: objects of each image.
        flips: bool [B]: whether each image is mirrored left to right.
        to_sizes: int [B, 2]: height and width in pixels of each image after resizing. Masks are
            resized by nearest neighbour.
        size: Rows and columns of a target. Default: 28, as in Mask R-CNN.

    Returns:
        float32 [R, size, size] from 0 to 1, on the device of the bits.

    Raises:
        ColabUtilsError: A box is not finite.

    Example:
        >>> crops = torch.tensor([[1, 0, 3, 2]], dtype=torch.int32)
        >>> bits = torch.tensor([0b10110000], dtype=torch.uint8)
        >>> masks = MaskBits(bits, crops, torch.tensor([0, 1]))
        >>> box, sizes = torch.tensor([[0.0, 0.0, 4.0, 2.0]]), torch.tensor([[2, 4]])
        >>> batch = {"sizes": sizes, "counts": torch.tensor([1]), "flips": [False]}
        >>> batch["to_sizes"] = [(2, 4)]
        >>> sample_masks(masks, torch.tensor([0]), box, **batch, size=2).tolist()
        [[[0.625, 0.125], [0.75, 0.25]]]
    """
    proposals = _tabulate(masks, objects, boxes, sizes, counts, flips, to_sizes, size)
    lows, highs = _find_windows(proposals)
    device = masks.bits.device
    targets = torch.zeros((len(lows), size, size), dtype=torch.float32, device=device)
    chunk_pixels = CHUNK_BYTES[device.type] // SAMPLED_BYTES
    bins = proposals.grids[:, 2].astype(np.int64)
    # Half precision would round the weights.
    with torch.autocast(device.type, enabled=False):
        for row, low, span in _cut_chunks(lows, highs, bins, size, pixels=chunk_pixels):
            part = _sample_chunk(masks.bits, proposals.take(row), low, span, size)
            targets.index_add_(0, send(row, device), part)
    return targets


def _tabulate(
    masks: MaskBits,
    objects: Tensor,
    boxes: Tensor,
    sizes: Tensor,
    counts: Tensor,
    flips: Sequence[bool],
    to_sizes: Sequence[Sequence[int]],
    size: int,
) -> _Proposals:
    corners = boxes.float().cpu().numpy()
    if not np.isfinite(corners).all():
        raise ColabUtilsError("A proposal has a box that is not finite. Lower the learning rate.")
    numbers = objects.cpu().numpy()
    images = np.repeat(np.arange(len(counts)), counts)[numbers]
    stored = np.asarray(sizes, np.int64)[images, ::-1]
    limits = np.asarray(to_sizes, np.int64)[images, ::-1]
    # `nearest_indices` computes the same quotient.
    shrinks = stored.astype(np.float32) / limits.astype(np.float32)
    # `roi_align` computes in float32 too, so that both sample at the same places.
    starts = corners[:, :2]
    sides = np.maximum(corners[:, 2:] - starts, np.float32(1))
    steps = sides / np.float32(size)
    grids = np.stack([starts, steps, np.ceil(steps), limits, shrinks], 1).astype(np.float32)
    return _Proposals(
        crops=np.asarray(masks.crops, np.int64)[numbers],
        first_bits=np.asarray(masks.offsets, np.int64)[numbers] * 8,
        stored=stored,
        flipped=np.array(flips)[images],
        sides=sides,
        grids=grids,
    )


def _find_windows(proposals: _Proposals) -> tuple[Ints, Ints]:
    """Find the part of each crop that samples can read, in stored pixels.

    Returns:
        int64 [R, 2]: x and y of the first pixel. int64 [R, 2]: x and y after the last pixel.
    """
    starts, _, _, limits, shrinks = proposals.grids.swapaxes(0, 1)
    firsts = np.clip(starts, 0, limits - 1).astype(np.int64)
    lasts = np.clip(starts + proposals.sides + 1, 0, limits - 1).astype(np.int64)
    lows = (firsts.astype(np.float32) * shrinks).astype(np.int64)
    highs = (lasts.astype(np.float32) * shrinks).astype(np.int64) + 1
    flipped = proposals.flipped
    mirrored = proposals.stored[flipped, 0]
    left = mirrored - highs[flipped, 0]
    highs[flipped, 0] = mirrored - lows[flipped, 0]
    lows[flipped, 0] = left
    return np.maximum(lows, proposals.crops[:, :2]), np.minimum(highs, proposals.crops[:, 2:])


def _sample_chunk(bits: Tensor, proposals: _Proposals, low: Ints, span: Ints, size: int) -> Tensor:
    """Return what each of k blocks of pixels adds to its target, float32 [k, size, size].

    ``low[i]`` is x and y of the first pixel of block i. ``span[i]`` is its width and height.
    """
    x, y = low.T
    crops = proposals.crops
    stride = crops[:, 2] - crops[:, 0]
    first = proposals.first_bits + (y - crops[:, 1]) * stride + x - crops[:, 0]
    pixels = _read_pixels(bits, np.stack([first, stride]), span.max(0).tolist())
    height, width = pixels.shape[1:]
    # The weights of both axes are computed in one call, because each call costs time on a GPU.
    grid = np.concatenate([*proposals.grids.transpose(2, 0, 1)]).T
    reach = _find_reach(proposals, low, span)
    weights = _weigh_pixels(grid, reach, (size, max(height, width)), bits.device)
    columns, rows = weights.chunk(2)
    return rows[..., :height] @ (pixels @ columns[..., :width].mT)


def _cut_chunks(
    lows: Ints, highs: Ints, grids: Ints, size: int, *, pixels: int
) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Group proposals of similar size into chunks of at most ``pixels`` pixels.

    A proposal that is too large for a chunk is cut into blocks of rows. A block that is still too
    large gets a chunk of its own.

    Yields:
        Three arrays with a row for each block of a chunk: the number of the block's proposal; x and
        y of its first pixel; its width and height.
    """
    width, height = (highs - lows).clip(0).T
    block_rows = (pixels // width.clip(1)).clip(1)
    blocks = -(-height // block_rows) * (width > 0)
    row = np.repeat(np.arange(len(lows)), blocks)
    low = lows[row]
    span = np.stack([width, block_rows], 1)[row]
    low[:, 1] += number_within(blocks) * block_rows[row]
    span[:, 1] = np.minimum(span[:, 1], highs[row, 1] - low[:, 1])
    order = np.argsort(span.max(1))
    while len(order):
        padded = np.maximum.accumulate(span[order])
        samples = np.maximum.accumulate(grids[row[order]])
        cost = (padded.prod(1) + size * (padded + 4 * samples).sum(1)) * np.arange(
            1, len(order) + 1
        )
        count = max(1, int(np.searchsorted(cost, pixels, "right")))
        chunk = order[:count]
        order = order[count:]
        yield row[chunk], low[chunk], span[chunk]


def _find_reach(proposals: _Proposals, low: Ints, span: Ints) -> Ints:
    """Return the ``reach`` of k blocks for `_weigh_pixels`, int64 [3, 2k]: first x, then y."""
    x, y = low.T
    flipped = proposals.flipped
    signs = np.where(flipped, -1, 1)
    edges = np.where(flipped, proposals.stored[:, 0] - 1 - x, -x)
    across = np.stack([signs, edges, span[:, 0]])
    down = np.stack([np.ones_like(y), -y, span[:, 1]])
    return np.concatenate([across, down], 1)


def _read_pixels(bits: Tensor, lines: Ints, shape: tuple[int, int]) -> Tensor:
    """Return blocks of pixels, each 0 or 1, as float32 [k, height, width].

    The width is rounded up to a multiple of 8. Values outside the crop are undefined. ``lines`` is
    [2, k]: the place of each block's first bit, and the number of bits from the start of a row to
    the start of the next.
    """
    first, stride = send(lines, bits.device)[..., None]
    start = first + stride * torch.arange(shape[1], device=bits.device)
    places = (start >> 3)[..., None] + torch.arange(-(-shape[0] // 8) + 1, device=bits.device)
    pairs = bits[places.clamp_(max=len(bits) - 1)].int()
    # A row may start inside a byte, so its bits are shifted to the start of a byte.
    lined = ((pairs[..., :-1] << 8 | pairs[..., 1:]) >> (8 - (start & 7))[..., None]) & 255
    numbers = torch.arange(256, device=bits.device)
    shifts = torch.arange(7, -1, -1, device=bits.device)
    bits_of_bytes = ((numbers[:, None] >> shifts) & 1).float()
    return torch.nn.functional.embedding(lined, bits_of_bytes).flatten(2)


def _weigh_pixels(
    grid: NDArray[np.float32], reach: Ints, shape: tuple[int, int], device: torch.device
) -> Tensor:
    """Return the weight of each pixel of a block in each row, or column, of a target.

    Args:
        grid: [5, k], along one axis: start of the box, side of a bin, samples in a bin, pixels of
            the resized image, and stored pixels for each resized pixel.
        reach: [3, k]: sign, edge and length. Pixel p of the stored image is pixel
            ``sign * p + edge`` of the block, if that is from 0 to ``length - 1``.
        shape: ``size`` and ``pixels`` of the result. No side of a block is longer than ``pixels``.
        device: Device of the weights.

    Returns:
        float32 [k, size, pixels].
    """
    start, side, count, limit, shrink = send(grid, device)[..., None, None]
    sign, edge, length = send(reach, device)[..., None, None]
    number = torch.arange(int(grid[2].max()), dtype=torch.float32, device=device) + 0.5
    place = torch.arange(shape[0], dtype=torch.float32, device=device)[:, None]
    place = start + place * side + number * side / count
    weight = ((number < count) & (place >= -1) & (place <= limit)) / count
    place = place.clamp_(min=0).minimum(limit - 1)
    share = place.frac()
    weights = torch.zeros((len(start), *shape), dtype=torch.float32, device=device)
    for pixel, part in ((place.long(), 1 - share), (place.long() + 1, share)):
        at = sign * (pixel * shrink).long() + edge
        inside = (at >= 0) & (at < length)
        weights.scatter_add_(2, at.clamp_(0, shape[1] - 1), weight * part * inside)
    return weights
