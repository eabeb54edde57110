"""The nearest form of a dataset: shards on the SSD, on Drive, or loose files."""

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from colab_utils.data.coco import open_coco
from colab_utils.data.coco_json import read_content
from colab_utils.data.defects import count_allowed, warn_of_faults
from colab_utils.data.image_checks import sample_faults
from colab_utils.drive import is_on_drive
from colab_utils.errors import ColabUtilsError, UnavailableError
from colab_utils.file_cache import FileCache
from colab_utils.files import open_store
from colab_utils.loading.arriving import Arrival, ArrivingShards
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.devices import find_ranks
from colab_utils.loading.samples import CocoSamples
from colab_utils.loading.writing import UNSENT, ShardWriter, Writing, warn
from colab_utils.places import Place, PlaceLike, identify_place, open_place, require_local_path
from colab_utils.require import require_count, require_max_bad
from colab_utils.shards.index import ShardIndex, find_index
from colab_utils.shards.jobs import ShardRun
from colab_utils.shards.plan import (
    make_recipe,
    plan_recipe,
    plan_windows,
)
from colab_utils.shards.records import read_limits
from colab_utils.shards.verify import find_begun
from colab_utils.streams import require_streams

# The folder of the files that are kept while shards are written, in the folder of the shards.
_CACHE_NAME = ".loose-files"


