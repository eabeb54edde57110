"""A COCO dataset that reads a folder of shards.

A sample has the form that torchvision's detection models expect (torchvision's detection contract):
``(image, target)``. The image is uint8 [3, H, W]. The target is a dict of boxes float32 [N, 4] (x0,
y0, x1, y1 in pixels), labels int64 [N] (from 1; 0 is the background), masks uint8 [N, H, W],
image_id int, area float32 [N] and iscrowd int64 [N]. Crowds, and objects whose box has no area, are
left out, as in torchvision's ``references/detection``.
"""

import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colab_utils.data.decoding import decode_pixels
from colab_utils.data.masks import PackedMasks, number_within
from colab_utils.errors import (
    ColabUtilsError,
    ColabUtilsWarning,
    UnavailableError,
    explain_os_error,
)
from colab_utils.files import Store, hash_bytes, open_store
from colab_utils.loading.masks import unpack_masks
from colab_utils.loading.samples import (
    Bytes,
    CocoSamples,
    PackedSample,
    Sample,
    Tables,
    Transforms,
)
from colab_utils.loading.transforms import apply_transforms
from colab_utils.places import Place, PlaceLike, open_place
from colab_utils.reader import Reader
from colab_utils.shards.arrays import (
    ShardArrays,
    join_shards,
    load_arrays,
    rebuild_arrays,
)
from colab_utils.shards.index import ShardIndex, ShardInfo, read_index
from colab_utils.streams import is_remote
from colab_utils.units import format_count

OPEN_FILES = 4096
"""The largest number of files that a dataset keeps open."""

# The parts of a sample in a shard, in the order of their checksums.
_IMAGE, _MASKS, _RECORD = range(3)


def _load_shard(store: Store, shard: ShardInfo) -> ShardArrays:
    """Return the arrays of a shard.

    If the arrays are missing or damaged, they are made again from the tar, with a warning.

    Raises:
        ColabUtilsError: The tar is missing, cut short or damaged.
        DriveLostError: Drive fails until the store gives up.
    """
    count = store.stamp(shard.name).bytes
    if count < 0 and store.find_again([shard.name]):
        count = store.stamp(shard.name).bytes
    if count != shard.bytes:
        size = f"{count:,}" if count >= 0 else "none"
        raise ColabUtilsError(
            f"{store.locate(shard.name)} should have {shard.bytes:,} bytes, and has {size}: it was "
            "cut short or changed. Copy it again, or run preprocess again on this folder."
        )
    problem = ""
    # Drive gives wrong bytes at times, so they are read twice.
    for _ in range(2):
        try:
            return load_arrays(store, shard)
        except UnavailableError:
            raise
        except (ColabUtilsError, OSError) as error:
            problem = str(error)
    warnings.warn(
        f"{problem} The arrays are made again in memory. Copy or preprocess the shards again.",
        ColabUtilsWarning,
        stacklevel=5,
    )
    return rebuild_arrays(store, shard)


def load_shards(
    store: Store, index: ShardIndex, *, streams: int | str = "auto"
) -> Iterator[ShardArrays]:
    """Yield the arrays of all shards. Several shards are read at the same time."""
    load = partial(_load_shard, store)
    with closing(Reader(load, store, streams=streams)) as reader:
        for reading in reader.read_all(index.shards):
            yield reading.take()


