"""Write one shard: build it in memory and write it, unless it is finished."""

import tarfile
from collections import Counter
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

from colab_utils.data.coco import CocoDataset
from colab_utils.drive import DriveLostError, Retries
from colab_utils.errors import DAMAGE, ColabUtilsError
from colab_utils.file_cache import FileCache
from colab_utils.files import has_files, hash_bytes, read_whole, write_file
from colab_utils.places import Place
from colab_utils.reader import Reader, Reading
from colab_utils.running import JobProgress
from colab_utils.shards.arrays import ArraysBuilder, describe_shard, dump_arrays
from colab_utils.shards.copy import Copying
from colab_utils.shards.index import ShardIndex, SkippedImage
from colab_utils.shards.records import name_image, read_image, try_sample

# A file of arrays with more bytes than this is refused. The arrays of the largest shard have fewer.
_MOST_ARRAYS_BYTES = 1e10


def name_shard(folder: Place, number: int) -> Place:
    """Return the path of a shard's tar.

    Example:
        >>> from pathlib import Path
        >>> name_shard(Path("shards"), 3)
        PosixPath('shards/shard-000003.tar')
    """
    return folder / f"shard-{number:06d}.tar"


class ShardJob(NamedTuple):
    """The images that become one shard, and what a process needs to write it."""

    path: Place
    """The tar to write."""
    dataset: CocoDataset
    """The images of this shard alone."""
    images: Place
    recipe: dict[str, Any]
    streams: int | str = "auto"
    """Number of files that the process reads at the same time."""
    drive: Place | None = None
    """Folder that may hold the finished shard. If it does, the shard is copied from there."""
    keeps_empty: bool = False
    """Whether to keep the arrays of a shard that has no usable image. They tell another machine
    that this shard is done.
    """
    cache: FileCache | None = None
    """Keeps the image files; None if they are not kept."""


def write_shard(job: ShardJob, progress: JobProgress) -> ShardIndex:
    """Write one shard unless it is finished; return an index that lists only this shard.

    The arrays are written before the tar. Their head holds the checksum of the tar. A shard whose
    images are all bad has no tar.

    Raises:
        ColabUtilsError: if the shard cannot be written.
        DriveLostError: if Drive went away.
    """
    folder = job.path.parent
    retries = Retries(progress.stop)
    # A job that waited while the run was stopped asks nothing of a server that may be gone.
    progress.add(0)
    finished = retries.write(folder, _find_finished, job)
    if finished is None and job.drive is not None:
        finished = _copy_shard(job, job.drive, retries)
    if finished is not None:
        progress.add(len(job.dataset))
        return finished
    tar, arrays = _build_shard(job, progress)
    index = _parse_shard_index(arrays)
    # If the run was stopped, this raises an error: another run may be writing already.
    progress.add(0)
    # Arrays come first, since a tar without arrays could be a file of the user.
    if index.images or job.keeps_empty:
        retries.write(folder, write_file, job.path.with_suffix(".arrays"), arrays)
    if index.images:
        retries.write(folder, write_file, job.path, *tar)
    return index


def read_shard_index(arrays: Place) -> ShardIndex | None:
    """Return an index of the shard that an arrays file describes; None if the file is missing or
    damaged.
    """
    try:
        return _parse_shard_index(read_whole(arrays, most_bytes=_MOST_ARRAYS_BYTES))
    except (FileNotFoundError, *DAMAGE):
        return None


def find_shard(path: Place, fingerprint: str, recipe: dict[str, Any]) -> ShardIndex | None:
    """Return an index of one finished shard; None if the shard is missing, cut short, or of other
    data or settings.

    Args:
        path: the tar.
        fingerprint: the fingerprint of the annotations.
        recipe: how the images are stored.
    """
    index = read_shard_index(path.with_suffix(".arrays"))
    if index is None or index.shards[0].name != path.name:
        return None
    if index.fingerprint != fingerprint or index.recipe != recipe:
        return None
    if index.images and not has_files(path.parent, index.files()):
        return None
    return index


def are_still_bad(index: ShardIndex, images: Place, dataset: CocoDataset) -> bool:
    """Return whether all skipped images of an index are still bad.

    Only those that are in the dataset are looked at.
    """
    names = {image.file_name for image in index.skipped}
    if not names:
        return True
    places = [place for place in range(len(dataset)) if dataset.file_name(place) in names]
    retries = Retries()
    read = partial(read_image, images, dataset, retries=retries)
    with closing(Reader(read, place=images, retries=retries)) as reader:
        return all(
            isinstance(try_sample(reading.take, dataset, place, index.recipe), SkippedImage)
            for place, reading in zip(places, reader.read_all(places), strict=True)
        )


def _find_finished(job: ShardJob) -> ShardIndex | None:
    """Return an index of the shard if an earlier run finished it; None if it has to be written."""
    index = find_shard(job.path, job.dataset.fingerprint, job.recipe)
    if index is None or not are_still_bad(index, job.images, job.dataset):
        return None
    return index


def _copy_shard(job: ShardJob, drive: Place, retries: Retries) -> ShardIndex | None:
    """Copy the finished shard of an earlier session; return an index of it.

    Return None if there is no such shard, or if it is damaged. Then the shard has to be written.
    """
    index = retries.run(partial(_find_finished, job._replace(path=drive / job.path.name)))
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


def _build_shard(job: ShardJob, progress: JobProgress) -> tuple[list[bytes], bytes]:
    """Build a shard in memory; return the pieces of its tar and the content of its arrays file."""
    # The pieces stay in a list: joining them would copy them, and they are megabytes.
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
                if job.cache is not None:
                    # Once the file is repaired, its bytes must be read anew.
                    job.cache.forget(name_image(job.images, job.dataset, i))
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


def _read_ahead(job: ShardJob, progress: JobProgress) -> Generator[Reading, None, None]:
    """Yield the files of the images in order.

    Files are read before they are needed, because each file on Drive takes long to open.
    """
    retries = Retries(progress.stop)
    read = partial(read_image, job.images, job.dataset, retries=retries, cache=job.cache)

    with closing(Reader(read, place=job.images, streams=job.streams, retries=retries)) as reader:
        yield from reader.read_all(range(len(job.dataset)))


def _parse_shard_index(content: bytes) -> ShardIndex:
    """Return an index of the shard that the content of an arrays file describes.

    The index is ``partial``, because other shards may be missing.
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
