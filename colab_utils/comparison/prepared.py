"""Prepared copies of a dataset that strategies read: loose files, saved tensors, arrays, shards."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from colab_utils.data.coco import CocoDataset, read_coco, write_subset
from colab_utils.drive import DriveProfile, is_on_drive, read_file
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import Target
from colab_utils.loading.dataset import CocoFolder
from colab_utils.runtime import format_bytes, show_progress, write_file
from colab_utils.shards.copy import COPY_STREAMS, copy_shards
from colab_utils.shards.format import read_index
from colab_utils.shards.images import plan_size
from colab_utils.shards.write import write_shards

__all__ = ["PreparedData", "PreparedKind"]

_MADE = "made.json"


@dataclass(frozen=True)
class PreparedKind:
    """Where a form of the data lies, and what it takes: seconds ``once``, seconds in each ``session`` (a new machine's
    disk is empty), and bytes on both disks.
    """

    path: Path
    once_s: float = 0.0
    session_s: float = 0.0
    drive_bytes: int = 0
    ssd_bytes: int = 0


class PreparedData:
    """Every form of the first ``count`` usable images of a dataset, in ``folder``, made when it is first asked for.

    Attributes:
        total: images of the whole dataset.
        bad: why images were left out.

    Args:
        images: the image folder; it stands for Drive.
        coco: its annotations.
        folder: where prepared are kept.
        profile: the speed of Drive; None where ``images`` are read as they are.
        count: images at most.
        min_size: the shorter side that training needs, pixels.
        max_size: the longer side that training needs, pixels.
    """

    def __init__(
        self, images: Path, coco: CocoDataset, folder: Path, *, profile: DriveProfile | None, count: int,
        min_size: int, max_size: int,
    ) -> None:  # fmt: skip
        self.images, self.profile, self.sizes = images, profile, {"min_size": min_size, "max_size": max_size}
        self.folder = folder
        self.ssd = Path(tempfile.gettempdir()) / "colab_utils-ssd" if is_on_drive(folder) else folder / "ssd"
        self.drive = folder / "drive"
        rows = range(min(len(coco), count))
        everything = CocoFolder(images, write_subset(coco, rows, folder / "all.json"))
        usable, self.bad = list[int](), list[str]()
        for row in rows:
            try:
                everything[row]
                usable.append(row)
            except ColabUtilsError as error:
                self.bad.append(str(error))
        if not usable:
            raise ColabUtilsError(f"expected usable images in {images}, found none: {self.bad[0]}")
        self.annotations = write_subset(coco, usable, folder / "annotations.json")
        self.coco, self.total = read_coco(self.annotations), len(coco)
        self.name = f"{coco.fingerprint[:8]}-{len(usable)}-{min_size}-{max_size}"
        self._made: dict[str, PreparedKind] = {}

    def __len__(self) -> int:
        return len(self.coco)

    def get(self, kind: str) -> PreparedKind:
        """A form by its name: ``files``, ``tensors`` or ``shards``, ``_on_drive`` or ``_on_ssd``; ``arrays_on_ssd``.

        Raises:
            ColabUtilsError: it cannot be made, or needs more disk than there is.
        """
        if kind not in self._made:
            makers: dict[str, Callable[[], PreparedKind]] = {
                "files_on_drive": lambda: PreparedKind(self.images, drive_bytes=self._sum_files()),
                "files_on_ssd": self._copy_files,
                "tensors_on_drive": partial(self._convert, "tensors", _write_tensors),
                "tensors_on_ssd": partial(self._copy_converted, "tensors"),
                "arrays_on_drive": partial(self._convert, "arrays", _write_arrays),
                "arrays_on_ssd": partial(self._copy_converted, "arrays"),
                "shards_on_drive": self._make_shards,
                "shards_on_ssd": self._copy_shards,
                "arriving_shards_on_drive": self._describe_arrival,
            }
            self._made[kind] = makers[kind]()
        return self._made[kind]

    def _list_files(self) -> list[Path]:
        return [self.images / self.coco.file_name(i) for i in range(len(self))]

    def _sum_files(self) -> int:
        return sum(path.stat().st_size for path in self._list_files())

    def _copy_files(self) -> PreparedKind:
        """Every image file read from Drive, once in each session."""
        target, total = self.ssd / f"images-{self.name}", self._sum_files()
        pairs = [(path, target / path.relative_to(self.images)) for path in self._list_files()]
        return PreparedKind(target, session_s=self._copy(pairs, total, "images"), drive_bytes=total, ssd_bytes=total)

    def _copy(self, pairs: list[tuple[Path, Path]], total: int, what: str) -> float:
        """Read files from Drive by as many threads as a copy has, and write those that are not there; seconds."""
        _check_room(self.ssd, total)

        def copy(pair: tuple[Path, Path]) -> None:
            source, copied = pair
            data = read_file(source, self.profile)
            if not copied.is_file() or copied.stat().st_size != len(data):
                copied.parent.mkdir(parents=True, exist_ok=True)
                copied.write_bytes(data)

        began_s, label = perf_counter(), f"copying {what}"
        with show_progress(label, total=len(pairs), unit="file") as bar, ThreadPoolExecutor(COPY_STREAMS) as pool:
            for _ in pool.map(copy, pairs):
                bar.update(1)
        return perf_counter() - began_s

    def _convert(self, kind: str, write: Callable[[CocoFolder, dict[str, int], Path], None]) -> PreparedKind:
        """Samples at training's size, as they are told to be saved; the images are read from Drive for it."""
        target = self.drive / f"{kind}-{self.name}"
        marker = target / _MADE
        if not marker.is_file():
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            began_s = perf_counter()
            write(CocoFolder(self.images, self.annotations), self.sizes, target)
            _write_seconds(marker, perf_counter() - began_s)
        seconds = _read_seconds(marker) + self.get("files_on_ssd").session_s
        return PreparedKind(target, once_s=seconds, drive_bytes=_sum_folder(target))

    def _copy_converted(self, kind: str) -> PreparedKind:
        made = self.get(f"{kind}_on_drive")
        target = self.ssd / made.path.name
        pairs = [(path, target / path.name) for path in sorted(made.path.iterdir())]
        seconds = self._copy(pairs, made.drive_bytes, kind)
        return replace(made, path=target, session_s=seconds, ssd_bytes=made.drive_bytes)

    def _make_shards(self) -> PreparedKind:
        target = self.drive / f"shards-{self.name}"
        marker = self.drive / f"shards-{self.name}.json"
        total_mb = self._sum_files() / 1e6
        report = write_shards(
            self.images,
            self.annotations,
            shards=target,
            shard_mb=max(0.01, min(4.0, total_mb / 8)),  # eight or more: no worker holds all in memory
            min_size=self.sizes["min_size"],
            max_size=self.sizes["max_size"],
        )
        if not marker.is_file():
            _write_seconds(marker, report.seconds)
        seconds = _read_seconds(marker) + self.get("files_on_ssd").session_s
        return PreparedKind(target, once_s=seconds, drive_bytes=read_index(target).bytes)

    def _copy_shards(self) -> PreparedKind:
        made = self.get("shards_on_drive")
        target, marker = self.ssd / made.path.name, self.ssd / f"{made.path.name}.json"
        report = copy_shards(made.path, target, profile=self.profile)
        if report.bytes or not marker.is_file():
            _write_seconds(marker, report.seconds)
        return replace(made, path=target, session_s=_read_seconds(marker), ssd_bytes=made.drive_bytes)

    def _describe_arrival(self) -> PreparedKind:
        made = self.get("shards_on_drive")
        return replace(made, ssd_bytes=made.drive_bytes)


