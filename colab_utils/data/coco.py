"""Any COCO instance JSON, read into flat arrays: no Python object per annotation is kept.

The file is parsed one image and one annotation at a time, so COCO train2017 (118,000 images, 860,000
objects, 0.45 GB of JSON) needs little more memory than its text.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.errors import ColabUtilsError

__all__ = ["CocoDataset", "is_safe_name", "iterate_coco", "read_coco"]

POLYGONS, RLE, COMPRESSED_RLE, OTHER = range(4)
_SPACE = re.compile(r"[ \t\n\r]*")


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
    heads: tuple[bytes, NDArray[np.int64]]
    """Each segmentation's kind, polygon lengths or RLE, one after another, and int64 [A + 1] offsets into them."""
    numbers: tuple[NDArray[Any], NDArray[np.int64]]
    """Each segmentation's polygon coordinates (float32 or float64) and int64 [A + 1] offsets into them."""
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
        (heads, head_ends), (numbers, number_ends) = self.heads, self.numbers
        rows = range(self.first[index], self.first[index + 1])
        return [
            {
                "id": int(self.ids[row]),
                "image_id": int(self.image_ids[index]),
                "category_id": int(self.category_ids[row]),
                "bbox": self.boxes[row].tolist(),
                "area": float(self.areas[row]),
                "iscrowd": int(self.crowds[row]),
                "segmentation": _unpack_segmentation(
                    heads[head_ends[row] : head_ends[row + 1]],
                    numbers[number_ends[row] : number_ends[row + 1]],
                ),
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
            heads=_cut_blob(self.heads, a, b),
            numbers=_cut_blob(self.numbers, a, b),
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
    data = _read_bytes(path)
    fingerprint = xxhash.xxh3_128_hexdigest(data)
    text = _decode_text(data, path)
    del data
    images, rows = _Images(), _Annotations()
    categories: list[dict[str, Any]] = []
    add = {"images": images.add, "annotations": rows.add, "categories": categories.append}
    for section, item in iterate_coco(text, path):
        try:
            add[section](item)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            name = item.get("id", "?") if isinstance(item, dict) else item
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ColabUtilsError(
                f"expected COCO instance JSON in {path}, found an entry of '{section}' (id {name}) with {reason}. "
                "Export the dataset again as COCO instances."
            ) from None
    del text
    return _group(images, rows, _check_categories(categories, path), fingerprint, path)


def iterate_coco(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield ("images" | "annotations" | "categories", item) one at a time from the text of a COCO JSON.

    Raises:
        ColabUtilsError: if the text is not JSON, or lacks one of the three lists.
    """
    decode = json.JSONDecoder().raw_decode
    found: set[str] = set()
    try:
        position = _skip(text, 0, "{")
        while text[position] != "}":
            key, position = decode(text, position)
            position = _skip(text, position, ":")
            if key not in ("images", "annotations", "categories") or text[position] != "[":
                _, position = decode(text, position)
            else:
                found.add(key)
                position = _skip(text, position, "[")
                while text[position] != "]":
                    item, position = decode(text, position)
                    yield key, item
                    position = _next_item(text, position, "]")
                position = _skip(text, position, "]")
            position = _next_item(text, position, "}")
    except (json.JSONDecodeError, IndexError) as error:
        where = error.pos if isinstance(error, json.JSONDecodeError) else len(text)
        raise ColabUtilsError(
            f"expected COCO instance JSON in {path}, found text that is not JSON at character {where:,} of "
            f"{len(text):,}. The file may be cut short or be something else: export or copy it again."
        ) from None
    missing = [key for key in ("images", "annotations", "categories") if key not in found]
    if missing:
        raise ColabUtilsError(
            f"expected COCO instance JSON in {path}, found no list of {' and '.join(missing)}. "
            "Name the instances file (such as instances_train2017.json), or export the dataset as COCO instances."
        )


def is_safe_name(file_name: str) -> bool:
    """Whether a ``file_name`` stays inside the image folder.

    Example:
        >>> [is_safe_name(name) for name in ("a/b.jpg", "../b.jpg", "/b.jpg", "C:/b.jpg")]
        [True, False, False, False]
    """
    path = PurePosixPath(file_name)
    return not (path.is_absolute() or ".." in path.parts or PureWindowsPath(file_name).drive or not path.parts)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ColabUtilsError(
            f"expected an annotations file, found nothing at {path}. Check the name; on Colab, mount Drive first."
        ) from None
    except IsADirectoryError:
        raise ColabUtilsError(f"expected an annotations file, found a folder: {path}. Name the JSON in it.") from None
    except OSError as error:
        raise ColabUtilsError(
            f"expected to read {path}, found: {error.strerror}. If it is on Drive, mount it again."
        ) from None


def _decode_text(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ColabUtilsError(
            f"expected COCO instance JSON in {path}, found bytes that are not text. Is it a zip? Unpack it first."
        ) from None


def _skip(text: str, position: int, expected: str) -> int:
    """The position of the next token after ``expected``, with the space around it passed over."""
    position = _SPACE.match(text, position).end()  # type: ignore[union-attr]
    if text[position] != expected:
        raise json.JSONDecodeError(f"expected {expected}", text[:0], position)
    return _SPACE.match(text, position + 1).end()  # type: ignore[union-attr]


def _next_item(text: str, position: int, end: str) -> int:
    position = _SPACE.match(text, position).end()  # type: ignore[union-attr]
    return position if text[position] == end else _skip(text, position, ",")


class _Images:
    def __init__(self) -> None:
        self.ids, self.sizes, self.names, self.ends = array("q"), array("i"), bytearray(), array("q", [0])

    def add(self, image: dict[str, Any]) -> None:
        name = image["file_name"]
        if not isinstance(name, str):
            raise TypeError(f"a file_name that is not text: {name!r}")
        self.ids.append(_integer(image["id"], "id"))
        self.sizes.extend((_integer(image.get("height") or 0, "height"), _integer(image.get("width") or 0, "width")))
        self.names += name.encode()
        self.ends.append(len(self.names))


class _Annotations:
    def __init__(self) -> None:
        self.ids, self.images, self.categories = array("q"), array("q"), array("q")
        self.boxes, self.areas, self.crowds = array("d"), array("d"), array("b")
        self.heads, self.head_ends = bytearray(), array("q", [0])
        self.numbers, self.number_ends = array("d"), array("q", [0])

    def add(self, annotation: dict[str, Any]) -> None:
        box = annotation["bbox"]
        if not isinstance(box, list) or len(box) != 4:
            raise ValueError(f"a bbox that is not [x, y, width, height]: {box!r}")
        area = annotation.get("area")
        self.boxes.extend(box)
        self.areas.append(box[2] * box[3] if area is None else area)
        self.ids.append(_integer(annotation.get("id", len(self.ids) + 1), "id"))
        self.images.append(_integer(annotation["image_id"], "image_id"))
        self.categories.append(_integer(annotation["category_id"], "category_id"))
        self.crowds.append(1 if annotation.get("iscrowd") else 0)
        self.heads += self._add_polygons(annotation.get("segmentation"))
        self.head_ends.append(len(self.heads))
        self.number_ends.append(len(self.numbers))

    def _add_polygons(self, segmentation: Any) -> bytes:
        if isinstance(segmentation, list) and segmentation:
            try:
                for polygon in segmentation:
                    self.numbers.extend(polygon)
                return bytes([POLYGONS]) + array("i", [len(polygon) for polygon in segmentation]).tobytes()
            except TypeError:
                del self.numbers[self.number_ends[-1] :]
        return _pack_rle(segmentation)


def _integer(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"{name} {value!r} where COCO has a whole number")
    return int(value)


def _pack_rle(segmentation: Any) -> bytes:
    """RLE as its kind, its size and its counts; whatever is neither polygons nor RLE as JSON, for the checks."""
    if isinstance(segmentation, dict):
        size, counts = segmentation.get("size"), segmentation.get("counts")
        if isinstance(size, list) and len(size) == 2 and all(_is_count(number) for number in size):
            shape = array("i", size).tobytes()
            if isinstance(counts, str) and counts.isascii():
                return bytes([COMPRESSED_RLE]) + shape + counts.encode()
            if isinstance(counts, list) and all(_is_count(number) for number in counts):
                return bytes([RLE]) + shape + array("i", counts).tobytes()
    return bytes([OTHER]) + json.dumps(segmentation).encode()


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and 0 <= number < 2**31


def _unpack_segmentation(head: bytes, numbers: NDArray[Any]) -> Any:
    kind, body = head[0], head[1:]
    if kind == OTHER:
        return json.loads(body)
    if kind == POLYGONS:
        if numbers.dtype == np.float32:
            numbers = np.round(numbers.astype(np.float64), 2)
        ends = np.cumsum(np.frombuffer(body, np.int32))
        return [polygon.tolist() for polygon in np.split(numbers, ends[:-1])]
    size = np.frombuffer(body, np.int32, 2).tolist()
    return {
        "size": size,
        "counts": body[8:].decode() if kind == COMPRESSED_RLE else np.frombuffer(body[8:], np.int32).tolist(),
    }


def _shrink(numbers: array[float]) -> NDArray[Any]:
    """Coordinates as float32 where rounding to two decimals (COCO's own have two) gives each back exactly."""
    exact = _as_array(numbers, np.float64)
    small = exact.astype(np.float32)
    chunk = 1 << 20
    parts = range(0, len(exact), chunk)
    fits = all(
        np.array_equal(np.round(small[i : i + chunk].astype(np.float64), 2), exact[i : i + chunk]) for i in parts
    )
    return small if fits else exact


def _check_categories(categories: list[dict[str, Any]], path: Path) -> tuple[dict[str, Any], ...]:
    try:
        pairs = [(_integer(category["id"], "id"), str(category["name"])) for category in categories]
    except (KeyError, TypeError, ValueError):
        raise ColabUtilsError(
            f"expected an id and a name for each category in {path}, found one without. Export the dataset again."
        ) from None
    return tuple({"id": number, "name": name} for number, name in sorted(dict(pairs).items()))


def _group(
    images: _Images, rows: _Annotations, categories: tuple[dict[str, Any], ...], fingerprint: str, path: Path
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
        heads=_gather_blob(bytes(rows.heads), _as_array(rows.head_ends, np.int64), by_image),
        numbers=_gather_blob(_shrink(rows.numbers), _as_array(rows.number_ends, np.int64), by_image),
        unknown_images=ids[~known_image],
        unknown_categories=ids[known_image & ~known_category],
    )


def _as_array(values: array[Any], dtype: Any) -> NDArray[Any]:
    return np.frombuffer(values, dtype) if len(values) else np.zeros(0, dtype)


def _cut_blob(blob: tuple[Any, NDArray[np.int64]], start: int, stop: int) -> tuple[Any, NDArray[np.int64]]:
    data, offsets = blob
    return data[offsets[start] : offsets[stop]], offsets[start : stop + 1] - offsets[start]


def _gather_blob(data: Any, ends: NDArray[np.int64], rows: NDArray[np.int64]) -> tuple[Any, NDArray[np.int64]]:
    """The given rows' parts of ``data`` (bytes, or an array) one after another, and the offsets into them."""
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(ends[rows + 1] - ends[rows], out=offsets[1:])
    view = memoryview(data)
    gathered = b"".join(
        [view[start:end] for start, end in zip(ends[rows].tolist(), ends[rows + 1].tolist(), strict=True)]
    )
    return (gathered if isinstance(data, bytes) else np.frombuffer(gathered, data.dtype)), offsets
