"""Where things lie, and what a notebook finds there or makes: every notebook starts on a machine of
its own.
"""

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from colab_utils.data.archives import is_archive, unpack_dataset
from colab_utils.data.coco_json import read_fingerprint
from colab_utils.drive import guard_drive, is_on_drive
from colab_utils.errors import ColabUtilsError, describe_error
from colab_utils.files import hash_bytes, write_file
from colab_utils.machine import COLAB_ROOT, is_colab
from colab_utils.os_errors import explain_os_error
from colab_utils.require import require_choice, require_local_path
from colab_utils.sample_data import make_dataset
from colab_utils.shards.write import ShardReport, find_index, find_recipe, write_shards
from colab_utils.slow_drive import DriveProfile, get_profile, read_at_full_speed, slow_down

SCENES: dict[str, str | None] = {"bad day": "bad", "good day": "typical", "my Drive, my GPU": None}
"""What a notebook's form offers, and the Drive profile of each; None stands for your Google Drive,
as it is.
"""

BUILT_IN = "built-in"
"""The name of the dataset that `make_dataset` makes."""


@dataclass(frozen=True)
class Workspace:
    """Two folders, ``drive`` (slow, lasts) and ``ssd`` (fast, may be lost). Make one with
    `Workspace.open`.
    """

    drive: Path
    ssd: Path
    profile: DriveProfile | None
    """The speed at which ``drive`` is read: ``None`` for a real Google Drive and for full speed."""

    @classmethod
    def open(
        cls,
        drive: str | Path | None = None,
        *,
        ssd: str | Path | None = None,
        scene: str = "bad day",
    ) -> Self:
        """Make the two folders, and slow the first one down as the scene says, in child processes
        too.

        "bad day" and "good day" ask for nothing: a slowed folder on this machine stands for Google
        Drive, and `emulated` for a GPU. "my Drive, my GPU" mounts Google Drive on Colab, which asks
        you to sign in; outside Colab it reads the folder as fast as it goes.

        Args:
            drive: the slow folder, used as given. Default: ``/content/slow_drive``, or
                ``colab_utils`` in your Google Drive where the scene mounts it; outside Colab
                ``./runs/drive``.
            ssd: the fast folder. Default: ``/content/colab_utils``; outside Colab ``./runs/ssd``.
            scene: a name in `SCENES`.

        Raises:
            ColabUtilsError: a folder cannot be made, there is no such scene, or Google Drive, which
                the scene asks for, cannot be mounted.

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
                f"The folder ssd is {fast}, which is on Drive, or the folder drive itself. Name a "
                "folder on this machine's own disk."
            )
        # A folder above a named one is not made, so that a typing error in a name is noticed.
        _make_folder("DRIVE_FOLDER", slow, parents=not drive)
        _make_folder("SSD_FOLDER", fast, parents=not ssd)
        slow_down(slow, speed)
        slow_down(fast, None)
        return cls(slow, fast, speed)

    @property
    def emulated(self) -> bool:
        """Return whether the training step is to be emulated: where Drive is slowed, and where
        there is no GPU.
        """
        import torch

        return self.profile is not None or not torch.cuda.is_available()

    def publish(self, notebook: str, /, **numbers: Any) -> Path:
        """Write a notebook's numbers to ``results/NOTEBOOK.json`` on Drive, for the other notebooks
        and the demo.

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
            real = "Google Drive: drive.flush_and_unmount() uploads it"
        return f"Drive: {self.drive} ({self.profile or real})\nSSD: {self.ssd}"


def _make_folder(setting: str, folder: Path, *, parents: bool) -> None:
    try:
        with guard_drive(folder):
            folder.mkdir(parents=parents, exist_ok=True)
    except OSError as error:
        reason = explain_os_error(error, f"Name another {setting}.")
        raise ColabUtilsError(f"{folder} cannot be made: {reason}") from error


def _write_json(path: Path, content: dict[str, Any]) -> Path:
    with guard_drive(path):
        path.parent.mkdir(exist_ok=True)
        write_file(path, json.dumps(content).encode())
    return path


def _choose_drive(drive: str | Path | None, scene: str) -> Path:
    """Return the slow folder. Google Drive is mounted where the folder lies on it."""
    mount = COLAB_ROOT / "drive"
    chosen = _to_path(drive) if drive else None
    if SCENES[scene] is not None:
        if chosen and is_on_drive(chosen):
            raise ColabUtilsError(
                f"DRIVE_FOLDER is {chosen}, and SCENE {scene!r} mounts no Drive. Leave it empty, "
                "or choose the SCENE that mounts Drive."
            )
    elif is_colab() and (chosen is None or chosen.is_relative_to(mount)):
        _mount_google_drive(mount)
        return chosen or mount / "MyDrive" / "colab_utils"
    if chosen is not None:
        return chosen
    return COLAB_ROOT / "slow_drive" if is_colab() else _to_path("runs/drive")


