"""Batches: one flat buffer between processes, float images and dense masks on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.sample import PackedSample, Target, pack_target
from colab_utils.runtime import format_bytes

__all__ = [
    "MaskBits",
    "PackedBatch",
    "PackedSample",
    "Parcel",
    "Target",
    "collate_packed",
    "pack_parcel",
    "pack_target",
]


class MaskBits(NamedTuple):
    """The masks of T objects as in ``PackedMasks``, in tensors."""

    bits: Tensor
    """uint8 [bytes]: each mask's crop row by row, one bit a pixel, most significant bit first."""
    crops: Tensor
    """int32 [T, 4]: x0, y0, x1, y1 of each crop in pixels, half open."""
    offsets: Tensor
    """int64 [T + 1]: where each mask's bytes start in ``bits``."""


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """A batch of B images with T objects in all, in flat tensors; the device work is not yet done.

    ``sizes``, ``image_ids``, ``counts``, ``masks.crops`` and ``masks.offsets`` stay on the CPU, whatever the device:
    code reads them, and reading them from a GPU would make it wait.
    """

    images: Tensor
    """uint8 [B, 3, H, W]: each image in the top left corner, zeros around."""
    sizes: Tensor
    """int32 [B, 2]: height and width of each image in pixels."""
    image_ids: Tensor
    """int64 [B]."""
    counts: Tensor
    """int64 [B]: objects of each image."""
    boxes: Tensor
    """float32 [T, 4]: x0, y0, x1, y1 in pixels."""
    labels: Tensor
    """int64 [T]."""
    areas: Tensor
    """float32 [T], in square pixels."""
    iscrowd: Tensor
    """int64 [T]."""
    masks: MaskBits

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device | str) -> PackedBatch:
        """The batch with its pixels, objects and mask bits on a device."""
        moved = {name: getattr(self, name).to(device) for name in ("images", "boxes", "labels", "areas", "iscrowd")}
        return replace(self, masks=self.masks._replace(bits=self.masks.bits.to(device)), **moved)

    def to_images(self, device: torch.device | str) -> list[Tensor]:
        """The images as torchvision models take them: float32 [3, h, w] in 0 to 1, on the device."""
        pixels = self.images.to(device)
        return [image[:, :h, :w].float().div_(255) for image, (h, w) in zip(pixels, self.sizes.tolist(), strict=True)]

    def to_targets(self, device: torch.device | str) -> list[Target]:
        """The targets as torchvision models take them, with dense masks, on the device."""
        counts: list[int] = self.counts.tolist()
        masks = expand_masks(self.masks._replace(bits=self.masks.bits.to(device)), self.sizes.tolist(), counts)
        # copies: a box that you keep must not keep the whole batch in shared memory
        objects = [
            part.to(device, copy=True).split(counts) for part in (self.boxes, self.labels, self.areas, self.iscrowd)
        ]
        keys = ("boxes", "labels", "area", "iscrowd", "masks", "image_id")
        rows = zip(*objects, masks, self.image_ids.tolist(), strict=True)
        return [dict(zip(keys, row, strict=True)) for row in rows]


class Parcel(NamedTuple):
    """A packed batch as it crosses between processes: one buffer, because each tensor costs a hand-over."""

    buffer: Tensor
    """uint8 [bytes]."""
    shapes: tuple[tuple[int, ...], ...]
    """The shape of each part, in the order of ``_DTYPES``."""

    def open(self) -> PackedBatch:
        """The batch; its tensors are views of the buffer."""
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, _DTYPES.values(), strict=True)]
        starts = accumulate((_align(size) for size in sizes), initial=0)
        parts = {
            name: self.buffer[start : start + size].view(dtype).view(shape)
            for (name, dtype), start, size, shape in zip(_DTYPES.items(), starts, sizes, self.shapes, strict=False)
        }
        masks = MaskBits(*(parts.pop(name) for name in MaskBits._fields))
        return PackedBatch(masks=masks, **parts)


_DTYPES = {
    "images": torch.uint8,
    "sizes": torch.int32,
    "image_ids": torch.int64,
    "counts": torch.int64,
    "boxes": torch.float32,
    "labels": torch.int64,
    "areas": torch.float32,
    "iscrowd": torch.int64,
    "bits": torch.uint8,
    "crops": torch.int32,
    "offsets": torch.int64,
}


def collate_packed(samples: Sequence[PackedSample]) -> PackedBatch:
    """Put samples into one packed batch."""
    return pack_parcel(samples, shared=False).open()


def pack_parcel(samples: Sequence[PackedSample], *, shared: bool) -> Parcel:
    """Put samples into one buffer, in shared memory where another process is to have it."""
    sizes = np.array([sample.image.shape[-2:] for sample in samples], np.int32)
    lengths = np.concatenate([np.diff(sample.masks.offsets) for sample in samples])
    tables: list[NDArray[Any]] = [
        sizes,
        np.array([sample.image_id for sample in samples], np.int64),
        np.array([len(sample.labels) for sample in samples], np.int64),
        np.concatenate([sample.boxes for sample in samples]),
        np.concatenate([sample.labels for sample in samples]),
        np.concatenate([sample.areas for sample in samples]),
        np.concatenate([sample.iscrowd for sample in samples]),
        np.concatenate([sample.masks.bits for sample in samples]),
        np.concatenate([sample.masks.crops for sample in samples]),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]),
    ]
    shapes = ((len(samples), 3, *sizes.max(0).tolist()), *(table.shape for table in tables))
    total = sum(_align(prod(shape) * dtype.itemsize) for shape, dtype in zip(shapes, _DTYPES.values(), strict=True))
    parcel = Parcel(_make_zeros(total, shared=shared), shapes)
    batch = parcel.open()
    for row, sample, (height, width) in zip(batch.images, samples, sizes.tolist(), strict=True):
        row[:, :height, :width] = sample.image
    parts = {**vars(batch), **batch.masks._asdict()}
    for name, table in zip(list(_DTYPES)[1:], tables, strict=True):
        parts[name].copy_(torch.from_numpy(table))
    return parcel


def _align(size: int) -> int:
    return -(-size // 8) * 8


def _make_zeros(size: int, *, shared: bool) -> Tensor:
    if not shared:
        return torch.zeros(size, dtype=torch.uint8)
    try:
        # new shared memory is zeros; torch's own collate function makes it the same way
        return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))
    except RuntimeError as error:
        raise ColabUtilsError(
            f"expected {format_bytes(size)} of shared memory (/dev/shm) for a batch, found too little "
            f"({str(error).splitlines()[0]}). Use fewer workers, a smaller prefetch or a smaller batch."
        ) from None


def expand_masks(masks: MaskBits, sizes: Sequence[Sequence[int]], counts: Sequence[int]) -> list[Tensor]:
    """Dense masks of each image, uint8 [N, height, width], on the device that the bits are on.

    Args:
        masks: the packed masks of all images.
        sizes: height and width of each image in pixels.
        counts: objects of each image.
    """
    powers = 128 >> torch.arange(8, dtype=torch.uint8, device=masks.bits.device)
    pixels = (masks.bits[:, None] & powers).ne_(0).flatten()
    objects = iter(zip(masks.crops.tolist(), (masks.offsets[:-1] * 8).tolist(), strict=True))
    dense = []
    for (height, width), count in zip(sizes, counts, strict=True):
        image = pixels.new_zeros((count, height, width))
        for mask in image:
            (x0, y0, x1, y1), start = next(objects)
            mask[y0:y1, x0:x1] = pixels[start : start + (y1 - y0) * (x1 - x0)].view(y1 - y0, x1 - x0)
        dense.append(image)
    return dense
