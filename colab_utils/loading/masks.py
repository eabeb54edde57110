"""Masks from their bits: dense ones, mirrored and resized, and the mask targets of proposals.

What depends on the objects' crops alone is worked out on the CPU, in small tables. What looks at pixels is a few
operations over all objects at once, on the device that the bits are on, in chunks of bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.ops import roi_align

from colab_utils.data.masks import nearest_indices, number_within
from colab_utils.errors import ColabUtilsError

__all__ = ["MaskBits", "expand_masks", "flip_boxes", "sample_masks", "send"]

Ints = NDArray[np.int64]

CHUNK_BYTES = 64_000_000  # of memory for what is worked on at once
DRAWN_BYTES, SAMPLED_BYTES = 64, 8  # that a pixel takes then


class MaskBits(NamedTuple):
    """The masks of T objects as in ``PackedMasks``, in tensors; ``crops`` and ``offsets`` stay on the CPU."""

    bits: Tensor
    """uint8 [bytes]: each mask's crop row by row, one bit a pixel, most significant bit first."""
    crops: Tensor
    """int32 [T, 4]: x0, y0, x1, y1 of each crop in pixels, half open."""
    offsets: Tensor
    """int64 [T + 1]: where each mask's bytes start in ``bits``."""


class _Tables(NamedTuple):
    """What is known of B images and their T objects without a look at the pixels."""

    crops: Ints
    offsets: Ints
    sizes: Ints
    to_sizes: Ints
    counts: Ints
    flips: NDArray[np.bool_]
    """[B]: whether each image is mirrored."""
    images: Ints
    """[T]: the image of each object."""


def _read_tables(masks: MaskBits, sizes: Any, counts: Any, flips: Any, to_sizes: Any = None) -> _Tables:
    crops, offsets, numbers = (np.asarray(part, np.int64) for part in (masks.crops, masks.offsets, counts))
    sizes = np.asarray(sizes, np.int64).reshape(-1, 2)
    targets = sizes if to_sizes is None else np.asarray(to_sizes, np.int64).reshape(-1, 2)
    flips = np.zeros(len(sizes), np.bool_) if flips is None else np.asarray(flips, np.bool_)
    lengths = [len(sizes), len(targets), len(flips), len(numbers)]
    if len(set(lengths)) > 1 or not numbers.sum() == len(crops) == len(offsets) - 1:
        raise ColabUtilsError(
            f"expected tables of one batch, found sizes, sizes to resize to, flips and counts of {lengths} images, and "
            f"crops of {len(crops)} objects where the counts say {numbers.sum()}. Give those of one batch."
        )
    images = np.repeat(np.arange(len(sizes)), numbers)
    sides, room = crops[:, 2:] - crops[:, :2], np.diff(offsets)
    # a place outside would be written into another mask, or on a GPU end the process
    good = ((crops[:, :2] >= 0) & (sides >= 0) & (crops[:, 2:] <= sizes[images, ::-1])).all(1)
    good &= (offsets[:-1] >= 0) & (offsets[1:] <= len(masks.bits)) & (room * 8 >= sides.prod(1))
    if not good.all():
        bad = int(good.argmin())
        height, width = sizes[images[bad]].tolist()
        raise ColabUtilsError(
            f"expected masks inside their images, found one of {room[bad]} bytes from (x, y) "
            f"{tuple(crops[bad, :2].tolist())} to {tuple(crops[bad, 2:].tolist())} in an image {width} wide and "
            f"{height} high. Make the shards again."
        )
    return _Tables(crops, offsets, sizes, targets, numbers, flips, images)


