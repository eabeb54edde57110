"""The folders of a notebook, and the dataset and the shards in them.

A notebook may start on a new machine, so it makes whatever is missing.
"""

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from colab_utils.course.sample_data import make_dataset
from colab_utils.data.archives import is_archive, unpack_dataset
from colab_utils.drive import (
    explain_leftovers,
    find_mount,
    guard_drive,
    is_mounted,
    is_on_drive,
)
from colab_utils.errors import ColabUtilsError, describe_error, escape, explain_os_error
from colab_utils.files import hash_bytes, write_file
from colab_utils.machine import COLAB_ROOT, is_colab
from colab_utils.places import require_local_path
from colab_utils.require import require_choice
from colab_utils.shards.verify import inspect_folder
from colab_utils.shards.write import ShardReport, write_shards
from colab_utils.slow_drive import DriveProfile, get_profile, read_at_full_speed, slow_down

SCENES: dict[str, str | None] = {"bad day": "bad", "good day": "typical", "my Drive, my GPU": None}
"""The scenes that a notebook offers, and the Drive profile of each. None stands for your own Google
Drive at its real speed.
"""

BUILT_IN = "built-in"
"""The name of the dataset that `make_dataset` makes."""

# The end of a stored URL from which a password or a query was taken away.
_NOT_STORED = "?..."


@dataclass(frozen=True)
class Workspace:
    """The two folders of a notebook: ``drive`` is slow and lasts, ``ssd`` is fast and may be lost.

    Make a workspace with `Workspace.open`.
    """

    drive: Path
    ssd: Path
    profile: DriveProfile | None
    """The speed to which ``drive`` is slowed down. ``None`` does not slow it down."""

    @classmethod
    def open(
        cls,
        drive: str | Path | None = None,
        *,
        ssd: str | Path | None = None,
        scene: str = "bad day",
    ) -> Self:
        """Make the two folders, and slow ``drive`` down as the scene says.

        Processes that this one starts later read ``drive`` at the same speed. The scenes "bad day"
        and "good day" need neither Google Drive nor a GPU: a slowed folder on this machine imitates
        Drive, and an emulated step takes the place of training (see `emulated`). In both, torch
        waits half a second, not five, for each worker of a loop that you break off. On Colab, the
        scene "my Drive, my GPU" mounts Google Drive, and Colab asks you to sign in. Outside Colab,
        this scene reads ``drive`` at full speed.

        Args:
            drive: The slow folder. Default on Colab: ``colab_utils`` in your Google Drive if the
                scene mounts Drive, else ``/content/slow_drive``. Default outside Colab:
                ``./runs/drive``.
            ssd: The fast folder. Default on Colab: ``/content/colab_utils``. Default outside Colab:
                ``./runs/ssd``.
            scene: A name in `SCENES`.

        Raises:
            ColabUtilsError: A folder cannot be made, the scene does not exist, ``ssd`` is on Drive
                or is the same folder as ``drive``, or Google Drive cannot be mounted.

        Example:
            >>> import tempfile
            >>> folder = Path(tempfile.mkdtemp())
            >>> workspace = Workspace.open(folder / "drive", ssd=folder / "ssd", scene="good day")
            >>> workspace.profile.name, workspace.emulated
            ('typical', True)
        """
        require_choice("SCENE", scene, SCENES)
        slow = _choose_drive(drive, scene)
        speed = get_profile(SCENES[scene])
        fast = _to_path(ssd or (COLAB_ROOT / "colab_utils" if is_colab() else "runs/ssd"))
        if fast == slow or is_on_drive(fast):
            raise ColabUtilsError(
                f"The folder ssd is {fast}, which is on Drive or is the same as the folder drive. "
                "Name another folder on this machine's own disk."
            )
        # The parent of a folder that you name is not made, so that a typing error in its path is
        # noticed.
        for setting, folder, named in (("DRIVE_FOLDER", slow, drive), ("SSD_FOLDER", fast, ssd)):
            try:
                with guard_drive(folder):
                    folder.mkdir(parents=not named, exist_ok=True)
            except OSError as error:
                reason = explain_os_error(error, f"Name another {setting}.")
                raise ColabUtilsError(f"{folder} cannot be made: {reason}") from None
        slow_down(slow, speed)
        slow_down(fast, None)
        if speed is not None:
            from torch.utils.data import _utils

            # torch waits half a second, not five, for each worker of a loop that is broken off. On
            # a slow Drive, workers are nearly always in the middle of a batch.
            _utils.MP_STATUS_CHECK_INTERVAL = 0.5
        return cls(slow, fast, speed)

    @property
    def emulated(self) -> bool:
        """Return whether the training step is to be emulated.

        It is emulated if ``drive`` is slowed down, or if there is no GPU.
        """
        import torch

        return self.profile is not None or not torch.cuda.is_available()

    def publish(self, notebook: str, /, **numbers: Any) -> Path:
        """Write a notebook's numbers to ``results/NOTEBOOK.json`` in ``drive``.

        Other notebooks and the demo read them.

        Example:
            >>> import tempfile
            >>> folder = Path(tempfile.mkdtemp())
            >>> workspace = Workspace.open(folder / "drive", ssd=folder / "ssd")
            >>> workspace.publish("03", shards=2).read_text()
            '{"shards": 2}'
        """
        return _write_json(self.drive / "results" / f"{notebook}.json", numbers)

    def __str__(self) -> str:
        real = "full speed"
        if is_on_drive(self.drive):
            real = "Google Drive; drive.flush_and_unmount() uploads new files"
        return f"Drive: {self.drive} ({self.profile or real})\nSSD: {self.ssd}"


