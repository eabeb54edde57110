"""Say what a segmentation is: polygons, RLE, nothing, or what tools write in their place."""

import json
import re
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.errors import ColabUtilsError

OUTLINE_NUMBERS = 6
"""Numbers of the smallest outline: x and y of three points."""
# No image is so wide, and pycocotools walks along an edge pixel by pixel, however far beyond the
# image that goes.
_FARTHEST_PIXEL = 1_000_000
# What Python makes of bytes as text. Of the characters of RLE, the backslash alone is doubled.
_BYTES_LITERAL = re.compile(r"""b(["'])(.*)\1""")
_NUMBER = re.compile(r"[\d.]+(?:e[-+]\d+)?")


def identify_segmentation(segmentation: Any) -> tuple[str, Any] | None:
    """Return what a segmentation is that cannot be drawn, and the same in COCO's form, where there
    is one way alone to read it; else None.

    Four numbers are a box or a line, and no outline. Of outlines whose points have lists of their
    own, one that lies within another may be a hole.

    Example:
        >>> identify_segmentation([[[0, 0], [4, 0], [4, 4]]])
        ('outlines in lists of points', [[0.0, 0.0, 4.0, 0.0, 4.0, 4.0]])
        >>> identify_segmentation([[0, 0, 4, 4]]) is None
        True
    """
    with suppress(ColabUtilsError, LookupError, TypeError, ValueError, RecursionError):
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


def _read_point(entry: dict[str, Any]) -> Any:
    """Return an object of x and y as a point, or where these are lists as points."""
    if entry.keys() >= {"x", "y"}:
        return np.stack([entry["x"], entry["y"]], -1).tolist()
    return entry


def _join_points(outlines: list[Any]) -> list[list[float]]:
    """Return each outline as x, y, x, y, ...

    Raises:
        ValueError: an outline is something else, or a hole of another one; or ColabUtilsError.
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
    # Each lies within itself.
    if is_within.sum() > len(boxes):
        raise ValueError("an outline within another one")
    return parts


def _join_outline(outline: Any) -> list[float]:
    numbers = read_numbers(outline).squeeze()
    # Rows of two are points.
    if numbers.ndim > 1 and numbers.shape[1:] != (2,):
        raise ValueError("several outlines")
    joined: list[float] = numbers.ravel().tolist()
    return joined


def count_numbers(segmentation: Any) -> int:
    """Return of how many numbers a segmentation is made; RLE counts as an outline.

    Example:
        >>> count_numbers([[]]), count_numbers([[[1, 2.5], [3, 4]]]), count_numbers(None)
        (0, 4, 0)
    """
    if isinstance(segmentation, dict) and "counts" in segmentation:
        return OUTLINE_NUMBERS if segmentation["counts"] else 0
    return len(_NUMBER.findall(str(segmentation)))


def is_nothing(annotation: dict[str, Any]) -> bool:
    """Return whether an annotation, as COCO has it, is what a click leaves that drew nothing: no
    outline, and neither box nor area.
    """
    has_size = all(annotation["bbox"][2:]) or annotation["area"] > 0
    return not has_size and count_numbers(annotation["segmentation"]) < OUTLINE_NUMBERS


def read_numbers(values: Any) -> NDArray[np.float64]:
    """Return numbers, which may be text, as float64.

    Raises:
        ValueError: they are something else; TypeError and OverflowError mean the same.
    """
    # numpy counts true and false as 1 and 0.
    if bool in map(type, values):
        raise ValueError("true or false where COCO has numbers")
    return np.asarray(values, np.float64)


def read_polygons(segmentation: list[Any]) -> list[NDArray[np.float64]]:
    """Return the polygons of one object as x, y, x, y, ...: float64 [2 x points] each.

    A polygon without its list is one polygon. Parts of fewer than 3 points are left out beside a
    part that has 3.

    Raises:
        ColabUtilsError: it is none that pycocotools takes rightly.

    Example:
        >>> read_polygons([0, 0, 4, "0", 4, 4])
        [array([0., 0., 4., 0., 4., 4.])]
    """
    polygons = segmentation if isinstance(segmentation[0], list) else [segmentation]
    try:
        parts = [read_numbers(polygon) for polygon in polygons]
    except (TypeError, ValueError, OverflowError):
        text = "a polygon holds something that is no number"
        raise ColabUtilsError(text) from None
    drawn = [part for part in parts if not _is_short(part)] or parts
    for part in drawn:
        _check_polygon(part)
    return drawn


def _is_short(part: NDArray[np.float64]) -> bool:
    """Return whether these are points, but fewer than three."""
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
    # What is not a number is not less than any other.
    if not farthest < _FARTHEST_PIXEL:
        raise ColabUtilsError(
            f"a polygon lies outside of the image: it reaches to pixel {farthest:.6g}"
        )
