"""COCO data to shards: several processes, each writes one shard at a time; the index comes last.

A run that is interrupted leaves only finished shards; the same call continues after the last one.
"""

from __future__ import annotations

import multiprocessing
import tarfile
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from colab_utils.data.coco import CocoDataset, open_coco
from colab_utils.drive import Retries, explain_write
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import count_cores, fork_pool, format_bytes, pop_done, require_space, show_progress, write_file
from colab_utils.shards.arrays import ArraysBuilder, describe_shard, dump_arrays, read_head
from colab_utils.shards.format import (
    INDEX_NAME,
    WRITER_NAME,
    ShardIndex,
    ShardInfo,
    SkippedImage,
    has_size,
    hash_bytes,
    hold_folder,
    parse_fields,
    parse_recipe,
    read_index,
    write_index,
)
from colab_utils.shards.images import Sample, Storage, read_image, try_sample

__all__ = [
    "READ_STREAMS", "ShardReport", "check_settings", "find_recipe", "keep_usable", "open_dataset", "write_shards",
]  # fmt: skip

READ_STREAMS = 4  # files that a process reads at the same time
_MEASURED_IMAGES = 16  # from which the images of a shard are worked out
_RANGES = {"max_bad": (0, 1), "shard_mb": (1e-9, 1024), "step_ms": (1e-9, 10**6)}


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

    def __str__(self) -> str:
        skipped = f", {len(self.skipped)} bad images skipped" if self.skipped else ""
        if self.crowds:
            skipped += f"; {self.crowds:,} of {self.annotations:,} objects are crowds and left out of training"
        return f"{self.images:,} images in {self.shards} shards, {format_bytes(self.bytes)}{skipped}"


class ShardJob(NamedTuple):
    """One shard to write: everything that a process needs, on this machine or another."""

    path: Path  # of the tar
    dataset: CocoDataset
    images: Path
    recipe: dict[str, Any]


class ShardResult(NamedTuple):
    """One shard that is done."""

    info: ShardInfo
    skipped: tuple[SkippedImage, ...]


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
    executor: Executor | None = None,
    max_bad: float = 0.01,
) -> ShardReport:
    """Write a COCO dataset as shards: uncompressed tars that WebDataset reads, each with its flat arrays.

    Images keep their bytes, unless they are larger than training needs: those are shrunk once. A bad image
    (missing, cut short, not an image, or with an annotation that has no usable mask) is skipped and reported.
    What each ``storage`` costs on this machine, `colab_utils.shards.plan.plan_shards` measures.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        shards: the folder to write to; made if need be. A finished folder of the same data is left as it is.
        shard_mb: size to aim at for each shard, in MB.
        min_size: the shorter side that training needs, in pixels (torchvision's ``min_size``).
        max_size: the longer side that training needs, in pixels (torchvision's ``max_size``).
        storage: "shrink" as above; "keep" shrinks nothing; "pixels" shrinks, then stores raw pixels (``KEY.npy``,
            uint8 [H, W, 3]), which cost no decoding and many times the space.
        workers: processes, each with a shard in memory; "auto" is one for each core. Each reads four files at a time,
            ahead of the image that it works on.
        executor: any ``concurrent.futures`` executor (a cluster's, say) to use in place of processes here.
        max_bad: the share of bad images above which it stops, 0 to 1.

    Raises:
        ColabUtilsError: if the input is missing or not COCO, too many images are bad, the disk is full, the folder
            holds other data, or another process writes there.

    Example:
        >>> import tempfile
        >>> from colab_utils.sample_data import make_dataset
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = make_dataset(folder + "/data", n=3, width=64, height=64, workers=1)
        ...     report = write_shards(made.images, made.annotations, shards=folder + "/shards", workers=1)
        >>> report.images, report.shards, report.skipped
        (3, 1, ())
    """
    started, images, folder = perf_counter(), Path(images), Path(shards)
    processes = count_cores() if workers == "auto" else workers
    recipe: dict[str, Any] = {"storage": storage, "min_size": min_size, "max_size": max_size, "shard_mb": shard_mb}
    check_settings(**recipe, workers=processes, max_bad=max_bad)
    dataset = open_dataset(images, annotations)
    index = _call(folder, _find_finished, folder, images, dataset, recipe)
    if index is None:
        with hold_folder(folder):
            recipe = _call(folder, _begin_folder, folder, images, dataset, recipe)
            count = recipe["images_per_shard"]
            parts = [dataset.subset(i, min(i + count, len(dataset))) for i in range(0, len(dataset), count)]
            paths = [folder.absolute() / f"shard-{number:06d}.tar" for number in range(len(parts))]
            jobs = [ShardJob(path, part, images.absolute(), recipe) for path, part in zip(paths, parts, strict=True)]
            with explain_write(folder):
                results = _run_jobs(jobs, processes=processes, executor=executor, max_bad=max_bad)
            index = ShardIndex(
                fingerprint=dataset.fingerprint,
                recipe=recipe,
                categories=dataset.categories,
                shards=tuple(result.info for result in results if result.info.images),
                skipped=tuple(image for result in results for image in result.skipped),
            )
            _call(folder, write_index, folder, index)
    return ShardReport(
        images=index.images,
        skipped=index.skipped,
        shards=len(index.shards),
        bytes=index.bytes,
        seconds=perf_counter() - started,
        storage=storage,
        annotations=len(dataset.ids),
        crowds=dataset.crowds,
    )


