"""Measure a dataset, and derive advice from its numbers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.coco import CocoDataset
from colab_utils.data.image_checks import Findings
from colab_utils.units import format_count

USUAL_DETECTIONS = 100
"""Detections in an image that COCO's evaluation counts for each class, and the most that
torchvision's Mask R-CNN gives. In images with more objects, both would cut the average precision.
"""


@dataclass(frozen=True)
class DatasetStatistics:
    """Hold counts of the usable objects; crowds are left out."""

    objects: int
    classes: dict[str, int]
    """Number of objects of each class, the most frequent class first."""
    advice: tuple[str, ...]
    """Sentences that say what to do."""


def measure_dataset(dataset: CocoDataset, findings: Sequence[Findings]) -> DatasetStatistics:
    """Return the statistics of a dataset, by the names of its categories."""
    objects = np.concatenate([np.zeros((0, 3)), *(finding.objects for finding in findings)])
    names = {category["id"]: category["name"] for category in dataset.categories}
    classes = Counter(dict.fromkeys(names.values(), 0))
    classes.update(names[number] for number in objects[:, 0].tolist())
    per_image = np.array([len(finding.objects) for finding in findings])
    full = describe_full_images(per_image)
    return DatasetStatistics(
        objects=len(objects),
        classes=dict(classes.most_common()),
        advice=(full,) if full else (),
    )


def describe_full_images(per_image: NDArray[np.int64]) -> str:
    """Say how many images have more objects than `USUAL_DETECTIONS`; empty if none has.

    ``per_image`` has the number of objects of each image.

    Example:
        >>> describe_full_images(np.array([100, 120])).partition(":")[0]
        '1 image has more than 100 objects (120 at most)'
        >>> describe_full_images(np.array([100]))
        ''
    """
    count = int((per_image > USUAL_DETECTIONS).sum())
    if not count:
        return ""
    largest = per_image.max()
    verb = "has" if count == 1 else "have"
    return (
        f"{format_count(count, 'image')} {verb} more than {USUAL_DETECTIONS} objects ({largest} at "
        f"most): train and evaluate allow {largest} detections in an image, where COCO's "
        f"evaluation and torchvision's models stop at {USUAL_DETECTIONS}."
    )
