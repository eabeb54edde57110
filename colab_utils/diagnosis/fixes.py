"""What would cure a stall, and how much each cure would bring: forecast by a short trial, measured by a long one."""

from __future__ import annotations

import math
import os
import pickle
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler, Subset

from colab_utils.data.coco import write_subset
from colab_utils.diagnosis.stages import time_dataset_stages
from colab_utils.diagnosis.timing import BatchTimes, EmulatedStep, Stage, time_batches, time_calls
from colab_utils.drive import is_on_drive, read_file
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.loading.loader import Loader, make_loader
from colab_utils.runtime import count_cores, find_free_memory, format_bytes, format_seconds, quiet_fork
from colab_utils.shards.copy import COPY_STREAMS, copy_shards
from colab_utils.shards.images import plan_size
from colab_utils.shards.write import READ_STREAMS, write_shards

__all__ = [
    "Costs",
    "Fix",
    "Situation",
    "choose_workers",
    "draw_times",
    "find_fixes",
    "forecast_rate",
    "measure_contention",
    "slow_down",
]

_BATCHES = 240


_WARMUP = 40  # the queue fills, and the first batches come late


_ROUNDING_S = 1e-12


_CROWDED_NUMBERS = 150_000


@dataclass(frozen=True)
class Costs:
    """What one image costs, seconds: a worker's waiting (``io_s``: for Drive, for a disk) and its CPU time on a quiet
    machine; the step's wall and CPU time; what the training process spends itself on fetching (``serial_s``, 0 without
    workers). ``cv``: spread of a batch's loading time, standard deviation / mean.
    """

    io_s: float
    cpu_s: float
    step_s: float = 0.0
    step_cpu_s: float = 0.0
    serial_s: float = 0.0
    cv: float = 0.0
    batch_size: int = 4


def forecast_rate(
    costs: Costs, *, workers: int, cores: float, prefetch: int = 2, crowding: float = 1.0, seed: int = 0
) -> float:
    """Images per second of a ``DataLoader`` with these costs, by simulation.

    Batches go by the rule of ``simulate``. Beyond it, cores are shared: whoever computes gets an equal part of
    ``cores``, the step as much of it as it uses, and those who wait need none. With all cores busy, everything that
    computes takes ``crowding`` times as long (two hyper-threads share one core). Method: processor sharing, event by
    event.

    Example:
        >>> costs = Costs(io_s=0.050, cpu_s=0.010, step_s=0.025, step_cpu_s=0.020)
        >>> rates = [forecast_rate(costs, workers=w, cores=2) for w in (0, 1, 2, 4)]
        >>> [round(rate / 2) * 2 for rate in rates]
        [12, 16, 34, 40]
    """
    size, lanes, share = costs.batch_size, max(1, workers), prefetch if workers else 1
    last = _BATCHES + lanes * share  # the queue stays full to the end
    factors = list(islice(draw_times(1.0, costs.cv, seed, stream=0), last))
    busy_share = min(1.0, costs.step_cpu_s / costs.step_s) if costs.step_s else 0.0
    # what each worker still has to do, part after part; the last one is the training process
    todo: list[deque[_Part]] = [deque() for _ in range(workers + 1)]
    queues: list[deque[int]] = [deque() for _ in range(lanes)]  # batches asked of each worker, not yet begun
    begun: list[int | None] = [None] * lanes
    asked, owner, done = [0] * lanes, [0] * last, [False] * last
    sent = taken = turn = 0
    now_s = began_s = 0.0

    def load(batch: int) -> list[_Part]:
        factor = size * factors[batch]
        return [_Part("wait", costs.io_s * factor), _Part("compute", costs.cpu_s * factor)]

    while taken < _BATCHES:
        while sent < taken + lanes * share:  # round the workers, but for those that have their share
            while asked[turn] >= share:
                turn = (turn + 1) % lanes
            queues[turn].append(sent)
            owner[sent] = turn
            asked[turn] += 1
            sent, turn = sent + 1, (turn + 1) % lanes
        for lane in range(workers):
            if not todo[lane]:
                if (ended := begun[lane]) is not None:
                    done[ended] = True
                begun[lane] = queues[lane].popleft() if queues[lane] else None
                if (batch := begun[lane]) is not None:
                    todo[lane].extend(load(batch))
        if not todo[-1] and (done[taken] or not workers):
            began_s = now_s if taken == _WARMUP else began_s
            loaded = [_Part("compute", size * costs.serial_s)] if workers else load(taken)
            todo[-1].extend([*loaded, _Part("step", size * costs.step_s)])
            asked[owner[taken]] -= 1
            taken += 1
            continue
        rates = _share_cores([parts[0].kind if parts else "idle" for parts in todo], busy_share, cores, crowding)
        active = [(parts, rate) for parts, rate in zip(todo, rates, strict=True) if parts]
        passed_s = min(parts[0].left_s / rate for parts, rate in active)
        now_s += passed_s
        for parts, rate in active:
            parts[0].left_s -= passed_s * rate
            if parts[0].left_s < _ROUNDING_S:
                parts.popleft()
    return size * (_BATCHES - _WARMUP) / max(now_s - began_s, _ROUNDING_S)


