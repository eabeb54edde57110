"""Look over a dataset before anything long starts: every defect by name, what becomes of it, the data in numbers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from colab_utils.data.coco import CocoDataset, read_coco, require_folder
from colab_utils.data.defects import MODEL_SIZES, Findings, check_image, find_scale, read_header
from colab_utils.drive import Retries, read_file
from colab_utils.errors import ColabUtilsError, escape
from colab_utils.runtime import count_cores, fork_pool, show_progress

__all__ = [
    "EXAMPLES", "DatasetReport", "DatasetStatistics", "Problem", "WorstImage", "check_dataset", "inspect_images",
]  # fmt: skip

EXAMPLES = 5  # of each kind
_WORST = 10
_CHUNK = 16  # images that a process takes at a time
_STREAMS = 8  # on Drive each file costs its latency: each process waits for several at once
_MANY_CROWDS = 0.1  # of the objects: COCO has 1 %
_RARE = 10  # objects, below which a class is not learnt
_SMALL, _MEDIUM = 32**2, 96**2  # COCO's limits, in pixels of the mask
_SIZES = {"small, under 32² px": _SMALL, "medium": _MEDIUM, "large, over 96² px": np.inf}
_RATIOS = {"under 1:3": 1 / 3, "1:3 to 2:3": 2 / 3, "2:3 to 3:2": 1.5, "3:2 to 3:1": 3, "over 3:1": np.inf}
_COUNTS = {"0": 1, "1": 2, "2 to 4": 5, "5 to 9": 10, "10 to 19": 20, "20 and more": np.inf}

# what each kind of defect does to preprocessing and training; "note" costs nothing, or nothing that can be mended
_KINDS = {
    "stops preprocess": "no images|repeated image id|unknown image|unknown category",
    "stops training: masks are needed, as polygons or RLE": "no instances",
    "image is skipped": "unsafe file_name|missing image|empty file|truncated image|bad image|size mismatch|"
    "bad annotation|object without mask|bad mask",
    "object becomes background": "inverted box|box outside the image",
    "objects of one entry become background in the other: make it one entry": "objects in several entries of an image",
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
# of which an image is none of the worst
_COMMON = {
    "grey image",
    "image without objects",
    "EXIF rotation, annotated upright",
    "wrong extension",
    "enlarged image",
}
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
class DatasetStatistics:
    """The usable objects in numbers; crowds are left out."""

    objects: int
    classes: dict[str, int]
    """Objects by their class, the most frequent first."""
    sizes: dict[str, int]
    """Objects by the pixels of their mask, in COCO's three sizes."""
    aspect_ratios: dict[str, int]
    """Objects by width : height of their box."""
    objects_per_image: dict[str, int]
    """Images by their number of objects."""
    advice: tuple[str, ...]
    """What to do, in sentences."""


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
    return _sum_up(dataset, findings, more)


def inspect_images(images: Path, dataset: CocoDataset, *, deep: bool = False) -> list[Findings]:
    """What is wrong with each image and its annotations, in the dataset's order.

    Raises:
        ColabUtilsError: if there is no such folder, or a process was ended.
        DriveLostError: if Drive went away.
    """
    require_folder(images)
    starts, findings = range(0, len(dataset), _CHUNK), list[Findings]()
    parts = (dataset.subset(start, min(start + _CHUNK, len(dataset))) for start in starts)
    workers = max(1, min(count_cores(), len(starts)))
    with show_progress("check", total=len(dataset), unit="image") as bar, fork_pool(workers) as pool:
        for found in pool.map(partial(_inspect_part, images, deep), parts):
            findings += found
            bar.update(len(found))
    return findings


def _inspect_part(images: Path, deep: bool, part: CocoDataset) -> list[Findings]:
    with ThreadPoolExecutor(_STREAMS) as pool:
        headers = pool.map(partial(read_header, images, part, retries=Retries(), deep=deep), range(len(part)))
        return [check_image(part, i, header) for i, header in enumerate(headers)]


def _sum_up(dataset: CocoDataset, findings: Sequence[Findings], more: Sequence[tuple[str, str]]) -> DatasetReport:
    """The report of what was found in each image, of what concerns the whole dataset, and of ``more`` defects."""
    examples, scores = defaultdict[str, list[str]](list), Counter[int]()
    for i, found in enumerate(findings):
        for kind, text in found.defects:
            examples[kind].append(text)
            scores[i] += 1000 if kind in _SERIOUS else kind not in _COMMON
    worst = [(i, score) for i, score in scores.most_common(_WORST) if score]
    look_at = [escape(dataset.file_name(i)) for i, score in worst[:3] if score >= 1000]
    statistics = _measure_dataset(dataset, findings, look_at)
    for kind, text in (*_find_in_all(dataset, findings, statistics.classes), *more):
        examples[kind].append(text)
    problems = tuple(
        Problem(kind, len(examples[kind]), tuple(dict.fromkeys(examples[kind]))[:EXAMPLES], effect)
        for kind, effect in _EFFECTS.items()
        if examples[kind]
    )
    shown = tuple(
        WorstImage(int(dataset.image_ids[i]), escape(dataset.file_name(i)), tuple(dict(findings[i].defects)))
        for i, _ in worst
    )
    total, ok = len(dataset.ids) + len(dataset.unknown_images), not _SERIOUS & {one.kind for one in problems}
    return DatasetReport(len(dataset), total, ok, problems, statistics, shown)


