"""Any COCO instance JSON, read entry by entry: its numbers in flat arrays, its annotations as their
JSON text.

No Python object is kept for an annotation, so COCO train2017 (118,000 images, 860,000 objects, 0.45
GB of JSON) needs little more memory than its text, and worker processes share it.
"""

import json
import os
import re
import warnings
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path, PureWindowsPath
from typing import Any
from unicodedata import normalize
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.decoding import name_kind
from colab_utils.data.masks import encode_segmentation, measure_mask
from colab_utils.drive import guard_drive
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning, escape
from colab_utils.files import read_file, write_file
from colab_utils.machine import find_free_memory
from colab_utils.require import require_local_path

_SECTIONS = ("images", "annotations", "categories")
_MARK = re.compile(r"[ \t\n\r]*([][{},:])[ \t\n\r]*")
_MEMORY_OF_JSON = 3  # times its bytes: they, their text, and what is kept
_TOO_LARGE = 2**63  # for an integer of numpy
_LONGEST_NAME = 4096  # characters of a file_name: no path of Linux is longer
_UNREADABLE = -(2**63)  # stands for an id of an annotation that is no number; no id has it
_NAME_INSTANCES = (
    "Name the instances file (such as instances_train2017.json), or export the "
    "dataset as COCO instances."
)
FAULTS = (TypeError, ValueError, OverflowError, RecursionError)
"""What reading an entry raises."""
LARGEST_NUMBER = 1e15
"""The numbers of a box and an area are less."""


