"""COCO data to shards: what it will cost; then several processes, each writes one shard at a time;
the index is last.

A run that is interrupted leaves only finished shards; the same call continues after the last one.
"""

import multiprocessing
import tarfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from colab_utils.data.coco import CocoDataset, open_coco
from colab_utils.data.defects import describe_faults
from colab_utils.drive import Retries, explain_write
from colab_utils.errors import ColabUtilsError
from colab_utils.files import hash_bytes, read_whole, write_file
from colab_utils.machine import count_cores, require_space
from colab_utils.processes import fork_pool, pop_done
from colab_utils.progress import show_progress
from colab_utils.require import require_choice, require_count, require_local_path, require_number
from colab_utils.shards.format import (
    INDEX_NAME,
    ShardIndex,
    SkippedImage,
    has_size,
    read_index,
    write_index,
)
from colab_utils.shards.lock import WRITER_NAME, hold_folder
from colab_utils.shards.records import (
    ArraysBuilder,
    Storage,
    describe_shard,
    dump_arrays,
    read_image,
    try_sample,
)
from colab_utils.units import format_bytes

READ_STREAMS = 4  # files that a process reads at the same time
_TRIED_IMAGES = 16  # from which the images of a shard, and a plan, are worked out
_MOST_ARRAYS_BYTES = 1e10  # more than those of the largest shard
_MOST_WORKERS = 2**16
_RANGES = {"min_size": (1, 2**16), "max_size": (1, 2**16), "shard_mb": (1e-9, 1024)}
# what reading damaged arrays raises
_DAMAGE = (
    FileNotFoundError,
    AttributeError,
    LookupError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)


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
    """Objects that are trained wrongly, or not at all, by the kind of defect that `check_dataset`
    names.
    """

    def __str__(self) -> str:
        skipped = f", {len(self.skipped)} bad images skipped" if self.skipped else ""
        if self.crowds:
            skipped += (
                f"; {self.crowds:,} of {self.annotations:,} objects are crowds and left "
                "out of training"
            )
        if self.faults:
            skipped += f"; bad objects, see check: {describe_faults(self.faults)}"
        return (
            f"{self.images:,} images in {self.shards} shards, {format_bytes(self.bytes)}{skipped}"
        )


class ShardJob(NamedTuple):
    """One shard to write: everything that a process needs, on this machine or another."""

    path: Path  # of the tar
    dataset: CocoDataset
    images: Path
    recipe: dict[str, Any]


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
    """Write a COCO dataset as shards: uncompressed tars that WebDataset reads, each with its flat
    arrays.

    Images keep their bytes, unless they are larger than training needs: those are shrunk once. A
    bad image (missing, cut short, not an image, or with an annotation that has no usable mask) is
    skipped and reported. What each ``storage`` costs on this machine, `plan_shards` measures.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        shards: the folder to write to; made if need be. A finished folder of the same data is left
            as it is.
        shard_mb: size to aim at for each shard, in MB.
        min_size: the shorter side that training needs, in pixels (torchvision's ``min_size``).
        max_size: the longer side that training needs, in pixels (torchvision's ``max_size``).
        storage: "shrink" as above; "keep" shrinks nothing; "pixels" shrinks, then stores raw pixels
            (``KEY.npy``, uint8 [H, W, 3]), which cost no decoding and many times the space.
        workers: processes, each with a shard in memory; "auto" is one for each core. Each reads
            four files at a time, ahead of the image that it works on.
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
        ...     report = write_shards(made.images, made.annotations, shards=folder + "/shards", workers=1)
        >>> report.images, report.shards, report.skipped
        (3, 1, ())
    """
    started_s = perf_counter()
    images = require_local_path(images)
    folder = require_local_path(shards)
    processes = _count_processes(workers)
    recipe = _make_recipe(storage, min_size=min_size, max_size=max_size, shard_mb=shard_mb)
    require_number("max_bad", max_bad, least=0, most=1)
    dataset = _open_dataset(images, annotations)
    index = _call(folder, _find_finished, folder, images, dataset, recipe)
    if index is None:
        with hold_folder(folder):
            recipe = _call(folder, _begin_folder, folder, images, dataset, recipe)
            count = recipe["images_per_shard"]
            parts = [
                dataset.subset(i, min(i + count, len(dataset)))
                for i in range(0, len(dataset), count)
            ]
            paths = [folder.absolute() / f"shard-{number:06d}.tar" for number in range(len(parts))]
            jobs = [
                ShardJob(path, part, images.absolute(), recipe)
                for path, part in zip(paths, parts, strict=True)
            ]
            with explain_write(folder):
                done = _run_jobs(jobs, processes=processes, executor=executor, max_bad=max_bad)
            index = ShardIndex(
                fingerprint=dataset.fingerprint,
                recipe=recipe,
                categories=dataset.categories,
                shards=tuple(shard for one in done for shard in one.shards if shard.images),
                skipped=tuple(image for one in done for image in one.skipped),
                faults=dict(_sum_faults(done)),
            )
            _call(folder, write_index, folder, index)
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