def shrink_sample(sample: tuple[Tensor, Target], *, min_size: int, max_size: int) -> tuple[Tensor, Target]:
    """A sample at training's size where it is larger, as torchvision's transform resizes it; never enlarged."""
    from torchvision.transforms.v2 import functional as v2

    image, target = sample
    height, width = image.shape[-2:]
    size = plan_size(height, width, min_size=min_size, max_size=max_size)
    if size == (height, width):
        return image, target
    scale = torch.tensor([size[1] / width, size[0] / height] * 2)
    masks = target["masks"].new_zeros((0, *size))
    if len(target["masks"]):
        masks = functional.interpolate(target["masks"][:, None], size=size, mode="nearest")[:, 0]
    shrunk = v2.resize(image, list(size), antialias=True)
    return shrunk, {**target, "boxes": target["boxes"] * scale, "masks": masks}


def _write_tensors(dataset: CocoFolder, sizes: dict[str, int], target: Path) -> None:
    """One ``.pt`` an image: everything as it goes to the model, but uint8."""
    for i in range(len(dataset)):
        image, found = shrink_sample(dataset[i], **sizes)
        if not i:
            _check_room(target, len(dataset) * (image.nbytes + found["masks"].nbytes))
        torch.save({"image": image.contiguous(), **found}, target / f"{i:07d}.pt")


def _write_arrays(dataset: CocoFolder, sizes: dict[str, int], target: Path) -> None:
    """Two big ``.npy``: images padded to the largest, and masks, a bit a pixel; the numbers in an ``.npz``."""
    shapes = np.array([plan_size(*size, **sizes) for size in dataset.sizes.tolist()])
    (height, width), counts = shapes.max(0).tolist(), np.diff(dataset.coco.first)
    _check_room(target, len(dataset) * height * width * 3 + int(counts.sum()) * height * -(-width // 8))
    images = np.lib.format.open_memmap(target / "images.npy", "w+", np.uint8, (len(dataset), 3, height, width))
    masks = np.lib.format.open_memmap(target / "masks.npy", "w+", np.uint8, (int(counts.sum()), height, -(-width // 8)))
    tables: dict[str, list[Any]] = {name: [] for name in ("boxes", "labels", "area", "iscrowd", "counts", "sizes")}
    first = 0
    for i in range(len(dataset)):
        image, found = shrink_sample(dataset[i], **sizes)
        tall, wide = image.shape[-2:]
        images[i, :, :tall, :wide] = image.numpy()
        bits = np.packbits(found["masks"].numpy(), axis=2)
        masks[first : first + len(bits), :tall, : bits.shape[2]] = bits
        first += len(bits)
        for name in ("boxes", "labels", "area", "iscrowd"):
            tables[name].append(found[name].numpy())
        tables["counts"].append([len(bits)])
        tables["sizes"].append([[tall, wide]])
    joined: dict[str, Any] = {name: np.concatenate(parts) for name, parts in tables.items()}
    np.savez(target / "tables.npz", image_ids=dataset.image_ids, **joined)
    images.flush()
    masks.flush()


def _write_seconds(marker: Path, seconds: float) -> None:
    """What making a form took, for the next time, when it is only found."""
    write_file(marker, json.dumps({"seconds": seconds}).encode())


def _read_seconds(marker: Path) -> float:
    return float(json.loads(marker.read_bytes())["seconds"])


def _sum_folder(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _check_room(folder: Path, needed: int) -> None:
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ColabUtilsError(
            f"expected {format_bytes(needed)} of free disk, found {format_bytes(free)} at {existing}. Free some, or "
            "compare fewer images."
        )
