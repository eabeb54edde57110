"""Where things lie, and what a notebook finds there or makes: every notebook starts on a machine of its own."""

from __future__ import annotations

import errno
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from colab_utils.drive import DriveProfile, get_profile, guard_drive, is_on_drive
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.runtime import COLAB_ROOT, format_bytes, is_colab, write_file
from colab_utils.shards.format import INDEX_NAME, read_index

__all__ = [
    "EnsuredDataset",
    "EnsuredShards",
    "Workspace",
    "ensure_dataset",
    "ensure_local_shards",
    "ensure_shards",
    "ensure_validation_shards",
    "publish_results",
]

Part = Literal["train", "val"]


@dataclass(frozen=True)
class Workspace:
    """Two folders, ``drive`` (slow, lasts) and ``ssd`` (fast, may be lost). Make one with `Workspace.open`."""

    drive: Path = Path()
    ssd: Path = Path()
    profile: DriveProfile | None = None
    """The speed at which ``drive`` is read: ``None`` for a real Google Drive and for full speed."""
    note: str = ""
    """How ``drive`` was chosen, in one line."""

    def __post_init__(self) -> None:
        if Path() in (self.drive, self.ssd):
            raise ColabUtilsError("expected a drive and an ssd folder, found none: use Workspace.open(), it finds both")

    @classmethod
    def open(
        cls,
        drive: str | Path | None = None,
        *,
        ssd: str | Path | None = None,
        profile: str | DriveProfile | None = "typical",
        use_google_drive: bool = True,
        timeout_s: float = 120,
    ) -> Workspace:
        """Make the two folders; on Colab, mount Google Drive first (it asks you to sign in).

        When the sign-in is declined, times out or fails, a slowed folder on this machine takes the place of
        Drive; ``note`` and a `ColabUtilsWarning` tell you. Outside Colab a slowed folder is used at once.

        Args:
            drive: the slow folder, used as given. Default: ``colab_utils`` in your Google Drive, else
                ``/content/slow_drive``; outside Colab ``./runs/drive``.
            ssd: the fast folder. Default: ``/content/colab_utils``; outside Colab ``./runs/ssd``.
            profile: how slow the slowed folder is: a name in `DRIVE_PROFILES`, a profile, or ``"none"``.
                A mounted Google Drive has its own speed and ignores this.
            use_google_drive: ``False`` does not mount, and takes the slowed folder also on Colab.
            timeout_s: how long to wait for the sign-in, in seconds.

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
        speed = get_profile(profile)
        slow, note = _choose_drive(drive, timeout_s if use_google_drive else None)
        fast = _to_path(ssd or (COLAB_ROOT / "colab_utils" if is_colab() else "runs/ssd"))
        if fast == slow or is_on_drive(fast):
            where = "the drive folder" if fast == slow else "Google Drive"
            raise ColabUtilsError(f"expected ssd on this machine's own disk, found {fast}, {where}: name another one")
        _make_folder(slow, parents=drive is None)
        _make_folder(fast, parents=ssd is None)
        return cls(slow, fast, None if is_on_drive(slow) else speed, note)

    @property
    def dataset(self) -> Path:
        """The COCO dataset on Drive."""
        return self.drive / "dataset"

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
        speed = "full speed" if self.profile is None else f"slowed folder, {self.profile}"
        speed = "Google Drive" if is_on_drive(self.drive) else speed
        return f"Drive: {self.drive} ({speed})\nSSD: {self.ssd}" + (f"\nNote: {self.note}" if self.note else "")


def _choose_drive(drive: str | Path | None, timeout_s: float | None) -> tuple[Path, str]:
    """The slow folder, and one line on why it was chosen; ``timeout_s=None`` forbids mounting."""
    chosen, slowed = None if drive is None else _to_path(drive), COLAB_ROOT / "slow_drive"
    if chosen is None and not is_colab():
        chosen = _to_path("runs/drive")
    if chosen is not None and not (is_colab() and chosen.is_relative_to(COLAB_ROOT / "drive")):
        return chosen, f"{chosen} {'lies on' if is_on_drive(chosen) else 'takes the place of'} Google Drive"
    if chosen is None and timeout_s is None:
        return slowed, f"{slowed} takes the place of Google Drive, as you asked"
    failure = _mount_google_drive(timeout_s)
    if not failure:
        return chosen or _find_my_drive() / "colab_utils", "Google Drive is mounted: what you put there lasts"
    if chosen is not None:
        raise ColabUtilsError(
            f"expected {chosen} in Google Drive, found Drive not mounted ({failure}): open the workspace "
            f"again and sign in, or choose a folder outside {COLAB_ROOT / 'drive'}"
        )
    note = f"Google Drive is not mounted ({failure}): {slowed} takes its place, and is lost with this machine"
    warnings.warn(note, ColabUtilsWarning, stacklevel=3)
    return slowed, note


def _mount_google_drive(timeout_s: float | None) -> str:
    """Mount Google Drive where it is not mounted; returns what went wrong, "" if nothing did."""
    if os.path.isdir(_find_my_drive()):
        return ""
    if timeout_s is None:
        return "use_google_drive is False"
    mount_point = COLAB_ROOT / "drive"
    try:
        from google.colab import drive as google_drive

        # a mount that died is still in the table of mounts: only a forced mount replaces it
        google_drive.mount(str(mount_point), force_remount=_is_dead(mount_point), timeout_ms=round(timeout_s * 1000))
    except Exception as error:  # Colab's message errors have no public base class
        detail = " ".join(str(error).split())[:200]
        return f"{type(error).__name__}: {detail}" if detail else type(error).__name__
    return "" if os.path.isdir(_find_my_drive()) else f"no MyDrive appeared in {mount_point}"


def _find_my_drive() -> Path:
    new, old = COLAB_ROOT / "drive" / "MyDrive", COLAB_ROOT / "drive" / "My Drive"
    return old if os.path.isdir(old) and not os.path.isdir(new) else new


def _is_dead(mount_point: Path) -> bool:
    try:
        os.stat(mount_point)
    except OSError as error:
        return error.errno in (errno.ENOTCONN, errno.EIO)
    return False


def _to_path(path: str | Path) -> Path:
    return Path(os.path.abspath(Path(path).expanduser()))


def _make_folder(folder: Path, *, parents: bool) -> None:
    """Make a folder; the parents of one that you named are not made, so that a typing error is noticed."""
    try:
        with guard_drive(folder):
            folder.mkdir(parents=parents, exist_ok=True)
    except OSError as error:
        raise ColabUtilsError(
            f"expected to make the folder {folder}, found: {error.strerror}. "
            f"Name a folder in one that is there, and that you may write to"
        ) from error


@dataclass(frozen=True)
class EnsuredDataset:
    """A dataset that is there."""

    images: Path
    annotations: Path
    made: bool
    """Whether this call made it."""
    note: str
    """Where it comes from."""

    def __str__(self) -> str:
        return f"{self.note}\nimages: {self.images}\nannotations: {self.annotations}"


@dataclass(frozen=True)
class EnsuredShards:
    """Shards that are there."""

    folder: Path
    shards: int
    images: int
    bytes: int
    made: bool
    """Whether this call made or copied them."""
    note: str = ""
    """What you must know of them."""

    def __str__(self) -> str:
        verb = "made now" if self.made else "found"
        size = f"{self.shards} shards, {self.images:,} images, {format_bytes(self.bytes)}"
        return f"{size} in {self.folder} ({verb})" + (f"\n{self.note}" if self.note else "")


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
        ColabUtilsError: only one of ``images`` and ``annotations`` is given.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> workspace = Workspace.open(folder / "drive", ssd=folder / "ssd", profile="none")
        >>> ensure_dataset(workspace, n=2).made, ensure_dataset(workspace, n=2).made
        (True, False)
    """
    if images or annotations:
        if not (images and annotations):
            raise ColabUtilsError("expected images and annotations, found only one of them: name both or neither")
        return EnsuredDataset(Path(images), Path(annotations), False, "Your own dataset.")
    folder = workspace.dataset if part == "train" else workspace.drive / "dataset_val"
    with guard_drive(folder):
        if (folder / "annotations.json").is_file():
            note = "The built-in dataset, found on Drive."
            return EnsuredDataset(folder / "images", folder / "annotations.json", False, note)
        from colab_utils.sample_data import make_dataset

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
    from colab_utils.data.coco import read_coco
    from colab_utils.shards.write import write_shards

    folder = workspace.shards_on_drive if part == "train" else workspace.drive / "shards_val"
    with guard_drive(folder):
        there = (folder / INDEX_NAME).is_file()
        if not there or images or annotations:
            data = ensure_dataset(workspace, images=images, annotations=annotations, n=n, part=part)
            if not there:
                write_shards(data.images, data.annotations, shards=folder, shard_mb=shard_mb)
            elif read_index(folder).fingerprint != read_coco(data.annotations).fingerprint:
                raise ColabUtilsError(
                    f"expected shards of {data.annotations}, found shards of another dataset in {folder}. "
                    "Open the workspace with another Drive folder, or move these shards away."
                )
        return _describe(folder, made=not there)


