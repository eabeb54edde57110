"""The entries of a COCO JSON as growing columns of numbers."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

from colab_utils.data.segmentations import SegmentationsBuilder
from colab_utils.errors import ColabUtilsError

__all__ = ["AnnotationColumns", "ImageColumns", "order_categories"]


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
