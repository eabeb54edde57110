"""The strategies: ways of loading the same images, as data; and the forms of a dataset that they read."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from colab_utils.data.coco import CocoDataset
from colab_utils.diagnosis.clocks import describe_error
from colab_utils.drive import DriveProfile, is_on_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.folder import CocoFolder
from colab_utils.loading.loader import make_loader
from colab_utils.loading.order import BatchOrder
from colab_utils.runtime import quiet_fork, show_progress, write_file
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.write import write_shards

__all__ = ["STRATEGIES", "DenseLoader", "Places", "Strategy", "prepare_places", "write_subset"]


@dataclass(frozen=True)
class Strategy:
    """One way of loading: loose files or shards, on Drive or on the local disk, with workers or packed masks."""

    name: str
    idea: str
    on_drive: bool = False
    shards: bool = False
    workers: bool = True
    packed: bool = False


STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("sequential", "Each image is read from Drive and prepared inside the training loop.",
                 on_drive=True, workers=False),
        Strategy("dataloader", "A DataLoader's workers read the same files ahead.", on_drive=True),
        Strategy("shards_on_drive", "The files are packed into shards, read whole from Drive.",
                 on_drive=True, shards=True),
        Strategy("dataloader_on_ssd", "The DataLoader reads loose files from the local disk."),
        Strategy("shards_on_ssd", "The shards are copied to the local disk first.", shards=True),
        Strategy("packed", "Workers send packed masks; the device expands them (make_loader).",
                 shards=True, packed=True),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Places:
    """Where the same images lie in each form; ``why_no_shards`` says why shards could not be made, ``copied`` what
    copying them took.
    """

    annotations: Path
    images_on_drive: Path
    images_on_ssd: Path
    shards_on_drive: Path
    shards_on_ssd: Path
    copied: str = ""
    why_no_shards: str = ""

    def find(self, strategy: Strategy) -> Path:
        """The folder that a strategy reads."""
        form, disk = "shards" if strategy.shards else "images", "drive" if strategy.on_drive else "ssd"
        return Path(getattr(self, f"{form}_on_{disk}"))

    def build_loader(self, strategy: Strategy, *, profile: DriveProfile | None, batch_size: int, workers: int) -> Any:
        """The strategy's loader of ``(images, targets)`` as torchvision models take them, on the GPU if there is one.

        Raises:
            ColabUtilsError: the images are missing, or there are no shards.
        """
        if strategy.shards and self.why_no_shards:
            raise ColabUtilsError(self.why_no_shards)
        folder, profile = self.find(strategy), profile if strategy.on_drive else None
        workers, device = workers if strategy.workers else 0, "cuda" if torch.cuda.is_available() else "cpu"
        if strategy.packed:
            return make_loader(ShardDataset(folder), batch_size=batch_size, workers=workers, device=device)
        dataset: CocoFolder | ShardDataset = (
            ShardDataset(folder, profile=profile, whole_shards=strategy.on_drive)
            if strategy.shards
            else CocoFolder(folder, self.annotations, profile=profile)
        )
        return DenseLoader(dataset, batch_size=batch_size, workers=workers, device=device)


class DenseLoader:
    """torch's DataLoader as torchvision's references use it, but images become float32 in the training process: as
    uint8 they cross to it in a quarter of the bytes.
    """

    def __init__(self, dataset: Any, *, batch_size: int, workers: int, device: str) -> None:
        self._device = device
        shards = dataset.shard_of if dataset.whole_shards else None
        self._order = BatchOrder(
            len(dataset), batch_size, 0, sizes=dataset.sizes, shard_of=shards, streams=max(1, workers)
        )
        with quiet_fork():
            self._loader: DataLoader[Any] = DataLoader(
                dataset,
                batch_sampler=self._order,
                num_workers=workers,
                collate_fn=_collate,
                persistent_workers=workers > 0,
            )

    def __iter__(self) -> Iterator[tuple[list[Any], list[Any]]]:
        with quiet_fork():
            batches = iter(self._loader)
        for images, targets in batches:
            yield (
                [image.to(self._device).float().div_(255) for image in images],
                [{k: v.to(self._device) if hasattr(v, "to") else v for k, v in target.items()} for target in targets],
            )
        self._order.epoch += 1

    def close(self) -> None:
        """End the worker processes."""
        iterator: Any = self._loader._iterator
        self._loader._iterator = None
        if iterator is not None:
            iterator._shutdown_workers()


def prepare_places(
    images: Path, coco: CocoDataset, folder: Path, strategies: Iterable[Strategy], *,
    profile: DriveProfile | None, max_images: int, min_size: int, max_size: int,
) -> Places:  # fmt: skip
    """Make the forms of the first ``max_images`` images that these strategies read; what is there is found again.

    A bad image is left out of every form; if shards cannot be made, ``why_no_shards`` says why.
    """
    ssd = Path(tempfile.gettempdir()) / "colab_utils-ssd" if is_on_drive(folder) else folder / "ssd"
    taken = list(range(min(len(coco), max_images)))
    name = f"shards-{coco.fingerprint[:8]}-{len(taken)}-{min_size}-{max_size}"
    places = Places(folder / "annotations.json", images, images, folder / "drive" / name, ssd / name)
    forms = {(strategy.shards, strategy.on_drive) for strategy in strategies}
    if forms & {(True, True), (True, False)}:
        total_mb = sum(path.stat().st_size for i in taken if (path := images / coco.file_name(i)).is_file()) / 1e6
        try:
            write_shards(
                images,
                write_subset(coco, taken, folder / "shards.json"),
                shards=places.shards_on_drive,
                shard_mb=max(0.01, min(4.0, total_mb / 8)),  # eight or more: no worker holds all in memory
                min_size=min_size,
                max_size=max_size,
                max_bad=0.1,
            )
            whole = set(ShardDataset(places.shards_on_drive).image_ids.tolist())
            taken = [i for i in taken if int(coco.image_ids[i]) in whole]
            if (True, False) in forms:
                report = copy_shards(places.shards_on_drive, places.shards_on_ssd, profile=profile)
                copied = f"copying its shards took {report.seconds:.1f} s" if report.bytes else ""
                places = replace(places, copied=copied)
        except (ColabUtilsError, OSError) as error:
            places = replace(places, why_no_shards=describe_error(error))
    write_subset(coco, taken, places.annotations)
    if (False, False) in forms and is_on_drive(images):
        places = replace(places, images_on_ssd=ssd / "images")
        with show_progress("copying images to the local disk", total=len(taken), unit="image") as bar:
            for path in (images / coco.file_name(i) for i in taken):
                target = places.images_on_ssd / path.relative_to(images)
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.is_file() or target.stat().st_size != path.stat().st_size:
                    shutil.copyfile(path, target)
                bar.update(1)
    return places


def write_subset(dataset: CocoDataset, indices: Iterable[int], path: Path) -> Path:
    """Write the records of some images, in this order, as a COCO JSON of their own; returns ``path``."""
    chosen = list(indices)
    subset = {
        "images": [dataset.image(index) for index in chosen],
        "annotations": [annotation for index in chosen for annotation in dataset.annotations(index)],
        "categories": list(dataset.categories),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(subset).encode())
    return path


def _collate(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*samples, strict=True))