@dataclass(frozen=True, eq=False)
class CocoDataset:
    """A COCO dataset's annotations, grouped by image; make one with :func:`read_coco`.

    I images, A annotations. Annotations whose image is unknown are not among the A; their ids are
    in ``unknown_images``. Of images with the same id, the first has the annotations.
    """

    fingerprint: str
    """XXH3-128 of the JSON file, in hexadecimal."""
    categories: tuple[dict[str, Any], ...]
    """Each category's ``id`` and ``name``, in order of id."""
    image_ids: NDArray[np.int64]
    """int64 [I], in the file's order."""
    sizes: NDArray[np.int32]
    """int32 [I, 2]: height and width in pixels; 0 where the file gives none."""
    names: bytes
    """All ``file_name`` one after another, UTF-8."""
    name_ends: NDArray[np.int64]
    """int64 [I + 1]: where each starts in ``names``, and where the last one ends."""
    first: NDArray[np.int64]
    """int64 [I + 1]: image i has the annotations ``first[i]`` to ``first[i + 1]``."""
    ids: NDArray[np.int64]
    """int64 [A]: annotation ids; an id that is missing or text is the annotation's row in the file,
    from 1.
    """
    is_crowd: NDArray[np.bool_]
    """bool [A]: whether an annotation is a crowd, which is left out of training."""
    texts: bytes
    """The JSON of each image's annotations, parted by commas, UTF-8; one image after another."""
    text_ends: NDArray[np.int64]
    """int64 [I + 1]: where each image's starts in ``texts``, and where the last one ends."""
    shared_names: frozenset[str]
    """Base names that several images have, in folders of their own: no image is found by one of
    them alone.
    """
    repeated_ids: NDArray[np.int64]
    """Ids that several images have, once for each image but the first."""
    unknown_images: NDArray[np.int64]
    unknown_categories: NDArray[np.int64]
    """Ids of those among the A whose category is unknown."""

    def __len__(self) -> int:
        return len(self.image_ids)

    def __str__(self) -> str:
        return (
            f"{len(self):,} images, {len(self.ids):,} annotations, {len(self.categories)} "
            "categories"
        )

    def file_name(self, index: int) -> str:
        """The image's path below the image folder, as the JSON gives it; :meth:`find_image` opens
        no file outside.
        """
        return self.names[self.name_ends[index] : self.name_ends[index + 1]].decode()

    def image(self, index: int) -> dict[str, Any]:
        """The image's ``id``, ``file_name``, ``width`` and ``height``."""
        height, width = self.sizes[index].tolist()
        number = int(self.image_ids[index])
        return {"id": number, "file_name": self.file_name(index), "width": width, "height": height}

    def find_image(self, folder: str | Path, index: int) -> tuple[Path, bool]:
        """The image's file, always below ``folder``, and whether its base name alone found it.

        The file is that of the ``file_name``, where composed and decomposed accents count as equal.
        A name with backslashes, of another machine, or of a folder that is not there, as tools
        write them, means the one file below ``folder`` with this base name; links are not followed
        to it. A missing file is given as it is named.

        Raises:
            ColabUtilsError: the name leads out of the folder and no file there has its base name,
                or several have it; or a link in its place leads out.
            DriveLostError: Drive went away.
        """
        name = self.file_name(index)
        slashed = name.replace("\\", "/")
        base = take_base_name(name)
        path = None if _leads_out(name) else _resolve(folder, name)
        if path:
            if (name.isascii() and "/" not in slashed) or os.path.exists(path):
                return path, False
            for form in ("NFC", "NFD"):
                if os.path.exists(alike := _resolve(folder, normalize(form, slashed))):
                    return alike, False
            if slashed == name and os.path.isdir(path.parent):
                return path, False
        found = None if base in self.shared_names else _list_base_names(str(folder)).get(base, "")
        if found:
            return Path(folder, found), True
        if path:
            return path, False
        found = (
            f"{name!r:.80}, which leads out of it, and "
            f"{'no' if found == '' else 'more than one image or'} file"
        )
        raise ColabUtilsError(
            f"expected a file_name below {folder}, found {found} of that name. Put the images "
            "there."
        )

    @property
    def crowds(self) -> int:
        """How many annotations are crowds."""
        return int(self.is_crowd.sum())

    def annotations(self, index: int) -> list[dict[str, Any]]:
        """The image's annotations in COCO form, made when you ask; the segmentation is as in the
        file.

        Raises:
            ColabUtilsError: one of them is faulty, such as one whose box is no numbers.
        """
        sound, faults = self.read_annotations(index)
        if faults:
            number, reason = faults[0]
            raise ColabUtilsError(f"annotation {number}: {reason}")
        return sound

    def read_annotations(self, index: int) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
        """The image's sound annotations as :meth:`annotations` gives them; id and fault of each of
        the others.
        """
        sound = list[dict[str, Any]]()
        faults = list[tuple[int, str]]()
        size = self.sizes[index].tolist()
        known = {category["id"] for category in self.categories}
        numbers = self.ids[self.first[index] : self.first[index + 1]].tolist()
        try:
            entries = self.read_entries(index)
        except RecursionError:
            return [], [(numbers[0], "lists that are nested too deeply")]
        for number, entry in zip(numbers, entries, strict=True):
            try:
                annotation = {"id": number, **_read_annotation(entry, *size)}
                if annotation["category_id"] not in known:
                    raise ValueError(f"category_id {annotation['category_id']} of no category")
                sound.append(annotation)
            except (*FAULTS, ColabUtilsError) as error:
                faults.append((number, str(error)))
        return sound, faults

    def read_entries(self, index: int) -> list[Any]:
        """The image's annotations as they are in the file."""
        return list(json.loads(b"[%b]" % self.take_text(index)))

    def take_text(self, index: int) -> bytes:
        """The JSON of the image's annotations, parted by commas."""
        return self.texts[self.text_ends[index] : self.text_ends[index + 1]]

    def subset(self, start: int, stop: int) -> "CocoDataset":
        """Images ``start`` to ``stop`` alone, in arrays of their own (small to send to another
        process).
        """
        a = int(self.first[start])
        b = int(self.first[stop])
        return replace(
            self,
            image_ids=self.image_ids[start:stop],
            sizes=self.sizes[start:stop],
            names=self.names[self.name_ends[start] : self.name_ends[stop]],
            name_ends=self.name_ends[start : stop + 1] - self.name_ends[start],
            first=self.first[start : stop + 1] - a,
            ids=self.ids[a:b],
            is_crowd=self.is_crowd[a:b],
            texts=self.texts[self.text_ends[start] : self.text_ends[stop]],
            text_ends=self.text_ends[start : stop + 1] - self.text_ends[start],
            shared_names=self.shared_names.intersection(
                take_base_name(self.file_name(i)) for i in range(start, stop)
            ),
        )


