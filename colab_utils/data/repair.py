"""Repair the annotations of a dataset, in a copy of its JSON.

A value is mended if the right value is known. Otherwise the object is left out together with its
image.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

import numpy as np

from colab_utils.data.checks import DatasetReport, Problem, check_dataset, inspect_images
from colab_utils.data.coco import CocoDataset, read_coco, write_coco
from colab_utils.data.fields import read_sound_fields
from colab_utils.data.image_checks import Header
from colab_utils.data.masks import encode_segmentation, measure_mask
from colab_utils.data.object_checks import (
    APART,
    NEAR,
    check_object,
    compare_box,
    is_area_odd,
    is_normalised,
)
from colab_utils.data.orientation import Exif
from colab_utils.data.segmentations import (
    OUTLINE_NUMBERS,
    Entry,
    count_numbers,
    read_polygons,
)
from colab_utils.data.sizes import Size
from colab_utils.drive import explain_write
from colab_utils.errors import ColabUtilsError, escape
from colab_utils.files import require_new
from colab_utils.places import PlaceLike, open_place, require_local_path

# Swapped sides are mended if at least this share of the images has them. Square images do not
# count.
_NEARLY_ALL = 0.9
# What becomes of the images that are not mended.
_LEFT_OUT = "images left out whole, so that no object becomes background"


class _LostImageError(Exception):
    """Signal an image that is left out, for example because an object has no usable mask.

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
    - Polygons in shares of the image, or whose numbers are text, and flat ones.
    - Boxes and areas, from the mask.
    - Missing sizes, and names, of images, from the files.
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
    # A folder that takes no file is refused now, and not after all images were looked at.
    with explain_write(output.parent), TemporaryFile(dir=output.parent):
        pass
    dataset = read_coco(annotations)
    headers = [findings.header for findings in inspect_images(folder, dataset, deep=deep)]
    repair = _Repair(dataset, headers, as_objects=crowds == "objects")
    for number in dataset.strangers["unknown image"].tolist():
        repair.note("annotation without an image left out", f"annotation {number}")
    entries = list(repair.mend_images())
    objects = repair.objects
    repairs = repair.list_repairs()
    apart = sum(problem.count for problem in repairs if problem.kind == APART)
    if 4 * apart > len(objects):
        raise ColabUtilsError(
            f"{apart:,} of {len(objects):,} boxes lie elsewhere than their outlines, so "
            f"{annotations} may have outlines in another order than COCO's: polygons with x before "
            "y, RLE with runs along columns. Export the outlines again. If they are right, remove "
            "the boxes."
        )
    if not repair.has_objects:
        reasons = [f"{problem.count:,} x {problem.kind}" for problem in repairs]
        if objects:
            reasons.append(f"{len(objects):,} x crowd")
        raise ColabUtilsError(
            f"{annotations} has no object to keep: no object has both a usable mask and an image "
            f"in {folder} ({', '.join(reasons)}). Name the right "
            "image folder, mend the defects that `check` reports, or use --crowds objects."
        )
    with explain_write(output.parent):
        write_coco(output, entries, objects, dataset.categories)
    report = check_dataset(folder, output, deep=deep, exif=exif)
    return replace(report, repairs=repairs)


