"""Shards as a dataset that is trained on while they are still written from loose files."""

import multiprocessing
import os
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from secrets import token_hex
from time import perf_counter, process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.coco import CocoDataset
from colab_utils.data.decoding import decode_pixels
from colab_utils.data.sizes import plan_size
from colab_utils.drive import Retries
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.arrival import Arrival, ArrivedShards
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.readers import ShardFiles, load_shard
from colab_utils.loading.targets import PackedSample
from colab_utils.machine import count_cores
from colab_utils.processes import ThreadPool, fork_pool
from colab_utils.shards.arrays import ArraysBuilder
from colab_utils.shards.copy import COPY_STREAMS, Copying
from colab_utils.shards.index import ShardIndex, ShardInfo, SkippedImage, write_index
from colab_utils.shards.jobs import (
    ShardJob,
    WorkerProgress,
    join_run,
    read_shard_index,
    run_job,
)
from colab_utils.shards.lock import hold_folder
from colab_utils.shards.records import read_image, try_sample
from colab_utils.shards.write import begin_folder, check_bad, count_allowed, join_index, list_jobs

_LOWEST_PRIORITY = 19


class Writing(Arrival):
    """Shards that processes of the lowest priority write on this machine's disk: those that
    `write_shards` would write there.

    Each finished shard is sent to ``drive``, where there is one, and the index after the last one.

    Attributes:
        jobs: one for each shard.
        cpu_s: seconds of processor time that the writing took.

    Raises:
        ColabUtilsError: another process writes there, or the disk is too small.
    """

    def __init__(
        self,
        ssd: Path,
        drive: Path | None,
        images: Path,
        dataset: CocoDataset,
        recipe: dict[str, Any],
        *,
        streams: int | str,
        max_bad: float,
        seed: int,
    ) -> None:
        self._drive = drive
        self._dataset = dataset
        self._max_bad = max_bad
        self._done: list[ShardIndex] = []
        self._sendings: list[Future[None]] = []
        self.cpu_s = 0.0
        self.key = token_hex(8)
        retries = Retries(multiprocessing.get_context("fork").Event())
        self._sending = Copying(ssd, drive or ssd, Retries(), overwrite=True)
        workers = count_cores()
        with ExitStack() as stack:
            for folder in (drive, ssd):
                if folder is not None:
                    stack.enter_context(hold_folder(folder))
            recipe = retries.write(ssd, begin_folder, ssd, images, dataset, recipe)
            self.jobs = list_jobs(ssd, images, dataset, recipe, streams, drive)
            self._prepare(ssd, [0] * len(self.jobs), workers=workers, seed=seed, retries=retries)
            self._senders = stack.enter_context(ThreadPool(COPY_STREAMS))
            progress = WorkerProgress(stop=retries.stop)
            self._pool = fork_pool(min(workers, len(self.jobs)), _join_writing, progress)
            self._stack = stack.pop_all()
            self._begin()

    def stop(self) -> None:
        """End at the next image; what is finished stays, and a new writing continues there."""
        self._sending.stop.set()
        super().stop()

    def wait(self) -> None:
        """Wait until all shards are written, and sent to Drive.

        Raises:
            ColabUtilsError: some could not be written, or sent.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        with self._stack:
            super()._run()

    def _copy_all(self) -> None:
        with self._pool:
            super()._copy_all()

    def _fetch(self, number: int) -> None:
        began_s = perf_counter()
        part, cpu_s = self._pool.submit(_run_timed, self.jobs[number]).result()
        with self._lock:
            self.cpu_s += cpu_s
            self._done.append(part)
            check_bad(self._dataset, self._done, self._max_bad)
        self._note_shard(number, began_s)
        if self._drive is not None and part.images:
            self._sendings.append(self._senders.submit(self._send, part.shards[0]))

    def _send(self, shard: ShardInfo) -> None:
        for file in shard.files():
            self._sending.copy_file(*file)

    def _finish(self) -> None:
        index = join_index(self._dataset, self.jobs[0].recipe, self._done)
        write_index(self.target, index)
        for sending in self._sendings:
            sending.result()
        if self._drive is not None:
            self._sending.retries.write(self._drive, write_index, self._drive, index)

    def __str__(self) -> str:
        text = f"{len(self._done)} of {len(self.jobs)} shards written"
        if self._drive is not None:
            sent = sum(sending.done() for sending in self._sendings)
            text += f", {sent} of them sent to Drive"
        if self.spans_s:
            seconds = max(end_s for _, end_s in self.spans_s.values())
            text += (
                f"; the writing took {self.cpu_s / seconds:.1f} of {count_cores()} cores, which "
                "nothing else needed"
            )
        return f"{text}; {self._error}" if self._error else text


def _join_writing(progress: WorkerProgress) -> None:
    """Make this process, which was just forked, one that writes when no other needs its core."""
    os.nice(_LOWEST_PRIORITY)
    join_run(progress)


def _run_timed(job: ShardJob) -> tuple[ShardIndex, float]:
    """Write a shard; return its index, and the processor time that it took in seconds."""
    began_s = process_time()
    return run_job(job), process_time() - began_s


class WritingShards(ShardDataset):
    """A `ShardDataset` whose shards are written in the background while it is used.

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

    def __init__(
        self,
        writing: Writing,
        dataset: CocoDataset,
        *,
        max_bad: float,
        contiguous_labels: bool = False,
    ) -> None:
        recipe = writing.jobs[0].recipe
        self.arrival: Writing | None = writing
        self._arrived = ArrivedShards(writing.target, writing.key)
        self._jobs = writing.jobs
        self._reasons: dict[str, str] = {}
        self._files = ShardFiles(writing.target)
        self.transforms = None
        self.folder = writing.target
        self.fingerprint = dataset.fingerprint
        self.is_decoded = recipe["storage"] == "pixels"
        self._set_labels(dataset.categories, contiguous=contiguous_labels)
        self.max_bad = count_allowed(len(dataset), max_bad)
        shards = tuple(_foresee_shard(job) for job in writing.jobs)
        self.index = ShardIndex(dataset.fingerprint, recipe, dataset.categories, shards)
        # A shard has at most the objects that the annotations have.
        self._make_tables([shard.images for shard in shards], dataset.count_objects())
        self.left_out = dataset.crowds
        self._tables["counts"][:] = 0
        self.image_ids = dataset.image_ids
        # The order of an epoch depends on them, so they stay.
        self.sizes = _plan_sizes(dataset, recipe)

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
        return f"{super().__str__()}; {self.arrival}"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "arrival": None}  # the writing stays in the process that began it

    def _check(self, index: int) -> int:
        """Return the number of an image, once its shard is there."""
        index = super()._check(index)
        shard = int(self.shard_of[index])
        if self._bits[shard] is None:
            self._arrived.wait_for(shard)
            self._open_shard(shard)
        return index

    def _open_shard(self, number: int) -> None:
        """Fill the tables with what a finished shard holds."""
        rows = np.flatnonzero(self.shard_of == number)
        path = self.folder / self.index.shards[number].arrays_name
        index = read_shard_index(path)
        # A bad image takes no place in a batch.
        self._tables["sizes"][rows] = 1
        if index is not None:
            arrays = load_shard(self.folder, index.shards[0], retries=Retries())
            self._reasons.update({image.file_name: image.reason for image in index.skipped})
            usable = rows[np.isin(self.image_ids[rows], arrays.image_ids)]
            self._fill_tables(number, usable, arrays)
        elif path.exists():
            raise ColabUtilsError(
                f"expected what was just written in {path}, found it damaged: run the same again, "
                "it is written anew"
            )
        else:
            self._bits[number] = 0

    def _find_job(self, index: int) -> tuple[ShardJob, int]:
        """Return the job of an image's shard, and the image's number in it."""
        shard = self.shard_of[index]
        return self._jobs[shard], index - int(np.searchsorted(self.shard_of, shard))

    def _require_usable(self, index: int) -> None:
        if not self._image_spans[index, 1]:
            job, place = self._find_job(index)
            name = job.dataset.file_name(place)
            raise _explain_bad(name, self._reasons.get(name, "as all images of its shard are"))

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
        index = super()._check(index)
        if self._arrived.has(int(self.shard_of[index])):
            return super().read_packed(index)
        job, place = self._find_job(index)
        read = partial(read_image, job.images, job.dataset, place, Retries())
        sample = try_sample(read, job.dataset, place, job.recipe)
        if isinstance(sample, SkippedImage):
            raise _explain_bad(sample.file_name, sample.reason)
        image, record = sample.members
        builder = ArraysBuilder()
        builder.add(sample.record, (image.data, record.data), (0, 0))
        tables = vars(builder.build())
        tables["labels"] = self._map_labels(tables["labels"])
        tables["mask_bytes"] = np.diff(tables["mask_ends"])
        tables["iscrowd"] = np.zeros(len(tables["labels"]), np.int64)
        names = self.describe([]).keys()
        sample_tables = {name: tables[name] for name in names}
        return PackedSample(decode_pixels(image.data), tables["bits"], sample_tables)


def _plan_sizes(dataset: CocoDataset, recipe: dict[str, Any]) -> NDArray[np.int32]:
    """Return the sizes at which images are stored, int32 [I, 2], as far as annotations tell."""
    limits = {name: recipe[name] for name in ("min_size", "max_size")}
    # Of an image whose size is not known, a common one is assumed.
    sizes = np.where(dataset.sizes > 0, dataset.sizes, recipe["min_size"])
    if recipe["storage"] == "keep":
        return sizes.astype(np.int32)
    return np.array([plan_size(*size, **limits) for size in sizes.tolist()], np.int32)


def _foresee_shard(job: ShardJob) -> ShardInfo:
    """Return what is known of a shard that is not written yet."""
    path = job.path
    arrays_name = path.with_suffix(".arrays").name
    return ShardInfo(path.name, len(job.dataset), 0, 0, "", arrays_name, 0, "", "")


def _explain_bad(name: str, reason: str) -> ColabUtilsError:
    return ColabUtilsError(
        f"{name} is left out of the shards, as it is bad: {reason}. Run check on the dataset."
    )
