"""The built-in dataset, which is made by code: pictures of simple shapes, with COCO annotations.

The pictures have noise, which makes their files as large as those of photos.
"""

import json
import math
from collections.abc import Iterator, Sequence
from colorsys import hsv_to_rgb
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coco_mask

from colab_utils.data.decoding import guard_pillow
from colab_utils.data.masks import encode_segmentation, measure_mask
from colab_utils.data.segmentations import Entry
from colab_utils.drive import explain_write
from colab_utils.errors import ColabUtilsError
from colab_utils.files import write_file
from colab_utils.machine import count_cores
from colab_utils.places import require_local_path
from colab_utils.processes import fork_pool
from colab_utils.progress import show_progress
from colab_utils.require import require_choice, require_count

# For each kind of object, the radii of its corners, which lie at equal angles.
_SHAPES: dict[str, tuple[float, ...]] = {
    "ball": (1.0,) * 24,
    "tile": (0.7, 1.0) * 4,
    "pennant": (1.0, 0.7, 0.7),
    "starfish": (1.0, 0.45) * 5,
    "heart": (0.3, 0.75, 0.95, 0.9, 0.7, 0.7, 0.95, 0.7, 0.7, 0.9, 0.95, 0.75),
    "kite": (0.6, 0.5, 1.0, 0.5),
}

# These ids have gaps, too.
CATEGORIES: tuple[Entry, ...] = tuple(
    {"id": 7 * number + 1, "name": name, "supercategory": "toy"}
    for number, name in enumerate(_SHAPES)
)


@dataclass(frozen=True)
class BuiltinDataset:
    """The files of a built-in dataset."""

    images: Path
    """The image folder."""
    annotations: Path
    """The COCO JSON file."""


def make_dataset(
    folder: str | Path,
    *,
    n: int = 500,
    width: int = 640,
    height: int = 480,
    objects: tuple[int, int] = (1, 15),
    categories: Sequence[str] = tuple(_SHAPES),
    photos: int = 0,
    seed: int = 0,
    workers: int = 0,
) -> BuiltinDataset:
    """Make the files ``folder/images/*.jpg`` and ``folder/annotations.json``, without a download.

    Reading and decoding a picture takes as long as for a photo (640x480: 100 to 200 kB). The
    pictures show simple shapes that do not overlap. Each polygon has the corners with which its
    shape was drawn. ``area`` and ``bbox`` are measured on the polygon's mask. In every 50 images,
    one has no object.

    On one machine, the same arguments give the same bytes with any number of ``workers``. If
    ``folder`` already holds this dataset, nothing is written. Files are never overwritten, and
    ``annotations.json`` is written last.

    Args:
        folder: Folder for the dataset. It is made if it does not exist.
        n: Number of images.
        width: Width of an image in pixels.
        height: Height of an image in pixels.
        objects: Smallest and largest number of objects in an image. The more there are, the
            smaller they are.
        categories: Names of the categories, from ball, tile, pennant, starfish, heart and kite.
            Default: all six.
        photos: Number of images that imitate the photos of a phone: 4000x3000 pixels, a few MB
            each. They are spread evenly over the dataset.
        seed: Seed of the random numbers. Another seed gives other pictures.
        workers: Number of processes. Default: 0, which stands for one for each core.

    Raises:
        ColabUtilsError: An argument is out of range, or ``folder`` holds something else.

    Example:
        >>> import tempfile
        >>> made = make_dataset(tempfile.mkdtemp(), n=2, width=64, height=48, workers=1)
        >>> made.annotations.name, len(list(made.images.iterdir()))
        ('annotations.json', 2)
    """
    require_count("n", n)
    require_count("width", width, minimum=32)
    require_count("height", height, minimum=32)
    require_count("the smaller number of objects", objects[0], minimum=0, maximum=objects[1])
    require_count("photos", photos, minimum=0, maximum=n)
    require_count("workers", workers, minimum=0)
    require_count("len(categories)", len(categories))
    for name in categories:
        require_choice("categories", name, _SHAPES)
    recipe = {
        "n": n,
        "width": width,
        "height": height,
        "objects": list(objects),
        "categories": [category for category in CATEGORIES if category["name"] in categories],
        "photos": photos,
        "seed": seed,
        "version": 6,
    }
    root = require_local_path(folder)
    images = root / "images"
    annotations = root / "annotations.json"
    with explain_write(root):
        if not annotations.exists():
            _make_files(images, annotations, recipe, workers or count_cores())
        # The recipe stands first in the file.
        if not annotations.read_bytes().startswith(json.dumps({"info": recipe})[:-1].encode()):
            raise ColabUtilsError(
                f"{folder} holds another dataset than {recipe}. Choose another folder."
            )
    return BuiltinDataset(images, annotations)


