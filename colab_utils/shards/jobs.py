"""One shard to write: found finished, or built in memory and written by a process."""

import tarfile
from collections import Counter
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from colab_utils.data.coco import CocoDataset
from colab_utils.drive import DriveLostError, Retries
from colab_utils.errors import ColabUtilsError
from colab_utils.files import has_size, hash_bytes, read_whole, write_file
from colab_utils.reader import Reader, Reading
from colab_utils.shards.arrays import ArraysBuilder, describe_shard, dump_arrays
from colab_utils.shards.copy import Copying
from colab_utils.shards.index import ShardIndex, SkippedImage
from colab_utils.shards.records import read_image, try_sample

# More than the arrays of the largest shard.
_MOST_ARRAYS_BYTES = 1e10
# What reading damaged arrays raises.
_DAMAGE = (
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

    path: Path
    """The tar to write."""
    dataset: CocoDataset
    images: Path
    recipe: dict[str, Any]
    streams: int | str = "auto"
    """Files that the process reads at the same time."""
    drive: Path | None = None
    """Folder that may hold the finished shard, to be copied."""


@dataclass(frozen=True)
class WorkerProgress:
    """What the processes of one run share; a job elsewhere has none, and nobody stops it."""

    images_done: Any = None
    """Number of images that are done, as shared memory."""
    stop: Any = None
    """Event that tells every process to give up at its next image."""

    def add(self, images: int) -> None:
        """Count images that are done.

        Raises:
            ColabUtilsError: the run was stopped.
        """
        if self.stop is not None and self.stop.is_set():
            raise ColabUtilsError(
                "expected to write all shards, found that it was stopped: "
                "run it again, it continues"
            )
        if self.images_done is not None:
            with self.images_done.get_lock():
                self.images_done.value += images


# Of the run that this process belongs to. Shared memory cannot be sent with a job.
_progress = WorkerProgress()


def join_run(progress: WorkerProgress) -> None:
    """Make this process, which was just forked, a worker of a run."""
    global _progress
    _progress = progress


def run_job(job: ShardJob) -> ShardIndex:
    """Write the shard of a job as a worker of this process's run; see `write_shard`."""
    return write_shard(job, _progress)


def write_shard(job: ShardJob, progress: WorkerProgress) -> ShardIndex:
    """Write one shard, or find it finished; return an index of it alone.

    The arrays come first, whose head holds the tar's checksum, then the tar. A shard whose images
    are all bad has no files.

    Raises:
        ColabUtilsError: if it cannot be written.
        DriveLostError: if Drive went away.
    """
    folder = job.path.parent
    retries = Retries(progress.stop)
    finished = retries.write(folder, _find_shard, job)
    if finished is None and job.drive is not None:
        finished = _copy_shard(job, job.drive, retries)
    if finished is not None:
        progress.add(len(job.dataset))
        return finished
    tar, arrays = _build_shard(job, progress)
    index = _parse_shard_index(arrays)
    # Arrays without a tar are no shard, but a tar without arrays could be anybody's.
    if index.images:
        retries.write(folder, write_file, job.path.with_suffix(".arrays"), arrays)
        retries.write(folder, write_file, job.path, *tar)
    return index


def read_shard_index(arrays: Path) -> ShardIndex | None:
    """Return the index of the one shard that an arrays file describes; None where it is damaged."""
    try:
        return _parse_shard_index(read_whole(arrays, most_bytes=_MOST_ARRAYS_BYTES))
    except _DAMAGE:
        return None


def is_complete(index: ShardIndex, folder: Path, images: Path, dataset: CocoDataset) -> bool:
    """Return whether all files of an index are there, and all images that it skipped still bad."""
    for name, size, _ in index.files():
        if not has_size(folder / name, size):
            return False
    if not index.skipped:
        return True
    names = {image.file_name for image in index.skipped}
    for i in range(len(dataset)):
        if dataset.file_name(i) not in names:
            continue
        read = partial(read_image, images, dataset, i)
        if not isinstance(try_sample(read, dataset, i, index.recipe), SkippedImage):
            return False
    return True


def _find_shard(job: ShardJob) -> ShardIndex | None:
    """Return the shard as an earlier run left it.

    None if it is missing or cut short, or a bad image was repaired.
    """
    index = read_shard_index(job.path.with_suffix(".arrays"))
    if index is None or index.shards[0].name != job.path.name:
        return None
    if index.fingerprint != job.dataset.fingerprint or index.recipe != job.recipe:
        return None
    return index if is_complete(index, job.path.parent, job.images, job.dataset) else None


def _copy_shard(job: ShardJob, drive: Path, retries: Retries) -> ShardIndex | None:
    """Copy the finished shard of an earlier session; return None where there is none.

    A damaged one is written anew.
    """
    index = retries.run(partial(_find_shard, job._replace(path=drive / job.path.name)))
    if index is None:
        return None
    copying = Copying(drive, job.path.parent, retries, overwrite=True)
    try:
        for name, size, checksum in index.files():
            copying.copy_file(name, size, checksum)
    except DriveLostError:
        raise
    except ColabUtilsError:
        return None
    return index


def _build_shard(job: ShardJob, progress: WorkerProgress) -> tuple[list[bytes], bytes]:
    """Return the parts of a tar, and the content of its arrays file."""
    # The parts are not joined: images that lie as pixels are megabytes to copy.
    tar: list[bytes] = []
    tar_bytes = 0
    builder = ArraysBuilder()
    annotations = 0
    skipped: list[SkippedImage] = []
    faults = Counter[str]()
    with closing(_read_ahead(job, progress)) as readings:
        for i, reading in enumerate(readings):
            progress.add(1)
            sample = try_sample(reading.take, job.dataset, i, job.recipe)
            if isinstance(sample, SkippedImage):
                skipped.append(sample)
                continue
            starts = []
            for member in sample.members:
                starts.append(tar_bytes + len(member.header))
                tar_bytes += sum(map(len, member))
                tar.extend(member)
            builder.add(sample.record, [member.data for member in sample.members], starts)
            annotations += len(sample.record["annotations"])
            faults.update(sample.faults)
    tar.append(bytes(2 * tarfile.BLOCKSIZE))
    head = {
        "fingerprint": job.dataset.fingerprint,
        "recipe": job.recipe,
        "name": job.path.name,
        "images": len(job.dataset) - len(skipped),
        "annotations": annotations,
        "bytes": tar_bytes + len(tar[-1]),
        "xxh3_64": hash_bytes(*tar),
        "skipped": [asdict(image) for image in skipped],
    }
    if faults:
        head["faults"] = dict(faults)
    return tar, dump_arrays(head, builder.build())


def _read_ahead(job: ShardJob, progress: WorkerProgress) -> Generator[Reading, None, None]:
    """Yield the images' files in their order, each asked for before it is needed.

    On Drive, reading is waiting.
    """
    retries = Retries(progress.stop)
    read = partial(read_image, job.images, job.dataset, retries=retries)
    reader = Reader(read, place=job.images, streams=job.streams, retries=retries)
    try:
        yield from reader.read_all(range(len(job.dataset)))
    finally:
        reader.close()


def _parse_shard_index(content: bytes) -> ShardIndex:
    """Return the index of the one shard that an arrays file's content describes.

    It is partial, as its run may not have ended.
    """
    head, shard = describe_shard(content)
    return ShardIndex(
        fingerprint=head["fingerprint"],
        recipe=head["recipe"],
        categories=(),
        shards=(shard,),
        skipped=tuple(SkippedImage(**image) for image in head["skipped"]),
        partial=True,
        faults=head.get("faults", {}),
    )
