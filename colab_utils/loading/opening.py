"""The nearest form of a dataset: shards on the SSD, on Drive, or still to be written."""

import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal, cast

import xxhash

from colab_utils.data.coco_json import read_content
from colab_utils.data.defects import count_allowed
from colab_utils.drive import Retries, is_on_drive
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning, UnavailableError
from colab_utils.loading.arrival import FollowedArrival, hold_arrival
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.loading.writing import (
    FollowedWriting,
    Writing,
    WritingShards,
    name_writing,
    warn_of_unsent,
)
from colab_utils.places import Place, identify_place, open_place, require_local_path
from colab_utils.require import require_count, require_max_bad
from colab_utils.shards.folder_state import find_common_recipe
from colab_utils.shards.index import INDEX_NAME, read_index
from colab_utils.shards.jobs import has_files
from colab_utils.shards.lock import WRITER_NAME, hold_folder
from colab_utils.shards.plan import make_recipe, open_annotations, stamp_annotations
from colab_utils.shards.source import read_source
from colab_utils.streams import require_streams


def open_dataset(
    images: str | Place,
    annotations: str | Place,
    *,
    drive: str | Place | None,
    ssd: str | Path,
    shard_mb: float = 128,
    streams: int | Literal["auto"] = "auto",
    max_bad: float = 0.01,
    seed: int = 0,
    contiguous_labels: bool = False,
) -> ShardDataset | CocoFolder:
    """Open a COCO dataset in its nearest form, so that training begins without preparation.

    There are three forms. The nearest one that exists is opened:

    - Complete shards in ``ssd`` are read there (`ShardDataset`).
    - Shards in ``drive`` are copied to ``ssd`` while training reads them (`ArrivingShards`).
    - If there are only loose files, a background process writes shards of them
      (`WritingShards`). Training reads each shard as soon as it is finished. Each shard is also
      sent to ``drive``, so that the next session can start from there. After an interruption,
      writing goes on after the last finished shard.

    If several processes train together, one process on each machine copies or writes, and the
    others follow it. Only the machine of rank 0 sends the shards to ``drive``.

    The shards are the same as `write_shards` makes with this ``shard_mb``. Shards that were begun
    with other settings are finished with those settings. If no shards can be written, for example
    on a full disk, training reads the loose files (`CocoFolder`), and a warning says why.

    If ``drive`` takes no files, or does not answer while the images lie elsewhere, a warning says
    so, and the shards stay in ``ssd``. If Drive does not answer and ``ssd`` has all shards, these
    are read. A later call sends them to ``drive``.

    Args:
        images: the image folder; its path, or a URL that fsspec knows, such as
            ``s3://bucket/images``.
        annotations: COCO instance JSON; its path or a URL.
        drive: folder for the shards on Drive, or their URL; None keeps them in ``ssd`` alone.
        ssd: folder for the shards on this machine's disk.
        shard_mb: size to aim at for each shard, in MB. The first ones are smaller: training begins
            with one of 4 MB.
        streams: files that each process reads at the same time; "auto" finds the number by
            measuring.
        max_bad: largest share of bad images, and of bad objects, from 0 to 1 (``float``), or their
            largest number (``int``). A loader leaves bad images out, with a warning.
        seed: seed of the order in which shards are written or copied.
        contiguous_labels: map category ids to 1 to K.

    Raises:
        ColabUtilsError: if the input is missing or not COCO, or a folder holds shards of another
            dataset.

    Example:
        >>> import tempfile
        >>> from colab_utils.sample_data import make_dataset
        >>> folder = Path(tempfile.mkdtemp())
        >>> made = make_dataset(folder / "data", n=3, width=64, height=64, workers=1)
        >>> places = {"drive": folder / "drive", "ssd": folder / "ssd"}
        >>> dataset = open_dataset(made.images, made.annotations, **places)
        >>> dataset.wait()
        >>> print(open_dataset(made.images, made.annotations, **places))
        3 images in 1 shard, 6 categories
    """
    images = open_place(images)
    annotations = open_place(annotations)
    ssd = require_local_path(ssd)
    drive = None if drive is None else open_place(drive)
    if drive is not None and identify_place(drive) == identify_place(ssd):
        raise ColabUtilsError(f"The folders drive and ssd are both {ssd}. Name two folders.")
    default = make_recipe("shrink", min_size=800, max_size=1333, shard_mb=shard_mb)
    max_bad = require_max_bad(max_bad)
    require_streams(streams)
    require_count("seed", seed, minimum=0)
    ssd_has_shards = False
    drive_has_shards = False
    try:
        ssd_has_shards = _has_shards(ssd, annotations) and _has_all_files(ssd)
        drive_has_shards = drive is not None and _has_shards(drive, annotations)
    except UnavailableError as error:
        drive = None
        ssd_has_shards = _do_without_drive(error, images, ssd, is_compared=ssd_has_shards)
    if ssd_has_shards and (drive_has_shards or drive is None):
        return _open_shards(ssd, seed, contiguous_labels)
    if drive is not None and drive_has_shards:
        try:
            _remove_mark(ssd)
            return ArrivingShards(drive, ssd, seed=seed, contiguous_labels=contiguous_labels)
        except ColabUtilsError as error:
            shards = _open_shards(drive, seed, contiguous_labels)
            _warn(error, f"the shards in {drive} themselves, which is slower")
            return shards
    dataset = open_annotations(images, annotations)
    folders: list[Place] = [ssd] if drive is None else [drive, ssd]
    recipe = find_common_recipe(folders, dataset) or default
    try:
        lock = hold_arrival(ssd, name_writing(dataset))
        writing: Writing | FollowedWriting
        if lock is None:
            writing = FollowedWriting(ssd, images, dataset, seed=seed)
        else:
            writing = Writing(
                ssd,
                drive,
                images,
                dataset,
                recipe,
                lock=lock,
                streams=streams,
                max_bad=max_bad,
                seed=seed,
            )
    except ColabUtilsError as error:
        if ssd_has_shards:
            _warn(error, f"the shards in {ssd}, which are not sent to Drive")
            return _open_shards(ssd, seed, contiguous_labels)
        loose = CocoFolder(
            images, annotations, contiguous_labels=contiguous_labels, streams=streams
        )
        loose.max_bad = count_allowed(len(loose), max_bad)
        # If the loose files are missing, too, this read raises an error that says so.
        loose.read(0)
        _warn(error, f"the loose files in {images}, which is slower")
        return loose
    return WritingShards(writing, dataset, max_bad=max_bad, contiguous_labels=contiguous_labels)


