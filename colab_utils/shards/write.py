"""COCO data to shards: several processes, one finished shard at a time, the index last.

An interrupted run leaves only finished shards; the same call continues after the last one.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from colab_utils.data.coco import CocoDataset, is_safe_name, read_coco
from colab_utils.drive import DriveLostError, Retries, describe_retries, guard_drive, read_file
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import count_cores, fork_pool, format_bytes, show_progress, write_file
from colab_utils.shards.arrays import ArraysBuilder, dump_arrays, load_arrays, read_head
from colab_utils.shards.format import (
    BLOCK_BYTES,
    FORMAT_VERSION,
    INDEX_NAME,
    UNFINISHED_NAME,
    WRITER_NAME,
    ShardIndex,
    ShardInfo,
    SkippedImage,
    explain_write,
    hash_bytes,
    hold_folder,
    pad_member,
    read_index,
    remove_leftovers,
    split_member,
    write_index,
)
from colab_utils.shards.images import JPEG_QUALITY, Storage, StoredImage, dump_record, make_record, store_image

__all__ = [
    "READ_STREAMS",
    "SAMPLE_IMAGES",
    "ShardJob",
    "ShardReport",
    "ShardResult",
    "check_numbers",
    "find_recipe",
    "has_repaired",
    "open_dataset",
    "read_image",
    "read_sample",
    "run_jobs",
    "store_sample",
    "write_shard",
    "write_shards",
]

READ_STREAMS = 4  # files that a process reads at the same time


class ShardResult(NamedTuple):
    """One shard that is done; ``retries``: how many times Drive failed meanwhile and was tried again."""

    info: ShardInfo
    skipped: tuple[SkippedImage, ...]
    retries: int = 0


@dataclass(frozen=True)
class ShardJob:
    """One shard to write: everything that a process needs, on this machine or another."""

    name: str
    dataset: CocoDataset
    images: Path
    folder: Path
    recipe: dict[str, Any]


def read_sample(
    images: Path, dataset: CocoDataset, i: int, recipe: dict[str, Any], retries: Retries | None = None
) -> tuple[str, str, bytes, dict[str, Any]]:
    """Key, extension, image bytes and record of one image.

    Raises:
        ColabUtilsError: if the image or one of its annotations is bad.
        DriveLostError: if Drive went away, which says nothing about the image.
    """
    return _make_sample(read_image(images, dataset, i, retries), dataset, i, recipe)


def _make_sample(
    data: bytes, dataset: CocoDataset, i: int, recipe: dict[str, Any]
) -> tuple[str, str, bytes, dict[str, Any]]:
    """The same of an image that was read."""
    stored, image = store_sample(data, dataset, i, recipe), dataset.image(i)
    return f"{image['id']:012d}", stored.extension, stored.data, make_record(image, dataset.annotations(i), stored)


def read_image(images: Path, dataset: CocoDataset, i: int, retries: Retries | None = None) -> bytes:
    """The bytes of one image's file; raises what `read_sample` raises."""
    try:
        return read_file(images / dataset.file_name(i), None, retries)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ColabUtilsError("the file is missing") from None
    except OSError as error:
        raise ColabUtilsError(f"the file cannot be read: {error.strerror}") from None


def store_sample(data: bytes, dataset: CocoDataset, i: int, recipe: dict[str, Any]) -> StoredImage:
    """The bytes of one image's file as they go into a shard; raises what `store_image` raises."""
    return store_image(
        data,
        tuple(dataset.sizes[i].tolist()),
        min_size=recipe["min_size"],
        max_size=recipe["max_size"],
        form=recipe.get("form", "shrink"),  # older shards know no other
        jpeg_quality=recipe["jpeg_quality"],
    )


def write_shard(
    job: ShardJob, count: Callable[[int], object], turn: AbstractContextManager[Any] | None = None, stop: Any = None
) -> ShardResult:
    """Write one shard, or find it finished: the tar first, then the arrays, whose head vouches for the tar.

    A shard whose images are all bad has no files. ``count`` is called with the number of images about to be done, and
    with 0 while Drive is waited for; it may raise. ``turn`` is held while the images are worked on, and not while a
    disk is waited for. Once ``stop``, an event, is set, Drive is not tried again.

    Raises:
        ColabUtilsError: if it cannot be written.
        DriveLostError: if Drive went away.
    """
    tar_path, arrays_path = job.folder / f"{job.name}.tar", job.folder / f"{job.name}.arrays"
    retries = Retries(stop)
    found = retries.run(partial(_find_shard, job, tar_path, arrays_path))
    if found is not None:
        count(len(job.dataset))
        return found
    with turn or nullcontext():
        tar, arrays, head = _build_shard(job, count, retries)
    if head["images"]:
        retries.run(partial(_write, tar_path, *tar))
        retries.run(partial(_write, arrays_path, arrays))
    skipped = tuple(SkippedImage(**image) for image in head["skipped"])
    return ShardResult(_describe_shard(head, arrays_path.name, arrays), skipped, retries.count)


