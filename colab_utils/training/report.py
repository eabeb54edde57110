"""What a run reports: a line of its log every few steps, and all of it at the end."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from colab_utils.training.evaluate import AveragePrecision
from colab_utils.training.plan import TrainingPlan
from colab_utils.units import format_bytes


@dataclass(frozen=True)
class LossPoint:
    """The total loss of one step; the first step is 1."""

    step: int
    loss: float


def average_losses(losses: Iterable[float]) -> float:
    """Return the mean of the finite ones; NaN without any.

    Example:
        >>> average_losses([1.0, math.nan, 2.0])
        1.5
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    return fmean(finite) if finite else math.nan


@dataclass(frozen=True)
class LogLine:
    """What happened since the line before, by the wall clock: evaluation, logs and checkpoints
    count.
    """

    step: int
    """Steps done so far."""
    steps: int
    """Steps of the run."""
    loss: float
    """Mean total loss of these steps, those without a finite one left out."""
    learning_rate: float
    """Of the last of these steps."""
    images_per_second: float
    """Images trained per second of the wall clock."""
    wait_share: float
    """Share of the wall clock in which the device waited for a batch, 0 to 1."""
    gpu_bytes: int | None = None
    """The most that was held on the GPU; None on a CPU."""
    ap: AveragePrecision | None = None
    """Of an evaluation since the line before."""

    def __str__(self) -> str:
        memory = f"  GPU {format_bytes(self.gpu_bytes)}" if self.gpu_bytes else ""
        evaluated = f"  after step {self.ap.step}: {self.ap}" if self.ap else ""
        return (
            f"step {self.step}/{self.steps}  loss {self.loss:.3f}  lr {self.learning_rate:.5f}  "
            f"{self.images_per_second:.1f} images/s  wait {self.wait_share:.0%}{memory}{evaluated}"
        )


@dataclass(frozen=True)
class TrainReport:
    """A finished run."""

    steps: int
    """Steps of the run, those of earlier sessions included."""
    losses: tuple[LossPoint, ...]
    """Of each of these steps."""
    images_per_second: float
    """Images trained in this session per second of its wall clock, from the wait for the first
    batch to the last evaluation: waits, evaluation, logs and checkpoints count. 0 where no step was
    left to do.
    """
    wait_share: float
    """Share of the same wall clock in which the device waited for a batch, 0 to 1."""
    checkpoint: str
    """Path of the newest checkpoint."""
    ap: AveragePrecision | None
    """Of the last weights; None without ``val_shards``."""
    plan: TrainingPlan
    """What was decided for the run."""
    best: AveragePrecision | None = None
    """The highest one of masks, of the weights in ``best-STEP.pt``; None without ``val_shards``."""
    skipped_steps: int = 0
    """Steps of this session that left the weights as they were, since their loss or a gradient was
    not finite.
    """

    def __str__(self) -> str:
        losses = [point.loss for point in self.losses if math.isfinite(point.loss)]
        tenth = max(1, len(losses) // 10)
        first = average_losses(losses[:tenth])
        last = average_losses(losses[-tenth:])
        text = (
            f"{self.steps} steps, loss {first:.2f} -> {last:.2f}, "
            f"{self.images_per_second:.1f} images/s, wait {self.wait_share:.0%}, {self.checkpoint}"
        )
        if self.skipped_steps:
            text += f"; {self.skipped_steps} steps skipped"
        if self.ap:
            text += f"; {self.ap}"
        if self.best and self.best.step != self.steps:
            text += f"; best after step {self.best.step}: {self.best}"
        return text
