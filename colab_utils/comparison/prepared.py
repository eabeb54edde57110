"""The images of a comparison as loose files, saved tensors or shards, on Drive and on the SSD."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from colab_utils.data.coco import read_coco, write_subset
from colab_utils.data.image_paths import require_folder
from colab_utils.drive import is_on_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.image_copy import copy_images
from colab_utils.machine import require_space
from colab_utils.places import require_local_path
from colab_utils.processes import ThreadPool
from colab_utils.progress import show_progress
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.write import write_shards
from colab_utils.slow_drive import DriveProfile, read_at_full_speed, slow_down

# Number of files that are read at the same time. `copy_images` reads at least the second number of
# files at the same time.
_STREAMS = 4
_IMAGE_STREAMS = 16
# Bytes of a shard of a large dataset: the default of `write_shards`.
_SHARD_BYTES = 128e6


@dataclass(frozen=True)
class PreparedFiles:
    """One kind of prepared data: its files and what they cost."""

    folder: Path
    """The folder of the files."""
    files: tuple[Path, ...]
    """The files that a strategy reads. The folder may hold others."""
    once_s: float = 0.0
    """Seconds to make the files, once."""
    session_s: float = 0.0
    """Seconds to copy the files to the empty disk of a new machine, in each session."""

    @property
    def bytes(self) -> int:
        """Return the size of all files together, in bytes."""
        return sum(path.stat().st_size for path in self.files)


class PreparedData:
    """The first ``count`` images of a dataset, without bad ones, as files of several kinds. Each
    kind is made when it is first needed.

    Attributes:
        images: the image folder. It stands for Drive.
        annotations: COCO JSON of the images that are compared.
        reference: the samples of these images, as torchvision's references give them.
        total: number of images in the dataset.
        fingerprint: XXH3-128 of the dataset's annotations file.
        bad: for each image that was left out, the reason.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        folder: the folder for the prepared data.
        profile: how slow Drive is. In a block of `slow_drive`, reads from Drive really take this
            long. For copies from Drive, the time is only computed. None slows nothing down.
        count: number of images to take from the dataset, at most.

    Raises:
        ColabUtilsError: if there is no image folder, no annotations file, or no usable image.
    """

    def __init__(
        self,
        images: str | Path,
        annotations: str | Path,
        folder: str | Path,
        *,
        count: int,
        profile: DriveProfile | None,
    ) -> None:
        self.images = require_local_path(images)
        self.folder = require_local_path(folder)
        self.profile = profile
        require_folder(images)
        coco = read_coco(require_local_path(annotations))
        self.total = len(coco)
        self.fingerprint = coco.fingerprint
        self.drive = self.folder / "drive"
        self.ssd = self.folder / "ssd"
        if is_on_drive(folder):
            self.ssd = Path(tempfile.gettempdir(), "colab_utils-ssd")
        rows = range(min(len(coco), count))
        dataset = CocoFolder(images, coco, streams=1)
        with ThreadPool(_STREAMS) as pool:
            reasons = pool.map(partial(_explain_bad, dataset), rows)
            errors = list(show_progress("decoding the images", reasons, total=len(rows)))
        self.bad = [error for error in errors if error]
        usable = [row for row, error in enumerate(errors) if not error]
        if not usable:
            nothing = f"{annotations} lists no image: choose an instances file."
            why = f"The first error: {self.bad[0]}" if self.bad else nothing
            raise ColabUtilsError(f"No image in {images} can be used. {why}")
        self.annotations = write_subset(coco, usable, self.folder / "annotations.json")
        # The dataset classes that people write usually read one file after the other.
        self.reference = CocoFolder(images, self.annotations, streams=1)
        self.name = f"{coco.fingerprint[:8]}-{len(usable)}"
        self._made: dict[str, PreparedFiles] = {}
        self.ssd.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return len(self.reference)

    def get(self, kind: str) -> PreparedFiles:
        """Return one kind of files. They are made if they are missing.

        Args:
            kind: ``files``, ``tensors`` or ``shards``, followed by ``_on_drive`` or ``_on_ssd``.

        Raises:
            ColabUtilsError: if the files cannot be made, or need more disk space than is free.
        """
        if kind not in self._made:
            with read_at_full_speed():
                self._made[kind] = self._prepare(kind)
        return self._made[kind]

    def _prepare(self, kind: str) -> PreparedFiles:
        name, _, disk = kind.partition("_on_")
        if disk == "ssd":
            return self._copy(name, self.get(f"{name}_on_drive"))
        if name == "files":
            paths = [Path(str(self.reference.find_path(i))) for i in range(len(self))]
            return PreparedFiles(self.images, tuple(paths))
        return self._make(name)

    @contextmanager
    def slow_drive(self) -> Iterator[None]:
        """Read from Drive at the speed of the profile while the block runs.

        The image folder and the folder ``drive`` stand for Drive. All other folders are read at
        full speed. Processes that start within the block have the same speeds.
        """
        with read_at_full_speed():
            slow_down(self.drive, self.profile)
            # One of these folders may lie in another. The speed of the inner one then counts.
            slow_down(self.folder, None)
            slow_down(self.ssd, None)
            slow_down(self.images, self.profile)
            yield

    def _make(self, name: str) -> PreparedFiles:
        """Write one kind of files to Drive, and time it. Files that are there are replaced."""
        target = self.drive / f"{name}-{self.name}"
        source = self.get("files_on_ssd" if name == "shards" else "shards_on_ssd")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        began_s = perf_counter()
        if name == "shards":
            # A shard gets an eighth of the bytes or less, so that there are about 8 shards or more.
            shard_mb = max(0.01, min(4.0, source.bytes / 8e6))
            write_shards(source.folder, self.annotations, shards=target, shard_mb=shard_mb)
        else:
            dataset = ShardDataset(source.folder)
            image, objects = dataset[0]
            needed = len(dataset) * (image.nbytes + objects["masks"].nbytes)
            require_space(target, needed, "or compare fewer images (max_images)")
            _write_tensors(dataset, target)
        once_s = source.once_s + source.session_s + perf_counter() - began_s
        files = tuple(sorted(path for path in target.iterdir() if path.is_file()))
        return PreparedFiles(target, files, once_s)

    def _copy(self, name: str, made: PreparedFiles) -> PreparedFiles:
        """Copy one kind of files from Drive to the local disk, and time it.

        Files are read at full speed. The time that Drive would take is added.
        """
        target = self.ssd / f"{name}-{self.name}"
        copies = tuple(target / path.relative_to(made.folder) for path in made.files)
        began_s = perf_counter()
        shutil.rmtree(target, ignore_errors=True)
        opened = len(made.files) / _IMAGE_STREAMS
        if name == "shards":
            copy_shards(made.folder, target)
            opened = 2 * made.bytes / _SHARD_BYTES / _STREAMS
        else:
            annotations = self.annotations if name == "files" else None
            copy_images(made.folder, target, annotations=annotations)
        seconds = perf_counter() - began_s
        if self.profile is not None:
            seconds += opened * self.profile.open_s
            seconds += made.bytes / self.profile.bytes_per_s
        return replace(made, folder=target, files=copies, session_s=seconds)


def _explain_bad(dataset: CocoFolder, row: int) -> str:
    """Return why an image cannot be used; "" if it can."""
    try:
        dataset[row]
    except ColabUtilsError as error:
        return str(error)
    return ""


def _write_tensors(dataset: ShardDataset, target: Path) -> None:
    """Write a ``.pt`` file for each sample: the uint8 image, and the target."""
    for row in range(len(dataset)):
        image, objects = dataset[row]
        torch.save((image.contiguous(), objects), target / f"{row:07d}.pt")
