"""Write COCO data as shards: several processes, each writes one shard at a time; the index is last.

A run that is interrupted leaves only finished shards; the same call continues after the last one.
"""

import multiprocessing
from collections import Counter
from collections.abc import Collection, Iterable
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from colab_utils.data.coco import CocoDataset
from colab_utils.data.defects import count_allowed, describe_faults, require_sound_objects
from colab_utils.drive import Retries, explain_write, is_on_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.machine import require_space
from colab_utils.processes import explain_shared_memory, fork_pool, pop_done
from colab_utils.progress import show_progress
from colab_utils.require import require_local_path, require_number
from colab_utils.shards.index import INDEX_NAME, ShardIndex, SkippedImage, read_index, write_index
from colab_utils.shards.jobs import (
    ShardJob,
    WorkerProgress,
    is_complete,
    join_run,
    read_shard_index,
    run_job,
)
from colab_utils.shards.lock import WRITER_NAME, hold_folder
from colab_utils.shards.plan import (
    complete_recipe,
    count_processes,
    make_recipe,
    open_annotations,
    split_images,
    try_images,
)
from colab_utils.shards.records import MISSING
from colab_utils.shards.stored_images import Storage
from colab_utils.streams import require_streams
from colab_utils.units import format_bytes


@dataclass(frozen=True)
class ShardReport:
    """What :func:`write_shards` did."""

    images: int
    """Images in the shards."""
    skipped: tuple[SkippedImage, ...]
    """Images that were left out, each with its reason."""
    shards: int
    bytes: int
    """Size of all shards and their arrays."""
    seconds: float
    storage: Storage = "shrink"
    """How the images are stored; see :func:`write_shards`."""
    annotations: int = 0
    """Of all images."""
    crowds: int = 0
    """Of them, with ``iscrowd``: the shards keep these, and training leaves them out."""
    faults: dict[str, int] = field(default_factory=dict)
    """Objects that are trained wrongly, or not at all, and empty annotations, by the kind of defect
    that `check_dataset` names.
    """

    def __str__(self) -> str:
        text = f"{self.images:,} images in {self.shards} shards, {format_bytes(self.bytes)}"
        if self.skipped:
            text += f", {len(self.skipped)} bad images skipped"
        if self.crowds:
            text += (
                f"; {self.crowds:,} of {self.annotations:,} objects are crowds and left "
                "out of training"
            )
        if self.faults:
            text += f"; see check: {describe_faults(self.faults)}"
        return text


def write_shards(
    images: str | Path,
    annotations: str | Path,
    *,
    shards: str | Path,
    shard_mb: float = 128,
    min_size: int = 800,
    max_size: int = 1333,
    storage: Storage = "shrink",
    workers: int | Literal["auto"] = "auto",
    streams: int | Literal["auto"] = "auto",
    executor: Executor | None = None,
    max_bad: float = 0.01,
) -> ShardReport:
    """Write a COCO dataset as shards: uncompressed tars that WebDataset reads, each with its flat
    arrays.

    Images keep their bytes, unless they are larger than training needs: those are shrunk once. A
    bad image (missing, cut short, not an image, or with an annotation that has no usable mask) is
    skipped and reported. The images come in a random order, the same for all who write them, as
    many annotations are sorted by class: ``image_id`` tells which image is which. What each
    ``storage`` costs on this machine, `plan_shards` measures.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        shards: the folder to write to; made if need be. A finished folder of the same data is left
            as it is.
        shard_mb: size to aim at for each shard, in MB. The first ones are smaller, 4, 8, 16 and so
            on, so that training can begin before all are there.
        min_size: the shorter side that training needs, in pixels (torchvision's ``min_size``).
        max_size: the longer side that training needs, in pixels (torchvision's ``max_size``).
        storage: "shrink" as above; "keep" shrinks nothing; "pixels" shrinks, then stores raw pixels
            (``KEY.npy``, uint8 [H, W, 3]), which cost no decoding and many times the space.
        workers: processes, each with a shard in memory; "auto" is one for each core.
        streams: files that each process reads at the same time, ahead of the image that it works
            on; "auto" finds how many Drive answers.
        executor: any ``concurrent.futures`` executor (a cluster's, say) to use in place of
            processes here.
        max_bad: the share of bad images above which it stops, 0 to 1; and that of bad objects,
            which would be trained wrongly or not at all, such as polygons in shares of the image.

    Raises:
        ColabUtilsError: if the input is missing or not COCO, too many images or objects are bad,
            the disk is full, the folder holds other data, or another process writes there.

    Example:
        >>> import tempfile
        >>> from colab_utils.sample_data import make_dataset
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = make_dataset(folder + "/data", n=3, width=64, height=64, workers=1)
        ...     shards = folder + "/shards"
        ...     report = write_shards(made.images, made.annotations, shards=shards, workers=1)
        >>> report.images, report.shards, report.skipped
        (3, 1, ())
    """
    started_s = perf_counter()
    images = require_local_path(images)
    folder = require_local_path(shards)
    processes = count_processes(workers)
    recipe = make_recipe(storage, min_size=min_size, max_size=max_size, shard_mb=shard_mb)
    require_number("max_bad", max_bad, least=0, most=1)
    require_streams(streams)
    dataset = open_annotations(images, annotations)
    retries = Retries()
    index = retries.write(folder, _find_finished, folder, images, dataset, recipe)
    if index is None:
        with hold_folder(folder):
            recipe = retries.write(folder, begin_folder, folder, images, dataset, recipe)
            jobs = list_jobs(folder, images, dataset, recipe, streams)
            with explain_write(folder):
                run = partial(_run_jobs, jobs, dataset, processes, executor, max_bad)
                done = run()
                missing = [
                    images / image.file_name
                    for image in _join_skipped(done)
                    if image.reason == MISSING
                ]
                if retries.find_again(missing):
                    # Their shards are written again, and the others are found finished.
                    done = run()
                check_bad(dataset, done, max_bad)
            index = join_index(dataset, recipe, done)
            retries.write(folder, write_index, folder, index)
    return ShardReport(
        images=index.images,
        skipped=index.skipped,
        shards=len(index.shards),
        bytes=index.bytes,
        seconds=perf_counter() - started_s,
        storage=storage,
        annotations=len(dataset.ids),
        crowds=dataset.crowds,
        faults=index.faults,
    )


