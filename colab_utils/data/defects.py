"""What is wrong with one image: its file by header and end, its annotations by their boxes and masks."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.coco import CocoDataset
from colab_utils.data.decoding import find_jpeg_damage, open_image, open_lazily, read_orientation, to_rgb
from colab_utils.data.masks import MaskEncoder, measure_mask, read_polygons
from colab_utils.drive import DriveLostError, Retries, guard_drive, open_file
from colab_utils.errors import ColabUtilsError, escape

__all__ = [
    "HARMLESS", "MODEL_SIZES", "NEAR", "Findings", "Header", "check_image", "compare_box", "compare_sizes",
    "find_scale", "is_normalised", "read_header",
]  # fmt: skip

MODEL_SIZES = (800, 1333)
"""What Mask R-CNN resizes an image to by default, in pixels: the shorter side, and the limit of the longer one."""

_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}
_MODES = {
    "CMYK": "CMYK image", "L": "grey image", "1": "grey image", "LA": "image with alpha", "RGBA": "image with alpha",
    "PA": "image with alpha",
}  # fmt: skip
NEAR = 2
"""Pixels that boxes, masks and images may differ by."""
HARMLESS = ("box beyond the image", "tiny object")
"""Kinds of `compare_box` that leave a box as it is."""


class Header(NamedTuple):
    """An image file, without its pixels."""

    fault: tuple[str, str] | None = None
    """Kind and text of what makes the file unusable."""
    notes: tuple[tuple[str, str], ...] = ()
    """Kind and text of what is harmless."""
    size: tuple[int, int] = (0, 0)
    """Height and width as stored, in pixels; 0 where the file is unusable."""
    orientation: int = 1
    """By EXIF, 1 to 8."""
    bytes: int = 0


class Findings(NamedTuple):
    """What was found in one image and its annotations."""

    defects: list[tuple[str, str]]
    """Kind and text of each."""
    header: Header
    size: tuple[int, int]
    """Height and width that its masks are drawn at, in pixels; 0 where that is not known."""
    objects: NDArray[np.float64]
    """float64 [N, 4]: category id, width and height of the box, pixels of the mask, of each usable object."""


def read_header(images: Path, dataset: CocoDataset, i: int, retries: Retries, *, deep: bool = False) -> Header:
    """An image file's header and end; ``deep`` decodes it.

    Raises:
        DriveLostError: if Drive went away.
    """
    try:
        path, by_base_name = dataset.find_image(images, i)
    except DriveLostError:
        raise
    except ColabUtilsError:
        return Header(("unsafe file_name", "leaves the image folder, where no file, or several, have its base name"))

    def read() -> Header:
        with guard_drive(path), open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            return _describe(file, path, size, deep) if size else Header(("empty file", "0 bytes"))

    try:
        header = retries.run(read)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return Header(("missing image", f"not in {images}"))
    except DriveLostError:
        raise
    except Exception as error:  # Pillow's many readers raise whatever they like on damaged data
        return Header(("truncated image" if "truncated" in str(error) else "bad image", str(error)))
    if by_base_name:
        header = header._replace(notes=(*header.notes, ("found by base name", escape(str(path.relative_to(images))))))
    return header


def _describe(file: Any, path: Path, size: int, deep: bool) -> Header:
    from PIL import Image

    try:
        opened = open_lazily(file)
    except ColabUtilsError:
        if _read_again(file, 4) != b"\x89PNG":
            raise
        opened = open_image(_read_again(file))  # its metadata may be damaged
    kind, notes, (width, height) = opened.format or "", list[tuple[str, str]](), opened.size
    if deep or not _ends_with(file, _ENDS.get(kind, b"")):  # cut short, or much of something else after its end
        to_rgb(open_image(data := _read_again(file)))
        if deep and kind in ("JPEG", "MPO") and (damage := find_jpeg_damage(data)):
            raise ColabUtilsError(f"damaged: {damage}")
    to_rgb(Image.new(opened.mode, (1, 1)))  # refuses what does not fit 8 bits
    belongs = Image.registered_extensions().get(path.suffix.lower(), kind)
    if belongs != kind and {belongs, kind} != {"JPEG", "MPO"}:
        notes.append(("wrong extension", f"holds {kind}"))
    if "16" in f"{opened.mode} {[tile[3] for tile in getattr(opened, 'tile', ())]}":
        notes.append(("16-bit image", opened.mode))
    if note := _MODES.get(opened.mode, "image with alpha" if "transparency" in opened.info else ""):
        notes.append((note, opened.mode))
    orientation = read_orientation(opened)
    if kind != "MPO":
        with suppress(EOFError):
            opened.seek(1)
            notes.append(("animated image", ""))
    return Header(None, tuple(notes), (height, width), orientation, size)


def _read_again(file: Any, size: int = -1) -> bytes:
    file.seek(0)
    return bytes(file.read(size))


def _ends_with(file: Any, mark: bytes) -> bool:
    """Whether an image has its end marker; some cameras write zeros or a preview after it."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
    return mark in file.read()


