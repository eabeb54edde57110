"""Look over a dataset before anything long starts: every defect by name, what becomes of it, the
data in numbers.
"""

import io
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.coco import CocoDataset, read_coco, require_folder
from colab_utils.data.decoding import (
    guard_pillow,
    open_image,
    open_lazily,
    read_orientation,
    to_rgb,
)
from colab_utils.data.masks import encode_segmentation, measure_mask, read_polygons
from colab_utils.data.sizes import MODEL_SIZES, find_scale
from colab_utils.drive import DriveLostError, Retries
from colab_utils.errors import ColabUtilsError, escape
from colab_utils.files import read_file
from colab_utils.machine import count_cores
from colab_utils.processes import fork_pool
from colab_utils.progress import show_progress
from colab_utils.require import require_local_path

_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}
_MODES = {"CMYK": "CMYK image", "L": "grey image", "1": "grey image"}
Defect = tuple[str, str]
"""Its kind, and what was found where."""
NEAR = 2
"""Pixels that boxes, masks and images may differ by."""
HARMLESS = ("box beyond the image", "tiny object")
"""Kinds of `compare_box` that leave a box as it is."""
_EXAMPLES = 5  # of each kind
_WORST = 10
_CHUNK = 16  # images that a process takes at a time
_STREAMS = 8  # on Drive each file costs its latency: each process waits for several at once
_MANY_CROWDS = 0.1  # of the objects: COCO has 1 %
_RARE = 10  # objects, below which a class is not learnt
# COCO's limits, in pixels of the mask
_SMALL = 32**2
_MEDIUM = 96**2
_SIZES = {"small, under 32² px": _SMALL, "medium": _MEDIUM, "large, over 96² px": np.inf}
_RATIOS = {
    "under 1:3": 1 / 3,
    "1:3 to 2:3": 2 / 3,
    "2:3 to 3:2": 1.5,
    "3:2 to 3:1": 3,
    "over 3:1": np.inf,
}
_COUNTS = {"0": 1, "1": 2, "2 to 4": 5, "5 to 9": 10, "10 to 19": 20, "20 and more": np.inf}

# what each kind of defect does to preprocessing and training; "note" costs nothing, or nothing that
# can be mended
_KINDS = {
    "stops preprocess": "no images|repeated image id|unknown image|unknown category",
    "stops training: masks are needed, as polygons or RLE": "no instances",
    "image is "
    "skipped": "unsafe file_name|missing image|empty file|truncated image|bad image|size mismatch|"
    "bad annotation|object without mask|bad mask",
    "object becomes background": "inverted box|box outside the image",
    "objects of one entry become background in the other: make it one "
    "entry": "objects in several entries of an image",
    "objects become background; where they are CVAT's brush masks: --repair with --crowds "
    "objects": "many crowds",
    "object is trained without a pixel": "normalised polygon|empty mask",
    "object is trained with a wrong box": "box of corners|mask and box disagree",
    "average precision comes out too high": "image in validation, too",
    "note: left out of training": "box without area|crowd|image without objects",
    "note: object is under a pixel, in the file or once the model has shrunk it": "tiny object",
    "note: cut at the image's edge": "box beyond the image|polygon beyond the image",
    "note: look whether it is what you "
    "mean": "self-crossing polygon|name of several categories|EXIF rotation, unclear",
    "note: average precision counts it as a small object": "area 0",
    "note: counts twice": "repeated annotation|repeated file_name",
    "note: taken as it is": "found by base name|wrong extension|EXIF rotation, annotated as stored",
    "note: preprocess turns it upright": "EXIF rotation, annotated upright",
    "note: becomes 8-bit RGB, its first "
    "frame": "16-bit image|CMYK image|grey image|image with alpha|animated image",
    "note: all ids are numbered anew from 1, as 0 is the background's": "category id 0",
    "note: too few to learn": "unused category|rare category",
    "note: costs time, see statistics": "enlarged image",
}
_EFFECTS = {kind: effect for effect, kinds in _KINDS.items() for kind in kinds.split("|")}
_SERIOUS = {kind for kind, effect in _EFFECTS.items() if not effect.startswith("note")}
_USUAL = {
    "grey image",
    "image without objects",
    "EXIF rotation, annotated upright",
    "enlarged image",
}
"""Of which an image is none of the worst."""
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
            partial(_read_header, images, part, retries=Retries(), deep=deep), range(len(part))
        )
        return [_check_image(part, i, header) for i, header in enumerate(headers)]


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
            scores[i] += 1000 if kind in _SERIOUS else kind not in _USUAL
    look_at = [escape(dataset.file_name(i)) for i, score in scores.most_common(3) if score >= 1000]
    statistics = _measure_dataset(dataset, findings, look_at)
    for kind, text in (*_find_in_all(dataset, findings, statistics.classes), *more):
        examples[kind].append(text)
    problems = tuple(
        Problem(kind, len(examples[kind]), tuple(dict.fromkeys(examples[kind]))[:_EXAMPLES], effect)
        for kind, effect in _EFFECTS.items()
        if examples[kind]
    )
    worst = {
        int(dataset.image_ids[i]): tuple(dict(findings[i].defects))
        for i, score in scores.most_common(_WORST)
        if score
    }
    total = len(dataset.ids) + len(dataset.unknown_images)
    ok = not _SERIOUS & {one.kind for one in problems}
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
        if objects < _RARE:
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