def _build_shard(
    job: ShardJob, count: Callable[[int], object], retries: Retries
) -> tuple[list[bytes], bytes, dict[str, Any]]:
    """The parts of a tar, its arrays, and their head, in memory."""
    tar, size, builder, annotations = list[bytes](), 0, ArraysBuilder(), 0
    skipped: list[SkippedImage] = []
    with closing(_read_ahead(job, retries)) as files:
        for i, reading in enumerate(files):
            count(1)
            while not reading.done():
                count(0)
                wait([reading], timeout=0.5)
            try:
                key, extension, data, record = _make_sample(reading.result(), job.dataset, i, job.recipe)
            except DriveLostError:
                raise
            except ColabUtilsError as error:
                skipped.append(SkippedImage(job.dataset.file_name(i), str(error)))
                continue
            spans = []
            for end, part in ((extension, data), ("json", dump_record(record))):
                spans.append((size + BLOCK_BYTES, len(part)))
                member = split_member(f"{key}.{end}", part)
                size += sum(map(len, member))
                tar += member  # pieces as they are: images that lie as pixels are megabytes to copy
            builder.add(record, data, *spans)
            annotations += len(record["annotations"])
    tar.append(bytes(2 * BLOCK_BYTES))
    head = {
        "fingerprint": job.dataset.fingerprint,
        "recipe": job.recipe,
        "name": f"{job.name}.tar",
        "images": len(job.dataset) - len(skipped),
        "annotations": annotations,
        "bytes": size + 2 * BLOCK_BYTES,
        "xxh3_64": hash_bytes(*tar),
        "skipped": [asdict(image) for image in skipped],
    }
    return tar, dump_arrays(head, builder.build()), head


def _read_ahead(job: ShardJob, retries: Retries) -> Generator[Future[bytes], None, None]:
    """The images' files in their order, each asked for before it is needed: on Drive, reading is waiting."""
    pending, pool, ahead = deque[Future[bytes]](), ThreadPoolExecutor(READ_STREAMS, "read"), Retries()
    try:
        for i in range(len(job.dataset)):
            pending.append(pool.submit(read_image, job.images, job.dataset, i, ahead))
            if len(pending) > 2 * READ_STREAMS:
                yield pending.popleft()
        while pending:
            yield pending.popleft()
    finally:
        ahead.stop.set()  # it may end early: nobody tries again
        retries.count += ahead.count
        pool.shutdown(wait=False, cancel_futures=True)


def _write(path: Path, *parts: bytes) -> None:
    with explain_write(path.parent):
        write_file(path, *parts)


def has_repaired(images: Path, dataset: CocoDataset, recipe: dict[str, Any], skipped: tuple[SkippedImage, ...]) -> bool:
    """Whether an image that was skipped before is good now.

    Raises:
        DriveLostError: if Drive went away.
    """
    names = {image.file_name for image in skipped}
    bad = 0
    for i in range(len(dataset)) if names else ():
        if dataset.file_name(i) in names:
            try:
                read_sample(images, dataset, i, recipe)
            except DriveLostError:
                raise
            except ColabUtilsError:
                bad += 1
    return bad < len(skipped)


def _find_shard(job: ShardJob, tar_path: Path, arrays_path: Path) -> ShardResult | None:
    """The shard as an earlier run left it; None if it must be written: missing, cut short, or an image was mended."""
    try:
        with guard_drive(job.folder):
            head = read_head(arrays_path)
            load_arrays(arrays_path)
            size, arrays = tar_path.stat().st_size, arrays_path.read_bytes()
        if (head["fingerprint"], head["recipe"], head["bytes"]) != (job.dataset.fingerprint, job.recipe, size):
            return None
        skipped = tuple(SkippedImage(**image) for image in head["skipped"])
        found = _describe_shard(head, arrays_path.name, arrays)
    except DriveLostError:
        raise
    except (FileNotFoundError, ColabUtilsError, KeyError, TypeError):
        return None
    return None if has_repaired(job.images, job.dataset, job.recipe, skipped) else ShardResult(found, skipped)


