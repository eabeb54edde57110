"""Check one object: compare its box with its mask and with its image."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.defects import SERIOUS, Defect
from colab_utils.data.masks import encode_segmentation, measure_mask, pack_masks, unpack_masks
from colab_utils.data.segmentations import Entry, Rle, count_numbers, is_nothing, read_polygons
from colab_utils.data.sizes import Size
from colab_utils.errors import ColabUtilsError

NEAR = 2
"""Number of pixels by which boxes, masks and images may differ."""
# A box that overlaps its mask's box by less than `_WRONG_OVERLAP` (IoU) is wrong. Nearly all boxes
# overlap by more than `_LOOSE_OVERLAP`.
_WRONG_OVERLAP = 0.5
_LOOSE_OVERLAP = 0.8
# A box is not judged if a side is shorter than `_FEW_SIDE`, nor a mask if it has fewer pixels than
# `_FEW_PIXELS`: one or two pixels at an edge change them too much.
_FEW_SIDE = 8
_FEW_PIXELS = 64
# The numbers of a normalised outline are shares of the image size, 0 to 1. They may still lie
# outside of 0 to 1 by up to this share.
_BEYOND_SHARE = 0.1
# What `count_faults` counts: what spoils training, and signs that a mask or a box is another
# object's.
_COUNTED = SERIOUS | {"loose box", "area and mask disagree"}


def check_object(annotation: Entry, size: Size) -> tuple[list[Defect], int]:
    """Return the defects of an annotation, and the number of pixels of its mask.

    This number is 0 if the object cannot be used in training.
    """
    outline = annotation["segmentation"]
    height, width = size
    try:
        mask = encode_segmentation(outline, height, width)
    except ColabUtilsError as error:
        if is_nothing(annotation):
            return [("empty annotation", "")], 0
        if not count_numbers(outline):
            return [("object without mask", "")], 0
        return [("bad mask", str(error))], 0
    _, pixels = measure_mask(mask)
    defects: list[Defect] = []
    if isinstance(outline, list):
        polygons = read_polygons(outline)
        if is_normalised(np.concatenate(polygons)):
            return [("normalised polygon", "all of its numbers lie in 0 to 1")], 0
        defects = _check_polygons(polygons, height, width, pixels)
    wrong_box = compare_outline(annotation, mask)
    defects += wrong_box
    if pixels and annotation["area"] <= 0:
        kind = "crowd without area" if _is_object(annotation) else "area 0"
        defects.append((kind, f"the mask has {pixels:,} pixels"))
    elif _is_area_odd(annotation, mask):
        text = f"area {annotation['area']:,.0f}, the mask has {pixels:,} pixels"
        defects.append(("area and mask disagree", text))
    is_usable = not wrong_box or wrong_box[0][0] == "loose box"
    return defects, pixels if is_usable else 0


def _is_area_odd(annotation: Entry, mask: Rle) -> bool:
    """Return whether an object's area fits neither its mask nor its box.

    An area that fits the box is not odd, because many tools export the area of the box. Some
    objects are not judged: crowds, masks with few pixels, and objects that the image's edge cuts.
    The area of a cut object may be that of the whole object.
    """
    _, pixels = measure_mask(mask)
    area = annotation["area"]
    left, top, width, height = annotation["bbox"]
    is_cut = left + width > mask["size"][1] + NEAR or top + height > mask["size"][0] + NEAR
    if annotation["iscrowd"] or area <= 0 or is_cut or pixels < _FEW_PIXELS:
        return False
    is_of_box = abs(area - width * height) <= 0.02 * width * height
    return not is_of_box and not 0.8 <= area / pixels <= 1.25


def compare_outline(annotation: Entry, mask: Rle) -> list[Defect]:
    """Compare an annotation's box with the image and with its mask in RLE.

    If they disagree, the segmentation is read in other ways. If the box fits one of these, the
    segmentation is wrong, not the box.
    """
    tight, _ = measure_mask(mask)
    defects = compare_box(annotation["bbox"], tight, *mask["size"])
    box = annotation["bbox"]
    if "mask and box disagree" not in dict(defects) or min(box[2:]) < _FEW_SIDE:
        return defects
    edges = np.array([*box[:2], box[0] + box[2], box[1] + box[3]])
    for reading, points in _list_readings(annotation["segmentation"], mask):
        if np.abs(edges - [*points.min(0), *points.max(0)]).max() <= NEAR:
            return [("outline in another order", f"fits its box if read as {reading}")]
    return defects


def _list_readings(segmentation: Any, mask: Rle) -> Iterator[tuple[str, Any]]:
    """Yield other ways to read a segmentation, and the points (x, y) that it would have then."""
    height, width = mask["size"]
    if isinstance(segmentation, list):
        numbers = np.concatenate(read_polygons(segmentation))
        points = numbers.reshape(-1, 2)
        yield "y before x", points[:, ::-1]
        yield "y from below", np.abs([0, height] - points)
        yield "all x before all y", numbers.reshape(2, -1).T
        if numbers.size % 3 == 0:
            yield "three numbers a point", numbers.reshape(-1, 3)[:, :2]
    else:
        [drawn] = unpack_masks(pack_masks([mask]), height, width)
        for reading, pixels in (
            ("runs along rows, not columns", drawn.T.reshape(height, width)),
            ("runs of the background, not of the object", 1 - drawn),
        ):
            if pixels.any():
                yield reading, np.argwhere(pixels)[:, ::-1]


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
    kinds = map(_find_fault, annotations, rles)
    return Counter(filter(None, kinds))


def _is_object(crowd: Entry) -> bool:
    """Return whether an annotation is marked as a crowd, but may be a single object.

    V7 Darwin exports objects with holes as crowds in RLE without an area. COCO's own crowds have an
    area.
    """
    is_rle = isinstance(crowd["segmentation"], dict)
    return bool(crowd["iscrowd"] and is_rle and crowd["area"] == 0)


def _find_fault(annotation: Entry, mask: Rle) -> str:
    """Return the defect because of which an object may be trained wrongly or not at all.

    The text is empty if there is no such defect.
    """
    if annotation["iscrowd"]:
        return "crowd without area" if _is_object(annotation) else ""
    tight, _ = measure_mask(mask)
    # The mask of a normalised polygon lies in the corner at (0, 0).
    is_in_corner = max(tight[0] + tight[2], tight[1] + tight[3]) <= NEAR
    differs = compare_box(annotation["bbox"], tight, *mask["size"])
    # Most boxes equal those of their masks. Only the other objects are read again, which is slower.
    if not (is_in_corner or differs or _is_area_odd(annotation, mask)):
        return ""
    defects, _ = check_object(annotation, mask["size"])
    return next((kind for kind, _ in defects if kind in _COUNTED), "")


def _check_polygons(
    polygons: list[NDArray[np.float64]], height: int, width: int, pixels: int
) -> list[Defect]:
    from pycocotools import mask as coco_mask

    corners = np.concatenate(polygons).reshape(-1, 2)
    beyond = max(*-corners.min(0), *(corners.max(0) - (width, height)))
    if beyond > NEAR:
        return [("polygon beyond the image", f"by {beyond:,.0f} pixels")]
    parts = coco_mask.frPyObjects(polygons, height, width)
    areas = coco_mask.area(parts)
    # If no polygon covers another one, their areas add up to the pixels of the mask.
    if len(parts) == 1 or areas.sum() - pixels < max(areas.min(), _FEW_PIXELS):
        return []
    for i in np.argsort(areas)[: len(parts) // 2].tolist():
        others = coco_mask.merge([*parts[:i], *parts[i + 1 :]])
        if areas[i] >= _FEW_PIXELS and coco_mask.area(others) == pixels:
            return [("polygon within another", f"of {areas[i]:,} pixels")]
    return []


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
    if min(x + w, width) <= max(x, 0) or min(y + h, height) <= max(y, 0):
        return [("box outside the image", text)]
    if not (tight[2] and tight[3]):
        return [("empty mask", text)] if w * h >= NEAR**2 else []
    # Training clips boxes to the image, so the box is clipped before it is compared.
    edges = np.clip([x, y, x + w, y + h], 0, [width, height] * 2)
    inner = np.array([*tight[:2], tight[0] + tight[2], tight[1] + tight[3]])
    if np.abs(edges - inner).max() <= NEAR:
        return []
    boxes = np.array([[*edges[:2], *edges[2:] - edges[:2]], [x, y, w - x, h - y]], np.float64)
    overlap, corners_overlap = coco_mask.iou(boxes, np.array([tight]), [False]).ravel()
    if overlap >= _WRONG_OVERLAP:
        is_loose = overlap < _LOOSE_OVERLAP and min(w, h) >= _FEW_SIDE
        return [("loose box", f"{text}, the mask lies in {tight}")] if is_loose else []
    if corners_overlap >= _WRONG_OVERLAP:
        return [("box of corners", f"{text} looks like x0, y0, x1, y1")]
    return [("mask and box disagree", f"{text}, the mask lies in {tight}")]