def _measure_dataset(
    dataset: CocoDataset, findings: "Sequence[Findings]", look_at: Sequence[str]
) -> DatasetStatistics:
    """The numbers of a dataset, from what was found in each image; ``look_at``: files with
    problems.
    """
    objects = np.concatenate([np.zeros((0, 4)), *(found.objects for found in findings)])
    names = {one["id"]: one["name"] for one in dataset.categories}
    classes = Counter(dict.fromkeys(names.values(), 0))
    classes.update(names[number] for number in objects[:, 0].tolist())
    advice = [_advise_size(findings, objects[:, 3])] if len(objects) else []
    rare = [f"{name} ({count:,})" for name, count in classes.items() if count < _RARE]
    if rare:
        more = f" and {len(rare) - 5} more" if len(rare) > 5 else ""
        advice.append(
            f"Merge or drop classes of under {_RARE} objects: {', '.join(rare[:5])}{more}."
        )
    if look_at:
        advice.append(f"Look at {', '.join(look_at)} first.")
    return DatasetStatistics(
        objects=len(objects),
        classes=dict(classes.most_common()),
        sizes=_count_bins(objects[:, 3], _SIZES),
        aspect_ratios=_count_bins(objects[:, 1] / objects[:, 2], _RATIOS),
        objects_per_image=_count_bins(
            np.array([len(found.objects) for found in findings]), _COUNTS
        ),
        advice=tuple(advice),
    )


def _count_bins(values: NDArray[Any], limits: dict[str, float]) -> dict[str, int]:
    """How many values lie below each limit, and not below the one before."""
    below = np.searchsorted(np.sort(values), [*limits.values()])
    return dict(zip(limits, np.diff(below, prepend=0).tolist(), strict=True))


def _advise_size(findings: "Sequence[Findings]", masks: NDArray[np.float64]) -> str:
    """An input size: as the images are where their objects, of these pixels, are large; else
    torchvision's.
    """
    sizes = np.array([found.size for found in findings if all(found.size)], np.float64)
    scales = find_scale(*sizes.T)
    pixels = sizes.prod(1)
    larger = scales > 1
    small = np.mean(masks < _SMALL)
    default = f"--min-size {MODEL_SIZES[0]} --max-size {MODEL_SIZES[1]}"
    work = np.sum((pixels * scales**2)[larger]) / max(1, np.sum(pixels[larger]))
    if larger.mean() < 0.5 or work < 1.3:
        return f"Train at {default}, the default: most images are as large, or larger."
    cost = (
        f"the default enlarges {larger.mean():.0%} of the images and makes {work:.1f} times "
        "the work"
    )
    if small < 0.3:
        shorter, longer = (
            32 * max(1, round(side / 32)) for side in sorted(np.median(sizes, 0).tolist())
        )
        return f"Train at --min-size {shorter} --max-size {longer}, the images' own size: {cost}."
    return (
        f"Keep {default} where AP counts: {cost}, and {small:.0%} of the objects are small, "
        "which gain by it."
    )


