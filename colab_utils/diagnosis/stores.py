"""Datasets over the forms that people convert images to: image files, a tensor file each, mapped arrays, memory."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from colab_utils.drive import DriveProfile, read_file
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.folder import CocoFolder
from colab_utils.runtime import find_free_memory, format_bytes

__all__ = ["InMemory", "MappedArrays", "PillowFolder", "SavedTensors", "count_bytes"]

_THREADS = 8
_MEMORY_SHARE = 0.5  # of the free memory


class PillowFolder(CocoFolder):
    """Image files and polygons as in torchvision's references: decoded by Pillow, masks drawn for each sample."""

    @staticmethod
    def decode(data: bytes) -> Tensor:
        """Image bytes as uint8 [3, H, W]."""
        return torch.from_numpy(np.array(Image.open(io.BytesIO(data)).convert("RGB"))).permute(2, 0, 1)


class SavedTensors(Dataset[Any]):
    """One ``.pt`` file an image."""

    def __init__(self, folder: Path, profile: DriveProfile | None, sizes: Any) -> None:
        self._paths, self._profile, self.sizes = sorted(folder.glob("*.pt")), profile, sizes

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Any]]:
        target = torch.load(io.BytesIO(read_file(self._paths[index], self._profile)), weights_only=True)
        return target.pop("image"), target


class MappedArrays(Dataset[Any]):
    """Two big ``.npy`` files, mapped into memory."""

    def __init__(self, folder: Path) -> None:
        self._images = np.load(folder / "images.npy", mmap_mode="r")
        self._masks = np.load(folder / "masks.npy", mmap_mode="r")
        with np.load(folder / "tables.npz") as tables:
            self._tables = dict(tables)
        self.sizes = self._tables["sizes"]
        self._first = np.concatenate([[0], np.cumsum(self._tables["counts"])])

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Any]]:
        (height, width), own = self.sizes[index], slice(*self._first[index : index + 2])
        masks = np.unpackbits(self._masks[own, :height], axis=2, count=width)
        target = {name: torch.from_numpy(self._tables[name][own]) for name in ("boxes", "labels", "area", "iscrowd")}
        image = torch.from_numpy(self._images[index, :, :height, :width].copy())
        return image, {**target, "masks": torch.from_numpy(masks), "image_id": int(self._tables["image_ids"][index])}


class InMemory(Dataset[Any]):
    """Every sample of another dataset, read at the start.

    Raises:
        ColabUtilsError: the ``total`` images of the whole dataset would take more than half of the free memory.
    """

    def __init__(self, dataset: Any, *, total: int) -> None:
        few = [dataset[index] for index in range(min(4, len(dataset)))]
        needed = sum(map(count_bytes, few)) / len(few) * total
        free = find_free_memory()
        if needed > _MEMORY_SHARE * free:
            raise ColabUtilsError(
                f"expected the samples of all {total:,} images to fit into half of the free memory, found that they "
                f"take about {format_bytes(needed)} and {format_bytes(free)} are free. Leave this strategy out."
            )
        with ThreadPoolExecutor(_THREADS) as pool:
            self._samples = list(pool.map(dataset.__getitem__, range(len(dataset))))
        self.sizes = dataset.sizes

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Any]]:
        return self._samples[index]


def count_bytes(sample: tuple[Tensor, dict[str, Any]]) -> int:
    """Bytes of an image and its target.

    Example:
        >>> count_bytes((torch.zeros(3, 4, 4, dtype=torch.uint8), {"boxes": torch.zeros(2, 4), "image_id": 7}))
        80
    """
    return sample[0].nbytes + sum(part.nbytes for part in sample[1].values() if isinstance(part, Tensor))