def _count_processes(workers: int | Literal["auto"]) -> int:
    return (
        count_cores()
        if workers == "auto"
        else require_count("workers", workers, most=_MOST_WORKERS)
    )


def _make_recipe(storage: str, **numbers: Any) -> dict[str, Any]:
    """Return the recipe of these settings, each of a type that JSON knows.

    Raises:
        ColabUtilsError: if a setting is out of range.
    """
    require_choice("storage", storage, get_args(Storage))
    recipe: dict[str, Any] = {"storage": storage}
    for name, value in numbers.items():
        least, most = _RANGES[name]
        recipe[name] = require_number(name, value, least=least, most=most)
    return recipe


def _open_dataset(images: str | Path, annotations: str | Path) -> CocoDataset:
    """The annotations, checked for all that cannot be skipped image by image; where Drive fails it
    is tried again.

    Raises:
        ColabUtilsError: if there is no image folder, or the annotations are not COCO, are empty, or
            refer to what is not there.
    """
    dataset = Retries().run(partial(open_coco, images, annotations))
    if not len(dataset):
        raise ColabUtilsError(
            f"expected images in {annotations}, found an empty list. Name another file."
        )
    return dataset


def find_recipe(folder: str | Path) -> dict[str, Any] | None:
    """How the shards of a folder were made, finished or not; None if it holds none.

    Raises:
        ColabUtilsError: if the folder holds something else.

    Example:
        >>> find_recipe("no/such/folder") is None
        True
    """
    folder = require_local_path(folder)
    run = _call(folder, _find_run, folder)
    return run.recipe if run else None


def _call(folder: Path, work: Callable[..., Any], *arguments: Any) -> Any:
    """``work(...)``, tried again where Drive fails; errors of writing into ``folder`` in words."""
    return Retries(_shared[1]).run(partial(explain_write(folder)(work), *arguments))


def _find_run(folder: Path) -> ShardIndex | None:
    """The index of the shards in a folder; of unfinished ones that of the first; None if there are
    none.
    """
    if (folder / INDEX_NAME).exists():
        return read_index(folder)
    for path in sorted(folder.glob("shard-*.arrays")):  # each shard knows its run
        try:
            content = read_whole(path, most_bytes=_MOST_ARRAYS_BYTES)
        except FileNotFoundError:
            continue
        with suppress(ColabUtilsError, *_DAMAGE):
            return _read_arrays(content)
    if any(folder.glob("shard-*.tar")):
        raise ColabUtilsError(
            f"expected an empty folder, found shards without an index in {folder}. Name another "
            "one."
        )
    return None


def _check_run(folder: Path, dataset: CocoDataset, recipe: dict[str, Any]) -> ShardIndex | None:
    """The same of shards that must be of this data and these settings."""
    found = _find_run(folder)
    if found and (
        found.fingerprint != dataset.fingerprint or not found.recipe.items() >= recipe.items()
    ):
        what = (
            "made with other settings"
            if found.fingerprint == dataset.fingerprint
            else "of another dataset"
        )
        cure = "Name another one (in a notebook: DRIVE_FOLDER), or delete these."
        raise ColabUtilsError(
            f"expected nothing or the same shards, found shards {what} in {folder}. {cure}"
        )
    return found


def _find_finished(
    folder: Path, images: Path, dataset: CocoDataset, recipe: dict[str, Any]
) -> ShardIndex | None:
    """The index where nothing is to be done: no file is lost, no bad image was repaired, and no
    writer is left.
    """
    index = _check_run(folder, dataset, recipe)
    if index is None or index.partial or (folder / WRITER_NAME).exists():
        return None
    return index if _is_complete(index, folder, images, dataset) else None