def _describe_shard(head: dict[str, Any], arrays_name: str, arrays: bytes) -> ShardInfo:
    return ShardInfo(
        name=head["name"],
        images=head["images"],
        annotations=head["annotations"],
        bytes=head["bytes"],
        xxh3_64=head["xxh3_64"],
        arrays_name=arrays_name,
        arrays_bytes=len(arrays),
        arrays_xxh3_64=hash_bytes(arrays),
    )


def run_jobs(
    jobs: list[ShardJob], *, workers: int | Literal["auto"], executor: Executor | None, max_bad: float
) -> list[ShardResult]:
    """Write every shard.

    Args:
        jobs: one or more, of one folder.
        workers: processes that work at a time; "auto" is one for each core.
        executor: used in place of processes, if there is one.
        max_bad: the share of bad images above which it stops.

    Raises:
        ColabUtilsError: if too many images are bad, a shard cannot be written, or a process was ended.
    """
    total = sum(len(job.dataset) for job in jobs)
    allowed = int(max_bad * total + 1e-6)  # 0.29 x 100 is a little less than 29
    count = min(count_cores() if workers == "auto" else int(workers), len(jobs))
    with show_progress("preprocess", total=total, unit="image") as bar:
        if executor is not None:
            return _collect([executor.submit(_work, job) for job in jobs], total, allowed, bar)
        context = multiprocessing.get_context("fork" if count > 1 else None)
        done, stop, turns = context.Value("q", 0), context.Event(), context.Semaphore(count)
        work = partial(write_shard, count=partial(_count_done, done, stop), turn=turns, stop=stop)
        # one more than work at a time: it waits for the disk meanwhile
        most = min(count + 1, len(jobs))
        pool, run = (fork_pool(most, _start_worker, work), _work) if count > 1 else (ThreadPoolExecutor(most), work)
        with pool:
            try:
                return _collect([pool.submit(run, job) for job in jobs], total, allowed, bar, done)
            except BaseException:
                stop.set()  # each worker gives up at its next image: no half shard is ever renamed
                pool.shutdown(wait=True, cancel_futures=True)
                remove_leftovers(jobs[0].folder)  # of a worker that the system ended
                raise


def _collect(
    futures: list[Future[ShardResult]], total: int, allowed: int, bar: Any, done: Any = None
) -> list[ShardResult]:
    bad: list[SkippedImage] = []
    pending, retries = set(futures), 0
    try:
        while pending:
            finished, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in finished:
                result = future.result()
                bad += result.skipped
                if done is None:
                    bar.update(result.info.images + len(result.skipped))
                retries += result.retries
            bar.set_postfix_str(describe_retries(retries), refresh=False)
            if done is not None:
                bar.update(done.value - bar.n)
            _check_bad(bad, total, allowed)
    except BrokenExecutor:
        raise ColabUtilsError(
            "expected every worker process to finish its shards, found one that the system ended, most often for want "
            "of memory. Run the same command with fewer workers (--workers 1): it continues after the finished shards."
        ) from None
    finally:
        for future in pending:
            future.cancel()
    return [future.result() for future in futures]


def _check_bad(bad: list[SkippedImage], total: int, allowed: int) -> None:
    if len(bad) > allowed:
        first = "; ".join(f"{image.file_name}: {image.reason}" for image in bad[:3])
        raise ColabUtilsError(
            f"expected at most {allowed} bad images of {total:,}, found {len(bad)} so far ({first}). Mend them, write "
            "a repaired annotations file with `check --repair OUT.json`, or allow more with --max-bad SHARE."
        )


_run: Callable[[ShardJob], ShardResult] = partial(write_shard, count=int)


def _start_worker(run: Callable[[ShardJob], ShardResult]) -> None:
    global _run
    _run = run


def _work(job: ShardJob) -> ShardResult:
    return _run(job)


def _count_done(done: Any, stop: Any, images: int) -> None:
    if stop.is_set():
        raise ColabUtilsError("stopped")
    with done.get_lock():
        done.value += images


SAMPLE_IMAGES = 16


_RANGES = {"max_bad": (0, 1), "shard_mb": (0, 1024), "jpeg_quality": (1, 100), "step_ms": (0, 10**6)}


