"""Read the fields of one annotation as COCO has them."""

import math
import re
from contextlib import suppress
from typing import Any

from colab_utils.data.masks import encode_segmentation, measure_mask
from colab_utils.data.segmentations import Entry, count_numbers
from colab_utils.errors import DAMAGE, ColabUtilsError
from colab_utils.files import hash_bytes

# Integers must be smaller than this to fit into int64.
_INTEGER_BITS = 63
_LARGEST_NUMBER = 1e15
# Text that counts as an integer id. Python would also read "1e3" as 1000 and "1_0" as 10, but 1000
# and 10 may be the ids of other images.
_WHOLE_NUMBER = re.compile(r"\s*-?\d{1,18}(\.0*)?\s*")
# Text that tables write for ``iscrowd``.
_CROWD_TEXTS = {"0": 0, "1": 1, "false": 0, "true": 1}


def read_field(entry: Entry, name: str) -> Any:
    """Return one value of an annotation as COCO has it.

    Numbers may be written as text. The value is None if a box or an area is missing.

    Raises:
        ValueError: if the value is not of the kind that COCO has in this field. TypeError,
            OverflowError and RecursionError mean the same.

    Example:
        >>> read_field({"bbox": ["0", 1, 2.5, "3"]}, "bbox"), read_field({}, "iscrowd")
        ([0.0, 1.0, 2.5, 3.0], 0)
    """
    value = entry.get(name)
    if name == "segmentation":
        return value
    if name == "iscrowd":
        return read_crowd(value)
    if name not in ("bbox", "area"):
        return to_integer(value, name)
    if value is None:
        return None
    if name == "bbox":
        return _read_box(value)
    return float(_to_number(value, name, limit=_LARGEST_NUMBER))


def read_sound_fields(entry: Entry, fields: dict[str, Any]) -> dict[str, Any]:
    """Read some fields of an annotation; a field that is not as COCO has it keeps its value in
    ``fields``.
    """
    for name in fields:
        with suppress(*DAMAGE):
            fields[name] = read_field(entry, name)
    return fields


def read_crowd(value: Any) -> int:
    """Return ``iscrowd`` as COCO has it: 0 or 1. It may be missing, a boolean, or text.

    Raises:
        ValueError: if it is anything else.

    Example:
        >>> read_crowd("False"), read_crowd(True), read_crowd(None)
        (0, 1, 0)
    """
    number = _CROWD_TEXTS.get(value.strip().lower(), value) if isinstance(value, str) else value
    if number not in (None, 0, 1):
        raise ValueError(f"iscrowd {value!r:.40} where COCO has 0 or 1")
    return int(number or 0)


def _read_box(value: Any) -> list[float] | None:
    numbers = value if isinstance(value, list) else [value]
    box = [float(_to_number(number, "bbox", limit=_LARGEST_NUMBER)) for number in numbers]
    if len(box) not in (0, 4):
        raise ValueError(f"bbox {box!r:.60} where COCO has [x, y, width, height]")
    return box or None


def read_annotation(entry: Entry, height: int, width: int) -> Entry:
    """Return the fields of an entry of ``annotations``, except its id.

    A missing box or area is computed from the mask, which is drawn in an image of this size. If
    there is no mask, the area is that of the box. An entry without box, area and outline gets a box
    of zeros.

    Raises:
        ValueError: as `read_field` does.
        ColabUtilsError: if there is neither a box nor a mask to derive it from.
    """
    names = ("image_id", "category_id", "bbox", "area", "iscrowd", "segmentation")
    annotation = {name: read_field(entry, name) for name in names}
    box = annotation["bbox"]
    area = annotation["area"]
    if box and area is not None:
        return annotation
    try:
        tight, pixels = measure_mask(encode_segmentation(annotation["segmentation"], height, width))
    except ColabUtilsError as error:
        if not (box or area or count_numbers(annotation["segmentation"])):
            box = [0.0] * 4
        if not box:
            raise ColabUtilsError(f"no bbox, and no mask to derive it from: {error}") from None
        tight = box
        pixels = box[2] * box[3]
    annotation["bbox"] = box or tight
    annotation["area"] = float(pixels) if area is None else area
    return annotation


def _to_number(
    value: Any, name: str, kind: str = "finite numbers", limit: float = math.inf
) -> float:
    """Return a number. It may be written as text, as Roboflow and VIA do."""
    if isinstance(value, str) and "_" not in value:
        with suppress(ValueError):
            value = int(value) if value.strip().isdecimal() else float(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) < limit:
        raise ValueError(f"{name} {value!r:.40} where COCO has {kind}")
    number: float = value
    return number


def to_integer(value: Any, name: str, *, bits: int = _INTEGER_BITS) -> int:
    """Return an integer of at most so many bits, which may be written as text or as a float.

    An ``image_id`` that is a name becomes a number of 52 bits from its hash. Every reader of JSON
    keeps a number of this size exactly.
    """
    # Nearly all values are plain integers, so they are returned first.
    if type(value) is int and abs(value) < 1 << bits:
        return value
    if name == "image_id" and isinstance(value, str) and not _WHOLE_NUMBER.fullmatch(value):
        return int(hash_bytes(value.encode())[:13], 16)
    number = _to_number(value, name, "an integer")
    if number != int(number) or abs(number) >= 1 << bits:
        raise ValueError(f"{name} {value!r:.40} where COCO has an integer (below 2**{bits})")
    return int(number)
