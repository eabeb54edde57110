"""What a run says: its plan, which its checkpoints hold, too, a log line every few steps, and a
summary at the end.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import fmean

from colab_utils.loading.loader import Loader
from colab_utils.training.evaluate import AveragePrecision
from colab_utils.training.prepare import OpenData
from colab_utils.training.settings import TrainSettings
from colab_utils.training.step import TrainingStep
from colab_utils.units import format_bytes, format_count


@dataclass(frozen=True, kw_only=True)
class TrainingPlan(TrainSettings):
    """Everything that was decided for a run. ``str()`` gives the line for the log."""

    dataset: str
    """Fingerprint of the annotations."""
    starts_from: str
    """The model's weights at the start: "coco", "imagenet" or "random"."""
    device: str
    """Name of the device in torch, such as "cuda:0"."""
    precision: str
    """The dtype of autocast; "float32" without autocast."""
    num_classes: int
    """Classes, the background included."""
    images: int
    """Images with objects. These are trained on."""
    skipped_images: int
    """Images without objects, which are left out."""
    first_step: int = 0
    """Steps that earlier sessions did."""
    ranks: int = 1
    """Processes that train together."""
    most_objects: int = 0
    """Objects of the image that has the most."""
    order: str = ""
    """Checksum of the ids of the training images, in their order, and of which ones are wide."""

    def __str__(self) -> str:
        memory = ""
        if self.peak_bytes:
            memory = (
                f"\nmemory: the heaviest batch takes {format_bytes(self.peak_bytes)} of "
                f"{format_bytes(self.limit_bytes)}, in parts: {self.parts}"
            )
        return (
            f"{self.model} from {self.starts_from} weights on {self.device} in {self.precision} by "
            f"{format_count(self.ranks, 'process', 'processes')}: "
            f"{format_count(self.num_classes - 1, 'class', 'classes')}, "
            f"{format_count(self.images, 'image')} ({self.skipped_images:,} more have no objects), "
            f"batches of {self.batch_size}, shorter side {self.min_size} px, augmentation "
            f"{self.augment}, learning rate {self.learning_rate:g}, steps {self.first_step + 1} to "
            f"{self.steps}{memory}"
        )


def make_plan(
    step: TrainingStep,
    settings: TrainSettings,
    data: OpenData,
    loader: Loader,
    *,
    first_step: int,
) -> TrainingPlan:
    """Write down everything that was decided for a run.

    Args:
        step: The step of the run, with its model.
        settings: All settings of the run.
        data: The images that it trains on.
        loader: It stands at the place in the epoch where the run continues.
        first_step: Steps that earlier sessions did.
    """
    later_epochs = (settings.epochs or 1) - loader.epoch - 1
    left = loader.left + later_epochs * -(-len(data.rows) // loader.batch_size)
    steps = settings.steps or first_step + max(0, left)
    return TrainingPlan(
        **vars(replace(settings, steps=steps)),
        **data.facts,
        starts_from=str(step.model.starts_from),
        device=str(step.device),
        precision=str(step.precision).removeprefix("torch."),
        first_step=first_step,
        ranks=step.ranks.count,
    )


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

    Example:
        >>> ap = AveragePrecision(0.3, 0.2, 0.5, 0.4, 9, 30)
        >>> print(LogLine(40, 200, 1.9123, 0.005, 5.31, 0.024, 9_100_000_000, ap))
        step 40/200  loss 1.912  lr 0.00500  5.3 images/s  wait 2%  GPU 9.1 GB  after step 30: AP...
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
    """A run that is finished, or that its budget has stopped."""

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
        if self.best:
            text += f"; best after step {self.best.step}: {self.best}"
        if self.steps < self.plan.steps:
            text += (
                f"; stopped by its budget before step {self.steps + 1} of {self.plan.steps}: run "
                "the same again to go on"
            )
        return text
