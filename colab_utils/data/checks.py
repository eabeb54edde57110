"""Look over a dataset before anything long starts: every defect by name, and a repaired JSON if you want one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from colab_utils.data.coco import CocoDataset, is_safe_name, read_coco
from colab_utils.data.masks import encode_segmentation
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import show_progress

__all__ = ["DatasetReport", "Problem", "check_dataset", "repair_annotations"]

EXAMPLES = 5
THREADS = 8

# what each kind of defect does to preprocessing and training; "note" costs nothing
EFFECTS = {
    "unsafe file_name": "stops preprocess",
    "unknown image": "stops preprocess",
    "unknown category": "stops preprocess",
    "missing image": "image is skipped",
    "bad image": "image is skipped",
    "size mismatch": "image is skipped",
    "bad mask": "image is skipped",
    "box without area": "note: object is left out, as torchvision does",
    "image without objects": "note: kept, left out of training",
}


@dataclass(frozen=True)
class Problem:
    """One kind of defect: how often, some examples, and what it leads to."""

    kind: str
    count: int
    examples: tuple[str, ...]
    effect: str


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


def check_dataset(images: str | Path, annotations: str | Path) -> DatasetReport:
    """Check every image file and every annotation of a COCO dataset.

    Each image's header is read and its end looked at; preprocessing decodes each one whole and finds the rest.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.

    Raises:
        ColabUtilsError: if there is no such folder, or the file is not COCO instance JSON.

    Example:
        >>> import tempfile
        >>> from colab_utils.data.builtin import make_dataset
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = make_dataset(folder, n=2, width=64, height=64, workers=1)
        ...     check_dataset(made.images, made.annotations).ok
        True
    """
    dataset = _open(images, annotations)
    found: dict[str, list[str]] = {}
    for kind, example, _, _ in _find_problems(Path(images), dataset):
        found.setdefault(kind, []).append(example)
    problems = tuple(
        Problem(kind, len(found[kind]), tuple(found[kind][:EXAMPLES]), effect)
        for kind, effect in EFFECTS.items()
        if kind in found
    )
    total = len(dataset.ids) + len(dataset.unknown_images) + len(dataset.unknown_categories)
    ok = all(problem.effect.startswith("note") for problem in problems) and len(dataset) > 0
    return DatasetReport(len(dataset), total, ok, problems)


def repair_annotations(images: str | Path, annotations: str | Path, *, output: str | Path) -> DatasetReport:
    """Write a copy of the annotations without the images and annotations that have problems.

    Images with a bad file are left out with their annotations; single bad annotations are left out alone.
    Nothing else changes, and neither does the original.

    Raises:
        ColabUtilsError: as :func:`check_dataset`; or if ``output`` exists.
    """
    output = Path(output)
    if output.exists():
        raise ColabUtilsError(
            f"expected a new file to write, found {output}. Name another: nothing is overwritten."
        )
    dataset = _open(images, annotations)
    bad_images, bad_annotations = set[int](), set[int]()
    for kind, _, image_id, annotation_id in _find_problems(Path(images), dataset):
        if EFFECTS[kind].startswith("note"):
            continue
        if annotation_id is None:
            bad_images.add(image_id)
        else:
            bad_annotations.add(annotation_id)
    raw = json.loads(Path(annotations).read_text(encoding="utf-8-sig"))
    raw["images"] = [image for image in raw["images"] if image["id"] not in bad_images]
    raw["annotations"] = [
        annotation
        for annotation in raw["annotations"]
        if annotation["image_id"] not in bad_images and annotation["id"] not in bad_annotations
    ]
    temporary = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        temporary.write_text(json.dumps(raw), encoding="utf-8")
        os.replace(temporary, output)
    except OSError as error:
        raise ColabUtilsError(f"expected to write {output}, found: {error.strerror}. Name another file.") from None
    finally:
        temporary.unlink(missing_ok=True)
    return check_dataset(images, output)


def _open(images: str | Path, annotations: str | Path) -> CocoDataset:
    if not Path(images).is_dir():
        raise ColabUtilsError(f"expected an image folder, found nothing at {images}. On Colab, mount Drive first.")
    return read_coco(annotations)


def _find_problems(images: Path, dataset: CocoDataset) -> Iterator[tuple[str, str, int, int | None]]:
    """Yield (kind, example, image id, annotation id or None where the whole image is meant)."""
    for kind, ids in (("unknown image", dataset.unknown_images), ("unknown category", dataset.unknown_categories)):
        for number in ids.tolist():
            yield kind, f"annotation {number}", -1, number
    with (
        show_progress("check", total=len(dataset), unit="image") as bar,
        ThreadPoolExecutor(THREADS) as pool,  # on Drive each file costs its latency: wait for several at once
    ):
        for i, (file_kind, reason) in enumerate(pool.map(partial(_check_file, images, dataset), range(len(dataset)))):
            image = dataset.image(i)
            if file_kind:
                yield file_kind, f"{image['file_name']}: {reason}", image["id"], None
            yield from _check_annotations(dataset, i, image)
            bar.update()


def _check_file(images: Path, dataset: CocoDataset, i: int) -> tuple[str, str]:
    """The kind of defect of an image file, and what was found; two empty strings if there is none."""
    from PIL import Image

    image = dataset.image(i)
    if not is_safe_name(image["file_name"]):
        return "unsafe file_name", "leaves the image folder"
    path = images / image["file_name"]
    try:
        if not path.stat().st_size:
            return "bad image", "the file is empty"
        with Image.open(path) as opened:
            width, height = opened.size
            if opened.format == "JPEG" and not _ends_as_jpeg(path):
                return "bad image", "the JPEG has no end: it was cut short"
            turned = opened.getexif().get(0x0112, 1) > 4
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return "missing image", f"not in {images}"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return "bad image", "not an image" if isinstance(error, Image.UnidentifiedImageError) else str(error)
    sizes = [(height, width), (width, height)] if turned else [(height, width)]
    if image["width"] and image["height"] and (image["height"], image["width"]) not in sizes:
        return "size mismatch", f"annotations say {image['width']} x {image['height']}, the file has {width} x {height}"
    return "", ""


def _ends_as_jpeg(path: Path) -> bool:
    """Whether a JPEG has its end marker; some cameras write zeros or a preview after it."""
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(-min(file.tell(), 4096), os.SEEK_END)
        return b"\xff\xd9" in file.read()


def _check_annotations(
    dataset: CocoDataset, i: int, image: dict[str, Any]
) -> Iterator[tuple[str, str, int, int | None]]:
    annotations = dataset.annotations(i)
    name = image["file_name"]
    if not annotations:
        yield "image without objects", name, image["id"], None
    for annotation in annotations:
        number = annotation["id"]
        _, _, width, height = annotation["bbox"]
        if not (width > 0 and height > 0) and not annotation["iscrowd"]:
            yield "box without area", f"{name}: annotation {number}", image["id"], number
        size = image["height"], image["width"]
        if all(size):
            try:
                encode_segmentation(annotation["segmentation"], *size)
            except ColabUtilsError as error:
                yield "bad mask", f"{name}: annotation {number}: {error}", image["id"], number
