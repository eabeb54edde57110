"""Each worker opens each of eight files when it first needs it, for half a second: it waits for
that, and no sample is at fault.
"""

from __future__ import annotations

from pathlib import Path
from time import sleep

from torch import Tensor

from benchmarks.causes.loop import Loop, Photos, Step, make_plain_loader

EXPECTED = "sleep"
NEXT = r"(?i)what sleeps"
EPOCHS = 1
FILES = 8


class Files(Photos):
    """Every eighth photo lies in the same file."""

    open_s = 0.5
    opened: set[int] = set()  # noqa: RUF012  # of this process

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index % FILES not in self.opened:
            sleep(self.open_s)
            self.opened.add(index % FILES)
        return super().__getitem__(index)


def make_loop(folder: Path) -> Loop:
    """Two workers, each with eight files to open."""
    return make_plain_loader(Files(folder)), Step(), None
