"""The built-in dataset: pictures that weigh what photos weigh, with COCO annotations, made by
code.
"""

import json
from collections.abc import Sequence
from colorsys import hsv_to_rgb
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.random import Generator, default_rng
from PIL import Image, ImageDraw, ImageFilter

from colab_utils.data.decoding import guard_pillow
from colab_utils.data.masks import encode_segmentation, measure_mask
from colab_utils.drive import explain_write
from colab_utils.errors import ColabUtilsError
from colab_utils.files import write_file
from colab_utils.machine import count_cores
from colab_utils.processes import fork_pool
from colab_utils.progress import show_progress
from colab_utils.require import require_local_path
from colab_utils.units import format_bytes

# width and height of a photo; it is painted at a fourth of them, then enlarged
_PHOTO, _SCALE = (4000, 3000), 4
_FIRST = 2  # the number of the first object in a picture; 0 is outside, 1 is the ground
_ANGLE = np.linspace(-np.pi, np.pi, 72)
_SHAPES = {  # how far the outline is from the middle, by the angle
    "ball": np.ones(72),
    "tile": 0.75 / np.maximum(abs(np.cos(_ANGLE)), abs(np.sin(_ANGLE))),
    "pennant": 0.5 / np.max([np.cos(_ANGLE + turn) for turn in (0.0, 2.1, 4.2)], axis=0),
    "starfish": 0.38 + 0.66 * np.abs(np.cos(2.5 * _ANGLE)) ** 2.2,
    "heart": 1 - 0.8 * np.exp(-1.4 * _ANGLE**2),
    "pebble": 0.85 + 0.1 * np.cos(2 * _ANGLE + 1) + 0.08 * np.cos(3 * _ANGLE),
}
_OUTLINES = np.exp(1j * _ANGLE) * [*_SHAPES.values()]  # x + iy

# ids have gaps, as in COCO
CATEGORIES = tuple(
    {"id": 7 * k + 1, "name": name, "supercategory": "toy"} for k, name in enumerate(_SHAPES)
)


