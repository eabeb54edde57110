"""What a training run says: a plan before it starts, a line while it runs, a report when it is done."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from colab_utils.runtime import format_bytes
from colab_utils.training.scoring import AveragePrecision

__all__ = ["BestCheckpoint", "LogLine", "LossPoint", "TrainReport", "TrainingPlan"]


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
    changed: str = ""  # what is not as in that session
    augment: str = "flip"
    schedule: str = "cosine"
    ema: float | None = None  # decay of the averaged weights
    ranks: int = 1  # processes that train together
    savings: tuple[str, ...] = ()  # names of what is done so that a batch fits into the GPU's memory
    memory: str = ""  # what the heaviest batch takes, on a GPU

    def __str__(self) -> str:
        skipped = f", {self.skipped_images} without objects left out" if self.skipped_images else ""
        resumed = f", resumed after step {self.first_step}" if self.first_step else ""
        resumed += f" ({self.changed})" if self.changed else ""
        together = f" by {self.ranks} processes" if self.ranks > 1 else ""
        averaged = f", weights averaged ({self.ema:g})" if self.ema else ""
        memory = f"\nmemory: {self.memory}" if self.memory else ""
        return (
            f"{self.model} from {self.starts_from} weights on {self.device} in {self.precision}{together}: "
            f"{self.num_classes - 1} classes, {self.images} images{skipped}, batches of {self.batch_size}, "
            f"shorter side {self.min_size} px, augmentation {self.augment}, learning rate {self.learning_rate:g} "
            f"({self.schedule}){averaged}, {self.steps} steps{resumed}{memory}"
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
    gpu_bytes: int | None = None  # the most that was held since the line before; None on a CPU
    ap: AveragePrecision | None = None  # where an evaluation ended since the line before
    ap_step: int = 0  # the step whose weights it is of

    def __str__(self) -> str:
        memory = f"  GPU {format_bytes(self.gpu_bytes)}" if self.gpu_bytes else ""
        judged = f"  after step {self.ap_step}: {self.ap}" if self.ap else ""
        return (
            f"step {self.step}/{self.steps}  loss {self.loss:.3f}  lr {self.learning_rate:.5f}  "
            f"{self.images_per_second:.1f} images/s  wait {self.wait_share:.0%}{memory}{judged}"
        )


@dataclass(frozen=True)
class BestCheckpoint:
    """The weights with the highest average precision of masks so far."""

    step: int
    bbox: float
    segm: float
    path: str

    def __str__(self) -> str:
        return f"best after step {self.step}: AP of boxes {self.bbox:.3f}, of masks {self.segm:.3f}, {self.path}"


@dataclass(frozen=True)
class TrainReport:
    """A finished run. Pace and wait are of this session, without its first step and without checkpoints."""

    steps: int
    losses: tuple[LossPoint, ...]  # of every step of the run, those of earlier sessions included
    images_per_second: float
    wait_share: float  # wait / (wait + step), 0 to 1: near 0 the device was always busy
    checkpoint: str
    ap: AveragePrecision | None  # of the last weights; None without ``val_shards``
    plan: TrainingPlan
    best: BestCheckpoint | None = None  # None without ``val_shards``

    def __str__(self) -> str:
        tenth = max(1, len(self.losses) // 10)
        first = fmean(point.loss for point in self.losses[:tenth])
        last = fmean(point.loss for point in self.losses[-tenth:])
        ap = f"; {self.ap}" if self.ap else ""
        ap += f"; {self.best}" if self.best and self.best.step != self.steps else ""
        return (
            f"{self.steps} steps, loss {first:.2f} -> {last:.2f}, {self.images_per_second:.1f} images/s, "
            f"wait {self.wait_share:.0%}, {self.checkpoint}{ap}"
        )
