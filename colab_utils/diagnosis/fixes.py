"""What would cure a stall, and how much each cure would bring: forecast from measured layers, or tried for real."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from colab_utils.data.masks import unpack_masks
from colab_utils.diagnosis.clocks import BatchTimes, Layer, time_batches, time_calls
from colab_utils.diagnosis.forecast import Costs, choose_workers, forecast_rate
from colab_utils.diagnosis.strategies import is_on_drive, write_subset
from colab_utils.loading.batch import collate_packed
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.folder import CocoFolder
from colab_utils.loading.loader import Loader, make_loader
from colab_utils.loading.sample import pack_target
from colab_utils.runtime import count_cores, quiet_fork
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.images import plan_size
from colab_utils.shards.write import write_shards

__all__ = ["Fix", "Situation", "find_fixes", "time_layers"]

_SAMPLE_IMAGES = 64
_NO_LIMIT = 65_536  # pixels: shards that keep every image as it is


@dataclass(frozen=True)
class Fix:
    """One cure: images per second as forecast and, where it was tried, as measured (else None)."""

    name: str
    forecast_images_per_second: float
    measured_images_per_second: float | None
    sentence: str

    def __str__(self) -> str:
        measured = self.measured_images_per_second
        return f"{self.name}: {self.sentence}" + ("" if measured is None else f" Measured: {measured:.1f} images/s.")


@dataclass(frozen=True)
class Situation:
    """What was measured before any fix: ``now`` with the step (None: none), on ``cached`` batches, and the loader
    ``alone``; the ``layers`` of loading an image, and the ``indices`` of the images they were timed on.
    """

    loader: Any
    step: Callable[..., Any] | None
    now: BatchTimes
    cached: BatchTimes
    alone: BatchTimes
    layers: dict[str, Layer]
    indices: Sequence[int]
    workers: int

    @property
    def costs(self) -> Costs:
        """What one image costs now."""
        return Costs(
            load_s=max(1, self.workers) / self.alone.images_per_second,
            cpu_s=self.alone.cpu_ms_per_image / 1000,
            # the step as it is when nobody takes its core away; what workers take counts as CPU
            step_s=sum(self.cached.step_s) / self.cached.images if self.step else 0.0,
            step_cpu_s=self.cached.step_cpu_s / self.cached.images if self.step else 0.0,
            serial_s=self.alone.wait_cpu_s / self.alone.images if self.workers else 0.0,
        )

    def forecast(self, name: str, sentence: str, costs: Costs, workers: int) -> Fix:
        """The bound, corrected by how close today's rate comes to today's bound, and cut at the step's own rate."""
        rate_now = self.now.images_per_second
        bound_now = forecast_rate(self.costs, workers=self.workers, cores=count_cores())
        rate = forecast_rate(costs, workers=workers, cores=count_cores()) * min(1.0, rate_now / bound_now)
        rate = min(rate, self.cached.images_per_second) if self.step else rate
        wins = f"about {rate:.1f} images/s" if rate > 1.05 * rate_now else "wins nothing"
        return Fix(name, rate, None, f"{sentence}: {wins}.")

    def verify(self, fix: Fix, dataset: Any, workers: int, *, max_s: float, packs: bool = False) -> Fix:
        """The fix with its measured rate: your loader over other data, with other workers, or `make_loader`."""
        loader, batch_size = self.loader, round(self.now.images / len(self.now.wait_s))
        if packs or isinstance(loader, Loader):
            settings = {name: getattr(loader, name) for name in ("device", "deliver") if hasattr(loader, name)}
            rebuilt: Any = make_loader(dataset, batch_size=batch_size, workers=workers, **settings)
        elif not hasattr(dataset, "__getitem__"):
            return fix  # an iterable dataset deals its work to the workers itself
        else:
            copied = ("collate_fn", "pin_memory", "worker_init_fn", "multiprocessing_context")
            settings = {name: getattr(loader, name) for name in copied} | {"persistent_workers": workers > 0}
            size = batch_size if loader.batch_sampler else None
            with quiet_fork():
                rebuilt = DataLoader(dataset, batch_size=size, shuffle=True, num_workers=workers, **settings)
        try:
            times = time_batches(rebuilt, self.step, batches=200, max_s=max_s)
        finally:
            getattr(rebuilt, "close", int)()
        return replace(fix, measured_images_per_second=times.images_per_second)


