"""The nearest form of a dataset: shards on the SSD, on Drive, or still to be written."""

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from colab_utils.data.coco_json import read_fingerprint
from colab_utils.drive import DriveLostError, Retries, explain_write
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.files import has_size
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.loading.writing import WritingShards
from colab_utils.require import require_count, require_local_path, require_number
from colab_utils.shards.index import INDEX_NAME, ShardIndex, read_index
from colab_utils.shards.lock import WRITER_NAME, hold_folder
from colab_utils.shards.plan import count_processes, make_recipe, open_annotations
from colab_utils.shards.write import ShardRun, count_allowed, find_common_recipe
from colab_utils.streams import require_streams

# So many loose files are tried before training on them is offered.
_TRIED_IMAGES = 4


def open_dataset(
    images: str | Path,
    annotations: str | Path,
    *,
    drive: str | Path | None,
    ssd: str | Path,
    shard_mb: float = 16,
    streams: int | Literal["auto"] = "auto",
    max_bad: float = 0.01,
    seed: int = 0,
    contiguous_labels: bool = False,
) -> ShardDataset | CocoFolder:
    """Open a COCO dataset in its nearest form, so that training begins without preparation.

    These are, the nearest first: complete shards in ``ssd`` (`ShardDataset`); shards in ``drive``,
    which are copied to ``ssd`` while they are trained on (`ArrivingShards`); and where there are
    only loose files, a process in the background writes the shards (`WritingShards`), which are
    trained on as each is finished, and sent to ``drive``. So the next session starts from Drive's
    shards. One that is interrupted goes on after its last shard.

    The shards are those that `write_shards` writes with this ``shard_mb``; ones that were begun
    with other settings go on by these. Where none can be written, such as on a full disk, the loose
    files are trained on (`CocoFolder`), with a warning that says why.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        drive: folder for the shards on Drive; None keeps them in ``ssd`` alone.
        ssd: folder for the shards on this machine's disk.
        shard_mb: size to aim at for each shard, in MB: training begins with the first one.
        streams: files that each process reads at the same time; "auto" measures.
        max_bad: the share of images that may turn out bad, 0 to 1, and of bad objects. A loader
            leaves such images out, with a warning.
        seed: of the order in which shards are written or copied.
        contiguous_labels: map category ids to 1 to K.

    Raises:
        ColabUtilsError: if the input is missing or not COCO, or a folder holds other shards.

    Example:
        >>> import tempfile
        >>> from colab_utils.sample_data import make_dataset
        >>> folder = Path(tempfile.mkdtemp())
        >>> made = make_dataset(folder / "data", n=3, width=64, height=64, workers=1)
        >>> places = {"drive": folder / "drive", "ssd": folder / "ssd"}
        >>> dataset = open_dataset(made.images, made.annotations, **places)
        >>> dataset.wait()
        >>> print(open_dataset(made.images, made.annotations, **places))
        3 images in 1 shards, 4 categories
    """
    images = require_local_path(images)
    annotations = require_local_path(annotations)
    ssd = require_local_path(ssd)
    folders = [ssd]
    if drive is not None:
        drive = require_local_path(drive)
        folders.insert(0, drive)
        if os.path.realpath(drive) == os.path.realpath(ssd):
            raise ColabUtilsError(f"The folders drive and ssd are both {ssd}. Name two folders.")
    limits = {"min_size": 800, "max_size": 1333, "shard_mb": shard_mb}
    default = make_recipe("shrink", **limits)
    require_number("max_bad", max_bad, least=0, most=1)
    require_streams(streams)
    seed = require_count("seed", seed, least=0)
    fingerprint = Retries().run(partial(read_fingerprint, annotations))
    is_on_ssd = _has_shards(ssd, fingerprint, look_at_files=True)
    is_on_drive = drive is not None and _has_shards(drive, fingerprint, look_at_files=False)
    if is_on_ssd and (is_on_drive or drive is None):
        return ShardDataset(ssd, contiguous_labels=contiguous_labels)
    if drive is not None and is_on_drive:
        return _copy_from_drive(drive, ssd, seed, contiguous_labels=contiguous_labels)
    dataset = open_annotations(images, annotations)
    run = ShardRun(
        folder=ssd,
        images=images,
        dataset=dataset,
        recipe=find_common_recipe(folders, dataset) or default,
        processes=count_processes("auto"),
        streams=streams,
        max_bad=max_bad,
        drive=drive,
        seed=seed,
    )
    try:
        return WritingShards(run, contiguous_labels=contiguous_labels)
    except ColabUtilsError as error:
        if is_on_ssd:
            _warn(error, f"the shards in {ssd}, which are not sent to Drive")
            return ShardDataset(ssd, contiguous_labels=contiguous_labels)
        loose = CocoFolder(
            images, annotations, contiguous_labels=contiguous_labels, streams=streams
        )
        loose.max_bad = count_allowed(len(loose), max_bad)
        if not _is_readable(loose):
            raise
        _warn(error, f"the loose files in {images}, which is slower")
        return loose


def _has_shards(folder: Path, fingerprint: str, *, look_at_files: bool) -> bool:
    """Return whether a folder has all shards of a dataset; on Drive its index says so.

    Raises:
        ColabUtilsError: it has those of another one.
    """
    retries = Retries()
    if not retries.write(folder, (folder / INDEX_NAME).exists):
        return False
    index: ShardIndex = read_index(folder, retries)
    if index.fingerprint != fingerprint:
        raise ColabUtilsError(
            f"The shards in {folder} are of other annotations. Name another folder, or delete "
            "these shards if the annotations have changed."
        )
    if look_at_files and not all(has_size(folder / name, size) for name, size, _ in index.files()):
        return False
    return not index.partial


def _copy_from_drive(drive: Path, ssd: Path, seed: int, *, contiguous_labels: bool) -> ShardDataset:
    """Return shards that arrive; those on Drive, with a warning, where they cannot."""
    try:
        with explain_write(ssd):
            if (ssd / WRITER_NAME).exists():
                # A writer that was killed has left its mark, which is removed so.
                with hold_folder(ssd):
                    pass
        return ArrivingShards(drive, ssd, seed=seed, contiguous_labels=contiguous_labels)
    except DriveLostError:
        raise
    except ColabUtilsError as error:
        _warn(error, f"the shards in {drive} themselves, which is slower")
        return ShardDataset(drive, contiguous_labels=contiguous_labels)


def _is_readable(loose: CocoFolder) -> bool:
    """Return whether at least one of some images that are spread over the dataset can be read."""
    for index in np.linspace(0, len(loose) - 1, _TRIED_IMAGES).astype(int).tolist():
        try:
            loose.read(index)
        except ColabUtilsError:
            continue
        return True
    return False


def _warn(error: ColabUtilsError, instead: str) -> None:
    text = f"{error} So training reads {instead}."
    warnings.warn(text, ColabUtilsWarning, stacklevel=4)
