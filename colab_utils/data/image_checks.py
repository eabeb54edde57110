"""Check one image file, and its annotations against it."""

import io
from collections import Counter
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.coco import CocoDataset
from colab_utils.data.decoding import (
    guard_pillow,
    has_16_bits,
    open_image,
    open_lazily,
    read_orientation,
    to_rgb,
)
from colab_utils.data.defects import EFFECTS, Defect
from colab_utils.data.image_paths import explain_missing
from colab_utils.data.object_checks import check_object
from colab_utils.drive import Retries
from colab_utils.errors import ColabUtilsError, UnavailableError, escape
from colab_utils.files import read_file
from colab_utils.places import Place, name_below

# What a whole file ends with; some cameras write zeros or a preview after it.
_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}
# Bytes at a file's end that are searched for it.
_TAIL = 4096
# Share of the objects: COCO has 1 %.
_MANY_CROWDS = 0.1
# Objects after which it is known whether many are bad.
_SAMPLED_OBJECTS = 1000


class Header(NamedTuple):
    """Describe an image file, without its pixels."""

    defects: list[Defect]
    """Kind and text of each, first of all of what makes the file unusable."""
    size: tuple[int, int] = (0, 0)
    """Height and width as stored, in pixels; 0 where the file is unusable."""
    orientation: int = 1
    """By EXIF, 1 to 8."""
    bytes: int = 0


class Findings(NamedTuple):
    """Hold what was found in one image and its annotations."""

    defects: list[Defect]
    """Kind and text of each."""
    header: Header
    size: tuple[int, int]
    """Height and width that its masks are drawn at, in pixels; 0 where that is not known."""
    objects: NDArray[np.float64]
    """float64 [N, 6]: category id, width and height of the box, pixels of the mask, and where the
    box ends in shares of the image's width and height, of each usable object.
    """


def read_header(
    images: Place, dataset: CocoDataset, i: int, retries: Retries, *, deep: bool = False
) -> Header:
    """Read an image file's header and end; ``deep`` decodes it.

    Raises:
        DriveLostError: if Drive went away.
    """
    try:
        path, by_base_name = dataset.find_image(images, i)
    except UnavailableError:
        raise
    except ColabUtilsError as error:
        return Header([("unsafe file_name", str(error))])
    notes: list[Defect] = []
    if by_base_name:
        notes.append(("found by base name", escape(name_below(path, images))))
    try:
        return _describe(read_file(path, retries), notes, deep=deep)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return Header([("missing image", explain_missing(images, dataset.file_name(i)))])
    except UnavailableError:
        raise
    # Pillow's many readers raise whatever they like on damaged data.
    except Exception as error:
        kind = "truncated image" if "truncated" in str(error) else "bad image"
        return Header([(kind, str(error))])


@guard_pillow()
def _describe(data: bytes, notes: list[Defect], *, deep: bool) -> Header:
    """Return the header of an image file with this content, after what is known already."""
    from PIL import Image

    if not data:
        return Header([("empty file", "0 bytes")])
    try:
        opened = open_lazily(io.BytesIO(data))
    except ColabUtilsError:
        # A PNG's metadata may be damaged.
        opened = open_image(data)
    kind = opened.format or ""
    is_deep = has_16_bits(opened)
    if is_deep:
        notes.append(("16-bit image", opened.mode))
    width, height = opened.size
    # Its pixels may all be dark; or the file is cut short, or has much of something else after its
    # end.
    if deep or is_deep or _ENDS.get(kind, b"") not in data[-_TAIL:]:
        to_rgb(open_image(data))
    # It refuses what does not fit 8 bits.
    to_rgb(Image.new(opened.mode, (1, 1)))
    orientation = read_orientation(opened)
    # Pillow turns a TIFF itself, and has its size as turned already.
    if kind == "TIFF" and orientation > 4:
        orientation = 1
    if opened.has_transparency_data:
        notes.append(("image with alpha", ""))
    if kind != "MPO":
        with suppress(EOFError):
            opened.seek(1)
            notes.append(("animated image", ""))
    return Header(notes, (height, width), orientation, len(data))