@dataclass(frozen=True)
class _Cure:
    """A cure for the data: shards of it on the local disk, with packed masks or not, at training's size or not."""

    name: str
    sentence: str
    packs: bool = False
    shrinks: bool = False


_CURES = (
    _Cure("shards on the local SSD", "Run preprocess, then copy: reading takes {read:.1f} ms an image, not "
          "{read_now:.1f}, and masks {masks:.1f} ms, not {masks_now:.1f}"),
    _Cure("packed masks", "Load those shards with make_loader: masks stay packed and take {masks:.1f} ms an image, not "
          "{masks_now:.1f}", packs=True),
    _Cure("resize once offline", "Preprocess shrinks large images: training needs {share:.0%} of the pixels, decoding "
          "takes {decode:.1f} ms, not {decode_now:.1f}", shrinks=True),
)  # fmt: skip


def find_fixes(now: Situation, *, seconds: float, verify: bool, min_size: int, max_size: int) -> list[Fix]:
    """Every cure that applies: its forecast and, with ``verify``, its measured rate.

    Cures of the data are forecast on a sample of it in a temporary folder, for about ``seconds`` in all; measuring
    takes half of that for each. ``min_size`` and ``max_size`` are the sides in pixels that training needs.
    """
    dataset, costs = now.loader.dataset, now.costs
    workers = choose_workers(costs, workers=now.workers, cores=count_cores())
    fix = now.forecast("more workers", f"Use {workers} workers, not {now.workers}", costs, workers)
    fixes = [now.verify(fix, dataset, workers, max_s=seconds / 2) if verify else fix]
    if not isinstance(dataset, CocoFolder | ShardDataset):
        return fixes
    sharded, packs, share = isinstance(dataset, ShardDataset), isinstance(now.loader, Loader), 1.0
    if isinstance(dataset, CocoFolder):
        sizes = [*map(tuple, dataset.coco.sizes[list(now.indices)].tolist())]
        planned = [plan_size(*size, min_size=min_size, max_size=max_size) for size in sizes]
        share = sum(h * w for h, w in planned) / max(sum(h * w for h, w in sizes), 1)
    local = sharded and dataset.profile is None and not is_on_drive(dataset.folder)
    with tempfile.TemporaryDirectory(prefix="colab_utils-") as folder:
        for cure in _CURES:
            if (cure.packs and sharded and packs) or (cure.shrinks and share > 0.9) or (local and not cure.packs):
                continue
            limits = (min_size, max_size) if cure.shrinks else (_NO_LIMIT, _NO_LIMIT)
            sample = _make_sample(dataset, Path(folder), now.indices, *limits, images=_SAMPLE_IMAGES if verify else 0)
            dense = not cure.packs and not (sharded and packs)
            fix = _forecast_cure(now, cure, sample, dense=dense, share=share, seconds=seconds / 12)
            if verify:
                view = Subset(sample, range(len(sample))) if dense else sample
                fix = now.verify(fix, view, now.workers, max_s=seconds / 2, packs=cure.packs)
            fixes.append(fix)
    return fixes