def _is_complete(index: ShardIndex, folder: Path, images: Path, dataset: CocoDataset) -> bool:
    """Whether the files of an index are there, and every image that it skipped is still bad."""
    names = {image.file_name for image in index.skipped}
    places = [i for i in range(len(dataset)) if dataset.file_name(i) in names] if names else []
    samples = (
        try_sample(partial(read_image, images, dataset, i), dataset, i, index.recipe)
        for i in places
    )
    are_there = all(has_size(folder / name, size) for name, size, _ in index.files())
    return are_there and all(isinstance(sample, SkippedImage) for sample in samples)


def _begin_folder(
    folder: Path, images: Path, dataset: CocoDataset, recipe: dict[str, Any]
) -> dict[str, Any]:
    """Mark the folder as unfinished; returns the recipe with the number of images in a shard.

    Looks for shards again: another writer may have finished since, with other data.
    """
    if found := _check_run(folder, dataset, recipe):
        recipe = found.recipe
    else:
        tried = _try_images(images, dataset, recipe)
        mean = float(
            np.mean([max(tar_bytes, arrays_bytes) for tar_bytes, arrays_bytes, _ in tried])
        )
        require_space(
            folder, mean * len(dataset), "name another folder, or store smaller images (--min-size)"
        )
        recipe = {**recipe, "images_per_shard": max(1, round(recipe["shard_mb"] * 1e6 / mean))}
    (folder / INDEX_NAME).unlink(missing_ok=True)
    return recipe


def _run_jobs(
    jobs: list[ShardJob], *, processes: int, executor: Executor | None, max_bad: float
) -> list[ShardIndex]:
    """Write every shard, on the executor or on processes of our own; returns an index of each.

    Raises:
        ColabUtilsError: if too many images or objects are bad, a shard cannot be written, or a
            process was ended.
    """
    total = sum(len(job.dataset) for job in jobs)
    objects = sum(len(job.dataset.ids) - job.dataset.crowds for job in jobs)
    # 0.29 x 100 is a little less than 29
    allowed = int(max_bad * total + 1e-6)
    allowed_objects = int(max_bad * objects + 1e-6)
    context = multiprocessing.get_context("fork")
    images, stop = shared = context.Value("q", 0), context.Event()
    with show_progress("preprocess", total=total, unit="image") as bar, ExitStack() as stack:
        if executor is None:
            executor = stack.enter_context(
                fork_pool(min(processes, len(jobs)), _start_worker, *shared)
            )
        stack.callback(stop.set)  # after an error each worker of our own gives up at its next image
        futures = [executor.submit(_write_shard, job) for job in jobs]
        for future in futures:
            stack.callback(future.cancel)
        pending = set(futures)
        done = list[ShardIndex]()
        while pending:
            pop_done(pending)
            done = [future.result() for future in futures if future not in pending]
            bad = [image for one in done for image in one.skipped]
            count = sum(one.images for one in done) + len(bad)
            # of images in unfinished shards, too; without the lock, which a worker that was killed
            # may hold
            bar.update(max(count, images.get_obj().value) - bar.n)
            if len(bad) > allowed:
                first = "; ".join(f"{image.file_name}: {image.reason}" for image in bad[:3])
                raise ColabUtilsError(
                    f"expected at most {allowed} bad images of {total:,}, found {len(bad)} so far "
                    f"({first}). Repair "
                    "them, or their annotations with `check --repair OUT.json`, or allow more "
                    "with --max-bad SHARE."
                )
            faults = _sum_faults(done)
            if faults.total() > allowed_objects:
                raise ColabUtilsError(
                    f"expected at most {allowed_objects:,} bad objects of {objects:,}, found "
                    f"{faults.total():,} so far "
                    f"({describe_faults(faults)}). Repair the annotations with `check --repair "
                    "OUT.json`, or allow "
                    "more with --max-bad SHARE."
                )
        return done


def _sum_faults(indexes: Iterable[ShardIndex]) -> Counter[str]:
    faults = Counter[str]()
    for index in indexes:
        faults.update(index.faults)
    return faults


_shared: tuple[Any, Any] = None, None  # in a worker process of our own


def _start_worker(done: Any, stop: Any) -> None:
    global _shared
    _shared = done, stop


