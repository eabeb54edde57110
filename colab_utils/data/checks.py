"""Look over a dataset before anything long starts: every defect by name, what becomes of it, the data in numbers."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import xxhash

from colab_utils.data.coco import CocoDataset, read_coco
from colab_utils.data.defects import Findings, check_image, read_header
from colab_utils.data.statistics import RARE, DatasetStatistics, measure_dataset
from colab_utils.drive import Retries, read_file
from colab_utils.errors import ColabUtilsError, escape
from colab_utils.runtime import count_cores, fork_pool, pop_done, show_progress

__all__ = [
    "EXAMPLES", "DatasetReport", "Problem", "WorstImage", "check_dataset", "inspect_images", "sum_up",
]  # fmt: skip

EXAMPLES = 5  # of each kind
_WORST = 10
_CHUNK = 16  # images that a process takes at a time
_STREAMS = 8  # on Drive each file costs its latency: each process waits for several at once
_shared: Any = None  # in a worker process
_MANY_CROWDS = 0.1  # of the objects: COCO has 1 %

# what each kind of defect does to preprocessing and training; "note" costs nothing, or nothing that can be mended
_KINDS = {
    "stops preprocess": "no images|unknown image|unknown category",
    "stops training: masks are needed, as polygons or RLE": "no instances",
    "image is skipped": "unsafe file_name|missing image|empty file|truncated image|bad image|size mismatch|"
    "bad annotation|object without mask|bad mask",
    "object becomes background": "inverted box|box outside the image",
    "objects become background; where they are CVAT's brush masks: --repair with --crowds objects": "many crowds",
    "object is trained without a pixel": "normalised polygon|empty mask",
    "object is trained with a wrong box": "box of corners|mask and box disagree",
    "average precision comes out too high": "image in validation, too",
    "note: object is left out, as torchvision does": "box without area|crowd",
    "note: object is under a pixel, in the file or once the model has shrunk it": "tiny object",
    "note: cut at the image's edge": "box beyond the image|polygon beyond the image",
    "note: look whether it is what you mean": "self-crossing polygon|name of several categories",
    "note: average precision counts it as a small object": "area 0",
    "note: counts twice": "repeated annotation|repeated file_name",
    "note: kept, left out of training": "image without objects",
    "note: taken as stored; look whether the outlines fit": "EXIF rotation, unclear",
    "note: taken as stored, as annotated": "EXIF rotation, annotated as stored",
    "note: preprocess turns it upright": "EXIF rotation, annotated upright",
    "note: taken": "found by base name|wrong extension",
    "note: becomes 8-bit RGB": "16-bit image|CMYK image|grey image|image with alpha",
    "note: its first frame is taken": "animated image",
    "note: all ids are numbered anew from 1, as 0 is the background's": "category id 0",
    "note: too few to learn": "unused category|rare category",
    "note: costs time, see statistics": "enlarged image",
}
_EFFECTS = {kind: effect for effect, kinds in _KINDS.items() for kind in kinds.split("|")}
_SERIOUS = {kind for kind, effect in _EFFECTS.items() if not effect.startswith("note")}
_COMMON = {
    "grey image",
    "image without objects",
    "EXIF rotation, annotated upright",
    "wrong extension",
}  # no worst ones
# by a key that only their annotations have
_PURPOSES = {
    "caption": "captions", "segments_info": "panoptic segments", "keypoints": "keypoints without masks",
    "bbox": "boxes only: draw masks, or make them from the boxes with Segment Anything",
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """One kind of defect, or of repair."""

    kind: str
    count: int
    """How often it was found."""
    examples: tuple[str, ...]
    """The first five that differ."""
    effect: str
    """What it leads to."""


@dataclass(frozen=True)
class WorstImage:
    """An image with many defects."""

    image_id: int
    file_name: str
    defects: tuple[str, ...]
    """The kind of each."""


@dataclass(frozen=True)
class DatasetReport:
    """What :func:`check_dataset` found."""

    images: int
    annotations: int
    ok: bool
    """Whether every image can be used: nothing but notes was found."""
    problems: tuple[Problem, ...]
    statistics: DatasetStatistics
    worst: tuple[WorstImage, ...]
    """The ten images with most defects."""
    repairs: tuple[Problem, ...] = ()
    """What was mended, and what was left out, where the annotations were repaired."""

    def __str__(self) -> str:
        lines = [f"{self.images:,} images, {self.annotations:,} annotations: {'ok' if self.ok else 'has problems'}"]
        lines += [
            f"  {one.count:,} x {one.kind} ({one.effect}), such as {one.examples[0]}"
            for one in (*self.repairs, *self.problems)
        ]
        return "\n".join([*lines, *(f"  {sentence}" for sentence in self.statistics.advice)])


def check_dataset(
    images: str | Path, annotations: str | Path, *, deep: bool = False,
    validation: tuple[str | Path, str | Path] | None = None,
) -> DatasetReport:  # fmt: skip
    """Check every image file and every annotation of a COCO dataset, on all cores.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        deep: decode each image, in place of its header and end: finds damage in the middle where its format has
            checksums, as PNG has. Preprocessing does so, too.
        validation: image folder and JSON of the validation set: is a picture in both?

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
    findings = inspect_images(Path(images), dataset, deep=deep)
    more = _find_shared(Path(images), dataset, findings, *validation) if validation else []
    return sum_up(dataset, findings, more)


