"""What a training run says: a plan before it starts, a line while it runs, a report when it is done."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.dataset import ShardDataset
from colab_utils.runtime import format_bytes
from colab_utils.shards.images import fit_size
from colab_utils.training.augment import Augment
from colab_utils.training.evaluate import AveragePrecision
from colab_utils.training.model import GPU_MODEL, LIGHT_MODEL, check_model_name

__all__ = [
    "BestCheckpoint",
    "LogLine",
    "LossPoint",
    "RunSettings",
    "TrainReport",
    "TrainingImages",
    "TrainingPlan",
    "check_at_least_one",
    "check_objects",
    "choose_settings",
    "open_images",
]

_NAMED = 5


class TrainingImages(NamedTuple):
    """The dataset, the rows of its images with objects, and the validation images."""

    dataset: ShardDataset
    rows: NDArray[np.int64]
    validation: ShardDataset | None

    @property
    def subset(self) -> Subset[object]:
        """The images that are trained on."""
        return Subset(self.dataset, self.rows.tolist())


def open_images(
    shards: str | Path, *, local: str | Path | None, limit_gb: float | None, val_shards: str | Path | None, seed: int
) -> TrainingImages:
    """Open the shards; see ``train`` for the arguments.

    Raises:
        ColabUtilsError: No shards, no image with objects, or validation shards with other categories.
    """
    if local is None:
        dataset = ShardDataset(shards, contiguous_labels=True)
    else:
        dataset = ArrivingShards(shards, local, limit_gb=limit_gb, contiguous_labels=True, seed=seed)
    validation = ShardDataset(val_shards, contiguous_labels=True) if val_shards else None
    if validation and validation.category_ids != dataset.category_ids:
        raise ColabUtilsError(
            f"expected the same category ids in {val_shards} as in {shards}, found others "
            f"({len(validation.category_ids)} and {len(dataset.category_ids)} categories). "
            "Make both from annotations with the same categories."
        )
    rows = np.flatnonzero(dataset.has_objects)
    if not len(rows):
        raise ColabUtilsError(
            f"expected images with objects in {shards}, found none in {len(dataset)} images. "
            "Check the annotations that the shards were made from."
        )
    return TrainingImages(dataset, rows, validation)


def check_objects(images: TrainingImages, *, min_size: int, max_size: int) -> None:
    """Warn of classes without an object, and refuse a size at which no object has a pixel.

    Raises:
        ColabUtilsError: Every object is smaller than a pixel at that size.
    """
    dataset = images.dataset
    tables = dataset.describe(images.rows.tolist())
    missing = [name for label, name in dataset.class_names.items() if not (tables["labels"] == label).any()]
    if missing:
        named = ", ".join(missing[:_NAMED]) + (f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else "")
        warnings.warn(
            f"{len(missing)} of {len(dataset.class_names)} classes have no object in the training images and will not "
            f"be learned: {named}",
            ColabUtilsWarning,
            stacklevel=3,
        )
    scales = [fit_size(*size, min_size=min_size, max_size=max_size)[0] / size[0] for size in tables["sizes"].tolist()]
    sides = tables["boxes"][:, 2:] - tables["boxes"][:, :2]
    tiny = (sides * np.repeat(scales, tables["counts"])[:, None] < 1).any(1)
    if tiny.all():
        raise ColabUtilsError(
            f"expected objects of a pixel or more at a shorter side of {min_size} pixels, found all {len(tiny):,} "
            "smaller. Train with a larger min_size, or check the boxes in the annotations."
        )
    if tiny.any():
        warnings.warn(
            f"{int(tiny.sum()):,} of {len(tiny):,} objects are less than a pixel wide or high at a shorter side of "
            f"{min_size} pixels: they can hardly be learned",
            ColabUtilsWarning,
            stacklevel=3,
        )


_LIGHT_SIDE, _USUAL_SIDE = 192, 800


_CHOICES: dict[str, tuple[str, ...]] = {"augment": (*get_args(Augment), "own"), "schedule": ("cosine", "step")}


@dataclass(frozen=True)
class RunSettings:
    """What ``train`` takes under these names; None where a batch size or learning rate is still to be found."""

    model: str
    min_size: int
    max_size: int
    augment: str
    schedule: str
    ema: float | None = None
    batch_size: int | None = None
    learning_rate: float | None = None


def choose_settings(known: Mapping[str, Any], *, on_gpu: bool, **asked: Any) -> RunSettings:
    """Settle what a run is done with.

    Args:
        known: the plan of an earlier session; empty where there is none.
        on_gpu: whether it is trained on a GPU.
        asked: fields of `RunSettings`; None where nothing is asked for.

    Raises:
        ColabUtilsError: a setting that there is not.

    Example:
        >>> choose_settings({}, on_gpu=False).min_size, choose_settings({"min_size": 400}, on_gpu=True).max_size
        (192, 667)
    """
    if asked.get("model"):
        check_model_name(asked["model"])
    check_at_least_one(min_size=asked.get("min_size"), max_size=asked.get("max_size"))
    for name, choices in _CHOICES.items():
        if asked.get(name) not in (None, *choices):
            raise ColabUtilsError(
                f"expected {name} as one of {', '.join(choices)}, found {asked[name]!r}. Pass one of them."
            )
    if asked.get("ema") is not None and not 0 < asked["ema"] < 1:
        raise ColabUtilsError(f"expected ema between 0 and 1, say 0.999, found {asked['ema']}. Pass another decay.")
    if asked.get("learning_rate") is not None and not 0 < asked["learning_rate"] < float("inf"):
        raise ColabUtilsError(
            f"expected a learning_rate above 0, say 0.005, found {asked['learning_rate']}. Pass another one."
        )
    found = {
        field.name: known.get(field.name) if asked.get(field.name) is None else asked[field.name]
        for field in fields(RunSettings)
    }
    if found["batch_size"] != known.get("batch_size"):  # the rate follows the batch
        found["learning_rate"] = asked.get("learning_rate")
    model = found["model"] or (GPU_MODEL if on_gpu else LIGHT_MODEL)
    side = found["min_size"] or (_LIGHT_SIDE if model == LIGHT_MODEL and not on_gpu else _USUAL_SIDE)
    rest = {"max_size": round(side * 5 / 3), "augment": "flip", "schedule": "cosine"}
    settled = {name: found[name] or value for name, value in rest.items()}
    return RunSettings(**(found | settled | {"model": model, "min_size": side}))


def check_at_least_one(**numbers: int | None) -> None:
    """Refuse numbers below 1, by their names.

    Example:
        >>> check_at_least_one(steps=0)
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected steps of at least 1, found 0. Pass a larger number.
    """
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ColabUtilsError(f"expected {name} of at least 1, found {value}. Pass a larger number.")


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
    """A finished run. Throughput and wait are of this session, without its first step and without checkpoints."""

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
