"""The images of a run: its shards, whole or still arriving, and those that it is evaluated on."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from colab_utils.errors import ColabUtilsError
from colab_utils.files import hash_bytes
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.dataset import ShardDataset
from colab_utils.training.ranks import Ranks


@dataclass(frozen=True)
class OpenData:
    """The images that a run trains on, and those that it is evaluated on."""

    dataset: ShardDataset
    """All images, with labels from 1 on."""
    rows: list[int]
    """Those of the images that have objects: they are trained on."""
    validation: ShardDataset | None
    """The images that the average precision is measured on."""

    def describe(self) -> dict[str, Any]:
        """Return what must be the same in all processes, or they would share no batches."""
        order = hash_bytes(self.dataset.image_ids.tobytes(), self.dataset.sizes.tobytes())
        facts: dict[str, Any] = {
            "dataset": self.dataset.fingerprint,
            "number of images": len(self.dataset),
            "number of images with objects": len(self.rows),
            # Copies of as many images may hold others. The sizes decide which images share a batch.
            "order of the images": order,
            "validation dataset": None,
            "number of validation images": None,
        }
        if self.validation is not None:
            facts["validation dataset"] = self.validation.fingerprint
            facts["number of validation images"] = len(self.validation)
        return facts


@contextmanager
def open_data(
    shards: str | Path,
    *,
    local: str | Path | None,
    limit_gb: float | None,
    val_shards: str | Path | None,
    seed: int,
    ranks: Ranks,
) -> Iterator[OpenData]:
    """Open the images of a run; end the copying to ``local`` afterwards, if there is any.

    Raises:
        ColabUtilsError: No image with objects, or validation images of other categories.
    """
    if local is None:
        yield _find_images(ShardDataset(shards, contiguous_labels=True), shards, val_shards)
        return
    if ranks.count > 1:
        raise ColabUtilsError(
            f"expected one process to train while its shards are copied, found {ranks.count}. "
            "Copy them first, on every machine, and train without `local`."
        )
    dataset = ArrivingShards(shards, local, limit_gb=limit_gb, contiguous_labels=True, seed=seed)
    try:
        yield _find_images(dataset, shards, val_shards)
    finally:
        dataset.stop()


def _find_images(
    dataset: ShardDataset,
    shards: str | Path,
    val_shards: str | Path | None,
) -> OpenData:
    """Return the dataset with the rows of its images with objects, and the validation images."""
    validation = None
    if val_shards:
        validation = ShardDataset(val_shards, contiguous_labels=True)
        if validation.category_ids != dataset.category_ids:
            raise ColabUtilsError(
                f"expected the same category ids in {val_shards} as in {shards}, found others "
                f"({len(validation.category_ids)} and {len(dataset.category_ids)} categories). "
                "Make both from annotations with the same categories."
            )
    rows = np.flatnonzero(dataset.has_objects).tolist()
    if not rows:
        raise ColabUtilsError(
            f"expected images with objects in {shards}, found none in {len(dataset)} images. "
            "Check the annotations that the shards were made from."
        )
    return OpenData(dataset, rows, validation)