def _open_shards(folder: Place, seed: int, contiguous_labels: bool) -> ShardDataset:
    """Open complete shards, for the same order of images as while they arrived.

    On another machine, they may still be arriving.
    """
    shards = ShardDataset(folder, contiguous_labels=contiguous_labels)
    # Of this folder, only the status of the arrival is read. That is possible at a URL, too.
    target = cast(Path, folder)
    shards.arrival = FollowedArrival(
        folder,
        target,
        shards.index,
        lock=ExitStack(),
        workers=1,
        seed=seed,
        retries=Retries(),
    )
    return shards


def _has_shards(folder: Place, annotations: Place) -> bool:
    """Return whether a folder has an index of all shards of a dataset.

    Raises:
        ColabUtilsError: the folder has the index of another dataset.
    """
    retries = Retries()
    if not retries.write(folder, (folder / INDEX_NAME).exists):
        return False
    index = read_index(folder, retries)
    # The JSON is read only if it has changed since the shards were written.
    source = read_source(folder, index.fingerprint)
    if source is not None and source.json == stamp_annotations(annotations):
        fingerprint = source.fingerprint
    else:
        _, content = retries.run(partial(read_content, annotations))
        fingerprint = xxhash.xxh3_128_hexdigest(content)
    if index.fingerprint != fingerprint:
        raise ColabUtilsError(
            f"The shards in {folder} are of other annotations. Name another folder, or delete "
            "these shards if the annotations have changed."
        )
    return not index.partial


def _has_all_files(folder: Path) -> bool:
    """Return whether a folder has an index, and all files that the index of all shards lists.

    On Drive, this would take minutes.
    """
    if not (folder / INDEX_NAME).exists():
        return False
    index = read_index(folder)
    return not index.partial and has_files(index, folder)


def _do_without_drive(
    error: UnavailableError, images: Place, ssd: Path, *, is_compared: bool
) -> bool:
    """Warn that Drive is not used, and return whether the SSD has all shards.

    Raises:
        UnavailableError: Drive is needed: the images lie there.
    """
    if _has_all_files(ssd):
        instead = f"the shards in {ssd}"
        if not is_compared:
            instead += ", which were not compared with the annotations"
        _warn(error, instead)
        return True
    if is_on_drive(images):
        raise error
    warn_of_unsent(error)
    return False


def _remove_mark(folder: Path) -> None:
    """Remove the mark of a writer that was killed.

    Raises:
        ColabUtilsError: the writer is still at work.
    """
    if (folder / WRITER_NAME).exists():
        with hold_folder(folder):
            pass


def _warn(error: ColabUtilsError, instead: str) -> None:
    text = f"{error} So training reads {instead}."
    warnings.warn(text, ColabUtilsWarning, stacklevel=3)
