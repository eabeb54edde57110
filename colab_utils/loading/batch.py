"""Batches: a few flat uint8 and bit tensors between processes, float images and dense masks on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colab_utils.data.masks import PackedMasks, pack_masks

__all__ = ["MaskBits", "PackedBatch", "PackedSample", "Target", "collate_packed", "pack_target"]

Target = dict[str, Any]
"""torchvision's target: boxes float32 [N, 4] (x0, y0, x1, y1 in pixels), labels int64 [N], masks uint8 [N, H, W],
image_id int, area float32 [N], iscrowd int64 [N]."""


class PackedSample(NamedTuple):
    """One image and its objects as they cross to the training process; N objects."""

    image: Tensor
    """uint8 [3, H, W]."""
    image_id: int
    boxes: NDArray[np.float32]
    """float32 [N, 4]: x0, y0, x1, y1 in pixels."""
    labels: NDArray[np.int64]
    """int64 [N]."""
    areas: NDArray[np.float32]
    """float32 [N], in square pixels."""
    masks: PackedMasks


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
    """A batch of B images with T objects in all, in flat tensors; the device work is not yet done."""

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
    masks: MaskBits

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device | str) -> PackedBatch:
        """The batch on a device."""
        moved = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "masks"}
        masks = MaskBits(*(part.to(device, non_blocking=True) for part in self.masks))
        return PackedBatch(masks=masks, **{k: part.to(device, non_blocking=True) for k, part in moved.items()})

    def to_images(self, device: torch.device | str) -> list[Tensor]:
        """The images as torchvision models take them: float32 [3, h, w] in 0 to 1, on the device."""
        pixels = self.images.to(device, non_blocking=True).float().div_(255)
        return [image[:, :h, :w] for image, (h, w) in zip(pixels, self.sizes.tolist(), strict=True)]

    def to_targets(self, device: torch.device | str) -> list[Target]:
        """The targets as torchvision models take them, with dense masks, on the device."""
        moved = self.to(device)
        dense = expand_masks(moved.masks, self.sizes.repeat_interleave(self.counts.to(self.sizes.device), 0).tolist())
        targets = []
        start = 0
        for i, (count, image_id) in enumerate(zip(self.counts.tolist(), self.image_ids.tolist(), strict=True)):
            rows = slice(start, start + count)
            height, width = self.sizes[i].tolist()
            masks = dense[rows]
            targets.append(
                {
                    "boxes": moved.boxes[rows],
                    "labels": moved.labels[rows],
                    "masks": torch.stack(masks) if masks else moved.images.new_zeros((0, height, width)),
                    "image_id": image_id,
                    "area": moved.areas[rows],
                    "iscrowd": torch.zeros_like(moved.labels[rows]),
                }
            )
            start += count
        return targets


def expand_masks(masks: MaskBits, sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Dense uint8 [height, width] masks of T objects, on the device that the bits are on.

    Args:
        masks: the packed masks.
        sizes: height and width of each object's image, T pairs.
    """
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=masks.bits.device)
    pixels = (masks.bits[:, None] >> shifts & 1).flatten()
    starts = (masks.offsets * 8).tolist()
    dense = []
    for (x0, y0, x1, y1), start, (height, width) in zip(masks.crops.tolist(), starts[:-1], sizes, strict=True):
        mask = pixels.new_zeros((height, width))
        mask[y0:y1, x0:x1] = pixels[start : start + (y1 - y0) * (x1 - x0)].view(y1 - y0, x1 - x0)
        dense.append(mask)
    return dense


def collate_packed(samples: Sequence[PackedSample]) -> PackedBatch:
    """Put samples into one packed batch; runs in the loader's workers."""
    sizes = [tuple(sample.image.shape[-2:]) for sample in samples]
    images = torch.zeros((len(samples), 3, max(h for h, _ in sizes), max(w for _, w in sizes)), dtype=torch.uint8)
    for row, (sample, (h, w)) in enumerate(zip(samples, sizes, strict=True)):
        images[row, :, :h, :w] = sample.image
    lengths = np.concatenate([np.diff(sample.masks.offsets) for sample in samples])
    masks = MaskBits(
        bits=torch.from_numpy(np.concatenate([sample.masks.bits for sample in samples])),
        crops=torch.from_numpy(np.concatenate([sample.masks.crops for sample in samples])),
        offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)),
    )
    return PackedBatch(
        images=images,
        sizes=torch.tensor(sizes, dtype=torch.int32),
        image_ids=torch.tensor([sample.image_id for sample in samples], dtype=torch.int64),
        counts=torch.tensor([len(sample.labels) for sample in samples], dtype=torch.int64),
        boxes=torch.from_numpy(np.concatenate([sample.boxes for sample in samples])),
        labels=torch.from_numpy(np.concatenate([sample.labels for sample in samples])),
        areas=torch.from_numpy(np.concatenate([sample.areas for sample in samples])),
        masks=masks,
    )


def pack_target(image: Tensor, target: Target) -> PackedSample:
    """A sample of any dataset with torchvision's target contract as a packed one."""
    from pycocotools import mask as coco_mask

    dense = np.asfortranarray(target["masks"].numpy().transpose(1, 2, 0))
    return PackedSample(
        image=image,
        image_id=int(target["image_id"]),
        boxes=target["boxes"].numpy(),
        labels=target["labels"].numpy(),
        areas=target["area"].numpy(),
        masks=pack_masks(coco_mask.encode(dense) if dense.shape[2] else []),
    )