_WHOLE = ("workers", "jpeg_quality", "sample", "batch_size")


@dataclass(frozen=True)
class ShardReport:
    """What :func:`write_shards` did."""

    images: int
    """Images in the shards."""
    skipped: tuple[SkippedImage, ...]
    """Images that were left out, each with its reason."""
    shards: int
    bytes: int
    """Size of all shards and the arrays beside them."""
    seconds: float
    form: Storage = "shrink"
    """How the images are stored; see :func:`write_shards`."""
    retries: int = 0
    """How many times Drive failed and was tried again."""

    def __str__(self) -> str:
        skipped = f", {len(self.skipped)} bad images skipped" if self.skipped else ""
        tried = describe_retries(self.retries, "; ")
        return f"{self.images:,} images in {self.shards} shards, {format_bytes(self.bytes)}{skipped}{tried}"


def write_shards(
    images: str | Path,
    annotations: str | Path,
    *,
    shards: str | Path,
    shard_mb: float = 128,
    min_size: int = 800,
    max_size: int = 1333,
    form: Storage = "shrink",
    jpeg_quality: int = JPEG_QUALITY,
    workers: int | Literal["auto"] = "auto",
    executor: Executor | None = None,
    max_bad: float = 0.01,
) -> ShardReport:
    """Write a COCO dataset as shards: uncompressed tars that WebDataset reads, and flat arrays beside them.

    Images keep their bytes, unless they are larger than training needs: those are shrunk once. A bad image
    (missing, cut short, not an image, or with an annotation that has no usable mask) is skipped and reported.
    Which ``form`` pays on this machine, `colab_utils.shards.plan.plan_shards` measures.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        shards: the folder to write to; made if need be. A finished folder of the same data is left as it is.
        shard_mb: size to aim at for each shard, in MB.
        min_size: the shorter side that training needs, in pixels (torchvision's ``min_size``).
        max_size: the longer side that training needs, in pixels (torchvision's ``max_size``).
        form: "shrink" as above; "keep" shrinks nothing; "pixels" shrinks, then stores raw pixels (``KEY.npy``, uint8
            [H, W, 3]), which cost no decoding and many times the space.
        jpeg_quality: of images that are shrunk to JPEG, 1 to 100.
        workers: processes that work at a time, each with a shard in memory; "auto" is one for each core. One more waits
            for the disk meanwhile. Each reads four files at a time, ahead of what it works on.
        executor: any ``concurrent.futures`` executor (a cluster's, say) to use in place of processes here.
        max_bad: the share of bad images above which it stops, 0 to 1.

    Raises:
        ColabUtilsError: if the input is missing or not COCO, too many images are bad, the disk is full, or the
            folder holds other data.

    Example:
        >>> import tempfile
        >>> from colab_utils.sample_data import make_dataset
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = make_dataset(folder + "/data", n=3, width=64, height=64, workers=1)
        ...     report = write_shards(made.images, made.annotations, shards=folder + "/shards", workers=1)
        >>> report.images, report.shards, report.skipped
        (3, 1, ())
    """
    started = perf_counter()
    images, folder = Path(images), Path(shards)
    check_numbers(shard_mb=shard_mb, min_size=min_size, max_size=max_size, max_bad=max_bad, jpeg_quality=jpeg_quality)
    if workers != "auto":
        check_numbers(workers=workers)
    if form not in get_args(Storage):
        raise ColabUtilsError(f"expected form as one of {', '.join(get_args(Storage))}, found {form!r}: choose another")
    retries = Retries()
    dataset = open_dataset(images, annotations, retries)
    recipe = {
        "min_size": min_size,
        "max_size": max_size,
        "form": form,
        "jpeg_quality": jpeg_quality,
        "shard_mb": float(shard_mb),
    }

    def call(work: Callable[..., Any], *arguments: Any) -> Any:
        def run() -> Any:
            with explain_write(folder):
                return work(folder, *arguments)

        return retries.run(run)

    finished = call(_find_finished, images, dataset, recipe)
    if finished is not None:
        if (folder / WRITER_NAME).exists():  # of a run that was killed when all was done
            with hold_folder(folder, retries):
                pass
        return _report(finished, started)
    with hold_folder(folder, retries), explain_write(folder):
        recipe = call(_open_folder, images, dataset, recipe)
        jobs = _plan_jobs(dataset, images.absolute(), folder.absolute(), recipe)
        results = run_jobs(jobs, workers=workers, executor=executor, max_bad=max_bad)
        index = ShardIndex(
            fingerprint=dataset.fingerprint,
            recipe=recipe,
            categories=dataset.categories,
            shards=tuple(result.info for result in results if result.info.images),
            skipped=tuple(image for result in results for image in result.skipped),
        )
        call(_finish_folder, index)
    return replace(_report(index, started), retries=retries.count + sum(result.retries for result in results))


