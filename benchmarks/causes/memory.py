"""Each worker keeps 4 MB for every sample that it loads, until it has 2 GB, so that no machine
fills up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.causes.loop import Loop, Photos, Step, make_plain_loader

EXPECTED = "memory"
NEXT = r"(?i)keep no|stop keeping|keeps? .* sample"
EPOCHS = 1
# A worker keeps something for so many samples.
MOST = 500


class KeepingPhotos(Photos):
    """Remembers what it never needs again."""

    kept: list[Any] = []  # noqa: RUF012  # of this process

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if len(self.kept) < MOST:
            self.kept.append(np.ones(4_000_000, np.uint8))
        return super().__getitem__(index)


def make_loop(folder: Path) -> Loop:
    """Two samples a batch and 100 ms a step: the workers grow by some 80 MB a second."""
    return make_plain_loader(KeepingPhotos(folder), batches=600, batch_size=2), Step(100), None
