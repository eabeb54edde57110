"""The data of the scenarios: COCO datasets made once from the given images, each image under
several ids.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import floor, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from colab_utils.errors import ColabUtilsError
from colab_utils.files import write_file
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.samples import Target

__all__ = ["DATA", "Data", "make_data", "resize_sample"]

PHOTOS = 24
PHOTO_PIXELS = 12e6
OBJECTS = 300
JPEG_QUALITY = 95


@dataclass(frozen=True)
class Data:
    """A COCO dataset; its records 0, ``copies``, 2 ``copies``, ... are distinct images, those
    between are the same.
    """

    folder: Path
    name: str
    records: int
    copies: int

    @property
    def images(self) -> Path:
        """The image folder."""
        return self.folder / "images"

    @property
    def annotations(self) -> Path:
        """COCO instance JSON."""
        return self.folder / "instances.json"

    def open(self) -> CocoFolder:
        """The samples as torchvision's references give them: what every system is compared with."""
        return CocoFolder(self.images, self.annotations)

    def iterate_distinct(self) -> Iterator[tuple[CocoFolder, int]]:
        """The dataset and the row of each distinct image."""
        folder = self.open()
        return ((folder, row) for row in range(0, self.records, self.copies))


class Entry(NamedTuple):
    """One distinct image: its file, and its annotations in COCO form, without ids."""

    data: bytes
    suffix: str
    size: tuple[int, int]
    annotations: list[dict[str, Any]]


def resize_sample(
    image: Tensor, target: Target, *, min_size: int = 800, max_size: int = 1333
) -> tuple[Tensor, Target]:
    """A sample at the size that Mask R-CNN trains at, by the rule of torchvision's
    ``GeneralizedRCNNTransform``.
    """
    from torchvision.transforms.v2 import InterpolationMode, functional

    height, width = image.shape[-2:]
    scale = min(min_size / min(height, width), max_size / max(height, width))
    size = [floor(height * scale), floor(width * scale)]
    masks = target["masks"]
    if len(masks):
        masks = torch.nn.functional.interpolate(masks[:, None], size=size, mode="nearest")[:, 0]
    boxes = target["boxes"] * torch.tensor([size[1] / width, size[0] / height] * 2)
    image = functional.resize(
        image, size, interpolation=InterpolationMode.BILINEAR, antialias=False
    )
    return image, {**target, "boxes": boxes, "masks": masks.reshape(-1, *size)}


def make_data(
    name: str,
    work: Path,
    images: Sequence[Path],
    annotations: Sequence[Path],
    *,
    samples: int = 1600,
) -> Data:
    """One of `DATA`, made in ``work`` if it is not there: about ``samples`` records of the images
    that are given.

    Raises:
        ColabUtilsError: if the images or annotations are not there or not COCO.
    """
    made = {"from": [str(path.absolute()) for path in (*images, *annotations)], "samples": samples}
    folder = work / "data" / name
    try:
        known = json.loads((folder / "made.json").read_bytes())
        if known["made"] == made:
            return Data(folder, name, known["records"], known["copies"])
    except (OSError, ValueError, KeyError):
        # The folder is not there, or was left unfinished.
        pass
    shutil.rmtree(folder, ignore_errors=True)
    if name == "kept":
        folders = [CocoFolder(*pair) for pair in zip(images, annotations, strict=True)]
        if any(other.category_ids != folders[0].category_ids for other in folders):
            raise ColabUtilsError(
                "expected the same categories in all annotations, found others: give one dataset"
            )
        rows = [(part, row) for part in folders for row in range(len(part))][:samples]
        copies = max(1, round(samples / len(rows)))
    else:
        source = make_data(
            "pixels_800" if name == "jpg_800" else "kept",
            work,
            images,
            annotations,
            samples=samples,
        )
        rows = list(source.iterate_distinct())
        copies = source.copies
    entries = DATA[name](rows)
    records = _write_coco(
        folder, entries, categories=list(rows[0][0].coco.categories), copies=copies
    )
    description = {"made": made, "records": records, "copies": copies}
    write_file(folder / "made.json", json.dumps(description).encode())
    return Data(folder, name, records, copies)


def _write_coco(
    folder: Path, entries: Iterator[Entry], *, categories: list[dict[str, Any]], copies: int
) -> int:
    (folder / "images").mkdir(parents=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for entry in entries:
        names = [f"{len(images) + number:07d}{entry.suffix}" for number in range(1, copies + 1)]
        (folder / "images" / names[0]).write_bytes(entry.data)
        for name in names[1:]:
            os.link(folder / "images" / names[0], folder / "images" / name)
        for name in names:
            height, width = entry.size
            images.append(
                {"id": len(images) + 1, "file_name": name, "height": height, "width": width}
            )
            for annotation in entry.annotations:
                annotations.append(
                    {**annotation, "id": len(annotations) + 1, "image_id": len(images)}
                )
    coco = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "instances.json").write_text(json.dumps(coco))
    return len(images)


