"""Each sample waits for a program of its own, as with ffmpeg: for 50 ms."""

from __future__ import annotations

import subprocess
from pathlib import Path

from torch import Tensor

from benchmarks.causes.loop import Loop, Photos, Step, make_plain_loader

EXPECTED = "other_process"
NEXT = r"(?i)ask .*for less|keep (it|its answers) in"
EPOCHS = 1


class Asking(Photos):
    """Waits for another process before it loads."""

    answer_s = 0.05

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        subprocess.run(["sleep", str(self.answer_s)], check=True)
        return super().__getitem__(index)


def make_loop(folder: Path) -> Loop:
    """Two workers that wait for answers."""
    return make_plain_loader(Asking(folder)), Step(), None
