"""The settings of shards. How many images each shard gets is measured on a few images."""

from functools import partial
from itertools import accumulate
from statistics import fmean
from tarfile import BLOCKSIZE
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.coco import CocoDataset
from colab_utils.data.orientation import Exif, choose_turn
from colab_utils.data.sizes import SIDE_RANGE
from colab_utils.errors import ColabUtilsError
from colab_utils.files import open_store
from colab_utils.places import Place
from colab_utils.processes import ThreadPool
from colab_utils.require import require_choice, require_number
from colab_utils.shards.arrays import pack_record
from colab_utils.shards.index import SkippedImage, Storage
from colab_utils.shards.records import Sample, read_image, try_sample

if TYPE_CHECKING:
    from colab_utils.file_cache import FileCache

# Target sizes of the first shards.
_FIRST_SHARDS_MB = (4, 8, 16, 32, 64, 128, 256, 512)
# Seed of the order of the images.
_ORDER_SEED = 0
# A few images are measured, and stand for the whole dataset.
_TRIED_IMAGES = 16
_RANGES = {"min_size": SIDE_RANGE, "max_size": SIDE_RANGE, "shard_mb": (1e-9, 1024)}


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
        recipe[name] = int(number) if float(number).is_integer() else number
    return recipe


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


def plan_windows(recipe: dict[str, Any], shards: int, seed: int) -> list[list[int]]:
    """Return the shards in the order of their copy, cut into windows. In its first epoch, training
    reads one window after the other.

    The small first shards come first, each alone. The others follow in a random order. Their
    windows grow to the number of shards that are copied at the same time.

    Example:
        >>> [len(window) for window in plan_windows({"ramp_mb": [4, 8]}, 12, seed=0)]
        [1, 1, 1, 1, 2, 4, 2]
    """
    ramp = min(shards, len(recipe.get("ramp_mb", ())))
    others = ramp + np.random.default_rng(seed).permutation(shards - ramp)
    windows = np.split(others, [1, 2, *range(4, len(others), 4)])
    return [[number] for number in range(ramp)] + [w.tolist() for w in windows if len(w)]


def plan_recipe(
    images: Place, dataset: CocoDataset, recipe: dict[str, Any], cache: "FileCache | None" = None
) -> dict[str, Any]:
    """Return the recipe of new shards: the given recipe, and settings that say how many images
    each shard gets, and in which order.

    The first shards are small, so that training can begin early. Each is about twice as large as
    the one before, up to ``shard_mb``. The order of the images is random, because many datasets are
    sorted by class.

    A few images that are spread over the dataset are read and made into samples. Their files are
    kept in ``cache``.

    Raises:
        ColabUtilsError: if none of these images is usable, or there is no image.
        UnavailableError: if Drive went away.
    """
    if "images_per_shard" in recipe:
        return recipe
    if not len(dataset):
        raise ColabUtilsError("The annotations list no image. Name another file.")
    # Recipes of older versions do not have it. Their photos are decoded at full size.
    recipe = {**recipe, "reduced_decode": recipe["storage"] == "shrink"}
    count = min(_TRIED_IMAGES, len(dataset))
    places = np.linspace(0, len(dataset) - 1, count).astype(np.int64).tolist()
    store = open_store(images)
    read = partial(read_image, store, dataset, cache=cache)
    with ThreadPool(count) as pool:
        # These files come while the photos are looked at.
        files = [pool.submit(read, place) for place in places]
        if "exif" not in recipe:
            turn = choose_turn(images, dataset, read=None if cache is None else read)
            recipe = {**recipe, "exif": turn}
        outcomes = [
            try_sample(file.result, dataset, place, recipe)
            for file, place in zip(files, places, strict=True)
        ]
    costs = [_measure_bytes(outcome) for outcome in outcomes if isinstance(outcome, Sample)]
    if isinstance(outcomes[0], SkippedImage) and not costs:
        raise ColabUtilsError(
            f"No image that was tried in {images} can be used; the first is "
            f"{outcomes[0].file_name}: {outcomes[0].reason}. Name the right image folder, or run "
            "`check` to see what is wrong."
        )
    shard_mb = recipe["shard_mb"]
    return {
        **recipe,
        "images_per_shard": max(1, round(shard_mb * 1e6 / fmean(costs))),
        "ramp_mb": [size_mb for size_mb in _FIRST_SHARDS_MB if size_mb < shard_mb],
        "seed": _ORDER_SEED,
    }


def _measure_bytes(sample: Sample) -> int:
    """Return the bytes of a sample in a tar, or those of its arrays if these are more."""
    files = [*sample.files.values()]
    arrays = pack_record(sample.record, files, (0, 0))
    arrays_bytes = sum(array.nbytes for array in arrays.values())
    # Before each file there is a block, and its last block is filled up.
    tar_bytes = sum(BLOCKSIZE + len(content) + -len(content) % BLOCKSIZE for content in files)
    return max(arrays_bytes, tar_bytes)