def _find_in_all(
    dataset: CocoDataset, findings: Sequence[Findings], classes: dict[str, int]
) -> Iterator[tuple[str, str]]:
    """What no single image shows."""
    if not len(dataset):
        yield "no images", "the list of images is empty"
    for number in dataset.repeated_ids.tolist():
        yield "repeated image id", f"id {number}: the first image of it has the annotations"
    yield from (("unknown image", f"annotation {number}") for number in dataset.unknown_images.tolist())
    entries = defaultdict[str, list[bytes]](list)
    for i, found in enumerate(findings):
        entries[dataset.file_name(i)].append(found.objects.tobytes())
    for name, same in entries.items():
        kind = "repeated file_name" if len({*same}) == 1 else "objects in several entries of an image"
        yield from [(kind, escape(name))] * (len(same) - 1)
    lacking = sum(kind == "object without mask" for found in findings for kind, _ in found.defects)
    if lacking and lacking == len(dataset.ids):
        yield "no instances", _name_purpose(dataset)
    crowds, total = dataset.crowds, len(dataset.ids)
    text = f"{crowds:,} of {total:,} objects are crowds and left out"
    yield from [("many crowds" if crowds > _MANY_CROWDS * total else "crowd", text)] * crowds
    named = Counter(one["name"] for one in dataset.categories)
    yield from (("name of several categories", name) for name, count in named.items() if count > 1)
    yield from (("category id 0", one["name"]) for one in dataset.categories if one["id"] == 0)
    for name, objects in classes.items():
        if objects < _RARE:
            yield "rare category" if objects else "unused category", f"{name} ({objects})"


def _name_purpose(dataset: CocoDataset) -> str:
    """What a file is for whose annotations have no masks."""
    entries = dataset.read_entries(int(np.argmax(dataset.first > 0)) - 1)
    return next((text for key, text in _PURPOSES.items() if key in entries[0]), "annotations without masks")


def _find_shared(
    images: Path, dataset: CocoDataset, findings: Sequence[Findings], others: str | Path, annotations: str | Path
) -> list[tuple[str, str]]:
    """The pictures that are in another dataset, too, by whatever name: files whose sizes match are compared."""
    require_folder(others)
    by_size, other = defaultdict[int, list[int]](list), read_coco(annotations)
    for i, found in enumerate(findings):
        by_size[found.header.bytes].append(i)

    @cache
    def hash_file(path: Path) -> bytes:
        return xxhash.xxh3_128_digest(read_file(path, None, retries))

    def compare(i: int) -> tuple[str, str] | None:
        with suppress(OSError, ColabUtilsError):  # what cannot be read is in no training
            path = other.find_image(others, i)[0]
            for twin in by_size.get(path.stat().st_size, ()):
                if hash_file(dataset.find_image(images, twin)[0]) == hash_file(path):
                    text = f"{escape(dataset.file_name(twin))} is {escape(other.file_name(i))}"
                    return "image in validation, too", text
        return None

    retries = Retries()
    with ThreadPoolExecutor(_STREAMS) as pool:
        return [*filter(None, pool.map(compare, range(len(other))))]


def _measure_dataset(dataset: CocoDataset, findings: Sequence[Findings], look_at: Sequence[str]) -> DatasetStatistics:
    """The numbers of a dataset, from what was found in each image; ``look_at``: files with problems."""
    objects = np.concatenate([np.zeros((0, 4)), *(found.objects for found in findings)])
    names = {one["id"]: one["name"] for one in dataset.categories}
    classes = Counter(dict.fromkeys(names.values(), 0))
    classes.update(names[number] for number in objects[:, 0].tolist())
    advice = [_advise_size(findings, objects[:, 3])] if len(objects) else []
    rare = [f"{name} ({count:,})" for name, count in classes.items() if count < _RARE]
    if rare:
        more = f" and {len(rare) - 5} more" if len(rare) > 5 else ""
        advice.append(f"Merge or drop classes of under {_RARE} objects: {', '.join(rare[:5])}{more}.")
    if look_at:
        advice.append(f"Look at {', '.join(look_at)} first.")
    return DatasetStatistics(
        objects=len(objects),
        classes=dict(classes.most_common()),
        sizes=_count_bins(objects[:, 3], _SIZES),
        aspect_ratios=_count_bins(objects[:, 1] / objects[:, 2], _RATIOS),
        objects_per_image=_count_bins(np.array([len(found.objects) for found in findings]), _COUNTS),
        advice=tuple(advice),
    )


def _count_bins(values: NDArray[Any], limits: dict[str, float]) -> dict[str, int]:
    """How many values lie below each limit, and not below the one before."""
    below = np.searchsorted(np.sort(values), [*limits.values()])
    return dict(zip(limits, np.diff(below, prepend=0).tolist(), strict=True))


def _advise_size(findings: Sequence[Findings], masks: NDArray[np.float64]) -> str:
    """An input size: as the images are where their objects, of these pixels, are large; else torchvision's."""
    sizes = np.array([found.size for found in findings if all(found.size)], np.float64)
    scales, pixels = find_scale(*sizes.T), sizes.prod(1)
    larger, small = scales > 1, np.mean(masks < _SMALL)
    default = f"--min-size {MODEL_SIZES[0]} --max-size {MODEL_SIZES[1]}"
    work = np.sum((pixels * scales**2)[larger]) / max(1, np.sum(pixels[larger]))
    if larger.mean() < 0.5 or work < 1.3:
        return f"Train at {default}, the default: most images are as large, or larger."
    cost = f"the default enlarges {larger.mean():.0%} of the images and makes {work:.1f} times the work"
    if small < 0.3:
        shorter, longer = (32 * max(1, round(side / 32)) for side in sorted(np.median(sizes, 0).tolist()))
        return f"Train at --min-size {shorter} --max-size {longer}, the images' own size: {cost}."
    return f"Keep {default} where AP counts: {cost}, and {small:.0%} of the objects are small, which gain by it."