def ensure_local_shards(workspace: Workspace, **options: Any) -> EnsuredShards:
    """The shards on this machine's SSD: `ensure_shards` with the same options, then what is not there yet is copied.

    Raises:
        ColabUtilsError: as `ensure_shards` and `copy_shards` do.
    """
    source = ensure_shards(workspace, **options)
    return _copy(source.folder, workspace.ssd / source.folder.name, profile=workspace.profile)


def ensure_validation_shards(
    workspace: Workspace, train: EnsuredShards, *, images: str = "", annotations: str = "", n: int = 24
) -> EnsuredShards:
    """Shards to evaluate a model with: yours where you name the data, else what fits the training shards.

    For the built-in dataset that is a second one with other pictures. For data of your own it is a copy of the first
    training shard: the model has seen its images, and ``note`` says so.

    Args:
        workspace: where Drive and SSD are.
        train: the training shards on the SSD, from `ensure_local_shards`.
        images: your validation images.
        annotations: their COCO instance JSON.
        n: images of the built-in dataset where it is made now.

    Raises:
        ColabUtilsError: as `ensure_local_shards` does.
    """
    from colab_utils.sample_data import CATEGORIES

    index = read_index(train.folder)
    built_in = {category["name"] for category in index.categories} == {category["name"] for category in CATEGORIES}
    if images or annotations or built_in:
        return ensure_local_shards(workspace, images=images, annotations=annotations, n=n, part="val")
    size = index.shards[0].bytes + index.shards[0].arrays_bytes
    note = "A copy of the first training shard: the model has seen these images, so its AP is too high."
    return _copy(train.folder, workspace.ssd / "shards_seen", note=note, limit_gb=size / 1e9)


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


def _copy(source: Path, target: Path, *, note: str = "", **options: Any) -> EnsuredShards:
    from colab_utils.shards.copy import copy_shards

    report = copy_shards(source, target, **options)
    return _describe(target, made=report.skipped_shards < report.shards, note=note)


def _describe(folder: Path, *, made: bool, note: str = "") -> EnsuredShards:
    index = read_index(folder)
    return EnsuredShards(folder, len(index.shards), index.images, index.bytes, made, note)
