"""Two workers with many threads each: their batches come in time, but the step gets no core."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from benchmarks.causes.loop import Loop, Photos, Step, burn, make_plain_loader
from colab_utils.machine import count_cores

EXPECTED = "contention"
NEXT = r"(?i)num_threads|fewer (workers|threads)"
EPOCHS = 1
THREADS = 2 * count_cores()
# Milliseconds of CPU that each thread takes for each image.
CPU_MS = 6.0


class Tiles:
    """A transform that cuts an image into tiles, one for each thread; each process has threads of
    its own.
    """

    pool: ThreadPoolExecutor | None = None

    def __call__(self, image: Tensor, label: int) -> tuple[Tensor, int]:
        """Work on all tiles at once."""
        self.pool = self.pool or ThreadPoolExecutor(THREADS)
        list(self.pool.map(burn, [CPU_MS] * THREADS))
        return image, label


def make_loop(folder: Path) -> Loop:
    """Loading that takes every core."""
    return make_plain_loader(Photos(folder, transforms=Tiles())), Step(), None
