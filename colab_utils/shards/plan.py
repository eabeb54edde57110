"""Which storage for the images? Each one is tried on a few images, on this machine, and one is picked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Literal

import numpy as np

from colab_utils.data.coco import CocoDataset
from colab_utils.data.decoding import decode_pixels
from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import count_cores, find_free_memory, find_free_space, fork_pool, format_bytes, format_seconds
from colab_utils.shards.format import SkippedImage
from colab_utils.shards.images import Storage, plan_size, read_image, try_sample
from colab_utils.shards.write import READ_STREAMS, check_settings, keep_usable, open_dataset

__all__ = ["ShardPlan", "StorageOption", "plan_shards"]

_STORAGES: tuple[Storage, ...] = ("keep", "shrink", "pixels")
_TRIED_IMAGES, _BATCH_SIZE = 32, 4
_BUSY_CORES = 0.9  # a training process takes so much to launch kernels


@dataclass(frozen=True)
class StorageOption:
    """One way to store the images and what it costs on this machine, with all cores busy."""

    storage: Storage
    bytes: int
    """Of the complete dataset, in the shards and their arrays."""
    write_s: float
    """Seconds to write the complete dataset."""
    load_cpu_ms: float
    """CPU time to decode one image."""
    images_per_second: float
    """What decoding reaches on the cores that a training step leaves free."""
    fits: bool
    """Whether the disk has room for it; for raw pixels the memory, too: a disk reads them too slowly."""


@dataclass(frozen=True)
class ShardPlan:
    """What :func:`plan_shards` measured and picked."""

    picked: StorageOption
    reason: str
    options: tuple[StorageOption, ...]
    images: int
    sampled_images: int

    def __str__(self) -> str:
        return (
            f"{self.picked.storage}: {self.reason}. About {format_bytes(self.picked.bytes)} and "
            f"{format_seconds(self.picked.write_s)} to write (measured on {self.sampled_images:,} of "
            f"{self.images:,} images)."
        )


_Cost = tuple[float, float, float]  # of one image in one storage: bytes, seconds to write, CPU seconds to load


def plan_shards(
    images: str | Path,
    annotations: str | Path,
    *,
    shards: str | Path | None = None,
    storage: Storage | Literal["auto"] = "auto",
    min_size: int = 800,
    max_size: int = 1333,
    step_ms: float | None = None,
    workers: int | Literal["auto"] = "auto",
) -> ShardPlan:
    """Try each storage on a few images, and pick one for `write_shards`; nothing is written.

    Where no image is larger than training needs, every file keeps its bytes; else the larger ones are shrunk. Raw
    pixels are picked only where decoding is slower than the given step, and all of them fit into memory.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        shards: the folder to write to: its disk must have room.
        storage: "auto" picks; any other is taken.
        min_size: the shorter side that training needs, in pixels.
        max_size: the longer side that training needs, in pixels.
        step_ms: what a training step takes for a batch of 4, in milliseconds.
        workers: processes that will write; "auto" is one for each core.

    Raises:
        ColabUtilsError: if the input is missing or not COCO, no image is usable, or a setting is out of range.

    Example:
        >>> import tempfile
        >>> from colab_utils.sample_data import make_dataset
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = make_dataset(folder, n=4, width=64, height=64, workers=1)
        ...     plan = plan_shards(made.images, made.annotations, workers=1)
        >>> plan.picked.storage, plan.reason
        ('keep', 'no image is larger than training needs, every file keeps its bytes')
    """
    processes = count_cores() if workers == "auto" else workers
    recipe = {"min_size": min_size, "max_size": max_size}
    given = {} if step_ms is None else {"step_ms": step_ms}
    check_settings(**recipe, storage="keep" if storage == "auto" else storage, workers=processes, **given)
    dataset = open_dataset(images, annotations)
    tried = _try_images(dataset, Path(images), recipe, processes)
    room = float("inf") if shards is None else find_free_space(Path(shards))
    options = []
    for name, (mean_bytes, write_s, load_s) in zip(_STORAGES, np.mean(tried, axis=0).tolist(), strict=True):
        size, rate = round(len(dataset) * mean_bytes), max(count_cores() - _BUSY_CORES, 0.1) / max(load_s, 1e-6)
        fits = size <= (min(room, find_free_memory()) if name == "pixels" else room)
        options.append(StorageOption(name, size, len(dataset) * write_s / processes, load_s * 1000, rate, fits))
    if storage != "auto":
        picked, reason = storage, "you asked for it"
    else:
        need = None if step_ms is None else _BATCH_SIZE * 1000 / step_ms
        shrunk = partial(plan_size, min_size=min_size, max_size=max_size)
        # by the annotations; one without a size counts, too
        larger = sum(not side or shrunk(side, other) != (side, other) for side, other in dataset.sizes.tolist())
        picked, reason = _pick(options, larger, len(dataset), need)
    return ShardPlan(options[_STORAGES.index(picked)], reason, tuple(options), len(dataset), len(tried))


def _try_images(dataset: CocoDataset, images: Path, recipe: dict[str, Any], processes: int) -> list[list[_Cost]]:
    """What each storage costs for images spread over the dataset, with all processes busy; bad images are left out."""
    chosen = np.linspace(0, len(dataset) - 1, min(_TRIED_IMAGES, len(dataset))).astype(int).tolist()
    parts = [dataset.subset(i, i + 1) for i in chosen]
    _try_image(images, recipe, parts[0])  # loads the libraries, before anything is timed
    with fork_pool(processes) as pool:
        return keep_usable(list(pool.map(partial(_try_image, images, recipe), parts)), images)


def _try_image(images: Path, recipe: dict[str, Any], part: CocoDataset) -> list[_Cost] | SkippedImage:
    """The costs of a dataset's only image in each storage, or why it is bad."""
    began_s, costs = perf_counter(), list[_Cost]()
    try:
        data = read_image(images, part, 0)
    except DriveLostError:
        raise
    except ColabUtilsError as error:
        return SkippedImage(part.file_name(0), str(error))
    read_s = (perf_counter() - began_s) / READ_STREAMS  # files are read ahead, while others are worked on
    for storage in _STORAGES:
        began_s = perf_counter()
        sample = try_sample(lambda: data, part, 0, {**recipe, "storage": storage})
        if isinstance(sample, SkippedImage):
            return sample
        size = sum(sample.count_bytes())
        made_s, made_cpu_s = perf_counter(), process_time()
        decode_pixels(sample.data).copy()  # the loader decodes into memory that is used again
        load_cpu_s = process_time() - made_cpu_s
        costs.append((size, max(made_s - began_s, read_s), load_cpu_s))
    return costs


def _pick(options: list[StorageOption], larger: int, count: int, need: float | None) -> tuple[Storage, str]:
    """The storage to take, and why; ``need``: images/s that the training step takes."""
    keep, shrink, pixels = options
    best, reason = keep, "no image is larger than training needs, every file keeps its bytes"
    if larger:
        best, reason = shrink, f"{larger:,} of {count:,} images are larger than training needs and are shrunk once"
    if need is None or best.images_per_second >= min(need, pixels.images_per_second):
        return best.storage, reason
    slow = f"decoding reaches {best.images_per_second:.0f} of the {need:.0f} images/s that the step takes"
    if pixels.fits:
        return pixels.storage, f"{slow}, raw pixels {pixels.images_per_second:.0f}"
    return best.storage, f"{reason}; {slow}, and raw pixels do not fit"
