"""The built-in dataset, which is made by code: pictures of simple shapes, with COCO annotations.

The pictures have noise, which makes their files as large as those of photos.
"""

import cmath
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

from colab_utils.data.decoding import guard_pillow
from colab_utils.data.masks import encode_segmentation, measure_mask, pack_masks
from colab_utils.data.segmentations import Entry
from colab_utils.drive import explain_write
from colab_utils.errors import ColabUtilsError
from colab_utils.files import write_file
from colab_utils.machine import count_cores
from colab_utils.places import require_local_path
from colab_utils.processes import fork_pool
from colab_utils.progress import show_progress
from colab_utils.require import require_choice, require_count
from colab_utils.units import format_bytes

_Points = list[tuple[float, float]]
# A picture, uint8 [H, W, 3].
_Pixels = NDArray[np.uint8]

_PHOTO_SIZE = (4000, 3000)
# A shape with a smaller radius, in pixels, may cover no pixel.
_SMALLEST_RADIUS = 2.0


def _make_ring(radii: Sequence[float]) -> _Points:
    """Return one corner for each radius, at equal angles, clockwise from the top."""
    corners = []
    for number, radius in enumerate(radii):
        angle = 2 * math.pi * number / len(radii)
        corners.append((radius * math.sin(angle), -radius * math.cos(angle)))
    return corners


# The corners of each kind of object lie in a circle of radius 1 around (0, 0). The y axis points
# down.
_SHAPES: dict[str, _Points] = {
    "ball": _make_ring([1.0] * 24),
    "tile": [(-0.7, -0.7), (0.7, -0.7), (0.7, 0.7), (-0.7, 0.7)],
    "pennant": [(0.0, -1.0), (0.6, 0.7), (-0.6, 0.7)],
    "starfish": _make_ring([1.0, 0.45] * 5),
    "heart": [
        (0.0, 0.95),
        (-0.8, 0.1),
        (-0.9, -0.35),
        (-0.7, -0.65),
        (-0.35, -0.65),
        (0.0, -0.3),
        (0.35, -0.65),
        (0.7, -0.65),
        (0.9, -0.35),
        (0.8, 0.1),
    ],
    "kite": [(0.0, -1.0), (0.6, -0.3), (0.0, 1.0), (-0.6, -0.3)],
}

