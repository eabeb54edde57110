"""Batches as flat tensors in one buffer.

A worker writes the buffer. The loader makes float images and dense masks from it on the device;
without a GPU, the worker has written dense masks already.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colab_utils.loading.devices import send
from colab_utils.loading.masks import MaskBits, draw_masks, expand_masks, split_masks
from colab_utils.loading.samples import (
    Bytes,
    PackedSample,
    Tables,
    Target,
    blame_sample,
)

# These tables of a batch have one row for each object.
_PARTS = ("boxes", "labels", "areas", "iscrowd")

# Each table starts at a multiple of this many bytes, so that it can be viewed as any dtype.
_ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """A batch of B images with T objects in all, in flat tensors.

    Float images and dense masks are not made yet. ``sizes``, ``image_ids``, ``counts``,
    ``masks.crops`` and ``masks.offsets`` always stay on the CPU: Python code reads them, and a
    read from a GPU would wait for the GPU.
    """

    pixels: Tensor
    """uint8 [bytes]: the pixels of each image, [h, w, 3], one image after the other."""
    sizes: Tensor
    """int32 [B, 2]: height and width of each image in pixels."""
    image_ids: Tensor
    """int64 [B]: id of each image."""
    counts: Tensor
    """int64 [B]: objects of each image."""
    boxes: Tensor
    """float32 [T, 4]: x0, y0, x1, y1 in pixels."""
    labels: Tensor
    """int64 [T]: label of each object."""
    areas: Tensor
    """float32 [T]: area of each object in square pixels."""
    iscrowd: Tensor
    """int64 [T]: 1 if the object is a crowd, else 0."""
    masks: MaskBits
    """The packed masks of all objects."""
    dense: Tensor | None = None
    """uint8 [bytes]: the dense masks of all objects, if a worker has expanded them; else None."""

    # A batch cannot be iterated over. Without this line, Python would iterate by `__getitem__`.
    __iter__ = None

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, part: slice) -> "PackedBatch":
        """Return a slice of the images with their objects, as views. Dense masks are left out."""
        first, end, _ = part.indices(len(self))
        pixel_ends = [0, *accumulate((3 * self.sizes.long().prod(1)).tolist())]
        object_ends = [0, *accumulate(self.counts.tolist())]
        start = object_ends[first]
        stop = object_ends[end]
        masks = self.masks._replace(
            crops=self.masks.crops[start:stop], offsets=self.masks.offsets[start : stop + 1]
        )
        objects = {name: getattr(self, name)[start:stop] for name in _PARTS}
        return PackedBatch(
            pixels=self.pixels[pixel_ends[first] : pixel_ends[end]],
            sizes=self.sizes[first:end],
            image_ids=self.image_ids[first:end],
            counts=self.counts[first:end],
            masks=masks,
            **objects,
        )

    @cached_property
    def images(self) -> Tensor:
        """Return the images padded to one size, uint8 [B, 3, H, W].

        Each image lies in the top left corner, with zeros to its right and below. The strides are
        those of channels_last.
        """
        height, width = self.sizes.max(0).values.tolist()
        if bool((self.sizes == self.sizes[0]).all()):
            return self.pixels.view(len(self), height, width, 3).permute(0, 3, 1, 2)
        padded = self.pixels.new_zeros((len(self), height, width, 3)).permute(0, 3, 1, 2)
        for row, image in zip(padded, self.split_images(), strict=True):
            row[:, : image.shape[1], : image.shape[2]] = image
        return padded

    def split_images(self) -> list[Tensor]:
        """Return each image at its own size, uint8 [3, h, w], as views of ``pixels``."""
        sizes: list[list[int]] = self.sizes.tolist()
        parts = self.pixels.split([3 * h * w for h, w in sizes])
        return [
            part.view(h, w, 3).permute(2, 0, 1) for part, (h, w) in zip(parts, sizes, strict=True)
        ]

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Return the batch with its pixels, objects and mask bits on a device.

        The tables that always stay on the CPU stay there.
        """
        moved = {name: send(getattr(self, name), device) for name in ("pixels", *_PARTS)}
        return replace(self, masks=self.masks._replace(bits=send(self.masks.bits, device)), **moved)

    def to_images(
        self, device: torch.device | str, dtype: torch.dtype = torch.float32
    ) -> list[Tensor]:
        """Return the images as torchvision models take them, [3, h, w] on the device.

        float32 images have values from 0 to 1. uint8 images have the stored values.
        """
        images = replace(self, pixels=send(self.pixels, device)).split_images()
        if dtype == torch.uint8:
            return images
        dense = torch.contiguous_format
        return [image.to(torch.float32, memory_format=dense).div_(255) for image in images]

    def to_targets(self, device: torch.device | str) -> list[Target]:
        """Return the targets as torchvision models take them, with dense masks, on the device."""
        counts: list[int] = self.counts.tolist()
        sizes: list[list[int]] = self.sizes.tolist()
        if self.dense is None:
            packed = self.masks._replace(bits=send(self.masks.bits, device))
            masks = expand_masks(packed, sizes, counts)
        else:
            masks = split_masks(send(self.dense, device), sizes, counts)
        # The tables are copied, because a view of them would keep the whole batch in memory as long
        # as a user keeps one box.
        objects = [send(getattr(self, name).clone(), device).split(counts) for name in _PARTS]
        keys = ("boxes", "labels", "area", "iscrowd", "masks", "image_id")
        rows = zip(*objects, masks, self.image_ids.tolist(), strict=True)
        return [dict(zip(keys, row, strict=True)) for row in rows]


