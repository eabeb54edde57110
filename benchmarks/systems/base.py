"""What a system is, and what the peers' prepared forms have in common."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.data import Data
from colab_utils.data.decoding import decode_pixels
from colab_utils.loading.samples import Target

__all__ = [
    "BATCH_SIZE",
    "Crew",
    "Sample",
    "System",
    "collate",
    "finish",
    "flip",
    "list_records",
]

BATCH_SIZE = 4
Sample = tuple[Tensor, Target]
"""An image, uint8 [3, H, W], and its target: boxes, labels, masks uint8 [N, H, W], image_id."""


class Crew(NamedTuple):
    """Who loads: so many worker processes, threads, or whatever else a system has."""

    size: int
    kind: str

    def __str__(self) -> str:
        return f"{self.size} {self.kind}"


class System:
    """One way of loading a dataset. Iterating over it gives the batches of one shuffled epoch, in
    this process.
    """

    environment: ClassVar[str] = ""
    """The section of requirements.txt that it needs; empty where what is installed will do."""
    store: ClassVar[str] = ""
    """Name of the prepared form, which systems may share; empty where the dataset's own files are
    read.
    """
    size_800: ClassVar[bool] = False
    """Whether it resizes to 800/1333 itself: its samples are compared with those of that size."""
    crews: ClassVar[tuple[Crew, ...]] = tuple(Crew(size, "workers") for size in range(4))

    def __init__(self, data: Data, folder: Path, crew: Crew) -> None:
        self.data = data
        self.folder = folder
        self.crew = crew

    @classmethod
    def prepare(cls, data: Data, folder: Path) -> None:
        """Write the prepared form into ``folder``, once."""

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def read_ids(self, batch: Any) -> list[int]:
        """The image ids in a batch."""
        return [int(target["image_id"]) for target in batch[1]]

    def unpack(self, batch: Any) -> list[Sample]:
        """The samples of a batch, for the comparison with the reference; not timed."""
        return list(zip(*batch, strict=True))

    def close(self) -> None:
        """End whatever runs: here, the workers of a DataLoader."""
        iterator = getattr(getattr(self, "_loader", None), "_iterator", None)
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()


def list_records(data: Data) -> Iterator[bytes]:
    """Yield every record of a dataset at 800/1333 as one piece of bytes, with the least left to do
    when it is loaded.

    Seven int64 (image_id, height, width, and the bytes of each part), then labels int64 [N], boxes
    float32 [N, 4], the dense masks [N, H, W] at one bit a pixel, and the image's JPEG.
    """
    folder = data.open()

    @lru_cache(maxsize=256)
    def read_parts(row: int) -> tuple[bytes, ...]:
        image, target = folder[row]
        tables = (
            target["labels"].numpy(),
            target["boxes"].numpy(),
            np.packbits(target["masks"].numpy()),
        )
        parts = (*(table.tobytes() for table in tables), folder.read(row))
        return np.array([*image.shape[1:], *map(len, parts)]).tobytes(), *parts

    # Copies of an image must not lie beside each other, so that the rows are not sorted by image.
    for copy in range(data.copies):
        for row in range(copy, data.records, data.copies):
            image_id = np.int64(folder.image_ids[row]).tobytes()
            yield b"".join((image_id, *read_parts(row - copy)))


def finish(record: bytes | NDArray[np.uint8]) -> Sample:
    """Do the work that a record leaves: decode, and make the masks dense."""
    data = np.frombuffer(record, np.uint8)
    image_id, height, width, *lengths = data[:56].view(np.int64).tolist()
    labels, boxes, bits, image, *_ = np.split(data[56:], np.cumsum(lengths))
    pixels = torch.from_numpy(decode_pixels(image.tobytes())).permute(2, 0, 1)
    count = lengths[0] // 8
    masks = np.unpackbits(bits, count=count * height * width).reshape(count, height, width)
    target = {
        "boxes": torch.from_numpy(boxes.view(np.float32).reshape(-1, 4)),
        "masks": torch.from_numpy(masks),
        "labels": torch.from_numpy(labels.view(np.int64)),
        "image_id": image_id,
    }
    return pixels, target


def flip(image: Tensor, target: Target) -> Sample:
    """Mirror every second sample, by chance."""
    if random.random() < 0.5:
        return image, target
    x0, y0, x1, y1 = target["boxes"].unbind(1)
    width = image.shape[-1]
    boxes = torch.stack([width - x1, y0, width - x0, y1], 1)
    return image.flip(-1), {**target, "boxes": boxes, "masks": target["masks"].flip(-1)}


def collate(samples: list[Sample]) -> tuple[tuple[Tensor, ...], tuple[Target, ...]]:
    """A batch as torchvision's references make it."""
    images, targets = zip(*samples, strict=True)
    return images, targets