def read_coco(annotations: str | Path) -> CocoDataset:
    """Read a COCO instance JSON: polygons, uncompressed and compressed RLE, crowds, sparse category
    ids.

    What tools write beside the format is understood: numbers as text, ids of annotations that are
    no numbers, LVIS's ``coco_url`` for a ``file_name``, and boxes and areas that are missing, which
    come from the mask as in pycocotools. A faulty annotation refuses its image alone, and only when
    you ask for it: see `CocoDataset.read_annotations`.

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
        [[0, 0, 4, 0, 4, 4]]
    """
    path = require_local_path(annotations)
    columns = _Columns()
    fingerprint, text = _read_text(path)
    _read_entries(text, path, columns)
    del text
    if columns.rows and not columns.has_shapes:
        found = (
            f"{len(columns.rows) // 5:,} annotations without bbox and segmentation (captions, "
            "or panoptic?)"
        )
        raise _expect(path, found, _NAME_INSTANCES)
    return _group(columns, fingerprint)


def read_bytes(path: Path) -> bytes:
    """The content of an annotations file.

    Raises:
        ColabUtilsError: if there is no such file, or it cannot be read.
    """
    try:
        return read_file(path, most_bytes=find_free_memory() / _MEMORY_OF_JSON)
    except OSError as error:
        found = f"found: {error.strerror}. Check the name; on Colab, mount Drive first"
        raise ColabUtilsError(f"expected an annotations file at {path}, {found}.") from None


def _read_text(path: Path) -> tuple[str, str]:
    """Fingerprint and text of a JSON file in UTF-8, UTF-16 or UTF-32, with or without a byte order
    mark.
    """
    import xxhash

    data = read_bytes(path)
    if kind := name_kind(data):
        raise _expect(path, kind, "Then name the JSON.")
    try:
        return xxhash.xxh3_128_hexdigest(data), data.decode(json.detect_encoding(data))
    except UnicodeDecodeError:
        raise _expect(
            path, "bytes that are not UTF-8 text, perhaps Latin-1", "Save the JSON as UTF-8."
        ) from None


def _resolve(folder: str | Path, file_name: str) -> Path:
    """The file of a COCO ``file_name`` as it is named, where no link leads out of the folder."""
    path = Path(folder) / file_name
    if not (real := Path(os.path.realpath(path))).is_relative_to(os.path.realpath(folder)):
        found = f"the link {path} to {real}, which is not opened"
        raise ColabUtilsError(
            f"expected an image below {folder}, found {found}. Copy the image itself there."
        )
    return path


def require_folder(images: str | Path) -> None:
    """Raise ColabUtilsError where there is no image folder; one that is there will be listed
    afresh.
    """
    with guard_drive(images):
        if not require_local_path(images).is_dir():
            raise ColabUtilsError(
                f"expected an image folder, found none at {images}. On Colab, mount Drive first."
            )
    _list_base_names.cache_clear()


def open_coco(images: str | Path, annotations: str | Path) -> CocoDataset:
    """As `read_coco`, for those who read the images: each annotation must be of one image and one
    category.

    Raises:
        ColabUtilsError: as `read_coco`; or there is no image folder, images have the same id, or
            annotations are of unknown images or categories.
        DriveLostError: Drive went away.
    """
    require_folder(images)
    dataset = read_coco(annotations)
    strangers = {
        "with the id of another": dataset.repeated_ids,
        "of an unknown image": dataset.unknown_images,
    }
    strangers["of an unknown category"] = dataset.unknown_categories
    for kind, ids in strangers.items():
        if ids.size:
            found = (
                f"found {ids.size} {kind}, such as id {ids[0]}. See `check`, which repairs "
                "them (--repair OUT.json)"
            )
            raise ColabUtilsError(
                f"expected annotations of images with ids of their own in {annotations}, {found}."
            )
    # of no images, or told where they are read; the first stands for all
    with suppress(ColabUtilsError, IndexError):
        path, by_base_name = dataset.find_image(images, 0)
        if by_base_name:
            found = (
                f"images do not lie where the annotations say: found {dataset.file_name(0)!r} "
                f"at {path}"
            )
            warnings.warn(found, ColabUtilsWarning, stacklevel=3)
    return dataset


