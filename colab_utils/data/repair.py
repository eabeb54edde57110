"""A repaired copy of annotations: mended where the right value is known, else left out with the whole image."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from colab_utils.data.checks import EXAMPLES, DatasetReport, Problem, check_dataset, inspect_images
from colab_utils.data.coco import FAULTS, CocoDataset, read_coco, read_field, require_new, write_coco
from colab_utils.data.defects import HARMLESS, NEAR, Header, compare_box, compare_sizes, is_normalised
from colab_utils.data.masks import MaskEncoder, measure_mask, read_polygons
from colab_utils.drive import explain_write
from colab_utils.errors import ColabUtilsError, escape

__all__ = ["repair_annotations"]


class _LostObjectError(Exception):
    """An object whose mask cannot be had: without it, its image would teach that it is background."""


def repair_annotations(
    images: str | Path, annotations: str | Path, *, output: str | Path, crowds: Literal["leave", "objects"] = "leave"
) -> DatasetReport:
    """Write a copy of the annotations, mended where the right value is known; the original stays as it is.

    Numbers from text, nested polygons, boxes and areas from the mask, sizes and names from the files. What cannot be
    mended is left out: an object without area alone, any other together with its image, because the object would
    become background. Repairing what was repaired changes nothing. Of the images, the copy has id, name and size.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        output: the file to write, which must not exist.
        crowds: "objects" takes crowds (``iscrowd`` 1) as objects: CVAT's brush masks are none.

    Returns:
        what :func:`check_dataset` finds with the new file, and the ``repairs``.

    Raises:
        ColabUtilsError: as :func:`check_dataset`; or if ``output`` exists, or no object would be left.
    """
    folder, output, dataset = Path(images), require_new(Path(output)), read_coco(annotations)
    headers = [found.header for found in inspect_images(folder, dataset)]
    categories = {one["id"] for one in dataset.categories}
    done, lost = defaultdict[str, list[str]](list), defaultdict[str, list[tuple[str, int]]](list)
    done["annotation of no image left out"] = [f"annotation {number}" for number in dataset.unknown_images.tolist()]
    entries, kept, objects = list[dict[str, Any]](), list[bytes](), 0
    for group, is_alone in _group_entries(dataset):
        entry, count = dataset.image(group[0]), sum(int(dataset.first[i + 1] - dataset.first[i]) for i in group)
        name, changes = escape(entry["file_name"]), ["entries of one image joined"] * (len(group) - 1)
        try:
            if not is_alone:
                raise _LostObjectError("id of several images")
            if len(np.unique(dataset.sizes[group], axis=0)) > 1:
                raise _LostObjectError("size mismatch")
            parsed = [one for i in group for one in dataset.read_entries(i)]
            masks = MaskEncoder(*_mend_entry(entry, parsed, headers[group[0]], changes))
            mended = _mend_objects(parsed, masks, categories, changes, crowds == "objects")
            texts = [json.dumps({**one, "image_id": entry["id"]}).encode() for one in mended]
        except (_LostObjectError, RecursionError) as error:
            lost["bad annotation" if isinstance(error, RecursionError) else str(error)].append((name, count))
            continue
        entries.append(entry)
        kept += texts
        objects += sum(not one["iscrowd"] for one in mended)
        for change in changes:
            done[change].append(name)
    if not objects:
        why = [f"{len(where):,} x {kind}" for kind, where in lost.items()] + [f"{len(kept):,} x crowd"] * bool(kept)
        raise ColabUtilsError(
            f"expected objects to keep, found none in {annotations} that {folder} has an image and masks for "
            f"({', '.join(why)}). Name the right image folder, export polygons, or use --crowds objects."
        )
    with explain_write(output.parent):
        write_coco(output, entries, kept, dataset.categories)
    return replace(check_dataset(folder, output), repairs=_list_repairs(done, lost))


def _group_entries(dataset: CocoDataset) -> list[tuple[list[int], bool]]:
    """The images by their name, as some tools write one for each object; and whether no other has an id of theirs."""
    groups = defaultdict[str, list[int]](list)
    for i in range(len(dataset)):
        groups[dataset.file_name(i)].append(i)
    numbers = [{*dataset.image_ids[group].tolist()} for group in groups.values()]
    uses = Counter(number for group in numbers for number in group)
    return [(group, all(uses[one] == 1 for one in own)) for group, own in zip(groups.values(), numbers, strict=True)]


def _list_repairs(done: dict[str, list[str]], lost: dict[str, list[tuple[str, int]]]) -> tuple[Problem, ...]:
    repairs = [Problem(kind, len(where), tuple(where[:EXAMPLES]), "mended") for kind, where in done.items() if where]
    for kind, where in lost.items():
        objects = sum(count for _, count in where)
        effect = f"images left out whole, with {objects:,} objects, so that none becomes background"
        repairs.append(Problem(kind, len(where), tuple(name for name, _ in where[:EXAMPLES]), effect))
    return tuple(repairs)


def _mend_entry(
    entry: dict[str, Any], annotations: list[dict[str, Any]], header: Header, changes: list[str]
) -> tuple[int, int]:
    """Mend an image's entry by its file; returns the height and width of its masks."""
    if header.fault:
        raise _LostObjectError(header.fault[0])
    if moved := dict(header.notes).get("found by base name"):
        if "\\" in moved:  # escaped: it has characters that no JSON of ours names
            raise _LostObjectError("unsafe file_name")
        entry["file_name"] = moved
        changes.append("name from the folder")
    size = entry["height"], entry["width"]
    if not all(size):
        return header.size
    if any(kind == "size mismatch" for kind, _ in compare_sizes(size, header)):
        outlines = [one.get("segmentation") for one in annotations]
        if _fit(outlines, size) or not _fit(outlines, header.size):  # nothing says that the file is right
            raise _LostObjectError("size mismatch")
        size = entry["height"], entry["width"] = header.size
        changes.append("size from the file")
    return size