def check_image(dataset: CocoDataset, i: int, header: Header) -> Findings:
    """Compare an image's annotations with its file, and their boxes with their masks."""
    size = tuple(dataset.sizes[i].tolist())
    defects = [*header.defects]
    if all(header.size):
        defects += compare_sizes(size, header)
    if not all(size):
        size = header.size
    elif "size mismatch" in dict(defects):
        # Whose pixels the masks are is not known.
        size = 0, 0
    annotations, faults = dataset.read_annotations(i)
    for number, reason in faults:
        kind = "unknown category" if reason.endswith("of no category") else "bad annotation"
        defects.append((kind, f"annotation {number}: {reason}"))
    if not annotations and not faults:
        defects.append(("image without objects", ""))
    wrong, objects = _check_objects(annotations, size)
    name = escape(dataset.file_name(i))
    named = [(kind, f"{name}: {text}".removesuffix(": ")) for kind, text in defects + wrong]
    return Findings(named, header, size, np.array(objects, np.float64).reshape(-1, 6))


def _check_objects(
    annotations: list[dict[str, Any]], size: tuple[int, ...]
) -> tuple[list[Defect], list[tuple[float, ...]]]:
    """Return the defects of an image's annotations, and the numbers of its usable objects."""
    defects: list[Defect] = []
    objects: list[tuple[float, ...]] = []
    seen: set[tuple[int, str]] = set()
    if not all(size):
        return [], []
    for annotation in annotations:
        wrong, pixels = check_object(annotation, size)
        if pixels:
            key = annotation["category_id"], repr(annotation["segmentation"])
            if key in seen:
                wrong.append(("repeated annotation", ""))
            elif not annotation["iscrowd"]:
                left, top, width, height = annotation["bbox"]
                ends = (left + width) / size[1], (top + height) / size[0]
                objects.append((annotation["category_id"], width, height, pixels, *ends))
            seen.add(key)
        for kind, text in wrong:
            defects.append((kind, f"annotation {annotation['id']}: {text}".removesuffix(": ")))
    return defects, objects


def sample_faults(dataset: CocoDataset) -> Counter[str]:
    """Return how many objects are trained wrongly, or not at all, by the kind of their defect.

    Of a large dataset these are those of some images all over it.
    """
    order = np.random.default_rng(0).permutation(len(dataset))
    counts = np.diff(dataset.first)[order].cumsum()
    rows = order[: 1 + np.searchsorted(counts, _SAMPLED_OBJECTS)].tolist()
    faults = Counter[str]()
    for i in rows:
        kinds = [kind for kind, _ in check_image(dataset, i, Header([])).defects]
        faults.update(kind for kind in kinds if EFFECTS[kind].startswith("object"))
    if has_many_crowds(dataset):
        faults["many crowds"] = dataset.crowds
    return faults


def has_many_crowds(dataset: CocoDataset) -> bool:
    """Return whether so many objects are crowds that they may well be none."""
    return dataset.crowds > _MANY_CROWDS * len(dataset.ids)


def compare_sizes(size: tuple[int, ...], header: Header) -> list[Defect]:
    """Return whether the annotations are of another size than the photo as its file has it, and as
    its EXIF orientation turns it.
    """
    tag = header.orientation
    height, width = header.size
    upright = (width, height) if tag > 4 else header.size
    if all(size) and size not in (header.size, upright):
        text = f"annotations say {size[1]} x {size[0]}, the file has {width} x {height}"
        if size == (width, height):
            text += ": sides swapped"
        return [("size mismatch", text)]
    if tag != 1 and (not all(size) or header.size == upright):
        return [("EXIF rotation, unclear", f"orientation {tag}, {width} x {height}")]
    return []
