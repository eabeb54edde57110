"""COCO data to shards: several processes, one finished shard at a time, the index last.

An interrupted run leaves only finished shards; the same call continues after the last one.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import signal
import warnings
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np

from colab_utils.data.coco import CocoDataset, is_safe_name, read_coco
from colab_utils.drive import DriveLostError, guard_drive, read_file
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import count_cores, format_bytes, show_progress
from colab_utils.shards.arrays import ArraysBuilder, dump_arrays, read_head
from colab_utils.shards.format import (
    BLOCK_BYTES,
    INDEX_NAME,
    UNFINISHED_NAME,
    ShardIndex,
    ShardInfo,
    SkippedImage,
    hash_bytes,
    pad_member,
    read_index,
    write_file,
    write_index,
)
from colab_utils.shards.images import JPEG_QUALITY, make_record, store_image

__all__ = ["ShardReport", "write_shards"]

SAMPLE_IMAGES = 16


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

    def __str__(self) -> str:
        skipped = f", {len(self.skipped)} bad images skipped" if self.skipped else ""
        return f"{self.images:,} images in {self.shards} shards, {format_bytes(self.bytes)}{skipped}"


@dataclass(frozen=True)
class _Job:
    """One shard to write: everything a process on another machine needs."""

    name: str
    dataset: CocoDataset
    images: Path
    folder: Path
    recipe: dict[str, Any]


def write_shards(
    images: str | Path,
    annotations: str | Path,
    *,
    shards: str | Path,
    shard_mb: float = 128,
    min_size: int = 800,
    max_size: int = 1333,
    workers: int | Literal["auto"] = "auto",
    executor: Executor | None = None,
    max_bad: float = 0.01,
) -> ShardReport:
    """Write a COCO dataset as shards: uncompressed tars that WebDataset reads, and flat arrays beside them.

    Images keep their bytes, unless they are larger than training needs: those are shrunk once. A bad image
    (missing, cut short, not an image, or with an annotation that has no usable mask) is skipped and reported.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        shards: the folder to write to; made if need be. A finished folder of the same data is left as it is.
        shard_mb: size to aim at for each shard, in MB.
        min_size: the shorter side that training needs, in pixels (torchvision's ``min_size``).
        max_size: the longer side that training needs, in pixels (torchvision's ``max_size``).
        workers: processes; "auto" is one for each core.
        executor: any ``concurrent.futures`` executor (a cluster's, say) to use in place of processes here.
        max_bad: the share of bad images above which it stops, 0 to 1.

    Raises:
        ColabUtilsError: if the input is missing or not COCO, too many images are bad, the disk is full, or the
            folder holds other data.

    Example:
        >>> import tempfile
        >>> from colab_utils.data.builtin import make_dataset
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = make_dataset(folder + "/data", n=3, width=64, height=64, workers=1)
        ...     report = write_shards(made.images, made.annotations, shards=folder + "/shards", workers=1)
        >>> report.images, report.shards, report.skipped
        (3, 1, ())
    """
    started = perf_counter()
    images, folder = Path(images), Path(shards)
    _check_numbers(shard_mb=shard_mb, min_size=min_size, max_size=max_size, workers=workers, max_bad=max_bad)
    with guard_drive(images):
        if not images.is_dir():
            raise ColabUtilsError(f"expected an image folder, found nothing at {images}. On Colab, mount Drive first.")
        dataset = read_coco(annotations)
        _check_references(dataset, Path(annotations))
    recipe = {"min_size": min_size, "max_size": max_size, "jpeg_quality": JPEG_QUALITY, "shard_mb": shard_mb}
    with guard_drive(folder):
        finished = _find_finished(folder, dataset, recipe)
        if finished is not None:
            return _report(finished, started)
        recipe = _open_folder(folder, images, dataset, recipe)
        jobs = _plan_jobs(dataset, images, folder, recipe)
        allowed = int(max_bad * len(dataset))
        results = _run_jobs(jobs, len(dataset), workers=workers, executor=executor, allowed=allowed)
        index = ShardIndex(
            fingerprint=dataset.fingerprint,
            recipe=recipe,
            categories=dataset.categories,
            shards=tuple(info for info, _ in results if info.images),
            skipped=tuple(image for _, skipped in results for image in skipped),
        )
        write_index(folder, index)
        (folder / UNFINISHED_NAME).unlink()
    return _report(index, started)


def _report(index: ShardIndex, started: float) -> ShardReport:
    return ShardReport(index.images, index.skipped, len(index.shards), index.bytes, perf_counter() - started)


def _check_numbers(**numbers: Any) -> None:
    for name, value in numbers.items():
        if value == "auto":
            continue
        upper = 1 if name == "max_bad" else 1024 if name == "shard_mb" else 2**16
        lower = 0 if name == "max_bad" else 1e-6
        if not isinstance(value, int | float) or not lower <= value <= upper:
            raise ColabUtilsError(f"expected {name} between {max(lower, 0):g} and {upper}, found {value!r}")


def _check_references(dataset: CocoDataset, annotations: Path) -> None:
    """Refuse what cannot be skipped image by image."""
    cure = "See `check`, which lists them and can write a repaired file (--repair OUT.json)."
    if not len(dataset):
        raise ColabUtilsError(f"expected images in {annotations}, found an empty list")
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


def _find_finished(folder: Path, dataset: CocoDataset, recipe: dict[str, Any]) -> ShardIndex | None:
    """The index of a finished folder of the same data; None if there is work to do."""
    if not (folder / INDEX_NAME).exists():
        return None
    index = read_index(folder)
    same = {key: index.recipe.get(key) for key in recipe} == recipe
    if index.fingerprint != dataset.fingerprint or not same:
        what = "shards made with other settings" if index.fingerprint == dataset.fingerprint else "another dataset"
        raise ColabUtilsError(
            f"expected an empty folder or the same shards, found {what} in {folder}. Name another one."
        )
    for name, size, _ in index.files():
        if not (folder / name).exists() or (folder / name).stat().st_size != size:
            # a lost or cut file is made again, as every other unfinished shard is
            write_file(folder / UNFINISHED_NAME, json.dumps(_mark(dataset, index.recipe)).encode())
            return None
    return index


def _mark(dataset: CocoDataset, recipe: dict[str, Any]) -> dict[str, Any]:
    return {"fingerprint": dataset.fingerprint, "recipe": recipe}


def _open_folder(folder: Path, images: Path, dataset: CocoDataset, recipe: dict[str, Any]) -> dict[str, Any]:
    """Make the folder, or continue an unfinished one; returns the recipe with the images of each shard fixed."""
    marker = folder / UNFINISHED_NAME
    if marker.exists():
        try:
            mark = json.loads(marker.read_text(encoding="utf-8"))
            known: dict[str, Any] = mark["recipe"]
            same = mark["fingerprint"] == dataset.fingerprint and {key: known[key] for key in recipe} == recipe
        except (ValueError, KeyError, TypeError):
            raise ColabUtilsError(f"expected JSON in {marker}, found a damaged file. Delete the folder.") from None
        if not same:
            raise ColabUtilsError(
                f"expected an empty folder, found an unfinished run of other data or settings in {folder}. "
                "Name another folder, or finish that run with its own settings."
            )
        return known
    with _explain_write(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.glob("shard-*.tar")):
            raise ColabUtilsError(f"expected an empty folder, found shards without an index in {folder}. Name another.")
        mean = _measure_sample(images, dataset, recipe)
        needed, free = mean * len(dataset), shutil.disk_usage(folder).free
        if needed > free:
            raise ColabUtilsError(
                f"expected about {format_bytes(needed)} of free space for {len(dataset):,} images in {folder}, found "
                f"{format_bytes(free)}. Free some, name another folder, or store smaller images (--min-size)."
            )
        recipe = {**recipe, "images_per_shard": max(1, round(recipe["shard_mb"] * 1e6 / mean))}
        write_file(marker, json.dumps(_mark(dataset, recipe)).encode())
    return recipe


def _measure_sample(images: Path, dataset: CocoDataset, recipe: dict[str, Any]) -> float:
    """Mean bytes of one image in a shard, from a few images spread over the dataset."""
    sizes = []
    for i in np.linspace(0, len(dataset) - 1, min(SAMPLE_IMAGES, len(dataset))).astype(int).tolist():
        try:
            key, extension, data, record = _read_sample(images, dataset, i, recipe)
        except DriveLostError:
            raise
        except ColabUtilsError:
            continue  # a bad image is reported when its shard is written
        sizes.append(sum(len(pad_member(f"{key}.{end}", part)) for end, part in ((extension, data), ("json", record))))
    return float(np.mean(sizes)) if sizes else 2.0 * BLOCK_BYTES


def _read_sample(images: Path, dataset: CocoDataset, i: int, recipe: dict[str, Any]) -> tuple[str, str, bytes, bytes]:
    """Key, extension, image bytes and record JSON of one image.

    Raises:
        ColabUtilsError: if the image or one of its annotations is bad.
    """
    image = dataset.image(i)
    try:
        data = read_file(images / image["file_name"])
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ColabUtilsError("the file is missing") from None
    size = image["height"], image["width"]
    stored = store_image(data, size, min_size=recipe["min_size"], max_size=recipe["max_size"])
    record = make_record(image, dataset.annotations(i), stored)
    return f"{image['id']:012d}", stored.extension, stored.data, json.dumps(record, separators=(",", ":")).encode()


def _plan_jobs(dataset: CocoDataset, images: Path, folder: Path, recipe: dict[str, Any]) -> list[_Job]:
    step = recipe["images_per_shard"]
    starts = range(0, len(dataset), step)
    return [
        _Job(f"shard-{n:06d}", dataset.subset(i, min(i + step, len(dataset))), images, folder, recipe)
        for n, i in enumerate(starts)
    ]


def _run_jobs(
    jobs: list[_Job], total: int, *, workers: int | Literal["auto"], executor: Executor | None, allowed: int
) -> list[tuple[ShardInfo, tuple[SkippedImage, ...]]]:
    """Write every shard; stops as soon as more than ``allowed`` images are bad."""
    count = min(count_cores() if workers == "auto" else int(workers), len(jobs))
    with show_progress("preprocess", total=total, unit="image") as bar:
        if executor is None and count <= 1:
            results = []
            for job in jobs:
                results.append(_write_shard(job, bar.update))
                _check_bad([image for _, skipped in results for image in skipped], total, allowed)
            return results
        if executor is not None:
            return _collect([executor.submit(_write_shard, job) for job in jobs], total, allowed, bar)
        context = multiprocessing.get_context("fork")
        done, stop = context.Value("q", 0), context.Event()
        with ProcessPoolExecutor(count, context, _start_worker, (done, stop)) as pool, _quiet_fork():
            try:
                return _collect([pool.submit(_write_shard, job) for job in jobs], total, allowed, bar, done)
            except BaseException:
                stop.set()  # each worker gives up at its next image: no half shard is ever renamed
                pool.shutdown(wait=True, cancel_futures=True)
                raise


def _collect(
    futures: list[Future[Any]], total: int, allowed: int, bar: Any, done: Any = None
) -> list[tuple[ShardInfo, tuple[SkippedImage, ...]]]:
    bad: list[SkippedImage] = []
    pending = set(futures)
    try:
        while pending:
            finished, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in finished:
                info, skipped = future.result()
                bad += skipped
                if done is None:
                    bar.update(info.images + len(skipped))
            if done is not None:
                bar.update(done.value - bar.n)
            _check_bad(bad, total, allowed)
    except BaseException:
        for future in pending:
            future.cancel()
        raise
    return [future.result() for future in futures]


def _check_bad(bad: list[SkippedImage], total: int, allowed: int) -> None:
    if len(bad) > allowed:
        first = "; ".join(f"{image.file_name}: {image.reason}" for image in bad[:3])
        raise ColabUtilsError(
            f"expected at most {allowed} bad images of {total:,}, found {len(bad)} so far ({first}). Mend them, write a "
            "repaired annotations file with `check --repair OUT.json`, or allow more with --max-bad SHARE."
        )


_done: Any = None
_stop: Any = None


def _start_worker(done: Any, stop: Any) -> None:
    global _done, _stop
    _done, _stop = done, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer


def _count_done(images: int) -> None:
    if _stop is not None and _stop.is_set():
        raise ColabUtilsError("stopped")
    if _done is not None:
        with _done.get_lock():
            _done.value += images


def _write_shard(job: _Job, count: Any = None) -> tuple[ShardInfo, tuple[SkippedImage, ...]]:
    """Write one shard, or find it finished: the tar first, then the arrays, whose head vouches for the tar."""
    count = count or _count_done
    tar_path, arrays_path = job.folder / f"{job.name}.tar", job.folder / f"{job.name}.arrays"
    found = _find_shard(job, tar_path, arrays_path)
    if found is not None:
        count(len(job.dataset))
        return found
    tar, builder, skipped, images, annotations = bytearray(), ArraysBuilder(), [], 0, 0
    for i in range(len(job.dataset)):
        count(1)
        try:
            key, extension, data, record = _read_sample(job.images, job.dataset, i, job.recipe)
        except DriveLostError:
            raise
        except ColabUtilsError as error:
            skipped.append(SkippedImage(job.dataset.file_name(i), str(error)))
            continue
        spans = []
        for end, part in ((extension, data), ("json", record)):
            spans.append((len(tar) + BLOCK_BYTES, len(part)))
            tar += pad_member(f"{key}.{end}", part)
        parsed = json.loads(record)
        builder.add(parsed, *spans)
        images, annotations = images + 1, annotations + len(parsed["annotations"])
    tar += bytes(2 * BLOCK_BYTES)
    head = {
        "fingerprint": job.dataset.fingerprint,
        "recipe": job.recipe,
        "name": tar_path.name,
        "images": images,
        "annotations": annotations,
        "bytes": len(tar),
        "xxh3_64": hash_bytes(tar),
        "skipped": [asdict(image) for image in skipped],
    }
    arrays = dump_arrays(head, builder.build())
    with _explain_write(job.folder):
        write_file(tar_path, tar)
        write_file(arrays_path, arrays)
    return _describe_shard(head, arrays_path.name, arrays), tuple(skipped)


def _find_shard(job: _Job, tar_path: Path, arrays_path: Path) -> tuple[ShardInfo, tuple[SkippedImage, ...]] | None:
    if not arrays_path.exists() or not tar_path.exists():
        return None
    try:
        head = read_head(arrays_path)
    except ColabUtilsError:
        return None  # cut short by a lost machine: written again
    same = head["fingerprint"] == job.dataset.fingerprint and head["recipe"] == job.recipe
    if not same or tar_path.stat().st_size != head["bytes"]:
        return None
    skipped = tuple(SkippedImage(**image) for image in head["skipped"])
    return _describe_shard(head, arrays_path.name, arrays_path.read_bytes()), skipped


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


@contextmanager
def _explain_write(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (28, 122):  # ENOSPC, EDQUOT
            raise ColabUtilsError(
                f"expected room for the next shard in {folder}, found the disk full. Finished shards are safe: free "
                "some space and run the same command, it continues there."
            ) from None
        raise ColabUtilsError(
            f"expected to write into {folder}, found: {error.strerror}. Finished shards are safe; name a folder that "
            "you may write to, or mount Drive again, and run the same command."
        ) from None


@contextmanager
def _quiet_fork() -> Iterator[None]:
    """Python 3.12 warns when a process with threads forks; these children touch neither torch nor its threads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        yield
