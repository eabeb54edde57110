"""Any COCO instance JSON, read into flat arrays: no Python object per annotation is kept.

The file is parsed one image and one annotation at a time, so COCO train2017 (118,000 images, 860,000
objects, 0.45 GB of JSON) needs little more memory than its text.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.columns import AnnotationColumns, ImageColumns, order_categories
from colab_utils.data.parsing import decode_text, iterate_coco, read_bytes
from colab_utils.data.segmentations import unpack_segmentation
from colab_utils.errors import ColabUtilsError

__all__ = ["CocoDataset", "is_safe_name", "is_sound_box", "read_coco"]

GATHER_ROWS = 1 << 16
LARGEST_NUMBER = 1e15


@dataclass(frozen=True, eq=False)
class CocoDataset:
    """A COCO dataset's annotations in flat arrays, grouped by image; make one with :func:`read_coco`.

    I images, A annotations. Annotations whose image or category is unknown are not among the A; their
    ids are in ``unknown_images`` and ``unknown_categories``.
    """

    fingerprint: str
    """XXH3-128 of the JSON file, in hexadecimal."""
    categories: tuple[dict[str, Any], ...]
    """Each category's ``id`` and ``name``, in order of id."""
    image_ids: NDArray[np.int64]
    """int64 [I], in the file's order."""
    sizes: NDArray[np.int32]
    """int32 [I, 2]: height and width in pixels; 0 where the file gives none."""
    file_names: tuple[bytes, NDArray[np.int64]]
    """UTF-8 bytes one after another, and int64 [I + 1] offsets into them."""
    first: NDArray[np.int64]
    """int64 [I + 1]: image i has the annotations ``first[i]`` to ``first[i + 1]``."""
    ids: NDArray[np.int64]
    """int64 [A]: annotation ids."""
    category_ids: NDArray[np.int64]
    """int64 [A]: COCO category ids as in the file, not mapped."""
    boxes: NDArray[np.float64]
    """float64 [A, 4]: x, y, width, height in pixels."""
    areas: NDArray[np.float64]
    """float64 [A], in square pixels."""
    crowds: NDArray[np.bool_]
    """bool [A]."""
    segmentations: tuple[NDArray[np.uint8], NDArray[np.int64]]
    """Each segmentation's bytes (see `colab_utils.data.segmentations`), and int64 [A + 1] offsets into them."""
    unknown_images: NDArray[np.int64]
    unknown_categories: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.image_ids)

    def __str__(self) -> str:
        return f"{len(self):,} images, {len(self.ids):,} annotations, {len(self.categories)} categories"

    def file_name(self, index: int) -> str:
        """The image's path below the image folder."""
        text, offsets = self.file_names
        return text[offsets[index] : offsets[index + 1]].decode()

    def image(self, index: int) -> dict[str, Any]:
        """The image's ``id``, ``file_name``, ``width`` and ``height``."""
        height, width = self.sizes[index].tolist()
        return {
            "id": int(self.image_ids[index]),
            "file_name": self.file_name(index),
            "width": width,
            "height": height,
        }

    def annotations(self, index: int) -> list[dict[str, Any]]:
        """The image's annotations in COCO form, made when you ask; polygons and RLE as in the file."""
        blob, ends = self.segmentations
        rows = range(self.first[index], self.first[index + 1])
        return [
            {
                "id": int(self.ids[row]),
                "image_id": int(self.image_ids[index]),
                "category_id": int(self.category_ids[row]),
                "bbox": self.boxes[row].tolist(),
                "area": float(self.areas[row]),
                "iscrowd": int(self.crowds[row]),
                "segmentation": unpack_segmentation(blob[ends[row] : ends[row + 1]].tobytes()),
            }
            for row in rows
        ]

    def subset(self, start: int, stop: int) -> CocoDataset:
        """Images ``start`` to ``stop`` alone, in arrays of their own (small to send to another process)."""
        a, b = int(self.first[start]), int(self.first[stop])
        return replace(
            self,
            image_ids=self.image_ids[start:stop],
            sizes=self.sizes[start:stop],
            file_names=_cut_blob(self.file_names, start, stop),
            first=self.first[start : stop + 1] - a,
            ids=self.ids[a:b],
            category_ids=self.category_ids[a:b],
            boxes=self.boxes[a:b],
            areas=self.areas[a:b],
            crowds=self.crowds[a:b],
            segmentations=_cut_blob(self.segmentations, a, b),
        )


