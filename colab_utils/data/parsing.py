"""From the bytes of a COCO JSON to its entries, one image or annotation at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from colab_utils.drive import guard_drive
from colab_utils.errors import ColabUtilsError

__all__ = ["SECTIONS", "decode_text", "iterate_coco", "read_bytes"]

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