def find_recipe(folder: str | Path) -> dict[str, Any] | None:
    """Return how the shards of a folder were made, finished or not; None if it holds none.

    Raises:
        ColabUtilsError: if the folder holds something else.

    Example:
        >>> find_recipe("no/such/folder") is None
        True
    """
    index = find_index(folder)
    return None if index is None else index.recipe


def find_index(folder: str | Path) -> ShardIndex | None:
    """Return what the shards of a folder are of, finished or not; None if it holds none.

    Raises:
        ColabUtilsError: as `find_recipe`.
    """
    folder = require_local_path(folder)
    return Retries().write(folder, _find_run, folder)


def _find_run(folder: Path) -> ShardIndex | None:
    """Return the index of the shards in a folder; of unfinished ones that of the first."""
    if (folder / INDEX_NAME).exists():
        return read_index(folder)
    # Each shard knows its run.
    for path in sorted(folder.glob("shard-*.arrays")):
        index = read_shard_index(path)
        if index is not None:
            return index
    if any(folder.glob("shard-*.tar")):
        raise ColabUtilsError(
            f"expected an empty folder, found shards without an index in {folder}. "
            "Name another one."
        )
    return None


def _find_own_run(folder: Path, dataset: CocoDataset, recipe: dict[str, Any]) -> ShardIndex | None:
    """Like `_find_run`, and refuse shards of other data or settings."""
    index = _find_run(folder)
    if index is None:
        return None
    difference = ""
    if index.fingerprint != dataset.fingerprint:
        difference = "of another dataset"
    elif not index.recipe.items() >= recipe.items():
        difference = "made with other settings"
    if difference:
        raise ColabUtilsError(
            f"expected nothing or the same shards, found shards {difference} in {folder}. "
            "Name another one (in a notebook: DRIVE_FOLDER), or delete these."
        )
    return index


def find_common_recipe(folders: Iterable[Path], dataset: CocoDataset) -> dict[str, Any]:
    """Return the recipe of the shards of a dataset in these folders; an empty one without shards.

    Raises:
        ColabUtilsError: if a folder holds something else, or shards of another recipe.
    """
    recipe: dict[str, Any] = {}
    for folder in folders:
        index = Retries().write(folder, _find_own_run, folder, dataset, recipe)
        if index is not None:
            recipe = index.recipe
    return recipe


def _find_finished(
    folder: Path, images: Path, dataset: CocoDataset, recipe: dict[str, Any]
) -> ShardIndex | None:
    """Return the index where nothing is to be done.

    No file is lost, no bad image was repaired, and no writer is left.
    """
    index = _find_own_run(folder, dataset, recipe)
    if index is None or index.partial or (folder / WRITER_NAME).exists():
        return None
    return index if is_complete(index, folder, images, dataset) else None


def begin_folder(
    folder: Path, images: Path, dataset: CocoDataset, recipe: dict[str, Any]
) -> dict[str, Any]:
    """Mark the folder as unfinished; return the recipe with what divides the images.

    Looks for shards again: another writer may have finished since, with other data.
    """
    index = _find_own_run(folder, dataset, recipe)
    if index is not None:
        recipe = index.recipe
    elif "images_per_shard" not in recipe:
        costs = try_images(images, dataset, recipe)
        mean = sum(max(cost.tar_bytes, cost.arrays_bytes) for cost in costs) / len(costs)
        cure = "name another folder, or store smaller images (--min-size)"
        require_space(folder, mean * len(dataset), cure)
        recipe = complete_recipe(recipe, mean)
    (folder / INDEX_NAME).unlink(missing_ok=True)
    return recipe


