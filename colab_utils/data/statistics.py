"""A dataset in numbers, and what they advise: input size, classes, images to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.coco import CocoDataset
from colab_utils.data.defects import MODEL_SIZES, Findings, find_scale

__all__ = ["RARE", "ClassCount", "DatasetStatistics", "measure_dataset"]

RARE = 10  # objects, below which a class is not learnt
_SMALL, _MEDIUM = 32**2, 96**2  # COCO's limits, in pixels of the mask
_SIZES = {"small, under 32² px": _SMALL, "medium": _MEDIUM, "large, over 96² px": np.inf}
_RATIOS = {"under 1:3": 1 / 3, "1:3 to 2:3": 2 / 3, "2:3 to 3:2": 1.5, "3:2 to 3:1": 3, "over 3:1": np.inf}
_COUNTS = {"0": 1, "1": 2, "2 to 4": 5, "5 to 9": 10, "10 to 19": 20, "20 and more": np.inf}


@dataclass(frozen=True)
class ClassCount:
    """How often a class is there to learn from."""

    name: str
    objects: int
    images: int


@dataclass(frozen=True)
class DatasetStatistics:
    """The usable objects in numbers; crowds are left out."""

    objects: int
    classes: tuple[ClassCount, ...]
    """The most frequent first."""
    sizes: dict[str, int]
    """Objects by the pixels of their mask, in COCO's three sizes."""
    aspect_ratios: dict[str, int]
    """Objects by width : height of their box."""
    objects_per_image: dict[str, int]
    """Images by their number of objects."""
    median_width_px: float
    """Of the images."""
    median_height_px: float
    enlarged_share: float
    """Of the images, 0 to 1: those that Mask R-CNN enlarges to 800 / 1333 pixels, torchvision's default."""
    enlarged_work: float
    """Pixels that the model sees in place of one of theirs."""
    advice: tuple[str, ...]
    """What to do, in sentences."""


def measure_dataset(dataset: CocoDataset, findings: Sequence[Findings], look_at: Sequence[str]) -> DatasetStatistics:
    """The numbers of a dataset, from what was found in each image; ``look_at``: files with problems."""
    objects = np.concatenate([np.zeros((0, 4)), *(found.objects for found in findings)])
    counts = np.array([len(found.objects) for found in findings], np.int64)
    stored = np.array([found.header.size for found in findings]).reshape(-1, 2)
    sizes = np.where(dataset.sizes.all(1, keepdims=True), dataset.sizes, stored)
    sizes = sizes[(sizes > 0).all(1)].astype(float)
    scales = find_scale(*sizes.T)
    larger = scales > 1
    pixels = sizes.prod(1)
    work = float((pixels * scales**2)[larger].sum() / pixels[larger].sum()) if larger.any() else 1.0
    owners = np.repeat(np.arange(len(findings)), counts)
    classes = [_count_class(one, objects, owners) for one in dataset.categories]
    share = float(larger.mean()) if len(sizes) else 0.0
    height, width = np.median(sizes, 0).tolist() if len(sizes) else (0.0, 0.0)
    advice = [_advise_size(objects, height, width, share, work)] if len(objects) else []
    rare = [f"{one.name} ({one.objects:,})" for one in classes if one.objects < RARE]
    if rare:
        more = f" and {len(rare) - 5} more" if len(rare) > 5 else ""
        advice.append(f"Merge or drop classes of under {RARE} objects: {', '.join(rare[:5])}{more}.")
    if look_at:
        advice.append(f"Look at {', '.join(look_at)} first.")
    return DatasetStatistics(
        objects=len(objects),
        classes=tuple(sorted(classes, key=lambda one: -one.objects)),
        sizes=_count_bins(objects[:, 3], _SIZES),
        aspect_ratios=_count_bins(objects[:, 1] / objects[:, 2], _RATIOS),
        objects_per_image=_count_bins(counts, _COUNTS),
        median_width_px=width,
        median_height_px=height,
        enlarged_share=share,
        enlarged_work=work,
        advice=tuple(advice),
    )


def _count_class(category: dict[str, object], objects: NDArray[np.float64], owners: NDArray[np.int64]) -> ClassCount:
    mine = objects[:, 0] == category["id"]
    return ClassCount(str(category["name"]), int(mine.sum()), len(np.unique(owners[mine])))


def _count_bins(values: NDArray[np.float64] | NDArray[np.int64], limits: dict[str, float]) -> dict[str, int]:
    """How many values lie below each limit, and not below the one before."""
    below = np.searchsorted(np.sort(values), [*limits.values()])
    return dict(zip(limits, np.diff(below, prepend=0).tolist(), strict=True))


def _advise_size(objects: NDArray[np.float64], height: float, width: float, share: float, work: float) -> str:
    """An input size: as the images are where their objects are large, else torchvision's."""
    shorter, longer = (32 * max(1, round(side / 32)) for side in sorted((height, width)))
    small = float((objects[:, 3] < _SMALL).mean())
    default = f"--min-size {MODEL_SIZES[0]} --max-size {MODEL_SIZES[1]}"
    if share < 0.5 or work < 1.3:
        return f"Train at {default}, the default: most images are as large, or larger."
    cost = f"the default enlarges {share:.0%} of the images and makes {work:.1f} times the work"
    if small < 0.3:
        return f"Train at --min-size {shorter} --max-size {longer}, the images' own size: {cost}."
    return f"Keep {default} where AP counts: {cost}, and {small:.0%} of the objects are small, which gain by it."