class _Repair:
    """Mend the images and the annotations of a dataset, and count what was done."""

    def __init__(
        self, dataset: CocoDataset, headers: Sequence[Header], *, as_objects: bool
    ) -> None:
        self._dataset = dataset
        self._headers = headers
        self._as_objects = as_objects
        self.objects: list[bytes] = []
        """The annotations that are kept, as JSON."""
        self.has_objects = False
        """Whether any of them is no crowd."""
        self._names = defaultdict[tuple[str, str], list[str]](list)
        """The images or annotations with each kind of repair, by the kind and its effect."""
        self._categories = {category["id"] for category in dataset.categories}
        self._ids = dataset.ids
        if len(np.unique(dataset.ids)) < len(dataset.ids):
            self._ids = np.arange(1, len(dataset.ids) + 1)
        for i in _find_swapped(dataset, headers):
            dataset.sizes[i] = headers[i].size
            self.note("width and height swapped", dataset.names[i])

    def note(self, kind: str, name: str, effect: str = "mended") -> None:
        """Note one repair, with the name of what it concerns."""
        self._names[kind, effect].append(escape(name))

    def list_repairs(self) -> tuple[Problem, ...]:
        """Return each kind of repair, with its number and examples."""
        return tuple(
            Problem(kind, len(names), tuple(names[:5]), effect)
            for (kind, effect), names in self._names.items()
        )

    def mend_images(self) -> Iterator[Entry]:
        """Yield the entry of each image that is kept, and keep its annotations in ``objects``.

        The entries of an image are joined: some tools write an entry for each object.
        """
        dataset = self._dataset
        groups = defaultdict[str, list[int]](list)
        for i, name in enumerate(dataset.names):
            groups[name].append(i)
        ids = dataset.image_ids.tolist()
        images = Counter(number for number, _ in set(zip(ids, dataset.names, strict=True)))
        for name, group in groups.items():
            changes = ["entries of one image joined"] * (len(group) - 1)
            try:
                if any(images[ids[i]] > 1 for i in group):
                    raise _LostImageError("id of several images")
                entry, size = self._mend_entry(group)
                objects = self._mend_objects(group, entry["id"], size, changes)
            except (_LostImageError, RecursionError) as error:
                self.note(str(error), name, _LEFT_OUT)
                continue
            for change in changes + _list_changes(dataset.image(group[0]), entry):
                self.note(change, name)
            self.has_objects |= any(not annotation["iscrowd"] for annotation in objects)
            # As text, they take a quarter of the memory.
            self.objects += [json.dumps(annotation).encode() for annotation in objects]
            yield entry

    def _mend_entry(self, group: list[int]) -> tuple[Entry, Size]:
        """Mend an image's entry by its file. Return it with the height and width of its masks."""
        header = self._headers[group[0]]
        entry = self._dataset.image(group[0])
        size = entry["height"], entry["width"]
        if not all(header.size):
            raise _LostImageError(header.defects[0][0])
        is_same = len(np.unique(self._dataset.sizes[group], axis=0)) == 1
        if not is_same or header.compare(size) == "misfit":
            raise _LostImageError("size mismatch")
        moved = dict(header.defects).get("found by base name", "")
        # A backslash comes from `escape`: the name has characters that we write into no JSON. Then
        # the name stays, and the file is found by its base name.
        if moved and "\\" not in moved:
            entry["file_name"] = moved
        if all(size):
            return entry, size
        # If EXIF turns the image, no size is added, because nothing shows whether the annotations
        # belong to the image as stored or as turned. While the size is missing, check warns of
        # this. With a size, it might not.
        if header.orientation == 1:
            entry["height"], entry["width"] = header.size
        return entry, header.size

    def _mend_objects(
        self, group: list[int], image_id: int, size: Size, changes: list[str]
    ) -> list[Entry]:
        """Mend the annotations of an image by their masks.

        An annotation is left out if it has no area, or the category and outline of another one.
        """
        objects: dict[str, Entry] = {}
        for i in group:
            numbers = self._ids[self._dataset.first[i] : self._dataset.first[i + 1]].tolist()
            for number, entry in zip(numbers, self._dataset.read_entries(i), strict=True):
                mended = self._mend_object(entry, size, changes)
                key = repr([mended.get(name) for name in ("category_id", "segmentation")])
                if not mended:
                    changes.append("object without area left out")
                elif key in objects:
                    changes.append("repeated annotation left out")
                else:
                    mended["id"] = number
                    changes += _list_changes(entry, mended)
                    objects[key] = entry | mended | {"image_id": image_id}
        return [*objects.values()]

    def _mend_object(self, entry: Entry, size: Size, changes: list[str]) -> Entry:
        """Return the fields of an annotation as COCO has them; none if it has no area.

        Raises:
            _LostImageError: if it has an area, but no usable mask.
        """
        fields = ("category_id", "iscrowd", "bbox", "area")
        values: Entry = read_sound_fields(entry, dict.fromkeys(fields))
        box = values["bbox"]
        if values["category_id"] not in self._categories or values["iscrowd"] is None:
            raise _LostImageError("bad annotation")
        if self._as_objects:
            values["iscrowd"] = 0
        tight: list[float] = []
        pixels = 0
        outline = entry.get("segmentation")
        with suppress(ColabUtilsError):
            values["segmentation"] = _mend_outline(outline, size)
            tight, pixels = measure_mask(encode_segmentation(values["segmentation"], *size))
        if not pixels:
            is_drawn = not tight and count_numbers(outline) >= OUTLINE_NUMBERS
            has_area = box and box[2] * box[3] >= NEAR**2
            if (is_drawn or has_area) and not values["iscrowd"]:
                raise _LostImageError("object without a whole mask")
            return {}
        wrong = compare_box(box, tight, *size) if box else "no box"
        if wrong:
            values["bbox"] = tight
        if wrong == APART and not is_normalised(box):
            changes.append(APART)
        # A crowd whose ``area`` is 0 may be an object. Only the user knows, and says so by `crowds`
        # (an argument). The 0 stays, so that a check still finds such a crowd.
        is_unclear = values["iscrowd"] and values["area"] == 0
        if not is_unclear and is_area_odd(values["area"], values["bbox"], pixels):
            values["area"] = float(pixels)
        return values


def _find_swapped(dataset: CocoDataset, headers: Sequence[Header]) -> list[int]:
    """Return the indices of the images whose entries have width and height swapped.

    The list is empty if only some images have swapped sides, or if their outlines do not fit the
    sizes of the files. Then the files may have been turned, not the entries, for example because
    their EXIF orientation was lost.
    """
    swapped = []
    total = 0
    for i, header in enumerate(headers):
        size = tuple(dataset.sizes[i].tolist())
        total += header.size != header.size[::-1]
        if size == header.size[::-1] and header.compare(size) == "misfit":
            swapped.append(i)
    # Only if nearly all are swapped, their outlines are read.
    if len(swapped) < _NEARLY_ALL * total:
        return []
    misfits = {"object without mask", "bad mask", "polygon beyond the image"}
    for i in swapped:
        for annotation in dataset.read_annotations(i)[0]:
            defects, _ = check_object(annotation, headers[i].size)
            if not misfits.isdisjoint(dict(defects)):
                return []
    return swapped


def _list_changes(old: Entry, new: Entry) -> list[str]:
    return [f"{name} written anew" for name in new if old.get(name) != new[name]]


def _mend_outline(outline: Any, size: Size) -> Any:
    """Return a segmentation as COCO has it: a list of polygons in pixels, or RLE.

    Raises:
        ColabUtilsError: if the segmentation cannot be drawn.
    """
    if not isinstance(outline, list) or not outline:
        return outline
    polygons = read_polygons(outline)
    if all(map(is_normalised, polygons)):
        polygons = [(polygon.reshape(-1, 2) * size[::-1]).ravel() for polygon in polygons]
    return [polygon.tolist() for polygon in polygons]