def choose_workers(costs: Costs, *, workers: int, cores: float, crowding: float = 1.0) -> int:
    """The fewest workers, more than now, that come within 5 % of the best forecast."""
    more = [count for count in (1, 2, 4, 8) if count > workers] or [workers * 2]
    rates = {count: forecast_rate(costs, workers=count, cores=cores, crowding=crowding) for count in more}
    return min(count for count, rate in rates.items() if rate >= 0.95 * max(rates.values()))


def draw_times(mean_s: float, cv: float, seed: int, *, stream: int) -> Iterator[float]:
    """Endless lognormal times with this mean and coefficient of variation.

    Example:
        >>> next(draw_times(0.5, 0.0, 0, stream=0))
        0.5
    """
    variance = math.log1p(cv * cv)  # of the logarithm
    generator = np.random.default_rng([seed, stream])
    while True:
        yield from (mean_s * generator.lognormal(-variance / 2, math.sqrt(variance), 256)).tolist()


@cache
def measure_contention(cores: int) -> float:
    """How many times as long work takes while all cores are busy as alone, 1 or more; half a second, once.

    Example:
        >>> measure_contention(1)
        1.0
    """
    if cores < 2:
        return 1.0
    numbers = np.random.default_rng(0).integers(0, 1 << 30, _CROWDED_NUMBERS)

    def time_sort(_: int) -> float:
        began_s = perf_counter()
        np.sort(numbers, kind="stable")  # without Python's lock
        return perf_counter() - began_s

    with ThreadPoolExecutor(cores) as pool:
        ratios = []
        for _ in range(5):
            alone_s = min(time_sort(0) for _ in range(2))
            ratios.append(median(pool.map(time_sort, range(2 * cores))) / alone_s)
    return max(1.0, median(ratios))


def slow_down(busy: float, cores: float, crowding: float) -> float:
    """How many times as long work takes beside others that keep so many cores ``busy`` with it.

    Example:
        >>> slow_down(1, 2, 1.5), slow_down(2, 2, 1.5)
        (1.0, 1.5)
    """
    return 1 + (crowding - 1) * max(0.0, min(busy, cores) - 1) / (cores - 1) if cores > 1 else 1.0


@dataclass
class _Part:
    kind: str
    left_s: float


def _share_cores(kinds: list[str], busy_share: float, cores: float, crowding: float) -> list[float]:
    """How fast each of them gets on: 1 is as fast as alone."""
    computing, stepping = kinds.count("compute"), "step" in kinds and busy_share > 0
    wanted = computing + busy_share * stepping
    compute = step = 1.0
    if wanted > cores:
        fair = cores / (computing + stepping)
        if stepping and busy_share <= fair:
            compute = (cores - busy_share) / computing
        else:
            compute, step = fair, fair / busy_share if stepping else 1.0
    rates = {"compute": compute / slow_down(wanted, cores, crowding), "step": step, "wait": 1.0, "idle": 1.0}
    return [rates[kind] for kind in kinds]


_SAMPLE_IMAGES = 64


_SAMPLE_S = 20  # that making shards of a sample may take, about


_MANY = 1_000_000


_EPOCHS = 50  # of a sample in one: where an epoch ends, workers run dry


_SLOTS = 12


_KEPT = 8


_MEMORY_SHARE = 0.5  # of what is free


_NO_LIMIT = 65_536  # pixels: shards that keep every image as it is


_MOST_OFF = 0.7  # of the simulation, today, that is believed to stay the same


_LEAST_BUSY = 0.01  # of a core, of a step that does next to nothing


_LATE = 4  # times the seconds of a diagnosis: what can be simulated is not tried any more


_TRIAL_BATCHES = 20  # or as many as three times its share of the seconds allow


_TRIAL_SHARE, _VERIFY_SHARE = 0.15, 0.4  # of the seconds of a diagnosis, for each fix: as long as today was measured