def list_jobs(
    folder: Path,
    images: Path,
    dataset: CocoDataset,
    recipe: dict[str, Any],
    streams: int | str,
    drive: Path | None = None,
) -> list[ShardJob]:
    """Return one job for each shard.

    Finished shards of an earlier session are copied from ``drive``.
    """
    jobs = []
    for number, indices in enumerate(split_images(recipe, len(dataset))):
        path = folder.absolute() / f"shard-{number:06d}.tar"
        part = dataset.select(indices)
        jobs.append(ShardJob(path, part, images.absolute(), recipe, streams, drive))
    return jobs


def _run_jobs(
    jobs: list[ShardJob],
    dataset: CocoDataset,
    processes: int,
    executor: Executor | None,
    max_bad: float,
) -> list[ShardIndex]:
    """Write every shard, on the executor or on processes of our own; return an index of each.

    Raises:
        ColabUtilsError: if too many images or objects are bad, a shard cannot be written, or a
            process was ended.
    """
    context = multiprocessing.get_context("fork")
    # What Drive does not show is looked for again at the end.
    is_patient = is_on_drive(jobs[0].images)
    with explain_shared_memory():
        images_done = context.Value("q", 0)
        progress = WorkerProgress(images_done, context.Event())
    with show_progress("preprocess", total=len(dataset), unit="image") as bar, ExitStack() as stack:
        if executor is None:
            pool = fork_pool(min(processes, len(jobs)), join_run, progress)
            executor = stack.enter_context(pool)
        # After an error each worker of our own gives up at its next image.
        stack.callback(progress.stop.set)
        futures = [executor.submit(run_job, job) for job in jobs]
        for future in futures:
            stack.callback(future.cancel)
        pending = set(futures)
        done: list[ShardIndex] = []
        while pending:
            pop_done(pending)
            done = [future.result() for future in futures if future not in pending]
            count = sum(index.images + len(index.skipped) for index in done)
            # The workers count images of unfinished shards, too. Their number is read without its
            # lock, which a worker that was killed may hold.
            bar.update(max(count, images_done.get_obj().value) - bar.n)
            check_bad(dataset, done, max_bad, is_patient=is_patient)
    return done


def join_index(
    dataset: CocoDataset, recipe: dict[str, Any], done: Iterable[ShardIndex]
) -> ShardIndex:
    """Return the index of a folder, from those of all its shards."""
    done = sorted(done, key=lambda part: part.shards[0].name)
    return ShardIndex(
        fingerprint=dataset.fingerprint,
        recipe=recipe,
        categories=dataset.categories,
        shards=tuple(shard for part in done for shard in part.shards if shard.images),
        skipped=_join_skipped(done),
        faults=dict(_sum_faults(done)),
    )


def check_bad(
    dataset: CocoDataset,
    done: Collection[ShardIndex],
    max_bad: float,
    *,
    is_patient: bool = False,
) -> None:
    """Refuse more bad images or objects in finished shards than are allowed.

    Args:
        dataset: all annotations.
        done: indexes of the shards that are finished.
        max_bad: the share that is allowed.
        is_patient: whether images that are missing do not count yet.

    Raises:
        ColabUtilsError: there are more.
    """
    skipped = _join_skipped(done)
    if is_patient:
        skipped = tuple(image for image in skipped if image.reason != MISSING)
    _check_images(skipped, len(dataset), max_bad)
    require_sound_objects(_sum_faults(done), len(dataset.ids) - dataset.crowds, max_bad)


def _check_images(bad: tuple[SkippedImage, ...], total: int, max_bad: float) -> None:
    """Refuse more bad images than are allowed."""
    allowed = count_allowed(total, max_bad)
    if len(bad) > allowed:
        examples = "; ".join(f"{image.file_name}: {image.reason}" for image in bad[:3])
        raise ColabUtilsError(
            f"expected at most {allowed} bad images of {total:,}, found {len(bad)} so far "
            f"({examples}). Repair them, or their annotations with `check --repair OUT.json`, "
            "or allow more with --max-bad SHARE."
        )


def _join_skipped(indexes: Iterable[ShardIndex]) -> tuple[SkippedImage, ...]:
    return tuple(image for index in indexes for image in index.skipped)


def _sum_faults(indexes: Iterable[ShardIndex]) -> Counter[str]:
    faults = Counter[str]()
    for index in indexes:
        faults.update(index.faults)
    return faults
