"""One image on its way into a shard: read, checked, kept as it is where possible, shrunk once where it is too large."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from colab_utils.data.coco import CocoDataset
from colab_utils.data.decoding import open_image, to_rgb, turn_upright
from colab_utils.data.masks import MaskEncoder, resize_rles
from colab_utils.drive import DriveLostError, Retries, read_file
from colab_utils.errors import ColabUtilsError
from colab_utils.shards.format import SkippedImage, split_member

__all__ = [
    "Sample", "Storage", "StoredImage", "dump_record", "fit_size", "make_record", "plan_size", "read_image",
    "store_image", "try_sample",
]  # fmt: skip

Storage = Literal["keep", "shrink", "pixels"]
"""How images lie in a shard: all bytes kept, the larger ones shrunk once, or shrunk and as raw pixels."""
_JPEG_QUALITY = 95
_KEPT_KINDS, _KEPT_MODES = ("JPEG", "MPO", "PNG"), ("RGB", "L")
_PNG_DEPTH = 24  # the byte of a PNG that holds its bits per channel


class StoredImage(NamedTuple):
    """An image as it goes into a shard; sizes are height and width in pixels."""

    extension: str
    data: bytes
    size: tuple[int, int]
    original: tuple[int, int]


class Sample(NamedTuple):
    """One image as it goes into a shard."""

    record: dict[str, Any]
    """As `make_record` gives it."""
    members: list[tuple[bytes, bytes, bytes]]
    """Those of the tar, the image and its record: each as header, data and padding."""


def fit_size(height: int, width: int, *, min_size: float, max_size: float) -> tuple[int, int]:
    """The size that torchvision's Mask R-CNN resizes an image to, smaller or larger, at least a pixel.

    Source: ``_resize_image_and_masks`` in torchvision ``models/detection/transform.py``: each side times one
    scale, rounded down.

    Example:
        >>> fit_size(3000, 4000, min_size=800, max_size=1333), fit_size(480, 640, min_size=800, max_size=1333)
        ((800, 1066), (800, 1066))
    """
    scale = min(min_size / min(height, width), max_size / max(height, width))
    return max(1, math.floor(height * scale)), max(1, math.floor(width * scale))


def plan_size(height: int, width: int, *, min_size: int, max_size: int) -> tuple[int, int]:
    """The size an image is stored at: what torchvision's Mask R-CNN would shrink it to, never larger than it is.

    Example:
        >>> plan_size(3000, 4000, min_size=800, max_size=1333), plan_size(480, 640, min_size=800, max_size=1333)
        ((800, 1066), (480, 640))
    """
    # both sides are smaller, or none is
    return min((height, width), fit_size(height, width, min_size=min_size, max_size=max_size))


def store_image(
    data: bytes, size: tuple[int, int], *, min_size: int, max_size: int, storage: Storage = "shrink"
) -> StoredImage:
    """Decode an image once to be sure that it is complete, then keep its bytes, shrink it, or store its pixels.

    JPEG and 8-bit RGB or grey PNG keep their bytes. Other kinds become 8-bit RGB PNG; what is larger than
    training needs is shrunk with an antialiased filter (to JPEG, or PNG if it was PNG).

    Args:
        data: the file's bytes.
        size: height and width that the annotations give; 0 where they give none.
        min_size: shorter side that training needs, in pixels.
        max_size: longer side that training needs, in pixels.
        storage: "shrink"; "keep" shrinks nothing; "pixels" shrinks, then stores uint8 [H, W, 3] as ``.npy``.

    Raises:
        ColabUtilsError: if the data is not a complete image, or its size is not what the annotations say.
    """
    image = open_image(data)
    kind, mode = image.format or "", image.mode
    upright = turn_upright(image, *size)
    deep = kind == "PNG" and data[_PNG_DEPTH] == 16  # Pillow reads it as 8 bits a channel, torchvision does not
    kept = upright is image and kind in _KEPT_KINDS and mode in _KEPT_MODES and not deep
    original = upright.height, upright.width
    stored = original if storage == "keep" else plan_size(*original, min_size=min_size, max_size=max_size)
    if kept and stored == original and storage != "pixels":
        return StoredImage("png" if kind == "PNG" else "jpg", data, stored, original)
    rgb, extension = to_rgb(upright), "npy" if storage == "pixels" else "png"
    if stored != original:
        rgb = rgb.resize(stored[::-1], Image.Resampling.BILINEAR, reducing_gap=3.0)
        if storage == "shrink" and kind in ("JPEG", "MPO", "WEBP"):
            extension = "jpg"
    return StoredImage(extension, _encode(rgb, extension), stored, original)


def make_record(image: dict[str, Any], annotations: list[dict[str, Any]], stored: StoredImage) -> dict[str, Any]:
    """The content of ``KEY.json``: COCO form at the stored size, each mask as compressed RLE whose counts are bytes.

    Masks are rasterised at the original size and then resized, as torchvision's transform does.

    Raises:
        ColabUtilsError: if an annotation has no usable mask or box.
    """
    size, original = stored.size, stored.original
    scale_y, scale_x = size[0] / original[0], size[1] / original[1]
    masks, rles, scaled = MaskEncoder(*original), [], []
    for annotation in annotations:
        (x, y, width, height), area = annotation["bbox"], annotation["area"]
        try:
            rles.append(masks.encode(annotation["segmentation"]))
        except ColabUtilsError as error:
            raise ColabUtilsError(f"annotation {annotation['id']}: {error}") from None
        box = [x * scale_x, y * scale_y, width * scale_x, height * scale_y]
        scaled.append({**annotation, "bbox": box, "area": area * scale_x * scale_y})
    if size != original:
        rles = resize_rles(rles, *size)
    return {
        "image_id": image["id"],
        "file_name": image["file_name"],
        "width": size[1],
        "height": size[0],
        "original_width": original[1],
        "original_height": original[0],
        "annotations": [{**one, "segmentation": rle} for one, rle in zip(scaled, rles, strict=True)],
    }


def dump_record(record: dict[str, Any]) -> bytes:
    """The bytes of ``KEY.json``, where the counts of RLE are text."""
    return json.dumps(record, separators=(",", ":"), default=bytes.decode).encode()


def read_image(images: Path, dataset: CocoDataset, i: int, retries: Retries | None = None) -> bytes:
    """The bytes of one image's file.

    Raises:
        ColabUtilsError: if the file is missing, cannot be read, or lies outside the folder.
        DriveLostError: if Drive went away.
    """
    try:
        return read_file(dataset.find_image(images, i)[0], None, retries)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ColabUtilsError("the file is missing") from None
    except OSError as error:
        raise ColabUtilsError(f"the file cannot be read: {error.strerror}") from None


def try_sample(
    read: Callable[[], bytes], dataset: CocoDataset, i: int, recipe: dict[str, Any]
) -> Sample | SkippedImage:
    """One image's sample, from the bytes of its file; a `SkippedImage` if the image or an annotation is bad.

    Raises:
        DriveLostError: if Drive went away, which tells nothing about the image.
    """
    image, size = dataset.image(i), tuple(dataset.sizes[i].tolist())
    settings = {name: recipe[name] for name in ("min_size", "max_size", "storage")}
    try:
        stored = store_image(read(), size, **settings)
        record = make_record(image, dataset.annotations(i), stored)
    except DriveLostError:
        raise
    except ColabUtilsError as error:
        return SkippedImage(image["file_name"], str(error))
    files = (stored.extension, stored.data), ("json", dump_record(record))
    return Sample(record, [split_member(f"{image['id']:012d}.{extension}", data) for extension, data in files])


def _encode(image: Image.Image, extension: str) -> bytes:
    file, image.info = io.BytesIO(), {}  # of the original file, which Pillow would write
    if extension == "npy":
        np.save(file, np.asarray(image))
    elif extension == "jpg":
        image.save(file, "JPEG", quality=_JPEG_QUALITY)
    else:
        image.save(file, "PNG", compress_level=1)
    return file.getvalue()
