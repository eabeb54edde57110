"""One shard to write: found finished, or built in memory and written by a process."""

import tarfile
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from colab_utils.data.coco import CocoDataset
from colab_utils.drive import Retries, explain_write
from colab_utils.errors import ColabUtilsError
from colab_utils.files import has_size, hash_bytes, read_whole, write_file
from colab_utils.shards.arrays import ArraysBuilder, describe_shard, dump_arrays
from colab_utils.shards.index import ShardIndex, SkippedImage
from colab_utils.shards.records import read_image, try_sample

READ_STREAMS = 4  # files that a process reads at the same time


MOST_ARRAYS_BYTES = 1e10  # more than those of the largest shard


# what reading damaged arrays raises
DAMAGE = (
    FileNotFoundError,
    AttributeError,
    LookupError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)


class ShardJob(NamedTuple):
    """One shard to write: everything that a process needs, on this machine or another."""

    path: Path  # of the tar
    dataset: CocoDataset
    images: Path
    recipe: dict[str, Any]


def call_on_drive(folder: Path, work: Callable[..., Any], *arguments: Any) -> Any:
    """``work(...)``, tried again where Drive fails; errors of writing into ``folder`` in words."""
    return Retries(_shared[1]).run(partial(explain_write(folder)(work), *arguments))


def is_complete(index: ShardIndex, folder: Path, images: Path, dataset: CocoDataset) -> bool:
    """Whether the files of an index are there, and every image that it skipped is still bad."""
    names = {image.file_name for image in index.skipped}
    places = [i for i in range(len(dataset)) if dataset.file_name(i) in names] if names else []
    samples = (
        try_sample(partial(read_image, images, dataset, i), dataset, i, index.recipe)
        for i in places
    )
    are_there = all(has_size(folder / name, size) for name, size, _ in index.files())
    return are_there and all(isinstance(sample, SkippedImage) for sample in samples)


_shared: tuple[Any, Any] = None, None  # in a worker process of our own


def start_worker(done: Any, stop: Any) -> None:
    """Keep what the processes of a run share."""
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


def write_shard(job: ShardJob) -> ShardIndex:
    """Write one shard, or find it finished; returns an index of it alone.

    The arrays come first, whose head holds the tar's checksum, then the tar. A shard whose images
    are all bad has no files.

    Raises:
        ColabUtilsError: if it cannot be written.
        DriveLostError: if Drive went away.
    """
    if found := call_on_drive(job.path.parent, _find_shard, job):
        _count(len(job.dataset))
        return found
    tar, arrays = _build_shard(job)
    index = read_shard_index(arrays)
    # arrays without a tar are no shard, but a tar without arrays could be anybody's
    if index.images:
        call_on_drive(job.path.parent, write_file, job.path.with_suffix(".arrays"), arrays)
        call_on_drive(job.path.parent, write_file, job.path, *tar)
    return index


def _find_shard(job: ShardJob) -> ShardIndex | None:
    """The shard as an earlier run left it; None if it is missing or cut short, or a bad image was
    repaired.
    """
    with suppress(*DAMAGE):
        path = job.path.with_suffix(".arrays")
        index = read_shard_index(read_whole(path, most_bytes=MOST_ARRAYS_BYTES))
        found = (index.fingerprint, index.recipe)
        expected = (job.dataset.fingerprint, job.recipe)
        is_own = found == expected and index.shards[0].name == job.path.name
        if is_own and is_complete(index, job.path.parent, job.images, job.dataset):
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


def read_shard_index(content: bytes) -> ShardIndex:
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
