"""Shards as a dataset with torchvision's detection contract.

``(image, target)``: image uint8 [3, H, W]; target a dict of boxes float32 [N, 4] (x0, y0, x1, y1 in pixels),
labels int64 [N] (0 is the background, and never given), masks uint8 [N, H, W], image_id int, area float32 [N],
iscrowd int64 [N]. Crowds and boxes without area are left out, as torchvision's ``references/detection`` does.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections import OrderedDict
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

from colab_utils.data.coco import read_coco
from colab_utils.data.decoding import decode_pixels, read_raw_header
from colab_utils.data.masks import PackedMasks, encode_segmentation, unpack_masks
from colab_utils.drive import DriveFile, DriveLostError, DriveProfile, Retries, get_profile, guard_drive, read_file
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.batch import PackedSample, Target, decode_image
from colab_utils.shards.arrays import ShardArrays, check_bytes, convert_boxes, load_arrays, rebuild_arrays
from colab_utils.shards.format import ShardIndex, ShardInfo, read_index

__all__ = ["CocoFolder", "Labels", "ShardDataset", "ShardFiles", "load_shard"]


class Labels:
    """Labels for COCO categories: the category ids themselves, or 1 to K in the order of the ids.

    Args:
        categories: each with ``id`` and ``name``.
        contiguous: map to 1 to K. It is done anyway where an id is below 1: label 0 is torchvision's background.

    Example:
        >>> labels = Labels([{"id": 3, "name": "car"}, {"id": 9, "name": "boat"}], contiguous=True)
        >>> labels.class_names, labels.category_ids, labels.num_classes
        ({1: 'car', 2: 'boat'}, {1: 3, 2: 9}, 3)
    """

    def __init__(self, categories: Sequence[dict[str, Any]], *, contiguous: bool) -> None:
        names = {category["id"]: category["name"] for category in categories}
        ids = sorted(names)
        mapped = contiguous or (bool(ids) and ids[0] < 1)
        self.category_ids: dict[int, int] = dict(enumerate(ids, 1)) if mapped else {number: number for number in ids}
        """Label to COCO category id."""
        self.class_names: dict[int, str] = {label: names[number] for label, number in self.category_ids.items()}
        """Label to name."""
        self.num_classes = max(self.class_names, default=0) + 1
        """The background included, as torchvision counts."""
        self._ids = np.array(ids, np.int64)
        self._labels = np.array(list(self.category_ids), np.int64)

    def map(self, category_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Category ids as labels, int64 [N] each."""
        return self._labels[np.searchsorted(self._ids, category_ids)]


SHARDS_IN_MEMORY = 2


OPEN_FILES = 512


