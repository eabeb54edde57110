"""A repaired copy of annotations: mended where the right value is known, else left out with the whole image."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np

from colab_utils.data.checks import EXAMPLES, DatasetReport, Problem, inspect_images, sum_up
from colab_utils.data.coco import CocoDataset, decode_text, read_bytes, read_coco, require_new
from colab_utils.data.defects import HARMLESS, NEAR, Header, compare_box, compare_sizes, is_normalised
from colab_utils.data.masks import MaskEncoder, measure_mask
from colab_utils.drive import explain_write
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
    source, folder, output = Path(annotations), Path(images), require_new(Path(output))
    dataset = read_coco(source)
    findings = inspect_images(folder, dataset)
    raw = _read_json(source)
    done, lost = defaultdict[str, list[str]](list), defaultdict[str, list[tuple[str, int]]](list)
    rows, are_apart = _sort_rows(dataset, raw["annotations"])
    done["annotation of no image left out"] = [f"number {row + 1}" for row in rows.pop(-1, [])]
    done["repeated image left out"] = [escape(dataset.file_name(i)) for i in range(len(dataset)) if i not in rows]
    done["entries of one image joined"] = _join_entries(dataset, rows, raw["annotations"])
    ids, categories = _choose_ids(dataset, [*rows], are_apart), {one["id"] for one in dataset.categories}
    entries, headers, kept = list[Any](), list[Header](), dict[int, Any]()
    for i, mine in rows.items():
        name, changes = escape(dataset.file_name(i)), list[str]()
        try:
            if ids[i] is None:
                raise _LostObjectError("id of several images")
            entry, objects = _read_numbers(raw["images"][i], changes), _read_rows(raw["annotations"], mine, changes)
            size = _mend_image(entry, [*objects.values()], findings[i].header, changes)
            masks = MaskEncoder(*size)
            mended = {
                row: _mend_object(one, size, masks, categories, changes, as_objects=crowds == "objects")
                for row, one in objects.items()
            }
        except (_LostObjectError, RecursionError) as error:
            lost["bad annotation" if isinstance(error, RecursionError) else str(error)].append((name, len(mine)))
            continue
        if ids[i] != dataset.image_ids[i]:
            entry["id"] = ids[i]
            mended = {row: one and {**one, "image_id": ids[i]} for row, one in mended.items()}
            changes.append("id of its own instead of another image's")
        for change in changes:
            done[change].append(name)
        entries.append(entry)
        notes = tuple(note for note in findings[i].header.notes if note[0] != "found by base name")
        headers.append(findings[i].header._replace(notes=notes))
        kept |= {row: one for row, one in mended.items() if one}
    if all(one.get("iscrowd") for one in kept.values()):
        why = [f"{len(where):,} x {kind}" for kind, where in lost.items()] + [f"{len(kept):,} x crowd"] * bool(kept)
        raise ColabUtilsError(
            f"expected objects to keep, found none in {source} that {folder} has an image and masks for "
            f"({', '.join(why)}). Name the right image folder, export polygons, or use --crowds objects."
        )
    content = raw | {"images": entries, "annotations": [kept[row] for row in sorted(kept)]}
    with explain_write(output.parent):
        write_file(output, json.dumps(content).encode())
    repaired = read_coco(output)
    return replace(sum_up(repaired, inspect_images(folder, repaired, headers)), repairs=_list_repairs(done, lost))


def _sort_rows(dataset: CocoDataset, annotations: list[Any]) -> tuple[dict[int, list[int]], bool]:
    """The rows of each image's annotations, by the image's index, and whether images of the same id are told apart.

    They are where the file holds exports one after another, whose images and annotations each count from the same
    number. Of the same image twice only the first is there; rows of no image are under -1.
    """
    ids, names = dataset.image_ids.tolist(), [dataset.file_name(i) for i in range(len(dataset))]
    first = {key: i for i, key in reversed([*enumerate(zip(ids, names, strict=True))])}
    entries = [one if isinstance(one, dict) else {} for one in annotations]
    owners = [owner if _is_number(owner := _to_numbers(one.get("image_id"))) else None for one in entries]
    exports, parts = _number_exports(ids), _number_exports([_to_numbers(one.get("id")) for one in entries])
    own, named = {*zip(ids, exports, strict=True)}, {*zip(owners, parts, strict=True)}
    are_apart = 0 not in exports and {*exports} == {*parts} and named <= own
    if not are_apart:
        exports, parts = [0] * len(exports), [0] * len(parts)
    images = reversed([*zip(ids, exports, names, strict=True)])
    places = {(number, export): first[number, name] for number, export, name in images}
    rows = {i: list[int]() for i in sorted(first.values())}
    for row, key in enumerate(zip(owners, parts, strict=True)):
        rows.setdefault(places.get(key, -1), []).append(row)
    return rows, are_apart


def _choose_ids(dataset: CocoDataset, chosen: list[int], are_apart: bool) -> dict[int, int | None]:
    """An id of its own for each of these images; None where several have the same and nothing tells them apart."""
    ids = [int(dataset.image_ids[i]) for i in chosen]
    counts, own, given = Counter(ids), dict[int, int | None](), set[int]()
    free = (number for number in count(1) if number not in counts)
    for i, number in zip(chosen, ids, strict=True):
        own[i] = None if counts[number] > 1 and not are_apart else next(free) if number in given else number
        given.add(number)
    return own


def _number_exports(ids: list[Any]) -> list[int]:
    """Which of several exports in one file each id is of, from 1; 0 where they do not all count up from one number.

    Example:
        >>> _number_exports([1, 2, 5, 1, 3]), _number_exports([1, 2, 5, 4])
        ([1, 1, 1, 2, 2], [0, 0, 0, 0])
    """
    if not all(map(_is_number, ids)):
        return [0] * len(ids)
    begins = np.diff(np.array(ids, np.float64), prepend=np.inf) <= 0
    counts = len({*np.array(ids)[begins].tolist()}) == 1
    return (np.cumsum(begins) * counts).tolist()


def _list_repairs(done: dict[str, list[str]], lost: dict[str, list[tuple[str, int]]]) -> tuple[Problem, ...]:
    repairs = [Problem(kind, len(where), tuple(where[:EXAMPLES]), "mended") for kind, where in done.items() if where]
    for kind, where in lost.items():
        objects = sum(count for _, count in where)
        effect = f"images left out whole, with {objects:,} objects, so that none becomes background"
        repairs.append(Problem(kind, len(where), tuple(name for name, _ in where[:EXAMPLES]), effect))
    return tuple(repairs)


def _join_entries(dataset: CocoDataset, rows: dict[int, list[int]], annotations: list[Any]) -> list[str]:
    """Give the annotations of an image's later entries to its first one; returns the names of the later ones."""
    first, later = dict[tuple[Any, ...], int](), list[str]()
    for i in [*rows]:
        own = first.setdefault((dataset.file_name(i), *dataset.sizes[i]), i)
        if own != i:
            for row in rows.pop(i):
                annotations[row]["image_id"] = int(dataset.image_ids[own])
                rows[own].append(row)
            later.append(escape(dataset.file_name(i)))
    return later


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


def _to_numbers(value: Any, depth: int = 2) -> Any:
    """Numbers for text, in lists so deep, too; what is no number stays.

    Example:
        >>> _to_numbers(["1.5", "9007199254740993 ", "x"])
        [1.5, 9007199254740993, 'x']
    """
    if not isinstance(value, str):
        return [_to_numbers(one, depth - 1) for one in value] if depth and isinstance(value, list) else value
    try:
        return int(value) if value.strip().lstrip("-").isdecimal() else float(value)
    except ValueError:
        return value


def _mend_image(entry: dict[str, Any], rows: list[Any], header: Header, changes: list[str]) -> tuple[int, int]:
    """Mend an image's entry by its file; returns the height and width of its masks."""
    if header.fault:
        raise _LostObjectError(header.fault[0])
    for kind, name in header.notes:
        if kind == "found by base name":
            if "\\" in name:  # escaped: it has characters that no JSON of ours names
                raise _LostObjectError("unsafe file_name")
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
