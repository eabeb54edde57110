"""The reports of a run: a log line every few steps, and a summary at the end."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean

from colab_utils.training.evaluate import AveragePrecision
from colab_utils.training.plan import TrainingPlan
from colab_utils.units import format_bytes


@dataclass(frozen=True)
class LossPoint:
    """The total loss of one step. The first step has the number 1."""

    step: int
    loss: float


def average_losses(losses: Iterable[float]) -> float:
    """Return the mean of the finite losses, or NaN if there are none.

    Example:
        >>> average_losses([1.0, math.nan, 2.0])
        1.5
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    return fmean(finite) if finite else math.nan


@dataclass(frozen=True)
class LogLine:
    """A line of the log: what happened since the line before. Its rates count all of the time, also
    that of evaluation, logs and checkpoints.
    """

    step: int
    """Steps done so far."""
    steps: int
    """Steps of the run."""
    loss: float
    """Mean total loss of the steps since the line before. Only finite losses count."""
    learning_rate: float
    """Learning rate of the last step."""
    images_per_second: float
    """Images trained per second of the wall clock."""
    wait_share: float
    """Share of the wall clock in which the device waited for a batch, 0 to 1."""
    gpu_bytes: int | None = None
    """The most bytes that tensors took on the GPU so far; None on a CPU."""
    ap: AveragePrecision | None = None
    """Average precision, if there was an evaluation since the line before."""

    def __str__(self) -> str:
        memory = f"  GPU {format_bytes(self.gpu_bytes)}" if self.gpu_bytes else ""
        evaluated = f"  after step {self.ap.step}: {self.ap}" if self.ap else ""
        return (
            f"step {self.step}/{self.steps}  loss {self.loss:.3f}  lr {self.learning_rate:.5f}  "
            f"{self.images_per_second:.1f} images/s  wait {self.wait_share:.0%}{memory}{evaluated}"
        )


Log = Callable[[TrainingPlan | LogLine], object]
"""What takes the plan of a run, and then each line of its log."""


@dataclass(frozen=True)
class TrainReport:
    """A finished run."""

    steps: int
    """Steps of the run, those of earlier sessions included."""
    losses: tuple[LossPoint, ...]
    """The loss of each of these steps."""
    images_per_second: float
    """Images trained in this session per second of its wall clock. The time runs from the wait for
    the first batch to the end of the last evaluation. It includes waits, evaluation, logs and
    checkpoints. 0 if no step was left to do.
    """
    wait_share: float
    """Share of the time of ``images_per_second`` in which the device waited for a batch, 0 to 1."""
    checkpoint: str
    """Path of the newest checkpoint."""
    ap: AveragePrecision | None
    """Average precision of the last weights; None without ``val_shards``."""
    plan: TrainingPlan
    """What was decided for the run."""
    best: AveragePrecision | None = None
    """Average precision of the weights in ``best-STEP.pt``; None without ``val_shards``."""
    skipped_steps: int = 0
    """Steps of this session that were skipped because their loss or a gradient was not finite."""

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
