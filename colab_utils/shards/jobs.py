"""One shard's job: read its images, write its tar and arrays, or find that it was finished before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from colab_utils.data.coco import CocoDataset
from colab_utils.drive import DriveLostError, Retries, guard_drive, read_file
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import write_file
from colab_utils.shards.arrays import ArraysBuilder, dump_arrays, load_arrays, read_head
from colab_utils.shards.format import (
    BLOCK_BYTES,
    ShardInfo,
    SkippedImage,
    explain_write,
    hash_bytes,
    split_member,
)
from colab_utils.shards.images import StoredImage, dump_record, make_record, store_image

__all__ = [
    "READ_STREAMS", "ShardJob", "ShardResult", "has_mended", "read_image", "read_sample", "store_sample", "write_shard",
]  # fmt: skip

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


def has_mended(images: Path, dataset: CocoDataset, recipe: dict[str, Any], skipped: tuple[SkippedImage, ...]) -> bool:
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
    return None if has_mended(job.images, job.dataset, job.recipe, skipped) else ShardResult(found, skipped)


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