def _make_files(images: Path, annotations: Path, recipe: dict[str, Any], workers: int) -> None:
    """Make all images, then the JSON."""
    images.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(suffix=".part", dir=images.parent) as unfinished:
        folder = Path(unfinished) / "images"
        folder.mkdir()
        with fork_pool(workers) as pool:
            results = pool.map(partial(_make_image, folder, recipe), range(recipe["n"]))
            progress = show_progress("making images", results, total=recipe["n"], unit="img")
            records, annotations_of_each = zip(*progress, strict=True)
        folder.rename(images)
    objects = chain.from_iterable(annotations_of_each)
    content = {
        "info": recipe,
        "images": records,
        "annotations": [{"id": n, **each} for n, each in enumerate(objects, start=1)],
        "categories": recipe["categories"],
    }
    write_file(annotations, json.dumps(content).encode())


@guard_pillow()
def _make_image(folder: Path, recipe: dict[str, Any], index: int) -> tuple[Entry, list[Entry]]:
    """Draw and save one image. Return its COCO record, and its annotations without ids."""
    # The random numbers depend only on the seed and the image, so that it does not matter which
    # worker makes the image.
    rng: Any = default_rng([recipe["seed"], index])
    # The ids have gaps, as in COCO. On the bad day, files of these names take 0.6 s in the mean,
    # and the slowest of 160 takes five times as long.
    number = 1000 * index + 275
    name = f"{number:012d}.jpg"
    is_photo = (index * recipe["photos"] + recipe["n"] // 2) % recipe["n"] < recipe["photos"]
    width, height = (4000, 3000) if is_photo else (recipe["width"], recipe["height"])
    count = 0 if index % 50 == 9 else rng.integers(*recipe["objects"], endpoint=True)
    # The background has soft spots in dull colours.
    spots = Image.fromarray(rng.integers(80, 140, (6, 8, 3), np.uint8))
    pixels = np.array(spots.resize((width, height), Image.Resampling.BICUBIC))
    annotations = [
        {"image_id": number} | _draw_object(rng, pixels, rng.choice(recipe["categories"]), *circle)
        for circle in _choose_circles(rng, count, width, height)
    ]
    # Noise makes the JPEG as large as that of a photo. It is weaker in a large picture, because a
    # camera smooths its photos.
    noise = 12 if is_photo else 20
    grain = rng.integers(-noise, noise, (height, width, 1), np.int8, endpoint=True)
    picture = Image.fromarray(np.clip(pixels + grain, 0, 255).astype(np.uint8))
    picture.save(folder / name, "JPEG", quality=90)
    return {"id": number, "file_name": name, "width": width, "height": height}, annotations


def _choose_circles(
    rng: Generator, count: int, width: int, height: int
) -> Iterator[tuple[complex, float]]:
    """Yield the middle, x + y * 1j, and the radius of a circle for each object.

    Each lies in a cell of its own, so that no shape hides another. If the cells are too small for
    a shape, nothing is yielded.
    """
    columns = math.ceil(math.sqrt(max(1, count) * width / height))
    rows = math.ceil(max(1, count) / columns)
    cell = np.divide((width, height), (columns, rows))
    for number in rng.permutation(columns * rows)[:count]:
        # A share of the side of a square with the same area as the picture.
        radius = 0.05 * 4 ** rng.random() * math.sqrt(width * height)
        # Circles keep two pixels of distance, so that shapes do not touch after rounding.
        radius = min(radius, cell.min() / 2 - 1)
        # A smaller shape may cover no pixel.
        if radius >= 2:
            middle = cell * (number % columns + 0.5, number // columns + 0.5)
            room = cell / 2 - 1 - radius
            yield complex(*rng.uniform(middle - room, middle + room)), radius


def _draw_object(
    rng: Generator, pixels: NDArray[np.uint8], category: Entry, middle: complex, radius: float
) -> Entry:
    """Draw a shape on exactly the pixels of its mask, and return its annotation without ids.

    The hue is usually that of the category, but not always, so that a model cannot rely on colour.
    """
    radii = radius * np.array(_SHAPES[category["name"]])
    # The shape is turned.
    turns = rng.random() + np.arange(len(radii)) / len(radii)
    corners = middle + radii * np.exp(2j * np.pi * turns)
    outline = corners.view(float).round(2).tolist()
    rle = encode_segmentation([outline], *pixels.shape[:2])
    box, area = measure_mask(rle)
    left, top, width, height = map(int, box)
    crop = np.s_[top : top + height, left : left + width]
    # The ids rise to 36, which is 6 sevenths of the circle of hues.
    colour = hsv_to_rgb(
        rng.laplace(category["id"] / 42, 0.08) % 1, rng.uniform(0.5, 0.8), rng.uniform(190, 255)
    )
    # Light comes from above.
    shades = np.linspace(1, 0.7, height)[:, None, None] * colour
    inside = coco_mask.decode(rle)[crop][..., None] > 0
    np.copyto(pixels[crop], shades, casting="unsafe", where=inside)
    return {
        "category_id": category["id"],
        "segmentation": [outline],
        "area": area,
        "bbox": box,
        "iscrowd": 0,
    }
