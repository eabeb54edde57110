"""The optimizer steps every eighth batch, and the main process logs for 60 ms after each one."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from benchmarks.causes.loop import Loop, Photos, Step, burn, make_plain_loader

EXPECTED = "between"
NEXT = r"(?i)log .*less often|thread"
EPOCHS = 1
EVERY = 8


class Accumulating(Step):
    """Sums gradients over some batches."""

    batches = 0

    def __call__(self, images: Tensor, targets: Tensor | None = None) -> None:
        """Learn, and step now and then."""
        self.batches += 1
        if self.batches % EVERY == 0:
            super().__call__(images)
        else:
            burn(self.step_ms)


def make_loop(folder: Path, *, step_ms: float = 20, log_ms: float = 60) -> Loop:
    """Loading and the step are fast, the logging is slow."""
    return make_plain_loader(Photos(folder)), Accumulating(step_ms), lambda number: burn(log_ms)