def time_layers(dataset: Any, indices: Sequence[int], *, dense: bool, packs: bool, seconds: float) -> dict[str, Layer]:
    """Time each layer of loading an image alone: ``read``, ``decode``, and ``masks`` as a worker sends them.

    Takes a `ShardDataset` or a `CocoFolder`, and about ``seconds`` in all, which may not suffice for all ``indices``.
    ``dense`` says whether samples hold dense masks, ``packs`` whether the worker packs those.
    """
    blobs: list[bytes] = []

    def load_masks(index: int) -> None:
        masks = dataset.read_masks(index)
        if dense and isinstance(dataset, ShardDataset):
            masks = unpack_masks(masks, *dataset.sizes[index].tolist())
        if dense and packs:
            count, height, width = masks.shape
            empty = torch.zeros(count)
            target = {"boxes": torch.zeros(count, 4), "labels": empty, "area": empty, "iscrowd": empty, "image_id": 0}
            pack_target(torch.zeros(3, height, width, dtype=torch.uint8), {**target, "masks": torch.from_numpy(masks)})

    # no warm-up: it would put the first file, or a whole shard, into memory
    read = time_calls("read", lambda index: blobs.append(dataset.read(index)), indices, max_s=seconds / 2)
    dataset.decode(blobs[0])
    load_masks(indices[0])
    decode = time_calls("decode", dataset.decode, blobs, max_s=seconds / 4)
    masks = time_calls("masks", load_masks, indices[: len(blobs)], max_s=seconds / 4)
    return {layer.name: layer for layer in (read, decode, masks)}


def _forecast_cure(
    now: Situation, cure: _Cure, sample: ShardDataset, *, dense: bool, share: float, seconds: float
) -> Fix:
    """Exchange the layers of loading; what is left (collate, hand-off) goes with the bytes that an image sends."""
    packs, images = isinstance(now.loader, Loader), range(min(len(sample), _SAMPLE_IMAGES))
    layers = time_layers(sample, images, dense=dense, packs=packs, seconds=seconds)
    ratio, expand_s = share if cure.shrinks else 1.0, 0.0
    if cure.packs and not packs:
        few = [sample.read_packed(i) for i in images[:4]]
        dense_bytes = sum(one.pixels.nbytes // 3 * (3 + len(one.labels)) for one in few)
        ratio = sum(one.pixels.nbytes + one.masks.bits.nbytes for one in few) / dense_bytes
        batch, device = collate_packed(few), "cuda" if torch.cuda.is_available() else "cpu"
        expand = time_calls("expand", lambda _: (batch.to_images(device), batch.to_targets(device)), range(8), max_s=1)
        expand_s = expand.median_ms / 1000 / len(few)

    def exchange(cost_s: float, figure: str) -> float:
        old, new = (sum(getattr(layer, figure) for layer in of.values()) / 1000 for of in (now.layers, layers))
        return float(new + max(cost_s - old, 0.0) * ratio)

    costs = replace(
        now.costs,
        load_s=exchange(now.costs.load_s, "mean_ms"),
        cpu_s=exchange(now.costs.cpu_s, "cpu_ms") + expand_s,
        serial_s=now.costs.serial_s * ratio + expand_s,
    )
    figures = {name: layer.mean_ms for name, layer in layers.items()}
    figures |= {f"{name}_now": layer.mean_ms for name, layer in now.layers.items()}
    return now.forecast(cure.name, cure.sentence.format(share=share, **figures), costs, now.workers)


def _make_sample(
    dataset: CocoFolder | ShardDataset, folder: Path, indices: Sequence[int], *limits: int, images: int
) -> ShardDataset:
    """Shards of some images on the local disk: of those timed, which a slow Drive has cached, and more of them."""
    shards = folder / f"shards-{limits[0]}"
    if isinstance(dataset, CocoFolder):
        chosen = list(dict.fromkeys([*indices, *range(min(images, len(dataset)))]))[: max(images, len(indices))]
        annotations = write_subset(dataset.coco, chosen, folder / "annotations.json")
        small, large = limits
        write_shards(dataset.folder, annotations, shards=shards, min_size=small, max_size=large, workers=1, max_bad=1.0)
    elif is_on_drive(dataset.folder):
        first = dataset.index.shards[0]
        copy_shards(dataset.folder, shards, limit_gb=max(0.2, (first.bytes + first.arrays_bytes) / 1e9))
    return ShardDataset(shards if shards.exists() else dataset.folder)
