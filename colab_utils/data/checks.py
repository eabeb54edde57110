"""Look over a dataset before anything long starts: every defect by name, what becomes of it, the
data in numbers.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from colab_utils.data.coco import CocoDataset, read_coco
from colab_utils.data.defects import EFFECTS, SERIOUS, USUAL, Defect
from colab_utils.data.image_checks import Findings, check_image, read_header
from colab_utils.data.image_paths import require_folder
from colab_utils.data.statistics import RARE, DatasetStatistics, measure_dataset
from colab_utils.drive import Retries
from colab_utils.errors import ColabUtilsError, escape
from colab_utils.files import read_file
from colab_utils.machine import count_cores
from colab_utils.processes import fork_pool
from colab_utils.progress import show_progress
from colab_utils.require import require_local_path

_EXAMPLES = 5  # of each kind


_WORST = 10


_CHUNK = 16  # images that a process takes at a time


_STREAMS = 8  # on Drive each file costs its latency: each process waits for several at once


_MANY_CROWDS = 0.1  # of the objects: COCO has 1 %


_PURPOSES = {
    "segments_info": "panoptic segments",
    "keypoints": "keypoints without masks",
    "bbox": "boxes only: draw masks, or make them from the boxes with Segment Anything",
}
"""By a key that only their annotations have."""


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
class DatasetReport:
    """What :func:`check_dataset` found."""

    images: int
    annotations: int
    ok: bool
    """Whether every image can be used: nothing but notes was found."""
    problems: tuple[Problem, ...]
    statistics: DatasetStatistics
    worst: dict[int, tuple[str, ...]]
    """The kinds of defects of the ten images with most, by their ids."""
    repairs: tuple[Problem, ...] = ()
    """What was mended, and what was left out, where the annotations were repaired."""

    def __str__(self) -> str:
        lines = [
            f"{self.images:,} images, {self.annotations:,} annotations: "
            f"{'ok' if self.ok else 'has problems'}"
        ]
        lines += [
            f"  {one.count:,} x {one.kind} ({one.effect}), such as {one.examples[0]}"
            for one in (*self.repairs, *self.problems)
        ]
        return "\n".join([*lines, *(f"  {sentence}" for sentence in self.statistics.advice)])


def check_dataset(
    images: str | Path,
    annotations: str | Path,
    *,
    deep: bool = False,
    validation: tuple[str | Path, str | Path] | None = None,
) -> DatasetReport:
    """Check every image file and every annotation of a COCO dataset, on all cores.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        deep: decode each image, in place of its header and end: finds damage in the middle where
            its format has checksums, as PNG has. Preprocessing does so, too.
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
    folder = require_local_path(images)
    for place in validation or ():
        require_local_path(place)
    dataset = read_coco(annotations)
    findings = inspect_images(folder, dataset, deep=deep)
    more = _find_shared(folder, dataset, findings, *validation) if validation else []
    return _sum_up(dataset, findings, more)


def inspect_images(images: Path, dataset: CocoDataset, *, deep: bool = False) -> "list[Findings]":
    """What is wrong with each image and its annotations, in the dataset's order.

    Raises:
        ColabUtilsError: if there is no such folder, or a process was ended.
        DriveLostError: if Drive went away.
    """
    require_folder(images)
    starts = range(0, len(dataset), _CHUNK)
    parts = (dataset.subset(start, min(start + _CHUNK, len(dataset))) for start in starts)
    workers = max(1, min(count_cores(), len(starts)))
    with fork_pool(workers) as pool:
        findings = chain.from_iterable(pool.map(partial(_inspect_part, images, deep), parts))
        return list(show_progress("check", findings, total=len(dataset), unit="image"))


def _inspect_part(images: Path, deep: bool, part: CocoDataset) -> "list[Findings]":
    with ThreadPoolExecutor(_STREAMS) as pool:
        headers = pool.map(
            partial(read_header, images, part, retries=Retries(), deep=deep), range(len(part))
        )
        return [check_image(part, i, header) for i, header in enumerate(headers)]


