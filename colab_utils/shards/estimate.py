"""What the shards of a dataset will cost on this machine, measured on a few images."""

from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import numpy as np

from colab_utils.data.coco import CocoDataset
from colab_utils.errors import ColabUtilsError
from colab_utils.places import Place, open_place
from colab_utils.processes import fork_pool
from colab_utils.shards.index import Storage
from colab_utils.shards.plan import (
    Annotations,
    count_processes,
    make_recipe,
    open_annotations,
    read_sample,
    try_images,
)
from colab_utils.units import format_bytes


@dataclass(frozen=True)
class ShardPlan:
    """The storage that :func:`plan_shards` picked, and what it costs on this machine."""

    storage: Storage
    reason: str
    bytes: int
    """Size of the shards and their arrays, for the complete dataset."""
    write_s: float
    """Seconds to write the complete dataset."""
    images: int
    sampled_images: int
    """Images that were measured."""

    def __str__(self) -> str:
        cost = f"{format_bytes(self.bytes)} and {self.write_s / 60:.1f} minutes to write"
        measured = f"measured on {self.sampled_images:,} of {self.images:,} images"
        return f"{self.storage}: {self.reason}. About {cost} ({measured})."


def plan_shards(
    images: str | Place,
    annotations: Annotations,
    *,
    storage: Storage | Literal["auto"] = "auto",
    min_size: int = 800,
    max_size: int = 1333,
    workers: int | Literal["auto"] = "auto",
) -> ShardPlan:
    """Pick a storage for `write_shards`, and measure it on a few images. Nothing is written.

    If no image is larger than training needs, "keep" is picked: every file keeps its bytes. Else
    "shrink" is picked.

    Args:
        images: the image folder.
        annotations: COCO instance JSON, or the result of `open_annotations`.
        storage: the storage to measure (see `write_shards`); "auto" picks it.
        min_size: the shorter side that training needs, in pixels.
        max_size: the longer side that training needs, in pixels.
        workers: number of processes that will write; "auto" is one for each core.

    Raises:
        ColabUtilsError: if the input is missing or not COCO, no image is usable, or a setting is
            out of range.

    Example:
        >>> import tempfile
        >>> from colab_utils.course.sample_data import make_dataset
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = make_dataset(folder, n=4, width=64, height=64, workers=1)
        ...     plan = plan_shards(made.images, made.annotations, workers=1)
        >>> plan.storage, plan.reason
        ('keep', 'no image is larger than training needs, every file keeps its bytes')
    """
    processes = count_processes(workers)
    picked = "keep" if storage == "auto" else storage
    recipe = make_recipe(picked, min_size=min_size, max_size=max_size)
    dataset = open_annotations(images, annotations)
    reason = "you asked for it"
    if storage == "auto":
        recipe["storage"], reason = _pick_storage(dataset, min_size, max_size)
    images = open_place(images)
    started_s = perf_counter()
    files = read_sample(images, dataset)
    # Several files are read at once, as a writer reads them, so each takes its share of the time.
    read_s = (perf_counter() - started_s) / len(files)
    # The first image loads the libraries, which must not be timed.
    with suppress(ColabUtilsError):
        try_images(images, files[:1], recipe)
    with fork_pool(processes) as pool:
        costs = try_images(images, files, recipe, pool.map)
    tar_bytes, arrays_bytes, work_s = np.mean(costs, axis=0).tolist()
    return ShardPlan(
        storage=recipe["storage"],
        reason=reason,
        bytes=round(len(dataset) * (tar_bytes + arrays_bytes)),
        write_s=len(dataset) * max(work_s, read_s) / processes,
        images=len(dataset),
        sampled_images=len(costs),
    )


def _pick_storage(dataset: CocoDataset, min_size: int, max_size: int) -> tuple[Storage, str]:
    """Return a storage and the reason for it, by the sizes in the annotations.

    An image counts as larger than training needs if the annotations give no size (0).
    """
    shorter = dataset.sizes.min(1)
    longer = dataset.sizes.max(1)
    is_larger = (shorter > min_size) | (longer > max_size) | (shorter == 0)
    count = int(is_larger.sum())
    if not count:
        return "keep", "no image is larger than training needs, every file keeps its bytes"
    return "shrink", (
        f"{count:,} of {len(dataset):,} images are larger than training needs and are shrunk once"
    )
