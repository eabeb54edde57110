"""Check one image file, and its annotations against it."""

import io
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.coco import CocoDataset
from colab_utils.data.decoding import (
    guard_pillow,
    open_image,
    open_lazily,
    read_orientation,
    to_rgb,
)
from colab_utils.data.defects import Defect
from colab_utils.data.object_checks import check_object
from colab_utils.data.sizes import find_scale
from colab_utils.drive import DriveLostError, Retries
from colab_utils.errors import ColabUtilsError, escape
from colab_utils.files import read_file

_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}


_MODES = {"CMYK": "CMYK image", "L": "grey image", "1": "grey image"}


class Header(NamedTuple):
    """An image file, without its pixels."""

    defects: list[Defect]
    """Kind and text of each, first of all of what makes the file unusable."""
    size: tuple[int, int] = (0, 0)
    """Height and width as stored, in pixels; 0 where the file is unusable."""
    orientation: int = 1
    """By EXIF, 1 to 8."""
    bytes: int = 0


class Findings(NamedTuple):
    """What was found in one image and its annotations."""

    defects: list[Defect]
    """Kind and text of each."""
    header: Header
    size: tuple[int, int]
    """Height and width that its masks are drawn at, in pixels; 0 where that is not known."""
    objects: NDArray[np.float64]
    """float64 [N, 4]: category id, width and height of the box, pixels of the mask, of each usable
    object.
    """


def read_header(
    images: Path, dataset: CocoDataset, i: int, retries: Retries, *, deep: bool = False
) -> Header:
    """An image file's header and end; ``deep`` decodes it.

    Raises:
        DriveLostError: if Drive went away.
    """
    try:
        path, by_base_name = dataset.find_image(images, i)
    except DriveLostError:
        raise
    except ColabUtilsError:
        return Header(
            [
                (
                    "unsafe file_name",
                    "leaves the image folder, where no file, or several, have its base name",
                )
            ]
        )
    found = [("found by base name", escape(str(path.relative_to(images))))] if by_base_name else []
    try:
        return _describe(read_file(path, retries), path.suffix.lower(), found, deep=deep)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return Header([("missing image", f"not in {images}")])
    except DriveLostError:
        raise
    except Exception as error:  # Pillow's many readers raise whatever they like on damaged data
        return Header(
            [("truncated image" if "truncated" in str(error) else "bad image", str(error))]
        )


@guard_pillow()
def _describe(data: bytes, suffix: str, found: list[Defect], *, deep: bool) -> Header:
    """The header of an image file with this content, and what its name ends in."""
    from PIL import Image

    if not data:
        return Header([("empty file", "0 bytes")])
    try:
        opened = open_lazily(io.BytesIO(data))
    except ColabUtilsError:
        opened = open_image(data)  # a PNG's metadata may be damaged
    kind, (width, height), notes = opened.format or "", opened.size, [*found]
    # cut short, or much of something else after its end: some cameras write zeros or a preview
    # there
    if deep or _ENDS.get(kind, b"") not in data[-4096:]:
        to_rgb(open_image(data))
    to_rgb(Image.new(opened.mode, (1, 1)))  # refuses what does not fit 8 bits
    belongs = Image.registered_extensions().get(suffix, kind)
    if belongs != kind and {belongs, kind} != {"JPEG", "MPO"}:
        notes.append(("wrong extension", f"holds {kind}"))
    if "16" in f"{opened.mode} {[tile[3] for tile in getattr(opened, 'tile', ())]}":
        notes.append(("16-bit image", opened.mode))
    if opened.mode in _MODES:
        notes.append((_MODES[opened.mode], opened.mode))
    elif opened.mode in ("LA", "RGBA", "PA") or "transparency" in opened.info:
        notes.append(("image with alpha", opened.mode))
    orientation = read_orientation(opened)
    if kind != "MPO":
        with suppress(EOFError):
            opened.seek(1)
            notes.append(("animated image", ""))
    return Header(notes, (height, width), orientation, len(data))


def check_image(dataset: CocoDataset, i: int, header: Header) -> Findings:
    """Compare an image's annotations with its file, and their boxes with their masks.

    Example:
        >>> from colab_utils.data.coco import read_coco
        >>> check_image(read_coco("annotations.json"), 0, Header([], size=(480, 640))).defects  # doctest: +SKIP
        []
    """
    name = escape(dataset.file_name(i))
    size = tuple(dataset.sizes[i].tolist())
    compared = compare_sizes(size, header) if all(header.size) else []
    found = [*header.defects, *compared]
    if not all(size):
        size = header.size
    elif compared and compared[0][0] == "size mismatch":
        size = 0, 0  # whose pixels the masks are is not known
    if all(size) and (scale := find_scale(*size)) > 1:
        found.append(("enlarged image", f"{scale**2:.1f} times the pixels"))
    annotations, faults = dataset.read_annotations(i)
    for number, reason in faults:
        kind = "unknown category" if reason.endswith("of no category") else "bad annotation"
        found.append((kind, f"annotation {number}: {reason}"))
    if not annotations and not faults:
        found.append(("image without objects", ""))
    objects = list[tuple[float, ...]]()
    seen = set[tuple[int, str]]()
    for one in annotations:
        wrong, pixels = check_object(one, size) if all(size) else ([], 0)
        if pixels:
            key = one["category_id"], repr(one["segmentation"])
            if key in seen:
                wrong.append(("repeated annotation", ""))
            elif not one["iscrowd"]:
                objects.append((one["category_id"], *one["bbox"][2:], pixels))
            seen.add(key)
        found += [
            (kind, f"annotation {one['id']}: {text}".removesuffix(": ")) for kind, text in wrong
        ]
    defects = [(kind, f"{name}: {text}".removesuffix(": ")) for kind, text in found]
    return Findings(defects, header, size, np.array(objects, np.float64).reshape(-1, 4))


def compare_sizes(size: tuple[int, ...], header: Header) -> list[Defect]:
    """Whether the annotations are of the photo as its file has it, or as its EXIF orientation turns
    it.
    """
    tag = header.orientation
    (height, width) = header.size
    upright = header.size[::-1] if tag > 4 else header.size
    if all(size) and size not in (header.size, upright):
        return [
            (
                "size mismatch",
                f"annotations say {size[1]} x {size[0]}, the file has {width} x {height}",
            )
        ]
    if tag == 1:
        return []
    if not all(size) or header.size == upright:
        return [("EXIF rotation, unclear", f"orientation {tag}, {width} x {height}")]
    kind = (
        "EXIF rotation, annotated upright"
        if size == upright
        else "EXIF rotation, annotated as stored"
    )
    return [(kind, f"orientation {tag}")]
