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
# The kind of a box that is noted and used.
_LOOSE = "loose box"
# A box is not noted as loose if a side is shorter than `_FEW_SIDE`, nor is the area of a mask that
# has fewer pixels than `_FEW_PIXELS`: one or two pixels at an edge change them too much.
_FEW_SIDE = 8
_FEW_PIXELS = 64
_ODD_AREA = "area and mask disagree"
# The numbers of a normalised outline are shares of the image size, 0 to 1. They may still lie
# outside of 0 to 1 by up to this share.
_BEYOND_SHARE = 0.1


def check_object(
    annotation: Entry, size: Size, mask: Rle | None = None
) -> tuple[list[Defect], int]:
    """Return the defects of an annotation, and the number of pixels of its mask.

    This number is 0 if the object cannot be used in training. ``mask`` is the mask in RLE, if it is
    drawn already.
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
    wrong_box = compare_box(annotation["bbox"], tight, *size)
    defects += wrong_box
    if pixels and annotation["area"] <= 0:
        # V7 Darwin exports objects with holes as crowds in RLE without an area. COCO's own crowds
        # have an area.
        is_object = annotation["iscrowd"] and isinstance(outline, dict) and annotation["area"] == 0
        kind = "crowd without area" if is_object else "area 0"
        defects.append((kind, f"the mask has {pixels:,} pixels"))
    elif _is_area_odd(annotation, pixels, size):
        text = f"area {annotation['area']:,.0f}, the mask has {pixels:,} pixels"
        defects.append((_ODD_AREA, text))
    is_usable = not wrong_box or wrong_box[0][0] == _LOOSE
    return defects, pixels if is_usable else 0


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
        counted = {"crowd without area"} if annotation["iscrowd"] else SERIOUS | {_LOOSE, _ODD_AREA}
        faults.update([kind for kind, _ in defects if kind in counted][:1])
    return faults


def _is_area_odd(annotation: Entry, pixels: int, size: Size) -> bool:
    """Return whether an object's area fits neither its mask nor its box.

    An area that fits the box is not odd, because many tools export the area of the box. Some
    objects are not judged: crowds, masks with few pixels, and objects that the image's edge cuts.
    The area of a cut object may be that of the whole object.
    """
    area = annotation["area"]
    left, top, width, height = annotation["bbox"]
    is_cut = left + width > size[1] + NEAR or top + height > size[0] + NEAR
    if annotation["iscrowd"] or area <= 0 or is_cut or pixels < _FEW_PIXELS:
        return False
    is_of_box = abs(area - width * height) <= 0.02 * width * height
    return not is_of_box and not 0.8 <= area / pixels <= 1.25


def is_normalised(numbers: Any) -> bool:
    """Return whether a polygon is given in shares of the image, 0 to 1, and not in pixels.

    A polygon of only the numbers 0 and 1 is taken as the outline of one pixel.

    Example:
        >>> is_normalised([0.1, 0.1, 0.9, 0.1, 0.9, 0.5]), is_normalised([0, 0, 1, 0, 1, 1])
        (True, False)
    """
    in_unit = np.min(numbers) >= -_BEYOND_SHARE and np.max(numbers) <= 1 + _BEYOND_SHARE
    return bool(in_unit and not np.isin(numbers, (0, 1)).all())


def compare_box(box: list[float], tight: list[float], height: int, width: int) -> list[Defect]:
    """Compare a box with the image and with the tight box of its mask.

    Both boxes are x, y, width, height in pixels.
    """
    from pycocotools import mask as coco_mask

    x, y, w, h = box
    text = f"bbox {box}"
    if w < 0 or h < 0:
        return [("inverted box", text)]
    if not (w > 0 and h > 0):
        return [("box without area", text)]
    # Training clips boxes to the image, so the box is clipped before it is compared.
    edges = np.clip(np.add(box, [0, 0, x, y]), 0, [width, height] * 2)
    if (edges[2:] <= edges[:2]).any():
        return [("box outside the image", text)]
    if not (tight[2] and tight[3]):
        return [("empty mask", text)] if w * h >= NEAR**2 else []
    if np.abs(edges - np.add(tight, [0, 0, *tight[:2]])).max() <= NEAR:
        return []
    boxes = np.array([[*edges[:2], *edges[2:] - edges[:2]], [x, y, w - x, h - y]], np.float64)
    overlap, corners_overlap = coco_mask.iou(boxes, np.array([tight]), [False]).ravel()
    if overlap >= _WRONG_OVERLAP:
        is_loose = overlap < _LOOSE_OVERLAP and min(w, h) >= _FEW_SIDE
        return [(_LOOSE, f"{text}, the mask lies in {tight}")] if is_loose else []
    if corners_overlap >= _WRONG_OVERLAP:
        return [("box of corners", f"{text} looks like x0, y0, x1, y1")]
    return [(APART, f"{text}, the mask lies in {tight}")]
