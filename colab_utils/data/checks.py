"""Look over a dataset before anything long starts: every defect by name, and a repaired JSON if you want one."""

from __future__ import annotations

import io
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from colab_utils.data.coco import CocoDataset, decode_text, read_bytes, read_coco
from colab_utils.data.masks import encode_segmentation
from colab_utils.drive import DriveLostError, get_profile, guard_drive, read_file
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import show_progress, write_file

__all__ = ["DatasetReport", "Problem", "check_dataset", "repair_annotations"]

_EXAMPLES = 5
_THREADS = 8
_ORIENTATION = 0x0112  # of EXIF

# what each kind of defect does to preprocessing and training; "note" costs nothing
_EFFECTS = {
    "no images": "stops preprocess",
    "unknown image": "stops preprocess",
    "unknown category": "stops preprocess",
    "unsafe file_name": "image is skipped",
    "missing image": "image is skipped",
    "bad image": "image is skipped",
    "size mismatch": "image is skipped",
    "bad annotation": "image is skipped",
    "bad mask": "image is skipped",
    "box without area": "note: object is left out, as torchvision does",
    "image without objects": "note: kept, left out of training",
    "repeated file_name": "note: kept, the same picture counts twice",
}
_SERIOUS = {kind for kind, effect in _EFFECTS.items() if not effect.startswith("note")}


@dataclass(frozen=True)
class Problem:
    """One kind of defect."""

    kind: str
    count: int
    """How often it was found."""
    examples: tuple[str, ...]
    """The first five."""
    effect: str
    """What it leads to."""


@dataclass(frozen=True)
class DatasetReport:
    """What :func:`check_dataset` found."""

    images: int
    annotations: int
    ok: bool
    """Whether every image can be used: nothing but notes was found."""
    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        lines = [f"{self.images:,} images, {self.annotations:,} annotations: {'ok' if self.ok else 'has problems'}"]
        lines += [f"  {p.count:,} x {p.kind} ({p.effect}), such as {p.examples[0]}" for p in self.problems]
        return "\n".join(lines)


class _Defect(NamedTuple):
    """One defect of an image, or of one of its annotations."""

    kind: str
    example: str
    image_id: int | None = None
    annotation_id: int | None = None


def check_dataset(images: str | Path, annotations: str | Path) -> DatasetReport:
    """Check every image file and every annotation of a COCO dataset.

    Each image's header and end are read; preprocessing decodes each image and finds the rest.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.

    Raises:
        ColabUtilsError: if there is no such folder, or the file is not COCO instance JSON.

    Example:
        >>> import tempfile
        >>> from colab_utils.sample_data import make_dataset
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = make_dataset(folder, n=2, width=64, height=64, workers=1)
        ...     check_dataset(made.images, made.annotations).ok
        True
    """
    dataset = read_coco(annotations)
    examples = defaultdict[str, list[str]](list)
    for defect in _find_defects(Path(images), dataset):
        examples[defect.kind].append(defect.example)
    if not len(dataset):
        examples["no images"] = [f"the list of images in {annotations} is empty"]
    problems = tuple(
        Problem(kind, len(examples[kind]), tuple(examples[kind][:_EXAMPLES]), effect)
        for kind, effect in _EFFECTS.items()
        if examples[kind]
    )
    total = len(dataset.ids) + len(dataset.unknown_images) + len(dataset.unknown_categories)
    return DatasetReport(len(dataset), total, not _SERIOUS & {one.kind for one in problems}, problems)


def repair_annotations(images: str | Path, annotations: str | Path, *, output: str | Path) -> DatasetReport:
    """Write a copy of the annotations without the images and annotations that have problems.

    Images with a bad file are left out with their annotations; single bad annotations are left out alone.
    Nothing else changes, and neither does the original.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        output: the file to write, which must not exist.

    Returns:
        what :func:`check_dataset` finds with the new file.

    Raises:
        ColabUtilsError: as :func:`check_dataset`; or if ``output`` exists.
    """
    source, output = Path(annotations), Path(output)
    if output.exists():
        raise ColabUtilsError(f"expected a new file to write, found {output}. Name another: nothing is overwritten.")
    dataset = read_coco(source)
    bad = {(one.image_id, one.annotation_id) for one in _find_defects(Path(images), dataset) if one.kind in _SERIOUS}
    raw = json.loads(decode_text(read_bytes(source), source))
    raw["images"] = [image for image in raw["images"] if (image["id"], None) not in bad]
    known_images = {image["id"] for image in raw["images"]}
    known_categories = {category["id"] for category in dataset.categories}
    raw["annotations"] = [
        annotation
        for row, annotation in enumerate(raw["annotations"], 1)
        if annotation["image_id"] in known_images
        and annotation["category_id"] in known_categories
        and (annotation["image_id"], annotation.get("id", row)) not in bad
    ]
    try:
        write_file(output, json.dumps(raw).encode())
    except OSError as error:
        raise ColabUtilsError(f"expected to write {output}, found: {error.strerror}. Name another file.") from None
    return check_dataset(images, output)


