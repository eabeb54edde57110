"""DALI on the CPU: decode, resize and flip in its pipeline; it gives polygons, which are drawn
here.
"""

# mypy: disable-error-code="import-not-found,import-untyped,misc"
from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks.data import Data
from benchmarks.systems.base import BATCH_SIZE, Crew, Sample, System, collate

__all__ = ["DALI"]


class DALI(System):
    """From JPEG and polygons to 800/1333. Its masks are drawn at that size, not drawn and then
    resized.
    """

    environment: ClassVar[str] = "dali"
    size_800: ClassVar[bool] = True
    crews: ClassVar[tuple[Crew, ...]] = tuple(Crew(count, "threads") for count in (1, 2, 3))

    def __init__(self, data: Data, folder: Path, crew: Crew) -> None:
        from nvidia.dali import fn, math, pipeline_def, types

        super().__init__(data, folder, crew)

        @pipeline_def(
            batch_size=BATCH_SIZE,
            num_threads=crew.size,
            device_id=None,
            seed=random.randrange(10**6),
        )
        def read() -> Any:
            jpeg, boxes, labels, polygons, points, ids = fn.readers.coco(
                file_root=str(data.images),
                annotations_file=str(data.annotations),
                polygon_masks=True,
                ltrb=True,
                random_shuffle=True,
                initial_fill=data.records,
                image_ids=True,
                skip_empty=False,
                include_iscrowd=False,
                avoid_class_remapping=True,
                name="records",
            )
            shape = fn.peek_image_shape(jpeg, dtype=types.DALIDataType.FLOAT)
            height, width = shape[0], shape[1]
            scale = math.min(800.0 / math.min(height, width), 1333.0 / math.max(height, width))
            size = fn.stack(math.floor(height * scale + 1e-3), math.floor(width * scale + 1e-3))
            image = fn.decoders.image(jpeg, device="cpu", output_type=types.DALIImageType.RGB)
            image = fn.resize(
                image, size=size, interp_type=types.DALIInterpType.INTERP_LINEAR, antialias=False
            )
            flipped = fn.random.coin_flip(probability=0.5)
            image = fn.transpose(fn.flip(image, horizontal=flipped), perm=[2, 0, 1])
            return image, boxes, labels, polygons, points, ids, flipped, shape

        self._pipeline = read()
        self._pipeline.build()

    def __iter__(self) -> Iterator[Any]:
        with ThreadPoolExecutor(2) as pool:
            for first in range(0, self.data.records, BATCH_SIZE):
                count = min(BATCH_SIZE, self.data.records - first)
                outputs = self._pipeline.run()
                rows = [[np.asarray(output.at(row)) for output in outputs] for row in range(count)]
                yield collate([*pool.map(_draw, rows)])


def _draw(row: list[Any]) -> Sample:
    from pycocotools import mask as coco_mask

    image, boxes, labels, polygons, points, image_id, flipped, shape = row
    height, width = image.shape[1:]
    scale = np.array([width / shape[1], height / shape[0]], np.float32)
    boxes, points = boxes * np.tile(scale, 2), points * scale
    if flipped:
        boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
        points[:, 0] = width - points[:, 0]
    masks = np.zeros((len(boxes), height, width), np.uint8)
    parts: list[list[Any]] = [[] for _ in masks]
    for owner, start, stop in polygons.tolist():
        parts[owner].append(points[start:stop].ravel().tolist())
    for mask, outlines in zip(masks, parts, strict=True):
        mask[:] = coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(outlines, height, width)))
    target = {
        "boxes": torch.from_numpy(boxes),
        "labels": torch.from_numpy(labels.ravel().astype(np.int64)),
        "masks": torch.from_numpy(masks),
        "image_id": int(image_id.item()),
    }
    return torch.from_numpy(image.copy()), target
