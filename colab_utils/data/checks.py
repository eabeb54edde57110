"""Check a dataset before preprocessing or training starts.

The report names each kind of defect, says what it leads to, and has statistics of the data.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.coco import CocoDataset, list_repeated_names, read_coco
from colab_utils.data.defects import EFFECTS, SERIOUS, Defect, describe_full_images
from colab_utils.data.image_checks import (
    Findings,
    check_image,
    has_many_crowds,
    read_header,
)
from colab_utils.data.image_paths import require_folder
from colab_utils.data.orientation import Exif, pick_turn
from colab_utils.errors import escape
from colab_utils.files import open_store
from colab_utils.machine import count_cores
from colab_utils.places import Place, PlaceLike, open_place
from colab_utils.processes import JobProgress, run_jobs
from colab_utils.progress import show_progress
from colab_utils.reader import Reader
from colab_utils.require import require_choice
from colab_utils.units import format_count

# Number of examples that the report keeps of each kind of defect.
_EXAMPLES = 5
# Number of images that the report lists as the worst.
_WORST = 10
# If a dataset has at least `_FEW_OBJECTS` objects, and all of them end before this share of their
# images' widths and heights (`_CORNER`), then the outlines may have been drawn on smaller images.
_FEW_OBJECTS = 8
_CORNER = 0.5
# Photos that the report draws both as stored and as EXIF turns them, if nothing decides.
_DRAWN_TURNS = 2
# The worst images are those with the highest scores. A serious defect adds this much to the score
# of its image, and a note adds 1.
_SERIOUS_SCORE = 1000
# The kind of a photo whose size does not tell how it was annotated, by what decides.
_TURNS = {
    "turn": "EXIF rotation, turned",
    "keep": "EXIF rotation, kept",
    "": "EXIF rotation, unclear",
}


@dataclass(frozen=True)
class Problem:
    """Describe one kind of defect, or one kind of repair."""

    kind: str
    count: int
    """Number of defects or repairs of this kind."""
    examples: tuple[str, ...]
    """The first five different examples."""
    effect: str
    """What a defect of this kind leads to, or what the repair did."""


@dataclass(frozen=True)
class DatasetReport:
    """Report what :func:`check_dataset` found."""

    images: int
    annotations: int
    ok: bool
    """Whether every image can be used: no problem is more than a note."""
    problems: tuple[Problem, ...]
    objects: int
    """Number of objects that have a mask; crowds are left out."""
    classes: dict[str, int]
    """How many of these objects each class has, the most frequent class first."""
    advice: str
    """What to do about images with very many objects; empty if there are none."""
    worst: dict[int, tuple[str, ...]]
    """The ten images with the worst defects: a dict from the image id to the kinds of its defects.
    """
    repairs: tuple[Problem, ...] = ()
    """What was mended and what was left out; empty if the annotations were not repaired."""
    exif: str = "keep"
    """What becomes of photos that EXIF turns while the size does not tell how they were annotated:
    "turn" or "keep".
    """
    unclear: tuple[int, ...] = ()
    """Image ids of one or two such photos, if neither the other photos nor ``exif`` decides."""

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "has problems"
        images = format_count(self.images, "image")
        lines = [f"{images}, {format_count(self.annotations, 'annotation')}: {verdict}"]
        lines += [
            f"{problem.count:,} x {problem.kind} ({problem.effect}), such as {problem.examples[0]}"
            for problem in (*self.repairs, *self.problems)
        ]
        return "\n  ".join(filter(None, [*lines, self.advice]))


def check_dataset(
    images: PlaceLike,
    annotations: PlaceLike | CocoDataset,
    *,
    deep: bool = False,
    exif: Exif = "auto",
) -> DatasetReport:
    """Check every image file and every annotation of a COCO dataset, on all cores.

    Args:
        images: the image folder; its path, or a URL that fsspec knows, such as
            ``s3://bucket/images``.
        annotations: the COCO instance JSON; its path, a URL, or what `read_coco` returned.
        deep: decode each image completely. By default, only its header and its end are looked at.
            Decoding also finds damage in the middle of a file, if its format has checksums, as
            PNG has. Preprocessing decodes each image, too.
        exif: what becomes of photos that EXIF turns while their size does not tell how they were
            annotated, as in `write_shards`. With "auto", all other photos are looked at.

    Raises:
        ColabUtilsError: if there is no such folder, or the file is not COCO instance JSON.

    Example:
        >>> import tempfile
        >>> from colab_utils.course.sample_data import make_dataset
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = make_dataset(folder, n=2, width=64, height=64, workers=1)
        ...     check_dataset(made.images, made.annotations).ok
        True
    """
    require_choice("exif", exif, get_args(Exif))
    folder = open_place(images)
    dataset = read_coco(annotations)
    findings = inspect_images(folder, dataset, deep=deep)
    turn, unclear = _settle_turns(dataset, findings, exif)
    return replace(_sum_up(dataset, findings), exif=turn, unclear=unclear)


def inspect_images(images: Place, dataset: CocoDataset, *, deep: bool = False) -> list[Findings]:
    """Return the findings of each image and its annotations, in the dataset's order.

    Raises:
        ColabUtilsError: if there is no such folder, or if a process was killed.
        DriveLostError: if Drive went away.
    """
    require_folder(images)
    total = len(dataset)
    cores = count_cores()
    # Each process has one part, because the start and the end of a part are slow: reading starts
    # with few streams, and at last only the slowest file is left.
    parts = [range(start, total, cores) for start in range(min(cores, total))]
    work = partial(_inspect_parts, images, dataset, deep)
    findings: dict[int, Findings] = {}
    with (
        show_progress("check", total=total, unit="image") as bar,
        closing(run_jobs(work, parts, cores)) as runs,
    ):
        for finished, images_done in runs:
            for part in finished:
                findings.update(part)
            bar.update(images_done - bar.n)
    # On Drive, a file may be missing for a while, so missing files are looked for again.
    missing = [i for i in findings if "missing image" in dict(findings[i].header.defects)]
    if open_store(images).find_again(dataset.find_image(images, i)[0] for i in missing):
        findings.update(next(_inspect_parts(images, dataset, deep, [missing], JobProgress())))
    return [findings[i] for i in range(total)]


def _inspect_parts(
    images: Place,
    dataset: CocoDataset,
    deep: bool,
    parts: Iterable[Sequence[int]],
    progress: JobProgress,
) -> Iterator[dict[int, Findings]]:
    """Yield the findings of all images of each part."""
    for part in parts:
        store = open_store(images)
        read = partial(read_header, store, dataset, deep=deep)
        findings = {}
        with closing(Reader(read, store)) as reader:
            for i, reading in zip(part, reader.read_all(part), strict=True):
                findings[i] = check_image(dataset, i, reading.take())
                progress.add(1)
        yield findings


def _settle_turns(
    dataset: CocoDataset, findings: Sequence[Findings], exif: str
) -> tuple[str, tuple[int, ...]]:
    """Add a defect to the findings of each photo whose size does not tell how it was annotated.

    Returns:
        "turn" or "keep", as such photos are used; and the ids of two of them if nothing decides.
    """
    turn = pick_turn(finding.turn for finding in findings) if exif == "auto" else exif
    unclear = [i for i, finding in enumerate(findings) if finding.turn == "unclear"]
    for i in unclear:
        text = f"{escape(dataset.names[i])}: orientation {findings[i].header.orientation}"
        findings[i].defects.append((_TURNS[turn], text))
    if turn:
        return turn, ()
    unclear.sort(key=lambda i: -len(findings[i].objects))
    return "keep", tuple(dataset.image_ids[unclear[:_DRAWN_TURNS]].tolist())


def _sum_up(dataset: CocoDataset, findings: Sequence[Findings]) -> DatasetReport:
    """Make the report from the findings in each image, and from those in the whole dataset."""
    examples = defaultdict[str, list[str]](list)
    scores = Counter[int]()
    for i, finding in enumerate(findings):
        for kind, text in finding.defects:
            examples[kind].append(text)
            scores[i] += _SERIOUS_SCORE if kind in SERIOUS else kind != "image without objects"
    objects = np.concatenate([np.zeros((0, 3)), *(finding.objects for finding in findings)])
    for kind, text in [*_find_in_all(dataset), *_find_corner(objects[:, 1:])]:
        examples[kind].append(text)
    problems = tuple(
        Problem(kind, len(examples[kind]), tuple(dict.fromkeys(examples[kind]))[:_EXAMPLES], effect)
        for kind, effect in EFFECTS.items()
        if examples[kind]
    )
    names = {category["id"]: category["name"] for category in dataset.categories}
    classes = Counter(dict.fromkeys(names.values(), 0))
    classes.update(names[number] for number in objects[:, 0].tolist())
    per_image = np.array([len(finding.objects) for finding in findings])
    return DatasetReport(
        images=len(dataset),
        annotations=len(dataset.ids) + len(dataset.strangers["unknown image"]),
        ok=SERIOUS.isdisjoint(problem.kind for problem in problems),
        problems=problems,
        objects=len(objects),
        classes=dict(classes.most_common()),
        advice=describe_full_images(per_image),
        worst={
            int(dataset.image_ids[i]): tuple(dict(findings[i].defects))
            for i, score in scores.most_common(_WORST)
            if score
        },
    )


def _find_in_all(dataset: CocoDataset) -> Iterator[Defect]:
    """Yield the defects of the dataset as a whole, which no single image shows."""
    if not len(dataset):
        yield "no images", "the list of images is empty"
    elif not len(dataset.ids):
        yield "no objects", "the list of annotations is empty"
    yield from _find_in_ids(dataset)
    for name, is_same in list_repeated_names(dataset):
        kind = "repeated file_name" if is_same else "objects in several entries of an image"
        yield kind, escape(name)
    crowds = dataset.crowds
    total = len(dataset.ids)
    kind = "many crowds" if has_many_crowds(dataset) else "crowd"
    for _ in range(crowds):
        yield kind, f"{crowds:,} of {total:,} objects are crowds and left out"
    for _ in range(dataset.ignored):
        yield "annotation to ignore", "annotations have 'ignore'"
    yield from _find_in_categories(dataset)


def _find_corner(ends: NDArray[np.float64]) -> Iterator[Defect]:
    """Yield a defect if all objects lie in the upper left corner of their images."""
    if len(ends) >= _FEW_OBJECTS and ends.max() < _CORNER:
        width, height = ends.max(0)
        text = (
            f"all {len(ends):,} objects lie in the left {width:.0%} and the upper {height:.0%} of "
            "their images"
        )
        yield "objects in one corner", text


def _find_in_ids(dataset: CocoDataset) -> Iterator[Defect]:
    """Yield the defects of the ids of images and annotations."""
    for kind in ("repeated image id", "unknown image"):
        for number in dataset.strangers[kind].tolist():
            yield kind, f"id {number}"
    numbers, counts = np.unique(dataset.ids, return_counts=True)
    for number in numbers[counts > 1].tolist():
        yield "repeated annotation id", f"id {number}"


def _find_in_categories(dataset: CocoDataset) -> Iterator[Defect]:
    """Yield the defects of the categories."""
    if dataset.is_federated:
        yield "classes not looked for", "images have not_exhaustive_category_ids, as LVIS's"
    alike = defaultdict[str, list[str]](list)
    for category in dataset.categories:
        alike[" ".join(category["name"].split()).casefold()].append(category["name"])
    for names in alike.values():
        if len(names) > 1:
            yield "name of several categories", ", ".join(map(repr, names))
