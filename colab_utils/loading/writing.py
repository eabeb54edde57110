"""Shards as a dataset that is trained on while they are still written from loose files."""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.coco import CocoDataset
from colab_utils.data.decoding import decode_pixels
from colab_utils.data.masks import number_within
from colab_utils.data.sizes import plan_size
from colab_utils.drive import Retries
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.arrival import ArrivedShards
from colab_utils.loading.background import Writing
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.readers import ShardFiles, load_shard
from colab_utils.loading.targets import PackedSample
from colab_utils.shards.arrays import ArraysBuilder, ShardArrays
from colab_utils.shards.index import ShardIndex, ShardInfo, SkippedImage, name_shard
from colab_utils.shards.jobs import read_shard_index
from colab_utils.shards.records import read_image, try_sample
from colab_utils.shards.write import ShardRun, count_allowed


class WritingShards(ShardDataset):
    """A `ShardDataset` whose shards a process in the background writes while it is used.

    What a loader must know before a shard is there comes from the annotations: the images, their
    sizes, and which of them have objects. ``make_loader`` begins with the first shard that is
    finished; every image comes once in each epoch, from the first one on. An image that turns out
    bad is left out then, with a warning, up to ``max_bad`` of them. ``dataset[i]`` of a shard that
    is not finished is made from its loose file, and the same.

    Made by `open_dataset`.

    Attributes:
        arrival: the writing, see `Writing`; None in other processes.
        max_bad: how many images may turn out bad.
    """

    def __init__(self, run: ShardRun, *, contiguous_labels: bool = False) -> None:
        writing = Writing(run)
        self.arrival: Writing | None = writing
        self._arrived = ArrivedShards(run.folder, writing.key)
        self._run = writing.run
        self._reasons: dict[str, str] = {}
        self._files = ShardFiles(run.folder)
        self.transforms = None
        self.folder = run.folder
        self.fingerprint = run.dataset.fingerprint
        self.is_decoded = writing.run.recipe["storage"] == "pixels"
        self._set_labels(run.dataset.categories, contiguous=contiguous_labels)
        self.max_bad = count_allowed(len(run.dataset), run.max_bad)
        self._prepare_tables(run.dataset, writing.run.list_shards())

    def _prepare_tables(self, dataset: CocoDataset, shards: list[range]) -> None:
        """Make tables of all images and objects, which `_open_shard` fills."""
        images = len(dataset)
        self.shard_of = np.repeat(np.arange(len(shards)), [len(rows) for rows in shards])
        self.index = ShardIndex(
            fingerprint=dataset.fingerprint,
            recipe=self._run.recipe,
            categories=dataset.categories,
            shards=tuple(_foresee_shard(number, rows) for number, rows in enumerate(shards)),
            partial=True,
        )
        self.image_ids = dataset.image_ids
        self.sizes = _plan_sizes(dataset, self._run.recipe)
        self.counts = count_objects(dataset)
        self.has_objects = self.counts > 0
        self.objects = int(self.counts.sum())
        self.left_out = dataset.crowds
        empty = ArraysBuilder().build()
        self._tables = {"image_ids": self.image_ids, "sizes": self.sizes.copy()}
        for name in ("boxes", "labels", "areas", "crops"):
            table = getattr(empty, name)
            self._tables[name] = np.zeros((self.objects, *table.shape[1:]), table.dtype)
        self._tables["mask_bytes"] = np.zeros(self.objects, np.int64)
        self._tables["counts"] = np.zeros(images, np.int64)
        # Each shard has at most the objects that the annotations have, and lies at their place.
        self._first = np.cumsum(self.counts) - self.counts
        self._image_spans = np.zeros((images, 2), np.int64)
        self._record_spans = np.zeros((images, 2), np.int64)
        self._checks = np.zeros((images, 3), np.uint64)
        self._bit_starts = np.zeros(images, np.int64)
        self._bits = [empty.bits] * len(shards)
        self._is_open = np.zeros(len(shards), bool)
        self._is_usable = np.zeros(images, bool)

    def stop(self) -> None:
        """End the writing at its next image; what is finished stays, and `open_dataset` continues
        there.
        """
        if self.arrival is not None:
            self.arrival.stop()

    def wait(self) -> None:
        """Wait until all shards are written, and sent to Drive.

        Raises:
            ColabUtilsError: some could not be written, or sent.
        """
        if self.arrival is not None:
            self.arrival.wait()

    def __str__(self) -> str:
        text = super().__str__()
        return text if self.arrival is None else f"{text}; {self.arrival}"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "arrival": None}  # the writing stays in the process that began it

    def _check(self, index: int) -> int:
        """Return the number of an image, once its shard is open."""
        index = super()._check(index)
        number = int(self.shard_of[index])
        if not self._is_open[number]:
            self._arrived.wait_for(number)
            self._open_shard(number)
        return index

    def _open_shard(self, number: int) -> None:
        """Fill the tables with what a finished shard holds."""
        rows = np.flatnonzero(self.shard_of == number)
        path = self.folder / self.index.shards[number].arrays_name
        index = read_shard_index(path)
        if index is not None:
            arrays = load_shard(self.folder, index.shards[0], retries=Retries())
            self._reasons.update((image.file_name, image.reason) for image in index.skipped)
            usable = rows[np.isin(self.image_ids[rows], arrays.image_ids)]
            self._fill_tables(number, usable, arrays)
        elif path.exists():
            raise ColabUtilsError(
                f"expected what was just written in {path}, found it damaged: run the same again, "
                "it is written anew"
            )
        # A bad image takes no place in a batch.
        self._tables["sizes"][rows[~self._is_usable[rows]]] = 1
        self._is_open[number] = True

    def _fill_tables(self, number: int, rows: NDArray[np.int64], arrays: ShardArrays) -> None:
        tables = self._tables
        objects = np.repeat(self._first[rows], arrays.counts) + number_within(arrays.counts)
        tables["sizes"][rows] = arrays.sizes
        tables["counts"][rows] = arrays.counts
        tables["labels"][objects] = self._map_labels(arrays.labels)
        tables["mask_bytes"][objects] = np.diff(arrays.mask_ends)
        for name in ("boxes", "areas", "crops"):
            tables[name][objects] = getattr(arrays, name)
        self._image_spans[rows] = arrays.image_spans
        self._record_spans[rows] = arrays.record_spans
        self._checks[rows] = arrays.checks
        self._bit_starts[rows] = arrays.mask_ends[np.cumsum(arrays.counts) - arrays.counts]
        self._bits[number] = arrays.bits
        self._is_usable[rows] = True

    def _require_usable(self, index: int) -> None:
        if not self._is_usable[index]:
            name = self._run.dataset.file_name(index)
            reason = self._reasons.get(name, "as all images of its shard are")
            raise _explain_bad(name, reason)

    def read_into(self, index: int, pixels: NDArray[np.uint8], bits: NDArray[np.uint8]) -> None:
        """Write an image's pixels, uint8 [H, W, 3], and the bits of all its masks into memory of
        that size.
        """
        self._require_usable(self._check(index))
        super().read_into(index, pixels, bits)

    def _read_span(self, index: int, spans: NDArray[np.int64], part: int) -> bytearray:
        self._require_usable(index)
        return super()._read_span(index, spans, part)

    def read_packed(self, index: int) -> PackedSample:
        """The sample with packed masks; made from its loose file before its shard is there."""
        number = range(len(self))[index]
        shard = int(self.shard_of[number])
        if not self._is_open[shard]:
            self._arrived.look()
        if self._is_open[shard] or self._arrived.knows(shard):
            return super().read_packed(index)
        dataset = self._run.dataset
        read = partial(read_image, self._run.images, dataset, number, Retries())
        sample = try_sample(read, dataset, number, self._run.recipe)
        if isinstance(sample, SkippedImage):
            raise _explain_bad(sample.file_name, sample.reason)
        image, record = sample.members
        builder = ArraysBuilder()
        builder.add(sample.record, (image.data, record.data), (0, 0))
        arrays = builder.build()
        names = ("sizes", "image_ids", "counts", "boxes", "areas", "crops")
        tables = {name: getattr(arrays, name) for name in names}
        tables["labels"] = self._map_labels(arrays.labels)
        tables["mask_bytes"] = np.diff(arrays.mask_ends)
        tables["iscrowd"] = np.zeros(len(arrays.labels), np.int64)
        return PackedSample(decode_pixels(image.data), np.asarray(arrays.bits), tables)


