"""Batches: flat tensors in one buffer from the worker to the device, float images and dense masks
made there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colab_utils.loading.masks import MaskBits, draw_masks, expand_masks, send, split_masks
from colab_utils.loading.targets import PackedSample, PackedSamples, Target, blame_sample

_PARTS = ("boxes", "labels", "areas", "iscrowd")  # of objects


_ALIGNMENT = 64


_FLIPPED_ROWS = 64


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """A batch of B images with T objects in all, in flat tensors; the device work is not yet done.

    ``sizes``, ``image_ids``, ``counts``, ``masks.crops`` and ``masks.offsets`` stay on the CPU,
    whatever the device: code reads them, and reading them from a GPU would make it wait.
    """

    pixels: Tensor
    """uint8 [bytes]: each image's pixels, [h, w, 3], one image after the other."""
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
    dense: Tensor | None = None
    """uint8 [bytes]: all masks as they are in the targets, where a worker has expanded them; else
    None.
    """

    __iter__ = None  # or Python would ask for the images by numbers

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, part: slice) -> "PackedBatch":
        """Some of the images, one after another, with their objects: views of this batch, without
        dense masks.
        """
        first, end, _ = part.indices(len(self))
        pixels = [0, *accumulate((3 * self.sizes.long().prod(1)).tolist())]
        objects = [0, *accumulate(self.counts.tolist())]
        images = slice(first, end)
        of = slice(objects[first], objects[end])
        tables = {name: getattr(self, name)[images] for name in ("sizes", "image_ids", "counts")}
        tables |= {name: getattr(self, name)[of] for name in _PARTS}
        masks = MaskBits(
            self.masks.bits, self.masks.crops[of], self.masks.offsets[of.start : of.stop + 1]
        )
        return PackedBatch(
            pixels=self.pixels[pixels[first] : pixels[end]], masks=masks, dense=None, **tables
        )

    @cached_property
    def images(self) -> Tensor:
        """uint8 [B, 3, H, W]: each image in the top left corner, zeros around; strides as in
        channels_last.
        """
        height, width = self.sizes.max(0).values.tolist()
        if bool((self.sizes == self.sizes[0]).all()):
            return self.pixels.view(len(self), height, width, 3).permute(0, 3, 1, 2)
        padded = self.pixels.new_zeros((len(self), height, width, 3)).permute(0, 3, 1, 2)
        for row, image in zip(padded, self.split_images(), strict=True):
            row[:, : image.shape[1], : image.shape[2]] = image
        return padded

    def split_images(self) -> list[Tensor]:
        """Each image at its own size, uint8 [3, h, w]: views of ``pixels``."""
        sizes: list[list[int]] = self.sizes.tolist()
        parts = self.pixels.split([3 * h * w for h, w in sizes])
        return [
            part.view(h, w, 3).permute(2, 0, 1) for part, (h, w) in zip(parts, sizes, strict=True)
        ]

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The batch with its pixels, objects and mask bits on a device."""
        moved = {name: send(getattr(self, name), device) for name in ("pixels", *_PARTS)}
        return replace(self, masks=self.masks._replace(bits=send(self.masks.bits, device)), **moved)

    def to_images(
        self, device: torch.device | str, dtype: torch.dtype = torch.float32
    ) -> list[Tensor]:
        """The images as torchvision models take them: float32 [3, h, w] in 0 to 1, on the device;
        uint8: as stored.
        """
        images = replace(self, pixels=send(self.pixels, device)).split_images()
        if dtype == torch.uint8:
            return images
        return [
            image.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
            for image in images
        ]

    def to_targets(self, device: torch.device | str) -> list[Target]:
        """The targets as torchvision models take them, with dense masks, on the device."""
        counts: list[int] = self.counts.tolist()
        sizes: list[list[int]] = self.sizes.tolist()
        if self.dense is None:
            masks = expand_masks(
                self.masks._replace(bits=send(self.masks.bits, device)), sizes, counts
            )
        else:
            masks = split_masks(send(self.dense, device), sizes, counts)
        # copies: a box that you keep must not keep the whole batch
        objects = [send(getattr(self, name).clone(), device).split(counts) for name in _PARTS]
        keys = ("boxes", "labels", "area", "iscrowd", "masks", "image_id")
        rows = zip(*objects, masks, self.image_ids.tolist(), strict=True)
        return [dict(zip(keys, row, strict=True)) for row in rows]


class BatchShape(NamedTuple):
    """All that must be known of a batch's buffer to open it: plain numbers, which cross between
    processes.
    """

    images: int
    objects: int
    pixel_bytes: int
    mask_bytes: int
    dense_bytes: int

    @lru_cache(maxsize=8)  # asked for more than once for each batch  # noqa: B019
    def lay_out(self) -> tuple[dict[str, tuple[slice, str, tuple[int, ...]]], int]:
        """Where each table lies in the buffer, its type and its shape; and the bytes of the whole
        buffer.
        """
        b = self.images
        t = self.objects
        tables: dict[str, tuple[str, tuple[int, ...]]] = {
            "pixels": ("u1", (self.pixel_bytes,)),
            "bits": ("u1", (self.mask_bytes,)),
            "sizes": ("i4", (b, 2)),
            "image_ids": ("i8", (b,)),
            "counts": ("i8", (b,)),
            "boxes": ("f4", (t, 4)),
            "labels": ("i8", (t,)),
            "areas": ("f4", (t,)),
            "iscrowd": ("i8", (t,)),
            "crops": ("i4", (t, 4)),
            "offsets": ("i8", (t + 1,)),
            "dense": ("u1", (self.dense_bytes,)),
        }
        layout = {}
        end = 0
        for name, (kind, shape) in tables.items():
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + prod(shape) * np.dtype(kind).itemsize
            layout[name] = slice(start, end), kind, shape
        return layout, end

    def open_tables(self, buffer: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """The tables in a buffer, uint8 [bytes], as views of it."""
        return {
            name: buffer[at].view(kind).reshape(shape)
            for name, (at, kind, shape) in self.lay_out()[0].items()
        }


def write_batch(
    source: Any,
    indices: Sequence[int],
    reserve: Callable[[int], NDArray[np.uint8]],
    *,
    dense: bool = False,
    flips: NDArray[np.bool_] | None = None,
) -> tuple[BatchShape, NDArray[np.uint8]]:
    """Write a batch into memory that ``reserve`` gives for its size in bytes; ``dense``: the masks
    expanded too.

    ``source`` is a `PackedSamples` or what has its methods, as `ShardDataset`. ``flips`` mirrors
    images, boxes and dense masks, not the mask bits.

    Raises:
        BadSampleError: if an image cannot be read.
    """
    tables = source.describe(indices)
    if flips is not None:
        right, mirrored = (
            np.repeat(part, tables["counts"]) for part in (tables["sizes"][:, 1], flips)
        )
        tables["boxes"][mirrored, ::2] = right[mirrored, None] - tables["boxes"][mirrored, 2::-2]
    lengths = tables.pop("mask_bytes")
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    sizes: list[list[int]] = tables["sizes"].tolist()
    counts: list[int] = tables["counts"].tolist()
    areas = [h * w for h, w in sizes]
    dense_bytes = sum(n * area for n, area in zip(counts, areas, strict=True)) if dense else 0
    shape = BatchShape(len(sizes), len(lengths), 3 * sum(areas), int(offsets[-1]), dense_bytes)
    memory = reserve(shape.lay_out()[1])
    views = shape.open_tables(memory)
    for name, table in (*tables.items(), ("offsets", offsets)):
        views[name][:] = table
    first = 0
    pixel = first
    for place, (index, (height, width), count) in enumerate(
        zip(indices, sizes, counts, strict=True)
    ):
        pixels = views["pixels"][pixel : pixel + 3 * height * width].reshape(height, width, 3)
        with blame_sample(place):
            source.read_into(index, pixels, views["bits"][offsets[first] : offsets[first + count]])
        if flips is not None and flips[place]:
            for part in torch.from_numpy(pixels).split(_FLIPPED_ROWS):  # they stay in the cache
                part.copy_(part.flip(1))
        pixel = pixel + pixels.size
        first = first + count
    if dense_bytes:
        bits, crops, ends, out = map(
            torch.from_numpy, (views["bits"], tables["crops"], offsets, views["dense"])
        )
        draw_masks(MaskBits(bits, crops, ends), split_masks(out, sizes, counts), flips)
    return shape, memory


def open_batch(buffer: Tensor, shape: BatchShape) -> PackedBatch:
    """The batch in a buffer, uint8 [bytes]; its tensors are views of it."""
    parts = {
        name: torch.from_numpy(table) for name, table in shape.open_tables(buffer.numpy()).items()
    }
    masks = MaskBits(*(parts.pop(name) for name in MaskBits._fields))
    dense = parts.pop("dense")
    return PackedBatch(masks=masks, dense=dense if shape.dense_bytes else None, **parts)


def collate_packed(samples: Sequence[PackedSample]) -> PackedBatch:
    """Put samples into one packed batch."""
    shape, memory = write_batch(
        PackedSamples(samples), range(len(samples)), lambda size: np.empty(size, np.uint8)
    )
    return open_batch(torch.from_numpy(memory), shape)
