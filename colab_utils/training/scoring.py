"""COCO's own sums: average precision of boxes and masks, by pycocotools."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import numpy as np

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.dataset import ShardDataset

__all__ = ["AveragePrecision", "ClassPrecision", "collect_truth", "score_results"]


@dataclass(frozen=True)
class ClassPrecision:
    """Average precision of one class, 0 to 1; None where the images hold no object of it."""

    name: str
    bbox: float | None
    segm: float | None


@dataclass(frozen=True)
class AveragePrecision:
    """COCO average precision, 0 to 1: over IoU 0.50 to 0.95, and at IoU 0.50 alone.

    Example:
        >>> print(AveragePrecision(0.25, 0.2, 0.5, 0.4, 60, ()))
        AP of boxes 0.250 (0.500 at IoU 0.5), of masks 0.200 (0.400 at IoU 0.5), 60 images
    """

    bbox: float
    segm: float
    bbox_50: float
    segm_50: float
    images: int
    per_class: tuple[ClassPrecision, ...]

    def __str__(self) -> str:
        return (
            f"AP of boxes {self.bbox:.3f} ({self.bbox_50:.3f} at IoU 0.5), "
            f"of masks {self.segm:.3f} ({self.segm_50:.3f} at IoU 0.5), {self.images} images"
        )


def score_results(truth: dict[str, Any], results: list[dict[str, Any]]) -> AveragePrecision:
    """The average precision of detections, by pycocotools; ``truth`` is of `collect_truth`."""
    from pycocotools.coco import COCO

    with redirect_stdout(io.StringIO()):  # pycocotools prints
        coco = COCO()
        coco.dataset = truth
        coco.createIndex()
        box, box_50, boxes = _compute_precision(coco, results, "bbox")
        mask, mask_50, masks = _compute_precision(coco, results, "segm")
    names = [category["name"] for category in truth["categories"]]
    per_class = tuple(ClassPrecision(*row) for row in zip(names, boxes, masks, strict=True))
    return AveragePrecision(box, mask, box_50, mask_50, len(truth["images"]), per_class)


def collect_truth(dataset: ShardDataset) -> dict[str, Any]:
    """The annotations of a dataset in COCO form.

    Raises:
        ColabUtilsError: The images hold no object to find.
    """
    records = [dataset.record(i) for i in range(len(dataset))]
    objects = [{**found, "image_id": record["image_id"]} for record in records for found in record["annotations"]]
    if all(found["iscrowd"] for found in objects):
        raise ColabUtilsError(
            f"expected objects to measure against, found none in {len(dataset)} images. "
            "Evaluate on a dataset with annotations."
        )
    return {
        "info": {},
        "images": [{"id": r["image_id"], "width": r["width"], "height": r["height"]} for r in records],
        # Ids from 1: COCOeval takes an annotation with id 0 for "no match".
        "annotations": [{**found, "id": number} for number, found in enumerate(objects, 1)],
        "categories": [
            {"id": int(category), "name": dataset.class_names[label]}
            for label, category in sorted(dataset.category_ids.items())
        ],
    }


def _compute_precision(truth: Any, results: list[dict[str, Any]], kind: str) -> tuple[float, float, list[float | None]]:
    """AP over all IoU, at IoU 0.5, and of each class in the order of the category ids."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    if kind == "segm":  # beside a box, loadRes does not look at the mask
        results = [{key: value for key, value in result.items() if key != "bbox"} for result in results]
    found = truth.loadRes(results) if results else COCO()  # loadRes takes no empty list
    evaluation = COCOeval(truth, found, kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    # precision: [IoU, recall, class, area range, detections an image]; -1 where a class has no object.
    classes = np.moveaxis(evaluation.eval["precision"][:, :, :, 0, -1], 2, 0)
    per_class = [float(values.mean()) if values.max() > -1 else None for values in classes]
    return float(evaluation.stats[0]), float(evaluation.stats[1]), per_class
