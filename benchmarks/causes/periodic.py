"""A checkpoint takes a second, every ten steps, in the main process after the step."""

from __future__ import annotations

from pathlib import Path
from time import sleep

import torch

from benchmarks.causes.loop import Loop, Photos, Step, make_plain_loader

EXPECTED = "periodic"
NEXT = r"(?i)checkpoints?\b.*(less often|thread|background)"
EPOCHS = 1


def make_loop(folder: Path) -> Loop:
    """Loading and the step are fast, the disk for checkpoints is slow."""
    step = Step()

    def save_checkpoint(number: int) -> None:
        if number % 10 == 9:
            torch.save(step.model.state_dict(), folder / "checkpoint.pt")
            # A slow disk takes so long for a large model.
            sleep(1)

    return make_plain_loader(Photos(folder)), step, save_checkpoint