# The ids have gaps, as in COCO.
CATEGORIES = tuple(
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
    bytes: int
    """Size of all image files together."""

    def __str__(self) -> str:
        size = format_bytes(self.bytes)
        return f"{self.n} images, {self.objects} objects, {size} in {self.images.parent}"


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
    fewest, most_objects = objects
    require_count("n", n)
    require_count("width", width, minimum=32, maximum=65_500)
    require_count("height", height, minimum=32, maximum=65_500)
    require_count("the smaller number of objects", fewest, minimum=0, maximum=most_objects)
    require_count("photos", photos, minimum=0, maximum=n)
    require_count("len(categories)", len(categories))
    for name in categories:
        require_choice("categories", name, _SHAPES)
    recipe = {
        "n": n,
        "width": width,
        "height": height,
        "objects": list(objects),
        "categories": list(categories),
        "photos": photos,
        "seed": seed,
        "version": 5,
    }
    root = require_local_path(folder)
    images = root / "images"
    annotations = root / "annotations.json"
    with explain_write(root):
        if not annotations.exists():
            processes = count_cores() if workers == "auto" else max(1, int(workers))
            _make_files(images, annotations, recipe, processes)
        text = annotations.read_bytes()
    if json.dumps(recipe).encode() not in text:
        raise ColabUtilsError(
            f"{folder} holds another dataset than {recipe}. Choose another folder."
        )
    content = json.loads(text)
    size = sum(path.stat().st_size for path in images.glob("*.jpg"))
    if size != content["info"]["bytes"]:
        raise ColabUtilsError(
            f"Some of the {n} images in {images} are missing or cut. Delete {folder} and run the "
            "same again."
        )
    return BuiltinDataset(images, annotations, n, len(content["annotations"]), size)


def _make_files(images: Path, annotations: Path, recipe: dict[str, Any], workers: int) -> None:
    """Make all images, then the JSON."""
    images.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(suffix=".part", dir=images.parent) as unfinished:
        folder = Path(unfinished) / "images"
        folder.mkdir()
        with fork_pool(workers) as pool:
            results = pool.map(partial(_make_image, folder, recipe), range(recipe["n"]))
            made = list(show_progress("making images", results, total=recipe["n"], unit="img"))
        size = sum(path.stat().st_size for path in folder.iterdir())
        folder.rename(images)
    objects: list[Entry] = []
    for image, image_objects in made:
        for annotation in image_objects:
            objects.append({"id": len(objects) + 1, "image_id": image["id"], **annotation})
    content = {
        "info": {"made_with": recipe, "bytes": size},
        "images": [image for image, _ in made],
        "annotations": objects,
        "categories": [
            category for category in CATEGORIES if category["name"] in recipe["categories"]
        ],
    }
    write_file(annotations, json.dumps(content).encode())


@guard_pillow()
def _make_image(folder: Path, recipe: dict[str, Any], index: int) -> tuple[Entry, list[Entry]]:
    """Draw and save one image. Return its COCO record, and its annotations without ids."""
    # The random numbers depend only on the seed and the image, so that it does not matter which
    # worker makes the image.
    rng = default_rng([recipe["seed"], index])
    is_photo = (index * recipe["photos"] + recipe["n"] // 2) % recipe["n"] < recipe["photos"]
    width, height = _PHOTO_SIZE if is_photo else (recipe["width"], recipe["height"])
    fewest, most_objects = recipe["objects"]
    count = int(rng.integers(fewest, most_objects, endpoint=True))
    if index % 50 == 9:
        count = 0
    names = [name for name in _SHAPES if name in recipe["categories"]]
    pixels = _paint_ground(rng, width, height)
    annotations = []
    for middle, radius in _choose_circles(rng, count, width, height):
        annotations.append(_draw_object(rng, pixels, str(rng.choice(names)), middle, radius))
    number = 1000 * index + int(rng.integers(1000))
    file_name = f"{number:012d}.jpg"
    picture = Image.fromarray(_add_grain(rng, pixels))
    picture.save(folder / file_name, "JPEG", quality=int(rng.integers(88, 94)))
    return {"id": number, "file_name": file_name, "width": width, "height": height}, annotations


def _paint_ground(rng: Generator, width: int, height: int) -> _Pixels:
    """Return a background of soft spots in dull colours."""
    spots = rng.integers(60, 160, (6, 8, 1)) + rng.integers(-25, 26, (6, 8, 3))
    small = Image.fromarray(spots.astype(np.uint8))
    return np.array(small.resize((width, height), Image.Resampling.BICUBIC))


def _choose_circles(
    rng: Generator, count: int, width: int, height: int
) -> Iterator[tuple[complex, float]]:
    """Yield the middle, x + y * 1j, and the radius of a circle for each object.

    Each lies in a cell of its own, so that no shape hides another. If the cells are too small for
    a shape, nothing is yielded.
    """
    columns = max(1, math.ceil(math.sqrt(count * width / height)))
    rows = max(1, math.ceil(count / columns))
    cell = np.array([width / columns, height / rows])
    for number in rng.permutation(columns * rows)[:count].tolist():
        # A share of the side of a square with the same area as the picture.
        radius = 0.05 * 4 ** rng.random() * math.sqrt(width * height)
        # Circles keep two pixels of distance, so that shapes do not touch after rounding.
        radius = min(radius, cell.min() / 2 - 1)
        room = cell / 2 - 1 - radius
        middle = cell * (number % columns + 0.5, number // columns + 0.5)
        x, y = rng.uniform(middle - room, middle + room).tolist()
        if radius >= _SMALLEST_RADIUS:
            yield complex(x, y), radius


def _draw_object(
    rng: Generator, pixels: _Pixels, name: str, middle: complex, radius: float
) -> Entry:
    """Draw a shape on exactly the pixels of its mask, and return its annotation without ids.

    The hue is usually that of the category, but not always, so that a model cannot rely on colour.
    """
    number = list(_SHAPES).index(name)
    hue = rng.normal(number / len(_SHAPES), 0.05) if rng.random() < 0.75 else rng.random()
    colour = hsv_to_rgb(hue % 1, rng.uniform(0.5, 0.8), rng.uniform(190, 255))
    outline = _turn_shape(rng, _SHAPES[name], middle, radius)
    rle = encode_segmentation([outline], *pixels.shape[:2])
    _paint_mask(pixels, rle, colour)
    box, area = measure_mask(rle)
    return {
        "category_id": CATEGORIES[number]["id"],
        "segmentation": [outline],
        "area": area,
        "bbox": box,
        "iscrowd": 0,
    }


def _paint_mask(pixels: _Pixels, rle: Any, colour: Sequence[float]) -> None:
    """Colour the pixels of a mask. The middle is lit, and the edge lies in the shade."""
    # Only the box is drawn, because a mask of the whole image would be slow for a large photo.
    packed = pack_masks([rle])
    left, top, right, bottom = packed.crops[0].tolist()
    size = (bottom - top, right - left)
    mask = np.unpackbits(packed.bits, count=math.prod(size)).reshape(size) > 0
    down, across = np.ogrid[-1 : 1 : size[0] * 1j, -1 : 1 : size[1] * 1j]
    light = 1 - 0.4 * np.hypot(down, across)
    pixels[top:bottom, left:right][mask] = (light[..., None] * colour)[mask]


def _turn_shape(rng: Generator, corners: _Points, middle: complex, radius: float) -> list[float]:
    """Return x, y, x, y, ... of a shape that is turned, made narrower, enlarged and moved."""
    turn = cmath.rect(radius, rng.uniform(0, 2 * math.pi))
    narrowing = rng.uniform(0.75, 1.0)
    outline = []
    for across, down in corners:
        point = middle + turn * complex(narrowing * across, down)
        outline += [round(point.real, 2), round(point.imag, 2)]
    return outline


def _add_grain(rng: Generator, pixels: _Pixels) -> _Pixels:
    """Return the picture with camera noise, which makes its JPEG as large as that of a photo."""
    height, width, _ = pixels.shape
    # The noise per pixel is weaker in a large picture, because a camera smooths its photos.
    strength = rng.uniform(15, 24) * min(1.0, (width * height / 1e6) ** -0.22)
    amplitude = max(2, round(strength))
    grain = rng.integers(-amplitude, amplitude, (height, width, 1), np.int8, endpoint=True)
    return np.clip(pixels.astype(np.int16) + grain, 0, 255).astype(np.uint8)
