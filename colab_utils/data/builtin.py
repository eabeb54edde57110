"""The built-in dataset: photo-like pictures and exact COCO annotations, made by code on your machine."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask

from colab_utils.data.contours import encode_runs, trace_polygons
from colab_utils.data.painting import SHAPES, Scene, paint_scene
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import count_cores, fork_pool, format_bytes, show_progress

__all__ = ["CATEGORIES", "BuiltinDataset", "make_dataset"]

CATEGORIES = tuple(
    {"id": number, "name": name, "supercategory": "toy"}
    for number, name in zip((1, 3, 7, 18, 44, 62), SHAPES, strict=True)  # with gaps, as in COCO
)
_RECIPE = 1  # goes up when the same arguments would give other files
_FOLDER_HOLDS = 1000  # more images than this go to numbered sub-folders
_EVERY = 50  # one image in 50 shows a crowd, another one no object at all: 2 % each


@dataclass(frozen=True)
class BuiltinDataset:
    """Where a built-in dataset lies, and how large it is.

    Attributes:
        images: the image folder.
        annotations: the COCO JSON file.
        n: images.
        objects: annotations, crowd regions included.
        bytes: size of all images.
        seconds: what this call took; next to nothing where the dataset was there already.
    """

    images: Path
    annotations: Path
    n: int
    objects: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.n} images, {self.objects} objects, {format_bytes(self.bytes)} in {self.images.parent} "
            f"({self.seconds:.1f} s)"
        )


def make_dataset(
    folder: str | Path,
    *,
    n: int = 500,
    width: int = 640,
    height: int = 480,
    objects: tuple[int, int] = (1, 15),
    seed: int = 0,
    workers: int | str = "auto",
) -> BuiltinDataset:
    """Make a dataset with code, without a download: ``folder/images`` and ``folder/annotations.json``.

    The pictures cost what photos cost to read and decode (640x480: 100 to 200 kB). They show six kinds of
    object that overlap; shape tells the category, colour and texture only hint at it. Polygons outline
    what is *seen* of an object, as in COCO: they are traced from the painted pixels, within half a pixel
    or so, and a hidden middle makes two polygons. ``area`` and ``bbox`` are those of the polygons' mask.
    Of every 50 images one has a crowd region (``iscrowd`` 1, uncompressed RLE) and one shows no object.

    The same arguments give the same bytes on one machine, whatever ``workers`` is. A folder that holds
    this very dataset already is returned as it is. Nothing is ever overwritten: the images are made under
    a temporary name, and ``annotations.json`` appears last.

    Args:
        folder: made where it does not exist.
        n: images.
        width: pixels.
        height: pixels.
        objects: fewest and most objects in an image; their sizes shrink as they become many.
        seed: another seed gives other pictures.
        workers: processes; "auto" means one per core, 0 or 1 (and anywhere but on Linux) this one alone.

    Raises:
        ColabUtilsError: a parameter makes no sense, or ``folder`` holds something else.

    Example:
        >>> import tempfile
        >>> made = make_dataset(tempfile.mkdtemp(), n=2, width=64, height=48, workers=1)
        >>> made.n, made.annotations.name, len(list(made.images.iterdir()))
        (2, 'annotations.json', 2)
    """
    start = time.perf_counter()
    folder = Path(folder)
    bounds = list(objects) if isinstance(objects, (tuple, list)) else [objects]
    arguments: dict[str, Any] = {"n": n, "width": width, "height": height, "objects": bounds, "seed": seed}
    _check_arguments(**arguments, workers=workers)
    images, annotations = folder / "images", folder / "annotations.json"
    if annotations.exists():
        return _reuse(images, annotations, arguments, start)
    if images.exists() and not (images.is_dir() and not any(images.iterdir())):
        raise ColabUtilsError(
            f"expected an empty folder, found {images} without annotations.json. "
            "Choose another folder, or remove it yourself."
        )
    mark = f"partial-{os.getpid()}-{time.time_ns():x}"
    staging, draft = folder / f"images.{mark}", folder / f"annotations.json.{mark}"
    try:
        staging.mkdir(parents=True)
        records = _make_images(staging, arguments, count_cores() if workers == "auto" else int(workers))
        content = _build_json(records, arguments)
        draft.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
        os.replace(staging, images)
        os.replace(draft, annotations)
    except OSError as error:
        raise ColabUtilsError(
            f"expected a folder to write to, found {error.strerror or error} at {error.filename or folder}. "
            "Free some space or choose another folder."
        ) from error
    except BrokenProcessPool as error:
        raise ColabUtilsError(
            f"expected every worker to finish, found one killed while it painted {width}x{height} images for "
            f"{folder}: memory is short. Pass workers=1."
        ) from error
    finally:  # both are our own, and gone already where all went well
        shutil.rmtree(staging, ignore_errors=True)
        with suppress(OSError):
            draft.unlink()
    size = content["info"]["image_bytes"]
    return BuiltinDataset(images, annotations, n, len(content["annotations"]), size, time.perf_counter() - start)


def _check_arguments(*, n: int, width: int, height: int, objects: list[int], seed: int, workers: int | str) -> None:
    for name, value, low, high in (
        ("n", n, 1, 10_000_000),
        ("width", width, 32, 65_500),  # JPEG ends at 65,500
        ("height", height, 32, 65_500),
        ("seed", seed, 0, 2**63),
        ("workers", 1 if workers == "auto" else workers, 0, 1024),
    ):
        if not isinstance(value, int) or not low <= value <= high:
            raise ColabUtilsError(
                f"expected {name} to be a whole number from {low} to {high}, found {value!r}. Change {name}."
            )
    most = width * height // 64
    if len(objects) != 2 or not all(isinstance(k, int) for k in objects) or not 0 <= objects[0] <= objects[1]:
        raise ColabUtilsError(
            f"expected objects=(fewest, most), whole numbers from 0 up, found {tuple(objects)!r}. Change objects."
        )
    if objects[1] > most:
        raise ColabUtilsError(
            f"expected at most {most} objects in a {width}x{height} image, found objects={tuple(objects)!r}. "
            "Ask for fewer objects or larger images."
        )


def _reuse(images: Path, annotations: Path, arguments: dict[str, Any], start: float) -> BuiltinDataset:
    """The dataset that is there already, where it is the one asked for and complete."""
    try:
        content = json.loads(annotations.read_text(encoding="utf-8"))
        made_with, image_bytes = content["info"]["made_with"], content["info"]["image_bytes"]
        paths = [images / record["file_name"] for record in content["images"]]
        objects = len(content["annotations"])
    except (OSError, ValueError, KeyError, TypeError):
        made_with = None
    if made_with != {**arguments, "recipe": _RECIPE}:
        found = f"one made with {made_with}" if made_with else "another file of that name"
        raise ColabUtilsError(
            f"expected no annotations.json, or one made with the same arguments, found {found}: {annotations}. "
            "Choose another folder; nothing was changed."
        )
    missing = [path for path in paths if not path.is_file()]
    size = 0 if missing else sum(path.stat().st_size for path in paths)
    if missing or size != image_bytes:
        found = f"{len(missing)} missing, first {missing[0]}" if missing else "other sizes than it was made with"
        raise ColabUtilsError(
            f"expected all {len(paths)} images of {annotations}, found {found}. "
            "Choose another folder, or remove this one and make it again."
        )
    return BuiltinDataset(images, annotations, len(paths), objects, size, time.perf_counter() - start)


def _make_images(folder: Path, arguments: dict[str, Any], workers: int) -> list[dict[str, Any]]:
    """Paint and save every image; records in the order of the images."""
    n = arguments["n"]
    ids = np.cumsum(np.random.default_rng(arguments["seed"]).integers(1, 1000, n)).tolist()  # with gaps
    names = [f"{k:012d}.jpg" for k in ids]
    if n > _FOLDER_HOLDS:
        names = [f"{k // _FOLDER_HOLDS:02d}/{name}" for k, name in enumerate(names)]
    for parent in {(folder / name).parent for name in names}:
        parent.mkdir(exist_ok=True)
    paint = partial(_make_image, folder, arguments)
    records = []
    with show_progress("making images", total=n, unit="img") as bar:
        if workers <= 1 or sys.platform != "linux":  # elsewhere fork is missing or not safe
            for record in map(paint, range(n), ids, names):
                records.append(record)
                bar.update(1)
            return records
        pool = fork_pool(min(workers, n))
        try:
            for record in pool.map(paint, range(n), ids, names, chunksize=max(1, min(4, n // (8 * workers)))):
                records.append(record)
                bar.update(1)
        finally:
            pool.shutdown(cancel_futures=True)
    return records


def _make_image(folder: Path, arguments: dict[str, Any], index: int, image_id: int, file_name: str) -> dict[str, Any]:
    rng = np.random.default_rng([arguments["seed"], index])  # one stream per image: workers do not matter
    fewest, most = arguments["objects"]
    count = int(rng.integers(fewest, most, endpoint=True)) if index % _EVERY != 9 else 0
    crowd = index % _EVERY == 4 and most > 0
    scene = paint_scene(rng, arguments["width"], arguments["height"], objects=count, crowd=crowd)
    path = folder / file_name
    Image.fromarray(scene.pixels).save(path, "JPEG", quality=int(rng.integers(88, 94)))
    return {
        "image": {
            "id": image_id,
            "file_name": file_name,
            "width": arguments["width"],
            "height": arguments["height"],
            "license": 1,
        },
        "annotations": [{"image_id": image_id, **annotation} for annotation in _annotate(scene)],
        "bytes": path.stat().st_size,
    }


def _annotate(scene: Scene) -> list[dict[str, Any]]:
    height, width = scene.ids.shape
    category_ids = {category["name"]: category["id"] for category in CATEGORIES}
    annotations = []
    for number, thing in enumerate(scene.things, start=1):
        x0, y0, x1, y1 = thing.window
        segmentation: dict[str, Any] | list[list[float]]
        if thing.crowd:
            segmentation = encode_runs(scene.ids == number)
            rle = coco_mask.frPyObjects(segmentation, height, width)
        else:
            segmentation = trace_polygons(scene.ids[y0:y1, x0:x1] == number, x0, y0)
            rle = coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width))
        annotations.append(
            {
                "category_id": category_ids[thing.name],
                "segmentation": segmentation,
                "area": int(coco_mask.area(rle)),
                "bbox": coco_mask.toBbox(rle).tolist(),
                "iscrowd": int(thing.crowd),
            }
        )
    return annotations


def _build_json(records: list[dict[str, Any]], arguments: dict[str, Any]) -> dict[str, Any]:
    annotations = [annotation for record in records for annotation in record["annotations"]]
    return {
        "info": {
            "description": "colab_utils built-in dataset",
            "version": str(_RECIPE),
            "made_with": {**arguments, "recipe": _RECIPE},
            "image_bytes": sum(record["bytes"] for record in records),
        },
        "licenses": [{"id": 1, "name": "Public Domain", "url": "https://creativecommons.org/publicdomain/zero/1.0/"}],
        "images": [record["image"] for record in records],
        "annotations": [{"id": number, **a} for number, a in enumerate(annotations, start=1)],
        "categories": list(CATEGORIES),
    }