class ShardDataset(CocoSamples):
    """A map-style dataset of a folder of shards, with torchvision's detection contract.

    The images are in the order of the shards, which may differ from the order of the JSON:
    ``image_ids`` says which image is at which index. Labels are the COCO category ids, as in
    torchvision's references. With ``contiguous_labels=True``, or if a category id is below 1,
    labels are 1 to K in the order of the ids.

    Args:
        folder: Folder of shards: a path, or a URL that fsspec knows, such as
            ``s3://bucket/shards``. From Drive or a URL, each image is read over the network when it
            is needed, and the images of a batch are read at the same time.
        transforms: Your own ``torchvision.transforms.v2``. They are applied to each sample, an
            ``(image, target)`` of tv_tensors. ``make_loader(transforms=...)`` applies transforms
            on the device instead. Default: None.
        contiguous_labels: Map category ids to labels 1 to K. Default: False.

    Attributes:
        num_classes: Number of classes, including the background as in torchvision.
        class_names: Dict from a label to the name of its class.
        category_ids: Dict from a label to its COCO category id.
        image_ids: int64 [I]: COCO id of each of the I images.
        sizes: int32 [I, 2]: height and width of each image in pixels.
        counts: int64 [I]: number of objects of each image.
        shard_of: int64 [I]: number of the shard that holds each image.
        fingerprint: Fingerprint of the annotations that the shards were made from.

    Raises:
        ColabUtilsError: The folder holds no complete shards, or a file is missing or damaged. When
            a sample is read: its shard is gone, or its image is damaged.

    Example:
        >>> ShardDataset("no/such/folder")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: There are no shards in ...
    """

    def __init__(
        self,
        folder: PlaceLike,
        *,
        transforms: Transforms | None = None,
        contiguous_labels: bool = False,
    ) -> None:
        folder = open_place(folder)
        index = read_index(folder)
        shards = load_shards(open_store(folder), index)
        self._open(folder, index, shards, transforms, contiguous_labels=contiguous_labels)
        if is_remote(folder):
            self.streams = "auto"
            self.is_slow = True

    def _open(
        self,
        folder: Place,
        index: ShardIndex,
        shards: Iterable[ShardArrays],
        transforms: Transforms | None,
        *,
        contiguous_labels: bool,
    ) -> None:
        self.folder = folder
        self.store = open_store(folder)
        self.index = index
        self.transforms = transforms
        self.fingerprint = index.fingerprint
        self._set_labels(index.categories, contiguous=contiguous_labels)
        # This list has one entry for each shard. If the arrays file of the shard was damaged, the
        # entry holds the mask bits that were made again. If the entry is a number, the mask bits
        # are read from the file.
        arrays = [*shards]
        if not arrays:
            raise ColabUtilsError(
                f"The index in {self.folder} names no shards. Run preprocess again."
            )
        self._bits = [shard["bits"] for shard in arrays]
        tables = join_shards(arrays)
        self._tables = tables
        self.image_ids = tables["image_ids"]
        self.sizes = tables["sizes"]
        self.shard_of = tables["shard_of"]
        self.counts = tables["counts"]

    @property
    def left_out(self) -> int:
        """Return the number of annotations that the shards hold, but that are not trained on."""
        return sum(shard.annotations for shard in self.index.shards) - self.objects

    def __str__(self) -> str:
        return (
            f"{format_count(len(self), 'image')} in "
            f"{format_count(len(self.index.shards), 'shard')}, "
            f"{format_count(len(self.class_names), 'category', 'categories')}"
        )

    def __getitem__(self, index: int) -> Sample:
        pixels, bits, tables = self.read_packed(index)
        image = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
        masks = unpack_masks(_join_masks(bits, tables), *pixels.shape[:2])
        target = self._make_target(
            index, boxes=tables["boxes"], labels=tables["labels"], masks=masks, area=tables["areas"]
        )
        return apply_transforms(self.transforms, image, target)

    @property
    def writes_itself(self) -> bool:
        """Return whether nothing changes the samples on their way into a batch."""
        is_plain = type(self).__getitem__ is ShardDataset.__getitem__
        return is_plain and self.transforms is None

    def read_packed(self, index: int) -> PackedSample:
        """Return the sample with packed masks."""
        tables = self.describe([index])
        pixels = np.empty((*tables["sizes"][0], 3), np.uint8)
        bits = np.empty(tables["mask_bytes"].sum(), np.uint8)
        self.read_into(index, pixels, bits)
        return PackedSample(pixels, bits, tables)

    def read_masks(self, index: int) -> PackedMasks:
        """Return the image's packed masks."""
        tables = self.describe([index])
        bits = np.empty(tables["mask_bytes"].sum(), np.uint8)
        self._read_bits(self._check(index), bits)
        return _join_masks(bits, tables)

    def describe(self, indices: Sequence[int]) -> Tables:
        """Return the tables of some images without reading a file.

        The tables hold everything but pixels and mask bits; see `PackedSample.tables`.
        """
        rows = np.array([self._check(index) for index in indices], np.int64)
        tables = {name: self._tables[name][rows] for name in ("sizes", "image_ids", "counts")}
        first = self._tables["first"][rows]
        objects = np.repeat(first, tables["counts"]) + number_within(tables["counts"])
        for name in ("boxes", "labels", "areas", "crops", "mask_bytes"):
            tables[name] = self._tables[name][objects]
        tables["labels"] = self._map_labels(tables["labels"])
        tables["iscrowd"] = np.zeros(len(objects), np.int64)
        return tables

    def read_into(self, index: int, pixels: Bytes, bits: Bytes) -> None:
        """Write an image's pixels, uint8 [H, W, 3], and the bits of all its masks into these
        arrays.
        """
        index = self._check(index)
        self._read_bits(index, bits)
        data = self._take(index, _IMAGE)
        try:
            np.copyto(pixels, decode_pixels(data))
        except ColabUtilsError as error:
            raise self._explain_damage(index, str(error)) from None

    def _read_bits(self, index: int, bits: Bytes) -> None:
        if bits.size:
            np.copyto(bits, np.frombuffer(self._take(index, _MASKS), np.uint8))

    def load_image(self, index: int) -> Tensor:
        """Return the image, uint8 [3, H, W]."""
        return self.decode(self.read(index))

    def read(self, index: int) -> bytearray:
        """Return the image's bytes as stored in the shard."""
        data: bytearray = self._take(self._check(index), _IMAGE)
        return data

    def _take(self, index: int, part: int) -> Any:
        """Return the bytes of a part of an image, which were read ahead or are read now.

        An image with a flipped bit may decode without an error, so decoding does not find all
        damage.

        Raises:
            ColabUtilsError: The bytes do not match their checksum, and not when they are read again
                either: Drive gives wrong bytes at times.
        """
        for read in (self._open_reader().take, self._read_part):
            data = read((index, part))
            if int(hash_bytes(data), 16) == int(self._tables["checks"][index, part]):
                return data
        raise self._explain_damage(index, "its bytes do not match their checksum")

    def _list_parts(self, index: int) -> list[tuple[int, int]]:
        parts = [(index, _IMAGE)]
        return [(index, _MASKS), *parts] if self.counts[index] else parts

    def _read_part(self, key: tuple[int, int]) -> Any:
        index, part = key
        shard = int(self.shard_of[index])
        info = self.index.shards[shard]
        name = info.name
        if part == _MASKS:
            first = self._tables["first"][index]
            start = int(self._tables["bit_starts"][index])
            length = int(self._tables["mask_bytes"][first : first + self.counts[index]].sum())
            if not isinstance(self._bits[shard], int):
                return self._bits[shard][start : start + length]
            name = info.arrays_name
        else:
            spans = self._tables["image_spans" if part == _IMAGE else "record_spans"]
            start, length = spans[index].tolist()
        data = bytearray(length)
        self._fill(data, name, start)
        return data

    def _fill(self, data: bytearray, name: str, start: int) -> None:
        """Fill the data with bytes of a file, from byte ``start`` on. Threads may call this.

        The files that were read last stay open. A file that is dropped is closed when no thread
        reads it any more.

        Raises:
            ColabUtilsError: The file is gone or was cut short.
        """
        if self._open_file is None:
            import resource

            # Other datasets and the workers open files, too.
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            self._open_file = lru_cache(min(OPEN_FILES, limit // 8 + 1))(self.store.open)
        cure = "Copy the shards again, or mount Drive again."
        try:
            count = self._open_file(name).readinto(data, start)
            problem = f"the file was cut short. {cure}"
        except OSError as error:
            count = -1
            problem = explain_os_error(error, cure)
        if count < len(data):
            raise ColabUtilsError(
                f"The first {start + len(data):,} bytes of {self.folder / name} cannot be read: "
                f"{problem}"
            )

    def find_path(self, index: int) -> Place:
        """Return the path of the shard that holds the image."""
        return self.folder / self.index.shards[self.shard_of[self._check(index)]].name

    def record(self, index: int) -> dict[str, Any]:
        """Return the record's JSON in COCO form, including crowds.

        Masks are compressed RLE with text counts.
        """
        index = self._check(index)
        record: dict[str, Any] = json.loads(self._take(index, _RECORD))
        return record

    def list_annotations(self, index: int) -> list[dict[str, Any]]:
        """Return the image's annotations in COCO form, including crowds."""
        return list(self.record(index)["annotations"])

    def to_coco(self) -> Any:
        """Return the dataset as `CocoSamples.to_coco` does. Records on Drive are read ahead."""
        with self._read_parts((index, _RECORD) for index in range(len(self))):
            return super().to_coco()

    def _explain_damage(self, index: int, problem: str) -> ColabUtilsError:
        return ColabUtilsError(
            f"In {self.find_path(index)}, image {self.image_ids[index]} is damaged ({problem}). "
            "Run verify on the shards. Copy the files that it names again, or delete them and run "
            "preprocess again."
        )


def _join_masks(bits: Bytes, tables: Tables) -> PackedMasks:
    return PackedMasks(bits, tables["crops"], np.cumsum([0, *tables["mask_bytes"]]))
