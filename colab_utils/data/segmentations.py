"""Read polygons."""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.errors import DAMAGE, ColabUtilsError

Entry = dict[str, Any]
"""An image, an annotation or a category, as COCO has it."""
Rle = dict[str, Any]
"""A mask in RLE, as COCO has it: ``size`` (height and width) and ``counts``."""
OUTLINE_NUMBERS = 6
"""How many numbers the smallest outline has: x and y of three points."""
# Polygons that reach beyond this pixel are refused. No image is so wide, and pycocotools would walk
# along each edge pixel by pixel, also outside of the image.
_FARTHEST_PIXEL = 1_000_000
# What a polygon of so few numbers may be.
_SHORT = {
    2: ": a point. If the polygons are points, flatten them to x, y, x, y, ...",
    4: ": a box or a line, not an outline",
}
_NUMBER = re.compile(r"[\d.]+(?:e[-+]\d+)?")


def count_numbers(segmentation: Any) -> int:
    """Return how many numbers a segmentation has.

    RLE that is not empty counts as six numbers, because the smallest outline has six.

    Example:
        >>> count_numbers([[]]), count_numbers([[1e-05, 2.5, 3e20]]), count_numbers(None)
        (0, 3, 0)
        >>> count_numbers({"counts": "zz"}), count_numbers({"counts": ""})
        (6, 0)
    """
    if isinstance(segmentation, dict) and "counts" in segmentation:
        return OUTLINE_NUMBERS if segmentation["counts"] else 0
    return len(_NUMBER.findall(str(segmentation)))


def is_nothing(annotation: Entry) -> bool:
    """Return whether an annotation has no outline, no box and no area.

    A click that draws nothing leaves such annotations. The fields must be as COCO has them.
    """
    has_size = all(annotation["bbox"][2:]) or annotation["area"] > 0
    return not has_size and count_numbers(annotation["segmentation"]) < OUTLINE_NUMBERS


def read_numbers(values: Any) -> NDArray[np.float64]:
    """Return numbers as float64. They may be written as text.

    Raises:
        ValueError: if one of them is no number. TypeError and OverflowError mean the same.
    """
    # numpy would take true and false as 1 and 0.
    if bool in map(type, values):
        raise ValueError("true or false where COCO has numbers")
    return np.asarray(values, np.float64)


def read_polygons(segmentation: list[Any]) -> list[NDArray[np.float64]]:
    """Return the polygons of one object, each as x, y, x, y, ...: float64 [2 x points].

    A flat list of numbers is one polygon. Polygons of fewer than 3 points are left out if another
    one has at least 3.

    Raises:
        ColabUtilsError: if pycocotools would not draw the polygons correctly.

    Example:
        >>> read_polygons([0, 0, 4, "0", 4, 4])
        [array([0., 0., 4., 0., 4., 4.])]
    """
    polygons = segmentation if isinstance(segmentation[0], list) else [segmentation]
    try:
        parts = [read_numbers(polygon) for polygon in polygons]
    except DAMAGE:
        raise ColabUtilsError(
            "a polygon holds something that is no number. COCO has polygons as x, y, x, y, ..., or "
            "one RLE"
        ) from None
    # What consists of points, but of fewer than three, is left out.
    drawn = [
        part for part in parts if part.ndim > 1 or part.size % 2 or part.size >= OUTLINE_NUMBERS
    ]
    for part in drawn or parts:
        _check_polygon(part)
    return drawn or parts


def _check_polygon(part: NDArray[np.float64]) -> None:
    if part.ndim != 1:
        raise ColabUtilsError("a polygon is a list of lists: flatten it to x, y, x, y, ...")
    if part.size < OUTLINE_NUMBERS or part.size % 2:
        kind = _SHORT.get(part.size, "")
        raise ColabUtilsError(
            f"expected polygons of at least 3 points (x, y), found one of {part.size} numbers{kind}"
        )
    farthest = np.abs(part).max()
    # NaN is refused, too, because it is not less than any number.
    if not farthest < _FARTHEST_PIXEL:
        raise ColabUtilsError(
            f"a polygon lies outside of the image: it reaches to pixel {farthest:.6g}"
        )
