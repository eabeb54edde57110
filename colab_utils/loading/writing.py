"""A dataset of shards that are still being written from loose files."""

import math
import multiprocessing
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.coco import CocoDataset
from colab_utils.data.defects import count_allowed
from colab_utils.data.sizes import plan_size
from colab_utils.drive import DriveLostError, Retries, explain_write, is_on_drive
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.files import hash_bytes
from colab_utils.loading.arrival import (
    Arrival,
    ArrivedShards,
    FollowedArrival,
    read_status,
)
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.first_files import FirstFiles
from colab_utils.loading.ranks import find_ranks
from colab_utils.loading.readers import ShardFiles, load_shard
from colab_utils.machine import count_cores
from colab_utils.places import Place, UrlPath
from colab_utils.processes import ThreadPool, explain_lost_process, fork_pool, kill_pool
from colab_utils.shards.arrays import convert_boxes
from colab_utils.shards.copy import COPY_STREAMS, Copying
from colab_utils.shards.folder_state import find_common_recipe
from colab_utils.shards.index import ShardIndex, ShardInfo, write_index
from colab_utils.shards.jobs import (
    ShardJob,
    WorkerProgress,
    join_run,
    read_shard_index,
    run_job,
)
from colab_utils.shards.lock import hold_folder
from colab_utils.shards.plan import order_shards
from colab_utils.shards.records import MISSING
from colab_utils.shards.source import describe_source, keep_source
from colab_utils.shards.tables import fill_tables, make_tables
from colab_utils.shards.write import (
    ShardRun,
    begin_folder,
    check_bad,
    cut_jobs,
    join_index,
)
from colab_utils.streams import is_remote

# Training waits for the first shard, so its writer goes before the writers of the others.
_FIRST_PRIORITY = 10
_LOWEST_PRIORITY = 19