def check_settings(*, storage: str, **numbers: Any) -> None:
    """Refuse a setting of preprocessing that is out of range, by its name."""
    if storage not in get_args(Storage):
        known = ", ".join(get_args(Storage))
        raise ColabUtilsError(f"expected storage as one of {known}, found {storage!r}: choose another")
    for name, value in numbers.items():
        lower, upper = _RANGES.get(name, (1, 2**16))
        if not (isinstance(value, int if name == "workers" else int | float) and lower <= value <= upper):
            raise ColabUtilsError(f"expected {name} between {lower:g} and {upper:g}, found {value!r}: choose another")


def open_dataset(images: str | Path, annotations: str | Path) -> CocoDataset:
    """The annotations, checked for all that cannot be skipped image by image; where Drive fails it is tried again.

    Raises:
        ColabUtilsError: if there is no image folder, or the annotations are not COCO or refer to what is not there.
    """
    dataset = Retries().run(partial(open_coco, images, annotations))
    if not len(dataset):
        raise ColabUtilsError(f"expected images in {annotations}, found an empty list. Name another file.")
    return dataset


def find_recipe(folder: str | Path) -> dict[str, Any] | None:
    """How the shards of a folder were made, finished or not; None if it holds none.

    Raises:
        ColabUtilsError: if the folder holds something else.

    Example:
        >>> find_recipe("no/such/folder") is None
        True
    """
    run = _call(Path(folder), _find_run, Path(folder))
    return run.recipe if run else None


def _call(folder: Path, work: Callable[..., Any], *arguments: Any) -> Any:
    """``work(...)``, tried again where Drive fails; errors of writing into ``folder`` in words."""

    def run() -> Any:
        with explain_write(folder):
            return work(*arguments)

    return Retries(_shared[1]).run(run)


def _find_run(folder: Path) -> ShardIndex | None:
    """The index of the shards in a folder; of unfinished ones it is partial and lists none; None if there are none."""
    if (folder / INDEX_NAME).exists():
        return read_index(folder)
    for path in sorted(folder.glob("shard-*.arrays")):  # each shard knows its run
        with suppress(ColabUtilsError, KeyError, TypeError, ValueError):
            head = read_head(path)
            return ShardIndex(head["fingerprint"], parse_recipe(head["recipe"]), (), (), partial=True)
    if any(folder.glob("shard-*.tar")):
        raise ColabUtilsError(f"expected an empty folder, found shards without an index in {folder}. Name another one.")
    return None


def _check_run(folder: Path, dataset: CocoDataset, recipe: dict[str, Any]) -> ShardIndex | None:
    """The same of shards that must be of this data and these settings."""
    found = _find_run(folder)
    if found and (found.fingerprint != dataset.fingerprint or not found.recipe.items() >= recipe.items()):
        what = "made with other settings" if found.fingerprint == dataset.fingerprint else "of another dataset"
        raise ColabUtilsError(
            f"expected an empty folder or the same shards, found shards {what} in {folder}. Name another one (in a "
            "notebook: DRIVE_FOLDER), or delete these if you no longer need them."
        )
    return found