def check_image(dataset: CocoDataset, i: int, header: Header) -> Findings:
    """Compare an image's annotations with its file, and their boxes with their masks.

    Example:
        >>> from colab_utils.data.coco import read_coco
        >>> check_image(read_coco("annotations.json"), 0, Header(size=(480, 640))).defects  # doctest: +SKIP
        []
    """
    name, size = escape(dataset.file_name(i)), tuple(dataset.sizes[i].tolist())
    found = [*filter(None, [header.fault]), *header.notes]
    compared = compare_sizes(size, header) if all(header.size) else []
    found += compared
    if not all(size):
        size = header.size
    elif compared and compared[0][0] == "size mismatch":
        size = 0, 0  # whose pixels the masks are is not known
    if all(size) and (scale := find_scale(*size)) > 1:
        found.append(("enlarged image", f"{scale**2:.1f} times the pixels"))
    (annotations, faults), masks = dataset.read_annotations(i), MaskEncoder(*size)
    for number, reason in faults:
        kind = "unknown category" if reason.endswith("of no category") else "bad annotation"
        found.append((kind, f"annotation {number}: {reason}"))
    if not annotations and not faults:
        found.append(("image without objects", ""))
    objects, seen = list[tuple[float, ...]](), set[tuple[int, str]]()
    for one in annotations:
        wrong, pixels = _check_object(one, masks) if all(size) else ([], 0)
        key = one["category_id"], repr(one["segmentation"])
        if pixels and key in seen:
            wrong.append(("repeated annotation", ""))
        elif pixels and not one["iscrowd"]:
            objects.append((one["category_id"], *one["bbox"][2:], pixels))
        if pixels:
            seen.add(key)
        found += [(kind, f"annotation {one['id']}: {text}".removesuffix(": ")) for kind, text in wrong]
    defects = [(kind, f"{name}: {text}".removesuffix(": ")) for kind, text in found]
    return Findings(defects, header, size, np.array(objects, np.float64).reshape(-1, 4))


def find_scale(height: Any, width: Any) -> Any:
    """What Mask R-CNN multiplies the sides of an image with, by torchvision's defaults; arrays are fine, too.

    Example:
        >>> round(float(find_scale(480, 640)), 3)
        1.667
    """
    shorter, longer = MODEL_SIZES
    return np.minimum(shorter / np.minimum(height, width), longer / np.maximum(height, width))


def compare_sizes(size: tuple[int, ...], header: Header) -> list[tuple[str, str]]:
    """Whether the annotations are of the photo as its file has it, or as its EXIF orientation turns it."""
    (height, width), tag = header.size, header.orientation
    upright = header.size[::-1] if tag > 4 else header.size
    if all(size) and size not in (header.size, upright):
        return [("size mismatch", f"annotations say {size[1]} x {size[0]}, the file has {width} x {height}")]
    if tag == 1:
        return []
    if not all(size) or header.size == upright:
        return [("EXIF rotation, unclear", f"orientation {tag}, {width} x {height}")]
    kind = "EXIF rotation, annotated upright" if size == upright else "EXIF rotation, annotated as stored"
    return [(kind, f"orientation {tag}")]