def expand_masks(
    masks: MaskBits,
    sizes: Tensor | Sequence[Sequence[int]],
    counts: Tensor | Sequence[int],
    *,
    flips: Tensor | Sequence[bool] | None = None,
    to_sizes: Tensor | Sequence[Sequence[int]] | None = None,
    out: Tensor | None = None,
) -> list[Tensor]:
    """Dense masks of each image, on the device that the bits are on; first mirrored, then resized.

    Source: ``torch.nn.functional.interpolate(mode="nearest")`` as torchvision's ``GeneralizedRCNNTransform`` calls
    it; the masks equal its own bit for bit.

    Args:
        masks: The packed masks of all T objects.
        sizes: int [B, 2]: height and width of each image in pixels, as stored. On the CPU, as all tables here.
        counts: int [B]: objects of each image.
        flips: bool [B]: the images to mirror left to right; none by default.
        to_sizes: int [B, 2]: height and width in pixels to resize to; the stored sizes by default.
        out: uint8 [bytes] on the device of the bits: memory to use again, of at least a byte for each pixel of the
            dense masks; what an earlier call put there is lost. New memory by default.

    Returns:
        uint8 [N, height, width] of 0 and 1 for each image; views of one piece of memory.

    Raises:
        ColabUtilsError: if the tables are not of one batch, a mask lies outside its image, or ``out`` is too small.

    Example:
        >>> crops = torch.tensor([[1, 0, 3, 2]], dtype=torch.int32)
        >>> masks = MaskBits(torch.tensor([0b10110000], dtype=torch.uint8), crops, torch.tensor([0, 1]))
        >>> expand_masks(masks, [(2, 4)], [1])[0].tolist()
        [[[0, 1, 0, 0], [0, 1, 1, 0]]]
        >>> expand_masks(masks, [(2, 4)], [1], flips=[True], to_sizes=[(1, 8)])[0].tolist()
        [[[0, 0, 0, 0, 1, 1, 0, 0]]]
    """
    tables = _read_tables(masks, sizes, counts, flips, to_sizes)
    shapes = [(count, *size) for count, size in zip(tables.counts.tolist(), tables.to_sizes.tolist(), strict=True)]
    numels = [prod(shape) for shape in shapes]
    device = masks.bits.device
    if out is not None and len(out) < sum(numels):
        raise ColabUtilsError(f"expected {sum(numels)} bytes for the masks, found {len(out)}. Give a larger `out`.")
    if out is not None:
        dense = out[: sum(numels)]
    elif device.type == "cpu":
        dense = torch.from_numpy(np.zeros(sum(numels), np.uint8))  # in huge pages, which torch does not ask for
    else:
        dense = torch.zeros(sum(numels), dtype=torch.uint8, device=device)
    images = [part.view(shape) for part, shape in zip(dense.split(numels), shapes, strict=True)]
    places = [_place_objects(tables, image) for image in range(len(images))]
    if device.type == "cpu":
        # cleared when its turn comes: it is in the cache when it is drawn upon
        _draw_objects(
            masks.bits, tables, places, (image.numpy() if out is None else image.zero_().numpy() for image in images)
        )
    else:
        if out is not None:
            dense.zero_()
        widths, areas = tables.to_sizes[tables.images, 1], tables.to_sizes.prod(1)[tables.images]
        corners = np.concatenate([np.zeros((0, 4), np.int64), *(place.corners for place in places)])
        _draw_rows(masks.bits, tables, places, corners, np.arange(len(areas)), np.cumsum(areas) - areas, widths, dense)
    return images


class _Places(NamedTuple):
    """Which stored pixels an image shows after mirroring and resizing, and where its N objects lie then."""

    columns: Ints
    """[width]: the stored column of each column."""
    rows: Ints
    """[height]: the stored row of each row."""
    corners: Ints
    """[N, 4]: x0, y0, x1, y1 of each object, half open."""


def _place_objects(tables: _Tables, image: int) -> _Places:
    (height, width), (to_height, to_width) = tables.sizes[image].tolist(), tables.to_sizes[image].tolist()
    rows, columns = nearest_indices(height, to_height), nearest_indices(width, to_width)
    corners = tables.crops[tables.images == image]
    if tables.flips[image]:
        corners[:, ::2] = width - corners[:, 2::-2]
    corners[:, ::2] = np.searchsorted(columns, corners[:, ::2])
    corners[:, 1::2] = np.searchsorted(rows, corners[:, 1::2])
    return _Places(width - 1 - columns if tables.flips[image] else columns, rows, corners)


def _draw_objects(bits: Tensor, tables: _Tables, places: list[_Places], dense: Iterable[NDArray[np.uint8]]) -> None:
    """Draw by numpy, an object at a time: on a CPU many times as fast as ``_draw_rows``."""
    packed = bits.numpy()
    objects = zip(tables.crops.tolist(), tables.offsets.tolist(), strict=False)
    for place, masks, size, flip in zip(places, dense, tables.sizes.tolist(), tables.flips, strict=True):
        for mask, (x0, y0, x1, y1) in zip(masks, place.corners.tolist(), strict=True):
            (left, top, right, bottom), start = next(objects)
            height, width = bottom - top, right - left
            crop = np.unpackbits(packed[start:], count=height * width).reshape(height, width)
            if mask.shape == tuple(size):
                # numpy mirrors a byte at a time
                mask[y0:y1, x0:x1] = torch.from_numpy(crop).flip(1).numpy() if flip else crop
            else:
                columns, rows = place.columns[x0:x1] - left, place.rows[y0:y1] - top
                mask[y0:y1, x0:x1] = crop.take(columns, 1).take(rows, 0)


