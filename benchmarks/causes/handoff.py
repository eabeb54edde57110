"""Batches of 126 MB cost nothing to make, and much to hand over from the worker through shared
memory.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.causes.loop import Loop, Step

EXPECTED = "hand-off"
NEXT = r"(?i)(batches|tensors) smaller|smaller (batches|tensors)|uint8|make_loader"
EPOCHS = 1


class Frames(Dataset[tuple[Tensor, Tensor]]):
    """Whole batches of black frames: the system makes their memory when somebody touches it."""

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(8, 3, 1024, 1280), torch.full((8,), index)


def make_loop(folder: Path) -> Loop:
    """Very large float tensors."""
    return DataLoader(Frames(), batch_size=None, num_workers=2), Step(), None