_Rows = Sequence[tuple[CocoFolder, int]]


def _keep(rows: _Rows) -> Iterator[Entry]:
    """The images and annotations as they are."""
    for folder, row in rows:
        image = folder.coco.image(row)
        yield Entry(
            folder.read(row),
            Path(image["file_name"]).suffix,
            (image["height"], image["width"]),
            folder.coco.annotations(row),
        )


def _resize_all(rows: _Rows) -> Iterator[Entry]:
    """Yield images as PNG at the size that training takes, and masks as RLE at that size."""
    from pycocotools import mask as coco_mask

    for folder, row in rows:
        image, target = resize_sample(*folder[row])
        annotations = []
        for box, label, mask in zip(
            target["boxes"].tolist(), target["labels"].tolist(), target["masks"], strict=True
        ):
            rle = coco_mask.encode(np.asfortranarray(mask.numpy()))
            x0, y0, x1, y1 = box
            annotations.append(
                {
                    "bbox": [x0, y0, x1 - x0, y1 - y0],
                    "area": int(mask.sum()),
                    "iscrowd": 0,
                    "category_id": label,
                    "segmentation": {"size": rle["size"], "counts": rle["counts"].decode()},
                }
            )
        height, width = image.shape[-2:]
        yield Entry(
            _encode(image.permute(1, 2, 0).numpy(), ".png"), ".png", (height, width), annotations
        )


def _compress(rows: _Rows) -> Iterator[Entry]:
    """The same as JPEG."""
    for entry, (folder, row) in zip(_keep(rows), rows, strict=True):
        yield entry._replace(
            data=_encode(folder[row][0].permute(1, 2, 0).numpy(), ".jpg"), suffix=".jpg"
        )


def _enlarge(rows: _Rows) -> Iterator[Entry]:
    """Photos of 12 megapixels: a few of the images, enlarged."""
    for folder, row in rows[:: max(1, len(rows) // PHOTOS)][:PHOTOS]:
        pixels = folder[row][0].permute(1, 2, 0).numpy()
        height, width = pixels.shape[:2]
        scale = sqrt(PHOTO_PIXELS / (height * width))
        size = round(height * scale), round(width * scale)
        annotations = [_move(a, scale=scale) for a in _list_polygons(folder, row)]
        yield Entry(_encode(pixels, ".jpg", size=size), ".jpg", size, annotations)


def _crowd(rows: _Rows) -> Iterator[Entry]:
    """300 objects in each image: its own, many times over, each time elsewhere."""
    chance = random.Random(0)
    for entry, (folder, row) in zip(_keep(rows), rows, strict=True):
        own = _list_polygons(folder, row)
        height, width = entry.size
        annotations = []
        for number in range(OBJECTS if own else 0):
            x, y, w, h = own[number % len(own)]["bbox"]
            shift = chance.uniform(-x, width - x - w), chance.uniform(-y, height - y - h)
            annotations.append(_move(own[number % len(own)], shift=shift))
        yield entry._replace(annotations=annotations)


def _list_polygons(folder: CocoFolder, row: int) -> list[dict[str, Any]]:
    return [
        a
        for a in folder.coco.annotations(row)
        if not a["iscrowd"] and isinstance(a["segmentation"], list)
    ]


def _move(
    annotation: dict[str, Any], *, scale: float = 1, shift: tuple[float, float] = (0, 0)
) -> dict[str, Any]:
    x, y, width, height = np.multiply(annotation["bbox"], scale).tolist()
    polygons = []
    for points in annotation["segmentation"]:
        moved = np.reshape(points, (-1, 2)) * scale + shift
        polygons.append(moved.ravel().tolist())
    bbox = [x + shift[0], y + shift[1], width, height]
    area = annotation["area"] * scale**2
    return {**annotation, "bbox": bbox, "area": area, "segmentation": polygons}


def _encode(pixels: Any, suffix: str, *, size: tuple[int, int] | None = None) -> bytes:
    from PIL import Image

    image = Image.fromarray(pixels)
    file = io.BytesIO()
    if size:
        image = image.resize(size[::-1], Image.Resampling.BICUBIC)
    options = {"quality": JPEG_QUALITY} if suffix == ".jpg" else {"compress_level": 1}
    image.save(file, "JPEG" if suffix == ".jpg" else "PNG", **options)
    return file.getvalue()


DATA: dict[str, Callable[[_Rows], Iterator[Entry]]] = {
    "kept": _keep,
    "pixels_800": _resize_all,
    "jpg_800": _compress,
    "photos_12mp": _enlarge,
    "objects_300": _crowd,
}
"""What each dataset is made of: JPEGs and polygons as they are; images at 800/1333 as PNG (the
source of all raw-pixel forms) and as JPEG of quality 95, with masks of that size; large photos;
images full of objects.
"""
