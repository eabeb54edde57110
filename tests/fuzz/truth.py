"""What a dataset says, by another path than the package's: plain json, Pillow, pycocotools."""

from __future__ import annotations

import io
import json
import os
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from pycocotools import mask as coco_mask

_CROWD = {"0": 0, "1": 1, "False": 0, "True": 1, "None": 0, "0.0": 0, "-0.0": 0, "1.0": 1}


class WrongDataError(Exception):
    """Data that differs from what the independent path reads, or that it cannot understand."""


@dataclass
class Expected:
    """One image and its annotations, crowds included, as they must come out."""

    pixels: np.ndarray
    annotations: list[dict[str, Any]]
    """COCO form with dense ``mask``."""


def read_truth(images: Path, data: bytes) -> dict[int, Any]:
    """By image id: a function that gives what is expected of it, or raises where the entries make
    no sense.

    The function takes ``loose``: the masks of crowds and of boxes without area are not looked at.
    """
    coco = json.loads(data.decode(json.detect_encoding(data)))
    entries: dict[int, Any] = {}
    for image in coco["images"]:
        number = _to_int(image["id"])
        if number in entries:
            raise WrongDataError(f"image id {number} twice")
        mine = [(row, one) for row, one in enumerate(coco["annotations"], 1) if _is_of(one, number)]
        entries[number] = lambda loose=False, image=image, mine=mine: _expect(
            images, image, mine, loose
        )
    return entries


def _is_of(annotation: Any, number: int) -> bool:
    try:
        return _to_int(annotation["image_id"]) == number
    except (WrongDataError, KeyError, TypeError, ValueError):
        return False


def _expect(
    images: Path, image: dict[str, Any], annotations: list[tuple[int, Any]], loose: bool
) -> Expected:
    size = _to_int(image.get("height") or 0), _to_int(image.get("width") or 0)
    pixels = read_pixels(find_file(images, image).read_bytes(), size)
    height, width = pixels.shape[:2]
    return Expected(
        pixels, [_expect_annotation(one, row, height, width, loose) for row, one in annotations]
    )


def _expect_annotation(
    one: dict[str, Any], row: int, height: int, width: int, loose: bool
) -> dict[str, Any]:
    crowd = _CROWD.get(str(one.get("iscrowd")))
    if (
        loose
        and one.get("bbox")
        and (crowd or not find_corners([one["bbox"]], height, width)[1].any())
    ):
        mask = np.zeros((height, width), np.uint8)
    else:
        mask = draw_mask(one.get("segmentation"), height, width)
    encoded = coco_mask.encode(np.asfortranarray(mask))
    box = one.get("bbox")
    area = one.get("area")
    numbers = [_to_float(side) for side in box] if box else coco_mask.toBbox(encoded).tolist()
    if len(numbers) != 4 or crowd is None:
        raise WrongDataError(f"bbox {box} or iscrowd {one.get('iscrowd')!r} accepted")
    return {
        "id": _find_id(one.get("id"), row),
        "category_id": _to_int(one["category_id"]),
        "bbox": numbers,
        "area": float(coco_mask.area(encoded)) if area is None else _to_float(area),
        "iscrowd": crowd,
        "mask": mask,
    }


def _find_id(value: Any, row: int) -> int:
    """The annotation's id; its row from 1 where that is no integer, as UUIDs are none."""
    try:
        return _to_int(value)
    except (WrongDataError, ValueError):
        return row


def draw_mask(segmentation: Any, height: int, width: int) -> np.ndarray:
    """uint8 [height, width], as pycocotools' ``annToMask``."""
    if isinstance(segmentation, dict):
        if [_to_int(side) for side in segmentation["size"]] != [height, width]:
            raise WrongDataError("RLE of another size accepted")
        counts = segmentation["counts"]
        if isinstance(counts, list):
            runs = [_to_int(run) for run in counts]
            if min(runs) < 0 or sum(runs) != height * width:
                raise WrongDataError("RLE counts that do not add up accepted")
            return (
                np.repeat(np.arange(len(runs)) % 2, runs)
                .astype(np.uint8)
                .reshape(height, width, order="F")
            )
        return coco_mask.decode({"size": [height, width], "counts": counts.encode()})
    polygons = segmentation if isinstance(segmentation[0], list) else [segmentation]
    whole = [[_to_float(number) for number in polygon] for polygon in polygons if len(polygon) >= 6]
    if not whole or any(len(polygon) % 2 for polygon in whole):
        raise WrongDataError("polygons without points or of an odd number accepted")
    return coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(whole, height, width)))


def read_pixels(data: bytes, size: tuple[int, int]) -> np.ndarray:
    """uint8 [H, W, 3] by Pillow; turned by EXIF only where the size that the annotations give says
    so.
    """
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
    except Exception:  # of a damaged profile, text or orientation, which the pixels do not need
        image = Image.open(io.BytesIO(_strip_png(data)))
        image.load()
    height, width = size
    if height and width and image.size != (width, height):
        image = ImageOps.exif_transpose(image)
        if image.size != (width, height):
            raise WrongDataError(
                f"image of {image.size} accepted for annotations of {width} x {height}"
            )
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
    """The file as named; else the one file below the folder with that base name."""
    name = image["file_name"] if "file_name" in image else PureWindowsPath(image["coco_url"]).name
    if (
        name
        and "\0" not in name
        and (images / name).is_file()
        and not os.path.isabs(name)
        and ".." not in Path(name).parts
    ):
        return images / name
    base = unicodedata.normalize("NFC", PureWindowsPath(name).name)
    found = [
        path
        for path in images.rglob("*")
        if unicodedata.normalize("NFC", path.name) == base and path.is_file()
    ]
    if len(found) != 1:
        raise WrongDataError(f"file_name {name!r:.60} accepted")
    return found[0]


