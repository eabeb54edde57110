"""Any COCO instance JSON, read into flat arrays: no Python object per annotation is kept.

The file is parsed one image and one annotation at a time, so COCO train2017 (118,000 images, 860,000
objects, 0.45 GB of JSON) needs little more memory than its text.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.drive import guard_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import write_file

__all__ = [
    "SECTIONS",
    "AnnotationColumns",
    "CocoDataset",
    "ImageColumns",
    "SegmentationsBuilder",
    "decode_text",
    "is_safe_name",
    "is_sound_box",
    "iterate_coco",
    "order_categories",
    "read_bytes",
    "read_coco",
    "unpack_segmentation",
    "write_subset",
]

SECTIONS = ("images", "annotations", "categories")


_SPACE = re.compile(r"[ \t\n\r]*")


def read_bytes(path: Path) -> bytes:
    """The content of an annotations file.

    Raises:
        ColabUtilsError: if there is no such file, or it cannot be read.
    """
    try:
        with guard_drive(path):
            return path.read_bytes()
    except FileNotFoundError:
        raise ColabUtilsError(
            f"expected an annotations file, found nothing at {path}. Check the name; on Colab, mount Drive first."
        ) from None
    except IsADirectoryError:
        raise ColabUtilsError(f"expected an annotations file, found a folder: {path}. Name the JSON in it.") from None
    except OSError as error:
        raise ColabUtilsError(
            f"expected to read {path}, found: {error.strerror}. Check the name and your permission to read it."
        ) from None


def decode_text(data: bytes, path: Path) -> str:
    """Text of a JSON file in UTF-8, UTF-16 or UTF-32, with or without a byte order mark.

    Raises:
        ColabUtilsError: if the bytes are not text.

    Example:
        >>> decode_text("{}".encode("utf-16"), Path("a.json"))
        '{}'
    """
    try:
        return data.decode(json.detect_encoding(data))
    except UnicodeDecodeError:
        raise ColabUtilsError(
            f"expected COCO instance JSON in {path}, found bytes that are not text. Is it a zip? Unpack it first."
        ) from None


def iterate_coco(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield ("images" | "annotations" | "categories", entry) one at a time from the text of a COCO JSON.

    Raises:
        ColabUtilsError: if the text is not JSON, or lacks one of the three lists.

    Example:
        >>> list(iterate_coco('{"annotations": [5], "images": [], "categories": []}', Path("a.json")))
        [('annotations', 5)]
    """
    decode = json.JSONDecoder().raw_decode
    found: set[str] = set()
    try:
        if text.lstrip()[:1] == "[":
            raise _expect(path, "a list", "Name the instances file: a list holds results, or one part of a dataset.")
        position = _skip(text, 0, "{")
        while text[position] != "}":
            if text[position] != '"':
                raise json.JSONDecodeError("expected a name", "", position)
            key, position = decode(text, position)
            position = _skip(text, position, ":")
            if key not in SECTIONS or text[position] != "[":
                _, position = decode(text, position)
            else:
                found.add(key)
                position = _skip(text, position, "[")
                while text[position] != "]":
                    entry, position = decode(text, position)
                    yield key, entry
                    position = _next_entry(text, position, "]")
                position = _skip(text, position, "]")
            position = _next_entry(text, position, "}")
        if _skip(text, position, "}") != len(text):
            raise json.JSONDecodeError("expected nothing more", "", position)
    except (ValueError, IndexError, RecursionError) as error:
        where = error.pos if isinstance(error, json.JSONDecodeError) else len(text)
        raise _expect(
            path,
            f"text that is not JSON at character {where:,} of {len(text):,}",
            "The file may be cut short or be something else: export or copy it again.",
        ) from None
    missing = [key for key in SECTIONS if key not in found]
    if missing:
        raise _expect(
            path,
            f"no list of {' and '.join(missing)}",
            "Name the instances file (such as instances_train2017.json), or export the dataset as COCO instances.",
        )


def _expect(path: Path, found: str, cure: str) -> ColabUtilsError:
    return ColabUtilsError(f"expected COCO instance JSON in {path}, found {found}. {cure}")


def _skip(text: str, position: int, expected: str) -> int:
    """The position of the next token after ``expected``, with the space around it passed over."""
    position = _SPACE.match(text, position).end()  # type: ignore[union-attr]
    if text[position] != expected:
        raise json.JSONDecodeError(f"expected {expected}", "", position)
    return _SPACE.match(text, position + 1).end()  # type: ignore[union-attr]


