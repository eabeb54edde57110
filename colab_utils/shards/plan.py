"""The settings of shards, and what the shards of a dataset will cost, measured on a few images."""

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from time import perf_counter
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.coco import CocoDataset, open_coco
from colab_utils.data.orientation import Exif
from colab_utils.drive import DriveLostError, Retries
from colab_utils.errors import ColabUtilsError
from colab_utils.file_cache import FileCache
from colab_utils.files import FileStamp, stamp_file
from colab_utils.machine import count_cores
from colab_utils.places import Place, open_place
from colab_utils.processes import fork_pool
from colab_utils.reader import Reader
from colab_utils.require import require_choice, require_count, require_number
from colab_utils.shards.arrays import ArraysBuilder
from colab_utils.shards.index import SkippedImage, Storage
from colab_utils.shards.records import read_image, try_sample
from colab_utils.units import format_bytes

# Target size of the first shard.
_FIRST_SHARD_MB = 4
# Seed of the order of the images.
_ORDER_SEED = 0
# A few images are measured, and stand for the whole dataset.
_TRIED_IMAGES = 16
_MOST_WORKERS = 2**16
_RANGES = {"min_size": (1, 2**16), "max_size": (1, 2**16), "shard_mb": (1e-9, 1024)}

Annotations = str | Place | CocoDataset
"""A COCO JSON, or the result of `open_annotations`. With the result, the JSON is not read again."""


def count_processes(workers: int | Literal["auto"]) -> int:
    """Return the number of processes that write. "auto" is one for each core."""
    if workers == "auto":
        return count_cores()
    return require_count("workers", workers, maximum=_MOST_WORKERS)


def make_recipe(storage: str, exif: str = "auto", **numbers: Any) -> dict[str, Any]:
    """Check settings; return them as a recipe, which JSON can hold.

    With "auto", the recipe has no ``exif``: the data decide when shards are begun.

    Raises:
        ColabUtilsError: if a setting is out of range.
    """
    require_choice("storage", storage, get_args(Storage))
    require_choice("exif", exif, get_args(Exif))
    recipe: dict[str, Any] = {"storage": storage}
    if exif != "auto":
        recipe["exif"] = exif
    for name, value in numbers.items():
        minimum, maximum = _RANGES[name]
        number = require_number(name, value, minimum=minimum, maximum=maximum)
        # 4 and 4.0 are one recipe: they have one text, and give the same bytes.
        if float(number).is_integer():
            number = int(number)
        recipe[name] = number
    return recipe


