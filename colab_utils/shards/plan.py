"""What shards of a dataset will cost, tried on a few of its images; and the settings of a run."""

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from time import perf_counter
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.coco import CocoDataset
from colab_utils.data.coco_spool import SpooledCoco, spool_coco
from colab_utils.drive import DriveLostError, Retries
from colab_utils.errors import ColabUtilsError
from colab_utils.files import FileStamp, stamp_file
from colab_utils.machine import count_cores
from colab_utils.places import Place, open_place
from colab_utils.processes import fork_pool
from colab_utils.reader import Reader
from colab_utils.require import require_choice, require_count, require_number
from colab_utils.shards.arrays import ArraysBuilder
from colab_utils.shards.index import SkippedImage
from colab_utils.shards.records import read_image, try_sample
from colab_utils.shards.stored_images import Storage
from colab_utils.units import format_bytes

# The size that the first shard aims at, in MB, and the seed of the images' order.
_FIRST_SHARD_MB = 4
_ORDER_SEED = 0
# Images from which the images of a shard, and a plan, are worked out.
_TRIED_IMAGES = 16
_MOST_WORKERS = 2**16
_RANGES = {"min_size": (1, 2**16), "max_size": (1, 2**16), "shard_mb": (1e-9, 1024)}

Annotations = str | Place | SpooledCoco
"""A COCO JSON, or what `open_annotations` made of it: who needs it twice reads it once."""


def count_processes(workers: int | Literal["auto"]) -> int:
    """Return the number of processes that write: one for each core, unless you choose."""
    if workers == "auto":
        return count_cores()
    return require_count("workers", workers, most=_MOST_WORKERS)


def make_recipe(storage: str, **numbers: Any) -> dict[str, Any]:
    """Return the recipe of these settings, each of a type that JSON knows.

    Raises:
        ColabUtilsError: if a setting is out of range.
    """
    require_choice("storage", storage, get_args(Storage))
    recipe: dict[str, Any] = {"storage": storage}
    for name, value in numbers.items():
        least, most = _RANGES[name]
        recipe[name] = require_number(name, value, least=least, most=most)
    return recipe


def complete_recipe(recipe: dict[str, Any], image_bytes: float) -> dict[str, Any]:
    """Add to the recipe of new shards what divides the images among them.

    The first shards are small, so that training can begin on them: each aims at twice the size of
    the one before, up to ``shard_mb``. The images come in a random order, as many exports are
    sorted by class.

    Args:
        recipe: as `make_recipe` gives it.
        image_bytes: what an image takes in a shard, on average.
    """
    shard_mb = recipe["shard_mb"]
    ramp_mb = []
    size_mb = _FIRST_SHARD_MB
    while size_mb < shard_mb:
        ramp_mb.append(size_mb)
        size_mb *= 2
    images_per_shard = max(1, round(shard_mb * 1e6 / image_bytes))
    return {
        **recipe,
        "images_per_shard": images_per_shard,
        "ramp_mb": ramp_mb,
        "seed": _ORDER_SEED,
    }


def split_images(recipe: dict[str, Any], images: int) -> list[NDArray[np.int64]]:
    """Return the images of each shard, by their places in the annotations file: int64 each.

    Recipes of older versions have no ramp, no seed, or neither.

    Example:
        >>> recipe = {"shard_mb": 16, "images_per_shard": 4, "ramp_mb": [4, 8]}
        >>> [part.tolist() for part in split_images(recipe, 9)]
        [[0], [1, 2], [3, 4, 5, 6], [7, 8]]
    """
    order = np.arange(images)
    if "seed" in recipe:
        # No version of numpy changes what this generator draws.
        order = np.random.RandomState(recipe["seed"]).permutation(images)
    full = recipe["images_per_shard"]
    ramp = [max(1, round(full * mb / recipe["shard_mb"])) for mb in recipe.get("ramp_mb", ())]
    ends = [*accumulate(ramp), *range(sum(ramp) + full, images, full)]
    return [part for part in np.split(order, ends) if len(part)]


def order_shards(recipe: dict[str, Any], shards: int, seed: int) -> list[int]:
    """Return the order in which shards come: the small first ones, then the others at random."""
    ramp = min(shards, len(recipe.get("ramp_mb", ())))
    others = ramp + np.random.default_rng(seed).permutation(shards - ramp)
    return [*range(ramp), *others.tolist()]


def open_annotations(images: str | Place, annotations: Annotations) -> SpooledCoco:
    """Open the annotations, checked for all that cannot be skipped image by image.

    Those that are open already are returned as they are.

    Where Drive fails it is tried again.

    Raises:
        ColabUtilsError: if there is no image folder, or the annotations are not COCO, are empty, or
            refer to what is not there.
    """
    if isinstance(annotations, SpooledCoco):
        return annotations
    dataset = Retries().run(partial(spool_coco, images, annotations))
    if not len(dataset):
        raise ColabUtilsError(f"The list of images in {annotations} is empty. Name another file.")
    return dataset


def stamp_annotations(annotations: Annotations) -> FileStamp:
    """Return what tells that a JSON is the one that it was."""
    if isinstance(annotations, SpooledCoco):
        return annotations.stamp
    return stamp_file(open_place(annotations))


