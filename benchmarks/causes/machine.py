"""Planted causes that take cores and memory, or start workers again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.causes.loop import Loop, Photos, Step, burn, make_plain_loader
from colab_utils.machine import count_cores

_THREADS = 2 * count_cores()
# Milliseconds of CPU that each thread takes for each image.
_CPU_MS = 6.0
# A worker keeps something for so many samples.
_MOST_SAMPLES = 500
# A sample looks at so many names.
_NAMES_A_SAMPLE = 6000


class Tiles:
    """A transform that cuts an image into tiles, one for each thread; each process has threads of
    its own.
    """

    pool: ThreadPoolExecutor | None = None

    def __call__(self, image: Tensor, label: int) -> tuple[Tensor, int]:
        """Work on all tiles at once."""
        self.pool = self.pool or ThreadPoolExecutor(_THREADS)
        list(self.pool.map(burn, [_CPU_MS] * _THREADS))
        return image, label


def make_contention(folder: Path) -> Loop:
    """Two workers with many threads each: their batches come in time, but the step gets no core."""
    return make_plain_loader(Photos(folder, transforms=Tiles())), Step(), None


def flip_slowly(image: Tensor, label: int) -> tuple[Tensor, int]:
    """Flip, with much other work for the CPU."""
    burn(10)
    return image.flip(-1), label


def make_too_many_workers(folder: Path, *, workers: int | None = None) -> Loop:
    """Eight workers for each core: an epoch begins late, as all work at their first batches at
    once.
    """
    dataset = Photos(folder, transforms=flip_slowly)
    count = workers or 8 * count_cores()
    return (
        make_plain_loader(dataset, batches=32, workers=count, persistent_workers=True),
        Step(),
        None,
    )


def open_index(worker: int) -> None:
    """Read a large index, for example."""
    sleep(1)


def make_restarts(folder: Path) -> Loop:
    """Epochs are short, workers take a second to start, and they start anew in each epoch."""
    return make_plain_loader(Photos(folder), batches=15, worker_init_fn=open_index), Step(), None


class KeepingPhotos(Photos):
    """Remembers what it never needs again."""

    kept: list[Any] = []  # noqa: RUF012  # of this process

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if len(self.kept) < _MOST_SAMPLES:
            self.kept.append(np.ones(4_000_000, np.uint8))
        return super().__getitem__(index)


def make_memory(folder: Path) -> Loop:
    """Each worker keeps 4 MB for every sample that it loads, until it has 2 GB, so that no machine
    fills up.
    """
    return make_plain_loader(KeepingPhotos(folder), batches=600, batch_size=2), Step(100), None


class Listed(Photos):
    """Looks at another part of its list for each sample."""

    samples = 0

    def __init__(self, folder: Path, *, names: int) -> None:
        super().__init__(folder)
        self.names = [f"{number:0120d}" for number in range(names)]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        first = self.samples * _NAMES_A_SAMPLE % len(self.names)
        self.samples += 1
        sum(len(name) for name in self.names[first : first + _NAMES_A_SAMPLE])
        return super().__getitem__(index)


def make_copy_on_access(folder: Path, *, names: int = 1_500_000) -> Loop:
    """A long list of Python objects: each worker copies what it only looks at (pytorch#13246)."""
    return make_plain_loader(Listed(folder, names=names), batch_size=2), Step(100), None