def _fit(outlines: list[Any], size: tuple[int, int]) -> bool:
    """Whether polygons lie in an image of this size, and RLE is made for it."""
    try:
        return all(
            tuple(outline["size"]) == size
            if isinstance(outline, dict)
            else np.max(np.concatenate(read_polygons(outline)).reshape(-1, 2) - size[::-1]) <= NEAR
            for outline in outlines
        )
    except (ColabUtilsError, *FAULTS):
        return False


def _mend_objects(
    annotations: list[dict[str, Any]], masks: MaskEncoder, categories: set[int], changes: list[str], as_objects: bool
) -> list[dict[str, Any]]:
    """An image's annotations, without those that have no area and those of the same class and outline as another."""
    mended = dict[str, dict[str, Any]]()
    for entry in annotations:
        if _try_field(entry, "category_id") not in categories:
            raise _LostObjectError("unknown category")
        if one := _mend_object(entry, masks, changes, as_objects=as_objects):
            key = repr((one["category_id"], one["segmentation"]))
            changes += ["repeated annotation left out"] * (key in mended)
            mended.setdefault(key, one)
    return [*mended.values()]


def _mend_object(
    entry: dict[str, Any], masks: MaskEncoder, changes: list[str], *, as_objects: bool
) -> dict[str, Any] | None:
    """An annotation with all that its mask tells, None where it has no area.

    Raises:
        _LostObjectError: it has an area, and no usable mask.
    """
    values = {name: _try_field(entry, name) for name in ("id", "category_id", "iscrowd", "bbox", "area")}
    box, area = values["bbox"], values["area"]
    if values["iscrowd"] is None:
        raise _LostObjectError("bad annotation")
    if any(value is not None and entry.get(name) not in (None, value) for name, value in values.items()):
        changes.append("numbers from text")
    if values["iscrowd"] and as_objects:
        values["iscrowd"] = 0
        changes.append("crowd taken as an object")
    outline = entry.get("segmentation")
    try:
        values["segmentation"] = _mend_outline(outline, masks.size)
        tight, pixels = measure_mask(masks.encode(values["segmentation"]))
    except ColabUtilsError:
        tight, pixels = [], 0
    if not pixels:
        numbers = sum(len(one) if isinstance(one, list) else 1 for one in outline) if isinstance(outline, list) else 6
        has_box = box and min(box[2:]) > 0 and box[2] * box[3] >= NEAR**2
        if (has_box or (outline and not tight and numbers >= 6)) and not values["iscrowd"]:
            raise _LostObjectError("object without a whole mask" if outline else "object without mask")
        changes.append("object without area left out")
        return None
    if values["segmentation"] != outline:
        changes.append("outline written as polygons of pixels")
    if not box or any(kind not in HARMLESS for kind, _ in compare_box(box, tight, *masks.size)):
        values["bbox"] = tight
        changes.append("box from the mask")
    if area is None or area <= 0:
        values["area"] = float(pixels)
        changes.append("area from the mask")
    if values["id"] is None and entry.get("id") is not None:
        changes.append("id that is no number left out")
    return {name: value for name, value in {**entry, **values}.items() if name != "id" or value is not None}


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