class Header(NamedTuple):
    """An image file, without its pixels."""

    defects: list[Defect]
    """Kind and text of each, first of all of what makes the file unusable."""
    size: tuple[int, int] = (0, 0)
    """Height and width as stored, in pixels; 0 where the file is unusable."""
    orientation: int = 1
    """By EXIF, 1 to 8."""
    bytes: int = 0


class Findings(NamedTuple):
    """What was found in one image and its annotations."""

    defects: list[Defect]
    """Kind and text of each."""
    header: Header
    size: tuple[int, int]
    """Height and width that its masks are drawn at, in pixels; 0 where that is not known."""
    objects: NDArray[np.float64]
    """float64 [N, 4]: category id, width and height of the box, pixels of the mask, of each usable
    object.
    """


def _read_header(
    images: Path, dataset: CocoDataset, i: int, retries: Retries, *, deep: bool = False
) -> Header:
    """An image file's header and end; ``deep`` decodes it.

    Raises:
        DriveLostError: if Drive went away.
    """
    try:
        path, by_base_name = dataset.find_image(images, i)
    except DriveLostError:
        raise
    except ColabUtilsError:
        return Header(
            [
                (
                    "unsafe file_name",
                    "leaves the image folder, where no file, or several, have its base name",
                )
            ]
        )
    found = [("found by base name", escape(str(path.relative_to(images))))] if by_base_name else []
    try:
        return _describe(read_file(path, retries), path.suffix.lower(), found, deep=deep)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return Header([("missing image", f"not in {images}")])
    except DriveLostError:
        raise
    except Exception as error:  # Pillow's many readers raise whatever they like on damaged data
        return Header(
            [("truncated image" if "truncated" in str(error) else "bad image", str(error))]
        )


@guard_pillow()
def _describe(data: bytes, suffix: str, found: list[Defect], *, deep: bool) -> Header:
    """The header of an image file with this content, and what its name ends in."""
    from PIL import Image

    if not data:
        return Header([("empty file", "0 bytes")])
    try:
        opened = open_lazily(io.BytesIO(data))
    except ColabUtilsError:
        opened = open_image(data)  # a PNG's metadata may be damaged
    kind, (width, height), notes = opened.format or "", opened.size, [*found]
    # cut short, or much of something else after its end: some cameras write zeros or a preview
    # there
    if deep or _ENDS.get(kind, b"") not in data[-4096:]:
        to_rgb(open_image(data))
    to_rgb(Image.new(opened.mode, (1, 1)))  # refuses what does not fit 8 bits
    belongs = Image.registered_extensions().get(suffix, kind)
    if belongs != kind and {belongs, kind} != {"JPEG", "MPO"}:
        notes.append(("wrong extension", f"holds {kind}"))
    if "16" in f"{opened.mode} {[tile[3] for tile in getattr(opened, 'tile', ())]}":
        notes.append(("16-bit image", opened.mode))
    if opened.mode in _MODES:
        notes.append((_MODES[opened.mode], opened.mode))
    elif opened.mode in ("LA", "RGBA", "PA") or "transparency" in opened.info:
        notes.append(("image with alpha", opened.mode))
    orientation = read_orientation(opened)
    if kind != "MPO":
        with suppress(EOFError):
            opened.seek(1)
            notes.append(("animated image", ""))
    return Header(notes, (height, width), orientation, len(data))


def _check_image(dataset: CocoDataset, i: int, header: Header) -> Findings:
    """Compare an image's annotations with its file, and their boxes with their masks.

    Example:
        >>> from colab_utils.data.coco import read_coco
        >>> _check_image(read_coco("annotations.json"), 0, Header([], size=(480, 640))).defects  # doctest: +SKIP
        []
    """
    name = escape(dataset.file_name(i))
    size = tuple(dataset.sizes[i].tolist())
    compared = compare_sizes(size, header) if all(header.size) else []
    found = [*header.defects, *compared]
    if not all(size):
        size = header.size
    elif compared and compared[0][0] == "size mismatch":
        size = 0, 0  # whose pixels the masks are is not known
    if all(size) and (scale := find_scale(*size)) > 1:
        found.append(("enlarged image", f"{scale**2:.1f} times the pixels"))
    annotations, faults = dataset.read_annotations(i)
    for number, reason in faults:
        kind = "unknown category" if reason.endswith("of no category") else "bad annotation"
        found.append((kind, f"annotation {number}: {reason}"))
    if not annotations and not faults:
        found.append(("image without objects", ""))
    objects = list[tuple[float, ...]]()
    seen = set[tuple[int, str]]()
    for one in annotations:
        wrong, pixels = check_object(one, size) if all(size) else ([], 0)
        if pixels:
            key = one["category_id"], repr(one["segmentation"])
            if key in seen:
                wrong.append(("repeated annotation", ""))
            elif not one["iscrowd"]:
                objects.append((one["category_id"], *one["bbox"][2:], pixels))
            seen.add(key)
        found += [
            (kind, f"annotation {one['id']}: {text}".removesuffix(": ")) for kind, text in wrong
        ]
    defects = [(kind, f"{name}: {text}".removesuffix(": ")) for kind, text in found]
    return Findings(defects, header, size, np.array(objects, np.float64).reshape(-1, 4))