def _write_json(path: Path, content: dict[str, Any]) -> Path:
    with guard_drive(path):
        path.parent.mkdir(exist_ok=True)
        write_file(path, json.dumps(content).encode())
    return path


def _choose_drive(drive: str | Path | None, scene: str) -> Path:
    """Return the slow folder. If it lies on Google Drive, mount Drive first."""
    mount = COLAB_ROOT / "drive"
    if SCENES[scene] is not None:
        if drive and is_on_drive(drive):
            raise ColabUtilsError(
                f"DRIVE_FOLDER is {drive}, and SCENE {scene!r} mounts no Drive. Leave "
                "DRIVE_FOLDER empty, or choose the SCENE that mounts Drive."
            )
    elif is_colab() and (not drive or find_mount(drive) == mount):
        _mount_google_drive(mount)
        return _to_path(drive or mount / "MyDrive" / "colab_utils")
    if drive:
        return _to_path(drive)
    return COLAB_ROOT / "slow_drive" if is_colab() else _to_path("runs/drive")


def _mount_google_drive(mount: Path) -> None:
    """Mount Google Drive if it is not mounted yet."""
    failure = "no MyDrive appeared there"
    if not _is_ready(mount):
        try:
            from google.colab import drive as google_drive

            # A dead mount stays in the table of mounts, and only a forced mount replaces it.
            google_drive.mount(str(mount), force_remount=True, timeout_ms=120_000)
        except Exception as error:
            # The errors that Colab raises here have no public base class.
            failure = describe_error(error)
    if not _is_ready(mount):
        cure = explain_leftovers(mount) or "Sign in when Colab asks. "
        raise ColabUtilsError(
            f"Google Drive is not mounted in {mount} ({failure}). {cure}Or choose another SCENE, "
            f"or name a DRIVE_FOLDER outside {mount}."
        )


def _is_ready(mount: Path) -> bool:
    return is_mounted(mount) and os.path.isdir(mount / "MyDrive")


def _to_path(path: str | Path) -> Path:
    return Path(os.path.abspath(require_local_path(path)))


@dataclass(frozen=True)
class EnsuredDataset:
    """A dataset that exists, and the folders for its shards."""

    name: str
    """Name of the folders for its shards. For your own dataset, it is the name of the image folder
    (or zip), and a hash of the paths.
    """
    images: Path
    annotations: Path
    note: str
    """A sentence that says where the dataset comes from."""
    shards_on_drive: Path
    """Folder for its shards on Drive."""
    shards_on_ssd: Path
    """Folder for the copy of the shards on the SSD."""

    def __str__(self) -> str:
        return f"{self.note}\nimages: {self.images}\nannotations: {self.annotations}"