class Writing(Arrival):
    """The writing of a dataset's shards to this machine's disk, by processes of low
    priority. The shards are the same as `write_shards` makes.

    If the images lie on the local disk, the first shard is written alone. From Drive, several
    shards are begun at once, because their processes wait for files most of the time.

    If ``drive`` is given, each finished shard is sent there, and the index after the last shard.

    Attributes:
        jobs: the jobs of the worker processes, one for each shard.
        cpu_s: CPU time that the writing took, in seconds.

    Raises:
        ColabUtilsError: another process writes there, or the disk is too small.
    """

    def __init__(
        self,
        ssd: Path,
        drive: Place | None,
        images: Place,
        dataset: CocoDataset,
        recipe: dict[str, Any],
        *,
        lock: ExitStack,
        streams: int | str,
        max_bad: float,
        seed: int,
    ) -> None:
        # Only the machine of rank 0 sends the shards to Drive.
        sends = find_ranks().is_on_first_host
        self._drive = drive if sends else None
        self._max_bad = max_bad
        self._done: list[ShardIndex] = []
        self._sendings: list[Future[None]] = []
        self._first: FirstFiles | None = None
        self.cpu_s = 0.0
        self.key = name_writing(dataset)
        retries = Retries(multiprocessing.get_context("fork").Event())
        self._sending = Copying(ssd, drive or ssd, Retries(), overwrite=True)
        workers = count_cores()
        if is_remote(images):
            # The last file of a shard may come late. A process that waits for it needs no core, so
            # there are more processes than cores.
            workers *= 2
            # Most of its time a process waits for files, so the others begin with the first one.
            self._begins_alone = False
        with lock as stack:
            stack.enter_context(hold_folder(ssd))
            self._hold_drive(stack, images)
            # A URL is left out: the code behind it may hold locks, and processes are forked soon.
            is_planned = "images_per_shard" in recipe
            if not (is_planned or self._begins_alone or isinstance(images, UrlPath)):
                self._first = FirstFiles(images, dataset, recipe, streams)
                stack.callback(self._first.close)
            # Images that Drive does not give are asked for again by `begin_folder` itself.
            with explain_write(ssd):
                recipe = begin_folder(ssd, images, dataset, recipe)
            self._shard_run = ShardRun(ssd, images, dataset, recipe)
            self.jobs = list(cut_jobs(self._shard_run, streams, drive))
            self._prepare(
                ssd,
                images=[len(job.dataset) for job in self.jobs],
                order=order_shards(recipe, len(self.jobs), seed),
                workers=workers,
                retries=retries,
            )
            self._senders = stack.enter_context(ThreadPool(COPY_STREAMS))
            progress = WorkerProgress(stop=retries.stop)
            self._pool = fork_pool(min(workers, len(self.jobs)), join_run, progress)
            self._begin(stack)

    def _hold_drive(self, stack: ExitStack, images: Place) -> None:
        """Lock the folder on Drive. If it takes no files now, the shards are not sent there.

        Raises:
            DriveLostError: Drive does not answer, and the images lie there, too.
        """
        if self._drive is None:
            return
        try:
            stack.enter_context(hold_folder(self._drive))
        except ColabUtilsError as error:
            if isinstance(error, DriveLostError) and is_on_drive(images):
                raise
            self._drive = None
            warn_of_unsent(error)

    def stop(self) -> None:
        """End at the next image. Finished shards stay, and a new writing continues after them."""
        self._sending.stop.set()
        super().stop()

    def _copy_all(self) -> None:
        try:
            super()._copy_all()
        except BrokenExecutor:
            raise explain_lost_process() from None
        finally:
            # A part of a file that a killed process leaves is removed with the lock of the folder.
            kill_pool(self._pool)

    def _fetch(self, number: int) -> None:
        began_s = perf_counter()
        priority = _FIRST_PRIORITY if number == self._order[0] else _LOWEST_PRIORITY
        job = self.jobs[number]
        if number == 0 and self._first:
            job = self._first.fill(job)
        part = self._write_shard(job, priority)
        names = [image.file_name for image in part.skipped if image.reason == MISSING]
        if names and self.retries.find_again([self._shard_run.images / name for name in names]):
            # Drive did not show these images for a while. The shard is written again.
            part = self._write_shard(job, priority)
        with self._lock:
            self._done.append(part)
            check_bad(self._shard_run.dataset, self._done, self._max_bad)
        self._note_shard(number, began_s)
        if self._drive is not None and part.images:
            self._sendings.append(self._senders.submit(self._send, part.shards[0]))

    def _write_shard(self, job: ShardJob, priority: int) -> ShardIndex:
        part, cpu_s = self._pool.submit(_run_timed, job, priority).result()
        with self._lock:
            self.cpu_s += cpu_s
        return part

    def _describe(self) -> dict[str, Any]:
        return {**super()._describe(), "recipe": self._shard_run.recipe}

    def _send(self, shard: ShardInfo) -> None:
        sending = self._sending
        tar, arrays = shard.files()
        # The arrays are sent first, because a tar alone does not show its dataset. If the session
        # ended after sending only a tar, the next session would refuse the folder.
        sending.retries.run(partial(sending.copy_file, *arrays))
        sending.retries.run(partial(sending.copy_file, *tar))

    def _finish(self) -> None:
        index = join_index(self._shard_run, self._done)
        write_index(self.target, index)
        for sending in self._sendings:
            sending.result()
        if self._drive is not None:
            self._sending.retries.write(self._drive, write_index, self._drive, index)
        run = self._shard_run
        source = describe_source(run.dataset)
        for folder in {self.target, self._drive or self.target}:
            keep_source(folder, index, run.images, source, run.began_ns)

    def __str__(self) -> str:
        sent = sum(sending.done() for sending in self._sendings)
        seconds = max((end_s for _, end_s in self.spans_s.values()), default=math.inf)
        return (
            f"{len(self._done)} of {len(self.jobs)} shards written, {sent} sent to Drive; the "
            f"writing took {self.cpu_s / seconds:.1f} of {count_cores()} cores, at the lowest "
            "priority"
        )