@dataclass(frozen=True)
class Fix:
    """One cure: images per second as forecast and, where that was asked for, as measured (else None); what an epoch
    takes then; and what the cure costs once (0 where that is nothing).
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
    ``alone``; the ``stages`` of a worker's time for an image, and the ``indices`` of the images they were timed on.
    ``seconds`` are those of the diagnosis, which began at ``began_s``; ``verify``: measure the fixes, too.
    """

    loader: Any
    step: Callable[..., Any] | None
    now: BatchTimes
    cached: BatchTimes
    alone: BatchTimes
    stages: dict[str, Stage]
    indices: Sequence[int]
    workers: int
    seconds: float
    verify: bool
    began_s: float

    @property
    def is_late(self) -> bool:
        """Whether no more should be tried than must be; who verifies has time."""
        return not self.verify and perf_counter() - self.began_s > _LATE * self.seconds

    @cached_property
    def placeholder_step(self) -> EmulatedStep | None:
        """As long as your step takes on batches that lie ready: trials leave your weights alone."""
        if self.step is None or isinstance(self.step, EmulatedStep):
            return self.step
        busy = min(max(self.cached.step_cpu_s / sum(self.cached.step_s), _LEAST_BUSY), 1.0)
        return EmulatedStep(1000 * fmean(self.cached.step_s), busy)

    @cached_property
    def costs(self) -> Costs:
        """What one image costs now."""
        cores, alone = count_cores(), self.alone
        step_s = sum(self.cached.step_s) / self.cached.images if self.step else 0.0
        cpu_s, rate = alone.cpu_ms_per_image / 1000, alone.images_per_second
        serial_s = alone.wait_cpu_s / alone.images if self.workers else 0.0
        # CPU time as it is on a quiet machine: beside a busy core it was longer
        crowd = slow_down(cpu_s * rate, cores, measure_contention(cores))
        waits = [max(stage.mean_ms - stage.cpu_ms, 0.0) / 1000 for stage in self.stages.values()]
        if not self.stages:
            waits = [max(max(1, self.workers) / rate - cpu_s, 0.0)]
        mean_ms = sum(stage.mean_ms for stage in self.stages.values())
        variance = sum(stage.std_ms**2 for stage in self.stages.values())
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
        crowding = measure_contention(cores)
        return forecast_rate(costs, workers=workers, cores=cores, prefetch=ahead, crowding=crowding)

    def choose_workers(self, costs: Costs) -> int:
        """How many workers to try where an image costs so much."""
        cores = count_cores()
        return choose_workers(costs, workers=self.workers, cores=cores, crowding=measure_contention(cores))

    def find_costs(self, dataset: Any, stages: dict[str, Stage], *, packs: bool) -> Costs:
        """What one image of other data, whose stages were timed, costs: by a trial of the loader without the step."""
        alone = self.time(dataset, self.workers, None, max_s=_TRIAL_SHARE * self.seconds, packs=packs)
        return replace(self, alone=alone, stages=stages).costs if alone else self.costs

    @cached_property
    def correction(self) -> float:
        """Today's rate over the simulated one."""
        off = self.now.images_per_second / self.simulate(self.costs, self.workers)
        return min(max(off, _MOST_OFF), 1 / _MOST_OFF)

    def estimate(self, costs: Costs, workers: int, *, prefetch: int | None = None, faster: float = 1.0) -> float:
        """Images per second of what is not tried: simulated, and corrected by today's error."""
        step_s, step_cpu_s = costs.step_s / faster, costs.step_cpu_s / faster
        costs = replace(costs, step_s=step_s, step_cpu_s=step_cpu_s)
        rate = self.correction * self.simulate(costs, workers, prefetch)
        return min(rate, 1 / step_s) if step_s else rate

    def forecast(
        self, name: str, sentence: str, rate: float | None = None, *, once_minutes: float = 0.0, once_gb: float = 0.0
    ) -> Fix:
        """A fix that gives ``rate`` images per second, or as many as now."""
        rate_now = self.now.images_per_second
        rate = rate or rate_now
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

    def try_out(
        self, name: str, sentence: str, dataset: Any, workers: int, *, packs: bool = False, prefetch: int | None = None,
        faster: float = 1.0, once_minutes: float = 0.0, once_gb: float = 0.0, costs: Costs | None = None,
    ) -> Fix:  # fmt: skip
        """Forecast a fix by a short trial over its data, beside a stand-in for the step (so many times ``faster``), or
        by simulation where it is late and ``costs`` are known, or where it cannot be tried; then measure it for longer
        with your own step, if that is wanted and can be.
        """
        placeholder_step = (
            EmulatedStep(self.placeholder_step.step_ms / faster, self.placeholder_step.busy)
            if self.placeholder_step
            else None
        )
        run = partial(self.time, dataset, workers, packs=packs, prefetch=prefetch)
        late = self.is_late and (costs or dataset is self.loader.dataset)
        trial = None if late else run(placeholder_step, max_s=_TRIAL_SHARE * self.seconds, least=_TRIAL_BATCHES)
        if trial:
            rate = trial.images_per_second
        else:
            rate = self.estimate(costs or self.costs, workers, prefetch=prefetch, faster=faster)
        fix = self.forecast(name, sentence, rate, once_minutes=once_minutes, once_gb=once_gb)
        can_be = faster == 1 or self.step is self.placeholder_step  # your own step cannot be made faster here
        step = self.step if faster == 1 else placeholder_step
        times = run(step, max_s=_VERIFY_SHARE * self.seconds) if self.verify and can_be else None
        return replace(fix, measured_images_per_second=times.images_per_second) if times else fix

    def time(
        self, dataset: Any, workers: int, step: Callable[..., Any] | None, *, max_s: float, packs: bool = False,
        prefetch: int | None = None, least: int = 1,
    ) -> BatchTimes | None:  # fmt: skip
        """Time your loader over other data, with other workers, or `make_loader`; None where that cannot be."""
        loader, batch_size = self.loader, round(self.now.images / len(self.now.wait_s))
        if packs or isinstance(loader, Loader):
            settings = {name: getattr(loader, name) for name in ("device", "deliver") if hasattr(loader, name)}
            settings |= {"prefetch": prefetch} if prefetch else {}
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


