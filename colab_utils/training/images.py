"""What a run trains on and is judged on: shards opened, and looked over before the first step."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.dataset import ShardDataset
from colab_utils.shards.images import fit_size

__all__ = ["TrainingImages", "check_objects", "open_images"]

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