def ensure_dataset(
    workspace: Workspace,
    *,
    images: str = "",
    annotations: str = "",
    n: int = 160,
    part: str = "train",
) -> EnsuredDataset:
    """Return your own dataset or, if you named none, the built-in dataset.

    The paths of your dataset are stored in ``settings.json`` on Drive, so that you name them only
    once. Only a URL with a password or a query must be named each time, because both may be secret
    and are not stored. The built-in dataset is made on Drive if it is not there yet. In a scene
    that slows Drive down, your own images are slowed down, too.

    Args:
        workspace: The folders of the notebook.
        images: Your image folder, or the path or URL of a zip with a COCO export, which is unpacked
            to the SSD. "built-in" returns to the built-in dataset. Default: the images that you
            named last, else the built-in dataset.
        annotations: Your COCO instance JSON. For a zip, the name of the JSON in it, which is needed
            only if the zip holds several.
        n: Number of images of the built-in dataset, if it is made now. One image in 13 is a photo
            of 12 megapixels. A built-in dataset that exists keeps its number of images.
        part: ``"train"``, or ``"val"`` for a second dataset, which is used to evaluate.

    Raises:
        ColabUtilsError: Only one of ``images`` and ``annotations`` is given, one of them does not
            exist, a URL must be named again, or a zip cannot be unpacked (see `unpack_dataset`).

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> scene = "my Drive, my GPU"
        >>> workspace = Workspace.open(folder / "drive", ssd=folder / "ssd", scene=scene)
        >>> ensure_dataset(workspace, n=2).note, ensure_dataset(workspace, n=2).note
        ('The built-in dataset, made now.', 'The built-in dataset, found on Drive.')
    """
    # The paths of images and annotations, for each part that has a dataset of your own.
    settings = dict[str, list[str]]()
    with guard_drive(workspace.drive), suppress(FileNotFoundError, ValueError, TypeError):
        settings.update(json.loads((workspace.drive / "settings.json").read_bytes()))
    paths = settings.get(part, [])
    if images or annotations:
        paths = _locate(images, annotations)
        settings[part] = [_hide_secrets(images), *paths[1:]] if "://" in images else paths
    elif paths and paths[0].endswith(_NOT_STORED):
        raise ColabUtilsError(
            f"IMAGES was {paths[0].removesuffix(_NOT_STORED)}, and the password or the query of a "
            "URL is not stored. Set IMAGES to the whole URL again."
        )
    if paths:
        pictures, text = _find_own(workspace, paths)
        note = "Your own dataset."
        if workspace.profile:
            note += f" The scene slows down the reads of its images: {workspace.profile}."
    else:
        folder = workspace.drive / ("dataset" if part == "train" else "dataset_val")
        pictures = folder / "images"
        text = folder / "annotations.json"
        note = "The built-in dataset, found on Drive."
        with guard_drive(folder):
            if not _is_there(pictures, text):
                make_dataset(folder, n=n, seed=0 if part == "train" else 1, photos=n // 13)
                note = "The built-in dataset, made now."
    slow_down(pictures, workspace.profile)
    if images:
        _write_json(workspace.drive / "settings.json", settings)
    name = _name_dataset(paths, part)
    return EnsuredDataset(
        name,
        pictures,
        text,
        note,
        shards_on_drive=workspace.drive / "shards" / name,
        shards_on_ssd=workspace.ssd / "shards" / name,
    )


def _is_there(images: Path, annotations: Path) -> bool:
    return images.is_dir() and annotations.is_file()


def _find_own(workspace: Workspace, paths: list[str]) -> tuple[Path, Path]:
    images, annotations = map(Path, paths)
    if is_archive(paths[0]):
        images, annotations = unpack_dataset(paths[0], workspace.ssd / "datasets", paths[1])
    with guard_drive(images):
        if _is_there(images, annotations):
            return images, annotations
    raise ColabUtilsError(
        f"Your own dataset is not in {' and '.join(paths)}. Check IMAGES and ANNOTATIONS, choose "
        f"the SCENE that mounts Drive, or set IMAGES to {BUILT_IN!r}."
    )


def ensure_shards(data: EnsuredDataset) -> ShardReport:
    """Write a dataset's shards to Drive if they are missing, and return a report of them.

    A job that stopped half-way is completed. In every scene, Drive is read at full speed here. To
    see how long preprocessing takes on a slow Drive, call `write_shards` instead.

    Raises:
        ColabUtilsError: The folder holds shards of another dataset, or `write_shards` fails.
    """
    folder = data.shards_on_drive
    with guard_drive(folder), read_at_full_speed():
        # If another notebook stopped half-way, its settings are used again. Small shards of the
        # small built-in dataset arrive one after the other, as those of a large one do.
        begun = inspect_folder(folder)
        settings: dict[str, Any] = {"shard_mb": 3 if data.name == BUILT_IN else 128}
        if begun is not None:
            names = ("storage", "min_size", "max_size", "shard_mb")
            settings = {name: begun.recipe[name] for name in names}
        return write_shards(data.images, data.annotations, shards=folder, **settings)


def _locate(images: str, annotations: str) -> list[str]:
    """Return the paths of your images and annotations; an empty list for the built-in dataset."""
    if images == BUILT_IN:
        return []
    # For a zip, ``annotations`` is the name of a file in the zip, so it is not made a full path.
    if is_archive(images):
        return [images if "://" in images else str(_to_path(images)), annotations]
    if not (images and annotations):
        raise ColabUtilsError("Only one of IMAGES and ANNOTATIONS is named. Name both or neither.")
    return [str(_to_path(images)), str(_to_path(annotations))]


def _hide_secrets(url: str) -> str:
    """Return a URL as it is stored. Instead of a password or a query, it has a mark at its end."""
    shown = escape(url)
    return url if shown == url else shown + _NOT_STORED


def _name_dataset(paths: list[str], part: str) -> str:
    """Return the name of the dataset's shard folders."""
    if not paths:
        return BUILT_IN if part == "train" else f"{BUILT_IN}-{part}"
    stem = Path(re.split("[?#]", paths[0])[0]).stem
    name = re.sub(r"[^\w.-]+", "_", stem).strip("-")
    # Many exports have the same names, so a hash of the whole paths or URL is added.
    return f"{name}-{hash_bytes(*map(os.fsencode, paths))[:8]}"
