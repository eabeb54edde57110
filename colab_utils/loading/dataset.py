"""Shards as a dataset with torchvision's detection contract.

``(image, target)``: image uint8 [3, H, W]; target a dict of boxes float32 [N, 4] (x0, y0, x1, y1 in pixels),
labels int64 [N] (0 is the background, and never given), masks uint8 [N, H, W], image_id int, area float32 [N],
iscrowd int64 [N]. Crowds and boxes without area are left out, as torchvision's ``references/detection`` does.
"""

from __future__ import annotations

import json
from operator import index as as_int
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from colab_utils.data.masks import PackedMasks, unpack_masks
from colab_utils.drive import DriveProfile, get_profile, guard_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.files import ShardFiles, load_shard
from colab_utils.loading.labels import Labels
from colab_utils.loading.sample import PackedSample, Target, decode_image
from colab_utils.shards.arrays import ShardArrays
from colab_utils.shards.format import read_index

__all__ = ["ShardDataset"]


class ShardDataset(Dataset[tuple[Tensor, Target]]):
    """A folder of shards as a map-style dataset with torchvision's detection contract.

    Labels are the COCO category ids, as torchvision's own path gives them; with ``contiguous_labels=True``, or
    where an id 0 would mean the background, they are 1 to K in the order of the ids.

    Args:
        folder: the shards.
        profile: read at the speed of this Drive profile (a name or a ``DriveProfile``), as a slowed folder does.
        whole_shards: read each shard whole, on the first touch, and keep the last two in memory. Default: only
            where the folder is slow (a profile is given); there a jump costs more than the bytes.
        contiguous_labels: map category ids to 1 to K.

    Attributes:
        num_classes: the background included, as torchvision counts.
        class_names: label to name.
        category_ids: label to COCO category id.
        image_ids: int64 [I].
        sizes: int32 [I, 2]: height and width in pixels.
        has_objects: bool [I]: whether an image has an object to train on.
        shard_of: int64 [I]: the number of the shard that each image lies in.
        fingerprint: of the annotations that the shards were made from.

    Raises:
        ColabUtilsError: if there is no finished folder of shards, or a file is missing or damaged; and, for a
            sample, if its shard went away or its image is damaged.

    Example:
        >>> ShardDataset("no/such/folder")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected a folder of shards, found nothing at no/such/folder. ...
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        profile: str | DriveProfile | None = None,
        whole_shards: bool | None = None,
        contiguous_labels: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.profile = get_profile(profile)
        self.whole_shards = self.profile is not None if whole_shards is None else whole_shards
        with guard_drive(self.folder):
            self.index = read_index(self.folder)
            ids = [category["id"] for category in self.index.categories]
            shards = [
                load_shard(self.folder, shard, category_ids=ids, profile=self.profile) for shard in self.index.shards
            ]
        labels = Labels(self.index.categories, contiguous=contiguous_labels)
        self.class_names, self.category_ids, self.num_classes = (
            labels.class_names,
            labels.category_ids,
            labels.num_classes,
        )
        self.fingerprint = self.index.fingerprint
        self.shard_of = np.repeat(np.arange(len(shards)), [len(shard.image_ids) for shard in shards])
        self.image_ids: NDArray[np.int64] = _join(shards, "image_ids", np.int64, ())
        self.sizes: NDArray[np.int32] = _join(shards, "sizes", np.int32, (2,))
        self._image_spans = _join(shards, "image_spans", np.int64, (2,))
        self._record_spans = _join(shards, "record_spans", np.int64, (2,))
        counts = _join(shards, "counts", np.int64, ())
        self.has_objects: NDArray[np.bool_] = counts > 0
        self._first = np.concatenate([[0], np.cumsum(counts)])
        self._boxes = _join(shards, "boxes", np.float32, (4,))
        self._labels = labels.map(_join(shards, "labels", np.int64, ()))
        self._areas = _join(shards, "areas", np.float32, ())
        self._crops = _join(shards, "crops", np.int32, (4,))
        self._shard_first = np.concatenate([[0], np.cumsum([len(shard.labels) for shard in shards])]).astype(np.int64)
        self._mask_ends = [shard.mask_ends for shard in shards]
        # a map of the file would hold it open, and kill the process where the file goes away: where the bits start
        self._bits = [shard.bits.offset if isinstance(shard.bits, np.memmap) else shard.bits for shard in shards]
        self._files = ShardFiles(self.folder, profile=self.profile, whole_shards=self.whole_shards)

    def __len__(self) -> int:
        return len(self.image_ids)

    def __str__(self) -> str:
        return f"{len(self):,} images in {len(self.index.shards)} shards, {len(self.class_names)} categories"

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        sample = self.read_packed(index)
        height, width = sample.image.shape[-2:]
        return sample.image, {
            "boxes": torch.from_numpy(sample.boxes),
            "labels": torch.from_numpy(sample.labels),
            "masks": torch.from_numpy(unpack_masks(sample.masks, height, width)),
            "image_id": sample.image_id,
            "area": torch.from_numpy(sample.areas),
            "iscrowd": torch.from_numpy(sample.iscrowd),
        }

    def get_height_and_width(self, index: int) -> tuple[int, int]:
        """Height and width in pixels, without reading the image (torchvision's aspect-ratio grouping asks)."""
        height, width = self.sizes[self._check(index)].tolist()
        return height, width

    def read_packed(self, index: int) -> PackedSample:
        """The sample with packed masks: what the loader's workers send."""
        index = self._check(index)
        rows = slice(self._first[index], self._first[index + 1])
        data = self.read(index)
        try:
            image = self.decode(data)
        except ColabUtilsError as error:
            raise self._explain_damage(index, str(error)) from None
        if list(image.shape[-2:]) != self.sizes[index].tolist():
            raise self._explain_damage(index, f"it has {image.shape[-1]} x {image.shape[-2]} pixels")
        return PackedSample(
            image=image,
            image_id=int(self.image_ids[index]),
            boxes=self._boxes[rows].copy(),
            labels=self._labels[rows].copy(),
            areas=self._areas[rows].copy(),
            iscrowd=np.zeros(rows.stop - rows.start, np.int64),
            masks=self.read_masks(index),
        )

    def read(self, index: int) -> bytes:
        """The image's bytes, as they lie in the shard."""
        index = self._check(index)
        shard = int(self.shard_of[index])
        return self._files.read(shard, self.index.shards[shard].name, *self._image_spans[index].tolist())

    @staticmethod
    def decode(data: bytes) -> Tensor:
        """JPEG or PNG bytes as uint8 [3, H, W]."""
        return decode_image(data)

    def read_masks(self, index: int) -> PackedMasks:
        """The image's packed masks."""
        index = self._check(index)
        shard = int(self.shard_of[index])
        first, last = self._first[index], self._first[index + 1]
        ends = self._mask_ends[shard][first - self._shard_first[shard] : last - self._shard_first[shard] + 1]
        start, length = int(ends[0]), int(ends[-1] - ends[0])
        bits = self._bits[shard]
        if isinstance(bits, int):
            data = self._files.read(shard, self.index.shards[shard].arrays_name, bits + start, length)
            bits, start = np.frombuffer(bytearray(data), np.uint8), 0
        return PackedMasks(bits[start : start + length], self._crops[first:last], ends - ends[0])

    def record(self, index: int) -> dict[str, Any]:
        """The record's JSON: COCO form, crowds included, masks as compressed RLE with text counts."""
        index = self._check(index)
        shard = int(self.shard_of[index])
        data = self._files.read(shard, self.index.shards[shard].name, *self._record_spans[index].tolist())
        try:
            record: dict[str, Any] = json.loads(data)
        except ValueError as error:
            raise self._explain_damage(index, str(error)) from None
        return record

    def _check(self, index: int) -> int:
        position = as_int(index)
        if not -len(self) <= position < len(self):
            raise IndexError(f"index {position} is outside a dataset of {len(self)} images")
        return position % len(self)

    def _explain_damage(self, index: int, found: str) -> ColabUtilsError:
        path = self.folder / self.index.shards[self.shard_of[index]].name
        return ColabUtilsError(
            f"expected a whole image and record in {path}, found image {self.image_ids[index]} damaged ({found}). "
            "Run verify on the shards, and copy or preprocess again what it names."
        )


def _join(shards: list[ShardArrays], name: str, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    return np.concatenate([getattr(shard, name) for shard in shards] or [np.zeros((0, *shape), dtype)])