def open_dataset(
    images: PlaceLike,
    annotations: PlaceLike,
    *,
    drive: PlaceLike | None,
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
    - If there are only loose files, training reads these, and keeps their bytes in ``ssd``
      (`CocoFolder` with streams and a cache). Meanwhile, a background process of low priority
      writes shards of the same files into ``ssd``, and sends each to ``drive``. Each file is read
      from Drive once. The next session finds the shards, and so does the next pass of a loader if
      no image is bad. After an interruption, writing goes on after the last finished shard.

    Loose files and shards have the same order of images, so a run goes on where it stopped.

    If several processes train together, one process on each machine copies or writes. Only the
    machine of rank 0 sends the shards to ``drive``.

    The shards are the same as `write_shards` makes with this ``shard_mb``. Shards that were begun
    with other settings are finished with those settings. If no shards can be written, for example
    on a full disk, a warning says why. If the disk is too small for the bytes of all files, no more
    of them are kept, and a warning says so.

    If ``drive`` takes no files, or does not answer while the images lie elsewhere, a warning says
    so, and the shards stay in ``ssd``. If Drive does not answer and ``ssd`` has all shards, these
    are read. A later call sends them to ``drive``.

    Args:
        images: the image folder; its path, or a URL that fsspec knows, such as
            ``s3://bucket/images``.
        annotations: COCO instance JSON; its path or a URL.
        drive: folder for the shards on Drive, or their URL; None keeps them in ``ssd`` alone.
        ssd: folder for the shards on this machine's disk.
        shard_mb: size to aim at for each shard, in MB. The first ones are smaller.
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
        >>> from colab_utils.course.sample_data import make_dataset
        >>> folder = Path(tempfile.mkdtemp())
        >>> made = make_dataset(folder / "data", n=3, width=64, height=64, workers=1)
        >>> places = {"drive": folder / "drive", "ssd": folder / "ssd"}
        >>> dataset = open_dataset(made.images, made.annotations, **places)
        >>> dataset.wait()
        >>> print(open_dataset(made.images, made.annotations, **places))
        3 images in 1 shard, 6 categories
    """
    images = open_place(images)
    ssd = require_local_path(ssd)
    drive = None if drive is None else open_place(drive)
    if drive is not None and identify_place(drive) == identify_place(ssd):
        raise ColabUtilsError(f"The folders drive and ssd are both {ssd}. Name two folders.")
    recipe = make_recipe("shrink", min_size=800, max_size=1333, shard_mb=shard_mb)
    max_bad = require_max_bad(max_bad)
    require_streams(streams)
    require_count("seed", seed, minimum=0)
    index = find_index(ssd)
    is_here = index is not None and open_store(ssd).has_files(index.files())
    on_drive = None
    try:
        _require_same(ssd, index, annotations)
        if drive is not None:
            on_drive = find_index(drive)
            if on_drive != index:
                _require_same(drive, on_drive, annotations)
    except UnavailableError as error:
        if not is_here and is_on_drive(images):
            raise
        drive = None
        warn(error, f"Training reads the shards in {ssd} unchecked." if is_here else UNSENT)
    if is_here or on_drive is not None:
        shutil.rmtree(ssd / _CACHE_NAME, ignore_errors=True)
    # Only the machine of rank 0 sends shards.
    target = drive if find_ranks().is_on_first_host else None
    if is_here:
        shards = _open_shards(ssd, seed, contiguous_labels)
        if target is not None and on_drive is None:
            send = partial(Arrival, ssd, target, shards.index, seed=seed, sends=True)
            _begin(shards, send, UNSENT)
        return shards
    if drive is not None and on_drive is not None:
        return _open_on_drive(drive, ssd, on_drive, seed, contiguous_labels)
    dataset = open_coco(images, annotations)
    warn_of_faults(annotations, sample_faults(dataset))
    recipe = _find_recipe([ssd] if drive is None else [drive, ssd], dataset.fingerprint) or recipe
    cache = FileCache(ssd / _CACHE_NAME)
    recipe = plan_recipe(images, dataset, recipe, cache)
    # The cache leaves room for the shards.
    cache.reserve_bytes += len(dataset) * recipe["shard_mb"] * 1e6 / recipe["images_per_shard"]
    run = ShardRun(ssd, images, dataset, recipe, max_bad, cache=cache)
    loose = LooseFiles(run, streams=streams, seed=seed, contiguous_labels=contiguous_labels)
    _begin(
        loose,
        partial(Writing, ShardWriter(run, target, [*chain(*loose.windows)], streams)),
        f"So training reads the files in {images}, and this call writes no shards.",
    )
    return loose


def _find_recipe(folders: Sequence[Place], fingerprint: str) -> dict[str, Any]:
    """Return the recipe that the shards of a dataset have in all these folders; {} if there are no
    shards.

    Raises:
        ColabUtilsError: a folder holds shards of other data, or of another recipe than the folder
            before it.
    """
    recipe: dict[str, Any] = {}
    for folder in folders:
        index = find_begun(folder, fingerprint, recipe)
        recipe = recipe if index is None else index.recipe
    return recipe


def _open_on_drive(
    drive: Place, ssd: Path, index: ShardIndex, seed: int, contiguous_labels: bool
) -> ShardDataset:
    """Open shards that arrive from Drive; if the SSD cannot take them, open them there."""
    try:
        return ArrivingShards(
            drive, ssd, seed=seed, contiguous_labels=contiguous_labels, index=index
        )
    except ColabUtilsError as error:
        instead = f"So training reads the shards in {drive} themselves, which is slower."
        warn(error, instead, stacklevel=4)
        return _open_shards(drive, seed, contiguous_labels)


def _begin(dataset: CocoSamples, work: Callable[[], Any], instead: str) -> None:
    """Begin the work that brings or writes shards, or warn. One process of each machine works."""
    if find_ranks().is_first_here:
        try:
            dataset.arrival = work()
        except ColabUtilsError as error:
            warn(error, instead, stacklevel=4)


class LooseFiles(CocoFolder):
    """A `CocoFolder` of which a background process writes shards. `open_dataset` makes it.

    Its images are in the order of the shards, and its first epoch uses them in the order in which
    the shards are written. So a run goes on with the finished shards where it stopped.

    Attributes:
        arrival: the `Writing`; None in workers, or if another process writes.
    """

    _shards: ShardDataset | None = None
    _is_told = False

    def __init__(
        self,
        run: ShardRun,
        *,
        streams: int | str,
        seed: int,
        contiguous_labels: bool,
    ) -> None:
        recipe = run.recipe
        super().__init__(
            run.images,
            run.dataset.select(np.concatenate(run.shards)),
            contiguous_labels=contiguous_labels,
            streams=streams,
            exif=recipe.get("exif", "keep"),
            cache=run.cache,
            **read_limits(recipe),
        )
        self.max_bad = count_allowed(len(run.dataset), run.max_bad)
        self._is_reduced = recipe.get("reduced_decode", False)
        self.shard_of = np.repeat(np.arange(len(run.shards)), [*map(len, run.shards)])
        self.windows = plan_windows(recipe, len(run.shards), seed)
        self._open_shards = partial(_open_shards, run.folder, seed, contiguous_labels)
        self._ssd = run.folder

    def find_nearest(self) -> CocoSamples:
        """Return the shards once all are written and hold all images; until then this dataset."""
        error = None if self.arrival is None else self.arrival.find_error()
        if error is not None and not self._is_told:
            self._is_told = True
            warn(error, "Training goes on.")
        if self._shards is None:
            index = find_index(self._ssd)
            ours = (self.fingerprint, len(self))
            has_files = open_store(self._ssd).has_files
            if index and (index.fingerprint, index.images) == ours and has_files(index.files()):
                self._shards = self._open_shards()
        if self._shards is None:
            return self
        self._shards.transforms = self.transforms
        return self._shards


def _open_shards(folder: Place, seed: int, contiguous_labels: bool) -> ShardDataset:
    """Open complete shards, for the same order of images as while they arrived.

    On another machine, they may still be arriving.
    """
    shards = ShardDataset(folder, contiguous_labels=contiguous_labels)
    shards.windows = plan_windows(shards.index.recipe, len(shards.index.shards), seed)
    return shards


def _require_same(folder: Place, index: ShardIndex | None, annotations: PlaceLike) -> None:
    """Raise an error if a folder has an index of another dataset."""
    if index is None:
        return
    content = read_content(open_place(annotations))
    if index.fingerprint != xxhash.xxh3_128_hexdigest(content):
        raise ColabUtilsError(
            f"The shards in {folder} are of other annotations. Name another folder, or delete "
            "these shards if the annotations have changed."
        )
