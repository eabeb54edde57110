"""Write shards one after the other: each is built in memory, unless it is finished."""

import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.coco import CocoDataset
from colab_utils.drive import explain_write
from colab_utils.files import Store, hash_bytes, open_store
from colab_utils.places import Place
from colab_utils.processes import JobProgress
from colab_utils.reader import Reader, Reading
from colab_utils.shards.arrays import (
    ShardArrays,
    describe_shard,
    dump_arrays,
    join_records,
    pack_record,
    read_shard_index,
)
from colab_utils.shards.index import ShardIndex, SkippedImage
from colab_utils.shards.plan import split_images
from colab_utils.shards.records import MISSING, frame_file, name_image, read_image, try_sample

if TYPE_CHECKING:
    from colab_utils.file_cache import FileCache


def name_shard(number: int) -> str:
    """Return the name of a shard's tar.

    Example:
        >>> name_shard(3)
        'shard-000003.tar'
    """
    return f"shard-{number:06d}.tar"


@dataclass(frozen=True)
class ShardRun:
    """The writing of a dataset's shards, or of one part of them, into a folder."""

    folder: Place
    images: Place
    dataset: CocoDataset
    recipe: dict[str, Any]
    max_bad: float
    """The share or the number of images, and of objects, that may be bad."""
    part: tuple[int, int] | None = None
    """Number of the part, from 1, and number of all parts; None if all shards are written."""
    cache: "FileCache | None" = None
    """Keeps the image files; None if they are not kept."""

    @cached_property
    def shards(self) -> list[NDArray[np.int64]]:
        """Return the images of each shard of the dataset; see `split_images`."""
        return split_images(self.recipe, len(self.dataset))


def write_in_turn(
    run: ShardRun, numbers: Iterable[int], progress: JobProgress, *, streams: int | str = "auto"
) -> Iterator[ShardIndex]:
    """Write shards one after the other, and yield an index of each, which lists only this shard.

    A finished shard is left as it is. While a shard is built and written, the files of the next
    ones are read: each file on Drive takes long to open, so reading must not pause between shards.

    Args:
        run: what is written.
        numbers: the numbers of the shards. A number is taken before the shards before it are done.
        progress: counts the images, and ends the work.
        streams: number of files that are read at the same time.

    Raises:
        ColabUtilsError: if a shard cannot be written.
        DriveLostError: if Drive went away.
    """
    images = open_store(run.images, progress.stop)
    folder = open_store(run.folder, progress.stop)
    finished: list[ShardIndex] = []

    def list_files() -> Iterator[tuple[str, CocoDataset, int]]:
        for number in numbers:
            name = name_shard(number)
            dataset = run.dataset.select(run.shards[number])
            with explain_write(run.folder):
                index = find_shard(folder, name, run)
            if index is not None and are_still_bad(index, run.images, dataset):
                progress.add(len(dataset))
                finished.append(index)
            else:
                yield from ((name, dataset, i) for i in range(len(dataset)))

    def read(file: tuple[str, CocoDataset, int]) -> bytes:
        _, dataset, i = file
        return read_image(images, dataset, i, cache=run.cache)

    with (
        closing(Reader(read, images, streams=streams)) as reader,
        closing(reader.read_all(list_files())) as readings,
    ):
        for (name, dataset), files in groupby(readings, key=lambda reading: reading.name[:2]):
            yield _write_shard(run, name, dataset, files, progress)
            while finished:
                yield finished.pop()
    yield from finished


def find_shard(store: Store, name: str, run: ShardRun) -> ShardIndex | None:
    """Return an index of one finished shard; None if the shard is missing, cut short, or of other
    data or settings.

    Args:
        store: the folder of the shards.
        name: the name of the tar.
        run: the data and the settings.
    """
    index = read_shard_index(store, name.replace(".tar", ".arrays"))
    if index is None:
        return None
    known = (index.shards[0].name, index.fingerprint, index.recipe)
    is_same = known == (name, run.dataset.fingerprint, run.recipe)
    is_whole = not index.images or store.has_files(index.files())
    return index if is_same and is_whole else None


def are_still_bad(index: ShardIndex, images: Place, dataset: CocoDataset) -> bool:
    """Return whether all skipped images of an index, which the dataset has, are still bad."""
    names = {image.file_name for image in index.skipped}
    if not names:
        return True
    places = [place for place in range(len(dataset)) if dataset.names[place] in names]
    store = open_store(images)
    read = partial(read_image, store, dataset)
    with closing(Reader(read, store)) as reader:
        bad = sum(
            isinstance(try_sample(reading.take, dataset, place, index.recipe), SkippedImage)
            for place, reading in zip(places, reader.read_all(places), strict=True)
        )
    # A sound image may have the name of a bad one.
    return bad >= len(index.skipped)


def _write_shard(
    run: ShardRun,
    name: str,
    dataset: CocoDataset,
    files: Iterable[Reading],
    progress: JobProgress,
) -> ShardIndex:
    """Build a shard in memory, and write it; return an index of it.

    The arrays are written before the tar. Their head holds the checksum of the tar. A shard whose
    images are all bad has no tar: its arrays tell that it is done.
    """
    # The pieces stay in a list: joining them would copy them, and they are megabytes.
    tar: list[bytes] = []
    tar_bytes = 0
    records: list[ShardArrays] = []
    annotations = 0
    skipped: list[SkippedImage] = []
    faults = Counter[str]()
    for i, reading in enumerate(files):
        progress.add(1)
        sample = try_sample(reading.take, dataset, i, run.recipe)
        if isinstance(sample, SkippedImage) and sample.reason != MISSING:
            if run.cache is not None:
                # Once the file is repaired, its bytes must be read anew.
                run.cache.forget(name_image(run.images, dataset, i))
            # Drive gives wrong bytes at times.
            again = partial(read_image, open_store(run.images, progress.stop), dataset, i)
            sample = try_sample(again, dataset, i, run.recipe)
        if isinstance(sample, SkippedImage):
            skipped.append(sample)
            continue
        starts = []
        for member, data in sample.files.items():
            header, padding = frame_file(member, len(data))
            starts.append(tar_bytes + len(header))
            tar_bytes = starts[-1] + len(data) + len(padding)
            tar += [header, data, padding]
        records.append(pack_record(sample.record, [*sample.files.values()], starts))
        annotations += len(sample.record["annotations"])
        faults.update(sample.faults)
    tar.append(bytes(2 * tarfile.BLOCKSIZE))
    head = {
        "fingerprint": dataset.fingerprint,
        "recipe": run.recipe,
        "name": name,
        "images": len(records),
        "annotations": annotations,
        "bytes": tar_bytes + len(tar[-1]),
        "xxh3_64": hash_bytes(*tar),
        "skipped": [asdict(image) for image in skipped],
    }
    if faults:
        head["faults"] = dict(faults)
    arrays = dump_arrays(head, join_records(records))
    index = describe_shard(arrays)
    # If the run was stopped, this raises an error: another run may be writing already.
    progress.add(0)
    # Arrays come first, since a tar without arrays could be a file of the user.
    with explain_write(run.folder):
        store = open_store(run.folder, progress.stop)
        store.write(index.shards[0].arrays_name, arrays)
        if index.images:
            store.write(name, *tar)
    return index
