"""What people write by hand in PyTorch: a ``.pt`` file for each sample, and one memory-mapped file
for all.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset

from benchmarks.data import Data
from benchmarks.systems.base import Records, Sample, finish
from benchmarks.systems.references import TorchLoader

__all__ = ["Memmap", "MemmapDataset", "PtFiles"]


class PtFiles(TorchLoader):
    """``torch.save`` of each sample, masks bit-packed."""

    store: ClassVar[str] = "pt_files"

    @classmethod
    def prepare(cls, data: Data, folder: Path) -> None:
        for number, record in enumerate(Records(data)):
            torch.save(
                torch.frombuffer(bytearray(record), dtype=torch.uint8), folder / f"{number:07d}.pt"
            )

    def open_dataset(self) -> Dataset[Sample]:
        return _PtDataset(self.folder)


class _PtDataset(Dataset[Sample]):
    def __init__(self, folder: Path) -> None:
        self._paths = sorted(str(path) for path in folder.glob("*.pt"))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Sample:
        return finish(torch.load(self._paths[index]).numpy())


class Memmap(TorchLoader):
    """``numpy.memmap`` of all samples one after another."""

    store: ClassVar[str] = "memmap"

    @classmethod
    def prepare(cls, data: Data, folder: Path) -> None:
        starts = [0]
        with open(folder / "samples.bin", "wb") as file:
            for record in Records(data):
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
