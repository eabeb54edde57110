"""What a dataset says, by another path than the package's: plain json, Pillow, pycocotools."""

from __future__ import annotations

import io
import json
import os
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from pycocotools import mask as coco_mask

_CROWD = {"0": 0, "1": 1, "None": 0, "0.0": 0, "-0.0": 0, "1.0": 1}
_CROWD |= {"False": 0, "True": 1, "false": 0, "true": 1}


class WrongDataError(Exception):
    """Data that differs from what the independent path reads, or that it cannot understand."""


@dataclass
class Expected:
    """One image and its annotations, crowds included, as they must come out."""

    pixels: np.ndarray
    annotations: list[dict[str, Any]]
    """COCO form with dense ``mask``."""


class Truth:
    """What the independent path reads in a dataset, image by image; what it raises on accepted data
    is a bug.
    """

    def __init__(self, images: Path, data: bytes) -> None:
        self.images = images
        self.entries: dict[int, tuple[Any, list[tuple[int, Any]]]] = {}
        """By image id: its entry, and its annotations with their rows from 1."""
        with _understand():
            self._group(json.loads(data.decode(json.detect_encoding(data))))

    def _group(self, coco: Any) -> None:
        annotations = list(enumerate(coco["annotations"], 1))
        for image in coco["images"]:
            number = _to_int(image["id"])
            if number in self.entries:
                raise WrongDataError(f"image id {number} twice")
            rows = [(row, entry) for row, entry in annotations if _is_of(entry, number)]
            self.entries[number] = (image, rows)

    def __call__(self, number: int, *, loose: bool = False) -> Expected:
        """Read what is expected of an image; ``loose`` does not look at the masks of crowds and of
        boxes without area.
        """
        image, rows = self.entries[number]
        with _understand():
            height = _to_int(image.get("height") or 0)
            width = _to_int(image.get("width") or 0)
            path = find_file(self.images, image)
            pixels = read_pixels(path.read_bytes(), (height, width))
            height, width = pixels.shape[:2]
            annotations = [_expect(entry, row, height, width, loose) for row, entry in rows]
        return Expected(pixels, annotations)


@contextmanager
def _understand() -> Iterator[None]:
    try:
        yield
    except WrongDataError:
        raise
    except Exception as error:
        raise WrongDataError(
            f"accepted what the independent path does not understand: {error!r}"
        ) from error


def _is_of(annotation: Any, number: int) -> bool:
    try:
        return _to_int(annotation["image_id"]) == number
    except (WrongDataError, KeyError, TypeError, ValueError):
        return False


def _expect(
    annotation: dict[str, Any], row: int, height: int, width: int, loose: bool
) -> dict[str, Any]:
    crowd = _CROWD.get(str(annotation.get("iscrowd")))
    box = annotation.get("bbox")
    area = annotation.get("area")
    if loose and box and (crowd or not find_corners([box], height, width)[1].any()):
        mask = np.zeros((height, width), np.uint8)
    else:
        mask = draw_mask(annotation.get("segmentation"), height, width)
    encoded = coco_mask.encode(np.asfortranarray(mask))
    if not box:
        box = coco_mask.toBbox(encoded).tolist()
    if area is None:
        area = int(coco_mask.area(encoded))
    if len(box) != 4:
        raise WrongDataError(f"bbox {box} accepted")
    if crowd is None:
        raise WrongDataError(f"iscrowd {annotation.get('iscrowd')!r} accepted")
    return {
        "id": _find_id(annotation.get("id"), row),
        "category_id": _to_int(annotation["category_id"]),
        "bbox": [_to_float(side) for side in box],
        "area": _to_float(area),
        "iscrowd": crowd,
        "mask": mask,
    }


def _find_id(value: Any, row: int) -> int:
    """Return the annotation's id; its row from 1 where that is no integer of 64 bits, as UUIDs are
    none.
    """
    try:
        number = _to_int(value)
    except (WrongDataError, ValueError):
        return row
    return number if number.bit_length() < 64 else row


def draw_mask(segmentation: Any, height: int, width: int) -> np.ndarray:
    """Draw uint8 [height, width], as pycocotools' ``annToMask``."""
    if isinstance(segmentation, dict):
        return _draw_runs(segmentation, height, width)
    polygons = segmentation if isinstance(segmentation[0], list) else [segmentation]
    outlines = []
    for points in polygons:
        if len(points) < 6:
            continue
        if len(points) % 2:
            raise WrongDataError("a polygon of an odd number accepted")
        outlines.append([_to_float(number) for number in points])
    if not outlines:
        raise WrongDataError("polygons without points accepted")
    encoded = coco_mask.frPyObjects(outlines, height, width)
    return coco_mask.decode(coco_mask.merge(encoded))


def _draw_runs(segmentation: dict[str, Any], height: int, width: int) -> np.ndarray:
    if [_to_int(side) for side in segmentation["size"]] != [height, width]:
        raise WrongDataError("RLE of another size accepted")
    counts = segmentation["counts"]
    if isinstance(counts, str):
        return coco_mask.decode({"size": [height, width], "counts": counts.encode()})
    runs = [_to_int(run) for run in counts]
    if min(runs) < 0:
        raise WrongDataError("negative RLE counts accepted")
    if sum(runs) != height * width:
        raise WrongDataError("RLE counts that do not add up accepted")
    pixels = np.repeat(np.arange(len(runs)) % 2, runs)
    return pixels.astype(np.uint8).reshape(height, width, order="F")


