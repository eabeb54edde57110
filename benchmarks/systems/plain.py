"""What people write by hand in PyTorch: one memory-mapped file for all samples."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
from torch.utils.data import Dataset

from benchmarks.data import Data
from benchmarks.systems.base import Sample, finish, list_records
from benchmarks.systems.references import TorchLoader

__all__ = ["Memmap", "MemmapDataset"]


class Memmap(TorchLoader):
    """``numpy.memmap`` of all samples one after another."""

    store: ClassVar[str] = "memmap"

    @classmethod
    def prepare(cls, data: Data, folder: Path) -> None:
        starts = [0]
        with open(folder / "samples.bin", "wb") as file:
            for record in list_records(data):
                file.write(record + bytes(-len(record) % 64))
                starts.append(file.tell())
        np.save(folder / "starts.npy", starts)

    def open_dataset(self) -> Dataset[Sample]:
        return MemmapDataset(self.folder)


class MemmapDataset(Dataset[Sample]):
    """What :class:`Memmap` wrote; samples are copies, because a view has not been read yet."""

    def __init__(self, folder: Path) -> None:
        self._bytes = np.memmap(folder / "samples.bin", np.uint8, "r")
        self._starts = np.load(folder / "starts.npy")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> Sample:
        return finish(np.array(self._bytes[self._starts[index] : self._starts[index + 1]]))