def _finish_folder(folder: Path, index: ShardIndex) -> None:
    remove_leftovers(folder)
    write_index(folder, index)
    (folder / UNFINISHED_NAME).unlink(missing_ok=True)


def open_dataset(images: str | Path, annotations: str | Path, retries: Retries | None = None) -> CocoDataset:
    """The annotations, once it is sure that shards can be made of them; where Drive fails, ``retries`` try again.

    Raises:
        ColabUtilsError: if there is no image folder, or the annotations are not COCO or refer to what is not there.
    """

    def read() -> CocoDataset:
        with guard_drive(images):
            if not Path(images).is_dir():
                raise ColabUtilsError(f"expected an image folder, found none at {images}. On Colab, mount Drive first.")
            return read_coco(annotations)

    dataset = (retries or Retries()).run(read)
    _check_references(dataset, Path(annotations))
    return dataset


def find_recipe(folder: str | Path) -> dict[str, Any] | None:
    """How the shards of a folder were made, finished or not; None if it holds none.

    Raises:
        ColabUtilsError: if the folder holds something else.

    Example:
        >>> find_recipe("no/such/folder") is None
        True
    """
    folder = Path(folder)

    def find() -> dict[str, Any] | None:
        with explain_write(folder):
            if (folder / INDEX_NAME).exists():
                return read_index(folder).recipe
            mark = _find_mark(folder)
        return None if mark is None else mark["recipe"]

    recipe = Retries().run(find)
    return None if recipe is None else _name_form(recipe)


def check_numbers(**numbers: Any) -> None:
    """Refuse a setting of preprocessing that is out of range, by its name."""
    for name, value in numbers.items():
        lower, upper = _RANGES.get(name, (1, 2**16))
        right = isinstance(value, int if name in _WHOLE else int | float) and lower <= value <= upper
        if not right or (name in ("shard_mb", "step_ms") and not value):
            raise ColabUtilsError(f"expected {name} between {lower} and {upper}, found {value!r}: choose another")


def _name_form(recipe: dict[str, Any]) -> dict[str, Any]:
    """Recipes of shards made before there were forms name none."""
    return {"form": "shrink", **recipe}


def _report(index: ShardIndex, started: float) -> ShardReport:
    form = _name_form(index.recipe)["form"]
    return ShardReport(index.images, index.skipped, len(index.shards), index.bytes, perf_counter() - started, form)


def _check_references(dataset: CocoDataset, annotations: Path) -> None:
    """Refuse what cannot be skipped image by image."""
    cure = "See `check`, which lists them and can write a repaired file (--repair OUT.json)."
    if not len(dataset):
        raise ColabUtilsError(f"expected images in {annotations}, found an empty list. Name another file.")
    for name, unknown in (("image", dataset.unknown_images), ("category", dataset.unknown_categories)):
        if unknown.size:
            raise ColabUtilsError(
                f"expected annotations of known images and categories in {annotations}, found {unknown.size} of an "
                f"unknown {name}, such as annotation {unknown[0]}. {cure}"
            )
    for i in range(len(dataset)):
        if not is_safe_name(dataset.file_name(i)):
            raise ColabUtilsError(
                f"expected each file_name inside the image folder, found {dataset.file_name(i)!r} in {annotations}. "
                + cure
            )


def _find_finished(folder: Path, images: Path, dataset: CocoDataset, recipe: dict[str, Any]) -> ShardIndex | None:
    """The index of a finished folder of the same data; None if there is work to do."""
    if not (folder / INDEX_NAME).exists():
        return None
    index = read_index(folder)
    same = _name_form(index.recipe).items() >= recipe.items()
    if index.fingerprint != dataset.fingerprint or not same:
        what = "shards made with other settings" if index.fingerprint == dataset.fingerprint else "another dataset"
        raise ColabUtilsError(
            f"expected an empty folder or the same shards, found {what} in {folder}. Name another one."
        )
    whole = all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size, _ in index.files())
    if whole and not index.partial and not has_repaired(images, dataset, index.recipe, index.skipped):
        (folder / UNFINISHED_NAME).unlink(missing_ok=True)
        return index
    # what was lost, cut, left out or mended is made now, as in every other unfinished folder
    write_file(folder / UNFINISHED_NAME, json.dumps(_mark(dataset, index.recipe)).encode())
    (folder / INDEX_NAME).unlink()
    return None