def _leads_out(name: str) -> bool:
    """Whether a name is none of a file below a folder: absolute, a URL, of a drive of Windows, or
    with ``..``.
    """
    named = PureWindowsPath(name)  # knows both kinds of slash, and drives
    return (
        not named.parts
        or bool(named.anchor)
        or ".." in named.parts
        or "\0" in name
        or "://" in name
    )


def take_base_name(name: str) -> str:
    r"""A name's last part, whatever the machine it comes from, with composed accents.

    Example:
        >>> take_base_name("C:\\data\\a.jpg"), take_base_name("https://example.org/my%20photo.jpg?v=1")
        ('a.jpg', 'my photo.jpg')
    """
    if "://" in name:
        name = unquote(name.partition("?")[0])
    return normalize("NFC", name.replace("\\", "/").rpartition("/")[2])


@lru_cache(4)
def _list_base_names(folder: str) -> dict[str, str | None]:
    """Where the file of each base name lies below a folder; None where several have it. No link is
    followed.

    Raises:
        ColabUtilsError: the folder cannot be listed.
    """
    found = dict[str, str | None]()
    folders = [folder]
    try:
        with guard_drive(folder):
            for one in folders:
                for entry in os.scandir(one):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        base = normalize("NFC", entry.name)
                        found[base] = None if base in found else os.path.relpath(entry.path, folder)
    except OSError as error:
        raise ColabUtilsError(
            f"expected to list the images in {folder}, found: {error}. Check the folder."
        ) from None
    return found


def write_subset(dataset: CocoDataset, indices: Iterable[int], path: Path) -> Path:
    """Write the records of some images, in this order, as a COCO JSON of their own; returns
    ``path``.
    """
    chosen = list(indices)
    texts = map(dataset.take_text, chosen)  # as they are, faults and all
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_coco(path, [dataset.image(index) for index in chosen], texts, dataset.categories)


def write_coco(
    path: Path, images: Sequence[Any], annotations: Iterable[bytes], categories: Sequence[Any]
) -> Path:
    """Write a COCO JSON, whose annotations are JSON already, one or more in each text; returns
    ``path``.
    """
    parts = (
        json.dumps(images).encode(),
        b", ".join(filter(None, annotations)),
        json.dumps(categories).encode(),
    )
    write_file(path, b'{"images": %b, "annotations": [%b], "categories": %b}' % parts)
    return path


def _read_entries(text: str, path: Path, columns: "_Columns") -> None:
    """Add each entry of the three lists of a COCO JSON."""
    decode = json.JSONDecoder().raw_decode
    found = set[str]()

    def take(position: int, expected: str) -> tuple[str, int]:
        """One of the expected marks at this position, and the position after it and the space
        around it.
        """
        match = _MARK.match(text, position)
        if match is None or match[1] not in expected:
            raise json.JSONDecodeError(f"expected {expected}", "", position)
        return match[1], match.end()

    def read_items(position: int, brackets: str, read: Callable[[int], int]) -> int:
        """Read what is between two brackets, each by a function that returns where it ends."""
        mark, position = take(position, brackets[0])
        if text[position] == brackets[1]:
            return take(position, brackets[1])[1]
        while mark != brackets[1]:
            mark, position = take(read(position), f",{brackets[1]}")
        return position

    def read_entry(section: str, position: int) -> int:
        entry, end = decode(text, position)
        try:
            columns.add(section, entry, text[position:end])
        except FAULTS as error:
            name = entry.get("id") if isinstance(entry, dict) else entry
            known = repr(name) if isinstance(name, int | float | str) else "?"
            wrong = f"an entry of '{section}' (id {known:.40}) with {error}"
            raise _expect(path, wrong, "Export the dataset again as COCO instances.") from None
        return end

    def read_section(position: int) -> int:
        if text[position] != '"':
            raise json.JSONDecodeError("expected a name", "", position)
        key, position = decode(text, position)
        _, position = take(position, ":")
        if key in found:  # other readers of JSON take the last one alone
            raise _expect(path, f"{key} twice", "Make it one list.")
        if key not in _SECTIONS:
            return decode(text, position)[1]
        if text[position] != "[":
            raise _expect(path, f"no list of {key}", _NAME_INSTANCES)
        found.add(key)
        return read_items(position, "[]", partial(read_entry, key))

    if text.lstrip()[:1] == "[":
        raise _expect(
            path,
            "a list",
            "Name the instances file: a list holds results, or one part of a dataset.",
        )
    try:
        if read_items(0, "{}", read_section) != len(text):
            raise json.JSONDecodeError("expected nothing more", "", 0)
    except RecursionError:
        raise _expect(path, "JSON that is nested too deeply", "Export or copy it again.") from None
    except (ValueError, IndexError) as error:
        where = error.pos if isinstance(error, json.JSONDecodeError) else len(text)
        wrong = f"text that is not JSON at character {where:,} of {len(text):,}"
        raise _expect(
            path, wrong, "It may be cut short or something else: export or copy it again."
        ) from None
    if missing := [key for key in _SECTIONS if key not in found]:
        raise _expect(path, f"no list of {' and '.join(missing)}", _NAME_INSTANCES)


