"""All workers take turns at one lock, as with HDF5: 25 ms of work for each sample."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from torch import Tensor

from benchmarks.causes.loop import Loop, Photos, Step, burn, make_plain_loader

EXPECTED = "lock"
NEXT = r"(?i)more workers would not help.*lock"
EPOCHS = 1


class Locked(Photos):
    """Loads under a lock."""

    held_ms = 25.0
    lock = multiprocessing.Lock()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with self.lock:
            burn(self.held_ms)
        return super().__getitem__(index)


def make_loop(folder: Path) -> Loop:
    """Two workers, of which one waits for the other."""
    return make_plain_loader(Locked(folder)), Step(), None
