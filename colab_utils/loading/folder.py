"""Loose image files and a COCO JSON, read on the fly: what people run today, and our reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from colab_utils.data.coco import read_coco
from colab_utils.data.masks import encode_segmentation
from colab_utils.drive import DriveProfile, Retries, get_profile, read_file
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.labels import Labels
from colab_utils.loading.sample import Target, decode_image
from colab_utils.shards.arrays import convert_boxes

__all__ = ["CocoFolder"]


class CocoFolder(Dataset[tuple[Tensor, Target]]):
    """A folder of images and a COCO JSON as a map-style dataset with torchvision's detection contract.

    Each sample is read, decoded, and its polygons become dense masks, as in torchvision's ``references/detection``
    (``CocoDetection`` with ``ConvertCocoPolysToMask``); only the annotations are kept in flat arrays, and where Drive
    fails it is read again, after growing waits. ``num_classes``, ``class_names``, ``category_ids``, ``image_ids`` and
    ``fingerprint`` are as in ``ShardDataset``; the images are in the order of the file.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        profile: read at the speed of this Drive profile (a name or a ``DriveProfile``).
        contiguous_labels: map category ids to 1 to K.

    Raises:
        ColabUtilsError: if the annotations are missing or not COCO; and, for a sample, if its image or one of its
            masks is bad.
        DriveLostError: if Drive fails, and goes on failing for 81 seconds.

    Example:
        >>> CocoFolder("photos", "no/such/file.json")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected ...
    """

    whole_shards = False

    def __init__(
        self,
        images: str | Path,
        annotations: str | Path,
        *,
        profile: str | DriveProfile | None = None,
        contiguous_labels: bool = False,
    ) -> None:
        self.folder = Path(images)
        self.profile, self.retries = get_profile(profile), Retries()
        self.coco = read_coco(annotations)
        self._labels = Labels(self.coco.categories, contiguous=contiguous_labels)
        self.class_names, self.category_ids = self._labels.class_names, self._labels.category_ids
        self.num_classes = self._labels.num_classes
        self.fingerprint = self.coco.fingerprint
        self.image_ids, self.sizes = self.coco.image_ids, self.coco.sizes

    def __len__(self) -> int:
        return len(self.coco)

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        index = range(len(self))[index]
        data = self.read(index)
        try:
            image = self.decode(data)
        except ColabUtilsError as error:
            raise ColabUtilsError(f"{self.find_path(index)}: {error}. Run check on the dataset.") from None
        height, width = image.shape[-2:]
        annotations, boxes = self._keep(index, height, width)
        labels = self._labels.map(np.array([a["category_id"] for a in annotations], np.int64))
        return image, {
            "boxes": torch.from_numpy(boxes),
            "labels": torch.from_numpy(labels),
            "masks": torch.from_numpy(self._rasterise(annotations, height, width)),
            "image_id": int(self.image_ids[index]),
            "area": torch.tensor([a["area"] for a in annotations], dtype=torch.float32),
            "iscrowd": torch.zeros(len(annotations), dtype=torch.int64),
        }

    def read(self, index: int) -> bytes:
        """The image file's bytes."""
        path = self.find_path(range(len(self))[index])
        try:
            return read_file(path, self.profile, self.retries)
        except OSError as error:
            raise ColabUtilsError(
                f"expected an image file, found none at {path} ({error.strerror}). Run check on the dataset."
            ) from None

    @staticmethod
    def decode(data: bytes) -> Tensor:
        """Image bytes as uint8 [3, H, W]."""
        return decode_image(data)

    def read_masks(self, index: int) -> NDArray[np.uint8]:
        """The image's dense masks, uint8 [N, H, W], from its polygons, at the size that the annotations give."""
        index = range(len(self))[index]
        height, width = self.coco.sizes[index].tolist()
        return self._rasterise(self._keep(index, height, width)[0], height, width)

    def find_path(self, index: int) -> Path:
        """The image's file."""
        return self.folder / self.coco.file_name(index)

    def _keep(self, index: int, height: int, width: int) -> tuple[list[dict[str, Any]], NDArray[np.float32]]:
        annotations = [a for a in self.coco.annotations(index) if not a["iscrowd"]]
        boxes, keep = convert_boxes([a["bbox"] for a in annotations], height, width)
        return [a for a, kept in zip(annotations, keep.tolist(), strict=True) if kept], boxes[keep]

    @staticmethod
    def _rasterise(annotations: list[dict[str, Any]], height: int, width: int) -> NDArray[np.uint8]:
        from pycocotools import mask as coco_mask

        if not annotations:
            return np.zeros((0, height, width), np.uint8)
        rles = []
        for annotation in annotations:
            try:
                rles.append(encode_segmentation(annotation["segmentation"], height, width))
            except ColabUtilsError as error:
                raise ColabUtilsError(f"annotation {annotation['id']}: {error}. Run check on the dataset.") from None
        return np.ascontiguousarray(coco_mask.decode(rles).transpose(2, 0, 1))