def _expect(path: Path, found: str, cure: str) -> ColabUtilsError:
    return ColabUtilsError(f"expected COCO instance JSON in {path}, found {found}. {cure}")


class _Columns:
    """What entries hold, added one by one; one of `FAULTS` says what is wrong."""

    def __init__(self) -> None:
        self.images = array("q")
        self.names = bytearray()
        """Of each image: id, height, width, where its name ends."""
        self.rows = array("q")
        self.texts = bytearray()
        """Of each annotation: id, ids of image and category, whether it is a crowd, where its text
        ends.
        """
        self.category_names = dict[int, str]()
        self.has_shapes = False
        self.bases = dict[str, str]()
        self.shared_names = set[str]()

    def add(self, section: str, entry: Any, text: str) -> None:
        if section == "annotations":
            self._add_annotation(entry if isinstance(entry, dict) else {}, text)
        elif not isinstance(entry, dict):
            raise TypeError(f"{type(entry).__name__} where COCO has an object")
        elif section == "images":
            self._add_image(entry)
        else:
            self._add_category(_to_integer(entry.get("id"), "id"), entry.get("name"))

    def _add_category(self, number: int, named: Any) -> None:
        if named is None:
            raise ValueError("no 'name'")
        name = escape(str(named))
        if self.category_names.setdefault(number, name) != name:
            raise ValueError(f"another name, {name!r}, than {self.category_names[number]!r}")

    def _add_image(self, image: dict[str, Any]) -> None:
        url = image.get("coco_url")
        name = image.get("file_name")
        if not name and isinstance(url, str):
            name = take_base_name(url)
        if name is None:
            raise ValueError("no 'file_name'")
        if not isinstance(name, str) or len(name) > _LONGEST_NAME:
            raise TypeError(
                f"a file_name that is not text, or longer than a path may be: {name!r:.60}"
            )
        sizes = [
            _to_integer(image.get(side) or 0, side, most=2**31) for side in ("height", "width")
        ]
        number = _to_integer(image.get("id"), "id")
        if self.bases.setdefault(base := take_base_name(name), name) != name:
            self.shared_names.add(base)
        self.names += name.encode()
        self.images.extend((number, *sizes, len(self.names)))

    def _add_annotation(self, entry: dict[str, Any], text: str) -> None:
        """Only the ids and iscrowd are read here: a fault refuses the annotation's image, not the
        file.

        An id that is no number, such as a UUID, is the annotation's row.
        """
        ids = {"id": len(self.rows) // 5 + 1, "image_id": _UNREADABLE, "category_id": _UNREADABLE}
        for name in ids:
            with suppress(*FAULTS):
                ids[name] = _to_integer(entry.get(name), name)
        self.texts += text.encode()
        # true is 1
        self.rows.extend((*ids.values(), entry.get("iscrowd") in (1, "1"), len(self.texts)))
        self.has_shapes = self.has_shapes or "bbox" in entry or "segmentation" in entry


def read_field(entry: dict[str, Any], name: str) -> Any:
    """One value of an annotation as COCO has it: numbers for their text, None for an id, box or
    area that is missing.

    Raises:
        ValueError: COCO has something else; TypeError, OverflowError and RecursionError mean the
            same.

    Example:
        >>> read_field({"bbox": ["0", 1, 2.5, "3"]}, "bbox"), read_field({}, "iscrowd")
        ([0.0, 1.0, 2.5, 3.0], 0)
    """
    value = entry.get(name)
    if name == "iscrowd":
        if value not in (None, 0, 1, "0", "1"):
            raise ValueError(f"iscrowd {value!r:.40} where COCO has 0 or 1")
        return int(value or 0)
    if name == "segmentation" or (value is None and name in ("id", "bbox", "area")):
        return value
    if name == "bbox":
        box = [
            float(_to_number(x, name, most=LARGEST_NUMBER))
            for x in (value if isinstance(value, list) else [value])
        ]
        if len(box) in (0, 4):
            return box or None
        raise ValueError(f"bbox {box!r:.60} where COCO has [x, y, width, height]")
    if name == "area":
        return float(_to_number(value, name, most=LARGEST_NUMBER))
    return value if name == "id" and isinstance(value, str) else _to_integer(value, name)  # a UUID


def _read_annotation(entry: dict[str, Any], height: int, width: int) -> dict[str, Any]:
    """An entry of ``annotations`` without its id. Box and area that it lacks are of its mask, one
    of its image's masks; the area is that of the box where there is no mask.
    """
    read_field(entry, "id")
    names = ("image_id", "category_id", "bbox", "area", "iscrowd", "segmentation")
    one = {name: read_field(entry, name) for name in names}
    box = one["bbox"]
    area = one["area"]
    if box and area is not None:
        return one
    try:
        tight, pixels = measure_mask(encode_segmentation(one["segmentation"], height, width))
    except ColabUtilsError as error:
        if not box:
            raise ColabUtilsError(f"no bbox, and no mask to derive it from: {error}") from None
        tight = box
        pixels = box[2] * box[3]
    return one | {"bbox": box or tight, "area": float(pixels) if area is None else area}


def _to_number(
    value: Any, name: str, kind: str = "finite numbers", most: float = _TOO_LARGE
) -> float:
    """A number, which may be text, as Roboflow and VIA write some."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = int(value) if value.strip().isdecimal() else float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < most:
        raise ValueError(f"{name} {value!r:.40} where COCO has {kind}")
    return value


def _to_integer(value: Any, name: str, *, most: int = _TOO_LARGE) -> int:
    if type(value) is int and abs(value) < most:  # as nearly all are
        return value
    number = _to_number(value, name, "an integer")
    if number != int(number) or abs(number) >= most:
        raise ValueError(f"{name} {value!r:.40} where COCO has an integer")
    return int(number)


def _group(columns: _Columns, fingerprint: str) -> CocoDataset:
    """Sort the annotations by image, set aside those of unknown images, and note those of unknown
    categories.
    """
    image_ids, *sizes, name_ends = np.array(columns.images, np.int64).reshape(-1, 4).T.copy()
    ids, owners, categories, crowds, text_ends = (
        np.array(columns.rows, np.int64).reshape(-1, 5).T.copy()
    )
    unique, places = np.unique(image_ids, return_index=True)
    known_image = np.isin(owners, unique)
    # a category that cannot be read is a fault of its annotation alone
    known_category = np.isin(categories, [*columns.category_names, _UNREADABLE])
    kept = np.flatnonzero(known_image)
    image_of = places[np.searchsorted(unique, owners[kept])]
    kept = kept[np.argsort(image_of, kind="stable")]
    starts = np.append(0, text_ends)
    view = memoryview(columns.texts)
    first = np.concatenate([[0], np.cumsum(np.bincount(image_of, minlength=len(image_ids)))])
    rows = (kept[start:end] for start, end in pairwise(first.tolist()))
    texts = [b", ".join(view[starts[row] : text_ends[row]] for row in mine) for mine in rows]
    return CocoDataset(
        fingerprint=fingerprint,
        categories=tuple(
            {"id": number, "name": name} for number, name in sorted(columns.category_names.items())
        ),
        shared_names=frozenset(columns.shared_names),
        image_ids=image_ids,
        sizes=np.stack(sizes, axis=1).astype(np.int32),
        names=bytes(columns.names),
        name_ends=np.append(0, name_ends),
        first=first,
        ids=ids[kept],
        is_crowd=crowds[kept].astype(np.bool_),
        texts=b"".join(texts),
        text_ends=np.cumsum([0, *map(len, texts)]),
        repeated_ids=np.delete(image_ids, places),
        unknown_images=ids[~known_image],
        unknown_categories=ids[known_image & ~known_category],
    )