def _check_object(one: dict[str, Any], masks: MaskEncoder) -> tuple[list[tuple[str, str]], int]:
    """The defects of an annotation, and the pixels of its mask; 0 where it cannot be trained on."""
    if not one["segmentation"]:
        return [("object without mask", "")], 0
    try:
        mask = masks.encode(one["segmentation"])
    except ColabUtilsError as error:
        return [("bad mask", str(error))], 0
    tight, pixels = measure_mask(mask)
    found = _check_polygons(one["segmentation"], *masks.size, pixels)
    box_found = compare_box(one["bbox"], tight, *masks.size)
    if found and found[0][0] == "normalised polygon":
        return found, 0
    found += box_found
    if pixels and one["area"] <= 0:
        found.append(("area 0", f"the mask has {pixels:,} pixels"))
    return found, pixels if not box_found or box_found[0][0] in HARMLESS else 0


def _check_polygons(segmentation: Any, height: int, width: int, pixels: int) -> list[tuple[str, str]]:
    if isinstance(segmentation, dict):
        return []
    polygons = read_polygons(segmentation)
    everywhere = np.concatenate(polygons).reshape(-1, 2)
    if is_normalised(everywhere):
        return [("normalised polygon", "all of its numbers lie in 0 to 1")]
    beyond = max(*-everywhere.min(0), *(everywhere.max(0) - (width, height)))
    if beyond > NEAR:
        return [("polygon beyond the image", f"by {beyond:,.0f} pixels")]
    x, y = polygons[0].reshape(-1, 2).T
    enclosed = abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2
    # the two loops of an eight have opposite signs; drawing fills both
    crossing = len(polygons) == 1 and pixels >= 16 and enclosed < pixels / 2
    return [("self-crossing polygon", f"encloses {enclosed:,.0f} pixels, fills {pixels:,}")] if crossing else []


def is_normalised(numbers: Any) -> bool:
    """Whether a polygon is given in shares of the image, 0 to 1, not in pixels; one of 0 and 1 alone is a pixel.

    Example:
        >>> is_normalised([0.1, 0.1, 0.9, 0.1, 0.9, 0.5]), is_normalised([0, 0, 1, 0, 1, 1])
        (True, False)
    """
    return bool(np.min(numbers) >= 0 and np.max(numbers) <= 1 and not np.isin(numbers, (0, 1)).all())


def compare_box(box: list[float], tight: list[float], height: int, width: int) -> list[tuple[str, str]]:
    """A box against the image and the tight box of its mask, each x, y, width, height."""
    x, y, w, h = box
    if w < 0 or h < 0:
        return [("inverted box", f"bbox {box}")]
    if not (w > 0 and h > 0):
        return [("box without area", f"bbox {box}")]
    if min(x + w, width) <= max(x, 0) or min(y + h, height) <= max(y, 0):
        return [("box outside the image", f"bbox {box}")]
    if not (tight[2] and tight[3]):
        return [("empty mask" if w * h >= NEAR**2 else "tiny object", f"bbox {box}")]
    edges, others = (np.array([a, b, a + c, b + d]) for a, b, c, d in (box, tight))
    edges = np.clip(edges, 0, [width, height] * 2)  # as training cuts it
    if _measure_overlap(edges, others) < 0.5 and np.abs(edges - others).max() > NEAR:
        if _measure_overlap(np.array(box), others) >= 0.5:
            return [("box of corners", f"bbox {box} looks like x0, y0, x1, y1")]
        return [("mask and box disagree", f"bbox {box}, the mask lies in {tight}")]
    if min(w, h) * find_scale(height, width) < 1:
        return [("tiny object", f"{w:.0f} x {h:.0f} pixels of {width} x {height}")]
    if min(x, y) < -NEAR or x + w > width + NEAR or y + h > height + NEAR:
        return [("box beyond the image", f"bbox {box}")]
    return []


def _measure_overlap(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Intersection over union of two boxes x0, y0, x1, y1."""
    inside = np.prod(np.maximum(0, np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2])))
    return float(inside / max(1e-9, np.prod(a[2:] - a[:2]) + np.prod(b[2:] - b[:2]) - inside))
