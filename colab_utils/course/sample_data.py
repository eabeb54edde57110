"""The built-in dataset, which is made by code: pictures of simple shapes, with COCO annotations.

The pictures have noise, which makes their files as large as those of photos.
"""

import json
import math
from collections.abc import Iterator, Sequence
from colorsys import hsv_to_rgb
from dataclasses import dataclass
from functools import partial
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

# A picture, uint8 [H, W, 3].
_Pixels = NDArray[np.uint8]

_PHOTO_SIZE = (4000, 3000)
# A shape with a smaller radius, in pixels, may cover no pixel.
_SMALLEST_RADIUS = 2.0
# The id of the first image. The ids have gaps, as in COCO. On the bad day, files of these names
# take 0.6 s in the mean, and the slowest of 160 takes five times as long.
_FIRST_ID = 275
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
    """The files and the size of a built-in dataset."""

    images: Path
    """The image folder."""
    annotations: Path
    """The COCO JSON file."""
    n: int
    """Number of images."""
    objects: int
    """Number of annotations."""


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
    workers: int | str = "auto",
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
        workers: Number of processes. Default: "auto", one for each core.

    Raises:
        ColabUtilsError: An argument is out of range, or ``folder`` holds something else.

    Example:
        >>> import tempfile
        >>> made = make_dataset(tempfile.mkdtemp(), n=2, width=64, height=48, workers=1)
        >>> made.n, made.annotations.name, len(list(made.images.iterdir()))
        (2, 'annotations.json', 2)
    """
    require_count("n", n)
    require_count("width", width, minimum=32)
    require_count("height", height, minimum=32)
    require_count("the smaller number of objects", objects[0], minimum=0, maximum=objects[1])
    require_count("photos", photos, minimum=0, maximum=n)
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
            processes = count_cores() if workers == "auto" else max(1, int(workers))
            _make_files(images, annotations, recipe, processes)
        content = json.loads(annotations.read_bytes())
    if content.get("info") != recipe:
        raise ColabUtilsError(
            f"{folder} holds another dataset than {recipe}. Choose another folder."
        )
    return BuiltinDataset(images, annotations, n, len(content["annotations"]))


def _make_files(images: Path, annotations: Path, recipe: dict[str, Any], workers: int) -> None:
    """Make all images, then the JSON."""
    images.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(suffix=".part", dir=images.parent) as unfinished:
        folder = Path(unfinished) / "images"
        folder.mkdir()
        with fork_pool(workers) as pool:
            results = pool.map(partial(_make_image, folder, recipe), range(recipe["n"]))
            made = list(show_progress("making images", results, total=recipe["n"], unit="img"))
        folder.rename(images)
    objects = [annotation for _, image_objects in made for annotation in image_objects]
    content = {
        "info": recipe,
        "images": [image for image, _ in made],
        "annotations": [{"id": n, **each} for n, each in enumerate(objects, start=1)],
        "categories": recipe["categories"],
    }
    write_file(annotations, json.dumps(content).encode())


@guard_pillow()
def _make_image(folder: Path, recipe: dict[str, Any], index: int) -> tuple[Entry, list[Entry]]:
    """Draw and save one image. Return its COCO record, and its annotations without ids."""
    # The random numbers depend only on the seed and the image, so that it does not matter which
    # worker makes the image.
    rng = default_rng([recipe["seed"], index])
    number = 1000 * index + _FIRST_ID
    name = f"{number:012d}.jpg"
    is_photo = (index * recipe["photos"] + recipe["n"] // 2) % recipe["n"] < recipe["photos"]
    width, height = _PHOTO_SIZE if is_photo else (recipe["width"], recipe["height"])
    fewest, most_objects = recipe["objects"]
    count = 0 if index % 50 == 9 else int(rng.integers(fewest, most_objects, endpoint=True))
    pixels = _paint_ground(rng, width, height)
    annotations = []
    for middle, radius in _choose_circles(rng, count, width, height):
        category = recipe["categories"][rng.integers(len(recipe["categories"]))]
        annotation = _draw_object(rng, pixels, category, middle, radius)
        annotations.append({"image_id": number, **annotation})
    # Noise makes the JPEG as large as that of a photo. It is weaker in a large picture, because a
    # camera smooths its photos.
    noise = 12 if is_photo else 20
    grain = rng.integers(-noise, noise, (height, width, 1), np.int8, endpoint=True)
    pixels = np.clip(pixels + grain, 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(folder / name, "JPEG", quality=90)
    return {"id": number, "file_name": name, "width": width, "height": height}, annotations


def _paint_ground(rng: Generator, width: int, height: int) -> _Pixels:
    """Return a background of soft spots in dull colours."""
    small = Image.fromarray(rng.integers(80, 140, (6, 8, 3), np.uint8))
    return np.array(small.resize((width, height), Image.Resampling.BICUBIC))


def _choose_circles(
    rng: Generator, count: int, width: int, height: int
) -> Iterator[tuple[complex, float]]:
    """Yield the middle, x + y * 1j, and the radius of a circle for each object.

    Each lies in a cell of its own, so that no shape hides another. If the cells are too small for
    a shape, nothing is yielded.
    """
    columns = math.ceil(math.sqrt(max(1, count) * width / height))
    rows = math.ceil(max(1, count) / columns)
    cell = np.array([width / columns, height / rows])
    for number in rng.permutation(columns * rows)[:count].tolist():
        # A share of the side of a square with the same area as the picture.
        radius = 0.05 * 4 ** rng.random() * math.sqrt(width * height)
        # Circles keep two pixels of distance, so that shapes do not touch after rounding.
        radius = min(radius, cell.min() / 2 - 1)
        if radius >= _SMALLEST_RADIUS:
            middle = cell * (number % columns + 0.5, number // columns + 0.5)
            room = cell / 2 - 1 - radius
            yield complex(*rng.uniform(middle - room, middle + room)), radius


def _draw_object(
    rng: Generator, pixels: _Pixels, category: Entry, middle: complex, radius: float
) -> Entry:
    """Draw a shape on exactly the pixels of its mask, and return its annotation without ids.

    The hue is usually that of the category, but not always, so that a model cannot rely on colour.
    """
    outline = _turn_shape(rng, _SHAPES[category["name"]], middle, radius)
    rle = encode_segmentation([outline], *pixels.shape[:2])
    box, area = measure_mask(rle)
    left, top, width, height = map(int, box)
    crop = np.s_[top : top + height, left : left + width]
    # The ids rise to 36, which is 6 sevenths of the circle of hues.
    hue = rng.laplace(category["id"] / 42, 0.08)
    colour = hsv_to_rgb(hue % 1, rng.uniform(0.5, 0.8), rng.uniform(190, 255))
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


def _turn_shape(rng: Generator, radii: Sequence[float], middle: complex, size: float) -> Any:
    """Return x, y, x, y, ... of a shape that is turned, enlarged and moved."""
    turn = rng.uniform(0, 2 * np.pi)
    angles = np.linspace(turn, turn + 2 * np.pi, len(radii), endpoint=False)
    points = middle + size * np.array(radii) * np.exp(1j * angles)
    return points.view(float).round(2).tolist()
