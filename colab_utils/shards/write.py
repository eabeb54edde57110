"""Write COCO data as shards.

Several processes write, each one shard at a time. The index of the folder is written last. An
interrupted run leaves only finished shards. When the same call is made again, it writes the missing
ones.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Literal

from colab_utils.data.coco import CocoDataset, open_coco
from colab_utils.data.defects import count_allowed, describe_faults, require_sound_objects
from colab_utils.data.orientation import Exif
from colab_utils.drive import explain_write, is_on_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.files import open_store
from colab_utils.machine import count_cores
from colab_utils.places import Place, identify_place, open_place
from colab_utils.processes import ThreadPool, run_jobs
from colab_utils.progress import show_progress
from colab_utils.require import require_count, require_max_bad, require_part
from colab_utils.shards.copy import COPY_STREAMS
from colab_utils.shards.index import (
    INDEX_NAME,
    TRAIN_INDEX_NAME,
    ShardIndex,
    SkippedImage,
    Storage,
    write_index,
)
from colab_utils.shards.jobs import (
    ShardRun,
    are_still_bad,
    find_shard,
    name_shard,
    write_in_turn,
)
from colab_utils.shards.lock import hold_folder, remove_leftovers
from colab_utils.shards.plan import (
    make_recipe,
    plan_recipe,
)
from colab_utils.shards.records import MISSING
from colab_utils.shards.verify import find_begun
from colab_utils.streams import require_streams
from colab_utils.units import format_bytes, format_count

_MOST_WORKERS = 2**16


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
    storage: Storage
    """How the images are stored; see :func:`write_shards`."""
    annotations: int
    """Annotations of the dataset."""
    crowds: int
    """Annotations with ``iscrowd``. The shards keep them, but training leaves them out."""
    faults: dict[str, int]
    """How often each kind of defect occurs. The kinds are those of `check_dataset`. Training would
    use a defective object wrongly, or not at all.
    """

    def __str__(self) -> str:
        text = (
            f"{format_count(self.images, 'image')} in {format_count(self.shards, 'shard')}, "
            f"{format_bytes(self.bytes)}"
        )
        if self.skipped:
            text += f", {format_count(len(self.skipped), 'bad image')} skipped"
        if self.crowds:
            text += (
                f"; {self.crowds:,} of {self.annotations:,} objects are crowds and left "
                "out of training"
            )
        if self.annotations == self.crowds:
            text += "; no object to train on"
        if self.faults:
            text += f"; defects: {describe_faults(self.faults)}. Run check to see which."
        return text


def write_shards(
    images: str | Place,
    annotations: str | Place,
    *,
    shards: str | Place,
    shard_mb: float = 128,
    min_size: int = 800,
    max_size: int = 1333,
    storage: Storage = "shrink",
    exif: Exif = "auto",
    workers: int | Literal["auto"] = "auto",
    streams: int | Literal["auto"] = "auto",
    max_bad: float = 0.01,
    part: tuple[int, int] | None = None,
) -> ShardReport:
    """Write a COCO dataset as shards. A shard is an uncompressed tar that WebDataset reads, and a
    file of flat arrays.

    ``images``, ``annotations`` and ``shards`` are paths, or URLs that fsspec knows, such as
    ``s3://bucket/shards``.

    Images keep their bytes where possible. An image that is larger than training needs is shrunk
    once. If it is a JPEG of at least twice the size, it is decoded at 1/2, 1/4 or 1/8 of its size,
    which takes less time. Shards that an older version began are continued without that. A bad
    image is skipped and reported: its file is missing, cut short or not an image, or one of its
    annotations has no usable mask. The images are stored in a random order, because many annotation
    files are sorted by class. The order is the same in every run. ``image_id`` tells which image is
    which.

    Several machines can write one folder together: each writes a ``part``, and then one of them
    calls `finish_shards`. The parts may be written in any order. A part that was killed can be
    written again, and a part that is written twice does no harm.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        shards: the folder to write to. It is made if it does not exist. A finished folder of the
            same data is left as it is.
        shard_mb: target size of a shard, in MB. The first shards are smaller (4, 8, 16 MB and so
            on), so that training can begin while the other shards are copied.
        min_size: the shorter side that training needs, in pixels (torchvision's ``min_size``).
        max_size: the longer side that training needs, in pixels (torchvision's ``max_size``).
        storage: "shrink" shrinks images that are larger than training needs. "keep" shrinks
            nothing.
        exif: what becomes of photos that EXIF turns while their size does not tell whether the
            annotations were drawn on the turned photo: half a turn, a mirror image, or a square
            photo. "turn" turns them, "keep" uses them as stored. "auto" does as the sizes of other
            photos show, and keeps them if none tells or if they disagree; a warning says so. The
            choice stands in the recipe of the shards. Where the size tells, it decides.
        workers: number of processes. Each holds one shard in memory. "auto" is one for each core.
            With 1, no process is started: a thread of this process writes.
        streams: number of files that each process reads at the same time, ahead of the image that
            it works on. "auto" measures how many Drive can serve.
        max_bad: a share from 0 to 1 (``float``), or a number (``int``). The run stops if more of
            the images are bad, or more of the objects. A bad object would be trained wrongly or not
            at all. An example is a polygon that has numbers from 0 to 1 in place of pixels.
        part: (i, n), with i from 1 to n: every n-th shard is written, from number i - 1 on, and no
            index. With None, all shards are written, and the index.

    Raises:
        ColabUtilsError: if the input is missing or not COCO, too many images or objects are bad,
            the disk is full, the folder holds other data, or another process writes there.

    Example:
        >>> import tempfile
        >>> from colab_utils.course.sample_data import make_dataset
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = make_dataset(folder + "/data", n=3, width=64, height=64, workers=1)
        ...     shards = folder + "/shards"
        ...     report = write_shards(made.images, made.annotations, shards=shards, workers=1)
        >>> report.images, report.shards, report.skipped
        (3, 1, ())
    """
    started_s = perf_counter()
    images = open_place(images)
    folder = open_place(shards)
    if identify_place(folder) == identify_place(images):
        raise ColabUtilsError(f"{shards} is the image folder. Name another folder for the shards.")
    processes = count_cores()
    if workers != "auto":
        processes = require_count("workers", workers, maximum=_MOST_WORKERS)
    recipe = make_recipe(storage, exif, min_size=min_size, max_size=max_size, shard_mb=shard_mb)
    max_bad = require_max_bad(max_bad)
    require_streams(streams)
    part = require_part(part)
    dataset = open_coco(images, annotations)
    begun = find_begun(folder, dataset.fingerprint, recipe)
    index = begun
    # No bad image may have been repaired since the folder was finished.
    if (
        index is None
        or index.partial
        or not open_store(folder).has_files(index.files())
        or not are_still_bad(index, images, dataset)
    ):
        recipe = plan_recipe(images, dataset, recipe if begun is None else begun.recipe)
        run = ShardRun(folder, images, dataset, recipe, max_bad, part)
        with hold_folder(folder) if part is None else nullcontext(), explain_write(folder):
            begin_folder(run)
            index = write_all(run, partial(_write_with_progress, run, processes, streams))
            if part is None:
                write_index(folder, index)
    return _make_report(index, dataset, started_s)


def _make_report(index: ShardIndex, dataset: CocoDataset, started_s: float) -> ShardReport:
    """Return the report of the shards of an index."""
    return ShardReport(
        images=index.images,
        skipped=index.skipped,
        shards=len(index.shards),
        bytes=index.bytes,
        seconds=perf_counter() - started_s,
        storage=index.recipe["storage"],
        annotations=len(dataset.ids),
        crowds=dataset.crowds,
        faults=index.faults,
    )


def begin_folder(run: ShardRun) -> None:
    """Check that the disk has room for the shards that are missing, and remove the index.

    The folder is searched for shards again, because another writer may have finished shards of
    other data in the meantime.
    """
    find_begun(run.folder, run.dataset.fingerprint, run.recipe)
    store = open_store(run.folder)
    # A look at each shard would take minutes on a slow Drive.
    tars = store.list_names("shard-*.tar")
    missing = sum(
        len(images) for number, images in enumerate(run.shards) if name_shard(number) not in tars
    )
    store.require_room(
        missing * run.recipe["shard_mb"] * 1e6 / run.recipe["images_per_shard"],
        "name another folder, or store smaller images (--min-size)",
    )
    store.make()
    for name in (INDEX_NAME, TRAIN_INDEX_NAME):
        store.remove(name)


def write_all(run: ShardRun, write: Callable[[], list[ShardIndex]]) -> ShardIndex:
    """Write the shards of a run; return the index of their folder.

    Args:
        run: the run.
        write: writes the shards that are not finished, and returns an index of each shard.

    Raises:
        ColabUtilsError: if too many images or objects are bad, a shard cannot be written, or the
            system ended a process.
    """
    index = join_index(run, write())
    missing = [image.file_name for image in index.skipped if image.reason == MISSING]
    if open_store(run.images).find_again(missing):
        # Drive did not show these images for a while. Only their shards are written again.
        index = join_index(run, write())
    check_bad(run, index)
    return index


def _write_with_progress(run: ShardRun, processes: int, streams: int | str) -> list[ShardIndex]:
    """Show a progress bar while shards are written; return an index of each."""
    done: list[ShardIndex] = []
    number, parts = run.part or (1, 1)
    own = range(number - 1, len(run.shards), parts)
    # The largest come first, so that all processes are busy until the end.
    numbers = sorted(own, key=lambda number: len(run.shards[number]), reverse=True)
    total = sum(len(run.shards[number]) for number in numbers)
    # A look at the mounts may hang where one of them does.
    is_patient = is_on_drive(run.images)
    runs = run_jobs(partial(write_in_turn, run, streams=streams), numbers, processes)
    with show_progress("preprocess", total=total, unit="image") as bar, closing(runs):
        for finished, images_done in runs:
            done += finished
            bar.update(images_done - bar.n)
            check_bad(run, join_index(run, done), is_patient=is_patient)
    return done


def join_index(run: ShardRun, done: Iterable[ShardIndex]) -> ShardIndex:
    """Join the indexes of single shards into the index of their folder."""
    done = sorted(done, key=lambda index: index.shards[0].name)
    return ShardIndex(
        fingerprint=run.dataset.fingerprint,
        recipe=run.recipe,
        categories=tuple(run.dataset.categories),
        shards=tuple(shard for index in done for shard in index.shards if shard.images),
        skipped=tuple(image for index in done for image in index.skipped),
        faults=dict(sum((Counter(index.faults) for index in done), Counter[str]())),
    )


def check_bad(run: ShardRun, index: ShardIndex, *, is_patient: bool = False) -> None:
    """Check that finished shards have no more bad images or objects than are allowed.

    Args:
        run: the run, with all images and objects.
        index: the index of the finished shards.
        is_patient: whether to leave out missing images, because Drive may show them later.

    Raises:
        ColabUtilsError: if more are bad.
    """
    skipped = [image for image in index.skipped if not (is_patient and image.reason == MISSING)]
    images = len(run.dataset)
    allowed = count_allowed(images, run.max_bad)
    if len(skipped) > allowed:
        examples = "; ".join(f"{image.file_name}: {image.reason}" for image in skipped[:3])
        raise ColabUtilsError(
            f"Bad images so far: {len(skipped):,}, and at most {allowed:,} of {images:,} may "
            f"be bad ({examples}). Repair them, or their annotations with `check --repair "
            "OUT.json`, or allow more with max_bad (preprocess: --max-bad)."
        )
    objects = len(run.dataset.ids) - run.dataset.crowds
    require_sound_objects(index.faults, objects, run.max_bad)


def finish_shards(
    images: str | Place,
    annotations: str | Place,
    *,
    shards: str | Place,
    max_bad: float = 0.01,
) -> ShardReport:
    """Write the index of shards whose parts are all written; see `write_shards`.

    `finish_shards` does not wait for shards that are still being written. You may call it again.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        shards: the folder of the shards.
        max_bad: the share or the number of bad images, and of bad objects, that all parts together
            may have; see `write_shards`.

    Raises:
        ColabUtilsError: if shards are missing (the message lists them), too many images or objects
            are bad, or the folder holds other data.

    Example:
        >>> import tempfile
        >>> from colab_utils.course.sample_data import make_dataset
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = make_dataset(folder + "/data", n=3, width=64, height=64, workers=1)
        ...     shards = folder + "/shards"
        ...     for part in (2, 2), (1, 2):
        ...         _ = write_shards(made.images, made.annotations, shards=shards, part=part)
        ...     print(finish_shards(made.images, made.annotations, shards=shards).images)
        3
    """
    started_s = perf_counter()
    images = open_place(images)
    folder = open_place(shards)
    max_bad = require_max_bad(max_bad)
    dataset = open_coco(images, annotations)
    begun = find_begun(folder, dataset.fingerprint, {})
    if begun is None:
        raise ColabUtilsError(f"There are no shards in {folder}. Write their parts first.")
    run = ShardRun(folder, images, dataset, begun.recipe, max_bad)
    store = open_store(folder)
    names = map(name_shard, range(len(run.shards)))
    with ThreadPool(COPY_STREAMS) as pool:
        shown = list(pool.map(lambda name: find_shard(store, name, run), names))
    missing = [str(number) for number, shard in enumerate(shown) if shard is None]
    if missing:
        raise ColabUtilsError(
            f"{len(missing):,} of {len(shown):,} shards are missing in {folder}, or were "
            f"made with other settings: number {', '.join(missing)}. Write their parts, "
            "or all parts, again: finished shards are left as they are. Then finish again."
        )
    index = join_index(run, filter(None, shown))
    check_bad(run, index)
    with explain_write(folder):
        write_index(folder, index)
        remove_leftovers(store)
    return _make_report(index, dataset, started_s)