class ShardFiles:
    """Reads pieces of a folder's files; keeps files open, or the last two shards in memory (``whole_shards``).

    What is not there is read in ``source``, if there is one.
    """

    def __init__(
        self, folder: Path, *, profile: DriveProfile | None, whole_shards: bool, source: Path | None = None
    ) -> None:
        self.folder, self.profile, self.whole_shards, self.source = folder, profile, whole_shards, source
        self.retries = Retries()
        self._open: dict[str, DriveFile] = {}
        self._memory: OrderedDict[int, dict[str, bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        # open files and shards in memory stay in this process
        return {name: getattr(self, name) for name in ("folder", "profile", "whole_shards", "source")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state.pop("folder"), **state)  # type: ignore[misc]

    def read(self, shard: int, name: str, start: int, length: int) -> bytearray:
        """``length`` bytes from ``start`` of a file that belongs to the shard of that number.

        Raises:
            ColabUtilsError: if the file went away or was cut short.
        """
        data = bytearray(length)
        self.read_into(shard, name, start, data)
        return data

    def read_into(self, shard: int, name: str, start: int, buffer: Any) -> None:
        """The same into a writable buffer of bytes."""
        length = memoryview(buffer).nbytes
        try:
            if self.whole_shards:
                data = self._read_whole(shard, name)[start : start + length]
                memoryview(buffer).cast("B")[: len(data)] = data
                got = len(data)
            else:
                got = self._open_file(name).readinto(buffer, start)
                if got < length and self.source is not None:  # it was removed, and may have come back since
                    self._open.pop(name, None)
                    got = self._open_file(name).readinto(buffer, start)
        except OSError as error:
            raise ColabUtilsError(
                f"expected to read {self.folder / name}, found: {error.strerror}. Copy the shards again, or "
                "mount Drive again."
            ) from None
        if got < length:
            raise ColabUtilsError(
                f"expected {start + length:,} bytes or more in {self.folder / name}, found it cut short since it "
                "was opened. Copy it again, or run preprocess again on this folder."
            )

    def _open_file(self, name: str) -> DriveFile:
        file = self._open.get(name)
        if file is None:
            if len(self._open) >= OPEN_FILES:
                self._open.pop(next(iter(self._open)))  # it closes when nothing reads it any more
            try:
                file = self._open[name] = DriveFile(self.folder / name, self.profile, self.retries)
            except FileNotFoundError:
                if self.source is None:
                    raise
                return DriveFile(self.source / name, None, self.retries)
        return file

    def _read_whole(self, shard: int, name: str) -> memoryview:
        with self._lock:  # threads that want the same shard wait for the one that reads it
            files = self._memory.setdefault(shard, {})
            self._memory.move_to_end(shard)
            if len(self._memory) > SHARDS_IN_MEMORY:
                self._memory.popitem(last=False)
            if name not in files:
                files[name] = read_file(self.folder / name, self.profile, self.retries)
            return memoryview(files[name])


def load_shard(
    folder: Path, shard: ShardInfo, *, category_ids: Sequence[int], profile: DriveProfile | None, retries: Retries
) -> ShardArrays:
    """The arrays of one shard; made again from its tar, with a warning, where they are missing or damaged.

    Raises:
        ColabUtilsError: if the tar is missing, cut short or damaged.
        DriveLostError: if Drive fails, and goes on failing while ``retries`` try again.
    """

    def load() -> ShardArrays:
        with guard_drive(folder):
            return _load(folder, shard, category_ids, profile)

    return retries.run(load)


def _load(folder: Path, shard: ShardInfo, category_ids: Sequence[int], profile: DriveProfile | None) -> ShardArrays:
    path, arrays_path = folder / shard.name, folder / shard.arrays_name
    if not path.is_file() or path.stat().st_size != shard.bytes:
        found = f"{path.stat().st_size:,}" if path.is_file() else "none"
        raise ColabUtilsError(
            f"expected {shard.bytes:,} bytes in {path}, found {found}: it was cut short or changed. "
            "Copy it again, or run preprocess again on this folder."
        )
    try:
        if not arrays_path.is_file() or arrays_path.stat().st_size != shard.arrays_bytes:
            raise ColabUtilsError(f"expected {shard.arrays_bytes:,} bytes in {arrays_path}, found another size or none")
        arrays = load_arrays(arrays_path)
        if not (_agree(arrays, shard) and np.isin(arrays.labels, category_ids).all()):
            raise ColabUtilsError(f"expected arrays of {path.name} in {arrays_path}, found numbers that contradict it.")
    except DriveLostError:
        raise
    except ColabUtilsError as error:
        warnings.warn(f"{error} It is made again in memory; copy or preprocess again.", ColabUtilsWarning, stacklevel=5)
        return rebuild_arrays(path)
    if profile is not None:
        with DriveFile(arrays_path, profile) as file:  # what was read so far, at the speed of the slow folder
            file.pread(getattr(arrays.bits, "offset", shard.arrays_bytes), 0)
    return arrays


def _agree(arrays: ShardArrays, shard: ShardInfo) -> bool:
    """Whether every array has its shape and kind, and points inside the shard and the mask bits."""
    images, objects = shard.images, len(arrays.labels)
    expected = {
        "image_ids": (np.int64, (images,)),
        "sizes": (np.int32, (images, 2)),
        "image_spans": (np.int64, (images, 2)),
        "record_spans": (np.int64, (images, 2)),
        "counts": (np.int64, (images,)),
        "boxes": (np.float32, (objects, 4)),
        "labels": (np.int64, (objects,)),
        "areas": (np.float32, (objects,)),
        "crops": (np.int32, (objects, 4)),
        "mask_ends": (np.int64, (objects + 1,)),
        "checks": (np.uint64, (images, 2)),
    }
    if any((getattr(arrays, name).dtype, getattr(arrays, name).shape) != kind for name, kind in expected.items()):
        return False
    spans = np.concatenate([arrays.image_spans, arrays.record_spans])
    inside = (spans >= 0).all() and (spans <= shard.bytes).all() and (spans.sum(1) <= shard.bytes).all()
    if not inside or (arrays.counts < 0).any() or arrays.counts.sum() != objects:
        return False
    corners = arrays.crops.astype(np.int64)
    height, width = np.repeat(arrays.sizes, arrays.counts, axis=0).T
    start, sides = corners[:, :2], corners[:, 2:] - corners[:, :2]
    inside = (start >= 0).all() and (sides >= 0).all() and (corners[:, 2:] <= np.stack([width, height], 1)).all()
    ends = np.concatenate([[0], np.cumsum(-(-sides.prod(1) // 8))])
    return bool(inside and np.array_equal(ends, arrays.mask_ends) and ends[-1] == len(arrays.bits))


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
        self.is_decoded = self.index.recipe["storage"] == "pixels"
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
        """All but pixels and mask bits of some images, without reading a file: see `PackedSamples.describe`."""
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