def read_coco(annotations: str | Path) -> CocoDataset:
    """Read a COCO instance JSON: polygons, uncompressed and compressed RLE, crowds, sparse category ids.

    Args:
        annotations: the JSON file.

    Raises:
        ColabUtilsError: if there is no such file, or it is not COCO instance JSON.

    Example:
        >>> import json, tempfile
        >>> coco = {"images": [{"id": 7, "file_name": "a/b.jpg", "width": 8, "height": 6}],
        ...         "categories": [{"id": 3, "name": "car"}],
        ...         "annotations": [{"id": 1, "image_id": 7, "category_id": 3, "bbox": [0, 0, 4, 4], "area": 16,
        ...                          "iscrowd": 0, "segmentation": [[0, 0, 4, 0, 4, 4]]}]}
        >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        ...     _ = file.write(json.dumps(coco)); file.flush()
        ...     dataset = read_coco(file.name)
        >>> print(dataset)
        1 images, 1 annotations, 1 categories
        >>> dataset.annotations(0)[0]["segmentation"]
        [[0.0, 0.0, 4.0, 0.0, 4.0, 4.0]]
    """
    import xxhash

    path = Path(annotations)
    data = read_bytes(path)
    fingerprint = xxhash.xxh3_128_hexdigest(data)
    text = decode_text(data, path)
    del data
    images, rows = ImageColumns(), AnnotationColumns()
    categories: list[dict[str, Any]] = []
    add = {"images": images.add, "annotations": rows.add, "categories": categories.append}
    for section, entry in iterate_coco(text, path):
        try:
            add[section](entry)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            name = entry.get("id", "?") if isinstance(entry, dict) else entry
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ColabUtilsError(
                f"expected COCO instance JSON in {path}, found an entry of '{section}' (id {name!r:.40}) with "
                f"{reason:.120}. Export the dataset again as COCO instances."
            ) from None
    del text
    return _group(images, rows, order_categories(categories, path), fingerprint, path)


def is_safe_name(file_name: str) -> bool:
    """Whether a ``file_name`` stays inside the image folder, on any system.

    Example:
        >>> [is_safe_name(name) for name in ("a/b.jpg", "../b.jpg", "/b.jpg", "C:/b.jpg")]
        [True, False, False, False]
    """
    path = PureWindowsPath(file_name)  # knows both kinds of slash, and drives
    return bool(path.parts) and not path.anchor and ".." not in path.parts and "\0" not in file_name


def is_sound_box(annotation: dict[str, Any]) -> bool:
    """Whether an annotation's ``bbox`` and ``area`` are finite numbers that a float32 holds.

    Example:
        >>> is_sound_box({"bbox": [0, 0, 4, 4], "area": 16}), is_sound_box({"bbox": [0, 0, 4, 4], "area": float("nan")})
        (True, False)
    """
    return all(abs(number) < LARGEST_NUMBER for number in (*annotation["bbox"], annotation["area"]))


def _group(
    images: ImageColumns, rows: AnnotationColumns, categories: tuple[dict[str, Any], ...], fingerprint: str, path: Path
) -> CocoDataset:
    """Sort the annotations by image and set aside those whose image or category is unknown."""
    image_ids = np.frombuffer(images.ids, np.int64) if images.ids else np.zeros(0, np.int64)
    order = np.argsort(image_ids, kind="stable")
    ordered = image_ids[order]
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if repeated.size:
        raise ColabUtilsError(
            f"expected each image id once in {path}, found {repeated[0]} twice ({repeated.size} such ids). "
            "Export the dataset again, or give the images ids of their own."
        )
    ids, owners = _as_array(rows.ids, np.int64), _as_array(rows.images, np.int64)
    category_ids = _as_array(rows.categories, np.int64)
    place = np.minimum(np.searchsorted(ordered, owners), max(len(ordered) - 1, 0))
    known_image = ordered[place] == owners if len(ordered) else np.zeros(len(owners), bool)
    known_category = np.isin(category_ids, [category["id"] for category in categories])
    keep = np.flatnonzero(known_image & known_category)
    image_of = order[place[keep]] if len(ordered) else np.zeros(0, np.int64)
    by_image = keep[np.argsort(image_of, kind="stable")]
    first = np.zeros(len(image_ids) + 1, np.int64)
    np.cumsum(np.bincount(image_of, minlength=len(image_ids)), out=first[1:])
    return CocoDataset(
        fingerprint=fingerprint,
        categories=categories,
        image_ids=image_ids,
        sizes=_as_array(images.sizes, np.int32).reshape(-1, 2),
        file_names=(bytes(images.names), _as_array(images.ends, np.int64)),
        first=first,
        ids=ids[by_image],
        category_ids=category_ids[by_image],
        boxes=_as_array(rows.boxes, np.float64).reshape(-1, 4)[by_image],
        areas=_as_array(rows.areas, np.float64)[by_image],
        crowds=_as_array(rows.crowds, np.int8)[by_image].astype(bool),
        segmentations=_gather_blob(*rows.segmentations.build(), by_image),
        unknown_images=ids[~known_image],
        unknown_categories=ids[known_image & ~known_category],
    )


def _as_array(values: array[Any], dtype: Any) -> NDArray[Any]:
    return np.frombuffer(values, dtype) if len(values) else np.zeros(0, dtype)


def _cut_blob(blob: tuple[Any, NDArray[np.int64]], start: int, stop: int) -> tuple[Any, NDArray[np.int64]]:
    data, offsets = blob
    return data[offsets[start] : offsets[stop]], offsets[start : stop + 1] - offsets[start]


def _gather_blob(
    data: bytearray, ends: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The given rows' parts of ``data`` one after another, and the offsets into them."""
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(ends[rows + 1] - ends[rows], out=offsets[1:])
    gathered, view = np.empty(offsets[-1], np.uint8), memoryview(data)
    for start in range(0, len(rows), GATHER_ROWS):
        some = rows[start : start + GATHER_ROWS]
        parts = [view[a:b] for a, b in zip(ends[some].tolist(), ends[some + 1].tolist(), strict=True)]
        gathered[offsets[start] : offsets[start + len(some)]] = np.frombuffer(b"".join(parts), np.uint8)
    return gathered, offsets
