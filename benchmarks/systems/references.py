"""What people run today: torchvision's references/detection, a DataLoader over image files and
polygons.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.data import Data, resize_sample
from benchmarks.systems.base import BATCH_SIZE, Crew, Sample, System, collate, flip

__all__ = ["ReferenceDataset", "References", "References800", "TorchLoader"]


class TorchLoader(System):
    """A map-style dataset in a DataLoader, as everybody sets it up."""

    def __init__(self, data: Data, folder: Path, crew: Crew) -> None:
        super().__init__(data, folder, crew)
        self._loader: DataLoader[Any] = DataLoader(
            self.open_dataset(),
            batch_size=BATCH_SIZE,
            shuffle=True,
            num_workers=crew.size,
            collate_fn=self.collate,
            persistent_workers=crew.size > 0,
        )

    def open_dataset(self) -> Dataset[Any]:
        """The dataset."""
        raise NotImplementedError

    def collate(self, samples: list[Any]) -> Any:
        """A batch."""
        return collate(samples)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


class References(TorchLoader):
    """``CocoDetection``, ``ConvertCocoPolysToMask``, ``RandomHorizontalFlip``, ``PILToTensor``: the
    original size.
    """

    def open_dataset(self) -> Dataset[Any]:
        return ReferenceDataset(self.data, resize=self.size_800)


class References800(References):
    """The same, with images and masks resized to 800/1333 on the CPU."""

    size_800: ClassVar[bool] = True


class ReferenceDataset(Dataset[Sample]):
    """Samples as in torchvision's references, as uint8."""

    def __init__(self, data: Data, *, resize: bool) -> None:
        from torchvision.datasets import CocoDetection

        with contextlib.redirect_stdout(io.StringIO()):
            self._coco = CocoDetection(str(data.images), str(data.annotations))
        self._resize = resize

    def __len__(self) -> int:
        return len(self._coco)

    def __getitem__(self, index: int) -> Sample:
        from pycocotools import mask as coco_mask
        from torchvision.transforms.v2 import functional

        photo, annotations = self._coco[index]
        width, height = photo.size
        annotations = [annotation for annotation in annotations if annotation["iscrowd"] == 0]
        boxes = torch.tensor([a["bbox"] for a in annotations], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        boxes[:, 0::2].clamp_(0, width)
        boxes[:, 1::2].clamp_(0, height)
        labels = torch.tensor(
            [annotation["category_id"] for annotation in annotations], dtype=torch.int64
        )
        masks = torch.zeros((len(annotations), height, width), dtype=torch.uint8)
        for mask, annotation in zip(masks, annotations, strict=True):
            dense = np.atleast_3d(
                coco_mask.decode(coco_mask.frPyObjects(annotation["segmentation"], height, width))
            )
            mask.copy_(torch.from_numpy(dense.any(axis=2)))
        keep = (boxes[:, 3] > boxes[:, 1]) & (boxes[:, 2] > boxes[:, 0])
        target = {
            "boxes": boxes[keep],
            "labels": labels[keep],
            "masks": masks[keep],
            "image_id": self._coco.ids[index],
        }
        image = functional.pil_to_tensor(photo)
        return flip(*(resize_sample(image, target) if self._resize else (image, target)))