def _find_finished(folder: Path, images: Path, dataset: CocoDataset, recipe: dict[str, Any]) -> ShardIndex | None:
    """The index where nothing is to be done: no file is lost, no bad image was repaired, and no writer is left."""
    index = _check_run(folder, dataset, recipe)
    if index is None or index.partial or (folder / WRITER_NAME).exists():
        return None
    complete = all(has_size(folder / name, size) for name, size, _ in index.files())
    return index if complete and not _has_repaired(images, dataset, index, index.recipe) else None


def _has_repaired(images: Path, dataset: CocoDataset, index: ShardIndex | ShardResult, recipe: dict[str, Any]) -> bool:
    """Whether an image that was skipped before is good now."""
    names = {image.file_name for image in index.skipped}
    places = [i for i in range(len(dataset)) if dataset.file_name(i) in names] if names else []
    samples = (try_sample(partial(read_image, images, dataset, i), dataset, i, recipe) for i in places)
    return any(isinstance(sample, Sample) for sample in samples)


def _begin_folder(folder: Path, images: Path, dataset: CocoDataset, recipe: dict[str, Any]) -> dict[str, Any]:
    """Mark the folder as unfinished; returns the recipe with the number of images in a shard.

    Looks for shards again: another writer may have finished since, with other data.
    """
    if found := _check_run(folder, dataset, recipe):
        recipe = found.recipe
    else:
        mean = _measure_images(images, dataset, recipe)
        require_space(folder, mean * len(dataset), "name another folder, or store smaller images (--min-size)")
        recipe = {**recipe, "images_per_shard": max(1, round(recipe["shard_mb"] * 1e6 / mean))}
    (folder / INDEX_NAME).unlink(missing_ok=True)
    return recipe


def _measure_images(images: Path, dataset: CocoDataset, recipe: dict[str, Any]) -> float:
    """Mean bytes of an image in a shard, or in its arrays where they take more, from images spread over the dataset."""
    places = np.linspace(0, len(dataset) - 1, min(_MEASURED_IMAGES, len(dataset))).astype(int).tolist()
    found = [try_sample(partial(read_image, images, dataset, i), dataset, i, recipe) for i in places]
    return float(np.mean([max(one.count_bytes()) for one in keep_usable(found, images)]))


def keep_usable(found: list[Any], images: Path) -> list[Any]:
    """What was found of some images, without the bad ones.

    Raises:
        ColabUtilsError: if all are bad.
    """
    usable = [one for one in found if not isinstance(one, SkippedImage)]
    if not usable:
        raise ColabUtilsError(
            f"expected usable images in {images}, found every one that was looked at bad, such as "
            f"{found[0].file_name}: {found[0].reason}. Name the right image folder, or see `check`."
        )
    return usable


def _run_jobs(jobs: list[ShardJob], *, processes: int, executor: Executor | None, max_bad: float) -> list[ShardResult]:
    """Write every shard, on the executor or on processes of our own.

    Raises:
        ColabUtilsError: if too many images are bad, a shard cannot be written, or a process was ended.
    """
    total = sum(len(job.dataset) for job in jobs)
    allowed = int(max_bad * total + 1e-6)  # 0.29 x 100 is a little less than 29
    context = multiprocessing.get_context("fork")
    done, stop = shared = context.Value("q", 0), context.Event()
    with show_progress("preprocess", total=total, unit="image") as bar, ExitStack() as stack:
        if executor is None:
            executor = stack.enter_context(fork_pool(min(processes, len(jobs)), _start_worker, *shared))
        stack.callback(stop.set)  # after an error each worker of our own gives up at its next image
        futures = [executor.submit(_write_shard, job) for job in jobs]
        counter = done.get_obj()  # read without the lock, which a worker that was killed may hold
        return _collect(futures, total, allowed, bar, counter)


def _collect(futures: list[Future[ShardResult]], total: int, allowed: int, bar: Any, done: Any) -> list[ShardResult]:
    """The results of all jobs; ``done`` counts images where the workers share memory with this process."""
    pending = set(futures)
    try:
        while pending:
            pop_done(pending)
            results = [future.result() for future in futures if future not in pending]
            bad = [image for result in results for image in result.skipped]
            count = sum(result.info.images + len(result.skipped) for result in results)
            bar.update(max(count, done.value) - bar.n)
            if len(bad) > allowed:
                first = "; ".join(f"{image.file_name}: {image.reason}" for image in bad[:3])
                raise ColabUtilsError(
                    f"expected at most {allowed} bad images of {total:,}, found {len(bad)} so far ({first}). Repair "
                    "them, write a repaired annotations file with `check --repair OUT.json`, or allow more with "
                    "--max-bad SHARE."
                )
    finally:
        for future in pending:
            future.cancel()
    return results