def _next_entry(text: str, position: int, end: str) -> int:
    position = _SPACE.match(text, position).end()  # type: ignore[union-attr]
    if text[position] == end:
        return position
    position = _skip(text, position, ",")
    if text[position] == end:
        raise json.JSONDecodeError("expected no comma here", "", position)
    return position


class ImageColumns:
    """Ids, sizes and names of images, added one by one."""

    def __init__(self) -> None:
        self.ids, self.sizes, self.names, self.ends = array("q"), array("i"), bytearray(), array("q", [0])

    def add(self, image: dict[str, Any]) -> None:
        """Add an entry of ``images``; KeyError, TypeError, ValueError or OverflowError say what is wrong with it."""
        name = image["file_name"]
        if not isinstance(name, str):
            raise TypeError(f"a file_name that is not text: {name!r}")
        self.ids.append(_integer(image["id"], "id"))
        self.sizes.extend((_integer(image.get("height") or 0, "height"), _integer(image.get("width") or 0, "width")))
        self.names += name.encode()
        self.ends.append(len(self.names))


class AnnotationColumns:
    """Everything that annotations hold, added one by one."""

    def __init__(self) -> None:
        self.ids, self.images, self.categories = array("q"), array("q"), array("q")
        self.boxes, self.areas, self.crowds = array("d"), array("d"), array("b")
        self.segmentations = SegmentationsBuilder()

    def add(self, annotation: dict[str, Any]) -> None:
        """Add an entry of ``annotations``; raises as for images."""
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
        self.segmentations.add(annotation.get("segmentation"))


def _integer(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"{name} {value!r} where COCO has a whole number")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} {value!r} that is too large")
    return int(value)