def compare_sizes(size: tuple[int, ...], header: Header) -> list[Defect]:
    """Whether the annotations are of the photo as its file has it, or as its EXIF orientation turns
    it.
    """
    tag = header.orientation
    (height, width) = header.size
    upright = header.size[::-1] if tag > 4 else header.size
    if all(size) and size not in (header.size, upright):
        return [
            (
                "size mismatch",
                f"annotations say {size[1]} x {size[0]}, the file has {width} x {height}",
            )
        ]
    if tag == 1:
        return []
    if not all(size) or header.size == upright:
        return [("EXIF rotation, unclear", f"orientation {tag}, {width} x {height}")]
    kind = (
        "EXIF rotation, annotated upright"
        if size == upright
        else "EXIF rotation, annotated as stored"
    )
    return [(kind, f"orientation {tag}")]


def check_object(one: dict[str, Any], size: tuple[int, int]) -> tuple[list[Defect], int]:
    """The defects of an annotation, and the pixels of its mask; 0 where it cannot be trained on."""
    if not one["segmentation"]:
        return [("object without mask", "")], 0
    try:
        mask = encode_segmentation(one["segmentation"], *size)
    except ColabUtilsError as error:
        return [("bad mask", str(error))], 0
    tight, pixels = measure_mask(mask)
    found = compare_box(one["bbox"], tight, *size)
    wrong_box = found
    if isinstance(one["segmentation"], list):
        polygons = read_polygons(one["segmentation"])
        if is_normalised(np.concatenate(polygons)):
            return [("normalised polygon", "all of its numbers lie in 0 to 1")], 0
        found = _check_polygons(polygons, *size, pixels) + wrong_box
    if pixels and one["area"] <= 0:
        found = [*found, ("area 0", f"the mask has {pixels:,} pixels")]
    return found, pixels if not wrong_box or wrong_box[0][0] in HARMLESS else 0


def count_faults(
    annotations: Sequence[dict[str, Any]], rles: Sequence[dict[str, Any]]
) -> Counter[str]:
    """Return how many of an image's objects are trained wrongly, or not at all, by the kind of
    their defect.

    Args:
        annotations: of the image, crowds included, which do not count.
        rles: their masks.

    Example:
        >>> outline = [[1, 1, 1, 1, 1, 1]]
        >>> one = {"bbox": [0, 0, 8, 6], "segmentation": outline, "iscrowd": 0}
        >>> count_faults([one], [encode_segmentation(outline, 6, 8)])
        Counter({'empty mask': 1})
    """
    from pycocotools import mask as coco_mask

    if not annotations:
        return Counter()
    limits = rles[0]["size"][::-1]
    boxes = np.array([one["bbox"] for one in annotations], np.float64)
    starts = boxes[:, :2].clip(0, limits)
    ends = (boxes[:, :2] + boxes[:, 2:]).clip(0, limits)
    tight = coco_mask.toBbox(rles)
    tight_ends = tight[:, :2] + tight[:, 2:]
    # Most boxes are those of their masks: to look at each alone takes 0.1 ms.
    is_near = np.abs(np.hstack([starts - tight[:, :2], ends - tight_ends])).max(1) <= NEAR
    has_area = (boxes[:, 2:] > 0).all(1) & (ends > starts).all(1) & (tight[:, 2:] > 0).all(1)
    is_sound = is_near & has_area & (tight_ends.max(1) > NEAR)
    kinds = [_find_fault(annotations[i], rles[i]) for i in np.flatnonzero(~is_sound).tolist()]
    return Counter(filter(None, kinds))


