"""List the kinds of defects that a dataset can have, and what each of them leads to."""

import warnings
from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.units import format_count

Defect = tuple[str, str]
"""The kind of a defect, and a text that says where it is and what was found."""
EFFECTS = {
    "no images": "stops preprocess: name a JSON that lists images",
    "repeated image id": "stops preprocess: its first image would get all annotations",
    "unknown image": "stops preprocess: these annotations belong to no image",
    "unknown category": "stops preprocess",
    "unsafe file_name": "image is skipped",
    "missing image": "image is skipped",
    "empty file": "image is skipped",
    "truncated image": "image is skipped",
    "bad image": "image is skipped",
    "size mismatch": "image is skipped",
    "bad annotation": "image is skipped",
    "object without mask": (
        "image is skipped: masks are needed, as polygons or RLE. Boxes, keypoints and panoptic "
        "segments are none: draw masks, or make them from the boxes with Segment Anything"
    ),
    "bad mask": "image is skipped",
    "box outside the image": (
        "object becomes background: boxes are x, y, width, height, in pixels of the image"
    ),
    "objects in several entries of an image": (
        "objects of one entry become background in the other: --repair joins the entries"
    ),
    "many crowds": (
        "objects become background: for CVAT's brush masks, use --repair with --crowds objects"
    ),
    "crowd without area": (
        "object becomes background: real crowds have an area, so use --repair with --crowds objects"
    ),
    "normalised polygon": "object is trained without a pixel",
    "empty mask": "object is trained without a pixel",
    "box of corners": "object is trained with a wrong box: this one is like x0, y0, x1, y1",
    "mask and box disagree": (
        "object is trained with a wrong box, or with a wrong mask: COCO's polygons have x before "
        "y, its RLE runs along columns, and its boxes are x, y, width, height"
    ),
    "no objects": "note: nothing to train on, and nothing to evaluate",
    "box without area": "note: left out of training",
    "empty annotation": "note: left out of training",
    "crowd": "note: left out of training",
    "image without objects": "note: left out of training",
    "polygon beyond the image": "note: cut at the image's edge",
    "loose box": "note: check that boxes are x, y, width, height, and fit their outlines",
    "area and mask disagree": "note: average precision counts it among objects of this area",
    "objects in one corner": "note: check that outlines were not drawn on smaller images",
    "image with alpha": "note: transparent pixels get the colours that the file has for them",
    "name of several categories": (
        "note: check that categories are meant to differ whose names are equal but for spaces and "
        "capitals"
    ),
    "annotation to ignore": (
        "note: trained as an object, because COCO has no such mark: make it a crowd (iscrowd 1) or "
        "leave it out"
    ),
    "classes not looked for": (
        "note: average precision counts right objects of such classes as wrong: use LVIS's own "
        "evaluation"
    ),
    "repeated annotation id": (
        "note: does no harm here, but pycocotools keeps only the last one: --repair writes new ids"
    ),
    "EXIF rotation, unclear": (
        "note: used as stored: the page of --report draws two photos both ways, so choose --exif "
        "turn or --exif keep"
    ),
    "EXIF rotation, turned": "note: turned, as the photos were whose sizes tell, or as you chose",
    "EXIF rotation, kept": "note: used as stored, as the photos whose sizes tell, or as you chose",
    "repeated annotation": "note: counts twice",
    "repeated file_name": "note: counts twice",
    "found by base name": "note: the file that was found is used",
    "16-bit image": "note: becomes 8-bit RGB",
}
"""What each kind of defect leads to in preprocessing and training. If this text begins with "note",
the defect is harmless, or its harm cannot be mended.
"""
SERIOUS = {kind for kind, effect in EFFECTS.items() if not effect.startswith("note")}
"""The serious kinds of defects: those that are more than a note."""
USUAL_DETECTIONS = 100
"""Detections in an image that COCO's evaluation counts for each class, and the most that
torchvision's Mask R-CNN gives. In images with more objects, both would cut the average precision.
"""


def pick_serious(counts: Mapping[str, int]) -> Counter[str]:
    """Return the counts of the serious kinds alone."""
    return Counter({kind: counts[kind] for kind in counts if kind in SERIOUS})


def describe_faults(faults: Mapping[str, int]) -> str:
    """Say how many objects have each kind of defect that `count_faults` counts, and its effect.

    Example:
        >>> describe_faults({"empty mask": 1200})
        '1,200 x empty mask: object is trained without a pixel'
    """
    return "; ".join(f"{count:,} x {kind}: {EFFECTS[kind]}" for kind, count in faults.items())


def count_allowed(total: int, max_bad: float) -> int:
    """Return how many of all may be bad. A share is rounded down; see `require_max_bad`."""
    if isinstance(max_bad, int):
        return max_bad
    # In floating point, 0.29 x 100 is a little less than 29.
    return int(max_bad * total + 1e-6)


def require_sound_objects(counts: Mapping[str, int], total: int, max_bad: float) -> None:
    """Raise ColabUtilsError if more objects are bad than ``max_bad`` allows.

    Objects with serious defects are bad.
    """
    faults = pick_serious(counts)
    allowed = count_allowed(total, max_bad)
    if faults.total() > allowed:
        raise ColabUtilsError(
            f"Bad objects so far: {faults.total():,}, and at most {allowed:,} of {total:,} may "
            f"be bad ({describe_faults(faults)}). Repair the annotations with "
            "`check --repair OUT.json`, or allow more with max_bad (preprocess: --max-bad)."
        )


def warn_of_faults(source: object, counts: Mapping[str, int]) -> None:
    """Warn if objects of a dataset have serious defects."""
    faults = pick_serious(counts)
    if faults:
        text = f"{source} has bad objects: {describe_faults(faults)}. Run `check` to see which."
        warnings.warn(text, ColabUtilsWarning, stacklevel=3)


def describe_full_images(per_image: NDArray[np.int64]) -> str:
    """Say how many images have more objects than `USUAL_DETECTIONS`; empty if none has.

    ``per_image`` has the number of objects of each image.

    Example:
        >>> describe_full_images(np.array([100, 120])).partition(":")[0]
        '1 image has more than 100 objects (120 at most)'
        >>> describe_full_images(np.array([100]))
        ''
    """
    count = int((per_image > USUAL_DETECTIONS).sum())
    if not count:
        return ""
    largest = per_image.max()
    verb = "has" if count == 1 else "have"
    return (
        f"{format_count(count, 'image')} {verb} more than {USUAL_DETECTIONS} objects ({largest} at "
        f"most): train and evaluate allow {largest} detections in an image, where COCO's "
        f"evaluation and torchvision's models stop at {USUAL_DETECTIONS}."
    )