def order_categories(categories: list[Any], path: Path) -> tuple[dict[str, Any], ...]:
    """Each category's ``id`` and ``name``, in order of id.

    Raises:
        ColabUtilsError: if one lacks either, or two share an id.
    """
    names: dict[int, str] = {}
    for category in categories:
        try:
            number, name = _integer(category["id"], "id"), str(category["name"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ColabUtilsError(
                f"expected an id and a name for each category in {path}, found {category!r:.60}. "
                "Export the dataset again."
            ) from None
        if names.setdefault(number, name) != name:
            raise ColabUtilsError(
                f"expected each category id once in {path}, found {number} twice ({names[number]!r} and {name!r}). "
                "Give each category an id of its own."
            )
    return tuple({"id": number, "name": names[number]} for number in sorted(names))


# the first byte says what follows; 10 + d: polygons of d decimals
OTHER, RLE, COMPRESSED_RLE, EXACT_POLYGONS, POLYGONS = 0, 1, 2, 3, 10


DECIMALS = (2, 4, 6)


CHUNK_NUMBERS = 1 << 15


_KIND_BYTES = [bytes([kind]) for kind in range(POLYGONS + max(DECIMALS) + 1)]


class SegmentationsBuilder:
    """Collect segmentations one by one; whatever is neither polygons nor RLE is kept as JSON, for the checks.

    Example:
        >>> builder = SegmentationsBuilder()
        >>> builder.add([[0, 0, 4.25, 0, 4, 4]])
        >>> builder.add({"size": [6, 8], "counts": [40, 8]})
        >>> blob, ends = builder.build()
        >>> [unpack_segmentation(blob[a:b]) for a, b in zip(ends[:-1], ends[1:])]
        [[[0.0, 0.0, 4.25, 0.0, 4.0, 4.0]], {'size': [6, 8], 'counts': [40, 8]}]
    """

    def __init__(self) -> None:
        self._blob = bytearray()
        self._ends = array("q", [0])
        self._start_chunk()

    def add(self, segmentation: Any) -> None:
        """Add one segmentation as it stands in the JSON."""
        kind, head = self._add_polygons(segmentation) or _pack_other(segmentation)
        self._kinds.append(kind)
        self._heads.append(head)
        self._number_ends.append(len(self._numbers))
        if len(self._numbers) > CHUNK_NUMBERS:
            self._finish_chunk()

    def build(self) -> tuple[bytearray, NDArray[np.int64]]:
        """All segmentations one after another, and int64 [A + 1] offsets into them."""
        self._finish_chunk()
        return self._blob, np.frombuffer(self._ends, np.int64)

    def _start_chunk(self) -> None:
        self._kinds, self._heads = bytearray(), list[bytes]()
        self._numbers, self._number_ends = array("d"), array("q", [0])

    def _add_polygons(self, segmentation: Any) -> tuple[int, bytes] | None:
        if not isinstance(segmentation, list) or not segmentation:
            return None
        if not all(isinstance(polygon, list) for polygon in segmentation):
            return None
        try:
            for polygon in segmentation:
                self._numbers.extend(polygon)
            lengths = [len(polygon) for polygon in segmentation]
        except (TypeError, OverflowError):
            del self._numbers[self._number_ends[-1] :]
            return None
        return EXACT_POLYGONS, array("i", [len(lengths), *lengths]).tobytes()

    def _finish_chunk(self) -> None:
        exact = np.frombuffer(self._numbers, np.float64) if self._numbers else np.zeros(0)
        ends = np.frombuffer(self._number_ends, np.int64)
        decimals, fixed = _fix_points(exact, ends)
        kinds = np.frombuffer(bytes(self._kinds), np.uint8)
        kinds = np.where((kinds == EXACT_POLYGONS) & (decimals > 0), POLYGONS + decimals, kinds)
        wide, small = memoryview(exact.tobytes()), memoryview(fixed.tobytes())
        position, start = self._ends[-1], 0
        for kind, head, end in zip(kinds.tolist(), self._heads, ends[1:].tolist(), strict=True):
            body = small[4 * start : 4 * end] if kind >= POLYGONS else wide[8 * start : 8 * end]
            self._blob += _KIND_BYTES[kind]
            self._blob += head
            self._blob += body
            position += 1 + len(head) + len(body)
            self._ends.append(position)
            start = end
        self._start_chunk()


def unpack_segmentation(packed: bytes) -> Any:
    """One segmentation as it stood in the JSON; numbers of polygons as floats."""
    kind = packed[0]
    if kind == OTHER:
        return json.loads(packed[1:])
    if kind in (RLE, COMPRESSED_RLE):
        size = np.frombuffer(packed, np.int32, 2, 1).tolist()
        return {
            "size": size,
            "counts": packed[9:].decode() if kind == COMPRESSED_RLE else np.frombuffer(packed[9:], np.int32).tolist(),
        }
    count = int(np.frombuffer(packed, np.int32, 1, 1)[0])
    body = packed[5 + 4 * count :]
    ends = np.cumsum(np.frombuffer(packed, np.int32, count, 5))
    if kind == EXACT_POLYGONS:
        numbers = np.frombuffer(body, np.float64)
    else:
        numbers = np.frombuffer(body, np.int32) / 10.0 ** (kind - POLYGONS)
    return [polygon.tolist() for polygon in np.split(numbers, ends[:-1])]


def _fix_points(exact: NDArray[np.float64], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """For each row its decimals (0: none gives all its numbers back), and all numbers as int32 of those decimals."""
    decimals = np.zeros(len(ends) - 1, np.int64)
    fixed = np.zeros(len(exact), np.int32)
    for digits in DECIMALS:
        if decimals.all():
            break
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = np.rint(exact * 10.0**digits)
            fits = (np.abs(scaled) < 2**31) & (scaled / 10.0**digits == exact)
        misses = np.concatenate([np.zeros(1, np.int64), np.cumsum(~fits)])
        chosen = (decimals == 0) & (misses[ends[1:]] == misses[ends[:-1]])
        decimals[chosen] = digits
        numbers = np.repeat(chosen, np.diff(ends))
        fixed[numbers] = scaled[numbers].astype(np.int32)
    return decimals, fixed


def _pack_other(segmentation: Any) -> tuple[int, bytes]:
    if isinstance(segmentation, dict):
        size, counts = segmentation.get("size"), segmentation.get("counts")
        if isinstance(size, list) and len(size) == 2 and all(_is_count(number) for number in size):
            shape = array("i", size).tobytes()
            if isinstance(counts, str) and counts.isascii():
                return COMPRESSED_RLE, shape + counts.encode()
            if isinstance(counts, list) and all(_is_count(number) for number in counts):
                return RLE, shape + array("i", counts).tobytes()
    return OTHER, json.dumps(segmentation).encode()


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and 0 <= number < 2**31


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
    """Each segmentation's bytes (see `colab_utils.data.coco`), and int64 [A + 1] offsets into them."""
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


def write_subset(dataset: CocoDataset, indices: Iterable[int], path: Path) -> Path:
    """Write the records of some images, in this order, as a COCO JSON of their own; returns ``path``."""
    chosen = list(indices)
    subset = {
        "images": [dataset.image(index) for index in chosen],
        "annotations": [annotation for index in chosen for annotation in dataset.annotations(index)],
        "categories": list(dataset.categories),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(subset).encode())
    return path