_shared: tuple[Any, Any] = None, None  # in a worker process of our own


def _start_worker(done: Any, stop: Any) -> None:
    global _shared
    _shared = done, stop


def _count(images: int) -> None:
    """Tell the parent of images that are done; give up where it says so."""
    done, stop = _shared
    if stop is not None and stop.is_set():
        raise ColabUtilsError("expected to write all shards, found that it was stopped: run it again, it continues")
    if done is not None:
        with done.get_lock():
            done.value += images


def _write_shard(job: ShardJob) -> ShardResult:
    """Write one shard, or find it finished: the arrays first, whose head holds the tar's checksum, then the tar.

    A shard whose images are all bad has no files.

    Raises:
        ColabUtilsError: if it cannot be written.
        DriveLostError: if Drive went away.
    """
    found = _call(job.path.parent, _find_shard, job)
    if found is not None:
        _count(len(job.dataset))
        return found
    tar, arrays = _build_shard(job)
    _, result = _make_result(arrays)
    if result.info.images:  # arrays without a tar are no shard, but a tar without arrays could be anybody's
        _call(job.path.parent, write_file, job.path.with_suffix(".arrays"), arrays)
        _call(job.path.parent, write_file, job.path, *tar)
    return result


def _find_shard(job: ShardJob) -> ShardResult | None:
    """The shard as an earlier run left it; None if it is missing or cut short, or a bad image was repaired."""
    try:
        head, result = _make_result(job.path.with_suffix(".arrays").read_bytes())
        of_this_run = (head["fingerprint"], head["recipe"]) == (job.dataset.fingerprint, job.recipe)
    except (FileNotFoundError, AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError):
        return None
    is_there = of_this_run and result.info.name == job.path.name and has_size(job.path, result.info.bytes)
    return result if is_there and not _has_repaired(job.images, job.dataset, result, job.recipe) else None


def _build_shard(job: ShardJob) -> tuple[list[bytes], bytes]:
    """The parts of a tar, and its arrays, in memory."""
    tar, size, builder, annotations = list[bytes](), 0, ArraysBuilder(), 0
    skipped: list[SkippedImage] = []
    with closing(_read_ahead(job)) as files:
        for i, reading in enumerate(files):
            _count(1)
            sample = try_sample(reading.result, job.dataset, i, job.recipe)
            if isinstance(sample, SkippedImage):
                skipped.append(sample)
                continue
            members, starts = sample.split_members(), []
            for header, data, padding in members:
                starts.append(size + len(header))
                size += len(header) + len(data) + len(padding)
                tar += header, data, padding  # not joined: images that lie as pixels are megabytes to copy
            builder.add(sample.record, [data for _, data, _ in members], starts)
            annotations += len(sample.record["annotations"])
    tar.append(bytes(2 * tarfile.BLOCKSIZE))
    head = {
        "fingerprint": job.dataset.fingerprint,
        "recipe": job.recipe,
        "name": job.path.name,
        "images": len(job.dataset) - len(skipped),
        "annotations": annotations,
        "bytes": size + len(tar[-1]),
        "xxh3_64": hash_bytes(*tar),
        "skipped": [asdict(image) for image in skipped],
    }
    return tar, dump_arrays(head, builder.build())


def _read_ahead(job: ShardJob) -> Generator[Future[bytes], None, None]:
    """The images' files in their order, each asked for before it is needed: on Drive, reading is waiting."""
    pending, pool, retries = deque[Future[bytes]](), ThreadPoolExecutor(READ_STREAMS, "read"), Retries(_shared[1])
    try:
        for i in range(len(job.dataset)):
            pending.append(pool.submit(read_image, job.images, job.dataset, i, retries))
            if len(pending) > 2 * READ_STREAMS:
                yield pending.popleft()
        yield from pending
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _make_result(arrays: bytes) -> tuple[dict[str, Any], ShardResult]:
    """The head of an arrays file, and the shard that it describes."""
    head, info = describe_shard(arrays)
    return head, ShardResult(info, tuple(parse_fields(SkippedImage, image) for image in head["skipped"]))