def _find_defects(images: Path, dataset: CocoDataset) -> Iterator[_Defect]:
    if not images.is_dir():
        raise ColabUtilsError(f"expected an image folder, found none at {images}. On Colab, mount Drive first.")
    for kind, ids in (("unknown image", dataset.unknown_images), ("unknown category", dataset.unknown_categories)):
        for number in ids.tolist():
            yield _Defect(kind, f"annotation {number}")
    names = [dataset.file_name(i) for i in range(len(dataset))]
    for i in np.setdiff1d(np.arange(len(names)), np.unique(names, return_index=True)[1]).tolist():
        yield _Defect("repeated file_name", names[i], int(dataset.image_ids[i]))
    with (
        show_progress("check", total=len(dataset), unit="image") as bar,
        ThreadPoolExecutor(_THREADS) as pool,  # on Drive each file costs its latency: wait for several at once
    ):
        for defects in pool.map(partial(_check_image, images, dataset), range(len(dataset))):
            yield from defects
            bar.update()


def _check_image(images: Path, dataset: CocoDataset, i: int) -> list[_Defect]:
    image, (annotations, faults) = dataset.image(i), dataset.read_annotations(i)
    name, number = image["file_name"], image["id"]
    kind, found, size = _check_file(images, dataset, i)
    defects = [_Defect(kind, f"{name}: {found}", number)] if kind else []
    for fault, reason in faults:
        defects.append(_Defect("bad annotation", f"{name}: annotation {fault}: {reason}", number, fault))
    if not annotations and not faults:
        defects.append(_Defect("image without objects", name, number))
    for one in annotations:
        where, (width, height) = f"{name}: annotation {one['id']}", one["bbox"][2:]
        if not (width > 0 and height > 0) and not one["iscrowd"]:
            defects.append(_Defect("box without area", where, number, one["id"]))
        try:
            if all(size):
                encode_segmentation(one["segmentation"], *size)
        except ColabUtilsError as error:
            defects.append(_Defect("bad mask", f"{where}: {error}", number, one["id"]))
    return defects


def _check_file(images: Path, dataset: CocoDataset, i: int) -> tuple[str, str, tuple[int, int]]:
    """The kind of defect of an image file (or ""), what was found, and the masks' height and width, 0 if unknown."""
    height, width = dataset.sizes[i].tolist()
    size = height, width
    try:
        path, _ = dataset.find_image(images, i)
    except DriveLostError:
        raise
    except ColabUtilsError:
        return "unsafe file_name", "leaves the image folder", size
    try:
        slowed = io.BytesIO(read_file(path)) if get_profile(None, path) else path  # Drive gives a short file whole
        with guard_drive(path), Image.open(slowed) as opened:
            width, height = opened.size
            turned = (width, height) == size and opened.getexif().get(_ORIENTATION, 1) > 4
            if opened.format == "JPEG" and not _ends_as_jpeg(opened.fp):
                opened.load()  # cut short, unless there is more than a few KB of something else after its end
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return "missing image", f"not in {images}", size
    except ColabUtilsError:
        raise  # Drive went away
    except Exception as error:  # Pillow's many readers raise whatever they like on damaged data
        return "bad image", str(error), size
    if not all(size):
        return "", "", (height, width)
    if (height, width) != size and not turned:
        return "size mismatch", f"annotations say {size[1]} x {size[0]}, the file has {width} x {height}", (0, 0)
    return "", "", size


def _ends_as_jpeg(file: Any) -> bool:
    """Whether a JPEG has its end marker; some cameras write zeros or a preview after it."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
    return b"\xff\xd9" in file.read()
