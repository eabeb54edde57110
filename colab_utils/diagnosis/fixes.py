"""What would cure a stall, and how much each cure would bring: forecast from measured layers, or tried for real."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, Subset

from colab_utils.diagnosis.clocks import BatchTimes, EmulatedStep, Layer, time_batches, time_calls
from colab_utils.diagnosis.forecast import Costs, choose_workers, forecast_rate, measure_crowding, slow_down
from colab_utils.diagnosis.forms import write_subset
from colab_utils.diagnosis.parts import time_layers
from colab_utils.drive import is_on_drive, read_file
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.folder import CocoFolder
from colab_utils.loading.loader import Loader, make_loader
from colab_utils.runtime import count_cores, find_free_memory, format_bytes, format_seconds, quiet_fork
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.images import plan_size
from colab_utils.shards.plan import COPY_STREAMS
from colab_utils.shards.write import write_shards

__all__ = ["Fix", "Situation", "find_fixes"]

_SAMPLE_IMAGES = 64
_SAMPLE_S = 20  # that making shards of a sample may take, about
_MANY = 1_000_000
_EPOCHS = 50  # of a sample in one: where an epoch ends, workers run dry
_SLOTS = 12
_KEPT = 8
_MEMORY_SHARE = 0.5  # of what is free
_NO_LIMIT = 65_536  # pixels: shards that keep every image as it is
_MOST_OFF = 0.7  # of the simulation, today, that is believed to stay the same
_TRIAL_BATCHES = 20  # or as many as three times its share of the seconds allow
_TRIAL_SHARE, _VERIFY_SHARE = 0.15, 0.4  # of the seconds of a diagnosis, for each fix: as long as today was measured


@dataclass(frozen=True)
class Fix:
    """One cure: images per second as forecast and, where it was tried, as measured (else None); what an epoch takes
    then; and what the cure costs once (0 where that is nothing).
    """

    name: str
    forecast_images_per_second: float
    measured_images_per_second: float | None
    sentence: str
    minutes_per_epoch: float | None = None
    once_minutes: float = 0.0
    once_gb: float = 0.0

    @property
    def images_per_second(self) -> float:
        """What was measured, which counts more than its forecast."""
        return self.measured_images_per_second or self.forecast_images_per_second

    def __str__(self) -> str:
        measured = self.measured_images_per_second
        return f"{self.name}: {self.sentence}" + ("" if measured is None else f" Measured: {measured:.1f} images/s.")


@dataclass(frozen=True)
class Situation:
    """What was measured before any fix: ``now`` with the step (None: none), on ``cached`` batches, and the loader
    ``alone``; the ``layers`` of a worker's time for an image, and the ``indices`` of the images they were timed on.
    """

    loader: Any
    step: Callable[..., Any] | None
    now: BatchTimes
    cached: BatchTimes
    alone: BatchTimes
    layers: dict[str, Layer]
    indices: Sequence[int]
    workers: int

    @cached_property
    def costs(self) -> Costs:
        """What one image costs now."""
        cores, alone = count_cores(), self.alone
        step_s = sum(self.cached.step_s) / self.cached.images if self.step else 0.0
        cpu_s, rate = alone.cpu_ms_per_image / 1000, alone.images_per_second
        serial_s = alone.wait_cpu_s / alone.images if self.workers else 0.0
        # CPU time as it is on a quiet machine: beside a busy core it was longer
        crowd = slow_down(cpu_s * rate, cores, measure_crowding(cores))
        waits = [max(layer.mean_ms - layer.cpu_ms, 0.0) / 1000 for layer in self.layers.values()]
        if not self.layers:
            waits = [max(max(1, self.workers) / rate - cpu_s, 0.0)]
        mean_ms = sum(layer.mean_ms for layer in self.layers.values())
        variance = sum(layer.std_ms**2 for layer in self.layers.values())
        size = round(alone.images / len(alone.wait_s))
        costs = Costs(
            io_s=sum(waits),
            cpu_s=max(cpu_s - serial_s, 0.0) / crowd,
            serial_s=serial_s / crowd,
            cv=(variance / size) ** 0.5 / mean_ms if mean_ms else 0.0,
            batch_size=size,
        )
        # as the loader alone went: what its parts leave out (memory, the hand-off's waits) makes all of them dearer
        off = min(max(self.simulate(costs, self.workers) / rate, _MOST_OFF), 1 / _MOST_OFF)
        parts = {name: getattr(costs, name) * off for name in ("io_s", "cpu_s", "serial_s")}
        # the step as it is when nobody takes its core away; what workers take counts as CPU
        step_cpu_s = self.cached.step_cpu_s / self.cached.images if self.step else 0.0
        return replace(costs, **parts, step_s=step_s, step_cpu_s=step_cpu_s)

    @property
    def prefetch(self) -> int:
        """Batches ahead for each worker."""
        return getattr(self.loader, "prefetch", None) or getattr(self.loader, "prefetch_factor", None) or 2

    def simulate(self, costs: Costs, workers: int, prefetch: int | None = None) -> float:
        """Images per second with these costs on this machine."""
        cores, ahead = count_cores(), prefetch or self.prefetch
        crowding = measure_crowding(cores)
        return forecast_rate(costs, workers=workers, cores=cores, prefetch=ahead, crowding=crowding)

    @cached_property
    def correction(self) -> float:
        """Today's rate over the simulated one."""
        off = self.now.images_per_second / self.simulate(self.costs, self.workers)
        return min(max(off, _MOST_OFF), 1 / _MOST_OFF)

    def forecast(
        self, name: str, sentence: str, costs: Costs, workers: int, *, prefetch: int | None = None,
        tried: bool = False, once_minutes: float = 0.0, once_gb: float = 0.0,
    ) -> Fix:  # fmt: skip
        """The simulated rate, cut at the step's own; with costs that were not ``tried``, corrected by how close today's
        comes.
        """
        rate_now = self.now.images_per_second
        rate = self.simulate(costs, workers, prefetch) * (1.0 if tried else self.correction)
        rate = min(rate, 1 / costs.step_s) if costs.step_s else rate
        said, minutes = "wins nothing", None
        if hasattr(self.loader.dataset, "__len__"):
            minutes = len(self.loader.dataset) / rate / 60
        if rate > 1.05 * rate_now:
            said = f"about {rate:.1f} images/s"
            if minutes is not None:
                now_s = 60 * minutes * rate / rate_now
                said += f", {format_seconds(60 * minutes)} an epoch in place of {format_seconds(now_s)}"
            if once_gb:
                said += f"; once, about {format_seconds(60 * once_minutes)} and {format_bytes(once_gb * 1e9)}"
        return Fix(name, rate, None, f"{sentence}: {said}.", minutes, once_minutes, once_gb)

    def verify(
        self, fix: Fix, dataset: Any, workers: int, *, max_s: float, packs: bool = False, prefetch: int | None = None,
        step: Callable[..., Any] | None = None,
    ) -> Fix:  # fmt: skip
        """The fix with its measured rate."""
        times = self.time(dataset, workers, step or self.step, max_s=max_s, packs=packs, prefetch=prefetch)
        return replace(fix, measured_images_per_second=times.images_per_second) if times else fix

    def find_costs(
        self, dataset: Any, layers: dict[str, Layer], *, max_s: float, packs: bool = False, workers: int | None = None
    ) -> Costs:
        """What one image of other data, whose layers were timed, or with other workers costs: by a trial of the loader
        without the step. Workers that there were none of before have to hand over what they load.
        """
        count = self.workers if workers is None else workers
        alone = self.time(dataset, count, None, max_s=max_s, packs=packs, least=_TRIAL_BATCHES)
        return replace(self, alone=alone, layers=layers, workers=count).costs if alone else self.costs

    def time(
        self, dataset: Any, workers: int, step: Callable[..., Any] | None, *, max_s: float, packs: bool = False,
        prefetch: int | None = None, least: int = 1,
    ) -> BatchTimes | None:  # fmt: skip
        """Time your loader over other data, with other workers, or `make_loader`; None where that cannot be."""
        loader, batch_size = self.loader, round(self.now.images / len(self.now.wait_s))
        if packs or isinstance(loader, Loader):
            settings = {name: getattr(loader, name) for name in ("device", "deliver") if hasattr(loader, name)}
            rebuilt: Any = make_loader(dataset, batch_size=batch_size, workers=workers, **settings)
        elif not hasattr(dataset, "__getitem__"):
            return None  # an iterable dataset deals its work to the workers itself
        else:
            copied = ("collate_fn", "pin_memory", "worker_init_fn", "multiprocessing_context")
            settings = {name: getattr(loader, name) for name in copied} | {"persistent_workers": workers > 0}
            settings |= {"prefetch_factor": prefetch or self.prefetch} if workers else {}
            size = batch_size if loader.batch_sampler else None
            same = dataset is loader.dataset
            # the same images in the same order in each pass, all of them before one comes again
            order = torch.Generator().manual_seed(0)
            endless = loader.sampler if same else RandomSampler(dataset, num_samples=_MANY, generator=order)
            with quiet_fork():
                rebuilt = DataLoader(dataset, batch_size=size, sampler=endless, num_workers=workers, **settings)
        try:
            # our slots are touched first: their memory is new
            warmup = 2 if isinstance(rebuilt, DataLoader) else _SLOTS
            return time_batches(rebuilt, step, batches=500, warmup=warmup, max_s=max_s, least=least)
        finally:
            getattr(rebuilt, "close", int)()


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

    Cures of the data are forecast on a sample of it in a temporary folder. Each trial takes 0.15 of ``seconds``, those
    of the diagnosis, and measuring a fix 0.4 of them. ``min_size`` and ``max_size`` are the sides in pixels that
    training needs.
    """
    dataset, costs, cores = now.loader.dataset, now.costs, count_cores()
    crowding = measure_crowding(cores)
    trial_s, verify_s = _TRIAL_SHARE * seconds, _VERIFY_SHARE * seconds
    workers = choose_workers(costs, workers=now.workers, cores=cores, crowding=crowding)
    more = workers != now.workers
    if more:
        costs = now.find_costs(dataset, now.layers, max_s=trial_s, workers=workers)
    fix = now.forecast("more workers", f"Use {_count(workers)}, not {now.workers}", costs, workers, tried=more)
    fixes = [now.verify(fix, dataset, workers, max_s=verify_s) if verify else fix]
    fixes += _forecast_settings(now, verify=verify, trial_s=trial_s, verify_s=verify_s)
    if not isinstance(dataset, CocoFolder | ShardDataset):
        return fixes
    sharded, packs, share = isinstance(dataset, ShardDataset), isinstance(now.loader, Loader), 1.0
    if isinstance(dataset, CocoFolder):
        sizes = [*map(tuple, dataset.coco.sizes[list(now.indices)].tolist())]
        planned = [plan_size(*size, min_size=min_size, max_size=max_size) for size in sizes]
        share = sum(h * w for h, w in planned) / max(sum(h * w for h, w in sizes), 1)
    local = dataset.profile is None and not is_on_drive(dataset.folder)
    with tempfile.TemporaryDirectory(prefix="colab_utils-") as folder:
        if isinstance(dataset, CocoFolder) and not local:
            place = Path(folder) / "files"
            fixes.append(_forecast_copy(now, dataset, place, verify=verify, trial_s=trial_s, verify_s=verify_s))
        cures = [
            cure for cure in _CURES
            if not (cure.packs and sharded and packs) and (share <= 0.9 or not cure.shrinks)
            and not (sharded and local and not cure.packs)
        ]  # fmt: skip
        for cure in cures:
            limits = (min_size, max_size) if cure.shrinks else (_NO_LIMIT, _NO_LIMIT)
            sample = _make_sample(now, Path(folder), *limits, images=_SAMPLE_IMAGES if verify else 0)
            dense = not cure.packs and not (sharded and packs)
            view = _lengthen(sample) if cure.packs or packs else sample
            fix, costs, layers = _forecast_cure(now, cure, sample, view, dense=dense, share=share, max_s=trial_s)
            fixes.append(now.verify(fix, view, now.workers, max_s=verify_s, packs=cure.packs) if verify else fix)
        if cures and workers != now.workers:
            workers = choose_workers(costs, workers=now.workers, cores=cores, crowding=crowding)
            name, packs = f"{cures[-1].name}, and {_count(workers)}", cures[-1].packs
            costs = now.find_costs(view, layers, max_s=trial_s, packs=packs, workers=workers)
            minutes, gb = fix.once_minutes, fix.once_gb
            fix = now.forecast(name, "Both together", costs, workers, tried=True, once_minutes=minutes, once_gb=gb)
            fixes.append(now.verify(fix, view, workers, max_s=verify_s, packs=packs) if verify else fix)
    return fixes


def _count(workers: int) -> str:
    return f"{workers} worker{'s' * (workers != 1)}"


def _forecast_settings(now: Situation, *, verify: bool, trial_s: float, verify_s: float) -> list[Fix]:
    """What any loader and step can have: more batches ahead, samples kept in memory, a faster step."""
    loader, costs, fixes = now.loader, now.costs, list[Fix]()
    dataset: Any = loader.dataset
    if now.workers:
        ahead = 2 * now.prefetch
        fix = now.forecast("more prefetch", f"Keep {ahead} batches ahead for each worker, not {now.prefetch}", costs,
                           now.workers, prefetch=ahead)  # fmt: skip
        plain = verify and isinstance(loader, DataLoader)
        fixes.append(now.verify(fix, dataset, now.workers, max_s=verify_s, prefetch=ahead) if plain else fix)
    if isinstance(loader, DataLoader) and now.layers:
        kept = [dataset[index] for index in now.indices[:_KEPT]]
        each = sum(len(pickle.dumps(sample)) for sample in kept) / len(kept)
        needed = each * len(dataset) * max(1, now.workers)
        free = find_free_memory()
        has = f"it needs {format_bytes(needed)} of memory in all workers, {format_bytes(free)} are free"
        if needed < _MEMORY_SHARE * free:
            read = time_calls("read", kept.__getitem__, range(len(kept)), max_s=1)
            fix = now.forecast(
                "samples in memory", f"Keep every sample from the first epoch on, random changes and all ({has})",
                now.find_costs(kept, {"read": read}, max_s=trial_s), now.workers, tried=True,
            )  # fmt: skip
            fixes.append(now.verify(fix, kept, now.workers, max_s=verify_s) if verify else fix)
        else:
            fixes.append(now.forecast("samples in memory", f"Not here: {has}", costs, now.workers))
    if now.step:
        faster = replace(costs, step_s=costs.step_s / 2, step_cpu_s=costs.step_cpu_s / 2)
        fix = now.forecast(
            "a step twice as fast", "Half precision (AMP) or a smaller input, where they halve the step", faster,
            now.workers,
        )  # fmt: skip
        if verify and isinstance(now.step, EmulatedStep):
            half = EmulatedStep(now.step.step_ms / 2)
            fix = now.verify(fix, dataset, now.workers, max_s=verify_s, step=half)
        fixes.append(fix)
    return fixes


def _lengthen(sample: Any) -> Subset[Any]:
    """A sample many times over, for `make_loader`, whose epoch ends with the dataset."""
    return Subset(sample, [*range(len(sample))] * _EPOCHS)


def _forecast_copy(
    now: Situation, dataset: CocoFolder, folder: Path, *, verify: bool, trial_s: float, verify_s: float
) -> Fix:
    """The image files as they are, on the local disk."""
    folder.mkdir()
    sizes = []
    for index in now.indices:
        path = folder / dataset.coco.file_name(index)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read_file(dataset.find_path(index)))
        sizes.append(path.stat().st_size)
    annotations = write_subset(dataset.coco, now.indices, folder / "annotations.json")
    local = CocoFolder(folder, annotations)
    os.sync()  # what was copied is written now, and not during the trial
    read, was = time_calls("read", local.read, range(len(local)), max_s=1), now.layers["read"]
    view = _lengthen(local) if isinstance(now.loader, Loader) else local
    costs = now.find_costs(view, {**now.layers, "read": read}, max_s=trial_s)
    images = len(dataset)
    fix = now.forecast(
        "image files on the local SSD",
        f"Copy the files: reading takes {read.mean_ms:.1f} ms an image, not {was.mean_ms:.1f}", costs, now.workers,
        tried=True, once_minutes=images * was.mean_ms / 60_000 / COPY_STREAMS,
        once_gb=images * sum(sizes) / len(sizes) / 1e9,
    )  # fmt: skip
    return now.verify(fix, view, now.workers, max_s=verify_s) if verify else fix


def _forecast_cure(
    now: Situation, cure: _Cure, sample: ShardDataset, view: Any, *, dense: bool, share: float, max_s: float
) -> tuple[Fix, Costs, dict[str, Layer]]:
    """By the layers of loading the sample, and by a trial of the loader alone over it."""
    packs, images = isinstance(now.loader, Loader), range(min(len(sample), _SAMPLE_IMAGES))
    layers = time_layers(sample, images, dense=dense, packs=packs, seconds=max_s / 3)
    costs = now.find_costs(view, layers, max_s=max_s, packs=cure.packs)
    figures = {name: layer.mean_ms for name, layer in layers.items()}
    figures |= {f"{name}_now": layer.mean_ms for name, layer in now.layers.items()}
    index, total = sample.index, len(now.loader.dataset)
    stored = sum(shard.bytes + shard.arrays_bytes for shard in index.shards) / max(len(sample), 1)
    # reading every image once, decoding it and encoding it again or drawing its masks, on all cores
    once_s = total * max(now.costs.io_s / COPY_STREAMS, 2 * now.costs.cpu_s / count_cores())
    fix = now.forecast(
        cure.name, cure.sentence.format(share=share, **figures), costs, now.workers, tried=True,
        once_minutes=once_s / 60, once_gb=total * stored / 1e9,
    )  # fmt: skip
    return fix, costs, layers


def _make_sample(now: Situation, folder: Path, *limits: int, images: int) -> ShardDataset:
    """Shards of some images on the local disk: of those timed, which a slow Drive has cached, and more of them."""
    dataset, indices, shards = now.loader.dataset, now.indices, folder / f"shards-{limits[0]}"
    each_s = now.costs.io_s + 2 * now.costs.cpu_s
    images = min(images, int(_SAMPLE_S / max(each_s, 1e-3)))
    if isinstance(dataset, CocoFolder):
        chosen = list(dict.fromkeys([*indices, *range(min(images, len(dataset)))]))[: max(images, len(indices))]
        annotations = write_subset(dataset.coco, chosen, folder / "annotations.json")
        small, large = limits
        write_shards(dataset.folder, annotations, shards=shards, min_size=small, max_size=large, workers=1, max_bad=1.0)
        os.sync()  # it is written now, and not during the trial
    elif is_on_drive(dataset.folder):
        first = dataset.index.shards[0]
        copy_shards(dataset.folder, shards, limit_gb=max(0.2, (first.bytes + first.arrays_bytes) / 1e9))
    return ShardDataset(shards if shards.exists() else dataset.folder)