def inspect_images(images: Path, dataset: CocoDataset, *, deep: bool = False) -> list[Findings]:
    """What is wrong with each image and its annotations, in the dataset's order.

    Raises:
        ColabUtilsError: if there is no such folder, or a process was ended.
        DriveLostError: if Drive went away.
    """
    if not images.is_dir():
        raise ColabUtilsError(f"expected an image folder, found none at {images}. On Colab, mount Drive first.")
    starts, settings = range(0, len(dataset), _CHUNK), (images, dataset, deep)
    workers = max(1, min(count_cores(), len(starts)))
    with show_progress("check", total=len(dataset), unit="image") as bar, fork_pool(workers, _share, settings) as pool:
        futures = [pool.submit(_inspect_chunk, start) for start in starts]
        pending = set(futures)
        try:
            while pending:
                bar.update(sum(len(future.result()) for future in pop_done(pending)))
        finally:
            for future in pending:
                future.cancel()
        return [found for future in futures for found in future.result()]


def _share(settings: tuple[Path, CocoDataset, bool]) -> None:
    from PIL import Image

    global _shared
    _shared = settings
    Image.MAX_IMAGE_PIXELS = None  # ours is the limit, and Pillow would warn below it


def _inspect_chunk(start: int) -> list[Findings]:
    """Some images, in a process that has the dataset from the one that forked it."""
    images, dataset, deep = _shared
    chosen = range(start, min(start + _CHUNK, len(dataset)))
    read = partial(read_header, images, dataset, retries=Retries(), deep=deep)
    with ThreadPoolExecutor(_STREAMS) as pool:
        headers = pool.map(read, chosen)
        return [check_image(dataset, i, header) for i, header in zip(chosen, headers, strict=True)]


