"""Two loaders in one loop: the one that is watched is quick, the other one takes 60 ms a batch."""

from __future__ import annotations

from itertools import chain, repeat
from pathlib import Path

from torch import Tensor

from benchmarks.causes.loop import Loop, Photos, Step, burn, make_plain_loader

EXPECTED = "other_loader"
NEXT = r"(?i)watch\(it\)"
EPOCHS = 1


def make_loop(folder: Path, *, cpu_ms: float = 30.0) -> Loop:
    """The usual loop of semi-supervised training."""

    def augment(image: Tensor, label: int) -> tuple[Tensor, int]:
        burn(cpu_ms)
        return image, label

    slow = make_plain_loader(Photos(folder, transforms=augment))
    others = chain.from_iterable(repeat(slow))
    step = Step()

    def train(images: Tensor, targets: Tensor) -> None:
        next(others)
        step(images)

    return make_plain_loader(Photos(folder)), train, None