def find_corners(boxes: list[Any], height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 [N, 4] x0, y0, x1, y1 in the image, and bool [N] which have an area, as torchvision's
    references.
    """
    corners = np.array(boxes, np.float32).reshape(-1, 4)
    corners[:, 2:] += corners[:, :2]
    corners[:, 0::2] = corners[:, 0::2].clip(0, width)
    corners[:, 1::2] = corners[:, 1::2].clip(0, height)
    return corners, (corners[:, 2] > corners[:, 0]) & (corners[:, 3] > corners[:, 1])


class Truth:
    """What the independent path reads in a dataset, image by image, once; what it raises on
    accepted data is a bug.
    """

    def __init__(self, images: Path, data: bytes) -> None:
        self.known: dict[tuple[int, bool], Expected] = {}
        self.entries = self._understand(read_truth, images, data)

    def __call__(self, number: int, *, loose: bool = False) -> Expected:
        """Of an image; ``loose`` does not look at the masks of crowds and of boxes without area."""
        if (number, loose) not in self.known:
            self.known[number, loose] = self._understand(self.entries[number], loose)
        return self.known[number, loose]

    @staticmethod
    def _understand(work: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return work(*arguments)
        except WrongDataError:
            raise
        except Exception as error:
            text = (
                "accepted what the independent path does not understand: "
                f"{type(error).__name__} {error}"
            )
            raise WrongDataError(text) from error


def compare(found: Any, expected: Any, what: str) -> None:
    """Two values or arrays, exactly; raises `WrongDataError` where they differ."""
    one = np.asarray(found)
    other = np.asarray(expected)
    if one.shape != other.shape or not np.array_equal(one, other):
        raise WrongDataError(f"{what} differ\n{one.tolist()!s:.300}\n{other.tolist()!s:.300}")


def shrink(expected: Expected, min_size: int, max_size: int) -> Expected:
    """As torchvision's Mask R-CNN resizes, but never larger: masks by the nearest pixel."""
    height, width = expected.pixels.shape[:2]
    scale = min(1.0, min_size / min(height, width), max_size / max(height, width))
    if scale == 1:
        return expected
    size = max(1, int(height * scale)), max(1, int(width * scale))
    image = Image.fromarray(expected.pixels).resize(
        size[::-1], Image.Resampling.BILINEAR, reducing_gap=3.0
    )
    scales = (size[0] / height, size[1] / width)
    annotations = []
    for one in expected.annotations:
        dense = torch.from_numpy(one["mask"].copy())[None, None].float()
        mask = torch.nn.functional.interpolate(dense, size=size)[0, 0].byte().numpy()
        box = [side * scales[1 - place % 2] for place, side in enumerate(one["bbox"])]
        annotations.append(
            {**one, "mask": mask, "bbox": box, "area": one["area"] * scales[1] * scales[0]}
        )
    return Expected(np.asarray(image), annotations)


def compare_sample(
    image: Any,
    target: dict[str, Any],
    expected: Expected,
    category_ids: dict[int, int],
    *,
    pixels: bool = True,
) -> None:
    """A sample with torchvision's contract against what is expected: crowds and boxes without area
    are left out.
    """
    height, width = expected.pixels.shape[:2]
    compare(image.shape, (3, height, width), "sizes")
    if pixels:
        compare(image.permute(1, 2, 0), expected.pixels, "pixels")
    boxes, kept = find_corners([one["bbox"] for one in expected.annotations], height, width)
    kept &= np.array([not one["iscrowd"] for one in expected.annotations], bool)
    objects = [one for one, keep in zip(expected.annotations, kept, strict=True) if keep]
    compare(
        [category_ids[label] for label in target["labels"].tolist()],
        [one["category_id"] for one in objects],
        "labels",
    )
    compare(target["boxes"], boxes[kept], "boxes")
    compare(target["area"], np.array([one["area"] for one in objects], np.float32), "areas")
    compare(
        target["masks"],
        np.array([one["mask"] for one in objects], np.uint8).reshape(-1, height, width),
        "masks",
    )
    if 0 in target["labels"] or target["iscrowd"].any() or not np.isfinite(boxes[kept]).all():
        raise WrongDataError("a label 0, a crowd, or a box that is no number")


def compare_record(record: dict[str, Any], expected: Expected) -> None:
    """The JSON of a record against what is expected, crowds included."""
    compare([record["height"], record["width"]], expected.pixels.shape[:2], "sizes")
    for name in ("id", "category_id", "bbox", "area", "iscrowd"):
        compare(
            [one[name] for one in record["annotations"]],
            [one[name] for one in expected.annotations],
            f"records' {name}",
        )
    for one, other in zip(record["annotations"], expected.annotations, strict=True):
        compare(
            coco_mask.decode(
                {**one["segmentation"], "counts": one["segmentation"]["counts"].encode()}
            ),
            other["mask"],
            "records' masks",
        )


def _to_float(value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float | str)
        or not np.isfinite(number := float(value))
    ):
        raise WrongDataError(f"{value!r:.40} accepted as a number")
    return number


def _to_int(value: Any) -> int:
    number = value if isinstance(value, int) and not isinstance(value, bool) else _to_float(value)
    if number != int(number):
        raise WrongDataError(f"{value!r:.40} accepted as an integer")
    return int(number)
