"""Read the text of a COCO JSON entry by entry into flat arrays."""

import json
import re
from array import array
from contextlib import suppress
from typing import Any

from colab_utils.data.decoding import name_kind
from colab_utils.data.fields import FAULTS, to_integer
from colab_utils.data.image_paths import list_meanings, take_base_name
from colab_utils.errors import ColabUtilsError, escape
from colab_utils.files import read_file
from colab_utils.machine import find_free_memory
from colab_utils.os_errors import explain_os_error
from colab_utils.places import Place

_SECTIONS = ("images", "annotations", "categories")
_MARK = re.compile(r"[ \t\n\r]*([][{},:])[ \t\n\r]*")
# Memory that reading takes, in times of the file's bytes: they, their text, and what is kept.
_MEMORY_OF_JSON = 3
# Characters of a file_name: no path of Linux is longer.
_LONGEST_NAME = 4096
UNREADABLE = -(2**63)
"""Stands for an id of an annotation that is no number; no id has it."""
_NAME_INSTANCES = (
    "Name the instances file (such as instances_train2017.json), or export the "
    "dataset as COCO instances: see docs/FORMATS.md."
)
_decode = json.JSONDecoder().raw_decode


def read_columns(path: Place) -> "tuple[str, Columns]":
    """Return the XXH3-128 of a COCO JSON in hexadecimal, and what its entries hold.

    Raises:
        ColabUtilsError: if there is no such file, or it is not COCO instance JSON.
    """
    fingerprint, text = _read_text(path)
    if text.lstrip()[:1] == "[":
        cure = "Name the instances file: a list holds results, or one part of a dataset."
        raise _expect(path, "a list", cure)
    columns = Columns()
    try:
        sections = _read_sections(text, path, columns)
    except RecursionError:
        raise _expect(path, "JSON that is nested too deeply", "Export or copy it again.") from None
    except (ValueError, IndexError) as error:
        where = error.pos if isinstance(error, json.JSONDecodeError) else len(text)
        raise _expect(
            path,
            f"text that is not JSON at character {where:,} of {len(text):,}",
            "It may be cut short or something else: export or copy it again.",
        ) from None
    missing = [key for key in _SECTIONS if key not in sections]
    if missing:
        raise _expect(path, f"no list of {' and '.join(missing)}", _NAME_INSTANCES)
    if columns.rows and not columns.has_shapes:
        raise _expect(
            path,
            f"{len(columns.rows) // 5:,} annotations without bbox and segmentation (captions, "
            "or panoptic?)",
            _NAME_INSTANCES,
        )
    return fingerprint, columns


def read_fingerprint(path: Place) -> str:
    """Return the XXH3-128 of a COCO JSON in hexadecimal, without looking at its entries.

    Raises:
        ColabUtilsError: if there is no such file, or it is no text.
    """
    fingerprint, _ = _read_text(path)
    return fingerprint


def _read_text(path: Place) -> tuple[str, str]:
    """Return fingerprint and text of a JSON file in UTF-8, UTF-16 or UTF-32, with or without a byte
    order mark.
    """
    import xxhash

    try:
        data = read_file(path, most_bytes=find_free_memory() / _MEMORY_OF_JSON)
    except OSError as error:
        reason = explain_os_error(error, "Check the name; on Colab, mount Drive first.")
        raise ColabUtilsError(f"expected an annotations file at {path}, found: {reason}") from None
    kind = name_kind(data)
    if kind:
        raise _expect(path, kind, "Then name the JSON.")
    try:
        return xxhash.xxh3_128_hexdigest(data), data.decode(json.detect_encoding(data))
    except UnicodeDecodeError:
        raise _expect(
            path, "bytes that are not UTF-8 text, perhaps Latin-1", "Save the JSON as UTF-8."
        ) from None


def _expect(path: Place, found: str, cure: str) -> ColabUtilsError:
    return ColabUtilsError(f"expected COCO instance JSON in {path}, found {found}. {cure}")


def _read_sections(text: str, path: Place, columns: "Columns") -> set[str]:
    """Add each entry of the three lists of a COCO JSON; return which of the lists it has."""
    sections = set[str]()
    mark, position = _read_mark(text, 0, "{")
    if text[position] == "}":
        mark, position = _read_mark(text, position, "}")
    while mark != "}":
        if text[position] != '"':
            raise json.JSONDecodeError("expected a name", "", position)
        key, position = _decode(text, position)
        _, position = _read_mark(text, position, ":")
        # Other readers of JSON take the last one alone.
        if key in sections:
            raise _expect(path, f"{key} twice", "Make it one list.")
        if key in _SECTIONS:
            sections.add(key)
            position = _read_list(text, position, key, path, columns)
        else:
            _, position = _decode(text, position)
        mark, position = _read_mark(text, position, ",}")
    if position != len(text):
        raise json.JSONDecodeError("expected nothing more", "", 0)
    return sections


def _read_list(text: str, position: int, section: str, path: Place, columns: "Columns") -> int:
    """Add each entry of the list that begins at this position; return where it ends."""
    if text[position] != "[":
        raise _expect(path, f"no list of {section}", _NAME_INSTANCES)
    mark, position = _read_mark(text, position, "[")
    if text[position] == "]":
        mark, position = _read_mark(text, position, "]")
    while mark != "]":
        entry, end = _decode(text, position)
        try:
            columns.add(section, entry, text[position:end])
        except FAULTS as error:
            name = entry.get("id") if isinstance(entry, dict) else entry
            known = repr(name) if isinstance(name, int | float | str) else "?"
            raise _expect(
                path,
                f"an entry of '{section}' (id {known:.40}) with {error}",
                "Export the dataset again as COCO instances.",
            ) from None
        mark, position = _read_mark(text, end, ",]")
    return position


def _read_mark(text: str, position: int, expected: str) -> tuple[str, int]:
    """Return one of the expected marks at this position, and the position after it and the space
    around it.
    """
    match = _MARK.match(text, position)
    if match is None or match[1] not in expected:
        raise json.JSONDecodeError(f"expected {expected}", "", position)
    return match[1], match.end()


class Columns:
    """Hold what entries say, added one by one; one of `FAULTS` says what is wrong."""

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
            raise ValueError(f"another name, {name!r}, than {self.category_names[number]!r}")

    def _add_image(self, image: dict[str, Any]) -> None:
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
        sizes = [to_integer(image.get(side) or 0, side, most=2**31) for side in ("height", "width")]
        number = to_integer(image.get("id"), "image_id")
        if isinstance(image["id"], str) and image["id"] != str(number):
            self.text_ids.append(image["id"])
        for base in list_meanings(name):
            if self.bases.setdefault(base, name) != name:
                self.shared_names.add(base)
        self.names += name.encode()
        self.images.extend((number, *sizes, len(self.names)))

    def _add_annotation(self, entry: dict[str, Any], text: str) -> None:
        """Read only the ids and iscrowd: a fault refuses the annotation's image, not the file.

        An id that is no number, such as a UUID, is the annotation's row.
        """
        ids = {"id": len(self.rows) // 5 + 1, "image_id": UNREADABLE, "category_id": UNREADABLE}
        for name in ids:
            with suppress(*FAULTS):
                ids[name] = to_integer(entry.get(name), name)
        self.texts += text.encode()
        # True is 1, too.
        self.rows.extend((*ids.values(), entry.get("iscrowd") in (1, "1"), len(self.texts)))
        self.has_shapes = self.has_shapes or "bbox" in entry or "segmentation" in entry