def _count(images: int) -> None:
    """Tell the parent of images that are done; give up where it says so."""
    done, stop = _shared
    if stop is not None and stop.is_set():
        raise ColabUtilsError(
            "expected to write all shards, found that it was stopped: run it again, it continues"
        )
    if done is not None:
        with done.get_lock():
            done.value += images


def _write_shard(job: ShardJob) -> ShardIndex:
    """Write one shard, or find it finished; returns an index of it alone.

    The arrays come first, whose head holds the tar's checksum, then the tar. A shard whose images
    are all bad has no files.

    Raises:
        ColabUtilsError: if it cannot be written.
        DriveLostError: if Drive went away.
    """
    if found := _call(job.path.parent, _find_shard, job):
        _count(len(job.dataset))
        return found
    tar, arrays = _build_shard(job)
    index = _read_arrays(arrays)
    # arrays without a tar are no shard, but a tar without arrays could be anybody's
    if index.images:
        _call(job.path.parent, write_file, job.path.with_suffix(".arrays"), arrays)
        _call(job.path.parent, write_file, job.path, *tar)
    return index


def _find_shard(job: ShardJob) -> ShardIndex | None:
    """The shard as an earlier run left it; None if it is missing or cut short, or a bad image was
    repaired.
    """
    with suppress(*_DAMAGE):
        path = job.path.with_suffix(".arrays")
        index = _read_arrays(read_whole(path, most_bytes=_MOST_ARRAYS_BYTES))
        found = (index.fingerprint, index.recipe)
        expected = (job.dataset.fingerprint, job.recipe)
        is_own = found == expected and index.shards[0].name == job.path.name
        if is_own and _is_complete(index, job.path.parent, job.images, job.dataset):
            return index
    return None


def _build_shard(job: ShardJob) -> tuple[list[bytes], bytes]:
    """The parts of a tar, and its arrays, in memory."""
    tar = list[bytes]()
    size = 0
    builder = ArraysBuilder()
    annotations = 0
    skipped: list[SkippedImage] = []
    faults = Counter[str]()
    with closing(_read_ahead(job)) as files:
        for i, reading in enumerate(files):
            _count(1)
            sample = try_sample(reading.result, job.dataset, i, job.recipe)
            if isinstance(sample, SkippedImage):
                skipped.append(sample)
                continue
            starts = list[int]()
            for header, data, padding in sample.members:
                starts.append(size + len(header))
                size += len(header) + len(data) + len(padding)
                # not joined: images that lie as pixels are megabytes to copy
                tar += header, data, padding
            builder.add(sample.record, [data for _, data, _ in sample.members], starts)
            annotations += len(sample.record["annotations"])
            faults.update(sample.faults)
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
    if faults:
        head["faults"] = dict(faults)
    return tar, dump_arrays(head, builder.build())


def _read_ahead(job: ShardJob) -> Generator[Future[bytes], None, None]:
    """The images' files in their order, each asked for before it is needed: on Drive, reading is
    waiting.
    """
    pending = list[Future[bytes]]()
    pool = ThreadPoolExecutor(READ_STREAMS, "read")
    retries = Retries(_shared[1])
    try:
        for i in range(len(job.dataset)):
            pending.append(pool.submit(read_image, job.images, job.dataset, i, retries))
            if len(pending) > 2 * READ_STREAMS:
                yield pending.pop(0)
        yield from pending
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _read_arrays(content: bytes) -> ShardIndex:
    """The index of the one shard that an arrays file describes; partial, as its run may not have
    ended.
    """
    head, shard = describe_shard(content)
    skipped = tuple(SkippedImage(**image) for image in head["skipped"])
    return ShardIndex(
        head["fingerprint"],
        head["recipe"],
        (),
        (shard,),
        skipped,
        partial=True,
        faults=head.get("faults", {}),
    )


@dataclass(frozen=True)
class ShardPlan:
    """What :func:`plan_shards` picked, and what it costs on this machine."""

    storage: Storage
    reason: str
    bytes: int
    """Of the complete dataset, in the shards and their arrays."""
    write_s: float
    """Seconds to write the complete dataset."""
    images: int
    sampled_images: int
    """Those that it was measured on."""

    def __str__(self) -> str:
        cost = f"{format_bytes(self.bytes)} and {self.write_s / 60:.1f} minutes to write"
        measured = f"measured on {self.sampled_images:,} of {self.images:,} images"
        return f"{self.storage}: {self.reason}. About {cost} ({measured})."