@dataclass(frozen=True)
class ShardPlan:
    """What :func:`plan_shards` picked, and what it costs on this machine."""

    storage: Storage
    reason: str
    bytes: int
    """Of the complete dataset, in the shards and their arrays."""
    write_s: float
    """Seconds to write the complete dataset."""
    images: int
    sampled_images: int
    """Those that it was measured on."""

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
    """Pick a storage for `write_shards`, and try it on a few images; nothing is written.

    Where no image is larger than training needs, every file keeps its bytes; else the larger ones
    are shrunk. Raw pixels are taken only where you ask for them.

    Args:
        images: the image folder.
        annotations: COCO instance JSON, or what `open_annotations` made of it.
        storage: "auto" picks; any other is taken.
        min_size: the shorter side that training needs, in pixels.
        max_size: the longer side that training needs, in pixels.
        workers: processes that will write; "auto" is one for each core.

    Raises:
        ColabUtilsError: if the input is missing or not COCO, no image is usable, or a setting is
            out of range.

    Example:
        >>> import tempfile
        >>> from colab_utils.sample_data import make_dataset
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
        recipe["storage"], reason = _pick_storage(dataset.images, min_size, max_size)
    images = open_place(images)
    sample = select_sample(dataset)
    # This loads the libraries, before anything is timed.
    with suppress(ColabUtilsError):
        try_images(images, sample.subset(0, 1), recipe)
    with fork_pool(processes) as pool:
        costs = try_images(images, sample, recipe, pool.map)
    tar_bytes, arrays_bytes, write_s = (len(dataset) * np.mean(costs, axis=0)).tolist()
    return ShardPlan(
        storage=recipe["storage"],
        reason=reason,
        bytes=round(tar_bytes + arrays_bytes),
        write_s=write_s / processes,
        images=len(dataset),
        sampled_images=len(costs),
    )


def _pick_storage(dataset: CocoDataset, min_size: int, max_size: int) -> tuple[Storage, str]:
    """Return a storage and its reason, by the sizes that the annotations give (0: none)."""
    shorter = dataset.sizes.min(1)
    longer = dataset.sizes.max(1)
    is_larger = (shorter > min_size) | (longer > max_size) | (shorter == 0)
    count = int(is_larger.sum())
    if not count:
        return "keep", "no image is larger than training needs, every file keeps its bytes"
    return "shrink", (
        f"{count:,} of {len(dataset):,} images are larger than training needs and are shrunk once"
    )


class ImageCost(NamedTuple):
    """What one image costs in a shard."""

    tar_bytes: int
    arrays_bytes: int
    write_s: float


def select_sample(dataset: SpooledCoco) -> CocoDataset:
    """Return a few images that are spread over the dataset."""
    count = min(_TRIED_IMAGES, len(dataset))
    return dataset.select(np.linspace(0, len(dataset) - 1, count).astype(np.int64))


def try_images(
    images: Place, sample: CocoDataset, recipe: dict[str, Any], run: Any = map
) -> list[ImageCost]:
    """Return what each image of a sample costs; bad ones are left out.

    Raises:
        ColabUtilsError: if all are bad.
    """
    parts = [sample.subset(i, i + 1) for i in range(len(sample))]
    started_s = perf_counter()
    contents = _read_at_once(images, parts)
    # Files are read ahead, while others are worked on.
    read_s = (perf_counter() - started_s) / len(parts)
    outcomes = list(run(partial(_try_image, recipe, read_s), parts, contents))
    costs = [outcome for outcome in outcomes if isinstance(outcome, ImageCost)]
    if not costs:
        example = outcomes[0]
        raise ColabUtilsError(
            f"No image that was looked at in {images} can be used, such as {example.file_name}: "
            f"{example.reason}. Name the right image folder, or see `check`."
        )
    return costs


def _read_at_once(images: Place, parts: list[CocoDataset]) -> list[bytes | ColabUtilsError]:
    """Return the content of each dataset's only image, or why it cannot be read."""

    def read(place: int) -> bytes:
        return read_image(images, parts[place], 0, retries)

    retries = Retries()
    contents: list[bytes | ColabUtilsError] = []
    reader = Reader(read, place=images, streams=_TRIED_IMAGES)
    for reading in reader.ask(range(len(parts))):
        try:
            contents.append(reading.take())
        except DriveLostError:
            raise
        except ColabUtilsError as error:
            contents.append(error)
    reader.close()
    return contents


def _try_image(
    recipe: dict[str, Any], read_s: float, part: CocoDataset, content: bytes | ColabUtilsError
) -> ImageCost | SkippedImage:
    """Return the cost of a dataset's only image, or why it is bad."""

    def read() -> bytes:
        if isinstance(content, ColabUtilsError):
            raise content
        return content

    started_s = perf_counter()
    sample = try_sample(read, part, 0, recipe)
    if isinstance(sample, SkippedImage):
        return sample
    builder = ArraysBuilder()
    builder.add(sample.record, (sample.members[0].data, b""), (0, 0))
    return ImageCost(
        tar_bytes=sum(len(piece) for member in sample.members for piece in member),
        arrays_bytes=sum(array.nbytes for array in vars(builder.build()).values()),
        write_s=max(perf_counter() - started_s, read_s),
    )
