"""Every notebook starts on a fresh machine: find what an earlier one made on Drive, or make it in under a minute."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from colab_utils.drive import guard_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import format_bytes, write_file
from colab_utils.shards.format import INDEX_NAME, ShardIndex, read_index
from colab_utils.workspace import Workspace

__all__ = [
    "EnsuredDataset",
    "EnsuredShards",
    "ensure_dataset",
    "ensure_local_shards",
    "ensure_shards",
    "ensure_validation_shards",
    "publish_results",
]

Part = Literal["train", "val"]


@dataclass(frozen=True)
class EnsuredDataset:
    """Where the dataset lies; ``made`` says whether this call made it, ``note`` where it comes from."""

    images: Path
    annotations: Path
    made: bool
    note: str

    def __str__(self) -> str:
        return f"{self.note}\nimages: {self.images}\nannotations: {self.annotations}"


@dataclass(frozen=True)
class EnsuredShards:
    """Where the shards lie and how many; ``made`` says whether this call made (or copied) them."""

    folder: Path
    shards: int
    images: int
    bytes: int
    made: bool

    def __str__(self) -> str:
        verb = "made now" if self.made else "found"
        return f"{self.shards} shards, {self.images:,} images, {format_bytes(self.bytes)} in {self.folder} ({verb})"


def ensure_dataset(
    workspace: Workspace, *, images: str = "", annotations: str = "", n: int = 160, part: Part = "train"
) -> EnsuredDataset:
    """Your dataset where you name one, else the built-in one on Drive, made now if it is not there yet.

    Args:
        workspace: where Drive is.
        images: your image folder; empty takes the built-in dataset.
        annotations: your COCO instance JSON; empty takes the built-in dataset.
        n: images of a built-in dataset that is made now; one that is there is taken as it is.
        part: ``"val"`` is another built-in dataset, with other pictures.

    Raises:
        ColabUtilsError: only one of ``images`` and ``annotations`` is given, or one is not there.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> workspace = Workspace.open(folder / "drive", ssd=folder / "ssd", profile="none")
        >>> ensure_dataset(workspace, n=2).made, ensure_dataset(workspace, n=2).made
        (True, False)
    """
    if bool(images) != bool(annotations):
        found, lacking = ("images", "annotations") if images else ("annotations", "images")
        raise ColabUtilsError(
            f"expected images and annotations, found only {found}. Name the {lacking} too, or neither."
        )
    if images:
        with guard_drive(images):
            for path, kind, there in (
                (images, "an image folder", Path(images).is_dir()),
                (annotations, "a COCO JSON file", Path(annotations).is_file()),
            ):
                if not there:
                    raise ColabUtilsError(f"expected {kind}, found nothing at {path}. On Colab, mount Drive first.")
        return EnsuredDataset(Path(images), Path(annotations), False, "Your own dataset.")
    folder = workspace.dataset if part == "train" else workspace.drive / "dataset_val"
    with guard_drive(folder):
        if (folder / "annotations.json").is_file():
            return EnsuredDataset(
                folder / "images", folder / "annotations.json", False, "The built-in dataset, found on Drive."
            )
        from colab_utils.data.builtin import make_dataset

        made = make_dataset(folder, n=n, seed=0 if part == "train" else 1)
    note = f"The built-in dataset, made now: {made.n} images, {made.objects} objects, {format_bytes(made.bytes)}."
    return EnsuredDataset(made.images, made.annotations, True, note)


def ensure_shards(
    workspace: Workspace,
    *,
    images: str = "",
    annotations: str = "",
    n: int = 160,
    shard_mb: float = 8,
    part: Part = "train",
) -> EnsuredShards:
    """The shards on Drive: those that are there, else made now from `ensure_dataset`'s dataset.

    Args:
        workspace: where Drive is.
        images: as for `ensure_dataset`; empty also takes shards of your own data that you made earlier.
        annotations: as for `ensure_dataset`.
        n: as for `ensure_dataset`.
        shard_mb: size of a shard that is made now, in MB.
        part: ``"val"`` are the shards of the second dataset, in a folder of their own.

    Raises:
        ColabUtilsError: the shards on Drive are of another dataset than the one you name.
    """
    folder = workspace.shards_on_drive if part == "train" else workspace.drive / "shards_val"
    with guard_drive(folder):
        if (folder / INDEX_NAME).is_file() and not images:
            return _describe(folder, read_index(folder), made=False)
        from colab_utils.shards.write import write_shards

        there = (folder / INDEX_NAME).is_file()
        data = ensure_dataset(workspace, images=images, annotations=annotations, n=n, part=part)
        if there:
            _refuse_other(folder, data)
        else:
            write_shards(data.images, data.annotations, shards=folder, shard_mb=shard_mb)
        return _describe(folder, read_index(folder), made=not there)


def ensure_local_shards(
    workspace: Workspace,
    *,
    images: str = "",
    annotations: str = "",
    n: int = 160,
    shard_mb: float = 8,
    part: Part = "train",
) -> EnsuredShards:
    """The shards on this machine's SSD: `ensure_shards`, then what is not copied yet is copied.

    Raises:
        ColabUtilsError: as `ensure_shards` and `copy_shards` do.
    """
    from colab_utils.shards.copy import copy_shards

    source = ensure_shards(workspace, images=images, annotations=annotations, n=n, shard_mb=shard_mb, part=part)
    folder = workspace.shards_on_ssd if part == "train" else workspace.ssd / "shards_val"
    report = copy_shards(source.folder, folder, profile=workspace.profile)
    return _describe(folder, read_index(folder), made=report.skipped_shards < report.shards)


def ensure_validation_shards(
    workspace: Workspace, train: EnsuredShards, *, images: str = "", annotations: str = "", n: int = 24
) -> EnsuredShards:
    """Shards to judge a model by: yours where you name the data, else those that fit to the training shards.

    Beside the built-in dataset that is a second one with other pictures. Beside data of your own there is
    nothing to take but a copy of the first training shard: the model has seen its images.

    Args:
        workspace: where Drive and SSD are.
        train: the training shards on the SSD, from `ensure_local_shards`.
        images: your validation images.
        annotations: their COCO instance JSON.
        n: images of the built-in dataset where it is made now.

    Raises:
        ColabUtilsError: as `ensure_local_shards` does.
    """
    from colab_utils.data.builtin import CATEGORIES
    from colab_utils.shards.copy import copy_shards

    index = read_index(train.folder)
    names = {category["name"] for category in index.categories}
    if images or annotations or names == {category["name"] for category in CATEGORIES}:
        return ensure_local_shards(workspace, images=images, annotations=annotations, n=n, part="val")
    folder = workspace.ssd / "shards_seen"
    first = index.shards[0]
    report = copy_shards(train.folder, folder, limit_gb=(first.bytes + first.arrays_bytes) / 1e9)
    return _describe(folder, read_index(folder), made=report.skipped_shards < report.shards)


def publish_results(workspace: Workspace, number: str, **results: Any) -> Path:
    """Write a notebook's numbers to ``results/NUMBER.json`` on Drive, for the other notebooks and the demo.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> workspace = Workspace.open(folder / "drive", ssd=folder / "ssd", profile="none")
        >>> publish_results(workspace, "03", shards=2).read_text()
        '{"shards": 2}'
    """
    path = workspace.drive / "results" / f"{number}.json"
    with guard_drive(path):
        path.parent.mkdir(exist_ok=True)
        write_file(path, json.dumps(results).encode())
    return path


def _refuse_other(folder: Path, data: EnsuredDataset) -> None:
    from colab_utils.data.coco import read_coco

    if read_index(folder).fingerprint != read_coco(data.annotations).fingerprint:
        raise ColabUtilsError(
            f"expected shards of {data.annotations}, found shards of another dataset in {folder}. "
            "Open the workspace with another Drive folder, or move these shards away."
        )


def _describe(folder: Path, index: ShardIndex, *, made: bool) -> EnsuredShards:
    return EnsuredShards(folder, len(index.shards), index.images, index.bytes, made)