def _draw_rows(
    bits: Tensor, tables: _Tables, places: list[_Places], corners: Ints, objects: Ints, origins: Ints, strides: Ints,
    dense: Tensor,
) -> None:  # fmt: skip
    """Draw by torch, all rows of some objects at once, into ``dense``, which is flat.

    Pixel (x, y) of an object goes to its origin + y * its stride + x; its ``corners`` [N, 4] are x0, y0, x1, y1.
    """
    if not len(objects):
        return
    columns, rows = (np.concatenate(parts) for parts in list(zip(*places, strict=True))[:2])
    first_column, first_row = (
        np.cumsum(lengths) - lengths for lengths in ([len(place[axis]) for place in places] for axis in (0, 1))
    )
    x0, y0, x1, y1 = corners.T
    (left, top, right, _), image = tables.crops[objects].T, tables.images[objects]
    # each row of each object: its object, its place in the image, its width, and pixels drawn before it
    of = np.repeat(np.arange(len(objects)), y1 - y0)
    row = number_within(y1 - y0) + y0[of]
    wide = (x1 - x0)[of]
    starts = np.cumsum(wide) - wide
    stored = rows[first_row[image[of]] + row]
    table = np.stack(
        [
            wide,
            # with a pixel's number among all drawn ones added: where its column and where itself lie
            (first_column[image] + x0)[of] - starts,
            (origins + x0)[of] + row * strides[of] - starts,
            # with its stored column added: its bit
            tables.offsets[objects[of]] * 8 + (stored - top[of]) * (right - left)[of] - left[of],
        ]
    )
    shown = send(columns, bits.device)
    most = CHUNK_BYTES // DRAWN_BYTES
    cuts = np.searchsorted(starts, np.arange(0, wide.sum() + most, most))
    for first, last in pairwise(np.unique(cuts).tolist()):
        part, begin, length = send(table[:, first:last], bits.device), int(starts[first]), int(wide[first:last].sum())
        pixel = torch.arange(begin, begin + length, device=bits.device)
        column, to, bit = part[1:].repeat_interleave(part[0], 1, output_size=length)
        bit += shown[column.add_(pixel)]
        dense[to.add_(pixel)] = (bits[bit >> 3] >> (7 - (bit & 7)).byte()) & 1


