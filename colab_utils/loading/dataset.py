"""Shards as a dataset with torchvision's detection contract.

``(image, target)``: image uint8 [3, H, W]; target a dict of boxes float32 [N, 4] (x0, y0, x1, y1 in pixels),
labels int64 [N] (0 is the background, and never given), masks uint8 [N, H, W], image_id int, area float32 [N],
iscrowd int64 [N]. Crowds and boxes without area are left out, as torchvision's ``references/detection`` does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from operator import index as as_int
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from colab_utils.data.decoding import decode_pixels, read_raw_header
from colab_utils.data.masks import PackedMasks, unpack_masks
from colab_utils.drive import DriveProfile, Retries, get_profile
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.files import ShardFiles, load_shard
from colab_utils.loading.labels import Labels
from colab_utils.loading.sample import PackedSample, Target, decode_image
from colab_utils.shards.arrays import ShardArrays, check_bytes
from colab_utils.shards.format import ShardIndex, read_index

__all__ = ["ShardDataset"]

_NUMPY, _HEAD_BYTES = b"\x93NUMPY", 4096


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
        is_decoded: whether the images lie in the shards as pixels.

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
        speed = get_profile(profile)
        index = read_index(folder, retries := Retries())
        ids = [category["id"] for category in index.categories]
        load = partial(load_shard, Path(folder), category_ids=ids, profile=speed, retries=retries)
        shards = [load(shard) for shard in index.shards]
        whole = speed is not None if whole_shards is None else whole_shards
        self._open(Path(folder), index, shards, speed, whole_shards=whole, contiguous_labels=contiguous_labels)

    def _open(
        self, folder: Path, index: ShardIndex, shards: list[ShardArrays], profile: DriveProfile | None, *,
        whole_shards: bool, contiguous_labels: bool,
    ) -> None:  # fmt: skip
        self.folder, self.index, self.profile, self.whole_shards = folder, index, profile, whole_shards
        labels = Labels(self.index.categories, contiguous=contiguous_labels)
        self.class_names, self.category_ids, self.num_classes = (
            labels.class_names,
            labels.category_ids,
            labels.num_classes,
        )
        self.fingerprint = self.index.fingerprint
        self.is_decoded = self.index.recipe.get("form") == "pixels"
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
        self._checks = _join(shards, "checks", np.uint64, (2,))
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
        height, width = sample.pixels.shape[:2]
        image = torch.from_numpy(np.ascontiguousarray(sample.pixels.transpose(2, 0, 1)))
        return image, {
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
        """The sample with packed masks."""
        index = self._check(index)
        tables = self.describe([index])
        pixels = np.empty((*self.sizes[index], 3), np.uint8)
        self._read_pixels(index, pixels)
        return PackedSample(
            pixels=pixels,
            image_id=int(self.image_ids[index]),
            **{name: tables[name] for name in ("boxes", "labels", "areas", "iscrowd")},
            masks=self.read_masks(index),
        )

    def describe(self, indices: Sequence[int]) -> dict[str, NDArray[Any]]:
        """All but pixels and mask bits of some images, without reading a file: see ``join_tables``."""
        rows = np.asarray(indices, np.int64)
        first, counts = self._first[rows], self._first[rows + 1] - self._first[rows]
        ends = np.cumsum(counts)
        objects = np.arange(ends[-1]) + np.repeat(first - ends + counts, counts)
        crops = self._crops[objects]
        return {
            "sizes": self.sizes[rows],
            "image_ids": self.image_ids[rows],
            "counts": counts,
            "boxes": self._boxes[objects],
            "labels": self._labels[objects],
            "areas": self._areas[objects],
            "iscrowd": np.zeros(len(objects), np.int64),
            "crops": crops,
            "mask_bytes": -(-(crops[:, 2:] - crops[:, :2]).prod(1, dtype=np.int64) // 8),
        }

    def read_into(self, index: int, pixels: NDArray[np.uint8], bits: NDArray[np.uint8]) -> None:
        """Write an image's pixels, uint8 [H, W, 3], and the bits of all its masks into memory of that size."""
        self._read_bits(index, bits)
        self._read_pixels(index, pixels)

    def _read_bits(self, index: int, bits: NDArray[np.uint8]) -> None:
        if not bits.size:
            return
        shard = int(self.shard_of[index])
        start = int(self._mask_ends[shard][self._first[index] - self._shard_first[shard]])
        held = self._bits[shard]
        if isinstance(held, int):
            self._files.read_into(shard, self.index.shards[shard].arrays_name, held + start, bits)
        else:
            np.copyto(bits, held[start : start + bits.size])
        self._compare(index, 1, bits)

    def _read_pixels(self, index: int, pixels: NDArray[np.uint8]) -> None:
        if self._read_raw(index, pixels):
            return
        data = self.read(index)
        try:
            decoded = decode_pixels(data)
        except ColabUtilsError as error:
            raise self._explain_damage(index, str(error)) from None
        if decoded.shape != pixels.shape:
            raise self._explain_damage(index, f"it has {decoded.shape[1]} x {decoded.shape[0]} pixels")
        np.copyto(pixels, decoded)

    def _read_raw(self, index: int, pixels: NDArray[np.uint8]) -> bool:
        """Read raw pixels straight into their place; False where the image is stored in another form."""
        shard = int(self.shard_of[index])
        start, length = self._image_spans[index].tolist()
        if length <= pixels.size:  # shorter than its pixels: compressed
            return False
        name = self.index.shards[shard].name
        head = self._files.read(shard, name, start, min(length - pixels.size, _HEAD_BYTES))
        if not head.startswith(_NUMPY):
            return False
        try:
            skip, shape = read_raw_header(head)
        except ColabUtilsError as error:
            raise self._explain_damage(index, str(error)) from None
        if shape != pixels.shape or length != skip + pixels.size:
            raise self._explain_damage(index, f"it has {shape[1]} x {shape[0]} pixels in {length - skip:,} bytes")
        self._files.read_into(shard, name, start + skip, pixels)
        self._compare(index, 0, head[:skip], pixels)
        return True

    def read(self, index: int) -> bytearray:
        """The image's bytes, as they lie in the shard."""
        index = self._check(index)
        shard = int(self.shard_of[index])
        data = self._files.read(shard, self.index.shards[shard].name, *self._image_spans[index].tolist())
        self._compare(index, 0, data)
        return data

    def _compare(self, index: int, part: int, *data: Any) -> None:
        """Refuse what is not what was written: a flipped bit may well be an image."""
        expected = int(self._checks[index, part])
        if expected and check_bytes(*data) != expected:
            raise self._explain_damage(index, ("its bytes", "its masks")[part] + " do not match their checksum")

    @staticmethod
    def decode(data: bytes | bytearray) -> Tensor:
        """The image's bytes as uint8 [3, H, W]."""
        return decode_image(data)

    def find_path(self, index: int) -> Path:
        """The shard that the image lies in."""
        return self.folder / self.index.shards[self.shard_of[index]].name

    def read_masks(self, index: int) -> PackedMasks:
        """The image's packed masks."""
        tables = self.describe([self._check(index)])
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(tables["mask_bytes"])])
        bits = np.empty(offsets[-1], np.uint8)
        self._read_bits(index % len(self), bits)
        return PackedMasks(bits, tables["crops"], offsets)

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
        path = self.find_path(index)
        return ColabUtilsError(
            f"expected a whole image and record in {path}, found image {self.image_ids[index]} damaged ({found}). "
            "Run verify on the shards, and copy or preprocess again what it names."
        )


def _join(shards: list[ShardArrays], name: str, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    return np.concatenate([getattr(shard, name) for shard in shards] or [np.zeros((0, *shape), dtype)])