class FollowedWriting(FollowedArrival):
    """The writing of a dataset's shards by another process of this machine.

    Attributes:
        jobs: the jobs of that process, one for each shard.
    """

    def __init__(self, ssd: Path, images: Place, dataset: CocoDataset, *, seed: int) -> None:
        self.key = name_writing(dataset)
        self._arrived = ArrivedShards(ssd, self.key)
        # If the other process has ended meanwhile, the recipe is read from its shards.
        recipe = read_status(ssd, self.key).get("recipe") or find_common_recipe([ssd], dataset)
        self.jobs = list(cut_jobs(ShardRun(ssd, images, dataset, recipe), 1))
        self._prepare(
            ssd,
            images=[len(job.dataset) for job in self.jobs],
            order=order_shards(recipe, len(self.jobs), seed),
            workers=1,
            retries=Retries(),
        )

    def __str__(self) -> str:
        return "another process of this machine writes them"


def warn_of_unsent(error: ColabUtilsError) -> None:
    """Warn that shards are written, but not sent to Drive."""
    warnings.warn(
        f"{error} The shards are not sent to Drive in this session. Training goes on.",
        ColabUtilsWarning,
        stacklevel=4,
    )


def name_writing(dataset: CocoDataset) -> str:
    """Return a key that identifies the writing of this dataset."""
    return hash_bytes(f"writing {dataset.fingerprint}".encode())


def _run_timed(job: ShardJob, priority: int) -> tuple[ShardIndex, float]:
    """Write a shard, and return its index and the CPU seconds that it took.

    The process keeps a priority that is lower already. Only root could raise it.
    """
    os.nice(max(0, priority - os.nice(0)))
    began_s = process_time()
    return run_job(job), process_time() - began_s


