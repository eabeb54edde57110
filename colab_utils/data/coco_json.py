"""Read a COCO JSON entry by entry into flat arrays."""

import json
import math
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import xxhash

from colab_utils.data.decoding import name_kind
from colab_utils.data.fields import FAULTS, to_integer
from colab_utils.data.image_paths import list_meanings, take_base_name
from colab_utils.data.json_window import JsonWindow, Readable
from colab_utils.data.segmentations import Entry
from colab_utils.errors import ColabUtilsError, escape
from colab_utils.files import FileStream, open_stream
from colab_utils.os_errors import explain_os_error
from colab_utils.places import Place

_SECTIONS = ("images", "annotations", "categories")
# Bytes that are read at once from a file that is only hashed.
_PIECE_BYTES = 1 << 20
# A block of annotations ends when its texts have more bytes than this.
_BLOCK_BYTES = 1 << 24
# Characters of the longest file_name. No path of Linux is longer.
_LONGEST_NAME = 4096
UNREADABLE = -(2**63)
"""Stands for an image or category id that is no number. No real id has this value."""
_NAME_INSTANCES = (
    "Name the instances file (such as instances_train2017.json), or export the "
    "dataset as COCO instances: see docs/FORMATS.md."
)


def read_columns(path: Place, columns: "Columns", *, most_bytes: float = math.inf) -> str:
    """Add the entries of a COCO JSON to ``columns``; return the file's XXH3-128 in hexadecimal.

    Raises:
        ColabUtilsError: if there is no such file, if it is not COCO instance JSON, or if it is
            larger than ``most_bytes``.
        ShortReadError: if fewer bytes were read than the file holds.
    """
    with _open(path, most_bytes) as file:
        return _read_open(file, path, columns)


def read_fingerprint(path: Place) -> str:
    """Return the XXH3-128 of a COCO JSON in hexadecimal, without parsing its entries.

    Raises:
        ColabUtilsError: if there is no such file.
        ShortReadError: if fewer bytes were read than the file holds.
    """
    with _open(path, math.inf) as file:
        digest = xxhash.xxh3_128()
        for piece in iter(partial(file.read, _PIECE_BYTES), b""):
            digest.update(piece)
        return digest.hexdigest()


@contextmanager
def _open(path: Place, most_bytes: float) -> Iterator[FileStream]:
    try:
        with open_stream(path, most_bytes=most_bytes) as file:
            yield file
    except OSError as error:
        cure = "Check its name."
        if isinstance(error, IsADirectoryError):
            cure = "Name the JSON in it. If each image has its own file, see docs/FORMATS.md."
        reason = explain_os_error(error, cure)
        raise ColabUtilsError(f"The annotations {path} cannot be read: {reason}") from None


def _read_open(file: Readable, path: Place, columns: "Columns") -> str:
    """Read the JSON of an open file, as `read_columns` does. Errors name it by ``path``."""
    try:
        window = JsonWindow(file)
        kind = name_kind(window.head)
        if kind:
            raise _expect(path, kind, "Then name the JSON.")
        sections = _read_all(window, path, columns)
    except UnicodeDecodeError:
        raise _expect(
            path, "bytes that are not UTF-8 text, perhaps Latin-1", "Save the JSON as UTF-8."
        ) from None
    missing = [key for key in _SECTIONS if key not in sections]
    if missing:
        raise _expect(path, f"no list of {' and '.join(missing)}", _NAME_INSTANCES)
    if columns.annotations and not columns.has_shapes:
        raise _expect(
            path,
            f"{columns.annotations:,} annotations without bbox and segmentation (captions, "
            "or panoptic?)",
            _NAME_INSTANCES,
        )
    return window.fingerprint


def _expect(path: Place, problem: str, cure: str) -> ColabUtilsError:
    return ColabUtilsError(f"{path} does not hold COCO instances: {problem}. {cure}")


def _read_all(window: JsonWindow, path: Place, columns: "Columns") -> set[str]:
    """Add each entry of the three lists; return the names of those lists that the JSON has."""
    try:
        return _read_sections(window, path, columns)
    except ColabUtilsError:
        # If a later part of the file is not text, this is the real fault, and `read_rest` raises an
        # error for it.
        window.read_rest()
        raise
    except RecursionError:
        raise _expect(path, "JSON that is nested too deeply", "Export or copy it again.") from None
    except UnicodeDecodeError:
        raise
    except (ValueError, IndexError) as error:
        window.read_rest()
        where = error.pos if isinstance(error, json.JSONDecodeError) else window.length
        raise _expect(
            path,
            f"text that is not JSON at character {where:,} of {window.length:,}",
            "The file may be incomplete, or not JSON at all: export or copy it again.",
        ) from None