@torch.no_grad()
def sample_masks(
    masks: MaskBits,
    objects: Tensor,
    boxes: Tensor,
    *,
    sizes: Tensor | Sequence[Sequence[int]],
    counts: Tensor | Sequence[int],
    flips: Tensor | Sequence[bool] | None = None,
    to_sizes: Tensor | Sequence[Sequence[int]] | None = None,
    size: int = 28,
) -> Tensor:
    """Mask targets of R proposals, straight from the bits: memory follows the objects' boxes, not the images.

    Source: ``project_masks_on_boxes`` in torchvision's ``roi_heads``, which calls ``roi_align`` over dense masks of
    the image's size. Here it is called over each object's own box and a pixel around it: all else is 0.

    Args:
        masks: The packed masks of all T objects.
        objects: int64 [R]: the object, among the T, of each proposal.
        boxes: float32 [R, 4]: x0, y0, x1, y1 of each proposal in pixels of the image after mirroring and resizing,
            inside the image. Both are read on the CPU, so if they lie on a GPU this waits for it, once.
        sizes: int [B, 2]: height and width of each image in pixels, as stored. On the CPU, as all tables here.
        counts: int [B]: objects of each image.
        flips: bool [B]: the images that are mirrored left to right; none by default.
        to_sizes: int [B, 2]: height and width in pixels that each image is resized to, its masks by nearest
            neighbour as in ``expand_masks``; the stored sizes by default.
        size: Rows and columns of a target; 28 by default, as in Mask R-CNN.

    Returns:
        float32 [R, size, size] of 0 to 1, on the device that the bits are on.

    Raises:
        ColabUtilsError: if the tables are not of one batch, a mask lies outside its image, an object is not among
            the T, or a box is not finite.

    Example:
        >>> crops = torch.tensor([[1, 0, 3, 2]], dtype=torch.int32)
        >>> masks = MaskBits(torch.tensor([0b10110000], dtype=torch.uint8), crops, torch.tensor([0, 1]))
        >>> box = torch.tensor([[0.0, 0.0, 4.0, 2.0]])
        >>> sample_masks(masks, torch.tensor([0]), box, sizes=[(2, 4)], counts=[1], size=2).tolist()
        [[[0.625, 0.125], [0.75, 0.25]]]
    """
    tables = _read_tables(masks, sizes, counts, flips, to_sizes)
    of, corners = objects.cpu().numpy(), boxes.float().cpu().numpy()
    if corners.shape != (len(of), 4) or not ((of >= 0) & (of < len(tables.images)) & np.isfinite(corners).all(1)).all():
        raise ColabUtilsError(
            f"expected one of {len(tables.images)} objects and a finite box [4] for each proposal, found others among "
            f"{len(of)} objects and boxes {list(corners.shape)}. Give proposals of the batch that the masks are of."
        )
    places = [_place_objects(tables, image) for image in range(len(tables.sizes))]
    drawn, which = np.unique(of, return_inverse=True)
    crops = np.concatenate([np.zeros((0, 4), np.int64), *(place.corners for place in places)])[drawn]
    starts, limits = np.maximum(crops[:, :2] - 1, 0), tables.to_sizes[tables.images[drawn], ::-1]
    sides, at = crops[:, 2:] - starts + 1, np.zeros(len(drawn), np.int64)
    device, order = masks.bits.device, np.argsort(sides.max(1))
    targets = torch.zeros((len(of), size, size), dtype=torch.float32, device=device)
    while len(order):  # objects of like sizes together
        cost = np.maximum.accumulate(sides[order]).prod(1) * np.arange(1, len(order) + 1) * SAMPLED_BYTES
        chunk, order = np.split(order, [max(1, int(np.searchsorted(cost, CHUNK_BYTES, "right")))])
        space = sides[chunk].max(0)
        # where the image ends the space must end, too: a sample beyond is 0, one a little before reads the last pixel
        starts[chunk] = np.where(crops[chunk, 2:] == limits[chunk], limits[chunk] - space, starts[chunk])
        dense = torch.zeros((len(chunk), 1, *space[::-1].tolist()), dtype=torch.uint8, device=device)
        at[chunk] = np.arange(len(chunk))
        origins, strides = at[chunk] * space.prod() - starts[chunk] @ [1, space[0]], np.full(len(chunk), space[0])
        _draw_rows(masks.bits, tables, places, crops[chunk], drawn[chunk], origins, strides, dense.view(-1))
        rows = np.flatnonzero(np.isin(which, chunk))
        own = which[rows]
        rois = np.concatenate([at[own, None], corners[rows] - np.tile(starts[own], 2)], 1).astype(np.float32)
        with torch.autocast(device.type, enabled=False):
            targets[send(rows, device)] = roi_align(dense.float(), send(rois, device), (size, size))[:, 0]
    return targets


def flip_boxes(boxes: Tensor, widths: Tensor | float) -> Tensor:
    """Boxes mirrored left to right: float [T, 4], x0, y0, x1, y1 in pixels; ``widths``: of the images, one or [T].

    Example:
        >>> flip_boxes(torch.tensor([[1.0, 0.0, 3.0, 2.0]]), 10).tolist()
        [[7.0, 0.0, 9.0, 2.0]]
    """
    x0, y0, x1, y1 = boxes.unbind(1)
    return torch.stack([widths - x1, y0, widths - x0, y1], 1)


def send(values: Tensor | NDArray[Any], device: torch.device | str) -> Tensor:
    """A tensor, or a numpy array, on a device; not copied where it is there already.

    To a GPU it goes through pinned memory, and the call returns at once: a copy from other memory would wait for all
    that the GPU still has to do, and leave it without work until the next call arrives. Source: ``cudaMemcpyAsync`` in
    NVIDIA's CUDA runtime API, "API synchronization behavior".

    Example:
        >>> send(np.array([1, 2]), "cpu")
        tensor([1, 2])
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values)) if isinstance(values, np.ndarray) else values
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
