"""A random transform takes 80 ms of CPU for each image."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from benchmarks.causes.loop import Loop, Photos, Step, burn, make_plain_loader

EXPECTED = "transform"
NEXT = r"(?is)transform.*(cheaper|faster|GPU|device)|(cheaper|faster|GPU|device).*transform"
EPOCHS = 1


def augment(image: Tensor, label: int) -> tuple[Tensor, int]:
    """Add noise, slowly."""
    burn(80)
    return image + 0.1 * torch.rand(image.shape), label


def make_loop(folder: Path) -> Loop:
    """Cheap files, and an expensive transform."""
    return make_plain_loader(Photos(folder, transforms=augment), batches=300), Step(), None
