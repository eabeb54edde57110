"""Repair the annotations of a dataset, in a copy of its JSON.

A value is mended if the right value is known. Otherwise the object is left out together with its
image.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np

from colab_utils.data.checks import (
    DatasetReport,
    Problem,
    check_dataset,
    inspect_images,
)
from colab_utils.data.coco import CocoDataset, read_coco, write_coco
from colab_utils.data.fields import read_field
from colab_utils.data.image_checks import Header
from colab_utils.data.masks import encode_segmentation, measure_mask
from colab_utils.data.object_checks import APART, NEAR, check_object, compare_box, is_normalised
from colab_utils.data.orientation import Exif
from colab_utils.data.segmentations import (
    OUTLINE_NUMBERS,
    Entry,
    count_numbers,
    identify_segmentation,
    read_polygons,
)
from colab_utils.data.sizes import Size
from colab_utils.drive import explain_write
from colab_utils.errors import DAMAGE, ColabUtilsError, escape
from colab_utils.files import require_new
from colab_utils.places import PlaceLike, open_place, require_local_path

# Why an object has no mask. The key is the count of numbers in its segmentation.
_REASONS = {0: "object without mask", 4: "a box or a line, not an outline"}
# Swapped sides are mended if at least this share of the images has them. Square images do not
# count.
_NEARLY_ALL = 0.9


class _LostObjectError(Exception):
    """Signal an object without a usable mask, so that its image is left out.

    If only the object were left out, the model would learn that it is background.
    """


def repair_annotations(
    images: PlaceLike,
    annotations: PlaceLike,
    *,
    output: str | Path,
    crowds: Literal["leave", "objects"] = "leave",
    deep: bool = False,
    exif: Exif = "auto",
) -> DatasetReport:
    """Write a repaired copy of the annotations. The original file is not changed.

    These values are mended:

    - Numbers that are written as text, and "True" and "False" in ``iscrowd``.
    - Ids of annotations, if any of them repeats: then all are counted anew.
    - Outlines and RLE that tools write in their own way. A segmentation that holds only the four
      numbers of a box is not made into an outline.
    - Boxes and areas, from the mask.
    - Sizes and names of images, from the files.
    - Width and height, if nearly all images have them swapped.

    What cannot be mended is left out. If such an object has no area, only the object is left out.
    If it has an area, its image is left out, too. Otherwise the model would learn that the object
    is background. For each image, the copy has only id, name and size. Repairing a repaired file
    changes nothing.

    Args:
        images: the image folder; its path, or a URL that fsspec knows.
        annotations: the COCO instance JSON; its path, or a URL that fsspec knows.
        output: the file to write, which must not exist.
        crowds: "objects" makes objects of crowds (``iscrowd`` 1). CVAT exports brush masks as
            crowds, and V7 Darwin exports objects with holes as crowds. "leave" keeps all crowds.
        deep: decode each image completely, as in :func:`check_dataset`. Damaged images are left
            out.
        exif: as in :func:`check_dataset`.

    Returns:
        The report of :func:`check_dataset` on the new file, with its ``repairs``.

    Raises:
        ColabUtilsError: as :func:`check_dataset` does; or if ``output`` exists, or if no object
            would be left.
    """
    folder = open_place(images)
    output = require_new(require_local_path(output))
    dataset = read_coco(annotations)
    headers = [findings.header for findings in inspect_images(folder, dataset, deep=deep)]
    done = defaultdict[str, list[str]](list)
    gone = Counter[str]()
    for i in _find_swapped(dataset, headers):
        dataset.sizes[i] = headers[i].size
        done["width and height swapped"].append(escape(dataset.file_name(i)))
    for number in dataset.unknown_images.tolist():
        done["annotation without an image left out"].append(f"annotation {number}")
    entries: list[Entry] = []
    kept: list[bytes] = []
    has_objects = False
    boxes = 0
    apart = 0
    numbers = count(1) if len(np.unique(dataset.ids)) < len(dataset.ids) else None
    for image in _mend_images(dataset, headers, done, gone, as_objects=crowds == "objects"):
        entries.append(image.entry)
        kept += image.list_texts(numbers)
        has_objects = has_objects or image.has_objects
        boxes += image.boxes
        apart += image.apart
        for change in image.changes:
            done[change].append(image.name)
    if 4 * apart > boxes:
        raise ColabUtilsError(
            f"{apart:,} of {boxes:,} boxes lie elsewhere than their outlines, so {annotations} may "
            "have outlines in another order than COCO's: polygons with x before y, RLE with runs "
            "along columns. Export the outlines again. If they are right, remove the boxes."
        )
    if not has_objects:
        reasons = [f"{len(done[kind]):,} x {kind}" for kind in gone]
        if kept:
            reasons.append(f"{len(kept):,} x crowd")
        raise ColabUtilsError(
            f"{annotations} has no object to keep: no object has both a usable mask and an "
            f"image in {folder} ({', '.join(reasons)}). Name the right image folder, mend the "
            "defects that `check` reports, or use --crowds objects."
        )
    with explain_write(output.parent):
        write_coco(output, entries, kept, dataset.categories)
    report = check_dataset(folder, output, deep=deep, exif=exif)
    return replace(report, repairs=tuple(_describe_repair(kind, done[kind], gone) for kind in done))


def _describe_repair(kind: str, names: list[str], gone: Counter[str]) -> Problem:
    effect = "mended"
    if kind in gone:
        effect = (
            f"images left out whole, with {gone[kind]:,} objects, so that no object becomes "
            "background"
        )
    return Problem(kind, len(names), tuple(names[:5]), effect)


def _group_entries(dataset: CocoDataset) -> list[tuple[list[int], bool]]:
    """Group the entries of images by file name: some tools write an entry for each object.

    Returns:
        The indices of each group, and whether its ids belong to no other file name.
    """
    groups = defaultdict[str, list[int]](list)
    names = defaultdict[int, set[str]](set)
    numbers = dataset.image_ids.tolist()
    for i, number in enumerate(numbers):
        groups[dataset.file_name(i)].append(i)
        names[number].add(dataset.file_name(i))
    return [(group, all(len(names[numbers[i]]) == 1 for i in group)) for group in groups.values()]


def _mend_images(
    dataset: CocoDataset,
    headers: Sequence[Header],
    done: defaultdict[str, list[str]],
    gone: Counter[str],
    *,
    as_objects: bool,
) -> Iterator["_MendedImage"]:
    """Yield each image that is kept. Add the names of the others to ``done``, by the reason, and
    count their objects in ``gone``.
    """
    for group, is_alone in _group_entries(dataset):
        try:
            if not is_alone:
                raise _LostObjectError("id of several images")
            yield _MendedImage(dataset, group, headers[group[0]], as_objects=as_objects)
        except (_LostObjectError, RecursionError) as error:
            kind = "bad annotation" if isinstance(error, RecursionError) else str(error)
            done[kind].append(escape(dataset.file_name(group[0])))
            gone[kind] += sum(int(dataset.first[i + 1] - dataset.first[i]) for i in group)


class _MendedImage:
    """Mend the entry of one image by its file, and its annotations by their masks.

    Raises:
        _LostObjectError: if the image has to be left out.
    """

    def __init__(
        self, dataset: CocoDataset, group: list[int], header: Header, *, as_objects: bool
    ) -> None:
        self.name = escape(dataset.file_name(group[0]))
        self.changes = ["entries of one image joined"] * (len(group) - 1)
        self.entry = dataset.image(group[0])
        self._size = self._mend_entry(dataset, group, header)
        self._as_objects = as_objects
        self.boxes = 0
        """How many annotations have a box."""
        self.apart = 0
        """How many of these boxes lie elsewhere than their masks."""
        self.annotations: dict[str, Entry] = {}
        """Annotations by category and outline. Of equal ones, only the first is kept."""
        categories = {category["id"] for category in dataset.categories}
        for i in group:
            for annotation in dataset.read_entries(i):
                if _try_field(annotation, "category_id") not in categories:
                    raise _LostObjectError("unknown category")
                self._add(annotation)

    @property
    def has_objects(self) -> bool:
        """Return whether any annotation is no crowd."""
        return any(not annotation["iscrowd"] for annotation in self.annotations.values())

    def list_texts(self, numbers: Iterator[int] | None) -> list[bytes]:
        """Return the JSON of each annotation. With ``numbers``, these are the new ids."""
        texts = []
        for annotation in self.annotations.values():
            annotation["image_id"] = self.entry["id"]
            if numbers is not None:
                annotation["id"] = next(numbers)
                self.changes.append("ids counted anew, because some repeat")
            texts.append(json.dumps(annotation).encode())
        return texts

    def _mend_entry(self, dataset: CocoDataset, group: list[int], header: Header) -> Size:
        """Mend the image's entry by its file. Return the height and width of its masks."""
        size = self.entry["height"], self.entry["width"]
        if not all(header.size):
            raise _LostObjectError(header.defects[0][0])
        moved = dict(header.defects).get("found by base name")
        if moved:
            # A backslash comes from `escape`: the name has characters that we write into no JSON.
            if "\\" in moved:
                raise _LostObjectError("unsafe file_name")
            self.entry["file_name"] = moved
            self.changes.append("name from the folder")
        is_from_file = False
        if not all(size):
            size = header.size
            # If EXIF turns the image, no size is added, because nothing shows whether the
            # annotations belong to the image as stored or as turned. While the size is missing,
            # check warns of this. With a size, it might not.
            is_from_file = header.orientation == 1
        elif header.compare(size) == "misfit":
            # The file's size is right only if the masks fit it and do not fit the entry's size.
            if _fit(dataset, group, size) or not _fit(dataset, group, header.size):
                raise _LostObjectError("size mismatch")
            size = header.size
            is_from_file = True
        if is_from_file:
            self.entry["height"], self.entry["width"] = size
            self.changes.append("size from the file")
        if len(np.unique(dataset.sizes[group], axis=0)) > 1:
            raise _LostObjectError("size mismatch")
        return size

    def _add(self, entry: Entry) -> None:
        """Mend an annotation by its mask, and add it.

        It is left out if it has no area, or the same category and outline as another one.

        Raises:
            _LostObjectError: if it has an area, but no usable mask.
        """
        values = self._read_values(entry)
        outline = entry.get("segmentation")
        try:
            values["segmentation"] = _mend_outline(outline, self._size)
            tight, pixels = measure_mask(encode_segmentation(values["segmentation"], *self._size))
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
        self._mend_box(values, tight)
        area = values["area"]
        # A crowd whose ``area`` is 0 may be an object. Only the user knows, and says so by `crowds`
        # (an argument). The 0 stays, so that a check still finds such a crowd.
        is_unclear = values["iscrowd"] and area == 0
        if not is_unclear and _is_of_other_units(area, values["bbox"], pixels):
            values["area"] = float(pixels)
            self.changes.append("area from the mask")
        if values["id"] is None:
            del values["id"]
            if entry.pop("id", None) is not None:
                self.changes.append("id left out (not a number)")
        key = repr((values["category_id"], values["segmentation"]))
        if key in self.annotations:
            self.changes.append("repeated annotation left out")
        else:
            self.annotations[key] = entry | values

    def _mend_box(self, values: Entry, tight: list[float]) -> None:
        """Take the box of the mask, ``tight``, if an annotation's own box disagrees with it."""
        box = values["bbox"]
        if box:
            self.boxes += 1
            kinds = dict(compare_box(box, tight, *self._size))
            if not kinds:
                return
            self.apart += APART in kinds and not is_normalised(box)
        values["bbox"] = tight
        self.changes.append("box from the mask")

    def _read_values(self, entry: Entry) -> Entry:
        """Return the numeric fields of an annotation, as COCO has them.

        Raises:
            _LostObjectError: if ``iscrowd`` cannot be read.
        """
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


