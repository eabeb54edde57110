"""A long list of Python objects: each worker copies what it only looks at (pytorch#13246)."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from benchmarks.causes.loop import Loop, Photos, Step, make_plain_loader

EXPECTED = "memory"
NEXT = r"(?i)numpy arrays in place of lists"
EPOCHS = 1
# A sample looks at so many names.
READ = 6000


class Listed(Photos):
    """Looks at another part of its list for each sample."""

    samples = 0

    def __init__(self, folder: Path, *, names: int) -> None:
        super().__init__(folder)
        self.names = [f"{number:0120d}" for number in range(names)]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        first = self.samples * READ % len(self.names)
        self.samples += 1
        sum(len(name) for name in self.names[first : first + READ])
        return super().__getitem__(index)


def make_loop(folder: Path, *, names: int = 1_500_000) -> Loop:
    """Two samples a batch and 100 ms a step: the workers grow by some 20 MB a second."""
    return make_plain_loader(Listed(folder, names=names), batch_size=2), Step(100), None
