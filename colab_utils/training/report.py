"""What a training run says: a plan before it starts, a line while it runs, a report when it is done."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from colab_utils.training.evaluation import AveragePrecision

__all__ = ["LogLine", "LossPoint", "TrainReport", "TrainingPlan"]


@dataclass(frozen=True)
class TrainingPlan:
    """Everything that was decided for a run; sizes in pixels. ``str()`` gives the line for the log."""

    dataset: str  # fingerprint of the annotations
    model: str
    starts_from: str  # "coco", "imagenet" or "random" weights
    device: str
    precision: str
    num_classes: int  # including the background
    images: int  # with objects: those trained on
    skipped_images: int  # without objects, left out
    batch_size: int
    min_size: int
    max_size: int
    learning_rate: float  # the highest, reached after the warm-up
    steps: int  # of the whole run
    seed: int
    first_step: int = 0  # steps that an earlier session did
    changed: str = ""  # what is not as in that session, and makes a new epoch begin

    def __str__(self) -> str:
        skipped = f", {self.skipped_images} without objects left out" if self.skipped_images else ""
        resumed = f", resumed after step {self.first_step}" if self.first_step else ""
        resumed += f" in a new epoch ({self.changed})" if self.changed else ""
        return (
            f"{self.model} from {self.starts_from} weights on {self.device} in {self.precision}: "
            f"{self.num_classes - 1} classes, {self.images} images{skipped}, batches of {self.batch_size}, "
            f"shorter side {self.min_size} px, learning rate {self.learning_rate:g}, "
            f"{self.steps} steps{resumed}"
        )


@dataclass(frozen=True)
class LossPoint:
    """The total loss of one step; the first step is 1."""

    step: int
    loss: float


@dataclass(frozen=True)
class LogLine:
    """What happened since the line before: mean loss, pace, and the share of time spent waiting for data."""

    step: int
    steps: int
    loss: float
    learning_rate: float
    images_per_second: float
    wait_share: float

    def __str__(self) -> str:
        return (
            f"step {self.step}/{self.steps}  loss {self.loss:.3f}  lr {self.learning_rate:.5f}  "
            f"{self.images_per_second:.1f} images/s  wait {self.wait_share:.0%}"
        )


@dataclass(frozen=True)
class TrainReport:
    """A finished run. Pace and wait are of this session, without its first step and without checkpoints."""

    steps: int
    losses: tuple[LossPoint, ...]  # of every step of the run, those of earlier sessions included
    images_per_second: float
    wait_share: float  # wait / (wait + step), 0 to 1: near 0 the device was always busy
    checkpoint: str
    ap: AveragePrecision | None  # None without ``val_shards``
    plan: TrainingPlan

    def __str__(self) -> str:
        tenth = max(1, len(self.losses) // 10)
        first = fmean(point.loss for point in self.losses[:tenth])
        last = fmean(point.loss for point in self.losses[-tenth:])
        ap = f"; {self.ap}" if self.ap else ""
        return (
            f"{self.steps} steps, loss {first:.2f} -> {last:.2f}, {self.images_per_second:.1f} images/s, "
            f"wait {self.wait_share:.0%}, {self.checkpoint}{ap}"
        )
