"""Where things lie, and what a notebook finds there or makes: every notebook starts on a machine of its own."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colab_utils.data.coco import read_coco
from colab_utils.drive import DriveProfile, get_profile, guard_drive, is_on_drive
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.runtime import COLAB_ROOT, format_bytes, is_colab, write_file
from colab_utils.sample_data import CATEGORIES, make_dataset
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.format import INDEX_NAME, ShardIndex, read_index
from colab_utils.shards.write import write_shards

__all__ = [
    "EnsuredDataset", "EnsuredShards", "Workspace", "ensure_dataset", "ensure_shards", "ensure_validation_shards",
    "publish_results",
]  # fmt: skip


@dataclass(frozen=True)
class Workspace:
    """Two folders, ``drive`` (slow, lasts) and ``ssd`` (fast, may be lost). Make one with `Workspace.open`."""

    drive: Path
    ssd: Path
    profile: DriveProfile | None
    """The speed at which ``drive`` is read: ``None`` for a real Google Drive and for full speed."""
    note: str
    """How ``drive`` was chosen, in one line."""

    @classmethod
    def open(
        cls,
        drive: str | Path | None = None,
        *,
        ssd: str | Path | None = None,
        profile: str | DriveProfile | None = "typical",
        use_google_drive: bool = True,
    ) -> Workspace:
        """Make the two folders; on Colab, mount Google Drive first (it asks you to sign in).

        When the sign-in is declined, times out after two minutes or fails, a slowed folder on this machine takes the
        place of Drive; ``note`` and a `ColabUtilsWarning` tell you. Outside Colab a slowed folder is used at once.

        Args:
            drive: the slow folder, used as given; Google Drive is mounted for a folder in it. Default: ``colab_utils``
                in your Google Drive, else ``/content/slow_drive``; outside Colab ``./runs/drive``.
            ssd: the fast folder. Default: ``/content/colab_utils``; outside Colab ``./runs/ssd``.
            profile: how slow the slowed folder is: a name in `DRIVE_PROFILES`, a profile, or ``"none"``.
                A mounted Google Drive has its own speed and ignores this.
            use_google_drive: ``False`` does not mount, and takes the slowed folder also on Colab.

        Raises:
            ColabUtilsError: a folder cannot be made, the profile has no such name, or ``drive`` lies in a
                Google Drive that cannot be mounted.

        Example:
            >>> import tempfile
            >>> folder = Path(tempfile.mkdtemp())
            >>> workspace = Workspace.open(folder / "drive", ssd=folder / "ssd", profile="none")
            >>> workspace.shards_on_ssd == folder / "ssd" / "shards"
            True
        """
        slow, note = _choose_drive(drive, use_google_drive)
        fast = _to_path(ssd or (COLAB_ROOT / "colab_utils" if is_colab() else "runs/ssd"))
        if fast == slow or is_on_drive(fast):
            raise ColabUtilsError(f"expected ssd on this machine's own disk, found {fast}, on Drive: name another one")
        for folder, named in ((slow, drive), (fast, ssd)):
            try:
                with guard_drive(folder):
                    folder.mkdir(parents=not named, exist_ok=True)  # a typing error in a name is noticed
            except OSError as error:
                raise ColabUtilsError(f"expected to make {folder}, found {error.strerror}: name another one") from error
        return cls(slow, fast, None if is_on_drive(slow) else get_profile(profile), note)

    @property
    def shards_on_drive(self) -> Path:
        """The shards on Drive."""
        return self.drive / "shards"

    @property
    def shards_on_ssd(self) -> Path:
        """The copy of the shards on this machine."""
        return self.ssd / "shards"

    @property
    def runs(self) -> Path:
        """Checkpoints and reports; on Drive, because they must outlast the machine."""
        return self.drive / "runs"

    def __str__(self) -> str:
        real = "Google Drive" if is_on_drive(self.drive) else "full speed"
        return f"Drive: {self.drive} ({self.profile or real})\nSSD: {self.ssd}\nNote: {self.note}"


def _choose_drive(drive: str | Path | None, use_google_drive: bool) -> tuple[Path, str]:
    """The slow folder, and one line on why it was chosen."""
    mount, slowed = COLAB_ROOT / "drive", COLAB_ROOT / "slow_drive" if is_colab() else _to_path("runs/drive")
    chosen = _to_path(drive) if drive else None
    if not (is_colab() and (chosen.is_relative_to(mount) if chosen else use_google_drive)):
        folder = chosen or slowed
        return folder, f"{folder} {'lies on' if is_on_drive(folder) else 'takes the place of'} Google Drive"
    failure = _mount_google_drive(mount)
    if not failure:
        return chosen or mount / "MyDrive" / "colab_utils", "Google Drive is mounted: what you put there lasts"
    if chosen:
        found = f"found Drive not mounted ({failure}): sign in, or name a folder outside {mount}"
        raise ColabUtilsError(f"expected {chosen} in Google Drive, {found}")
    note = f"Google Drive is not mounted ({failure}): {slowed} takes its place, and is lost with this machine"
    warnings.warn(note, ColabUtilsWarning, stacklevel=3)
    return slowed, note


def _mount_google_drive(mount: Path) -> str:
    """Mount Google Drive where it is not mounted; returns what went wrong, "" if nothing did."""
    if os.path.isdir(mount / "MyDrive"):
        return ""
    try:
        from google.colab import drive as google_drive

        # a mount that died is still in the table of mounts: only a forced mount replaces it
        google_drive.mount(str(mount), force_remount=True, timeout_ms=120_000)
    except Exception as error:  # Colab's message errors have no public base class
        return " ".join(f"{type(error).__name__}: {error}".split())[:200].removesuffix(":")
    return "" if os.path.isdir(mount / "MyDrive") else f"no MyDrive appeared in {mount}"


def _to_path(path: str | Path) -> Path:
    return Path(os.path.abspath(Path(path).expanduser()))


@dataclass(frozen=True)
class EnsuredDataset:
    """A dataset that is there."""

    images: Path
    annotations: Path
    note: str
    """Where it comes from."""

    def __str__(self) -> str:
        return f"{self.note}\nimages: {self.images}\nannotations: {self.annotations}"


@dataclass(frozen=True)
class EnsuredShards:
    """Shards that are there."""

    folder: Path
    index: ShardIndex
    note: str
    """Where they come from."""

    def __str__(self) -> str:
        index, size = self.index, format_bytes(self.index.bytes)
        return f"{len(index.shards)} shards, {index.images:,} images, {size} in {self.folder}\n{self.note}"


def ensure_dataset(
    workspace: Workspace, *, images: str = "", annotations: str = "", n: int = 160, part: str = "train"
) -> EnsuredDataset:
    """Your dataset where you name one, else the built-in one on Drive, made now if it is not there yet.

    Args:
        workspace: where Drive is.
        images: your image folder; empty takes the built-in dataset.
        annotations: your COCO instance JSON; empty takes the built-in dataset.
        n: images of a built-in dataset that is made now; one that is there is taken as it is.
        part: ``"val"`` is another built-in dataset, with other pictures.

    Raises:
        ColabUtilsError: only one of ``images`` and ``annotations`` is given.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> workspace = Workspace.open(folder / "drive", ssd=folder / "ssd", profile="none")
        >>> ensure_dataset(workspace, n=2).note, ensure_dataset(workspace, n=2).note
        ('The built-in dataset, made now.', 'The built-in dataset, found on Drive.')
    """
    if bool(images) != bool(annotations):
        raise ColabUtilsError("expected images and annotations, found only one of them: name both or neither")
    if images:
        return EnsuredDataset(Path(images), Path(annotations), "Your own dataset.")
    folder = workspace.drive / ("dataset" if part == "train" else "dataset_val")
    with guard_drive(folder):
        found = (folder / "annotations.json").is_file()
        if not found:
            make_dataset(folder, n=n, seed=0 if part == "train" else 1)
    note = f"The built-in dataset, {'found on Drive' if found else 'made now'}."
    return EnsuredDataset(folder / "images", folder / "annotations.json", note)


def ensure_shards(
    workspace: Workspace, *, images: str = "", annotations: str = "", n: int = 160, part: str = "train"
) -> EnsuredShards:
    """The shards on Drive: those that are there, else made now from `ensure_dataset`'s dataset.

    Args:
        workspace: where Drive is.
        images: as for `ensure_dataset`; empty also takes shards of your own data that you made earlier.
        annotations: as for `ensure_dataset`.
        n: as for `ensure_dataset`.
        part: ``"val"`` are the shards of the second dataset, in a folder of their own.

    Raises:
        ColabUtilsError: the shards on Drive are of another dataset than the one you name.
    """
    folder = workspace.shards_on_drive if part == "train" else workspace.drive / "shards_val"
    with guard_drive(folder):
        is_there = (folder / INDEX_NAME).is_file()
        if not is_there or images or annotations:
            data = ensure_dataset(workspace, images=images, annotations=annotations, n=n, part=part)
            if not is_there:
                write_shards(data.images, data.annotations, shards=folder, shard_mb=8)
            elif read_index(folder).fingerprint != read_coco(data.annotations).fingerprint:
                found = f"found shards of another dataset in {folder}: move them away, or name another Drive folder"
                raise ColabUtilsError(f"expected shards of {data.annotations}, {found}")
        return EnsuredShards(folder, read_index(folder), "Found on Drive." if is_there else "Made now.")


def ensure_validation_shards(
    workspace: Workspace, train: EnsuredShards, *, images: str = "", annotations: str = "", n: int = 24
) -> EnsuredShards:
    """Shards on the SSD to evaluate a model with: yours where you name the data, else what fits the training shards.

    For the built-in dataset that is a second one with other pictures. For data of your own it is a copy of the first
    training shard: the model has seen its images, and ``note`` says so.

    Args:
        workspace: where Drive and SSD are.
        train: the training shards, from `ensure_shards`.
        images: your validation images.
        annotations: their COCO instance JSON.
        n: images of the built-in dataset where it is made now.

    Raises:
        ColabUtilsError: as `ensure_shards` and `copy_shards` do.
    """
    index, limit_gb, source = train.index, None, train
    built_in = {category["name"] for category in index.categories} == {category["name"] for category in CATEGORIES}
    if images or annotations or built_in:
        source = ensure_shards(workspace, images=images, annotations=annotations, n=n, part="val")
        target, note = workspace.ssd / "shards_val", source.note
    else:
        limit_gb = (index.shards[0].bytes + index.shards[0].arrays_bytes) / 1e9
        target = workspace.ssd / "shards_seen"
        note = "A copy of the first training shard: the model has seen these images, so its AP is too high."
    copy_shards(source.folder, target, profile=workspace.profile, limit_gb=limit_gb)
    return EnsuredShards(target, read_index(target), note)


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
