"""Prepared data: the same images as loose files, saved tensors, arrays or shards, on Drive and on the local disk."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from colab_utils.data.coco import read_coco, write_subset
from colab_utils.drive import DriveProfile, is_on_drive, read_file
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.runtime import require_space, show_progress
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.write import write_shards

__all__ = ["PreparedData", "PreparedFiles"]

_CURE = "or compare fewer images"  # where the disk is full
_STREAMS = 4  # files read at the same time: as many as `copy_shards` reads
_SHARD_BYTES = 128e6  # of the shards of a large dataset, as `write_shards` makes them


@dataclass(frozen=True)
class PreparedFiles:
    """One kind of prepared data: its files and what they cost."""

    folder: Path
    """Where it lies."""
    files: tuple[Path, ...]
    """The files that a strategy reads, and no other file of the folder."""
    once_s: float = 0.0
    """Seconds to make it, once."""
    session_s: float = 0.0
    """Seconds to copy it to the empty disk of a new machine, in each session."""

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(path.stat().st_size for path in self.files)


class PreparedData:
    """The first ``count`` usable images of a dataset as files of several kinds, each made when it is first needed.

    Attributes:
        images: the image folder; it stands for Drive.
        annotations: COCO JSON of the compared images.
        reference: their samples, as torchvision's references give them.
        total: images of the dataset.
        fingerprint: of the dataset's annotations.
        bad: why images were left out.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        folder: where data is prepared.
        profile: the speed of Drive, for the seconds of a copy; all is read at full speed.
        count: images at most.

    Raises:
        ColabUtilsError: no image folder, no annotations, or no usable image.
    """

    def __init__(
        self, images: str | Path, annotations: str | Path, folder: str | Path, *, count: int,
        profile: DriveProfile | None,
    ) -> None:  # fmt: skip
        self.images, self.folder, self.profile = Path(images), Path(folder), profile
        coco = read_coco(annotations)
        self.total, self.fingerprint = len(coco), coco.fingerprint
        self.drive = self.folder / "drive"
        self.ssd = Path(tempfile.gettempdir(), "colab_utils-ssd") if is_on_drive(folder) else self.folder / "ssd"
        rows = range(min(len(coco), count))
        dataset = CocoFolder(images, write_subset(coco, rows, self.folder / "all.json"))
        errors = _run_in_threads("decoding the images", partial(_explain_bad, dataset), rows)
        self.bad = [error for error in errors if error]
        usable = [row for row, error in enumerate(errors) if not error]
        if not usable:
            why = f"The first: {self.bad[0]}" if self.bad else f"{annotations} names none: name an instances file."
            raise ColabUtilsError(f"expected usable images in {images}, found none. {why}")
        self.annotations = write_subset(coco, usable, self.folder / "annotations.json")
        self.reference = CocoFolder(images, self.annotations)
        self.name = f"{coco.fingerprint[:8]}-{len(usable)}"
        self._made: dict[str, PreparedFiles] = {}
        self.ssd.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return len(self.reference)

    def get(self, kind: str) -> PreparedFiles:
        """One kind by its name: ``files``, ``tensors``, ``arrays`` or ``shards``, then ``_on_drive`` or ``_on_ssd``.

        Raises:
            ColabUtilsError: it cannot be made, or needs more disk than is free.
        """
        if kind not in self._made:
            name, _, disk = kind.partition("_on_")
            if disk == "ssd":
                self._made[kind] = self._copy(name, self.get(f"{name}_on_drive"))
            elif name == "files":
                self._made[kind] = PreparedFiles(self.images, tuple(map(self.reference.find_path, range(len(self)))))
            else:
                self._made[kind] = self._make(name)
        return self._made[kind]

    def _make(self, name: str) -> PreparedFiles:
        """Write one kind to Drive in each comparison, and time that."""
        target = self.drive / f"{name}-{self.name}"
        source = self.get("files_on_ssd" if name == "shards" else "shards_on_ssd")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        began_s = perf_counter()
        if name == "shards":
            shard_mb = max(0.01, min(4.0, source.bytes / 8e6))  # 8 shards or more
            write_shards(source.folder, self.annotations, shards=target, shard_mb=shard_mb)
        else:
            dataset = ShardDataset(source.folder)
            image, found = dataset[0]
            require_space(target, len(dataset) * (image.nbytes + found["masks"].nbytes), _CURE)
            (_write_tensors if name == "tensors" else _write_arrays)(dataset, target)
        once_s = source.once_s + source.session_s + perf_counter() - began_s
        files = tuple(sorted(path for path in target.iterdir() if path.is_file()))
        return PreparedFiles(target, files, once_s)

    def _copy(self, name: str, made: PreparedFiles) -> PreparedFiles:
        """Copy one kind from Drive to the local disk in each comparison: at full speed, and time it at Drive's."""
        target = self.ssd / f"{name}-{self.name}"
        copies = tuple(target / path.relative_to(made.folder) for path in made.files)
        began_s, opened = perf_counter(), float(len(made.files))
        if name == "shards":
            shutil.rmtree(target, ignore_errors=True)
            copy_shards(made.folder, target)
            opened = 2 * made.bytes / _SHARD_BYTES
        else:
            require_space(target, made.bytes, _CURE)
            _run_in_threads("copying", _copy_file, list(zip(made.files, copies, strict=True)))
        seconds = perf_counter() - began_s
        if self.profile is not None:
            seconds += opened * self.profile.open_s / _STREAMS + made.bytes / self.profile.bytes_per_s
        return replace(made, folder=target, files=copies, session_s=seconds)


def _run_in_threads(label: str, call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """What a call gives for each item, in order, by as many threads as `copy_shards` reads with."""
    with show_progress(label, total=len(items), unit="file") as bar, ThreadPoolExecutor(_STREAMS) as pool:
        found = []
        for one in pool.map(call, items):
            found.append(one)
            bar.update(1)
    return found


def _explain_bad(dataset: CocoFolder, row: int) -> str:
    """Why an image cannot be used; empty where it can."""
    try:
        dataset[row]
    except ColabUtilsError as error:
        return str(error)
    return ""


def _copy_file(paths: tuple[Path, Path]) -> None:
    source, copy = paths
    data = read_file(source)
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(data)


def _write_tensors(dataset: ShardDataset, target: Path) -> None:
    """One ``.pt`` an image: the sample that goes to the model, as uint8."""
    for row in range(len(dataset)):
        image, found = dataset[row]
        torch.save((image.contiguous(), found), target / f"{row:07d}.pt")


def _write_arrays(dataset: ShardDataset, target: Path) -> None:
    """One file of the planes of each image, its colours and its masks; the rest of the targets in a ``.pt``."""
    places = []
    with open(target / "planes.bin", "wb") as file:
        for row in range(len(dataset)):
            image, found = dataset[row]
            planes = torch.cat([image, found.pop("masks")]).numpy()
            places.append((file.tell(), planes.shape, found))
            file.write(planes.tobytes())
    torch.save(places, target / "places.pt")