def complete_recipe(recipe: dict[str, Any], image_bytes: float) -> dict[str, Any]:
    """Return the recipe of new shards: the given recipe, and settings that say how many images
    each shard gets, and in which order.

    The first shards are small, so that training can begin early. Each is about twice as large as
    the one before, up to ``shard_mb``. The order of the images is random, because many datasets are
    sorted by class.

    Args:
        recipe: the result of `make_recipe`.
        image_bytes: bytes that an image takes in a shard, on average.
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
    """Return the images of each shard: int64 [I], the places of the images in the annotations file.

    Recipes of older versions may have no ``ramp_mb`` and no ``seed``.

    Example:
        >>> recipe = {"shard_mb": 16, "images_per_shard": 4, "ramp_mb": [4, 8]}
        >>> [images.tolist() for images in split_images(recipe, 9)]
        [[0], [1, 2], [3, 4, 5, 6], [7, 8]]
    """
    order = np.arange(images)
    if "seed" in recipe:
        # RandomState draws the same numbers in every version of numpy.
        order = np.random.RandomState(recipe["seed"]).permutation(images)
    full = recipe["images_per_shard"]
    ramp = [max(1, round(full * mb / recipe["shard_mb"])) for mb in recipe.get("ramp_mb", ())]
    ends = [*accumulate(ramp), *range(sum(ramp) + full, images, full)]
    return [shard for shard in np.split(order, ends) if len(shard)]


def order_shards(recipe: dict[str, Any], shards: int, seed: int) -> list[int]:
    """Return an order of the shards: the small first ones, then the others at random."""
    ramp = min(shards, len(recipe.get("ramp_mb", ())))
    others = ramp + np.random.default_rng(seed).permutation(shards - ramp)
    return [*range(ramp), *others.tolist()]


def open_annotations(images: str | Place, annotations: Annotations) -> CocoDataset:
    """Open the annotations, and refuse faults that cannot be cured by leaving images out.

    Annotations that are open already are returned as they are. If Drive fails, they are read again.

    Raises:
        ColabUtilsError: if there is no image folder, or the annotations are not COCO, list no
            image, or refer to an image or a category that they do not list.
    """
    if isinstance(annotations, CocoDataset):
        return annotations
    dataset = Retries().run(partial(open_coco, images, annotations))
    if not len(dataset):
        raise ColabUtilsError(f"The list of images in {annotations} is empty. Name another file.")
    return dataset


def stamp_annotations(annotations: Annotations) -> FileStamp:
    """Return the name, size and time of the JSON. If they differ later, the file was changed."""
    if isinstance(annotations, CocoDataset):
        return annotations.stamp
    return stamp_file(open_place(annotations))


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
    sample = select_sample(dataset)
    # The first image loads the libraries, which must not be timed.
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


class ImageCost(NamedTuple):
    """What one image costs in a shard."""

    tar_bytes: int
    arrays_bytes: int
    write_s: float


def select_sample(dataset: CocoDataset) -> CocoDataset:
    """Return a few images that are spread over the dataset."""
    count = min(_TRIED_IMAGES, len(dataset))
    return dataset.select(np.linspace(0, len(dataset) - 1, count).astype(np.int64))


def try_images(
    images: Place,
    sample: CocoDataset,
    recipe: dict[str, Any],
    run: Any = map,
    cache: FileCache | None = None,
) -> list[ImageCost]:
    """Return what each image of a sample costs. Bad images are left out. The files are kept in
    ``cache``.

    Raises:
        ColabUtilsError: if all images of the sample are bad.
    """
    singles = [sample.subset(i, i + 1) for i in range(len(sample))]
    started_s = perf_counter()
    contents = _read_at_once(images, singles, cache)
    # Several files are read at once, as a writer reads them, so each takes its share of the time.
    read_s = (perf_counter() - started_s) / len(singles)
    outcomes = list(run(partial(_try_image, recipe, read_s), singles, contents))
    costs = [outcome for outcome in outcomes if isinstance(outcome, ImageCost)]
    if not costs:
        example = outcomes[0]
        raise ColabUtilsError(
            f"No image that was tried in {images} can be used; the first is {example.file_name}: "
            f"{example.reason}. Name the right image folder, or run `check` to see what is wrong."
        )
    return costs


def _read_at_once(
    images: Place, singles: list[CocoDataset], cache: FileCache | None
) -> list[bytes | ColabUtilsError]:
    """Read images at the same time; return the bytes of each, or its error.

    Each of ``singles`` is a dataset of one image.
    """

    def read(place: int) -> bytes:
        return read_image(images, singles[place], 0, retries, cache)

    retries = Retries()
    contents: list[bytes | ColabUtilsError] = []
    reader = Reader(read, place=images, streams=_TRIED_IMAGES)
    for reading in reader.ask(range(len(singles))):
        try:
            contents.append(reading.take())
        except DriveLostError:
            raise
        except ColabUtilsError as error:
            contents.append(error)
    reader.close()
    return contents


def _try_image(
    recipe: dict[str, Any], read_s: float, single: CocoDataset, content: bytes | ColabUtilsError
) -> ImageCost | SkippedImage:
    """Return the cost of the only image of a dataset, or a `SkippedImage` if it is bad."""

    def read() -> bytes:
        if isinstance(content, ColabUtilsError):
            raise content
        return content

    started_s = perf_counter()
    sample = try_sample(read, single, 0, recipe)
    if isinstance(sample, SkippedImage):
        return sample
    builder = ArraysBuilder()
    builder.add(sample.record, (sample.members[0].data, b""), (0, 0))
    return ImageCost(
        tar_bytes=sum(len(piece) for member in sample.members for piece in member),
        arrays_bytes=sum(array.nbytes for array in vars(builder.build()).values()),
        write_s=max(perf_counter() - started_s, read_s),
    )
