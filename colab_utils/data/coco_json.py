"""Read the text of a COCO JSON entry by entry into flat arrays."""

import json
import re
from array import array
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from colab_utils.data.decoding import name_kind
from colab_utils.data.fields import FAULTS, to_integer
from colab_utils.data.image_paths import take_base_name
from colab_utils.errors import ColabUtilsError, escape
from colab_utils.files import read_file
from colab_utils.machine import find_free_memory

_SECTIONS = ("images", "annotations", "categories")


_MARK = re.compile(r"[ \t\n\r]*([][{},:])[ \t\n\r]*")


_MEMORY_OF_JSON = 3  # times its bytes: they, their text, and what is kept


_LONGEST_NAME = 4096  # characters of a file_name: no path of Linux is longer


UNREADABLE = -(2**63)  # stands for an id of an annotation that is no number; no id has it


NAME_INSTANCES = (
    "Name the instances file (such as instances_train2017.json), or export the "
    "dataset as COCO instances."
)


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


def read_text(path: Path) -> tuple[str, str]:
    """Fingerprint and text of a JSON file in UTF-8, UTF-16 or UTF-32, with or without a byte order
    mark.
    """
    import xxhash

    data = read_bytes(path)
    if kind := name_kind(data):
        raise expect_instances(path, kind, "Then name the JSON.")
    try:
        return xxhash.xxh3_128_hexdigest(data), data.decode(json.detect_encoding(data))
    except UnicodeDecodeError:
        raise expect_instances(
            path, "bytes that are not UTF-8 text, perhaps Latin-1", "Save the JSON as UTF-8."
        ) from None


def read_entries_of(text: str, path: Path, columns: "Columns") -> None:
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
            raise expect_instances(
                path, wrong, "Export the dataset again as COCO instances."
            ) from None
        return end

    def read_section(position: int) -> int:
        if text[position] != '"':
            raise json.JSONDecodeError("expected a name", "", position)
        key, position = decode(text, position)
        _, position = take(position, ":")
        if key in found:  # other readers of JSON take the last one alone
            raise expect_instances(path, f"{key} twice", "Make it one list.")
        if key not in _SECTIONS:
            return decode(text, position)[1]
        if text[position] != "[":
            raise expect_instances(path, f"no list of {key}", NAME_INSTANCES)
        found.add(key)
        return read_items(position, "[]", partial(read_entry, key))

    if text.lstrip()[:1] == "[":
        raise expect_instances(
            path,
            "a list",
            "Name the instances file: a list holds results, or one part of a dataset.",
        )
    try:
        if read_items(0, "{}", read_section) != len(text):
            raise json.JSONDecodeError("expected nothing more", "", 0)
    except RecursionError:
        raise expect_instances(
            path, "JSON that is nested too deeply", "Export or copy it again."
        ) from None
    except (ValueError, IndexError) as error:
        where = error.pos if isinstance(error, json.JSONDecodeError) else len(text)
        wrong = f"text that is not JSON at character {where:,} of {len(text):,}"
        raise expect_instances(
            path, wrong, "It may be cut short or something else: export or copy it again."
        ) from None
    if missing := [key for key in _SECTIONS if key not in found]:
        raise expect_instances(path, f"no list of {' and '.join(missing)}", NAME_INSTANCES)


def expect_instances(path: Path, found: str, cure: str) -> ColabUtilsError:
    """Return the error that says what a file holds in place of COCO instances."""
    return ColabUtilsError(f"expected COCO instance JSON in {path}, found {found}. {cure}")


class Columns:
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
        if not name and isinstance(url, str):
            name = take_base_name(url)
        if name is None:
            raise ValueError("no 'file_name'")
        if not isinstance(name, str) or len(name) > _LONGEST_NAME:
            raise TypeError(
                f"a file_name that is not text, or longer than a path may be: {name!r:.60}"
            )
        sizes = [to_integer(image.get(side) or 0, side, most=2**31) for side in ("height", "width")]
        number = to_integer(image.get("id"), "id")
        if self.bases.setdefault(base := take_base_name(name), name) != name:
            self.shared_names.add(base)
        self.names += name.encode()
        self.images.extend((number, *sizes, len(self.names)))

    def _add_annotation(self, entry: dict[str, Any], text: str) -> None:
        """Only the ids and iscrowd are read here: a fault refuses the annotation's image, not the
        file.

        An id that is no number, such as a UUID, is the annotation's row.
        """
        ids = {"id": len(self.rows) // 5 + 1, "image_id": UNREADABLE, "category_id": UNREADABLE}
        for name in ids:
            with suppress(*FAULTS):
                ids[name] = to_integer(entry.get(name), name)
        self.texts += text.encode()
        # true is 1
        self.rows.extend((*ids.values(), entry.get("iscrowd") in (1, "1"), len(self.texts)))
        self.has_shapes = self.has_shapes or "bbox" in entry or "segmentation" in entry
