"""A sample is worked on by a thread of its own, as OpenCV and ffmpeg do: work, and no waiting."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from benchmarks.causes.loop import Loop, Photos, Step, burn, make_plain_loader

EXPECTED = "work"
NEXT = r"(?i)cheaper"
EPOCHS = 1


class Threaded:
    """A transform in another thread of the worker."""

    pool: ThreadPoolExecutor | None = None

    def __init__(self, cpu_ms: float = 40) -> None:
        self.cpu_ms = cpu_ms

    def __call__(self, image: Tensor, label: int) -> tuple[Tensor, int]:
        """Let the thread work, and wait for it."""
        self.pool = self.pool or ThreadPoolExecutor(1)
        self.pool.submit(burn, self.cpu_ms).result()
        return image, label


def make_loop(folder: Path) -> Loop:
    """One worker, whose own thread only waits."""
    return make_plain_loader(Photos(folder, transforms=Threaded()), workers=1), Step(), None
