"""A repaired copy of annotations: mended where the right value is known, else left out with the whole image."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from colab_utils.data.checks import EXAMPLES, DatasetReport, Problem, check_dataset, inspect_images
from colab_utils.data.coco import decode_text, read_bytes, read_coco
from colab_utils.data.defects import HARMLESS, NEAR, Header, compare_box, compare_sizes, is_normalised
from colab_utils.data.masks import MaskEncoder, measure_mask
from colab_utils.errors import ColabUtilsError, escape
from colab_utils.runtime import write_file

__all__ = ["repair_annotations"]

_NUMBERS = ("id", "image_id", "category_id", "bbox", "area", "iscrowd", "segmentation", "width", "height")


class _LostObjectError(Exception):
    """An object whose mask cannot be had: without it, its image would teach that it is background."""


def repair_annotations(
    images: str | Path, annotations: str | Path, *, output: str | Path, crowds: Literal["leave", "objects"] = "leave"
) -> DatasetReport:
    """Write a copy of the annotations, mended where the right value is known; the original stays as it is.

    Numbers from text, nested polygons, boxes and areas from the mask, sizes and names from the files. What cannot be
    mended is left out: an object without area alone, any other together with its image, because the object would
    become background. Repairing what was repaired changes nothing.

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
    source, folder, output = Path(annotations), Path(images), Path(output)
    if output.exists():
        raise ColabUtilsError(f"expected a new file to write, found {output}. Name another: nothing is overwritten.")
    dataset = read_coco(source)
    findings = inspect_images(folder, dataset)
    raw = _read_json(source)
    done, lost = defaultdict[str, list[str]](list), defaultdict[str, dict[str, int]](dict)
    owned, categories = defaultdict[Any, list[int]](list), {category["id"] for category in dataset.categories}
    for row, one in enumerate(raw["annotations"]):
        owner = _to_numbers(one.get("image_id")) if isinstance(one, dict) else None
        owned[owner if _is_number(owner) else None].append(row)
    entries, kept = list[Any](), dict[int, Any]()
    for i, found in enumerate(findings):
        name, changes, mine = escape(dataset.file_name(i)), list[str](), owned.pop(int(dataset.image_ids[i]), [])
        try:
            entry, rows = _read_numbers(raw["images"][i], changes), _read_rows(raw["annotations"], mine, changes)
            size = _mend_image(entry, [*rows.values()], found.header, changes)
            masks = MaskEncoder(*size)
            mended = {
                row: _mend_object(one, size, masks, categories, changes, as_objects=crowds == "objects")
                for row, one in rows.items()
            }
        except (_LostObjectError, RecursionError) as error:
            lost["bad annotation" if isinstance(error, RecursionError) else str(error)][name] = len(mine)
            continue
        for change in changes:
            done[change].append(name)
        entries.append(entry)
        kept |= {row: one for row, one in mended.items() if one}
    done["annotation of no image left out"] = [f"number {row + 1}" for rest in owned.values() for row in rest]
    if all(one.get("iscrowd") for one in kept.values()):
        raise ColabUtilsError(
            f"expected objects to keep, found none in {source} that {folder} has an image and masks for. Name the "
            "right image folder, or export polygons."
        )
    repairs = [Problem(kind, len(where), tuple(where[:EXAMPLES]), "mended") for kind, where in done.items() if where]
    for kind, where in lost.items():
        effect = f"images left out whole, with {sum(where.values()):,} objects, so that none becomes background"
        repairs.append(Problem(kind, len(where), tuple(where)[:EXAMPLES], effect))
    try:
        write_file(
            output, json.dumps(raw | {"images": entries, "annotations": [kept[row] for row in sorted(kept)]}).encode()
        )
    except OSError as error:
        raise ColabUtilsError(f"expected to write {output}, found: {error.strerror}. Name another file.") from None
    return replace(check_dataset(images, output), repairs=tuple(repairs))


def _read_json(source: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(decode_text(read_bytes(source), source)))
    except RecursionError:
        raise ColabUtilsError(
            f"expected COCO instance JSON in {source}, found lists nested too deeply. Export it again."
        ) from None


