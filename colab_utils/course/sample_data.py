"""The built-in dataset, which is made by code: pictures of simple shapes, with COCO annotations.

The pictures have noise, which makes their files as large as those of photos.
"""

import cmath
import json
import math
from collections.abc import Sequence
from colorsys import hsv_to_rgb
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageDraw

from colab_utils.data.decoding import guard_pillow
from colab_utils.data.masks import encode_segmentation, measure_mask, pack_masks, read_counts
from colab_utils.data.segmentations import Entry
from colab_utils.drive import explain_write
from colab_utils.errors import ColabUtilsError
from colab_utils.files import write_file
from colab_utils.machine import count_cores
from colab_utils.places import require_local_path
from colab_utils.processes import fork_pool
from colab_utils.progress import show_progress
from colab_utils.units import format_bytes

_Points = list[tuple[float, float]]
_Circle = tuple[float, float, float]
_Colour = tuple[float, float, float]

_PHOTO_SIZE = (4000, 3000)
_SMALLEST_RADIUS = 3.5
_CROWD_SHAPES = 24
_PLACES_TRIED = 200


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
    """Number of annotations, crowd regions included."""
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
    one has a crowd region (``iscrowd`` 1, uncompressed RLE) and one has no object.

    On one machine, the same arguments give the same bytes with any number of ``workers``. If
    ``folder`` already holds this dataset, nothing is written. Files are never overwritten, and
    ``annotations.json`` is written last.

    Args:
        folder: Folder for the dataset. It is made if it does not exist.
        n: Number of images.
        width: Width of an image in pixels.
        height: Height of an image in pixels.
        objects: Smallest and largest number of objects in an image. Above 10, the objects are
            smaller.
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
    recipe = {
        "n": n,
        "width": width,
        "height": height,
        "objects": list(objects),
        "categories": list(categories),
        "photos": photos,
        "seed": seed,
        "version": 4,
    }
    _check_recipe(recipe)
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


def _check_recipe(recipe: dict[str, Any]) -> None:
    """Raise an error if a value is out of range. The error lists the allowed values."""
    fewest, most_objects = recipe["objects"]
    sides = (recipe["width"], recipe["height"])
    is_allowed = (
        recipe["n"] > 0
        and 0 <= recipe["photos"] <= recipe["n"]
        and min(sides) >= 32
        and max(sides) <= 65_500
        and 0 <= fewest <= most_objects
        and len(recipe["categories"]) > 0
        and set(recipe["categories"]) <= set(_SHAPES)
    )
    if not is_allowed:
        numbers = "n > 0, photos <= n, sides 32 to 65,500, fewest <= most objects"
        names = ", ".join(_SHAPES)
        raise ColabUtilsError(
            f"A dataset cannot be made of {recipe}. Choose {numbers}, and categories of {names}."
        )


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
    has_crowd = index % 50 == 4 and most_objects > 0
    names = [name for name in _SHAPES if name in recipe["categories"]]

    scene = _Scene(rng, width, height)
    annotations = []
    if has_crowd:
        annotations.append(scene.add_crowd(str(rng.choice(names))))
    for _ in range(count):
        annotation = scene.add_object(str(rng.choice(names)), count)
        if annotation is not None:
            annotations.append(annotation)
    picture = _add_grain(rng, scene.picture)

    number = 1000 * index + int(rng.integers(1000))
    file_name = f"{number:012d}.jpg"
    picture.save(folder / file_name, "JPEG", quality=int(rng.integers(88, 94)))
    return {"id": number, "file_name": file_name, "width": width, "height": height}, annotations


