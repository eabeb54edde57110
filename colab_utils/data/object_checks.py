"""Check one object: compare its box with its mask and with its image."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from colab_utils.data.defects import SERIOUS, Defect
from colab_utils.data.masks import encode_segmentation, measure_mask
from colab_utils.data.segmentations import Entry, Rle, count_numbers, is_nothing, read_polygons
from colab_utils.data.sizes import Size
from colab_utils.errors import ColabUtilsError

NEAR = 2
"""Number of pixels by which boxes, masks and images may differ."""
APART = "mask and box disagree"
"""The kind of defect of a box that lies elsewhere than its mask. One of both is wrong."""
# A box that overlaps its mask's box by less than `_WRONG_OVERLAP` (IoU) is wrong. Nearly all boxes
# overlap by more than `_LOOSE_OVERLAP`.
_WRONG_OVERLAP = 0.5
_LOOSE_OVERLAP = 0.8
# With a shorter side, one or two pixels at an edge change a box too much to call it loose.
_FEW_SIDE = 8
# The numbers of a normalised outline are shares of the image size, 0 to 1, or a little more.
_LARGEST_SHARE = 1.1


def check_object(
    annotation: Entry, size: Size, mask: Rle | None = None
) -> tuple[list[Defect], int]:
    """Return the defects of an annotation, and the number of pixels of its mask.

    ``mask`` is the mask in RLE, if it is drawn already.
    """
    outline = annotation["segmentation"]
    try:
        mask = mask or encode_segmentation(outline, *size)
    except ColabUtilsError as error:
        if is_nothing(annotation):
            return [("empty annotation", "")], 0
        if not count_numbers(outline):
            return [("object without mask", "")], 0
        return [("bad mask", str(error))], 0
    tight, pixels = measure_mask(mask)
    defects: list[Defect] = []
    if isinstance(outline, list):
        corners = np.concatenate(read_polygons(outline)).reshape(-1, 2)
        if is_normalised(corners):
            return [("normalised polygon", "all of its numbers lie in 0 to 1")], 0
        beyond = max(*-corners.min(0), *(corners.max(0) - size[::-1]))
        if beyond > NEAR:
            defects.append(("polygon beyond the image", f"by {beyond:,.0f} pixels"))
    box = annotation["bbox"]
    if wrong := compare_box(box, tight, *size):
        defects.append((wrong, f"bbox {box}, the mask lies in {tight}"))
    # V7 Darwin exports objects with holes as crowds in RLE without an area. COCO's own crowds have
    # an area.
    if pixels and annotation["iscrowd"] and isinstance(outline, dict) and not annotation["area"]:
        defects.append(("crowd without area", f"the mask has {pixels:,} pixels"))
    elif pixels and is_area_odd(annotation["area"], box, pixels):
        text = f"area {annotation['area']:,.0f}, the mask has {pixels:,} pixels"
        defects.append(("area and mask disagree", text))
    return defects, pixels


def count_faults(annotations: Sequence[Entry], rles: Sequence[Rle]) -> Counter[str]:
    """Count the objects of an image that may be trained wrongly or not at all, by kind of defect.

    Args:
        annotations: the image's annotations, including crowds. Crowds are counted only if they
            have no area.
        rles: the masks of the annotations.

    Example:
        >>> outline = [[1, 1, 1, 1, 1, 1]]
        >>> one = {"bbox": [0, 0, 8, 6], "area": 9, "segmentation": outline, "iscrowd": 0}
        >>> count_faults([one], [encode_segmentation(outline, 6, 8)])
        Counter({'empty mask': 1})
    """
    faults = Counter[str]()
    for annotation, mask in zip(annotations, rles, strict=True):
        defects, _ = check_object(annotation, mask["size"], mask)
        counted = {"crowd without area"} if annotation["iscrowd"] else SERIOUS
        faults.update([kind for kind, _ in defects if kind in counted][:1])
    return faults


def is_area_odd(area: float | None, box: list[float], pixels: int) -> bool:
    """Return whether an area is missing, or fits neither the box nor the mask.

    Such an area may be a share of the image, for example. The area of an object that the image's
    edge cuts may be that of the whole object.

    Example:
        >>> is_area_odd(0.1, [0, 0, 20, 10], 150), is_area_odd(200, [0, 0, 20, 10], 150)
        (True, False)
    """
    in_box = box[2] * box[3]
    return not min(0.1 * in_box, 0.5 * pixels) <= (area or 0) <= max(in_box, 1.1 * pixels)


def is_normalised(numbers: Any) -> bool:
    """Return whether a polygon is given in shares of the image, 0 to 1, and not in pixels.

    A polygon of only the numbers 0 and 1 is taken as the outline of one pixel.

    Example:
        >>> is_normalised([0.1, 0.1, 0.9, 0.1, 0.9, 0.5]), is_normalised([0, 0, 1, 0, 1, 1])
        (True, False)
    """
    return bool(np.abs(numbers).max() <= _LARGEST_SHARE and not np.isin(numbers, (0, 1)).all())


def compare_box(box: list[float], tight: list[float], height: int, width: int) -> str:
    """Compare a box with the image and with the tight box of its mask; return the kind of its
    defect, or "".

    Both boxes are x, y, width, height in pixels.
    """
    from pycocotools import mask as coco_mask

    x, y, w, h = box
    if not (w and h):
        return "box without area"
    # Training clips boxes to the image, so the box is clipped before it is compared.
    edges = np.clip(np.add(box, [0, 0, x, y]), 0, [width, height] * 2)
    if (edges[2:] <= edges[:2]).any():
        return "box outside the image"
    if not tight[2]:
        return "empty mask" if w * h >= NEAR**2 else ""
    if np.abs(edges - np.add(tight, [0, 0, *tight[:2]])).max() <= NEAR:
        return ""
    boxes = np.array([[*edges[:2], *edges[2:] - edges[:2]], [x, y, w - x, h - y]], np.float64)
    overlap, corners_overlap = coco_mask.iou(boxes, np.array([tight]), [False]).ravel()
    if overlap >= _WRONG_OVERLAP:
        return "loose box" if overlap < _LOOSE_OVERLAP and min(w, h) >= _FEW_SIDE else ""
    # A box of corners has x0, y0, x1, y1.
    return "box of corners" if corners_overlap >= _WRONG_OVERLAP else APART
