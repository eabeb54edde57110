"""This project's loader: packed batches, dense ones made of them, and packed batches from loose
files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.data import Dataset

from benchmarks.data import Data
from benchmarks.systems.base import BATCH_SIZE, Crew, Sample, System
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.shards.write import write_shards

__all__ = ["Dense", "Packed", "PackedFiles"]


class Packed(System):
    """Packed batches from shards; resize, flip and dense masks are left to the device."""

    store: ClassVar[str] = "shards"
    crews: ClassVar[tuple[Crew, ...]] = tuple(Crew(size, "processes") for size in range(4))
    options: ClassVar[dict[str, Any]] = {"deliver": "packed"}

    def __init__(self, data: Data, folder: Path, crew: Crew) -> None:
        super().__init__(data, folder, crew)
        self._loader = make_loader(
            self.open_dataset(),
            batch_size=BATCH_SIZE,
            device="cpu",
            workers=crew.size,
            **self.options,
        )

    @classmethod
    def prepare(cls, data: Data, folder: Path) -> None:
        """Write shards: large photos shrunk, other JPEGs kept."""
        form: Any = "shrink" if data.name == "photos_12mp" else "keep"
        write_shards(data.images, data.annotations, shards=folder, storage=form)

    def open_dataset(self) -> Dataset[Any]:
        """The shards."""
        return ShardDataset(self.folder)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def read_ids(self, batch: Any) -> list[int]:
        """The image ids in a packed batch."""
        ids: list[int] = batch.image_ids.tolist()
        return ids

    def unpack(self, batch: Any) -> list[Sample]:
        """What the device would make of a packed batch, at the stored size."""
        return list(zip(batch.split_images(), batch.to_targets("cpu"), strict=True))

    def close(self) -> None:
        """End the workers."""
        self._loader.close()


class PackedFiles(Packed):
    """The same hand-off from the image files and polygons themselves, without shards."""

    store: ClassVar[str] = ""

    def open_dataset(self) -> Dataset[Any]:
        """The files."""
        return self.data.open()


class Dense(Packed):
    """``deliver="dense"``: what the peers deliver, uint8 images and masks."""

    options: ClassVar[dict[str, Any]] = {"deliver": "dense", "image_dtype": torch.uint8}

    def read_ids(self, batch: Any) -> list[int]:
        """The image ids in a dense batch."""
        return System.read_ids(self, batch)

    def unpack(self, batch: Any) -> list[Sample]:
        """The samples as they are."""
        return System.unpack(self, batch)