def _mount_google_drive(mount: Path) -> None:
    """Mount Google Drive where it is not mounted."""
    failure = "no MyDrive appeared there"
    if not os.path.isdir(mount / "MyDrive"):
        try:
            from google.colab import drive as google_drive

            # A mount that died is still in the table of mounts: only a forced mount replaces it.
            google_drive.mount(str(mount), force_remount=True, timeout_ms=120_000)
        except Exception as error:
            # Colab's message errors have no public base class.
            failure = describe_error(error)
    if not os.path.isdir(mount / "MyDrive"):
        raise ColabUtilsError(
            f"Google Drive is not mounted in {mount} ({failure}). Sign in when it asks, choose "
            f"another SCENE, or name a DRIVE_FOLDER outside {mount}."
        )


def _to_path(path: str | Path) -> Path:
    return Path(os.path.abspath(require_local_path(path).expanduser()))


@dataclass(frozen=True)
class EnsuredDataset:
    """A dataset that is there, and the folder that bears its name."""

    name: str
    """Made of the names of image folder and JSON, and a hash of their paths or of a zip's
    address.
    """
    images: Path
    annotations: Path
    note: str
    """Where it comes from."""
    shards_on_drive: Path
    """Where its shards belong."""
    shards_on_ssd: Path
    """Where their copy belongs."""

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
    """Return the dataset that you name now or named earlier, or else the built-in one on Drive. The
    built-in one is made now where it is missing.

    What you name, ``settings.json`` on Drive remembers. In a scene that slows Drive, your images
    are slowed, too.

    Args:
        workspace: where Drive is.
        images: your image folder, a zip of a COCO export, or its URL, which are unpacked to the
            SSD; "built-in" is the built-in dataset again. Empty takes what you named last, else the
            built-in dataset.
        annotations: your COCO instance JSON; its name in the zip, where that holds several.
        n: images of a built-in dataset that is made now, one of 13 of them a photo of 12
            megapixels; one that is there is taken as it is.
        part: ``"val"`` is another dataset, to evaluate with.

    Raises:
        ColabUtilsError: only one of ``images`` and ``annotations`` is given, or they are not there;
            or what `unpack_dataset` raises.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> scene = "my Drive, my GPU"
        >>> workspace = Workspace.open(folder / "drive", ssd=folder / "ssd", scene=scene)
        >>> ensure_dataset(workspace, n=2).note, ensure_dataset(workspace, n=2).note
        ('The built-in dataset, made now.', 'The built-in dataset, found on Drive.')
    """
    # Of each part of the data, where its images and annotations are.
    settings = dict[str, list[str]]()
    with guard_drive(workspace.drive), suppress(FileNotFoundError, ValueError, TypeError):
        settings.update(json.loads((workspace.drive / "settings.json").read_bytes()))
    if images or annotations:
        settings[part] = _locate(images, annotations)
    paths = settings.get(part, [])
    if paths:
        pictures, text = _find_own(workspace, paths)
        note = "Your own dataset."
        if workspace.profile:
            note += f" The scene slows down what is read of its images: {workspace.profile}."
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
    if paths and not is_archive(paths[0]):
        # Earlier versions gave several datasets this name.
        earlier = find_index(workspace.drive / "shards" / name)
        if earlier is None or earlier.fingerprint != read_fingerprint(text):
            name += f"-{hash_bytes(*map(os.fsencode, paths))[:8]}"
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
    """Return a report of a dataset's shards on Drive. Shards that are missing are made, and a job
    that stopped half-way is completed.

    They are made at full speed in every scene: to see what that takes on Drive, call
    `write_shards`.

    Raises:
        ColabUtilsError: as `write_shards` does; the shards there are of another dataset.
    """
    folder = data.shards_on_drive
    with guard_drive(folder), read_at_full_speed():
        # Another notebook may have stopped half-way: its settings go on.
        begun = find_recipe(folder) or {"shard_mb": 8}
        names = begun.keys() & {"storage", "min_size", "max_size", "shard_mb"}
        settings = {name: begun[name] for name in names}
        return write_shards(data.images, data.annotations, shards=folder, **settings)


def _locate(images: str, annotations: str) -> list[str]:
    """Return the places of the images and annotations that you name. The list is empty for the
    built-in ones.
    """
    if images == BUILT_IN:
        return []
    # The name of the annotations is a name in the zip.
    if is_archive(images):
        return [images if "://" in images else str(_to_path(images)), annotations]
    if not (images and annotations):
        raise ColabUtilsError("Only one of IMAGES and ANNOTATIONS is named. Name both or neither.")
    return [str(_to_path(images)), str(_to_path(annotations))]


def _name_dataset(paths: list[str], part: str) -> str:
    """Return the name that the dataset's folders have."""
    if not paths:
        return BUILT_IN if part == "train" else f"{BUILT_IN}-{part}"
    stem = Path(paths[0]).name
    # Many exports have the same name.
    if is_archive(paths[0]):
        stem = f"{Path(re.split('[?#]', paths[0])[0]).stem}-{hash_bytes(paths[0].encode())[:8]}"
    return re.sub(r"[^\w.-]+", "_", f"{stem}-{Path(paths[1]).stem}").strip("-")