def _find_swapped(dataset: CocoDataset, headers: Sequence[Header]) -> list[int]:
    """Return the indices of the images whose entries have width and height swapped.

    The list is empty if only some images have swapped sides. It is also empty if the outlines of an
    image fit only the size in its entry. Then the file was turned, not the entry, for example
    because its EXIF orientation was lost. Other files may have been turned, too, and nothing shows
    which.
    """
    swapped = []
    total = 0
    for i, header in enumerate(headers):
        size = tuple(dataset.sizes[i].tolist())
        total += header.size != header.size[::-1]
        if size == header.size[::-1] and header.compare(size) == "misfit":
            swapped.append(i)
            if _fit(dataset, [i], size) and not _fit(dataset, [i], header.size):
                return []
    return swapped if len(swapped) >= _NEARLY_ALL * total else []


def _fit(dataset: CocoDataset, group: list[int], size: Size) -> bool:
    """Return whether all polygons lie in an image of this size, and all RLE is made for it."""
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
    """Return whether an area is missing, or fits neither the box nor the mask.

    Such an area may be a share of the image, for example.
    """
    if area is None or area <= 0:
        return True
    in_box = area / (box[2] * box[3])
    in_mask = area / pixels
    return (in_box > 1 and in_mask > 1.1) or (in_box < 0.1 and in_mask < 0.5)


def _try_field(entry: Entry, name: str) -> Any:
    try:
        return read_field(entry, name)
    except DAMAGE:
        return None


def _mend_outline(outline: Any, size: Size) -> Any:
    """Return a segmentation as COCO has it: a list of polygons in pixels, or RLE.

    Raises:
        ColabUtilsError: if the segmentation cannot be drawn.
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