class _Scene:
    """A picture to which shapes are added.

    Each shape lies in a circle of its own, so that no shape hides another.

    Attributes:
        picture: The picture so far, RGB.
        circles: The x, y and radius of the circle around each shape, in pixels.
    """

    def __init__(self, rng: Generator, width: int, height: int) -> None:
        self.rng = rng
        self.width = width
        self.height = height
        self.picture = _paint_ground(rng, width, height)
        self.circles: list[_Circle] = []
        # The side of a square with the same area as the picture.
        self._side = math.sqrt(width * height)

    def add_object(self, name: str, count: int) -> Entry | None:
        """Draw one of ``count`` objects. Return its annotation, or None if there is no room."""
        share = 0.05 * (0.2 / 0.05) ** self.rng.random()
        if count > 10:
            share *= math.sqrt(10 / count)
        middle = self.rng.uniform((0, 0), (self.width, self.height))
        circle = self._find_room(share * self._side, middle, spread=self._side)
        if circle is None:
            return None
        polygon = self._draw_shape(name, circle, self._choose_colour(name))
        return self._annotate(name, _to_segmentation(polygon), is_crowd=False)

    def add_crowd(self, name: str) -> Entry:
        """Draw many small shapes of one category. Return one annotation for all of them."""
        colour = self._choose_colour(name)
        middle = self.rng.uniform((0.2, 0.2), (0.8, 0.8)) * (self.width, self.height)
        segmentation = []
        for _ in range(_CROWD_SHAPES):
            circle = self._find_room(0.0225 * self._side, middle, spread=0.1 * self._side)
            if circle is not None:
                polygon = self._draw_shape(name, circle, colour)
                segmentation += _to_segmentation(polygon)
        rle = encode_segmentation(segmentation, self.height, self.width)
        runs = {"counts": read_counts(rle["counts"]), "size": rle["size"]}
        return self._annotate(name, runs, is_crowd=True)

    def _find_room(
        self, radius: float, middle: NDArray[np.float64], spread: float
    ) -> _Circle | None:
        """Return a free circle near ``middle``, or None if no place is free.

        At each further place that is tried, the radius is a little smaller.
        """
        radius = min(radius, 0.4 * min(self.width, self.height))
        taken = np.array(self.circles).reshape(-1, 3)
        place = middle
        for _ in range(_PLACES_TRIED):
            radius = max(radius, _SMALLEST_RADIUS)
            farthest = np.subtract((self.width, self.height), radius + 1)
            x, y = np.clip(place, radius + 1, farthest).tolist()
            distances = np.hypot(taken[:, 0] - x, taken[:, 1] - y)
            # Circles keep two pixels of distance, so that shapes do not touch after rounding.
            if (distances > taken[:, 2] + radius + 2).all():
                return x, y, radius
            place = self.rng.normal(middle, spread) % (self.width, self.height)
            radius *= 0.97
        return None

    def _choose_colour(self, name: str) -> _Colour:
        """Return hue, saturation and value, each from 0 to 1.

        The hue is usually that of the category, but not always, so that a model cannot rely on
        colour.
        """
        hue = self.rng.normal(list(_SHAPES).index(name) / len(_SHAPES), 0.05)
        if self.rng.random() < 0.25:
            hue = self.rng.random()
        return hue % 1, self.rng.uniform(0.5, 0.8), self.rng.uniform(0.75, 1.0)

    def _draw_shape(self, name: str, circle: _Circle, colour: _Colour) -> _Points:
        """Draw a shape on exactly the pixels of its mask, its edge darker. Return its corners."""
        self.circles.append(circle)
        x, y, radius = circle
        angle = self.rng.uniform(0, 2 * math.pi)
        narrowing = self.rng.uniform(0.75, 1.0)
        corners = [(narrowing * across, down) for across, down in _SHAPES[name]]
        polygon = _turn_shape(corners, angle, x, y, radius)
        left, top, shape = _draw_polygon(polygon, self.width, self.height)
        inside = Image.new("L", shape.size)
        inner = np.subtract(_turn_shape(corners, angle, x, y, 0.88 * radius), (left, top))
        ImageDraw.Draw(inside).polygon(inner.ravel().tolist(), fill=255)
        inside = ImageChops.darker(shape, inside)
        hue, saturation, value = colour
        self.picture.paste(_to_rgb(hue, saturation, 0.55 * value), (left, top), shape)
        self.picture.paste(_to_rgb(hue, saturation, value), (left, top), inside)
        return polygon

    def _annotate(self, name: str, segmentation: Any, *, is_crowd: bool) -> Entry:
        """Return a COCO annotation. Its area and box are measured on its mask."""
        box, area = measure_mask(encode_segmentation(segmentation, self.height, self.width))
        return {
            "category_id": CATEGORIES[list(_SHAPES).index(name)]["id"],
            "segmentation": segmentation,
            "area": area,
            "bbox": box,
            "iscrowd": int(is_crowd),
        }


def _turn_shape(corners: _Points, angle: float, x: float, y: float, radius: float) -> _Points:
    """Return the corners of a shape after turning it, enlarging it and moving it to (x, y)."""
    turn = cmath.rect(radius, angle)
    turned = []
    for across, down in corners:
        point = complex(x, y) + turn * complex(across, down)
        turned.append((round(point.real, 2), round(point.imag, 2)))
    return turned


def _to_segmentation(polygon: _Points) -> list[list[float]]:
    """Return a polygon as COCO has it: a list of parts. The only part here is x, y, x, y, ..."""
    return [[coordinate for corner in polygon for coordinate in corner]]


def _draw_polygon(polygon: _Points, width: int, height: int) -> tuple[int, int, Image.Image]:
    """Return the left and top of a polygon's box, and a picture of its mask, white on black.

    The picture is as large as the box. The mask is the one that COCO readers decode.
    """
    packed = pack_masks([encode_segmentation(_to_segmentation(polygon), height, width)])
    left, top, right, bottom = packed.crops[0].tolist()
    # Only the box is drawn, because a mask of the whole image would be slow for a large photo.
    rows = bottom - top
    columns = right - left
    mask = np.unpackbits(packed.bits, count=rows * columns).reshape(rows, columns)
    return left, top, Image.fromarray(255 * mask)


def _paint_ground(rng: Generator, width: int, height: int) -> Image.Image:
    """Return a background of soft spots in a dark and a light colour of the same hue."""
    coarse = _make_spots(rng, 6, width, height)
    fine = _make_spots(rng, 48, width, height)
    hue = rng.random()
    dark = Image.new("RGB", (width, height), _to_rgb(hue, rng.uniform(0.1, 0.4), 0.25))
    light = Image.new("RGB", (width, height), _to_rgb(hue, rng.uniform(0.1, 0.3), 0.7))
    return Image.composite(light, dark, Image.blend(coarse, fine, 0.4))


def _make_spots(rng: Generator, cells: int, width: int, height: int) -> Image.Image:
    """Return a grey picture of random spots, with ``cells`` spots in each row and column."""
    grid = rng.integers(0, 256, (cells, cells), np.uint8)
    return Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC)


def _add_grain(rng: Generator, picture: Image.Image) -> Image.Image:
    """Return the picture with camera noise, which makes its JPEG as large as that of a photo."""
    # The noise per pixel is weaker in a large picture, because a camera smooths its photos.
    megapixels = picture.width * picture.height / 1e6
    strength = rng.uniform(15, 24) * min(1.0, megapixels**-0.22)
    amplitude = max(2, round(strength))
    grain = rng.integers(
        -amplitude, amplitude, (picture.height, picture.width, 1), np.int8, endpoint=True
    )
    pixels = np.asarray(picture, np.int16) + grain
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _to_rgb(hue: float, saturation: float, value: float) -> tuple[int, int, int]:
    red, green, blue = hsv_to_rgb(hue, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)
