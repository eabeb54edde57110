"""A worker that was not forked waits for ever, at sample 37."""

from __future__ import annotations

from pathlib import Path
from time import sleep

from torch import Tensor

from benchmarks.causes.loop import Loop, Photos, Step, make_plain_loader

EXPECTED = "hang"
NEXT = r"(?i)needs a timeout"
EPOCHS = 1


class Waiting(Photos):
    """One sample never comes."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 37:
            sleep(3600)
        return super().__getitem__(index)


def make_loop(folder: Path) -> Loop:
    """A worker of a method that CUDA asks for."""
    loader = make_plain_loader(Waiting(folder), workers=1, multiprocessing_context="spawn")
    return loader, Step(), None
