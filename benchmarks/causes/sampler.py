"""The sampler takes half a second at the start of each epoch, and workers persist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch.utils.data import DataLoader, Sampler

from benchmarks.causes.loop import Loop, Photos, Step, burn

EXPECTED = "main_process"
NEXT = r"(?i)that line cheaper"
EPOCHS = 40


class Weighing(Sampler[int]):
    """Weighs all samples anew, for so many milliseconds."""

    def __init__(self, cpu_ms: float) -> None:
        self.cpu_ms = cpu_ms

    def __len__(self) -> int:
        return 60

    def __iter__(self) -> Iterator[int]:
        burn(self.cpu_ms)
        return iter([index % 50 for index in range(60)])


def make_loop(folder: Path, *, cpu_ms: float = 500) -> Loop:
    """Fifteen batches an epoch, which workers load in time."""
    sampler = Weighing(cpu_ms)
    workers = {"num_workers": 2, "persistent_workers": True}
    return DataLoader(Photos(folder), 4, sampler=sampler, **workers), Step(), None