def read_pixels(data: bytes, size: tuple[int, int]) -> np.ndarray:
    """Read uint8 [H, W, 3] by Pillow; turned by EXIF only where the size that the annotations give
    says so.
    """
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
    except Exception:
        # The pixels do not need a damaged profile, text or orientation.
        image = Image.open(io.BytesIO(_strip_png(data)))
        image.load()
    height, width = size
    if height and width and image.size != (width, height):
        image = ImageOps.exif_transpose(image)
        if image.size != (width, height):
            raise WrongDataError(f"image of {image.size} accepted for {width} x {height}")
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise WrongDataError(f"image of mode {image.mode} accepted, of which 8 bits tell little")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return np.asarray(image.convert("RGB"))


def _strip_png(data: bytes) -> bytes:
    parts = [data[:8]]
    place = 8
    while place < len(data):
        end = place + 12 + int.from_bytes(data[place : place + 4], "big")
        if data[place + 4 : place + 8] in (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"):
            parts.append(data[place:end])
        place = end
    return b"".join(parts)


def find_file(images: Path, image: dict[str, Any]) -> Path:
    """Find the file as named; else the one file below the folder with that base name."""
    name = image["file_name"] if "file_name" in image else PureWindowsPath(image["coco_url"]).name
    is_inside = not os.path.isabs(name) and ".." not in Path(name).parts
    if name and "\0" not in name and is_inside and (images / name).is_file():
        return images / name
    base = unicodedata.normalize("NFC", PureWindowsPath(name).name)
    paths = []
    for path in images.rglob("*"):
        if path.is_file() and unicodedata.normalize("NFC", path.name) == base:
            paths.append(path)
    if len(paths) != 1:
        raise WrongDataError(f"file_name {name!r:.60} accepted")
    return paths[0]


def find_corners(boxes: list[Any], height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 [N, 4] x0, y0, x1, y1 in the image, and bool [N] which have an area, as
    torchvision's references do.
    """
    numbers = np.array(boxes, np.float32).reshape(-1, 4)
    starts = numbers[:, :2]
    ends = starts + numbers[:, 2:]
    corners = np.hstack([starts, ends])
    largest = [width, height, width, height]
    corners = corners.clip(0, np.array(largest, np.float32))
    is_wide = corners[:, 2] > corners[:, 0]
    is_high = corners[:, 3] > corners[:, 1]
    return corners, is_wide & is_high


def compare(actual: Any, expected: Any, what: str) -> None:
    """Raise `WrongDataError` where two values or arrays differ."""
    if not np.array_equal(np.asarray(actual), np.asarray(expected)):
        raise WrongDataError(f"{what} differ\n{actual!s:.300}\n{expected!s:.300}")


def compare_sample(
    image: Any,
    target: dict[str, Any],
    expected: Expected,
    category_ids: dict[int, int],
) -> None:
    """Compare a sample with what is expected by torchvision's contract: crowds and boxes without
    area are left out.
    """
    height, width = expected.pixels.shape[:2]
    compare(image.shape, (3, height, width), "sizes")
    compare(image.permute(1, 2, 0), expected.pixels, "pixels")
    rows = [row for row in expected.annotations if not row["iscrowd"]]
    boxes, kept = find_corners([row["bbox"] for row in rows], height, width)
    rows = [row for row, keep in zip(rows, kept, strict=True) if keep]
    areas = [row["area"] for row in rows]
    masks = np.array([row["mask"] for row in rows], np.uint8)
    categories = [category_ids[label] for label in target["labels"].tolist()]
    compare(categories, [row["category_id"] for row in rows], "labels")
    compare(target["boxes"], boxes[kept], "boxes")
    compare(target["area"], np.array(areas, np.float32), "areas")
    compare(target["masks"], masks.reshape(-1, height, width), "masks")
    if 0 in target["labels"]:
        raise WrongDataError("a label 0")
    if target["iscrowd"].any():
        raise WrongDataError("a crowd")
    if not np.isfinite(boxes[kept]).all():
        raise WrongDataError("a box that is no number")


def compare_record(record: dict[str, Any], expected: Expected) -> None:
    """Compare the JSON of a record with what is expected, crowds included."""
    compare(
        [record["height"], record["width"]],
        expected.pixels.shape[:2],
        "sizes",
    )
    compare(len(record["annotations"]), len(expected.annotations), "numbers of annotations")
    for entry, other in zip(record["annotations"], expected.annotations, strict=True):
        for name in ("id", "category_id", "bbox", "area", "iscrowd"):
            compare(entry[name], other[name], f"records' {name}")
        encoded = dict(entry["segmentation"])
        encoded["counts"] = encoded["counts"].encode()
        mask = coco_mask.decode(encoded)
        compare(mask, other["mask"], "records' masks")


def _to_float(value: Any) -> float:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        number = float(value)
        if np.isfinite(number):
            return number
    raise WrongDataError(f"{value!r:.40} accepted as a number")


def _to_int(value: Any) -> int:
    number = value if isinstance(value, int) and not isinstance(value, bool) else _to_float(value)
    if number != int(number):
        raise WrongDataError(f"{value!r:.40} accepted as an integer")
    return int(number)