def find_fixes(now: Situation, *, min_size: int, max_size: int) -> list[Fix]:
    """Every cure that applies: its forecast and, where that is wanted, its measured rate.

    Cures of the data come first, tried on a sample of it in a temporary folder. Each trial takes 0.15 of the seconds of
    the diagnosis, and measuring a fix 0.4 of them. ``min_size`` and ``max_size`` are the sides in pixels that training
    needs.
    """
    return [*_forecast_cures(now, min_size, max_size), *_forecast_settings(now)]


def _forecast_cures(now: Situation, min_size: int, max_size: int) -> list[Fix]:
    """Other forms and places of the data."""
    dataset, fixes = now.loader.dataset, list[Fix]()
    if not isinstance(dataset, CocoFolder | ShardDataset):
        return fixes
    sharded, packs, share = isinstance(dataset, ShardDataset), isinstance(now.loader, Loader), 1.0
    if isinstance(dataset, CocoFolder):
        sizes = [*map(tuple, dataset.coco.sizes[list(now.indices)].tolist())]
        planned = [plan_size(*size, min_size=min_size, max_size=max_size) for size in sizes]
        share = sum(h * w for h, w in planned) / max(sum(h * w for h, w in sizes), 1)
    local = dataset.profile is None and not is_on_drive(dataset.folder)
    cures = [
        cure for cure in _CURES
        if not (cure.packs and sharded and packs) and (share <= 0.9 or not cure.shrinks)
        and not (sharded and local and not cure.packs)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="colab_utils-") as folder:
        for cure in cures:
            limits = (min_size, max_size) if cure.shrinks else (_NO_LIMIT, _NO_LIMIT)
            sample = _make_sample(now, Path(folder), *limits)
            dense = not cure.packs and not (sharded and packs)
            view = _lengthen(sample) if cure.packs or packs else sample
            stages = _time_sample(now, sample, dense=dense)
            fix = _forecast_cure(now, cure, sample, view, stages, share=share)
            fixes.append(fix)
        if cures:
            packs = cures[-1].packs
            workers = now.choose_workers(now.find_costs(view, stages, packs=packs))
            name, minutes, gb = f"{cures[-1].name}, and {_count(workers)}", fix.once_minutes, fix.once_gb
            fixes.append(now.try_out(name, "Both together", view, workers, packs=packs, once_minutes=minutes,
                                     once_gb=gb))  # fmt: skip
        if isinstance(dataset, CocoFolder) and not local:
            fixes.append(_forecast_copy(now, dataset, Path(folder) / "files"))
    return fixes


def _count(workers: int) -> str:
    return f"{workers} worker{'s' * (workers != 1)}"