def _sum_up(
    dataset: CocoDataset, findings: "Sequence[Findings]", more: Sequence[Defect]
) -> DatasetReport:
    """The report of what was found in each image, of what concerns the whole dataset, and of
    ``more`` defects.
    """
    examples = defaultdict[str, list[str]](list)
    scores = Counter[int]()
    for i, found in enumerate(findings):
        for kind, text in found.defects:
            examples[kind].append(text)
            scores[i] += 1000 if kind in SERIOUS else kind not in USUAL
    look_at = [escape(dataset.file_name(i)) for i, score in scores.most_common(3) if score >= 1000]
    statistics = measure_dataset(dataset, findings, look_at)
    for kind, text in (*_find_in_all(dataset, findings, statistics.classes), *more):
        examples[kind].append(text)
    problems = tuple(
        Problem(kind, len(examples[kind]), tuple(dict.fromkeys(examples[kind]))[:_EXAMPLES], effect)
        for kind, effect in EFFECTS.items()
        if examples[kind]
    )
    worst = {
        int(dataset.image_ids[i]): tuple(dict(findings[i].defects))
        for i, score in scores.most_common(_WORST)
        if score
    }
    total = len(dataset.ids) + len(dataset.unknown_images)
    ok = not SERIOUS & {one.kind for one in problems}
    return DatasetReport(len(dataset), total, ok, problems, statistics, worst)


def _find_in_all(
    dataset: CocoDataset, findings: "Sequence[Findings]", classes: dict[str, int]
) -> Iterator[Defect]:
    """What no single image shows."""
    if not len(dataset):
        yield "no images", "the list of images is empty"
    for number in dataset.repeated_ids.tolist():
        yield "repeated image id", f"id {number}: the first image of it has the annotations"
    yield from (
        ("unknown image", f"annotation {number}") for number in dataset.unknown_images.tolist()
    )
    entries = defaultdict[str, list[bytes]](list)
    for i, found in enumerate(findings):
        entries[dataset.file_name(i)].append(found.objects.tobytes())
    for name, same in entries.items():
        kind = (
            "repeated file_name" if len({*same}) == 1 else "objects in several entries of an image"
        )
        yield from [(kind, escape(name))] * (len(same) - 1)
    lacking = sum(kind == "object without mask" for found in findings for kind, _ in found.defects)
    if lacking and lacking == len(dataset.ids):
        first = dataset.read_entries(int(np.argmax(dataset.first > 0)) - 1)[0]
        yield (
            "no instances",
            next((text for key, text in _PURPOSES.items() if key in first), "no masks"),
        )
    crowds = dataset.crowds
    total = len(dataset.ids)
    text = f"{crowds:,} of {total:,} objects are crowds and left out"
    yield from [("many crowds" if crowds > _MANY_CROWDS * total else "crowd", text)] * crowds
    named = Counter(one["name"] for one in dataset.categories)
    yield from (("name of several categories", name) for name, count in named.items() if count > 1)
    yield from (("category id 0", one["name"]) for one in dataset.categories if one["id"] == 0)
    for name, objects in classes.items():
        if objects < RARE:
            yield "rare category" if objects else "unused category", f"{name} ({objects})"


def _find_shared(
    images: Path,
    dataset: CocoDataset,
    findings: "Sequence[Findings]",
    others: str | Path,
    annotations: str | Path,
) -> list[Defect]:
    """The pictures that are in another dataset, too, by whatever name: files whose sizes match are
    compared.
    """
    require_folder(others)
    by_size = defaultdict[int, list[int]](list)
    other = read_coco(annotations)
    retries = Retries()
    for i, found in enumerate(findings):
        by_size[found.header.bytes].append(i)

    def compare(i: int) -> Defect | None:
        with suppress(OSError, ColabUtilsError):  # what cannot be read is in no training
            content = read_file(other.find_image(others, i)[0], retries)
            for twin in by_size.get(len(content), ()):
                if read_file(dataset.find_image(images, twin)[0], retries) == content:
                    text = f"{escape(dataset.file_name(twin))} is {escape(other.file_name(i))}"
                    return "image in validation, too", text
        return None

    with ThreadPoolExecutor(_STREAMS) as pool:
        return [*filter(None, pool.map(compare, range(len(other))))]
