"""A mapped file becomes shorter while a worker reads it: a bus error, beside much free memory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.causes.loop import Loop

EXPECTED = "hang"
NEXT = r"(?i)became shorter while it was mapped"
EPOCHS = 1


class Mapped(Dataset[tuple[Tensor, int]]):
    """Images of a numpy file, which is cut before one of them is read."""

    def __init__(self, folder: Path, cut_at: int | None) -> None:
        self.path = folder / "images.npy"
        self.cut_at = cut_at
        np.save(self.path, np.zeros((400, 3, 64, 64), np.uint8))
        self.images = np.load(self.path, mmap_mode="r")

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.cut_at:
            os.truncate(self.path, 5000)
        return torch.from_numpy(np.array(self.images[index])), index


def make_loop(folder: Path, *, cut_at: int | None = 40) -> Loop:
    """One worker and no step, during which torch would raise an error of its own."""
    images = Mapped(folder, cut_at)
    return DataLoader(images, 4, sampler=range(400), num_workers=1), lambda *batch: None, None