def _read_sections(window: JsonWindow, path: Place, columns: "Columns") -> set[str]:
    sections = set[str]()
    mark = window.read_mark("{[")
    if mark == "[":
        cure = "Name the instances file: a list holds results, or one part of a dataset."
        raise _expect(path, "it is a list", cure)
    if window.peek() == "}":
        mark = window.read_mark("}")
    while mark != "}":
        if window.peek() != '"':
            raise json.JSONDecodeError("expected a name", "", window.position)
        key, _ = window.read_value()
        window.read_mark(":")
        # If a name occurs twice, other readers of JSON silently keep only its last value.
        if key in sections:
            raise _expect(path, f"it has {key} twice", "Make one list of both.")
        if key in _SECTIONS:
            sections.add(key)
            _read_list(window, key, path, columns)
        elif window.peek() == "[":
            _read_list(window, "", path, columns)
        else:
            window.read_value()
        mark = window.read_mark(",}")
    if not window.is_at_end():
        raise json.JSONDecodeError("expected nothing more", "", 0)
    return sections


def _read_list(window: JsonWindow, section: str, path: Place, columns: "Columns") -> None:
    """Add each entry of the list at which the window stands. Without a section, entries are only
    read.
    """
    if window.peek() != "[":
        raise _expect(path, f"no list of {section}", _NAME_INSTANCES)
    mark = window.read_mark("[")
    if window.peek() == "]":
        mark = window.read_mark("]")
    while mark != "]":
        entry, text = window.read_value()
        if section:
            _add(columns, section, entry, text, path)
        mark = window.read_mark(",]")


def _add(columns: "Columns", section: str, entry: Any, text: str, path: Place) -> None:
    try:
        columns.add(section, entry, text)
    except FAULTS as error:
        name = entry.get("id") if isinstance(entry, dict) else entry
        known = repr(name) if isinstance(name, int | float | str) else "?"
        raise _expect(
            path,
            f"an entry of '{section}' (id {known:.40}) with {error}",
            "Export the dataset again as COCO instances.",
        ) from None


class Columns:
    """Collect the entries of a COCO JSON in flat arrays. A faulty entry raises one of `FAULTS`.

    Args:
        keep: called with the rows and texts of each full block of annotations, so that memory holds
            only one block. By default, all annotations stay in these arrays.
    """

    def __init__(self, keep: "Callable[[array[int], bytearray], None] | None" = None) -> None:
        self._keep = keep
        self.images = array("q")
        """Four numbers for each image: id, height, width, and where its name ends in `names`."""
        self.names = bytearray()
        self.base_hashes = array("q")
        """Hashes of the base names of all files that the images' names may mean."""
        self.rows = array("q")
        self.texts = bytearray()
        """JSON text of the annotations in this block. `rows` has five numbers for each of them: its
        id, image id and category id, whether it is a crowd, and where its text ends in `texts`.
        """
        self.annotations = 0
        """Number of annotations that were added so far, in all blocks."""
        self.category_names = dict[int, str]()
        self.has_shapes = False
        self.text_ids = list[str]()

    def add(self, section: str, entry: Any, text: str) -> None:
        """Add an entry of a section, and its text."""
        if section == "annotations":
            self._add_annotation(entry if isinstance(entry, dict) else {}, text)
        elif not isinstance(entry, dict):
            raise TypeError(f"{type(entry).__name__} where COCO has an object")
        elif section == "images":
            self._add_image(entry)
        else:
            self._add_category(to_integer(entry.get("id"), "id"), entry.get("name"))

    def _add_category(self, number: int, named: Any) -> None:
        if named is None:
            raise ValueError("no 'name'")
        name = escape(str(named))
        if self.category_names.setdefault(number, name) != name:
            raise ValueError(
                f"the name {name!r}, but an earlier entry of this id has the name "
                f"{self.category_names[number]!r}"
            )

    def _add_image(self, image: Entry) -> None:
        url = image.get("coco_url")
        name = image.get("file_name")
        if not name and isinstance(url, str) and "://" in url:
            name = take_base_name(url)
        if name is None:
            raise ValueError("no 'file_name'")
        if not isinstance(name, str) or len(name) > _LONGEST_NAME:
            raise TypeError(
                f"a file_name that is not text, or longer than a path may be: {name!r:.60}"
            )
        sizes = [
            to_integer(image.get(side) or 0, side, limit=2**31) for side in ("height", "width")
        ]
        number = to_integer(image.get("id"), "image_id")
        if isinstance(image["id"], str) and image["id"] != str(number):
            self.text_ids.append(image["id"])
        self.names += name.encode()
        self.base_hashes.extend(map(hash, list_meanings(name)))
        self.images.extend((number, *sizes, len(self.names)))

    def _add_annotation(self, entry: Entry, text: str) -> None:
        """Add an annotation's ids and ``iscrowd``, and keep the rest as text.

        Faults in the rest are found later, and then only the annotation's image is skipped. If the
        id is no number (such as a UUID), the annotation's place among all annotations, from 1, is
        used as its id.
        """
        self.annotations += 1
        ids = {"id": self.annotations, "image_id": UNREADABLE, "category_id": UNREADABLE}
        for name in ids:
            with suppress(*FAULTS):
                ids[name] = to_integer(entry.get(name), name)
        self.texts += text.encode()
        # JSON's true is accepted, too, because True equals 1.
        self.rows.extend((*ids.values(), entry.get("iscrowd") in (1, "1"), len(self.texts)))
        self.has_shapes = self.has_shapes or "bbox" in entry or "segmentation" in entry
        if self._keep is not None and len(self.texts) > _BLOCK_BYTES:
            self._keep(self.rows, self.texts)
            self.rows = array("q")
            self.texts = bytearray()
