"""Check one object: its box against its mask and its image."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.defects import SERIOUS, Defect
from colab_utils.data.masks import encode_segmentation, measure_mask
from colab_utils.data.segmentations import count_numbers, is_nothing, read_polygons
from colab_utils.errors import ColabUtilsError

NEAR = 2
"""Pixels that boxes, masks and images may differ by."""


def check_object(one: dict[str, Any], size: tuple[int, ...]) -> tuple[list[Defect], int]:
    """Return the defects of an annotation, and the pixels of its mask; 0 where it cannot be trained
    on.
    """
    outline = one["segmentation"]
    height, width = size
    try:
        mask = encode_segmentation(outline, height, width)
    except ColabUtilsError as error:
        if is_nothing(one):
            return [("empty annotation", "")], 0
        if not count_numbers(outline):
            return [("object without mask", "")], 0
        return [("bad mask", str(error))], 0
    tight, pixels = measure_mask(mask)
    wrong_box = compare_box(one["bbox"], tight, height, width)
    defects = [*wrong_box]
    if isinstance(outline, list):
        polygons = read_polygons(outline)
        if is_normalised(np.concatenate(polygons)):
            return [("normalised polygon", "all of its numbers lie in 0 to 1")], 0
        defects = _check_polygons(polygons, height, width, pixels) + wrong_box
    if pixels and one["area"] <= 0:
        kind = "crowd without area" if _is_object(one) else "area 0"
        defects.append((kind, f"the mask has {pixels:,} pixels"))
    return defects, 0 if wrong_box else pixels


def count_faults(
    annotations: Sequence[dict[str, Any]], rles: Sequence[dict[str, Any]]
) -> Counter[str]:
    """Return how many of an image's objects are trained wrongly, or not at all, by the kind of
    their defect.

    Args:
        annotations: of the image, crowds included, of which only those without area count.
        rles: their masks.

    Example:
        >>> outline = [[1, 1, 1, 1, 1, 1]]
        >>> one = {"bbox": [0, 0, 8, 6], "segmentation": outline, "iscrowd": 0}
        >>> count_faults([one], [encode_segmentation(outline, 6, 8)])
        Counter({'empty mask': 1})
    """
    from pycocotools import mask as coco_mask

    if not annotations:
        return Counter()
    limits = rles[0]["size"][::-1]
    boxes = np.array([one["bbox"] for one in annotations], np.float64)
    starts = boxes[:, :2].clip(0, limits)
    ends = (boxes[:, :2] + boxes[:, 2:]).clip(0, limits)
    tight = coco_mask.toBbox(rles)
    tight_ends = tight[:, :2] + tight[:, 2:]
    # Most boxes are those of their masks: only the others are looked at one by one.
    is_near = np.abs(np.hstack([starts - tight[:, :2], ends - tight_ends])).max(1) <= NEAR
    has_area = (boxes[:, 2:] > 0).all(1) & (ends > starts).all(1) & (tight[:, 2:] > 0).all(1)
    is_sound = is_near & has_area & (tight_ends.max(1) > NEAR)
    is_sound &= [not _is_object(one) for one in annotations]
    kinds = [_find_fault(annotations[i], rles[i]) for i in np.flatnonzero(~is_sound).tolist()]
    return Counter(filter(None, kinds))


def _is_object(crowd: dict[str, Any]) -> bool:
    """Return whether a crowd may well be an object: V7 Darwin exports those with holes as RLE
    without an area, which each crowd of COCO has.
    """
    is_rle = isinstance(crowd["segmentation"], dict)
    return bool(crowd["iscrowd"] and is_rle and crowd["area"] == 0)


def _find_fault(one: dict[str, Any], mask: dict[str, Any]) -> str:
    """Return the kind of defect with which an object is trained wrongly, or not at all; "" if none
    is.
    """
    if one["iscrowd"]:
        return "crowd without area" if _is_object(one) else ""
    outline = one["segmentation"]
    tight, _ = measure_mask(mask)
    # Polygons are read again only where all of the mask lies in the image's first pixels.
    if isinstance(outline, list) and max(tight[0] + tight[2], tight[1] + tight[3]) <= NEAR:
        if is_normalised(np.concatenate(read_polygons(outline))):
            return "normalised polygon"
    kinds = [kind for kind, _ in compare_box(one["bbox"], tight, *mask["size"]) if kind in SERIOUS]
    return kinds[0] if kinds else ""


def _check_polygons(
    polygons: list[NDArray[np.float64]], height: int, width: int, pixels: int
) -> list[Defect]:
    corners = np.concatenate(polygons).reshape(-1, 2)
    beyond = max(*-corners.min(0), *(corners.max(0) - (width, height)))
    if beyond > NEAR:
        return [("polygon beyond the image", f"by {beyond:,.0f} pixels")]
    x, y = polygons[0].reshape(-1, 2).T
    enclosed = abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2
    # The two loops of an eight have opposite signs; drawing fills both.
    if len(polygons) == 1 and pixels >= 16 and enclosed < pixels / 2:
        text = f"encloses {enclosed:,.0f} pixels, fills {pixels:,}"
        return [("self-crossing polygon", text)]
    return []


def is_normalised(numbers: Any) -> bool:
    """Return whether a polygon is given in shares of the image, 0 to 1, not in pixels; one of 0 and
    1 alone is a pixel.

    Example:
        >>> is_normalised([0.1, 0.1, 0.9, 0.1, 0.9, 0.5]), is_normalised([0, 0, 1, 0, 1, 1])
        (True, False)
    """
    in_unit = np.min(numbers) >= 0 and np.max(numbers) <= 1
    return bool(in_unit and not np.isin(numbers, (0, 1)).all())


def compare_box(box: list[float], tight: list[float], height: int, width: int) -> list[Defect]:
    """Compare a box with the image and the tight box of its mask, each x, y, width, height."""
    from pycocotools import mask as coco_mask

    x, y, w, h = box
    text = f"bbox {box}"
    if w < 0 or h < 0:
        return [("inverted box", text)]
    if not (w > 0 and h > 0):
        return [("box without area", text)]
    if min(x + w, width) <= max(x, 0) or min(y + h, height) <= max(y, 0):
        return [("box outside the image", text)]
    if not (tight[2] and tight[3]):
        return [("empty mask", text)] if w * h >= NEAR**2 else []
    # Training cuts a box at the image's edges.
    edges = np.clip([x, y, x + w, y + h], 0, [width, height] * 2)
    inner = np.array([*tight[:2], tight[0] + tight[2], tight[1] + tight[3]])
    if np.abs(edges - inner).max() <= NEAR:
        return []
    boxes = np.array([[*edges[:2], *edges[2:] - edges[:2]], [x, y, w - x, h - y]], np.float64)
    overlap, corners_overlap = coco_mask.iou(boxes, np.array([tight]), [False]).ravel()
    if overlap >= 0.5:
        return []
    if corners_overlap >= 0.5:
        return [("box of corners", f"{text} looks like x0, y0, x1, y1")]
    return [("mask and box disagree", f"{text}, the mask lies in {tight}")]