def _mark(dataset: CocoDataset, recipe: dict[str, Any]) -> dict[str, Any]:
    return {"format_version": FORMAT_VERSION, "fingerprint": dataset.fingerprint, "recipe": recipe}


def _open_folder(folder: Path, images: Path, dataset: CocoDataset, recipe: dict[str, Any]) -> dict[str, Any]:
    """Make the folder, or continue an unfinished one; returns the recipe with the images of each shard fixed."""
    mark = _find_mark(folder)
    if mark is not None:
        known: dict[str, Any] = mark["recipe"]
        named = {**mark, "recipe": _name_form(known)}
        if named != _mark(dataset, {**recipe, "images_per_shard": known.get("images_per_shard")}):
            raise ColabUtilsError(
                f"expected an empty folder, found an unfinished run of other data or settings in {folder}. "
                "Name another folder, or finish that run with its own settings."
            )
        remove_leftovers(folder)
        return known
    mean = _measure_sample(images, dataset, recipe)
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = mean * len(dataset), shutil.disk_usage(folder).free
    if needed > free:
        raise ColabUtilsError(
            f"expected about {format_bytes(needed)} of free space for {len(dataset):,} images in {folder}, found "
            f"{format_bytes(free)}. Free some, name another folder, or store smaller images (--min-size)."
        )
    recipe = {**recipe, "images_per_shard": max(1, round(recipe["shard_mb"] * 1e6 / mean))}
    write_file(folder / UNFINISHED_NAME, json.dumps(_mark(dataset, recipe)).encode())
    return recipe


def _find_mark(folder: Path) -> dict[str, Any] | None:
    """Which run left its shards in this folder without an index; None if there are none."""
    marker, shard = folder / UNFINISHED_NAME, min(folder.glob("shard-*.tar"), default=None)
    try:
        if marker.exists():
            mark: dict[str, Any] = json.loads(marker.read_bytes())
        elif shard is not None:  # somebody lost the index: each shard knows where it comes from
            head = read_head(shard.with_suffix(".arrays"))
            mark = {"format_version": FORMAT_VERSION, "fingerprint": head["fingerprint"], "recipe": head["recipe"]}
        else:
            return None
        if isinstance(mark["recipe"], dict):
            return mark
    except DriveLostError:
        raise
    except (ValueError, KeyError, TypeError, FileNotFoundError, ColabUtilsError):
        pass  # written by something else
    raise ColabUtilsError(
        f"expected an empty folder, found shards without an index, or the mark of something else, in {folder}. "
        "Name another folder."
    )


def _measure_sample(images: Path, dataset: CocoDataset, recipe: dict[str, Any]) -> float:
    """Mean bytes of one image in a shard, from a few images spread over the dataset."""
    sizes, reason = [], ""
    for i in np.linspace(0, len(dataset) - 1, min(SAMPLE_IMAGES, len(dataset))).astype(int).tolist():
        try:
            key, extension, data, record = read_sample(images, dataset, i, recipe)
        except DriveLostError:
            raise
        except ColabUtilsError as error:
            reason = f"{dataset.file_name(i)}: {error}"  # reported with all others when its shard is written
            continue
        parts = ((extension, data), ("json", dump_record(record)))
        sizes.append(sum(len(pad_member(f"{key}.{end}", part)) for end, part in parts))
    if not sizes:
        raise ColabUtilsError(
            f"expected usable images in {images}, found every one that was looked at bad, such as {reason}. Name the "
            "right image folder, or see `check`."
        )
    return float(np.mean(sizes))


def _plan_jobs(dataset: CocoDataset, images: Path, folder: Path, recipe: dict[str, Any]) -> list[ShardJob]:
    step = recipe["images_per_shard"]
    starts = range(0, len(dataset), step)
    return [
        ShardJob(f"shard-{n:06d}", dataset.subset(i, min(i + step, len(dataset))), images, folder, recipe)
        for n, i in enumerate(starts)
    ]
