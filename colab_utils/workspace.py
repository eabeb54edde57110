"""Every notebook starts on a fresh machine: find what an earlier one made on Drive, or make it in under a minute."""

from __future__ import annotations

import errno
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from colab_utils.drive import DriveProfile, get_profile, guard_drive
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.runtime import COLAB_ROOT, format_bytes, is_colab, write_file
from colab_utils.shards.format import INDEX_NAME, ShardIndex, read_index

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


"""Colab's own folder; Google Drive is mounted at ``drive`` in it."""


@dataclass(frozen=True)
class Workspace:
    """Two folders, ``drive`` (slow, lasts) and ``ssd`` (fast, may be lost), and what lies where in them.

    ``profile`` is the speed at which ``drive`` is read: ``None`` for a real Google Drive and for full speed.
    ``note`` says in one line how it was chosen. Use `Workspace.open` to make one.
    """

    drive: Path
    ssd: Path
    profile: DriveProfile | None = None
    note: str = ""

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

        When the sign-in is declined, times out or fails, a slowed folder on this machine stands in for
        Drive; ``note`` and a `ColabUtilsWarning` say so. Outside Colab a slowed folder is used at once.

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
        on_colab = is_colab()
        slow, note = _choose_drive(drive, timeout_s if use_google_drive else None)
        fast = _to_path(ssd or (COLAB_ROOT / "colab_utils" if on_colab else "runs/ssd"))
        if fast == slow or _is_in_mount(fast):
            where = "the drive folder" if fast == slow else "Google Drive"
            raise ColabUtilsError(f"expected ssd on this machine's own disk, found {fast}, {where}: name another one")
        _make_folder(slow, parents=drive is None)
        _make_folder(fast, parents=ssd is None)
        return cls(slow, fast, None if _is_in_mount(slow) else speed, note)

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
        if self.profile is not None:
            speed = f"slowed folder, {self.profile}"
        else:
            speed = "Google Drive" if _is_in_mount(self.drive) else "full speed"
        return f"Drive: {self.drive} ({speed})\nSSD: {self.ssd}" + (f"\nNote: {self.note}" if self.note else "")


def _choose_drive(drive: str | Path | None, timeout_s: float | None) -> tuple[Path, str]:
    """The slow folder, and one line on why it is that; ``timeout_s=None`` forbids mounting."""
    chosen = None if drive is None else _to_path(drive)
    if chosen is not None and not _is_in_mount(chosen):
        return chosen, f"{chosen} stands in for Google Drive"
    if not is_colab():
        chosen = _to_path("runs/drive")
        return chosen, f"{chosen} stands in for Google Drive, which is mounted only on Colab"
    if chosen is None and timeout_s is None:
        chosen = COLAB_ROOT / "slow_drive"
        return chosen, f"{chosen} stands in for Google Drive, as you asked"
    failure = _mount_google_drive(timeout_s)
    if not failure:
        return chosen or _find_my_drive() / "colab_utils", "Google Drive is mounted: what you put there lasts"
    if chosen is not None:
        raise ColabUtilsError(
            f"expected {chosen} in Google Drive, found Drive not mounted ({failure}): open the workspace "
            f"again and sign in, or choose a folder outside {COLAB_ROOT / 'drive'}"
        )
    chosen = COLAB_ROOT / "slow_drive"
    note = f"Google Drive is not mounted ({failure}): {chosen} stands in for it, and is lost with this machine"
    warnings.warn(note, ColabUtilsWarning, stacklevel=3)
    return chosen, note


def _mount_google_drive(timeout_s: float | None) -> str:
    """Mount Google Drive where it is not; the answer says what went wrong, empty when it is there."""
    if os.path.isdir(_find_my_drive()):
        return ""
    if timeout_s is None:
        return "use_google_drive is False"
    mount_point = COLAB_ROOT / "drive"
    try:
        from google.colab import drive as google_drive

        # A mount that died still stands in the mount table: only a forced one replaces it.
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


def _is_in_mount(folder: Path) -> bool:
    return is_colab() and folder.is_relative_to(COLAB_ROOT / "drive")


def _to_path(path: str | Path) -> Path:
    return Path(os.path.abspath(Path(path).expanduser()))


def _make_folder(folder: Path, *, parents: bool) -> None:
    """Make a folder; the parents of one that you named are not made, so that a slip of the pen is noticed."""
    try:
        with guard_drive(folder):
            folder.mkdir(parents=parents, exist_ok=True)
    except FileNotFoundError:
        raise ColabUtilsError(
            f"expected the folder {folder.parent}, found nothing there: make it first, or correct the path"
        ) from None
    except (FileExistsError, NotADirectoryError):
        raise ColabUtilsError(f"expected a folder at {folder}, found a file in its place: name another one") from None
    except OSError as error:
        raise ColabUtilsError(
            f"expected to make the folder {folder}, found: {error.strerror}. Choose a folder that you may write to"
        ) from error


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
    from colab_utils.sample_data import CATEGORIES
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
