"""Datasets with torchvision's detection contract: from shards, and on the fly from loose files.

Both give ``(image, target)``: image uint8 [3, H, W]; target a dict of boxes float32 [N, 4] (x0, y0, x1, y1 in
pixels), labels int64 [N] (0 is the background, and never given), masks uint8 [N, H, W], image_id int,
area float32 [N], iscrowd int64 [N]. Crowds and boxes without area are left out, as torchvision's
``references/detection`` does.
"""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.io import ImageReadMode, decode_image

from colab_utils.data.coco import read_coco
from colab_utils.data.masks import PackedMasks, encode_segmentation, unpack_masks
from colab_utils.drive import DriveFile, DriveProfile, get_profile, guard_drive, read_file
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import PackedSample, Target
from colab_utils.shards.arrays import ShardArrays, convert_boxes, load_arrays, rebuild_arrays
from colab_utils.shards.format import ShardInfo, read_index

__all__ = ["CocoFolder", "ShardDataset"]

SHARDS_IN_MEMORY = 2


class _Categories:
    """Labels of the model and category ids of the dataset, both ways."""

    def __init__(self, categories: tuple[dict[str, Any], ...], contiguous: bool) -> None:
        ids = sorted(category["id"] for category in categories)
        # 0 is torchvision's background: ids that start there cannot be labels as they are
        mapped = contiguous or (bool(ids) and ids[0] < 1)
        self.category_ids = dict(enumerate(ids, 1)) if mapped else {number: number for number in ids}
        names = {category["id"]: category["name"] for category in categories}
        self.class_names = {label: names[number] for label, number in self.category_ids.items()}
        self._ids = np.array(ids, np.int64)
        self._labels = np.array(sorted(self.category_ids), np.int64)

    def map(self, category_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._labels[np.searchsorted(self._ids, category_ids)]


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
        has_objects: bool [I]: whether an image has an object to train on.
        shard_of: int64 [I]: the number of the shard that each image lies in.
        fingerprint: of the annotations that the shards were made from.

    Raises:
        ColabUtilsError: if there is no finished folder of shards, or a file is missing or damaged.

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
        self._contiguous = contiguous_labels
        with guard_drive(self.folder):
            self.index = read_index(self.folder)
            shards = [_load_shard(self.folder, shard) for shard in self.index.shards]
        categories = _Categories(self.index.categories, contiguous_labels)
        self.class_names, self.category_ids = categories.class_names, categories.category_ids
        self.num_classes = max(self.class_names, default=0) + 1
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
        self._labels = categories.map(_join(shards, "labels", np.int64, ()))
        self._areas = _join(shards, "areas", np.float32, ())
        self._crops = _join(shards, "crops", np.int32, (4,))
        self._shard_first = np.concatenate([[0], np.cumsum([len(shard.labels) for shard in shards])]).astype(np.int64)
        self._mask_ends = [shard.mask_ends for shard in shards]
        self._bits = [shard.bits for shard in shards]
        self._files: dict[int, DriveFile] = {}
        self._memory: OrderedDict[int, bytes] = OrderedDict()

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
            "iscrowd": torch.zeros(len(sample.labels), dtype=torch.int64),
        }

    def __getstate__(self) -> dict[str, Any]:
        # a spawned process opens the shards itself: sending the arrays would copy them
        names = ("folder", "profile", "whole_shards", "_contiguous")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(  # type: ignore[misc]
            state["folder"],
            profile=state["profile"],
            whole_shards=state["whole_shards"],
            contiguous_labels=state["_contiguous"],
        )

    def get_height_and_width(self, index: int) -> tuple[int, int]:
        """Height and width in pixels, without reading the image (torchvision's aspect-ratio grouping asks)."""
        height, width = self.sizes[self._check(index)].tolist()
        return height, width

    def read_packed(self, index: int) -> PackedSample:
        """The sample with packed masks: what the loader's workers send."""
        index = self._check(index)
        rows = slice(self._first[index], self._first[index + 1])
        try:
            image = self.decode(self.read(index))
        except RuntimeError as error:
            name = self.record(index)["file_name"]
            raise ColabUtilsError(
                f"expected a whole image in {self._name(index)}, found {name} damaged ({str(error).splitlines()[0]}). "
                "Run verify on the shards, and copy or preprocess again what it names."
            ) from None
        return PackedSample(
            image=image,
            image_id=int(self.image_ids[index]),
            boxes=self._boxes[rows].copy(),
            labels=self._labels[rows].copy(),
            areas=self._areas[rows].copy(),
            masks=self.read_masks(index),
        )

    def read(self, index: int) -> bytes:
        """The image's bytes, as they lie in the shard."""
        index = self._check(index)
        return self._read_span(index, *self._image_spans[index].tolist())

    @staticmethod
    def decode(data: bytes) -> Tensor:
        """JPEG or PNG bytes as uint8 [3, H, W]."""
        return decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)

    def read_masks(self, index: int) -> PackedMasks:
        """The image's packed masks."""
        index = self._check(index)
        shard = self.shard_of[index]
        first, last = self._first[index], self._first[index + 1]
        ends = self._mask_ends[shard][first - self._shard_first[shard] : last - self._shard_first[shard] + 1]
        return PackedMasks(np.array(self._bits[shard][ends[0] : ends[-1]]), self._crops[first:last], ends - ends[0])

    def record(self, index: int) -> dict[str, Any]:
        """The record's JSON: COCO form, crowds included, masks as compressed RLE with text counts."""
        index = self._check(index)
        record: dict[str, Any] = json.loads(self._read_span(index, *self._record_spans[index].tolist()))
        return record

    def _check(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is outside a dataset of {len(self)} images")
        return int(index) % len(self)

    def _name(self, index: int) -> Path:
        return self.folder / self.index.shards[self.shard_of[index]].name

    def _read_span(self, index: int, start: int, length: int) -> bytes:
        shard = int(self.shard_of[index])
        if self.whole_shards:
            return self._read_whole(shard)[start : start + length]
        if shard not in self._files:
            self._files[shard] = DriveFile(self._name(index), self.profile)
        return self._files[shard].pread(length, start)

    def _read_whole(self, shard: int) -> bytes:
        if shard not in self._memory:
            self._memory[shard] = read_file(self.folder / self.index.shards[shard].name, self.profile)
            if len(self._memory) > SHARDS_IN_MEMORY:
                self._memory.popitem(last=False)
        self._memory.move_to_end(shard)
        return self._memory[shard]


def _load_shard(folder: Path, shard: ShardInfo) -> ShardArrays:
    path = folder / shard.name
    if not path.is_file() or path.stat().st_size != shard.bytes:
        found = f"{path.stat().st_size:,}" if path.is_file() else "none"
        raise ColabUtilsError(
            f"expected {shard.bytes:,} bytes in {path}, found {found}: it was cut short or changed. "
            "Copy it again, or run preprocess again on this folder."
        )
    arrays = folder / shard.arrays_name
    if not arrays.is_file() or arrays.stat().st_size != shard.arrays_bytes:
        return rebuild_arrays(path)
    return load_arrays(arrays)


def _join(shards: list[ShardArrays], name: str, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    return np.concatenate([getattr(shard, name) for shard in shards] or [np.zeros((0, *shape), dtype)])


class CocoFolder(Dataset[tuple[Tensor, Target]]):
    """Loose image files and a COCO JSON, read on the fly: what people run today, and our reference.

    Each sample is read, decoded with Pillow, and its polygons become dense masks, as in torchvision's
    ``references/detection`` (``CocoDetection`` with ``ConvertCocoPolysToMask``); only the annotations are kept in
    flat arrays.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        profile: read at the speed of this Drive profile (a name or a ``DriveProfile``).
        contiguous_labels: map category ids to 1 to K.

    Raises:
        ColabUtilsError: if the annotations are missing or not COCO; and, for a sample, if its image is bad.
    """

    def __init__(
        self,
        images: str | Path,
        annotations: str | Path,
        *,
        profile: str | DriveProfile | None = None,
        contiguous_labels: bool = False,
    ) -> None:
        self.folder = Path(images)
        self.profile = get_profile(profile)
        self.whole_shards = False
        self.coco = read_coco(annotations)
        self._categories = _Categories(self.coco.categories, contiguous_labels)
        self.class_names, self.category_ids = self._categories.class_names, self._categories.category_ids
        self.num_classes = max(self.class_names, default=0) + 1
        self.fingerprint = self.coco.fingerprint
        self.image_ids = self.coco.image_ids

    def __len__(self) -> int:
        return len(self.coco)

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        index = range(len(self))[index]
        image = self.decode(self.read(index))
        height, width = image.shape[-2:]
        annotations, boxes = self._keep(index, height, width)
        labels = self._categories.map(np.array([a["category_id"] for a in annotations], np.int64))
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
        path = self.folder / self.coco.file_name(index)
        try:
            return read_file(path, self.profile)
        except OSError as error:
            raise ColabUtilsError(
                f"expected an image file, found none at {path} ({error.strerror}). Run check on the dataset."
            ) from None

    @staticmethod
    def decode(data: bytes) -> Tensor:
        """Image bytes as uint8 [3, H, W], by Pillow."""
        from PIL import Image

        try:
            pixels = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
        except OSError as error:
            raise ColabUtilsError(f"expected an image, found: {error}. Run check on the dataset.") from None
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()

    def read_masks(self, index: int) -> NDArray[np.uint8]:
        """The image's dense masks, uint8 [N, H, W], from its polygons, at the size that the annotations give."""
        height, width = self.coco.sizes[index].tolist()
        return self._rasterise(self._keep(index, height, width)[0], height, width)

    def _keep(self, index: int, height: int, width: int) -> tuple[list[dict[str, Any]], NDArray[np.float32]]:
        annotations = [a for a in self.coco.annotations(index) if not a["iscrowd"]]
        boxes, keep = convert_boxes([a["bbox"] for a in annotations], height, width)
        return [a for a, kept in zip(annotations, keep.tolist(), strict=True) if kept], boxes[keep]

    @staticmethod
    def _rasterise(annotations: list[dict[str, Any]], height: int, width: int) -> NDArray[np.uint8]:
        from pycocotools import mask as coco_mask

        if not annotations:
            return np.zeros((0, height, width), np.uint8)
        rles = [encode_segmentation(a["segmentation"], height, width) for a in annotations]
        return np.ascontiguousarray(coco_mask.decode(rles).transpose(2, 0, 1))