class WritingShards(ArrivingShards):
    """A `ShardDataset` whose shards are written in the background while it is used.

    Until a shard is written, its images and their sizes come from the annotations. Bad images are
    left out with a warning, but no more than ``max_bad`` of them. Otherwise the dataset behaves
    like `ArrivingShards`. `open_dataset` makes this dataset.

    Attributes:
        arrival: the `Writing`, or the `FollowedWriting` if another process writes; None in workers.
        max_bad: number of images that may be bad.
    """

    def __init__(
        self,
        writing: Writing | FollowedWriting,
        dataset: CocoDataset,
        *,
        max_bad: float,
        contiguous_labels: bool = False,
    ) -> None:
        recipe = writing.jobs[0].recipe
        self.arrival = writing
        self._arrived = ArrivedShards(writing.target, writing.key)
        self._reasons: dict[int, str] = {}
        self._files = ShardFiles(writing.target)
        self.transforms = None
        self.folder = writing.target
        self.fingerprint = dataset.fingerprint
        self.is_decoded = recipe["storage"] == "pixels"
        categories = dataset.categories
        self._set_labels(categories, contiguous=contiguous_labels)
        self.max_bad = count_allowed(len(dataset), max_bad)
        shards = tuple(_foresee_shard(job) for job in writing.jobs)
        self.index = ShardIndex(self.fingerprint, recipe, categories, shards)
        # A shard never holds more objects than its annotations, so tables of this size are large
        # enough.
        parts = [job.dataset for job in writing.jobs]
        counts = np.concatenate([part.count_objects() for part in parts])
        tables = make_tables(len(counts), int(counts.sum()))
        tables["shard_of"][:] = np.repeat(np.arange(len(parts)), [*map(len, parts)])
        self._use_tables(tables)
        self._set_counts(counts)
        # None says that a shard is not opened yet.
        self._bits = [None] * len(parts)
        self.left_out = dataset.crowds
        self.image_ids = np.concatenate([part.image_ids for part in parts])
        # The order of an epoch depends on `image_ids` and `sizes`. So both stay as they are when a
        # shard is opened.
        self.sizes = np.concatenate([_plan_sizes(part, recipe) for part in parts])

    def __str__(self) -> str:
        return f"{super().__str__()}; {self.arrival}"

    def foresee(self, indices: Sequence[int]) -> dict[str, NDArray[Any]]:
        """Describe images by their annotations, without waiting for a shard.

        The masks are assumed to fill their boxes. If the annotations lack the size of an image,
        this method waits for the shards.
        """
        rows = np.array([range(len(self))[index] for index in indices], np.int64)
        sizes = self.sizes[rows]
        writing = self.arrival
        if not isinstance(writing, Writing | FollowedWriting) or sizes.min() <= 1:
            return self.describe(indices)
        objects = [self._foresee_objects(writing.jobs, row) for row in rows.tolist()]
        boxes = np.concatenate([boxes for boxes, _ in objects])
        crops = np.concatenate([np.floor(boxes[:, :2]), np.ceil(boxes[:, 2:])], 1).astype(np.int32)
        areas = (crops[:, 2:] - crops[:, :2]).prod(1)
        return {
            "sizes": sizes,
            "image_ids": self.image_ids[rows],
            "counts": np.array([len(labels) for _, labels in objects], np.int64),
            "boxes": boxes,
            "labels": np.concatenate([labels for _, labels in objects]),
            "areas": areas.astype(np.float32),
            "crops": crops,
            "mask_bytes": -(-areas // 8),
            "iscrowd": np.zeros(len(boxes), np.int64),
        }

    def _foresee_objects(
        self, jobs: list[ShardJob], row: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return boxes, float32 [N, 4], and labels of an image that is not written yet."""
        shard = int(self.shard_of[row])
        dataset = jobs[shard].dataset
        place = row - int(np.searchsorted(self.shard_of, shard))
        annotations, _ = dataset.read_annotations(place)
        annotations = [entry for entry in annotations if not entry["iscrowd"]]
        height, width = dataset.sizes[place].tolist()
        boxes, keep = convert_boxes([entry["bbox"] for entry in annotations], height, width)
        scale_y, scale_x = (self.sizes[row] / (height, width)).tolist()
        scale = np.array([scale_x, scale_y, scale_x, scale_y], np.float32)
        labels = self._map_labels([entry["category_id"] for entry in annotations])
        return boxes[keep] * scale, labels[keep]

    def _check(self, index: int) -> int:
        """Return the number of an image, once its shard is there."""
        index = super()._check(index)
        shard = int(self.shard_of[index])
        if self._bits[shard] is None:
            if self.arrival is not None and self.arrival.is_at_work:
                # This call makes the arrival write the image's shard next.
                next(self.arrival.wait_for({shard}, [[shard]]), None)
            self._arrived.wait_for(shard)
            self._open_shard(shard)
        return index

    def _open_shard(self, number: int) -> None:
        """Fill the tables from a finished shard."""
        rows = np.flatnonzero(self.shard_of == number)
        path = self.folder / self.index.shards[number].arrays_name
        index = read_shard_index(path)
        # A bad image has the size 1, so that it adds no padding to a batch.
        self._tables["sizes"][rows] = 1
        if index is not None:
            arrays = load_shard(self.folder, index.shards[0], retries=Retries())
            first = self.counts[: rows[0]].sum()
            is_usable = np.isin(self.image_ids[rows], arrays.image_ids)
            for row, image in zip(rows[~is_usable].tolist(), index.skipped, strict=True):
                self._reasons[row] = f"{image.file_name}: {image.reason}"
            fill_tables(self._tables, rows[is_usable], arrays, number, first)
            self._bits[number] = arrays.bits
        elif path.exists():
            raise ColabUtilsError(
                f"{path} is damaged, though it was just written. Run the same again, which writes "
                "the file anew."
            )
        else:
            self._bits[number] = 0

    def _read_tar(self, index: int, start: int, buffer: Any) -> None:
        if not self._image_spans[index, 1]:
            reason = self._reasons.get(index, "no image of its shard can be used")
            raise ColabUtilsError(
                f"Image {self.image_ids[index]} is bad and left out of the shards ({reason}). Run "
                "check on the dataset."
            )
        super()._read_tar(index, start, buffer)


def _plan_sizes(dataset: CocoDataset, recipe: dict[str, Any]) -> NDArray[np.int32]:
    """Return the sizes at which images are stored, int32 [I, 2]; 1 if annotations lack the size."""
    sizes = np.maximum(dataset.sizes, 1)
    if recipe["storage"] == "keep":
        return sizes
    limits = {name: recipe[name] for name in ("min_size", "max_size")}
    return np.array([plan_size(*size, **limits) for size in sizes.tolist()], np.int32)


def _foresee_shard(job: ShardJob) -> ShardInfo:
    """Return the entry for a shard that is not written yet, with its name and number of images."""
    path = job.path
    arrays_name = path.with_suffix(".arrays").name
    return ShardInfo(path.name, len(job.dataset), 0, 0, "", arrays_name, 0, "", "")
