"""COCO datasets that tests make, spoil, and then check, repair, write or read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

from colab_utils.data.checks import DatasetReport, check_dataset
from colab_utils.data.repair import repair_annotations
from colab_utils.shards.write import ShardReport, write_shards


def make_object(number: int, image: int, box: list[float], **fields: Any) -> dict[str, Any]:
    """An annotation of a rectangle; ``fields`` are added, or take the place of its own."""
    x, y, width, height = box
    corners = [x, y, x + width, y, x + width, y + height, x, y + height]
    return {
        "id": number,
        "image_id": image,
        "category_id": 1,
        "bbox": box,
        "area": width * height,
        "iscrowd": 0,
        "segmentation": [corners],
        **fields,
    }


def count_problems(report: DatasetReport) -> dict[str, int]:
    """How often a report names each kind of defect."""
    return {problem.kind: problem.count for problem in report.problems}


class CocoFiles:
    """A folder of images and their JSON, which is written anew before each use."""

    def __init__(self, folder: Path) -> None:
        self.images = folder / "images"
        self.annotations = folder / "coco.json"
        self.repaired = folder / "repaired.json"
        self.shards = folder / "shards"
        self.images.mkdir(parents=True, exist_ok=True)
        categories = [{"id": 1, "name": "car"}]
        self.coco: dict[str, Any] = {"images": [], "annotations": [], "categories": categories}

    @property
    def objects(self) -> list[dict[str, Any]]:
        objects: list[dict[str, Any]] = self.coco["annotations"]
        return objects

    def add_image(self, image: Image.Image, name: str, **options: Any) -> dict[str, Any]:
        """Save an image, and return its new entry."""
        image.save(self.images / name, **options)
        number = len(self.coco["images"]) + 1
        entry = {"id": number, "file_name": name, "width": image.width, "height": image.height}
        self.coco["images"].append(entry)
        return entry

    def add_object(self, image: int, box: list[float], **fields: Any) -> None:
        self.objects.append(make_object(len(self.objects) + 1, image, box, **fields))

    def save(self) -> None:
        self.annotations.write_text(json.dumps(self.coco))

    def check(self, **options: Any) -> DatasetReport:
        self.save()
        return check_dataset(self.images, self.annotations, **options)

    def count_problems(self) -> dict[str, int]:
        return count_problems(self.check())

    def repair(self, **options: Any) -> DatasetReport:
        self.save()
        self.repaired.unlink(missing_ok=True)
        return repair_annotations(self.images, self.annotations, output=self.repaired, **options)

    def write(self, **options: Any) -> ShardReport:
        self.save()
        return write_shards(self.images, self.annotations, shards=self.shards, workers=1, **options)

    def open(self, **options: Any) -> Any:
        """The dataset of the loose files."""
        from colab_utils.loading.coco_folder import CocoFolder

        self.save()
        return CocoFolder(self.images, self.annotations, **options)
