"""Read polygons, and recognise other forms of segmentation that tools write."""

import json
import re
from contextlib import suppress
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
# What str() makes of bytes, such as "b'71'". It writes each backslash of RLE as two, and all other
# characters as they are.
_BYTES_LITERAL = re.compile(r"""b(["'])(.*)\1""")
_NUMBER = re.compile(r"[\d.]+(?:e[-+]\d+)?")


def identify_segmentation(segmentation: Any) -> tuple[str, Any] | None:
    """Name the form of a segmentation that is not as COCO has it, and convert it to COCO's form.

    The result is None if the form is not known, or if there are several ways to read it. For
    example, four numbers may be a box or a line, and an outline within another one may be a hole.

    Returns:
        The name of the form and the converted segmentation, or None.

    Example:
        >>> identify_segmentation([[[0, 0], [4, 0], [4, 4]]])
        ('outlines in lists of points', [[0.0, 0.0, 4.0, 0.0, 4.0, 4.0]])
        >>> identify_segmentation([[0, 0, 4, 4]]) is None
        True
    """
    with suppress(ColabUtilsError, *DAMAGE):
        text = segmentation if isinstance(segmentation, str) else json.dumps(segmentation)
        plain = json.loads(text, object_hook=_read_point)
        while isinstance(plain, list) and len(plain) == 1:
            plain = plain[0]
        if isinstance(plain, list):
            return ("outlines in lists of points", _join_points(plain))
        literal = _BYTES_LITERAL.fullmatch(str(plain["counts"]))
        if literal:
            plain["counts"] = literal[2].replace("\\\\", "\\")
            return ("RLE whose counts are Python's bytes as text", plain)
        if not isinstance(segmentation, dict):
            return ("RLE in a list or in text", plain)
    return None


def _read_point(entry: Entry) -> Any:
    """Convert an object with x and y to a point, or to a list of points if x and y are lists."""
    if entry.keys() >= {"x", "y"}:
        return np.stack([entry["x"], entry["y"]], -1).tolist()
    return entry


def _join_points(outlines: list[Any]) -> list[list[float]]:
    """Return each outline as a flat list x, y, x, y, ...

    Raises:
        ValueError: if an outline is no list of numbers or points, or if it lies within another one
            and may be a hole.
        ColabUtilsError: if `read_polygons` refuses an outline.
    """
    try:
        parts = [_join_outline(outlines)]
    except ValueError:
        parts = [_join_outline(outline) for outline in outlines]
    boxes = []
    for polygon in read_polygons(parts):
        corners = polygon.reshape(-1, 2)
        boxes.append([*-corners.min(0), *corners.max(0)])
    is_within = (np.array(boxes)[:, None] <= boxes).all(2)
    # Each outline lies within itself, so the sum is at least the number of outlines.
    if is_within.sum() > len(boxes):
        raise ValueError("an outline within another one")
    return parts


def _join_outline(outline: Any) -> list[float]:
    numbers = read_numbers(outline).squeeze()
    # Rows of two numbers are points.
    if numbers.ndim > 1 and numbers.shape[1:] != (2,):
        raise ValueError("several outlines")
    joined: list[float] = numbers.ravel().tolist()
    return joined


def count_numbers(segmentation: Any) -> int:
    """Return how many numbers a segmentation has.

    RLE that is not empty counts as six numbers, because the smallest outline has six.

    Example:
        >>> count_numbers([[]]), count_numbers([[[1, 2.5], [3, 4]]]), count_numbers(None)
        (0, 4, 0)
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
        text = "a polygon holds something that is no number"
        raise ColabUtilsError(text) from None
    drawn = [part for part in parts if not _is_short(part)] or parts
    for part in drawn:
        _check_polygon(part)
    return drawn


def _is_short(part: NDArray[np.float64]) -> bool:
    """Return whether a polygon consists of points, but of fewer than three."""
    return part.ndim == 1 and part.size < OUTLINE_NUMBERS and part.size % 2 == 0


def _check_polygon(part: NDArray[np.float64]) -> None:
    if part.ndim != 1:
        raise ColabUtilsError("a polygon is no list of at least 3 points (x, y)")
    if part.size < OUTLINE_NUMBERS or part.size % 2:
        kind = ": a box or a line, not an outline" if part.size == 4 else ""
        raise ColabUtilsError(
            f"expected polygons of at least 3 points (x, y), found one of {part.size} numbers{kind}"
        )
    farthest = np.abs(part).max()
    # NaN is refused, too, because it is not less than any number.
    if not farthest < _FARTHEST_PIXEL:
        raise ColabUtilsError(
            f"a polygon lies outside of the image: it reaches to pixel {farthest:.6g}"
        )
