"""List the kinds of defects that a dataset can have, and what each of them leads to."""

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning

Defect = tuple[str, str]
"""The kind of a defect, and a text that says where it is and what was found."""


@dataclass(frozen=True)
class Kind:
    """Describe one kind of defect."""

    name: str
    effect: str
    """What the defect leads to in preprocessing and training. An effect that begins with "note"
    does no harm, or none that can be mended.
    """

    @property
    def is_serious(self) -> bool:
        """Return whether a dataset with this defect has problems. A note is none."""
        return not self.effect.startswith("note")


KINDS = (
    Kind("no images", "stops preprocess: name a JSON that lists images"),
    Kind("repeated image id", "stops preprocess"),
    Kind("unknown image", "stops preprocess"),
    Kind("unknown category", "stops preprocess"),
    Kind("no instances", "stops training: masks are needed, as polygons or RLE"),
    Kind("unsafe file_name", "image is skipped"),
    Kind("missing image", "image is skipped"),
    Kind("empty file", "image is skipped"),
    Kind("truncated image", "image is skipped"),
    Kind("bad image", "image is skipped"),
    Kind("size mismatch", "image is skipped"),
    Kind("bad annotation", "image is skipped"),
    Kind("object without mask", "image is skipped"),
    Kind("bad mask", "image is skipped"),
    Kind("inverted box", "object becomes background"),
    Kind("box outside the image", "object becomes background"),
    Kind(
        "objects in several entries of an image",
        "objects of one entry become background in the other: --repair joins the entries",
    ),
    Kind(
        "many crowds",
        "objects become background: if they are CVAT's brush masks, --repair with --crowds objects",
    ),
    Kind(
        "crowd without area",
        "object becomes background: --repair with --crowds objects, as crowds of COCO have an area",
    ),
    Kind("normalised polygon", "object is trained without a pixel"),
    Kind("empty mask", "object is trained without a pixel"),
    Kind("box of corners", "object is trained with a wrong box"),
    Kind("mask and box disagree", "object is trained with a wrong box"),
    Kind(
        "outline in another order",
        "object is trained with a wrong mask: write all outlines as COCO has them",
    ),
    Kind(
        "image in validation, too",
        "average precision comes out too high: --repair with --val-annotations leaves it out",
    ),
    Kind("box without area", "note: left out of training"),
    Kind("empty annotation", "note: left out of training"),
    Kind("crowd", "note: left out of training"),
    Kind("image without objects", "note: left out of training"),
    Kind("polygon beyond the image", "note: cut at the image's edge"),
    Kind("polygon within another", "note: filled, because only RLE can have holes"),
    Kind("loose box", "note: check that boxes are x, y, width, height, and fit their outlines"),
    Kind("area and mask disagree", "note: check that no hole is filled, and no mask is another's"),
    Kind("objects in one corner", "note: check that outlines were not drawn on smaller images"),
    Kind("image with alpha", "note: transparent pixels have the colours that lie below"),
    Kind("name of several categories", "note: check that it is what you mean"),
    Kind("EXIF rotation, unclear", "note: check that masks lie on their objects"),
    Kind("area 0", "note: average precision counts it as a small object"),
    Kind("repeated annotation", "note: counts twice"),
    Kind("repeated file_name", "note: counts twice"),
    Kind("found by base name", "note: the file that was found is used"),
    Kind("image id that is text", "note: an integer stands for it, which --repair writes"),
    Kind("16-bit image", "note: becomes 8-bit RGB"),
    Kind("animated image", "note: only its first frame is used"),
)
EFFECTS = {kind.name: kind.effect for kind in KINDS}
"""The effect of each kind, by its name."""
SERIOUS = {kind.name for kind in KINDS if kind.is_serious}
"""The names of the serious kinds: a dataset with one of them has problems."""


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


def count_allowed(total: int, share: float) -> int:
    """Return the whole number of objects that is this share of the total, rounded down."""
    # In floating point, 0.29 x 100 is a little less than 29.
    return int(share * total + 1e-6)


def require_sound_objects(counts: Mapping[str, int], total: int, max_bad: float) -> None:
    """Raise ColabUtilsError if more objects have serious defects than ``max_bad``, a share."""
    faults = pick_serious(counts)
    allowed = count_allowed(total, max_bad)
    if faults.total() > allowed:
        raise ColabUtilsError(
            f"{faults.total():,} objects are bad so far, and at most {allowed:,} of {total:,} may "
            f"be ({describe_faults(faults)}). Repair the annotations with "
            "`check --repair OUT.json`, or allow more with max_bad (preprocess: --max-bad SHARE)."
        )


def warn_of_faults(source: object, counts: Mapping[str, int]) -> None:
    """Warn if objects of a dataset have serious defects."""
    faults = pick_serious(counts)
    if faults:
        text = f"{source} has bad objects, see check: {describe_faults(faults)}"
        warnings.warn(text, ColabUtilsWarning, stacklevel=3)