def _forecast_settings(now: Situation) -> list[Fix]:
    """What any loader and step can have: samples kept in memory, more workers, more batches ahead, a faster step."""
    loader, fixes = now.loader, list[Fix]()
    dataset: Any = loader.dataset
    if isinstance(loader, DataLoader) and now.stages:
        kept = [dataset[index] for index in now.indices[: 1 if now.is_late else _KEPT]]
        each = sum(len(pickle.dumps(sample)) for sample in kept) / len(kept)
        needed = each * len(dataset) * max(1, now.workers)
        free = find_free_memory()
        name, has = "samples in memory", f"it needs {format_bytes(needed)} of memory in all workers"
        has += f", {format_bytes(free)} are free"
        if needed < _MEMORY_SHARE * free:
            said = f"Keep every sample from the first epoch on, random changes and all ({has})"
            left_s = max(now.costs.cpu_s - sum(stage.cpu_ms for stage in now.stages.values()) / 1000, 0.0)
            fixes.append(now.try_out(name, said, kept, now.workers, costs=replace(now.costs, io_s=0.0, cpu_s=left_s)))
        else:
            fixes.append(now.forecast(name, f"Not here: {has}"))
    workers = now.choose_workers(now.costs)
    fixes.append(now.try_out("more workers", f"Use {_count(workers)}, not {now.workers}", dataset, workers))
    if now.workers:
        ahead = 2 * now.prefetch
        said = f"Keep {ahead} batches ahead for each worker, not {now.prefetch}"
        fixes.append(now.try_out("more prefetch", said, dataset, now.workers, prefetch=ahead))
    if now.step:
        said = "Half precision (AMP) or a smaller input, where they halve the step"
        fixes.append(now.try_out("a step twice as fast", said, dataset, now.workers, faster=2))
    return fixes


def _lengthen(sample: Any) -> Subset[Any]:
    """A sample many times over, for `make_loader`, whose epoch ends with the dataset."""
    return Subset(sample, [*range(len(sample))] * _EPOCHS)


def _forecast_copy(now: Situation, dataset: CocoFolder, folder: Path) -> Fix:
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
    read, was = time_calls("read", local.read, range(len(local)), max_s=1), now.stages["read"]
    images = len(dataset)
    return now.try_out(
        "image files on the local SSD",
        f"Copy the files: reading takes {read.mean_ms:.1f} ms an image, not {was.mean_ms:.1f}",
        _lengthen(local) if isinstance(now.loader, Loader) else local, now.workers,
        once_minutes=images * was.mean_ms / 60_000 / COPY_STREAMS, once_gb=images * sum(sizes) / len(sizes) / 1e9,
        costs=replace(now.costs, io_s=max(read.mean_ms - read.cpu_ms, 0.0) / 1000),
    )  # fmt: skip


def _time_sample(now: Situation, sample: ShardDataset, *, dense: bool) -> dict[str, Stage]:
    images, seconds = range(min(len(sample), _SAMPLE_IMAGES)), _TRIAL_SHARE * now.seconds / 3
    return time_dataset_stages(sample, images, dense=dense, packs=isinstance(now.loader, Loader), seconds=seconds)


def _forecast_cure(
    now: Situation, cure: _Cure, sample: ShardDataset, view: Any, stages: dict[str, Stage], *, share: float
) -> Fix:
    figures = {name: stage.mean_ms for name, stage in stages.items()}
    figures |= {f"{name}_now": stage.mean_ms for name, stage in now.stages.items()}
    index, total = sample.index, len(now.loader.dataset)
    stored = sum(shard.bytes + shard.arrays_bytes for shard in index.shards) / max(len(sample), 1)
    # reading every image once, decoding it and encoding it again or drawing its masks, on all cores
    once_s = total * max(now.costs.io_s / READ_STREAMS, 2 * now.costs.cpu_s) / count_cores()
    return now.try_out(
        cure.name, cure.sentence.format(share=share, **figures), view, now.workers, packs=cure.packs,
        once_minutes=once_s / 60, once_gb=total * stored / 1e9,
    )  # fmt: skip


def _make_sample(now: Situation, folder: Path, *limits: int) -> ShardDataset:
    """Shards of some images on the local disk: of those timed, which a slow Drive has cached, and more of them."""
    dataset, indices, shards = now.loader.dataset, now.indices, folder / f"shards-{limits[0]}"
    each_s = now.costs.io_s + 2 * now.costs.cpu_s
    images = min(_SAMPLE_IMAGES, int(_SAMPLE_S / max(each_s, 1e-3))) if now.verify else 0
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