class Layout(NamedTuple):
    """The place of each table of a batch in its buffer. A worker sends it to the loader, which
    opens the buffer with it.
    """

    size: int
    """Bytes that the batch takes."""
    tables: dict[str, tuple[int, str, tuple[int, ...]]]
    """First byte, dtype and shape of each table."""


def _lay_out(forms: dict[str, tuple[str, tuple[int, ...]]]) -> Layout:
    """Lay out tables with these dtypes and shapes, one after the other.

    Example:
        >>> _lay_out({"sizes": ("i4", (1, 2)), "counts": ("i8", (1,))})
        Layout(size=72, tables={'sizes': (0, 'i4', (1, 2)), 'counts': (64, 'i8', (1,))})
    """
    tables = {}
    end = 0
    for name, (kind, shape) in forms.items():
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + prod(shape) * np.dtype(kind).itemsize
        tables[name] = start, kind, shape
    return Layout(end, tables)


def _open_tables(buffer: Bytes, layout: Layout) -> Tables:
    """Return the tables in a buffer, uint8 [bytes], as views of it."""
    return {
        name: np.ndarray(shape, kind, buffer, start)
        for name, (start, kind, shape) in layout.tables.items()
    }


def write_batch(
    tables: Tables,
    read_into: Callable[[int, Bytes, Bytes], object],
    reserve: Callable[[int], Bytes],
    *,
    dense: bool = False,
) -> tuple[Layout, Bytes]:
    """Write a batch into memory. ``reserve`` returns memory for a number of bytes.

    ``tables`` are those of all images: see `PackedSample.tables`. They are changed. ``read_into``
    takes the place of an image in the batch, and writes its pixels, uint8 [h, w, 3], and the bits
    of all its masks into two arrays. With ``dense``, the expanded masks are written too.

    Raises:
        BadSampleError: An image cannot be read.
    """
    sizes: list[list[int]] = tables["sizes"].tolist()
    counts: list[int] = tables["counts"].tolist()
    offsets = np.cumsum([0, *tables.pop("mask_bytes").tolist()], dtype=np.int64)
    tables["offsets"] = offsets
    areas = tables["sizes"].prod(1, dtype=np.int64)
    forms: dict[str, tuple[str, tuple[int, ...]]] = {}
    forms["pixels"] = "u1", (3 * int(areas.sum()),)
    forms["bits"] = "u1", (int(offsets[-1]),)
    forms |= {name: (table.dtype.str, table.shape) for name, table in tables.items()}
    if dense:
        forms["dense"] = "u1", (int(areas @ tables["counts"]),)
    layout = _lay_out(forms)
    memory = reserve(layout.size)
    views = _open_tables(memory, layout)
    for name, table in tables.items():
        views[name][:] = table
    pixels = _cut(views["pixels"], 3 * areas.cumsum())
    bits = _cut(views["bits"], offsets[tables["counts"].cumsum()])
    for place, size in enumerate(sizes):
        image = pixels[place].reshape(*size, 3)
        with blame_sample(place):
            read_into(place, image, bits[place])
    if dense:
        masks = MaskBits(*(torch.from_numpy(views[name]) for name in MaskBits._fields))
        draw_masks(masks, split_masks(torch.from_numpy(views["dense"]), sizes, counts))
    return layout, memory


def _cut(table: Bytes, ends: NDArray[np.int64]) -> list[Bytes]:
    """Return the parts of a table that end at these bytes, as views."""
    return [table[first:end] for first, end in pairwise([0, *ends.tolist()])]


def open_batch(buffer: Tensor, layout: Layout) -> PackedBatch:
    """Open the batch in a buffer, uint8 [bytes]. Its tensors are views of the buffer."""
    tables = _open_tables(buffer.numpy(), layout)
    parts = {name: torch.from_numpy(table) for name, table in tables.items()}
    return PackedBatch(masks=MaskBits(*map(parts.pop, MaskBits._fields)), **parts)


def write_samples(
    samples: Sequence[PackedSample], reserve: Callable[[int], Bytes], **options: Any
) -> tuple[Layout, Bytes]:
    """Write samples into memory, with the ``options`` of `write_batch`."""
    parts = [sample.tables for sample in samples]
    tables = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def read_into(place: int, pixels: Bytes, bits: Bytes) -> None:
        pixels[:], bits[:], _ = samples[place]

    return write_batch(tables, read_into, reserve, **options)


def collate_packed(samples: Sequence[PackedSample]) -> PackedBatch:
    """Put samples into one packed batch."""
    layout, memory = write_samples(samples, lambda size: np.empty(size, np.uint8))
    return open_batch(torch.from_numpy(memory), layout)
