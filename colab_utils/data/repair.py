"""A repaired copy of annotations: mended where the right value is known, else left out with the
whole image.
"""

import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from colab_utils.data.checks import DatasetReport, Problem, check_dataset, inspect_images
from colab_utils.data.coco import CocoDataset, read_coco, write_coco
from colab_utils.data.fields import FAULTS, read_field
from colab_utils.data.image_checks import Header, compare_sizes
from colab_utils.data.masks import encode_segmentation, measure_mask, read_polygons
from colab_utils.data.object_checks import HARMLESS, NEAR, check_object, compare_box, is_normalised
from colab_utils.drive import explain_write
from colab_utils.errors import ColabUtilsError, escape
from colab_utils.files import require_new
from colab_utils.require import require_local_path


class _LostObjectError(Exception):
    """An object whose mask cannot be had: without it, its image would teach that it is
    background.
    """


def repair_annotations(
    images: str | Path,
    annotations: str | Path,
    *,
    output: str | Path,
    crowds: Literal["leave", "objects"] = "leave",
) -> DatasetReport:
    """Write a copy of the annotations, mended where the right value is known; the original stays as
    it is.

    Numbers from text, nested polygons, boxes and areas from the mask, sizes and names from the
    files. What cannot be mended is left out: an object without area alone, any other together with
    its image, because the object would become background. Repairing what was repaired changes
    nothing. Of the images, the copy has id, name and size.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        output: the file to write, which must not exist.
        crowds: "objects" takes crowds (``iscrowd`` 1) as objects: CVAT's brush masks are none.

    Returns:
        what :func:`check_dataset` finds with the new file, and the ``repairs``.

    Raises:
        ColabUtilsError: as :func:`check_dataset`; or if ``output`` exists, or no object would be
            left.
    """
    folder = require_local_path(images)
    output = require_new(require_local_path(output))
    dataset = read_coco(annotations)
    headers = [found.header for found in inspect_images(folder, dataset)]
    done = defaultdict[str, list[str]](list)
    gone = Counter[str]()
    done["annotation of no image left out"] = [
        f"annotation {number}" for number in dataset.unknown_images.tolist()
    ]
    entries = list[dict[str, Any]]()
    kept = list[bytes]()
    objects = 0
    for group, is_alone in _group_entries(dataset):
        name = escape(dataset.file_name(group[0]))
        changes = ["entries of one image joined"] * (len(group) - 1)
        try:
            if not is_alone:
                raise _LostObjectError("id of several images")
            entry, size = _mend_entry(dataset, group, headers[group[0]], changes)
            found = [one for i in group for one in dataset.read_entries(i)]
            mended = _mend_objects(found, size, dataset, changes, as_objects=crowds == "objects")
            kept += [json.dumps({**one, "image_id": entry["id"]}).encode() for one in mended]
        except (_LostObjectError, RecursionError) as error:
            kind = "bad annotation" if isinstance(error, RecursionError) else str(error)
            done[kind].append(name)
            gone[kind] += sum(int(dataset.first[i + 1] - dataset.first[i]) for i in group)
            continue
        entries.append(entry)
        objects += sum(not one["iscrowd"] for one in mended)
        for change in changes:
            done[change].append(name)
    if not objects:
        why = [f"{len(done[kind]):,} x {kind}" for kind in gone] + [
            f"{len(kept):,} x crowd"
        ] * bool(kept)
        none = f"found none in {annotations} with an image in {folder} and masks ({', '.join(why)})"
        cure = "Name the right image folder, export polygons, or use --crowds objects."
        raise ColabUtilsError(f"expected objects to keep, {none}. {cure}")
    with explain_write(output.parent):
        write_coco(output, entries, kept, dataset.categories)
    left = "images left out whole, with {:,} objects, so that none becomes background"
    repairs = tuple(
        Problem(
            kind,
            len(names),
            tuple(names[:5]),
            left.format(gone[kind]) if kind in gone else "mended",
        )
        for kind, names in done.items()
        if names
    )
    return replace(check_dataset(folder, output), repairs=repairs)


def _group_entries(dataset: CocoDataset) -> list[tuple[list[int], bool]]:
    """The images by their name, as some tools write one for each object; and whether no other has
    an id of theirs.
    """
    groups = defaultdict[str, list[int]](list)
    for i in range(len(dataset)):
        groups[dataset.file_name(i)].append(i)
    numbers = [{*dataset.image_ids[group].tolist()} for group in groups.values()]
    uses = Counter(number for group in numbers for number in group)
    return [
        (group, all(uses[one] == 1 for one in own))
        for group, own in zip(groups.values(), numbers, strict=True)
    ]


