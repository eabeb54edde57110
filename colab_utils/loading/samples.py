"""The base class of the datasets of COCO samples."""

import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from colab_utils.data.decoding import decode_pixels
from colab_utils.loading.targets import Target


class CocoSamples(Dataset[tuple[Tensor, Target]]):
    """The base class of `ShardDataset` and `CocoFolder`.

    It holds the labels, the ids and sizes of the images, and the annotations in COCO form.
    """

    image_ids: NDArray[np.int64]
    sizes: NDArray[np.int32]
    max_bad = 0
    """Number of bad images that a loader may leave out, each with a warning."""

    def _set_labels(self, categories: Sequence[dict[str, Any]], *, contiguous: bool) -> None:
        names = {category["id"]: category["name"] for category in categories}
        ids = sorted(names)
        # Label 0 is torchvision's background. If an id is below 1, all categories are renumbered.
        mapped = contiguous or (bool(ids) and ids[0] < 1)
        labels = range(1, len(ids) + 1) if mapped else ids
        self.category_ids: dict[int, int] = dict(zip(labels, ids, strict=True))
        self.class_names: dict[int, str] = {
            label: names[number] for label, number in self.category_ids.items()
        }
        self.num_classes = max(self.class_names, default=0) + 1

    def _set_counts(self, counts: NDArray[np.int64]) -> None:
        self.counts = counts
        self.has_objects: NDArray[np.bool_] = counts > 0
        self.objects = int(counts.sum())

    def stop(self) -> None:
        """End the background work that brings the dataset's files, if there is any."""

    def _map_labels(self, category_ids: Any) -> NDArray[np.int64]:
        labels, ids = np.array(list(self.category_ids.items()), np.int64).reshape(-1, 2).T
        return labels[np.searchsorted(ids, category_ids)]

    def __len__(self) -> int:
        return len(self.image_ids)

    def _check(self, index: int) -> int:
        # A range accepts negative indices, and raises the IndexError that ends a loop.
        return range(len(self))[index]

    @staticmethod
    def decode(data: bytes | bytearray) -> Tensor:
        """Decode an image file or raw pixels to uint8 [3, H, W]; see ``decode_pixels``.

        Raises:
            ColabUtilsError: The bytes are not a complete image.
        """
        # numpy copies the pixels. torch would do so in OpenMP threads, which a fork does not copy.
        return torch.from_numpy(np.ascontiguousarray(decode_pixels(data).transpose(2, 0, 1)))

    def _make_target(self, index: int, **parts: NDArray[Any]) -> Target:
        parts["iscrowd"] = np.zeros(len(parts["labels"]), np.int64)
        target: Target = {"image_id": int(self.image_ids[index])}
        for key, part in parts.items():
            target[key] = torch.from_numpy(part)
        return target

    def list_annotations(self, index: int) -> list[dict[str, Any]]:
        """Return the image's annotations in COCO form, including crowds."""
        raise NotImplementedError

    def to_coco(self) -> Any:
        """Return the dataset as a ``COCO`` of pycocotools, including crowds, for evaluators.

        Example:
            >>> from pycocotools.cocoeval import COCOeval
            >>> COCOeval(ShardDataset("shards").to_coco(), iouType="segm")  # doctest: +SKIP
        """
        from pycocotools.coco import COCO

        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for index, (height, width) in enumerate(self.sizes.tolist()):
            image_id = int(self.image_ids[index])
            images.append({"id": image_id, "height": height, "width": width})
            # Ids start at 1, because COCOeval takes an annotation with id 0 as "no match".
            for annotation in self.list_annotations(index):
                number = len(annotations) + 1
                annotations.append({**annotation, "image_id": image_id, "id": number})
        categories = [
            {"id": number, "name": self.class_names[label]}
            for label, number in self.category_ids.items()
        ]
        coco = COCO()
        coco.dataset = {
            "info": {},
            "images": images,
            "annotations": annotations,
            "categories": categories,
        }
        with redirect_stdout(io.StringIO()):
            coco.createIndex()
        return coco
