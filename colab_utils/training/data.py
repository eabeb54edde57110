"""The images of a run: those that it trains on, and those that it is evaluated on."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.files import hash_bytes
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.opening import open_dataset
from colab_utils.places import PlaceLike


@dataclass(frozen=True)
class OpenData:
    """The images that a run trains on, and those that it is evaluated on."""

    dataset: ShardDataset | CocoFolder
    """All images, with labels from 1 on."""
    rows: NDArray[np.int64]
    """Indices of the images with objects. Only these are trained on."""
    validation: ShardDataset | None
    """The images that the average precision is measured on; None without ``val_shards``."""

    def count(self) -> dict[str, Any]:
        """Return what the plan of a run says of its images, see `TrainingPlan`."""
        dataset = self.dataset
        return {
            "dataset": dataset.fingerprint,
            "num_classes": dataset.num_classes,
            "images": len(self.rows),
            "skipped_images": len(dataset) - len(self.rows),
            "most_objects": int(dataset.counts.max()),
            "order": hash_bytes(dataset.image_ids[self.rows].tobytes()),
        }

    def match_state(self, state: dict[str, Any], order: str) -> dict[str, Any]:
        """Fit a loader's state from a checkpoint to the images of this session, and return it.

        If the images differ, the epoch begins anew, with a warning. They differ if loose files
        turned out bad, if the order of the images has changed, or if the run read shards that are
        gone.

        Args:
            state: The state of the loader.
            order: The ``order`` of the plan in the checkpoint.
        """
        are_shards_gone = state["joined"] and self.dataset.shard_of is None
        if order == self.count()["order"] and not are_shards_gone:
            return state
        warnings.warn(
            "the images are others than when the run was begun, or lie in another order: the epoch "
            "begins anew",
            ColabUtilsWarning,
            stacklevel=3,
        )
        return {**state, "images": len(self.rows), "batch": 0, "joined": [], "earlier": []}

    def describe(self) -> dict[str, Any]:
        """Return facts that all processes must agree on, because they share the batches."""
        return {
            **self.count(),
            # The sizes decide which images share a batch.
            "sizes": hash_bytes(self.dataset.sizes.tobytes()),
            "validation dataset": getattr(self.validation, "fingerprint", None),
        }


def open_images(
    shards: PlaceLike | None,
    *,
    images: PlaceLike | None,
    annotations: PlaceLike | None,
    drive: PlaceLike | None,
    ssd: str | Path | None,
    seed: int,
) -> ShardDataset | CocoFolder:
    """Open the images of a run: shards if there are any, else the loose files.

    Args:
        shards: Folder of shards, in place of loose files.
        images: Folder of loose images.
        annotations: Their COCO JSON.
        drive: Folder on Drive for the shards that are made of the loose files.
        ssd: Folder for the shards, on this machine's disk.
        seed: Decides the order in which shards are copied, or written.

    Raises:
        ColabUtilsError: No data is named, or both shards and loose files.
    """
    if shards is None and images is not None and annotations is not None and ssd is not None:
        return open_dataset(
            images, annotations, drive=drive, ssd=ssd, seed=seed, contiguous_labels=True
        )
    if shards is None or (images or annotations or drive):
        raise ColabUtilsError(
            "A run needs either shards, or images with annotations and ssd: pass one of the two. "
            "Optional: ssd for shards, drive for images."
        )
    if ssd is None:
        return ShardDataset(shards, contiguous_labels=True)
    return ArrivingShards(shards, ssd, contiguous_labels=True, seed=seed)


def find_images(
    dataset: ShardDataset | CocoFolder,
    place: PlaceLike | None,
    val_shards: PlaceLike | None,
) -> OpenData:
    """Find the images with objects, and open the validation images.

    Args:
        dataset: All images of a run.
        place: Where they lie, for messages.
        val_shards: Shards to measure the average precision on.

    Raises:
        ColabUtilsError: No image has objects, or the validation images have other categories.
    """
    validation = None
    if val_shards:
        validation = ShardDataset(val_shards, contiguous_labels=True)
        ours = (dataset.category_ids, dataset.class_names)
        if (validation.category_ids, validation.class_names) != ours:
            raise ColabUtilsError(
                f"{val_shards} has other category ids or names than {place}. Make both from "
                "annotations with the same categories."
            )
    rows = np.flatnonzero(dataset.has_objects)
    if not len(rows):
        raise ColabUtilsError(
            f"None of the {len(dataset)} images in {place} has objects. "
            "Check the annotations that the shards were made from."
        )
    return OpenData(dataset, rows, validation)