def sum_up(dataset: CocoDataset, findings: Sequence[Findings], more: Sequence[tuple[str, str]] = ()) -> DatasetReport:
    """The report of what was found in each image, of what concerns the whole dataset, and of ``more`` defects."""
    examples, scores = defaultdict[str, list[str]](list), Counter[int]()
    for i, found in enumerate(findings):
        for kind, text in found.defects:
            examples[kind].append(text)
            scores[i] += 1000 if kind in _SERIOUS else kind not in _COMMON
    statistics = measure_dataset(
        dataset, findings, [dataset.file_name(i) for i, score in scores.most_common(3) if score > 999]
    )
    for kind, text in (*_find_in_all(dataset, findings, statistics), *more):
        examples[kind].append(text)
    problems = tuple(
        Problem(kind, len(examples[kind]), tuple(dict.fromkeys(examples[kind]))[:EXAMPLES], effect)
        for kind, effect in _EFFECTS.items()
        if examples[kind]
    )
    worst = tuple(
        WorstImage(int(dataset.image_ids[i]), dataset.file_name(i), tuple(kind for kind, _ in findings[i].defects))
        for i, score in scores.most_common(_WORST)
        if score
    )
    total = len(dataset.ids) + len(dataset.unknown_images) + len(dataset.unknown_categories)
    ok = not _SERIOUS & {one.kind for one in problems}
    return DatasetReport(len(dataset), total, ok, problems, statistics, worst)


def _find_in_all(
    dataset: CocoDataset, findings: Sequence[Findings], statistics: DatasetStatistics
) -> Iterator[tuple[str, str]]:
    """What no single image shows."""
    if not len(dataset):
        yield "no images", "the list of images is empty"
    for kind, ids in (("unknown image", dataset.unknown_images), ("unknown category", dataset.unknown_categories)):
        yield from ((kind, f"annotation {number}") for number in ids.tolist())
    names = Counter(dataset.file_name(i) for i in range(len(dataset)))
    yield from (("repeated file_name", escape(name)) for name, count in names.items() for _ in range(count - 1))
    lacking = sum(kind == "object without mask" for found in findings for kind, _ in found.defects)
    if lacking and lacking == len(dataset.ids):
        yield "no instances", _name_purpose(dataset)
    crowds, objects = dataset.crowds, len(dataset.ids)
    text = f"{crowds:,} of {objects:,} objects are crowds and left out"
    yield from [("many crowds" if crowds > _MANY_CROWDS * objects else "crowd", text)] * crowds
    named = Counter(one["name"] for one in dataset.categories)
    yield from (("name of several categories", name) for name, count in named.items() if count > 1)
    yield from (("category id 0", one["name"]) for one in dataset.categories if one["id"] == 0)
    for one in statistics.classes:
        if one.objects < RARE:
            yield "rare category" if one.objects else "unused category", f"{one.name} ({one.objects})"
    work = f"{statistics.enlarged_work:.1f} times the pixels"
    yield from [("enlarged image", work)] * round(statistics.enlarged_share * len(findings))


def _name_purpose(dataset: CocoDataset) -> str:
    """What a file is for whose annotations have no masks."""
    entry = json.loads(dataset.texts[slice(*dataset.spans[0].tolist())])
    return next((text for key, text in _PURPOSES.items() if key in entry), "annotations without masks")


def _find_shared(
    images: Path, dataset: CocoDataset, findings: Sequence[Findings], others: str | Path, annotations: str | Path
) -> list[tuple[str, str]]:
    """The pictures that are in another dataset, too, by whatever name: files whose sizes match are compared."""
    by_size, other = defaultdict[int, list[int]](list), read_coco(annotations)
    for i, found in enumerate(findings):
        by_size[found.header.bytes].append(i)

    @cache
    def hash_image(dataset: CocoDataset, folder: str | Path, i: int) -> bytes:
        return xxhash.xxh3_128_digest(read_file(dataset.find_image(folder, i)[0], None, retries))

    def compare(i: int) -> tuple[str, str] | None:
        with suppress(OSError, ColabUtilsError):  # what cannot be read is in no training
            for twin in by_size.get(other.find_image(others, i)[0].stat().st_size, ()):
                if hash_image(dataset, images, twin) == hash_image(other, others, i):
                    return (
                        "image in validation, too",
                        f"{escape(dataset.file_name(twin))} is {escape(other.file_name(i))}",
                    )
        return None

    retries = Retries()
    with ThreadPoolExecutor(_STREAMS) as pool:
        return [*filter(None, pool.map(compare, range(len(other))))]
