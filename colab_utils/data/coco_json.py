"""Read the text of a COCO JSON entry by entry.

Only one entry at a time becomes Python objects. If all entries of COCO train2017 did, they would
take 3 GB.
"""

import json
import re
from array import array
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from colab_utils.data.decoding import name_kind
from colab_utils.data.fields import read_sound_fields, to_integer
from colab_utils.data.image_paths import decode_name, take_base_name
from colab_utils.data.segmentations import Entry
from colab_utils.errors import DAMAGE, ColabUtilsError, escape, explain_os_error
from colab_utils.files import open_store
from colab_utils.machine import find_free_memory
from colab_utils.places import Place

_SECTIONS = ("images", "annotations", "categories")
# Bytes of memory that reading takes for each byte of the file.
_MEMORY_OF_JSON = 2.5
# Characters of the longest file_name. No path of Linux is longer.
_LONGEST_NAME = 4096
UNREADABLE = -(2**63)
"""Stands for an image or category id that is no number. No real id has this value."""
# JSON formats other than COCO. Each pattern matches the path of a key: "annotations/result" is the
# key "result" of the first annotation.
_FORMATS = {
    "_via_img_metadata|.*/regions": "VIA's JSON",
    "imagePath": "LabelMe's JSON",
    "data_row|DataRow ID|Labeled Data": "Labelbox's JSON",
    "features": "GeoJSON",
    "size/height|objects/classTitle": "Supervisely's JSON",
    "imgHeight": "Cityscapes' JSON",
    "item/(name|slots)": "V7 Darwin's JSON",
    "(annotations/)?predicted_iou": "the JSON of Segment Anything",
    "annotations/(completed_by|result)|.*/(polygonlabels|brushlabels)": "Label Studio's own JSON",
    "annotations/coordinates/(x|width)": "CreateML's JSON",
}
_MARK = re.compile(r"[ \t\n\r]*([][{},:])[ \t\n\r]*")
# JSON Lines: an object on one line, and another object on the next line.
_NEXT_LINE = re.compile(r"[ \t\r]*\n\s*\{")
_decode = json.JSONDecoder().raw_decode


class Columns:
    """Collect the entries of a COCO JSON in flat arrays. A faulty entry raises one of `DAMAGE`."""

    def __init__(self) -> None:
        self.images = array("q")
        """Three numbers for each image: id, height, width."""
        self.names: list[str] = []
        self.rows = array("q")
        """Six numbers for each annotation: its id, image id and category id, whether it is a crowd,
        and where its text starts and ends in the text of the JSON.
        """
        self.categories: dict[int, str] = {}
        """The name of each category, by its id."""
        self.ignored = 0
        """Number of annotations to ignore."""
        self.is_federated = False
        """Whether an image names classes that were not looked for in it, as LVIS does."""

    def add(self, section: str, entry: Any, span: tuple[int, int]) -> None:
        """Add an entry of a section; ``span`` says where its text starts and ends."""
        if section == "annotations":
            self._add_annotation(entry if isinstance(entry, dict) else {}, span)
        elif not isinstance(entry, dict):
            raise TypeError(f"{type(entry).__name__} where COCO has an object")
        elif section == "images":
            self._add_image(entry)
        else:
            self._add_category(entry)

    def _add_category(self, category: Entry) -> None:
        number = to_integer(category.get("id"), "id")
        if category.get("name") is None:
            raise ValueError("no 'name'")
        name = escape(str(category["name"]))
        if self.categories.setdefault(number, name) != name:
            raise ValueError(
                f"the name {name!r}, but an earlier entry of this id has the name "
                f"{self.categories[number]!r}"
            )

    def _add_image(self, image: Entry) -> None:
        name = image.get("file_name")
        if not name and image.get("coco_url"):
            name = take_base_name(decode_name(image["coco_url"]))
        if not isinstance(name, str) or len(name) > _LONGEST_NAME:
            raise TypeError(
                f"a file_name that is not text, or longer than a path may be: {name!r:.60}"
            )
        # A name with half a character raises an error.
        name.encode()
        sizes = [to_integer(image.get(side) or 0, side, bits=31) for side in ("height", "width")]
        number = to_integer(image.get("id"), "image_id")
        self.names.append(name)
        self.images.extend((number, *sizes))
        self.is_federated |= "not_exhaustive_category_ids" in image

    def _add_annotation(self, entry: Entry, span: tuple[int, int]) -> None:
        """Add an annotation's ids and ``iscrowd``, and the place of its text.

        Faults in the rest are found later, and then only the annotation's image is skipped. If the
        id is no number (such as a UUID), the annotation's place among all annotations, from 1, is
        used as its id.
        """
        row = {
            "id": len(self.rows) // 6 + 1,
            "image_id": UNREADABLE,
            "category_id": UNREADABLE,
            "iscrowd": 0,
        }
        read_sound_fields(entry, row)
        self.rows.extend((*row.values(), *span))
        self.ignored += entry.get("ignore") in (1, "1")


