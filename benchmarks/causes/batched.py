"""A dataset gives whole batches by ``__getitems__``: 15 ms of work for each sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.causes.loop import Loop, Photos, Step, burn, make_plain_loader

EXPECTED = "work"
NEXT = r"(?i)cheaper"
EPOCHS = 1


class Batched(Photos):
    """Loads the samples of a batch at once."""

    cpu_ms = 15.0

    def __getitems__(self, indices: list[int]) -> list[Any]:
        burn(self.cpu_ms * len(indices))
        return [self[index] for index in indices]


def make_loop(folder: Path) -> Loop:
    """Two workers that have more to do than the step."""
    return make_plain_loader(Batched(folder)), Step(), None
