"""Read the fields of one annotation as COCO has them."""

from contextlib import suppress
from typing import Any

from colab_utils.data.masks import encode_segmentation, measure_mask
from colab_utils.errors import ColabUtilsError

_TOO_LARGE = 2**63  # for an integer of numpy


FAULTS = (TypeError, ValueError, OverflowError, RecursionError)
"""What reading an entry raises."""


LARGEST_NUMBER = 1e15
"""The numbers of a box and an area are less."""


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
    return value if name == "id" and isinstance(value, str) else to_integer(value, name)  # a UUID


def read_annotation(entry: dict[str, Any], height: int, width: int) -> dict[str, Any]:
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


def to_integer(value: Any, name: str, *, most: int = _TOO_LARGE) -> int:
    if type(value) is int and abs(value) < most:  # as nearly all are
        return value
    number = _to_number(value, name, "an integer")
    if number != int(number) or abs(number) >= most:
        raise ValueError(f"{name} {value!r:.40} where COCO has an integer")
    return int(number)
