"""The kinds of defects of a dataset, and what becomes of each."""

from collections.abc import Mapping

Defect = tuple[str, str]
"""Its kind, and what was found where."""


# what each kind of defect does to preprocessing and training; "note" costs nothing, or nothing that
# can be mended
KINDS = {
    "stops preprocess": "no images|repeated image id|unknown image|unknown category",
    "stops training: masks are needed, as polygons or RLE": "no instances",
    "image is "
    "skipped": "unsafe file_name|missing image|empty file|truncated image|bad image|size mismatch|"
    "bad annotation|object without mask|bad mask",
    "object becomes background": "inverted box|box outside the image",
    "objects of one entry become background in the other: make it one "
    "entry": "objects in several entries of an image",
    "objects become background; where they are CVAT's brush masks: --repair with --crowds "
    "objects": "many crowds",
    "object is trained without a pixel": "normalised polygon|empty mask",
    "object is trained with a wrong box": "box of corners|mask and box disagree",
    "average precision comes out too high": "image in validation, too",
    "note: left out of training": "box without area|crowd|image without objects",
    "note: object is under a pixel, in the file or once the model has shrunk it": "tiny object",
    "note: cut at the image's edge": "box beyond the image|polygon beyond the image",
    "note: look whether it is what you "
    "mean": "self-crossing polygon|name of several categories|EXIF rotation, unclear",
    "note: average precision counts it as a small object": "area 0",
    "note: counts twice": "repeated annotation|repeated file_name",
    "note: taken as it is": "found by base name|wrong extension|EXIF rotation, annotated as stored",
    "note: preprocess turns it upright": "EXIF rotation, annotated upright",
    "note: becomes 8-bit RGB, its first "
    "frame": "16-bit image|CMYK image|grey image|image with alpha|animated image",
    "note: all ids are numbered anew from 1, as 0 is the background's": "category id 0",
    "note: too few to learn": "unused category|rare category",
    "note: costs time, see statistics": "enlarged image",
}


EFFECTS = {kind: effect for effect, kinds in KINDS.items() for kind in kinds.split("|")}


SERIOUS = {kind for kind, effect in EFFECTS.items() if not effect.startswith("note")}


USUAL = {
    "grey image",
    "image without objects",
    "EXIF rotation, annotated upright",
    "enlarged image",
}
"""Of which an image is none of the worst."""


def describe_faults(faults: Mapping[str, int]) -> str:
    """Return how many objects have each kind of `count_faults`, and what becomes of them.

    Example:
        >>> describe_faults({"empty mask": 1200})
        '1,200 x empty mask: object is trained without a pixel'
    """
    return "; ".join(f"{count:,} x {kind}: {EFFECTS[kind]}" for kind, count in faults.items())