def plan_shards(
    images: str | Path,
    annotations: str | Path,
    *,
    storage: Storage | Literal["auto"] = "auto",
    min_size: int = 800,
    max_size: int = 1333,
    workers: int | Literal["auto"] = "auto",
) -> ShardPlan:
    """Pick a storage for `write_shards`, and try it on a few images; nothing is written.

    Where no image is larger than training needs, every file keeps its bytes; else the larger ones
    are shrunk. Raw pixels are taken only where you ask for them.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        storage: "auto" picks; any other is taken.
        min_size: the shorter side that training needs, in pixels.
        max_size: the longer side that training needs, in pixels.
        workers: processes that will write; "auto" is one for each core.

    Raises:
        ColabUtilsError: if the input is missing or not COCO, no image is usable, or a setting is
            out of range.

    Example:
        >>> import tempfile
        >>> from colab_utils.sample_data import make_dataset
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = make_dataset(folder, n=4, width=64, height=64, workers=1)
        ...     plan = plan_shards(made.images, made.annotations, workers=1)
        >>> plan.storage, plan.reason
        ('keep', 'no image is larger than training needs, every file keeps its bytes')
    """
    processes = _count_processes(workers)
    reason = "you asked for it"
    picked = "keep" if storage == "auto" else storage
    recipe = _make_recipe(picked, min_size=min_size, max_size=max_size)
    dataset = _open_dataset(images, annotations)
    if storage == "auto":
        reason = "no image is larger than training needs, every file keeps its bytes"
        # by the annotations; 0 where they give none
        shorter = dataset.sizes.min(1)
        longer = dataset.sizes.max(1)
        if larger := int(((shorter > min_size) | (longer > max_size) | (shorter == 0)).sum()):
            recipe["storage"] = "shrink"
            reason = (
                f"{larger:,} of {len(dataset):,} images are larger than training needs and "
                "are shrunk once"
            )
    # loads the libraries, before anything is timed
    _try_image(Path(images), recipe, dataset.subset(0, 1))
    with fork_pool(processes) as pool:
        tried = _try_images(Path(images), dataset, recipe, pool.map)
    tar_bytes, arrays_bytes, write_s = (len(dataset) * np.mean(tried, axis=0)).tolist()
    size = round(tar_bytes + arrays_bytes)
    return ShardPlan(recipe["storage"], reason, size, write_s / processes, len(dataset), len(tried))


# of one image: bytes in the tar, in the arrays, and seconds to write
_Cost = tuple[int, int, float]


def _try_images(
    images: Path, dataset: CocoDataset, recipe: dict[str, Any], run: Any = map
) -> list[_Cost]:
    """What images that are spread over the dataset cost; bad ones are left out.

    Raises:
        ColabUtilsError: if all are bad.
    """
    places = np.linspace(0, len(dataset) - 1, min(_TRIED_IMAGES, len(dataset))).astype(int).tolist()
    found = list(
        run(partial(_try_image, images, recipe), [dataset.subset(i, i + 1) for i in places])
    )
    usable = [one for one in found if not isinstance(one, SkippedImage)]
    if not usable:
        raise ColabUtilsError(
            f"expected usable images in {images}, found every one that was looked at bad, such as "
            f"{found[0].file_name}: {found[0].reason}. Name the right image folder, or see `check`."
        )
    return usable


def _try_image(images: Path, recipe: dict[str, Any], part: CocoDataset) -> _Cost | SkippedImage:
    """The cost of a dataset's only image, or why it is bad."""
    began_s = perf_counter()
    read = cache(partial(read_image, images, part, 0))
    with suppress(ColabUtilsError):  # it is met again below
        read()
    # files are read ahead, while others are worked on
    read_s = (perf_counter() - began_s) / READ_STREAMS
    began_s = perf_counter()
    builder = ArraysBuilder()
    sample = try_sample(read, part, 0, recipe)
    if isinstance(sample, SkippedImage):
        return sample
    builder.add(sample.record, (sample.members[0][1], b""), (0, 0))
    tar_bytes = sum(len(piece) for member in sample.members for piece in member)
    arrays_bytes = sum(array.nbytes for array in vars(builder.build()).values())
    return tar_bytes, arrays_bytes, max(perf_counter() - began_s, read_s)