def _mend_entry(
    dataset: CocoDataset, group: list[int], header: Header, changes: list[str]
) -> tuple[dict[str, Any], tuple[int, int]]:
    """The entry of an image, mended by its file, and height and width of its masks."""
    entry = dataset.image(group[0])
    size = entry["height"], entry["width"]
    if not all(header.size):
        raise _LostObjectError(header.defects[0][0])
    if moved := dict(header.defects).get("found by base name"):
        if "\\" in moved:  # escaped: it has characters that no JSON of ours names
            raise _LostObjectError("unsafe file_name")
        entry["file_name"] = moved
        changes.append("name from the folder")
    if not all(size):
        size = header.size
    elif any(kind == "size mismatch" for kind, _ in compare_sizes(size, header)):
        # nothing says that the file is right
        if _fit(dataset, group, size) or not _fit(dataset, group, header.size):
            raise _LostObjectError("size mismatch")
        size = entry["height"], entry["width"] = header.size
        changes.append("size from the file")
    if len(np.unique(dataset.sizes[group], axis=0)) > 1:
        raise _LostObjectError("size mismatch")
    return entry, size


def _fit(dataset: CocoDataset, group: list[int], size: tuple[int, int]) -> bool:
    """Whether polygons lie in an image of this size, and RLE is made for it."""
    annotations = [one for i in group for one in dataset.read_annotations(i)[0]]
    found = {kind for one in annotations for kind, _ in check_object(one, size)[0]}
    return not found & {"object without mask", "bad mask", "polygon beyond the image"}


def _mend_objects(
    annotations: list[Any],
    size: tuple[int, int],
    dataset: CocoDataset,
    changes: list[str],
    *,
    as_objects: bool,
) -> list[dict[str, Any]]:
    """An image's annotations, without those that have no area and those of the same class and
    outline as another.
    """
    mended = dict[str, dict[str, Any]]()
    categories = {one["id"] for one in dataset.categories}
    for entry in annotations:
        if _try_field(entry, "category_id") not in categories:
            raise _LostObjectError("unknown category")
        if one := _mend_object(entry, size, changes, as_objects=as_objects):
            key = repr((one["category_id"], one["segmentation"]))
            changes += ["repeated annotation left out"] * (key in mended)
            mended.setdefault(key, one)
    return [*mended.values()]


def _mend_object(
    entry: dict[str, Any], size: tuple[int, int], changes: list[str], *, as_objects: bool
) -> dict[str, Any] | None:
    """An annotation with all that its mask tells, None where it has no area.

    Raises:
        _LostObjectError: it has an area, and no usable mask.
    """
    values = {
        name: _try_field(entry, name) for name in ("id", "category_id", "iscrowd", "bbox", "area")
    }
    box = values["bbox"]
    area = values["area"]
    outline = entry.get("segmentation")
    if values["iscrowd"] is None:
        raise _LostObjectError("bad annotation")
    if any(
        value is not None and entry.get(name) not in (None, value) for name, value in values.items()
    ):
        changes.append("numbers from text")
    if values["iscrowd"] and as_objects:
        values["iscrowd"] = 0
        changes.append("crowd taken as an object")
    try:
        values["segmentation"] = _mend_outline(outline, size)
        tight, pixels = measure_mask(encode_segmentation(values["segmentation"], *size))
    except ColabUtilsError:
        tight = []
        pixels = 0
    if not pixels:
        numbers = (
            sum(len(one) if isinstance(one, list) else 1 for one in outline)
            if isinstance(outline, list)
            else 6
        )
        has_box = box and min(box[2:]) > 0 and box[2] * box[3] >= NEAR**2
        if (has_box or (outline and not tight and numbers >= 6)) and not values["iscrowd"]:
            raise _LostObjectError(
                "object without a whole mask" if outline else "object without mask"
            )
        changes.append("object without area left out")
        return None
    if values["segmentation"] != outline:
        changes.append("outline written as polygons of pixels")
    if not box or any(kind not in HARMLESS for kind, _ in compare_box(box, tight, *size)):
        values["bbox"] = tight
        changes.append("box from the mask")
    if area is None or _is_of_other_units(area, values["bbox"], pixels):
        values["area"] = float(pixels)
        changes.append("area from the mask")
    if values["id"] is None:
        if entry.pop("id", None) is not None:
            changes.append("id that is no number left out")
        del values["id"]
    return entry | values


def _is_of_other_units(area: float, box: list[float], pixels: int) -> bool:
    """Return whether an area fits neither the box nor the mask, as in shares of the image, or where
    it is none.
    """
    in_box = area / (box[2] * box[3])
    return area <= 0 or (not 0.1 <= in_box <= 1 and not 0.5 <= area / pixels <= 2)


def _try_field(entry: dict[str, Any], name: str) -> Any:
    try:
        return read_field(entry, name)
    except FAULTS:
        return None


def _mend_outline(outline: Any, size: tuple[int, int]) -> Any:
    """A segmentation as COCO has it: each polygon in a list of its own, in pixels; RLE as it is."""
    if not isinstance(outline, list) or not outline:
        return outline
    polygons = [polygon.tolist() for polygon in read_polygons(outline)]
    if all(map(is_normalised, polygons)):
        return [[x * size[1 - n % 2] for n, x in enumerate(polygon)] for polygon in polygons]
    return outline if polygons == outline else polygons
