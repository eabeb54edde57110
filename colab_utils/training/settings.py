"""What a run is trained with, and what it reports: a plan before it starts, lines while it runs, a report at the end."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
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
    "BestCheckpoint", "LogLine", "LossPoint", "TrainReport", "TrainingImages", "TrainingPlan", "check_at_least_one",
    "check_objects", "choose_settings", "open_images",
]  # fmt: skip

_NAMED = 5  # classes in a warning
_LIGHT_SIDE, _USUAL_SIDE = 192, 800


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
    shards: str | Path, *, local: str | Path | None, limit_gb: float | None, val_shards: str | Path | None, seed: int,
    ranks: int = 1,
) -> TrainingImages:  # fmt: skip
    """Open the shards; see ``train`` for the arguments.

    Raises:
        ColabUtilsError: No shards, no image with objects, or validation shards with other categories.
    """
    for folder in (shards, val_shards or ""):
        if not isinstance(folder, str | PathLike):
            raise ColabUtilsError(
                f"expected a folder of shards, found {type(folder).__name__}. Pass the path, such as dataset.folder."
            )
    if local is not None and ranks > 1:
        raise ColabUtilsError(
            f"expected one process to train while its shards are copied, found {ranks}. Copy them first, on every "
            "machine, and train without `local`."
        )
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


def choose_settings(known: Mapping[str, Any], *, on_gpu: bool, **asked: Any) -> dict[str, Any]:
    """Fill in the settings that nobody named: from the run's own plan, else the defaults.

    Args:
        known: The plan of an earlier session; empty for a new run.
        on_gpu: Whether it is trained on a GPU.
        asked: ``model``, ``min_size``, ``max_size``, ``augment``, ``ema``, ``batch_size``, ``learning_rate``; None
            where nothing is asked for.

    Returns:
        The same names; ``batch_size`` and ``learning_rate`` are None where they are still to be found.

    Raises:
        ColabUtilsError: A value that ``train`` does not know.

    Example:
        >>> choose_settings({}, on_gpu=False)["min_size"], choose_settings({"min_size": 400}, on_gpu=True)["max_size"]
        (192, 667)
    """
    if asked.get("model") is not None:
        if not isinstance(asked["model"], str):
            raise ColabUtilsError(
                f"expected the name of a model, found {type(asked['model']).__name__}. Pass a name, or train a model of "
                "your own by TrainingStep."
            )
        check_model_name(asked["model"])
    check_at_least_one(**{name: asked.get(name) for name in ("min_size", "max_size", "batch_size")})
    if asked.get("augment") not in (None, *get_args(Augment), "own"):
        raise ColabUtilsError(
            f"expected augment as one of {', '.join(get_args(Augment))} or transforms of your own, found "
            f"{asked['augment']!r}. Pass one of them."
        )
    if asked.get("ema") is not None and not 0 < asked["ema"] < 1:
        raise ColabUtilsError(f"expected ema between 0 and 1, say 0.999, found {asked['ema']}. Pass another decay.")
    if asked.get("learning_rate") is not None and not 0 < asked["learning_rate"] < float("inf"):
        raise ColabUtilsError(
            f"expected a learning_rate above 0, say 0.005, found {asked['learning_rate']}. Pass another one."
        )
    names = ("model", "min_size", "max_size", "augment", "ema", "batch_size", "learning_rate")
    found = {name: known.get(name) if asked.get(name) is None else asked[name] for name in names}
    if found["batch_size"] != known.get("batch_size"):  # the rate follows the batch
        found["learning_rate"] = asked.get("learning_rate")
    found["model"] = found["model"] or (GPU_MODEL if on_gpu else LIGHT_MODEL)
    is_small = found["model"] == LIGHT_MODEL and not on_gpu
    found["min_size"] = found["min_size"] or (_LIGHT_SIDE if is_small else _USUAL_SIDE)
    found["max_size"] = found["max_size"] or round(found["min_size"] * 5 / 3)
    found["augment"] = found["augment"] or "flip"
    return found


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
    """Everything that was decided for a run. ``str()`` gives the line for the log."""

    dataset: str
    """Fingerprint of the annotations."""
    model: str
    """One of ``MODEL_NAMES``."""
    starts_from: str
    """Its weights at the start: "coco", "imagenet" or "random", or a run's folder."""
    device: str
    """As torch names it."""
    precision: str
    """The dtype of autocast; float32 without it."""
    num_classes: int
    """Classes, the background included."""
    images: int
    """Images with objects: those that are trained on."""
    skipped_images: int
    """Images without objects, which are left out."""
    batch_size: int
    """Images of a step, over all processes."""
    min_size: int
    """Shorter side that images are resized to, pixels."""
    max_size: int
    """Limit of the longer side, pixels."""
    learning_rate: float
    """The highest, reached after the warm-up."""
    steps: int
    """Steps of the run, those of earlier sessions included."""
    seed: int
    """Of the order of the images, the augmentation and random weights."""
    first_step: int = 0
    """Steps that earlier sessions did."""
    changed: str = ""
    """What is not as it was in those sessions."""
    augment: str = "flip"
    """By name; "own" for transforms of your own."""
    ema: float | None = None
    """Decay of the averaged weights."""
    ranks: int = 1
    """Processes that train together."""
    parts: int = 1
    """Parts in which each batch is trained, so that it fits into the GPU's memory."""
    checkpointing: bool = False
    """Whether the backbone is run again in the backward pass, so that a batch fits."""
    memory: str = ""
    """What the heaviest batch takes, on a GPU."""

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
            f"shorter side {self.min_size} px, augmentation {self.augment}, learning rate {self.learning_rate:g}"
            f"{averaged}, {self.steps} steps{resumed}{memory}"
        )


@dataclass(frozen=True)
class LossPoint:
    """The total loss of one step; the first step is 1."""

    step: int
    loss: float


@dataclass(frozen=True)
class LogLine:
    """What happened since the line before, by the wall clock: evaluation, logs and checkpoints count."""

    step: int
    """Steps done so far."""
    steps: int
    """Steps of the run."""
    loss: float
    """Mean total loss of these steps."""
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
    ap_step: int = 0
    """The step after which that evaluation was made."""

    def __str__(self) -> str:
        memory = f"  GPU {format_bytes(self.gpu_bytes)}" if self.gpu_bytes else ""
        evaluated = f"  after step {self.ap_step}: {self.ap}" if self.ap else ""
        return (
            f"step {self.step}/{self.steps}  loss {self.loss:.3f}  lr {self.learning_rate:.5f}  "
            f"{self.images_per_second:.1f} images/s  wait {self.wait_share:.0%}{memory}{evaluated}"
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
    """A finished run."""

    steps: int
    """Steps of the run, those of earlier sessions included."""
    losses: tuple[LossPoint, ...]
    """Of each of these steps."""
    images_per_second: float
    """Images trained in this session per second of its wall clock, from the wait for the first batch to the last
    evaluation: waits, evaluation, logs and checkpoints count. 0 where no step was left to do.
    """
    wait_share: float
    """Share of the same wall clock in which the device waited for a batch, 0 to 1."""
    checkpoint: str
    """Path of the newest checkpoint."""
    ap: AveragePrecision | None
    """Of the last weights; None without ``val_shards``."""
    plan: TrainingPlan
    """What was decided for the run."""
    best: BestCheckpoint | None = None
    """None without ``val_shards``."""

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
