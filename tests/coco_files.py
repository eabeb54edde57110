"""Entries of COCO files that tests make."""

from __future__ import annotations

from typing import Any

from colab_utils.data.checks import DatasetReport


def list_corners(x: float, y: float, width: float, height: float) -> list[float]:
    return [x, y, x + width, y, x + width, y + height, x, y + height]


def make_object(number: int, image: int, box: list[float], **fields: Any) -> dict[str, Any]:
    """An annotation of a rectangle; ``fields`` are added, or take the place of its own."""
    return {
        "id": number,
        "image_id": image,
        "category_id": 1,
        "bbox": box,
        "area": box[2] * box[3],
        "iscrowd": 0,
        "segmentation": [list_corners(*box)],
        **fields,
    }


def count_problems(report: DatasetReport) -> dict[str, int]:
    """How often a report names each kind of defect."""
    return {problem.kind: problem.count for problem in report.problems}