def _find_fault(one: dict[str, Any], mask: dict[str, Any]) -> str:
    """Return the kind of defect with which an object is trained wrongly, or not at all; "" if none
    is.
    """
    if one["iscrowd"]:
        return ""
    outline = one["segmentation"]
    tight, _ = measure_mask(mask)
    # Polygons are read again only where all of the mask lies in the image's first pixels.
    if isinstance(outline, list) and max(tight[0] + tight[2], tight[1] + tight[3]) <= NEAR:
        if is_normalised(np.concatenate(read_polygons(outline))):
            return "normalised polygon"
    kinds = [kind for kind, _ in compare_box(one["bbox"], tight, *mask["size"]) if kind in _SERIOUS]
    return kinds[0] if kinds else ""


def describe_faults(faults: Mapping[str, int]) -> str:
    """Return how many objects have each kind of `count_faults`, and what becomes of them.

    Example:
        >>> describe_faults({"empty mask": 1200})
        '1,200 x empty mask: object is trained without a pixel'
    """
    return "; ".join(f"{count:,} x {kind}: {_EFFECTS[kind]}" for kind, count in faults.items())


def _check_polygons(
    polygons: list[NDArray[np.float64]], height: int, width: int, pixels: int
) -> list[Defect]:
    everywhere = np.concatenate(polygons).reshape(-1, 2)
    beyond = max(*-everywhere.min(0), *(everywhere.max(0) - (width, height)))
    if beyond > NEAR:
        return [("polygon beyond the image", f"by {beyond:,.0f} pixels")]
    x, y = polygons[0].reshape(-1, 2).T
    enclosed = abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2
    # the two loops of an eight have opposite signs; drawing fills both
    crossing = len(polygons) == 1 and pixels >= 16 and enclosed < pixels / 2
    return (
        [("self-crossing polygon", f"encloses {enclosed:,.0f} pixels, fills {pixels:,}")]
        if crossing
        else []
    )


def is_normalised(numbers: Any) -> bool:
    """Whether a polygon is given in shares of the image, 0 to 1, not in pixels; one of 0 and 1
    alone is a pixel.

    Example:
        >>> is_normalised([0.1, 0.1, 0.9, 0.1, 0.9, 0.5]), is_normalised([0, 0, 1, 0, 1, 1])
        (True, False)
    """
    return bool(
        np.min(numbers) >= 0 and np.max(numbers) <= 1 and not np.isin(numbers, (0, 1)).all()
    )


def compare_box(box: list[float], tight: list[float], height: int, width: int) -> list[Defect]:
    """A box against the image and the tight box of its mask, each x, y, width, height."""
    from pycocotools import mask as coco_mask

    x, y, w, h = box
    if w < 0 or h < 0:
        return [("inverted box", f"bbox {box}")]
    if not (w > 0 and h > 0):
        return [("box without area", f"bbox {box}")]
    if min(x + w, width) <= max(x, 0) or min(y + h, height) <= max(y, 0):
        return [("box outside the image", f"bbox {box}")]
    if not (tight[2] and tight[3]):
        return [("empty mask" if w * h >= NEAR**2 else "tiny object", f"bbox {box}")]
    edges = np.clip([x, y, x + w, y + h], 0, [width, height] * 2)  # as training cuts it
    inner = np.array([*tight[:2], tight[0] + tight[2], tight[1] + tight[3]])
    cut = (*edges[:2], *edges[2:] - edges[:2])
    corners = (x, y, w - x, h - y)
    overlaps = coco_mask.iou(
        np.array([cut, corners], np.float64), np.array([tight], np.float64), [False]
    ).ravel()
    if overlaps[0] < 0.5 and np.abs(edges - inner).max() > NEAR:
        if overlaps[1] >= 0.5:
            return [("box of corners", f"bbox {box} looks like x0, y0, x1, y1")]
        return [("mask and box disagree", f"bbox {box}, the mask lies in {tight}")]
    if min(w, h) * find_scale(height, width) < 1:
        return [("tiny object", f"{w:.0f} x {h:.0f} pixels of {width} x {height}")]
    if min(x, y) < -NEAR or x + w > width + NEAR or y + h > height + NEAR:
        return [("box beyond the image", f"bbox {box}")]
    return []