@dataclass(frozen=True)
class BuiltinDataset:
    """Where a built-in dataset lies, and how large it is."""

    images: Path
    """The image folder."""
    annotations: Path
    """The COCO JSON file."""
    n: int
    """Images."""
    objects: int
    """Annotations, crowd regions included."""
    bytes: int
    """Size of all images."""

    def __str__(self) -> str:
        return (
            f"{self.n} images, {self.objects} objects, {format_bytes(self.bytes)} in "
            f"{self.images.parent}"
        )


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
    """Make a dataset with code, without a download: ``folder/images`` and
    ``folder/annotations.json``.

    The pictures cost what photos cost to read and decode (640x480: 100 to 200 kB). They show kinds
    of object that overlap. Polygons outline what is *visible* of an object, as in COCO; ``area``
    and ``bbox`` are those of the polygons' mask. Of every 50 images one has a crowd region
    (``iscrowd`` 1, uncompressed RLE) and one has no object.

    The same arguments give the same bytes on one machine, with any number of ``workers``. A folder
    that holds this dataset already is returned as it is, and nothing is ever overwritten.
    ``annotations.json`` is written last.

    Args:
        folder: made where it does not exist.
        n: images.
        width: pixels.
        height: pixels.
        objects: fewest and most objects in an image; the more there are, the smaller they are.
        categories: names of the kinds of object, of ball, tile, pennant, starfish, heart and
            pebble. Default: all.
        photos: so many of the images, evenly spread, are photos of 12 megapixels, 4000x3000, of a
            few MB each: what a phone takes, and what training has no use for.
        seed: another seed gives other pictures.
        workers: processes; "auto" means one per core.

    Raises:
        ColabUtilsError: an argument is out of range, or ``folder`` holds something else.

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
        "version": 3,
    }
    fits = 0 <= photos <= n > 0 and 32 <= min(width, height) <= max(width, height) <= 65_500
    if not (fits and 0 <= objects[0] <= objects[1] and set() != set(categories) <= set(_SHAPES)):
        numbers = "n > 0, photos <= n, sides 32 to 65,500, fewest <= most objects"
        raise ColabUtilsError(
            f"expected {numbers}, categories of {', '.join(_SHAPES)}, found {recipe}: change it"
        )
    root = require_local_path(folder)
    images = root / "images"
    annotations = root / "annotations.json"
    with explain_write(root):
        if not annotations.exists():
            _make_files(
                images,
                annotations,
                recipe,
                count_cores() if workers == "auto" else max(1, int(workers)),
            )
        text = annotations.read_bytes()
    if json.dumps(recipe).encode() not in text:
        raise ColabUtilsError(
            f"expected {recipe} in {folder}, found another dataset: choose another folder"
        )
    content = json.loads(text)
    size = sum(path.stat().st_size for path in images.glob("*.jpg"))
    if size != content["info"]["bytes"]:
        raise ColabUtilsError(
            f"expected {n} images in {images}, found some missing or cut: delete {folder}"
        )
    return BuiltinDataset(images, annotations, n, len(content["annotations"]), size)


def _make_files(images: Path, annotations: Path, recipe: dict[str, Any], workers: int) -> None:
    """Make every image and, last, the JSON."""
    images.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(suffix=".part", dir=images.parent) as unfinished:
        folder = Path(unfinished) / "images"
        folder.mkdir()
        with fork_pool(workers) as pool:
            making = pool.map(partial(_make_image, folder, recipe), range(recipe["n"]))
            made = list(show_progress("making images", making, total=recipe["n"], unit="img"))
        info = {"made_with": recipe, "bytes": sum(path.stat().st_size for path in folder.iterdir())}
        folder.rename(images)
    found = [{"image_id": image["id"], **one} for image, found in made for one in found]
    objects = [{"id": number, **one} for number, one in enumerate(found, 1)]
    categories = [category for category in CATEGORIES if category["name"] in recipe["categories"]]
    content = {
        "info": info,
        "images": [one for one, _ in made],
        "annotations": objects,
        "categories": categories,
    }
    write_file(annotations, json.dumps(content).encode())


@guard_pillow()
def _make_image(
    folder: Path, recipe: dict[str, Any], index: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Paint and save one image; returns its COCO record and its annotations, without their ids."""
    rng = default_rng([recipe["seed"], index])  # one stream per image, whichever worker makes it
    is_photo = (index * recipe["photos"] + recipe["n"] // 2) % recipe["n"] < recipe["photos"]
    width, height = _PHOTO if is_photo else (recipe["width"], recipe["height"])
    scale, (fewest, most) = _SCALE if is_photo else 1, recipe["objects"]
    # one of 50 is empty
    objects = int(rng.integers(fewest, most, endpoint=True)) if index % 50 != 9 else 0
    crowd = index % 50 == 4 and most > 0  # and one has a crowd
    allowed = [kind for kind, name in enumerate(_SHAPES) if name in recipe["categories"]]
    picture, ids, kinds = _paint(
        rng, width // scale, height // scale, objects, crowd, allowed, scale
    )
    number = 1000 * index + int(rng.integers(1000))  # with gaps, as in COCO
    image: dict[str, Any] = {
        "id": number,
        "file_name": f"{number:012d}.jpg",
        "width": width,
        "height": height,
    }
    picture.save(folder / image["file_name"], "JPEG", quality=int(rng.integers(88, 94)))
    numbers = [k for k in np.unique(ids).tolist() if k >= _FIRST]
    return image, [_annotate(ids == k, kinds[k], crowd and k == _FIRST, scale) for k in numbers]


def _annotate(mask: np.ndarray, kind: int, crowd: bool, scale: int = 1) -> dict[str, Any]:
    """A mask, bool [H, W], enlarged, as a COCO annotation: a crowd as uncompressed RLE, any other
    as polygons.
    """
    height, width = mask.shape[0] * scale, mask.shape[1] * scale
    if crowd:
        mask = mask.repeat(scale, 0).repeat(scale, 1)
        edges = np.flatnonzero(
            np.diff(mask.ravel(order="F"), prepend=False, append=not mask[-1, -1])
        )
        segmentation: Any = {"counts": np.diff(edges, prepend=0).tolist(), "size": [height, width]}
    else:
        segmentation = [[scale * at for at in polygon] for polygon in _trace_polygons(mask)]
    box, pixels = measure_mask(encode_segmentation(segmentation, height, width))
    found = {"area": pixels, "bbox": box, "iscrowd": int(crowd)}
    return {"category_id": CATEGORIES[kind]["id"], "segmentation": segmentation, **found}


def _trace_polygons(mask: np.ndarray) -> list[list[float]]:
    """A mask, bool [H, W], as COCO polygons ``[x, y, x, y, ...]`` of about 60 corners.

    COCO polygons have no holes: holes are filled, as annotators do it.
    """
    inside, loops = np.pad(mask, 1), list[np.ndarray]()
    # pixels with nothing above them
    starts = {complex(x, y + 1) for y, x in np.argwhere(inside[1:] > inside[:-1])}
    while starts:
        pixel, step, line = next(iter(starts)), 1 + 0j, list[complex]()
        while step != 1 or pixel in starts:  # round a part or a hole, with the mask on the right
            starts -= {pixel} if step == 1 else set()
            line.append(pixel - 0.5 - 0.5j - step * 0.5j)
            ahead, left = (
                inside[int(at.imag), int(at.real)]
                for at in (pixel + step, pixel + step - step * 1j)
            )
            pixel += (step - step * 1j * left) * ahead
            step *= (-1j if left else 1) if ahead else 1j
        loops.append(np.array(line))
    # holes go the other way round
    parts = [loop for loop in loops if (loop.conj() * np.roll(loop, -1)).imag.sum() > 0]
    return [loop[:: 1 + len(loop) // 60].copy().view(float).tolist() for loop in parts]


def _paint(
    rng: Generator,
    width: int,
    height: int,
    objects: int,
    crowd: bool,
    allowed: Sequence[int],
    scale: int = 1,
) -> tuple[Image.Image, np.ndarray, list[int]]:
    """Paint a picture back to front; with ``crowd`` its first object is 24 small ones of a kind.

    Returns:
        The picture, ``scale`` times as large; what each pixel shows, int32 [height, width]: 1 for
        the ground, `_FIRST` and up for objects; the kind of each number. An object for which there
        is no room is left out.
    """
    # the way light falls
    side, light, spot = (width * height) ** 0.5, np.exp(6.28j * rng.random()), rng.random(2)
    picture, ids = _paint_ground(rng, width, height), Image.new("I", (width, height), 1)
    kinds = [allowed[k] for k in rng.integers(len(allowed), size=_FIRST + crowd + objects)]
    pixels = np.zeros((2, len(kinds)), np.int64)  # of each object: painted, and visible now
    for number in [_FIRST] * (24 * crowd) + [*range(_FIRST + crowd, len(kinds))]:
        # 8 to 35 % of the picture's side, less if there are more than ten
        single = number >= _FIRST + crowd
        size = side * (
            0.08 * (0.35 / 0.08) ** rng.random() * min(1.0, (10 / objects) ** 0.5)
            if single
            else 0.045
        )
        for k in range(200):  # where there is no room: elsewhere, and a little smaller
            spot = (rng.random(2) if single and rng.random() < 0.5 else rng.normal(spot, 0.1)).clip(
                0.03, 0.97
            )
            # from its middle to its rim
            axis = max(size * 0.97**k, 7.0) / 2 * np.exp(6.28j * rng.random())
            reach = int(1.8 * abs(axis)) + 3
            outline = _OUTLINES[kinds[number]] * axis + complex(reach, reach)
            stencil = Image.new("L", (2 * reach, 2 * reach))
            ImageDraw.Draw(stencil).polygon(outline.view(float).tolist(), fill=255)
            left, top = (int(at) - reach for at in spot * (width, height))
            # 0 outside the picture
            under = np.asarray(ids.crop((left, top, left + 2 * reach, top + 2 * reach)))
            hidden = np.bincount(under[np.asarray(stencil) > 0], minlength=len(kinds))
            if hidden[1:].sum() >= 12 and (pixels[1] - hidden >= 0.4 * pixels[0])[_FIRST:].all():
                pixels[1] -= hidden
                pixels[:, number] += hidden[1:].sum()
                ids.paste(number, (left, top), stencil)
                soft, fall = (
                    stencil.filter(ImageFilter.GaussianBlur(0.08 * reach + 0.5)),
                    0.11 * reach * light,
                )
                shadow = left + round(fall.real), top + round(fall.imag)
                picture.paste((0, 0, 0), shadow, soft.point(lambda level: 0.65 * level))
                surface = _draw_surface(rng, kinds[number], soft, axis, light)
                picture.paste(surface, (left, top), stencil.filter(ImageFilter.BoxBlur(0.5)))
                break
    # a small picture is noisy at every pixel; a large one has been smoothed by its camera
    picture = picture.resize((scale * width, scale * height))
    most = max(2, round(rng.uniform(9, 17) * min(1.0, 1e6 / (scale**2 * width * height)) ** 0.25))
    shape = (2, scale * height, scale * width, 1)
    grain = rng.integers(-most, most, shape, np.int8, endpoint=True).sum(0, dtype=np.int16)
    return _to_image((np.asarray(picture) + grain) / np.float32(255)), np.asarray(ids), kinds


def _draw_surface(
    rng: Generator, kind: int, soft: Image.Image, axis: complex, light: complex
) -> Image.Image:
    """Colour, texture and light of an object; ``soft`` falls from 255 in its middle to 0
    outside.
    """
    steps = (np.arange(soft.width) - soft.width / 2) / abs(axis)
    at = steps + 1j * steps[:, None]  # of each pixel, x + iy, 0 in the middle and 1 at the rim
    # only a hint
    hue = rng.normal(kind / len(_SHAPES), 0.05) if rng.random() < 0.75 else rng.random()
    first, second = np.array(
        [hsv_to_rgb(hue + k, *rng.uniform((0.2, 0.4), (0.8, 0.95))) for k in (0, 0.1)]
    )
    waves = np.sin((at / axis).real * abs(axis) * rng.uniform(4, 11)) * rng.choice([0, 2, 5])
    mix = np.clip(0.4 + waves + 0.3 * _make_noise(rng, soft.width, soft.width, 4), 0, 1)[..., None]
    gleam = 0.6 * np.exp(-22 * np.abs(at + 0.4 * light) ** 2) * (kind == 0)  # of a ball
    shade = 0.3 + np.asarray(soft) / np.float32(340) - 0.22 * (at / light).real + gleam
    return _to_image((first + (second - first) * mix) * shade[..., None])


def _paint_ground(rng: Generator, width: int, height: int) -> Image.Image:
    """Smooth spots of two colours with straws and twigs, a little out of focus."""
    w, h, hue = round(width / 1.7), round(height / 1.7), rng.random()
    tone = np.clip(0.6 + 0.2 * _make_noise(rng, h, w, 8), 0.2, 1)[..., None]
    dark, light = np.array(
        [hsv_to_rgb(hue, rng.uniform(0.3, 0.6), 0.4), hsv_to_rgb(hue + 0.08, 0.25, 0.95)]
    )
    picture = _to_image((dark + (light - dark) * tone) * tone)
    for _ in range(rng.integers(40, 200)):
        bends = rng.random(2) * (w, h) + np.cumsum(
            rng.normal(0, 0.02 * (w * h) ** 0.5, (3, 2)), axis=0
        )
        ink = tuple((255 * rng.uniform(0.4, 1.4) * dark).astype(int).tolist())
        ImageDraw.Draw(picture).line(bends.ravel().tolist(), fill=ink, width=max(1, w // 300))
    return picture.resize((width, height))


def _make_noise(rng: Generator, height: int, width: int, octaves: int) -> np.ndarray:
    """Smooth noise of about -1 to 1, float32 [H, W]: the sum of grids that grow finer."""
    grids = [
        0.8**k * rng.uniform(-1, 1, (2 + 2**k, 2 + 2**k)).astype(np.float32) for k in range(octaves)
    ]
    return np.sum(
        [np.asarray(Image.fromarray(grid).resize((width, height))) for grid in grids], axis=0
    )


def _to_image(colours: np.ndarray) -> Image.Image:
    return Image.fromarray(np.clip(colours * 255, 0, 255).astype(np.uint8))