class _Reader:
    """Read JSON value by value from its text. ``position`` is the place of the next character."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.position = 0

    def read_mark(self, expected: str) -> str:
        """Read a mark (one of ``[]{},:``) and the white space around it; return the mark.

        Raises:
            json.JSONDecodeError: none of the expected marks is there.
        """
        match = _MARK.match(self._text, self.position)
        if match is None or match[1] not in expected:
            raise json.JSONDecodeError(f"expected {expected}", "", self.position)
        self.position = match.end()
        return match[1]

    def read_value(self) -> Any:
        """Read a value.

        Raises:
            json.JSONDecodeError: the text is no JSON.
            ValueError: a number has too many digits.
            RecursionError: the value is nested too deeply.
        """
        value, self.position = _decode(self._text, self.position)
        return value

    def read_entries(self, opening: str) -> Iterator[Any]:
        """Read a list or an object behind its opening mark. Yield where the value of each entry is
        to be read: its key in an object, None in a list.
        """
        closing = "}" if opening == "{" else "]"
        is_empty = self._text.startswith(closing, self.position)
        mark = self.read_mark(closing) if is_empty else ","
        while mark != closing:
            key = None
            if closing == "}":
                key = self.read_value()
                if not isinstance(key, str):
                    raise json.JSONDecodeError("expected a name", "", self.position)
                self.read_mark(":")
            yield key
            mark = self.read_mark("," + closing)


def read_content(path: Place) -> bytes:
    """Return the bytes of a COCO JSON.

    Raises:
        ColabUtilsError: if there is no such file, or if it is too large for this machine's memory.
        DriveLostError: if Drive went away.
    """
    try:
        return open_store(path).read(path, most_bytes=find_free_memory() / _MEMORY_OF_JSON)
    except OSError as error:
        cure = "Check its name."
        if isinstance(error, IsADirectoryError):
            cure = "Name the JSON in it. If each image has its own file, see docs/FORMATS.md."
        reason = explain_os_error(error, cure)
        raise ColabUtilsError(f"The annotations {path} cannot be read: {reason}") from None


def decode_json(content: bytes) -> str:
    """Return the text of a JSON: UTF-8, UTF-16 or UTF-32, as its first bytes show.

    Raises:
        ColabUtilsError: if it is another kind of file.
    """
    kind = name_kind(content)
    if kind:
        raise ColabUtilsError(f"{kind}. Then name the JSON.")
    try:
        return content.decode(json.detect_encoding(content[:4]))
    except UnicodeDecodeError:
        raise ColabUtilsError(
            "bytes that are not UTF-8 text, perhaps Latin-1. Save the JSON as UTF-8."
        ) from None


def read_columns(text: str) -> Columns:
    """Read the entries of a COCO JSON.

    Raises:
        ColabUtilsError: if it is not COCO instance JSON.
    """
    reader = _Reader(text)
    columns = Columns()
    try:
        for section in _find_entries(reader):
            start = reader.position
            entry = reader.read_value()
            try:
                columns.add(section, entry, (start, reader.position))
            except DAMAGE as error:
                name = entry.get("id") if isinstance(entry, dict) else entry
                known = repr(name) if isinstance(name, int | float | str) else "?"
                raise ColabUtilsError(
                    f"an entry of '{section}' (id {known:.40}) with {error}. "
                    "Export the dataset again as COCO instances."
                ) from None
        if reader.position < len(text):
            raise json.JSONDecodeError("expected nothing more", "", reader.position)
    except RecursionError:
        reason = "JSON that is nested too deeply. Export or copy it again."
    except json.JSONDecodeError as error:
        reason = (
            f"text that is not JSON, or not that of COCO, at character {error.pos:,} of "
            f"{len(text):,}. The file may be incomplete: export or copy it again."
        )
    except ValueError as error:
        reason = str(error)
    else:
        return columns
    raise ColabUtilsError(_name_format(text) or reason)


def _find_entries(reader: _Reader) -> Iterator[str]:
    """Yield the section of each entry of the three lists where its value is to be read.

    Each list may also be an object that has each entry by its id, as LIVECell's.
    """
    opening = reader.read_mark("{[")
    if opening == "[":
        raise ValueError(
            "it is a list. Name the instances file: a list holds results, or one part of a dataset."
        )
    keys = set[str]()
    for key in reader.read_entries(opening):
        keys.add(key)
        if key in _SECTIONS:
            for _ in reader.read_entries(reader.read_mark("[{")):
                yield key
        else:
            reader.read_value()
    missing = [key for key in _SECTIONS if key not in keys]
    if missing:
        raise ValueError(
            f"no list of {' and '.join(missing)}. Name the instances file (such as "
            "instances_train2017.json), or export the dataset as COCO instances: see "
            "docs/FORMATS.md."
        )


def _name_format(text: str) -> str:
    """Name the format of JSON that is not COCO, by the keys of its first object."""
    with suppress(ValueError, RecursionError):
        first, end = _decode(text, text.index("{"))
        paths = [*_list_paths(first)]
        names = [name for key, name in _FORMATS.items() if any(re.fullmatch(key, p) for p in paths)]
        if not names and paths and _NEXT_LINE.match(text, end):
            names = ["JSON Lines"]
        if names:
            return f"{names[0]}: see docs/FORMATS.md. Then name the JSON."
    return ""


def _list_paths(value: Any, head: str = "", depth: int = 3) -> Iterator[str]:
    """Yield the paths of the keys of an object, or of the first object of a list."""
    if isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, dict) and depth:
        for key, entry in value.items():
            yield head + key
            yield from _list_paths(entry, f"{head}{key}/", depth - 1)
