"""The built-in dataset: pictures that weigh what photos weigh, with COCO annotations, made by code."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from colorsys import hsv_to_rgb
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter
from pycocotools import mask as coco_mask

from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import count_cores, fork_pool, format_bytes, show_progress, write_file

__all__ = ["CATEGORIES", "BuiltinDataset", "make_dataset"]

_RECIPE = 2  # goes up when the same arguments would give other files
_FIRST = 2  # the number of the first object in a scene; 0 is outside the picture, 1 is the ground
_EVERY = 50  # of every 50 images one has a crowd and another one no object
_MIN_VISIBLE = 0.4  # of the pixels of every object
_SLIVER_PX = 10  # parts and holes smaller than this are left out, as annotators leave them out
_SHAPES: dict[
    str, Callable[[np.ndarray], np.ndarray]
] = {  # how far the outline is from the middle, by the angle from -pi to pi
    "ball": np.ones_like,
    "tile": lambda angle: 0.75 / np.maximum(abs(np.cos(angle)), abs(np.sin(angle))),
    "pennant": lambda angle: 0.5 / np.max([np.cos(angle + turn) for turn in (0.0, 2.1, 4.2)], axis=0),
    "starfish": lambda angle: 0.38 + 0.66 * np.abs(np.cos(2.5 * angle)) ** 2.2,
    "heart": lambda angle: 1 - 0.8 * np.exp(-1.4 * angle**2),
    "pebble": lambda angle: 0.85 + 0.1 * np.cos(2 * angle + 1) + 0.08 * np.cos(3 * angle),
}
_NAMES = tuple(_SHAPES)

CATEGORIES = tuple(
    {"id": number, "name": name, "supercategory": "toy"}
    for number, name in zip((1, 3, 7, 18, 44, 62), _NAMES, strict=True)  # with gaps, as in COCO
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
        return f"{self.n} images, {self.objects} objects, {format_bytes(self.bytes)} in {self.images.parent}"


def make_dataset(
    folder: str | Path, *, n: int = 500, width: int = 640, height: int = 480, objects: tuple[int, int] = (1, 15),
    seed: int = 0, workers: int | str = "auto",
) -> BuiltinDataset:  # fmt: skip
    """Make a dataset with code, without a download: ``folder/images`` and ``folder/annotations.json``.

    The pictures cost what photos cost to read and decode (640x480: 100 to 200 kB). They show six kinds of object that
    overlap. Polygons outline what is *visible* of an object, as in COCO; ``area`` and ``bbox`` are those of the
    polygons' mask. Of every 50 images one has a crowd region (``iscrowd`` 1, uncompressed RLE) and one has no object.

    The same arguments give the same bytes on one machine, with any number of ``workers``. A folder that holds this
    dataset already is returned as it is, and nothing is ever overwritten. ``annotations.json`` is written last.

    Args:
        folder: made where it does not exist.
        n: images.
        width: pixels.
        height: pixels.
        objects: fewest and most objects in an image; the more there are, the smaller they are.
        seed: another seed gives other pictures.
        workers: processes; "auto" means one per core, 0 or 1 means this process.

    Raises:
        ColabUtilsError: an argument is out of range, or ``folder`` holds something else.

    Example:
        >>> import tempfile
        >>> made = make_dataset(tempfile.mkdtemp(), n=2, width=64, height=48, workers=1)
        >>> made.n, made.annotations.name, len(list(made.images.iterdir()))
        (2, 'annotations.json', 2)
    """
    recipe = {"n": n, "width": width, "height": height, "objects": list(objects), "seed": seed, "recipe": _RECIPE}
    sides_fit = all(32 <= side <= 65_500 for side in (width, height))
    if not (n > 0 and seed >= 0 and sides_fit and 0 <= objects[0] <= objects[1] <= width * height // 64):
        limits = (
            f"n > 0, seed >= 0, sides of 32 to 65,500 pixels, 0 <= fewest <= most objects <= {width * height // 64}"
        )
        raise ColabUtilsError(f"expected {limits}; found {recipe}: correct them")
    images, annotations = Path(folder) / "images", Path(folder) / "annotations.json"
    if annotations.exists():
        content = _read_content(images, annotations, recipe)
    elif images.exists() and any(images.iterdir()):
        raise ColabUtilsError(f"expected an empty folder, found {images} without annotations.json: choose another one")
    else:
        unfinished = images.with_name(f"images.{os.getpid()}.part")
        try:
            unfinished.mkdir(parents=True)
            content = _make_content(unfinished, recipe, count_cores() if workers == "auto" else int(workers))
            os.replace(unfinished, images)
            write_file(annotations, json.dumps(content, separators=(",", ":")).encode())
        except OSError as error:
            found = f"found {error.strerror} at {folder}: free space or choose another one"
            raise ColabUtilsError(f"expected a folder to write to, {found}") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return BuiltinDataset(images, annotations, n, len(content["annotations"]), content["info"]["image_bytes"])


def _read_content(images: Path, annotations: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    """The JSON of the dataset that is there, if it is the one asked for, with all its images."""
    try:
        content: dict[str, Any] = json.loads(annotations.read_bytes())
        found = content["info"]["made_with"]
    except (ValueError, KeyError, TypeError):
        found = "another dataset"
    if found != recipe:
        raise ColabUtilsError(f"expected {recipe} in {annotations}, found {found}: choose another folder")
    if sum(path.stat().st_size for path in images.glob("*.jpg")) != content["info"]["image_bytes"]:
        raise ColabUtilsError(f"expected {recipe['n']} images in {images}, found some missing or cut: delete it")
    return content


def _make_content(folder: Path, recipe: dict[str, Any], workers: int) -> dict[str, Any]:
    """Make every image in ``folder``; returns what the JSON holds."""
    n, made, forks = recipe["n"], [], workers > 1 and sys.platform == "linux"
    ids = np.cumsum(np.random.default_rng(recipe["seed"]).integers(1, 1000, n)).tolist()  # with gaps, as in COCO
    with (
        show_progress("making images", total=n, unit="img") as bar,
        fork_pool(min(workers, n)) if forks else nullcontext() as pool,
    ):
        for one in (pool.map if pool else map)(partial(_make_image, folder, recipe), range(n), ids):
            made.append(one)
            bar.update()
    annotations = [{"image_id": image["id"], **one} for image, found in made for one in found]
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {
        "info": {"description": "made by colab_utils, public domain", "made_with": recipe, "image_bytes": size},
        "images": [image for image, _ in made],
        "annotations": [{"id": number, **one} for number, one in enumerate(annotations, 1)],
        "categories": list(CATEGORIES),
    }


def _make_image(folder: Path, recipe: dict[str, Any], index: int, image_id: int) -> tuple[dict[str, Any], list[Any]]:
    """Paint and save one image; returns its COCO record and its annotations, without their ids."""
    rng = np.random.default_rng([recipe["seed"], index])  # one stream per image, whichever worker makes it
    width, height, (fewest, most) = recipe["width"], recipe["height"], recipe["objects"]
    count = int(rng.integers(fewest, most, endpoint=True)) if index % _EVERY != 9 else 0
    crowd = index % _EVERY == 4 and most > 0
    scene, file_name = _Scene(rng, width, height, count, crowd), f"{image_id:012d}.jpg"
    scene.add_grain().save(folder / file_name, "JPEG", quality=int(rng.integers(88, 94)))
    masks = [np.asarray(scene.ids) == number for number in range(_FIRST, _FIRST + len(scene.names))]
    annotations = [_annotate(mask, scene.names[k], crowd and k == 0) for k, mask in enumerate(masks)]
    return {"id": image_id, "file_name": file_name, "width": width, "height": height}, annotations


def _annotate(mask: np.ndarray, name: str, crowd: bool) -> dict[str, Any]:
    """A mask, bool [H, W], as a COCO annotation: a crowd as uncompressed RLE, any other as polygons."""
    if crowd:
        pixels = np.concatenate([[False], mask.ravel(order="F"), [not mask[-1, -1]]])
        runs = np.diff(np.flatnonzero(pixels[1:] != pixels[:-1]), prepend=0)
        segmentation: Any = {"counts": runs.tolist(), "size": list(mask.shape)}
        rle = coco_mask.frPyObjects(segmentation, *mask.shape)
    else:
        segmentation = _trace_polygons(mask)
        rle = coco_mask.merge(coco_mask.frPyObjects(segmentation, *mask.shape))
    found = {"area": int(coco_mask.area(rle)), "bbox": coco_mask.toBbox(rle).tolist(), "iscrowd": int(crowd)}
    return {"category_id": CATEGORIES[_NAMES.index(name)]["id"], "segmentation": segmentation, **found}


def _trace_polygons(mask: np.ndarray, x0: int = 0) -> list[list[float]]:
    """A mask, bool [H, W], as COCO polygons ``[x, y, x, y, ...]`` of about 60 corners; ``x0`` is added to every x.

    COCO polygons have no holes: a part with a hole is cut in two at the middle of the hole.
    """
    from contourpy import contour_generator  # matplotlib draws with it, and installs it

    rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    window = np.pad(mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1], 1).astype(np.float32)
    lines: Any = contour_generator(z=window).lines(0.5)
    loops = [line[:-1] + np.array([columns[0] - 0.5, rows[0] - 0.5]) for line in lines]
    areas = [(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2 for x, y in (loop.T for loop in loops)]
    hole = next((loop[:, 0] for loop, area in zip(loops, areas, strict=True) if area <= -_SLIVER_PX), None)
    if hole is not None:
        cut = int(hole.min() + hole.max() + 1) // 2
        return _trace_polygons(mask[:, :cut], x0) + _trace_polygons(mask[:, cut:], x0 + cut)
    kept = [loop for loop, area in zip(loops, areas, strict=True) if area >= min(_SLIVER_PX, max(areas))]
    return [np.add(loop[:: 1 + len(loop) // 60], (x0, 0)).ravel().tolist() for loop in kept]


class _Scene:
    """A picture painted back to front.

    ``ids`` holds a number for each pixel: 1 where the ground is visible, `_FIRST` and up for what ``names`` lists.
    """

    def __init__(self, rng: np.random.Generator, width: int, height: int, objects: int, crowd: bool) -> None:
        self.rng, self.names, self.light = rng, list[str](), np.exp(6.28j * rng.random())  # the way it shines
        self.picture, self.ids = _paint_ground(rng, width, height), Image.new("I", (width, height), 1)
        self.painted, self.visible = np.zeros((2, _FIRST + objects + crowd), np.int64)  # pixels of each number
        side, extent = (width * height) ** 0.5, np.array([width, height])
        if crowd:
            self.names.append(_NAMES[rng.integers(len(_NAMES))])
            for spot in rng.normal(rng.uniform(0.25, 0.75, 2), 0.07, (int(rng.integers(18, 40)), 2)).clip(0.02, 0.98):
                self._paint(side * rng.uniform(0.03, 0.055), *spot * extent)
        spot = rng.random(2)
        for _ in range(objects):  # 8 to 35 % of the picture's side, less if there are more than ten
            size = side * min(1.0, (10 / objects) ** 0.5) * 0.08 * (0.35 / 0.08) ** rng.random()
            self.names.append(_NAMES[rng.integers(len(_NAMES))])
            for k in range(200):  # where there is no room: elsewhere, and a little smaller
                spot = rng.normal(spot, 0.1).clip(0.03, 0.97) if rng.random() < 0.5 else rng.uniform(0.03, 0.97, 2)
                if self._paint(size * 0.97**k, *spot * extent):
                    break
            else:
                self.names.pop()

    def _paint(self, size: float, x: float, y: float) -> bool:
        """Paint the last object of ``names``; False, and nothing painted, where it would hide too much of another."""
        number, size = _FIRST - 1 + len(self.names), max(float(size), 7.0)
        reach, turn, angle = int(0.9 * size) + 3, np.exp(6.28j * self.rng.random()), np.linspace(-np.pi, np.pi, 72)
        outline = np.exp(1j * angle) * _SHAPES[self.names[-1]](angle) * turn * size / 2 + complex(reach, reach)
        left, top, stencil = int(x) - reach, int(y) - reach, Image.new("L", (2 * reach, 2 * reach))
        ImageDraw.Draw(stencil).polygon([(z.real, z.imag) for z in outline.tolist()], fill=255)
        under = np.asarray(self.ids.crop((left, top, left + 2 * reach, top + 2 * reach)))  # 0 outside the picture
        counts = np.bincount(under[np.asarray(stencil) > 0], minlength=len(self.visible))
        fresh, hidden = counts[1:].sum() - counts[number], counts * (np.arange(len(counts)) >= _FIRST)
        hidden[number] = 0
        if fresh < 12 or (self.visible - hidden < _MIN_VISIBLE * self.painted)[hidden > 0].any():
            return False
        self.visible -= hidden
        self.visible[number] += fresh
        self.painted[number] += fresh
        self.ids.paste(number, (left, top), stencil)
        soft, fall = stencil.filter(ImageFilter.GaussianBlur(0.07 * size + 0.5)), 0.1 * size * self.light
        shadow = soft.point([int(0.65 * level) for level in range(256)])
        self.picture.paste((0, 0, 0), (left + round(fall.real), top + round(fall.imag)), shadow)
        surface = self._draw_surface(np.asarray(soft) / np.float32(255), turn, 2 / size)
        self.picture.paste(surface, (left, top), stencil.filter(ImageFilter.BoxBlur(0.5)))
        return True

    def _draw_surface(self, soft: np.ndarray, turn: complex, scale: float) -> Image.Image:
        """Colour, texture and light of the last object; ``soft`` falls from 1 in its middle to 0 outside, [H, W]."""
        rng, name, steps = self.rng, self.names[-1], (np.arange(len(soft)) - len(soft) / 2) * scale
        at = steps + 1j * steps[:, None]  # the place of each pixel, x + iy, 0 in the middle and 1 at the rim
        hue = rng.normal(_NAMES.index(name) / len(_NAMES), 0.05) if rng.random() < 0.75 else rng.random()  # only a hint
        first, second = np.array([hsv_to_rgb(hue + k, *rng.uniform((0.2, 0.4), (0.8, 0.95))) for k in (0, 0.1)])
        own, beat = at * turn.conjugate(), rng.uniform(4, 11)
        waves = np.sin(own.real * beat) * (np.sin(own.imag * beat) if rng.random() < 0.5 else 1.0)
        mix = np.clip(0.4 + rng.choice([0, 2, 5]) * waves + 0.3 * _make_noise(rng, len(soft), len(soft), 4), 0, 1)
        gleam = 0.6 * np.exp(-22 * np.abs(at + 0.4 * self.light) ** 2) * (name == "ball")
        shade = 0.3 + 0.75 * soft - 0.22 * (at * self.light.conjugate()).real + gleam
        return _to_image((first + (second - first) * mix[..., None]) * shade[..., None])

    def add_grain(self) -> Image.Image:
        """The picture with noise in every pixel, so that its file weighs what a photo weighs."""
        (width, height), rng = self.ids.size, self.rng
        # a small picture is noisy at every pixel; a large one has been smoothed by its camera
        most = max(2, round(rng.uniform(9, 17) * min(1.0, 1e6 / (width * height)) ** 0.25))
        grain = rng.integers(-most, most, (2, height, width, 1), np.int8, endpoint=True).sum(0, dtype=np.int16)
        return _to_image((np.asarray(self.picture) + grain) / np.float32(255))


def _paint_ground(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Smooth spots of two colours with straws and twigs, a little out of focus."""
    w, h = round(width / 1.7), round(height / 1.7)
    tone, hue, side = np.clip(0.6 + 0.2 * _make_noise(rng, h, w, 8), 0.2, 1)[..., None], rng.random(), (w * h) ** 0.5
    dark, light = np.array([hsv_to_rgb(hue, rng.uniform(0.3, 0.6), 0.4), hsv_to_rgb(hue + 0.08, 0.25, 0.95)])
    picture = _to_image((dark + (light - dark) * tone) * tone)
    for _ in range(rng.integers(40, 200)):
        bends = rng.random(2) * (w, h) + np.cumsum(rng.normal(0, 0.02 * side, (3, 2)), axis=0)
        ink = tuple((255 * rng.uniform(0.4, 1.4) * dark).astype(int).tolist())
        ImageDraw.Draw(picture).line(bends.ravel().tolist(), fill=ink, width=max(1, round(side / 300)))
    return picture.resize((width, height), Image.Resampling.BICUBIC)


def _make_noise(rng: np.random.Generator, height: int, width: int, octaves: int) -> np.ndarray:
    """Smooth noise of about -1 to 1, float32 [H, W]: the sum of grids that grow finer."""
    noise = Image.new("F", (2, 2))
    for octave in range(octaves):
        side = 2 + 2**octave
        grid = 0.8**octave * rng.uniform(-1, 1, (side, side)).astype(np.float32)
        noise = Image.fromarray(grid + np.asarray(noise.resize((side, side), Image.Resampling.BILINEAR)))
    return np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC))


def _to_image(colours: np.ndarray) -> Image.Image:
    return Image.fromarray(np.clip(colours * 255, 0, 255).astype(np.uint8))