def _read_numbers(entry: dict[str, Any], changes: list[str]) -> dict[str, Any]:
    """A copy of an entry with numbers for text, and polygons in a list of their own."""
    read = {key: _to_numbers(value) if key in _NUMBERS else value for key, value in entry.items()}
    if repr(read) != repr(entry):
        changes.append("numbers from text")
    outline = read.get("segmentation")
    if isinstance(outline, list) and outline:
        if not isinstance(outline[0], list):
            outline = [outline]
            changes.append("flat polygon nested")
        whole = [polygon for polygon in outline if not isinstance(polygon, list) or len(polygon) >= 6]
        if whole and len(whole) < len(outline):
            changes.append("parts of fewer than 3 points left out")
        read["segmentation"] = whole or outline
    return read


def _read_rows(annotations: list[Any], rows: list[int], changes: list[str]) -> dict[int, dict[str, Any]]:
    """An image's annotations by their row, without those of the same class and outline as one before."""
    unique = dict[str, tuple[int, dict[str, Any]]]()
    for row in rows:
        one = _read_numbers(annotations[row], changes)
        unique.setdefault(repr((one.get("category_id"), one.get("segmentation") or row)), (row, one))
    changes += ["repeated annotation left out"] * (len(rows) - len(unique))
    return dict(unique.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15


def _to_numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_numbers(one) for one in value]
    try:
        return value if not isinstance(value, str) else int(value) if value.lstrip("-").isdigit() else float(value)
    except ValueError:
        return value


def _mend_image(entry: dict[str, Any], rows: list[Any], header: Header, changes: list[str]) -> tuple[int, int]:
    """Mend an image's entry by its file; returns the height and width of its masks."""
    if header.fault:
        raise _LostObjectError(header.fault[0])
    for kind, name in header.notes:
        if kind == "found by base name":
            entry["file_name"] = name
            changes.append("name from the folder")
    size = entry.get("height") or 0, entry.get("width") or 0
    if not all(size):
        return header.size
    if any(kind == "size mismatch" for kind, _ in compare_sizes(size, header)):
        outlines = [one.get("segmentation") for one in rows]
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
            else all(
                max(polygon[1::2]) <= size[0] + NEAR and max(polygon[::2]) <= size[1] + NEAR for polygon in outline
            )
            for outline in outlines
        )
    except (TypeError, ValueError, KeyError):
        return False


def _mend_object(
    one: dict[str, Any],
    size: tuple[int, int],
    masks: MaskEncoder,
    categories: set[int],
    changes: list[str],
    *,
    as_objects: bool,
) -> dict[str, Any] | None:
    """An annotation with all that its mask tells, None where it has no area.

    Raises:
        _LostObjectError: it has an area, and no usable mask or class.
    """
    box: Any = one.get("bbox", [])
    outline, category, crowd = (one.get(key) for key in ("segmentation", "category_id", "iscrowd"))
    if not _is_number(category) or category not in categories:
        raise _LostObjectError("unknown category")
    if crowd not in (None, 0, 1):
        raise _LostObjectError("bad annotation")
    sound = isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))
    try:
        mask = masks.encode(outline)
        if isinstance(outline, list) and all(map(is_normalised, outline)):
            one["segmentation"] = [[x * size[1 - n % 2] for n, x in enumerate(polygon)] for polygon in outline]
            mask = masks.encode(one["segmentation"])
            changes.append("polygons in 0 to 1 scaled")
        tight, pixels = measure_mask(mask)
    except ColabUtilsError:
        tight, pixels = [], 0
    if not pixels:
        parts = outline if isinstance(outline, list) else [outline]
        points = [len(part) // 2 if isinstance(part, list) else 3 * bool(part) for part in parts]
        boxed = sound and min(box[2:]) > 0 and box[2] * box[3] >= NEAR**2
        if (boxed or (not tight and max(points, default=0) > 2)) and (as_objects or not crowd):
            raise _LostObjectError("object without a whole mask" if outline else "object without mask")
        changes.append("object without area left out")
        return None
    if not sound or any(kind not in HARMLESS for kind, _ in compare_box(box, tight, *size)):
        one["bbox"] = tight
        changes.append("box from the mask")
    area = one.get("area", pixels)
    if not (_is_number(area) and area > 0):
        one["area"] = pixels
        changes.append("area from the mask")
    number = one.get("id", "")
    if not (isinstance(number, str) or (_is_number(number) and number == int(number))):
        del one["id"]  # its row is its id then
        changes.append("id that is no number left out")
    if crowd and as_objects:
        one["iscrowd"] = 0
        changes.append("crowd taken as an object")
    return one
