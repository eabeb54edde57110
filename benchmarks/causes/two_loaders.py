"""Two loaders in one loop: the one that is watched is quick, the other one takes 60 ms a batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.causes.loop import Loop, Photos, Step, burn, make_plain_loader

EXPECTED = "other_loader"
NEXT = r"(?i)watch\(it\)"
EPOCHS = 1


class Slow(Photos):
    """Works for a while at each sample."""

    cpu_ms = 30.0

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        burn(self.cpu_ms)
        return super().__getitem__(index)


class Both:
    """A step that takes a batch of another loader, too."""

    def __init__(self, loader: Any, step: Step) -> None:
        self.step = step
        self.others: Iterator[Any] = (batch for again in repeat(loader) for batch in again)

    def __call__(self, images: Tensor, targets: Tensor | None = None) -> None:
        """Learn from the given batch."""
        next(self.others)
        self.step(images)


def make_loop(folder: Path, *, cpu_ms: float = 30.0) -> Loop:
    """The usual loop of semi-supervised training."""
    slow = Slow(folder)
    slow.cpu_ms = cpu_ms
    return make_plain_loader(Photos(folder)), Both(make_plain_loader(slow), Step()), None