def count_objects(dataset: CocoDataset) -> NDArray[np.int64]:
    """Return the objects of each image that are no crowds, int64 [I]."""
    ends = np.concatenate([[0], np.cumsum(~dataset.is_crowd)])[dataset.first]
    return np.diff(ends).astype(np.int64)


def _plan_sizes(dataset: CocoDataset, recipe: dict[str, Any]) -> NDArray[np.int32]:
    """Return the sizes at which images are stored, int32 [I, 2], as far as annotations tell."""
    if recipe["storage"] == "keep":
        return dataset.sizes
    least = recipe["min_size"]
    # Of an image whose size is not known, a common one is assumed.
    sizes = np.where(dataset.sizes > 0, dataset.sizes, least).tolist()
    limits = {"min_size": least, "max_size": recipe["max_size"]}
    return np.array([plan_size(*size, **limits) for size in sizes], np.int32)


def _foresee_shard(number: int, rows: range) -> ShardInfo:
    """Return what is known of a shard that is not written yet."""
    name = name_shard(number)
    return ShardInfo(
        name=name,
        images=len(rows),
        annotations=0,
        bytes=0,
        xxh3_64="",
        arrays_name=name.replace(".tar", ".arrays"),
        arrays_bytes=0,
        arrays_xxh3_64="",
        tables_xxh3_64="",
    )


def _explain_bad(name: str, reason: str) -> ColabUtilsError:
    return ColabUtilsError(
        f"{name} is left out of the shards, as it is bad: {reason}. Run check on the dataset."
    )
