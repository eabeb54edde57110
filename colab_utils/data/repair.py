"""Repair annotations in a copy: mended where the right value is known, else left out with the
whole image.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from colab_utils.data.checks import (
    DatasetReport,
    Problem,
    check_dataset,
    find_shared,
    inspect_images,
)
from colab_utils.data.coco import CocoDataset, read_coco, write_coco
from colab_utils.data.fields import FAULTS, read_field
from colab_utils.data.image_checks import Header, compare_sizes
from colab_utils.data.masks import encode_segmentation, measure_mask
from colab_utils.data.object_checks import NEAR, check_object, compare_outline, is_normalised
from colab_utils.data.segmentations import (
    OUTLINE_NUMBERS,
    count_numbers,
    identify_segmentation,
    read_polygons,
)
from colab_utils.drive import explain_write
from colab_utils.errors import ColabUtilsError, escape
from colab_utils.files import require_new
from colab_utils.places import Place, open_place
from colab_utils.require import require_local_path

# Why an object has no mask, by the numbers of its segmentation.
_REASONS = {0: "object without mask", 4: "a box or a line, not an outline"}
# The share of the images that are not square whose sides are swapped where all are.
_NEARLY_ALL = 0.9


class _LostObjectError(Exception):
    """Raise for an object whose mask cannot be had: without it, its image would teach that it is
    background.
    """


def repair_annotations(
    images: str | Place,
    annotations: str | Place,
    *,
    output: str | Path,
    crowds: Literal["leave", "objects"] = "leave",
    deep: bool = False,
    validation: tuple[str | Place, str | Place] | None = None,
) -> DatasetReport:
    """Write a copy of the annotations, mended where the right value is known; the original stays as
    it is.

    Numbers from text, outlines and RLE that tools write in their own way, boxes and areas from the
    mask, sizes and names from the files, sides that nearly all images have swapped. A box is not
    made an outline. What cannot be mended is left out: an object without area alone, any other
    together with its image, because the object would become background. Repairing what was
    repaired changes nothing. Of the images, the copy has id, name and size.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        output: the file to write, which must not exist.
        crowds: "objects" takes crowds (``iscrowd`` 1) as objects: CVAT's brush masks are none, nor
            are V7 Darwin's objects with holes.
        deep: decode each image, as in :func:`check_dataset`: damaged ones are left out.
        validation: image folder and JSON of the validation set: its pictures are left out.

    Returns:
        what :func:`check_dataset` finds with the new file, and the ``repairs``.

    Raises:
        ColabUtilsError: as :func:`check_dataset`; or if ``output`` exists, or no object would be
            left.
    """
    folder = open_place(images)
    output = require_new(require_local_path(output))
    dataset = read_coco(annotations)
    headers = _read_headers(folder, dataset, deep, validation)
    done = defaultdict[str, list[str]](list)
    for i in _find_swapped(dataset, headers):
        dataset.sizes[i] = headers[i].size
        done["width and height swapped"].append(escape(dataset.file_name(i)))
    for number in dataset.unknown_images.tolist():
        done["annotation of no image left out"].append(f"annotation {number}")
    gone = Counter[str]()
    entries: list[dict[str, Any]] = []
    kept: list[bytes] = []
    has_objects = False
    for group, is_alone in _group_entries(dataset):
        name = escape(dataset.file_name(group[0]))
        try:
            if not is_alone:
                raise _LostObjectError("id of several images")
            image = _MendedImage(dataset, group, headers[group[0]], as_objects=crowds == "objects")
        except (_LostObjectError, RecursionError) as error:
            kind = "bad annotation" if isinstance(error, RecursionError) else str(error)
            done[kind].append(name)
            gone[kind] += sum(int(dataset.first[i + 1] - dataset.first[i]) for i in group)
            continue
        entries.append(image.entry)
        for annotation in image.annotations.values():
            kept.append(json.dumps(annotation | {"image_id": image.entry["id"]}).encode())
            has_objects = has_objects or not annotation["iscrowd"]
        for change in image.changes:
            done[change].append(name)
    if not has_objects:
        reasons = [f"{len(done[kind]):,} x {kind}" for kind in gone]
        if kept:
            reasons.append(f"{len(kept):,} x crowd")
        raise ColabUtilsError(
            f"{annotations} has no object to keep, with an image in {folder} and masks "
            f"({', '.join(reasons)}). Name the right image folder, mend what is named as "
            "`check` says, or use --crowds objects."
        )
    with explain_write(output.parent):
        write_coco(output, entries, kept, dataset.categories)
    report = check_dataset(folder, output, deep=deep, validation=validation)
    return replace(report, repairs=tuple(_describe_repair(kind, done[kind], gone) for kind in done))


def _describe_repair(kind: str, names: list[str], gone: Counter[str]) -> Problem:
    effect = "mended"
    if kind in gone:
        effect = (
            f"images left out whole, with {gone[kind]:,} objects, so that none becomes background"
        )
    return Problem(kind, len(names), tuple(names[:5]), effect)


def _group_entries(dataset: CocoDataset) -> list[tuple[list[int], bool]]:
    """Return the images by their name, as some tools write one for each object; and whether no
    other has an id of theirs.
    """
    groups = defaultdict[str, list[int]](list)
    names = defaultdict[int, set[str]](set)
    numbers = dataset.image_ids.tolist()
    for i, number in enumerate(numbers):
        groups[dataset.file_name(i)].append(i)
        names[number].add(dataset.file_name(i))
    return [(group, all(len(names[numbers[i]]) == 1 for i in group)) for group in groups.values()]


class _MendedImage:
    """Hold an image and its annotations, mended by its file and by its masks.

    Raises:
        _LostObjectError: the image is to be left out.
    """

    def __init__(
        self, dataset: CocoDataset, group: list[int], header: Header, *, as_objects: bool
    ) -> None:
        self.changes = ["entries of one image joined"] * (len(group) - 1)
        self.entry = dataset.image(group[0])
        self._size = self._mend_entry(dataset, group, header)
        self._as_objects = as_objects
        self.annotations: dict[str, dict[str, Any]] = {}
        """By class and outline: of those that are equal, the first."""
        categories = {category["id"] for category in dataset.categories}
        for i in group:
            for annotation in dataset.read_entries(i):
                if _try_field(annotation, "category_id") not in categories:
                    raise _LostObjectError("unknown category")
                self._add(annotation)

    def _mend_entry(
        self, dataset: CocoDataset, group: list[int], header: Header
    ) -> tuple[int, int]:
        """Mend the image's entry by its file; return height and width of its masks."""
        size = self.entry["height"], self.entry["width"]
        if not all(header.size):
            raise _LostObjectError(header.defects[0][0])
        moved = dict(header.defects).get("found by base name")
        if moved:
            # It was escaped: it has characters that no JSON of ours names.
            if "\\" in moved:
                raise _LostObjectError("unsafe file_name")
            self.entry["file_name"] = moved
            self.changes.append("name from the folder")
        if not all(size):
            size = header.size
        elif "size mismatch" in dict(compare_sizes(size, header)):
            # Nothing says that the file is right.
            if _fit(dataset, group, size) or not _fit(dataset, group, header.size):
                raise _LostObjectError("size mismatch")
            size = header.size
            self.entry["height"], self.entry["width"] = size
            self.changes.append("size from the file")
        if len(np.unique(dataset.sizes[group], axis=0)) > 1:
            raise _LostObjectError("size mismatch")
        return size

    def _add(self, entry: dict[str, Any]) -> None:
        """Add an annotation with all that its mask tells; not one without an area, nor one of the
        same class and outline as another.

        Raises:
            _LostObjectError: it has an area, and no usable mask.
        """
        values = self._read_values(entry)
        outline = entry.get("segmentation")
        try:
            values["segmentation"] = _mend_outline(outline, self._size)
            rle = encode_segmentation(values["segmentation"], *self._size)
            tight, pixels = measure_mask(rle)
        except ColabUtilsError:
            tight = []
            pixels = 0
        if not pixels:
            is_drawn = not tight and count_numbers(outline) >= OUTLINE_NUMBERS
            if (is_drawn or _has_area(values["bbox"])) and not values["iscrowd"]:
                reason = _REASONS.get(count_numbers(outline), "object without a whole mask")
                raise _LostObjectError(reason)
            self.changes.append("object without area left out")
            return
        if values["segmentation"] != outline:
            self.changes.append("outline written as COCO has it")
        self._mend_box(values, rle)
        area = values["area"]
        # A crowd without area may well be an object: only `crowds` tells.
        is_unclear = values["iscrowd"] and area == 0
        if not is_unclear and _is_of_other_units(area, values["bbox"], pixels):
            values["area"] = float(pixels)
            self.changes.append("area from the mask")
        if values["id"] is None:
            del values["id"]
            if entry.pop("id", None) is not None:
                self.changes.append("id that is no number left out")
        key = repr((values["category_id"], values["segmentation"]))
        if key in self.annotations:
            self.changes.append("repeated annotation left out")
        else:
            self.annotations[key] = entry | values

    def _mend_box(self, values: dict[str, Any], rle: dict[str, Any]) -> None:
        """Take the box from the mask where they disagree.

        Raises:
            ColabUtilsError: the mask is what is wrong.
        """
        if values["bbox"]:
            defects = dict(compare_outline(values, rle))
            if not defects:
                return
            reading = defects.get("outline in another order")
            if reading:
                raise ColabUtilsError(
                    f"Outlines of {escape(self.entry['file_name'])} are not as COCO has them: one "
                    f"{reading}. Others may be read wrongly without a sign of it. Write all "
                    "outlines again, x and y of each point or RLE column by column, then repair."
                )
        values["bbox"], _ = measure_mask(rle)
        self.changes.append("box from the mask")

    def _read_values(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of an annotation that are numbers, as COCO has them."""
        names = ("id", "category_id", "iscrowd", "bbox", "area")
        values = {name: _try_field(entry, name) for name in names}
        if values["iscrowd"] is None:
            raise _LostObjectError("bad annotation")
        for name, value in values.items():
            if value is not None and entry.get(name) not in (None, value):
                self.changes.append("numbers from text")
                break
        if values["iscrowd"] and self._as_objects:
            values["iscrowd"] = 0
            self.changes.append("crowd taken as an object")
        return values


def _read_headers(
    folder: Place,
    dataset: CocoDataset,
    deep: bool,
    validation: tuple[str | Place, str | Place] | None,
) -> list[Header]:
    """Return the header of each image; those of the validation set, too, are marked as bad."""
    headers = [findings.header for findings in inspect_images(folder, dataset, deep=deep)]
    if validation is not None:
        for i in find_shared(folder, dataset, headers, *validation):
            headers[i] = Header([("image in validation, too", "")])
    return headers


def _find_swapped(dataset: CocoDataset, headers: Sequence[Header]) -> list[int]:
    """Return the images whose annotations have width and height swapped: none where these are few.

    Where outlines of an image fit its annotations' size alone, files were turned instead, as when
    their EXIF orientation was lost: nothing tells then which of the others are right.
    """
    swapped = []
    total = 0
    for i, header in enumerate(headers):
        size = tuple(dataset.sizes[i].tolist())
        total += header.size != header.size[::-1]
        if size == header.size[::-1] and compare_sizes(size, header):
            swapped.append(i)
            if _fit(dataset, [i], size) and not _fit(dataset, [i], header.size):
                return []
    return swapped if len(swapped) >= _NEARLY_ALL * total else []


def _fit(dataset: CocoDataset, group: list[int], size: tuple[int, int]) -> bool:
    """Return whether polygons lie in an image of this size, and RLE is made for it."""
    misfits = {"object without mask", "bad mask", "polygon beyond the image"}
    for i in group:
        for annotation in dataset.read_annotations(i)[0]:
            defects, _ = check_object(annotation, size)
            if not misfits.isdisjoint(dict(defects)):
                return False
    return True


def _has_area(box: list[float] | None) -> bool:
    return box is not None and min(box[2:]) > 0 and box[2] * box[3] >= NEAR**2


def _is_of_other_units(area: float | None, box: list[float], pixels: int) -> bool:
    """Return whether an area fits neither the box nor the mask, as in shares of the image, or where
    it is none.
    """
    if area is None or area <= 0:
        return True
    in_box = area / (box[2] * box[3])
    in_mask = area / pixels
    return (in_box > 1 and in_mask > 1.1) or (in_box < 0.1 and in_mask < 0.5)


def _try_field(entry: dict[str, Any], name: str) -> Any:
    try:
        return read_field(entry, name)
    except FAULTS:
        return None


def _mend_outline(outline: Any, size: tuple[int, int]) -> Any:
    """Return a segmentation as COCO has it: each polygon in a list of its own, in pixels; or RLE.

    Raises:
        ColabUtilsError: it is none that can be drawn.
    """
    form = identify_segmentation(outline)
    if form is not None:
        outline = form[1]
    if not isinstance(outline, list) or not outline:
        return outline
    height, width = size
    polygons = [polygon.tolist() for polygon in read_polygons(outline)]
    if all(is_normalised(polygon) for polygon in polygons):
        sides = (width, height)
        return [[x * sides[n % 2] for n, x in enumerate(polygon)] for polygon in polygons]
    return outline if polygons == outline else polygons
