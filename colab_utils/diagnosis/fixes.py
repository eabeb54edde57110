"""Fixes for a stall. A model forecasts each of them at once, and a trial confirms the best."""

import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf
from pathlib import Path
from statistics import fmean
from time import perf_counter, process_time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    Subset,
)

from colab_utils.data.coco import write_subset
from colab_utils.diagnosis.simulator import Loop, forecast_rate
from colab_utils.diagnosis.stages import SAMPLED_IMAGES, LoadingStages
from colab_utils.diagnosis.timing import (
    LEAST_NOISE,
    BatchTimes,
    count_prefetch,
    count_warmup,
    count_workers,
    fetch_batches,
    find_error,
    measure_tree_cpu,
    time_batches,
)
from colab_utils.diagnosis.watch import WatchedLoader
from colab_utils.errors import ColabUtilsError, describe_error
from colab_utils.file_cache import FileCache
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.emulated_step import EmulatedStep
from colab_utils.loading.loader import Loader, make_loader
from colab_utils.machine import count_cores
from colab_utils.progress import show_progress
from colab_utils.reader import AHEAD_BYTES, AHEAD_IMAGES
from colab_utils.shards.copy import Copying
from colab_utils.shards.index import write_index
from colab_utils.shards.write import write_shards
from colab_utils.slow_drive import read_at_full_speed
from colab_utils.streams import is_remote

# Each fix has a name and a sentence that says what to do. The least effort for you comes first.
FIXES = {
    "persistent_workers": ("persistent workers", "Use persistent_workers=True"),
    "any_order": ("any order", "Take batches as they come: in_order=False"),
    "streams": (
        "more streams",
        "Load the files by make_loader(CocoFolder(...)), whose workers read many at once",
    ),
    "workers": ("more workers", "Use workers"),
    "prefetch": ("more prefetch", "Let each worker load more batches ahead"),
    "local_files": (
        "loose files on the local SSD",
        "Copy the files there by many streams: copy_images(FOLDER, SSD, annotations=FILE)",
    ),
    "shards": ("shards on the local SSD", "Run preprocess, then copy"),
    "packed_masks": (
        "shards on the local SSD, masks packed",
        "Load shards on the local SSD with make_loader: masks stay packed",
    ),
    "resize": (
        "shards on the local SSD, images resized once",
        "Let preprocess shrink the images that are larger than training needs",
    ),
}
# Resizing is a fix of its own only if it leaves at most this share of the pixels.
_SMALLER = 0.9
# A diagnosis ends with an error if one batch takes longer than this.
TIMEOUT_S = 60.0
# The emulated step of a trial keeps at least this share of a core busy.
_LEAST_BUSY = 0.01
# Of the images whose stages were timed, at most so many bytes are copied to the local disk to see
# what work they are in each form.
_SAMPLED_BYTES = 24e6
# The work of a form is measured for this share of the ``seconds`` of a diagnosis.
_COST_SHARE = 0.03
# Linux counts CPU time of other processes in these steps.
_TICK_S = 0.01
# `make_loader` finds about so many streams for each worker by itself.
_STREAMS = 32
# Stands for the number of batches in an endless epoch.
_MANY = 10_000
# Cores that are all busy do less than each of them alone, so the model takes this share of them. If
# a loop with several workers keeps more than the second share busy, and is slower than the model
# says, the model gets fewer cores.
_ALL_BUSY = 0.9
_FULL = 0.75
# The model needs a step. Without one, it has a very short one.
_NO_STEP_MS = 0.1
# The error of an input of which little is known.
_UNKNOWN = 0.3
# Each forecast is made so many times, with inputs that differ as those that were measured do.
_DRAWS = 8
# A trial times so many batches, in about this share of the ``seconds`` of a diagnosis.
_TRIAL_BATCHES = 20
_TRIAL_SHARE = 0.4
# A trial that differs by more than this share does not confirm a forecast. The next fixes are
# tried, too: so many.
_CONFIRMED = 0.25
_MORE_TRIALS = 2


@dataclass(frozen=True)
class Fix:
    """One fix, and the rate that it would bring."""

    id: str
    """A key of `FIXES`."""
    name: str
    sentence: str
    """What to do, and what that brings."""
    forecast_images_per_second: float
    """Rate by the model."""
    measured_images_per_second: float | None = None
    """Rate of a trial; None if the fix was not tried."""
    error: float = 0.0
    """What the forecast may be off by, as a share of it: 0.1 is 10 %. It is 5 % for the model
    itself, and the spread of what was measured for it.
    """
    gain: float = 1.0
    """``images_per_second`` divided by the rate of your loop: the larger one of that which was
    measured, and that which the model gives.
    """

    @property
    def is_gain(self) -> bool:
        """Return whether the fix wins more than 5 %, and twice what its inputs spread."""
        return self.gain > 1 + 2 * self.error - LEAST_NOISE

    @property
    def images_per_second(self) -> float:
        """Return the measured rate; without one, the forecast."""
        return self.measured_images_per_second or self.forecast_images_per_second

    @property
    def is_confirmed(self) -> bool:
        """Return whether a trial came near the forecast."""
        measured = self.measured_images_per_second or 0.0
        return abs(measured / self.forecast_images_per_second - 1) <= _CONFIRMED

    def __str__(self) -> str:
        text = f"{self.name}: {self.sentence}"
        if self.measured_images_per_second is not None:
            text += f" Measured: {self.measured_images_per_second:.1f} images/s."
        return text


@dataclass(frozen=True)
class Situation:
    """What is known before any fix is forecast."""

    loader: Any
    step: Callable[..., Any] | None
    loop: BatchTimes
    """Times of your loader with your step."""
    cached: BatchTimes
    """Times of your step on copies of batches in memory."""
    timed: LoadingStages
    """Stages of loading, and single reads."""
    seconds: float
    """About how long the diagnosis measures, in seconds."""
    verify: bool = False
    """Whether to try each fix, with your own step."""
    ceiling: float = inf
    """Images per second if loading took no time. No fix can give more. Without a step, it is
    infinite.
    """
    slower: float = 1.0
    """Factor by which the step takes longer because loading keeps the cores busy."""
    restart_s: float = 0.0
    """Seconds that the loop waits when workers start again; 0 if they stay."""


class _Plan(NamedTuple):
    """A fix that applies."""

    id: str
    loop: Loop
    """The loop with this fix. The model takes it as numbers, and a trial as settings."""
    form: str = ""
    """Form of the images, a key of `_Model.forms`; empty if they stay as they are."""
    packs: bool = False
    """Whether `make_loader` loads, even if your loader is a ``DataLoader``."""
    more: str = ""
    """What is added to the sentence of the fix."""


@contextmanager
def open_like(
    loader: Any, loop: Loop, dataset: Any = None, *, packs: bool = False
) -> Iterator[Any]:
    """Open a loader like yours for a trial, with the settings of a loop.

    Args:
        loader: Your loader.
        loop: Its workers, its prefetch, its order, and whether its workers start again count here.
            For `make_loader`, only the first two do.
        dataset: Other data, repeated until an epoch has as many images as yours; None keeps yours.
        packs: Whether to use `make_loader` even if your loader is a ``DataLoader``.

    Raises:
        ColabUtilsError: your dataset is iterable, and no other is given. It shares out its samples
            to the workers itself.
    """
    changes: dict[str, Any] = {}
    data = loader.dataset
    if dataset is not None:
        # Each image comes once before any comes again, always in the same random order.
        images = int(min(loop.epoch_batches, _MANY)) * loop.batch_size
        order = np.random.default_rng(0).permutation(len(dataset))
        data = Subset(dataset, np.resize(order, images).tolist())
        sampler = SequentialSampler(data)
        changes["sampler"] = sampler
        if getattr(loader, "batch_sampler", None) is not None:
            changes["batch_size"] = loop.batch_size
            changes["batch_sampler"] = BatchSampler(sampler, loop.batch_size, False)
    elif isinstance(data, IterableDataset):
        raise ColabUtilsError("an iterable dataset divides its samples among the workers itself")
    if packs or isinstance(loader, Loader):
        # The GPU expands packed masks, but only if the program uses it already.
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
        rebuilt = make_loader(
            data,
            batch_size=loop.batch_size,
            workers=loop.workers,
            prefetch=loop.prefetch,
            device=getattr(loader, "device", device),
            deliver=getattr(loader, "deliver", "dense"),
            shuffle=dataset is None,
        )
        with closing(rebuilt):
            yield rebuilt
        return
    # A copy keeps all attributes of your loader. A new DataLoader would have only those that are
    # passed to it.
    like = copy(loader)
    vars(like).update(
        changes,
        _iterator=None,
        dataset=data,
        num_workers=loop.workers,
        prefetch_factor=loop.prefetch,
        in_order=loop.in_order,
        persistent_workers=loop.start_s == 0,
    )
    yield like


def find_fixes(now: Situation) -> list[Fix]:
    """Forecast every fix that applies, by one model of a loop, and confirm the best one by a trial.

    Each fix changes one thing. What the images are as work in other forms is measured with a few of
    them, in a temporary folder. If the trial differs from the forecast by more than a quarter, the
    next two fixes are tried, too. With ``now.verify``, all are.

    Returns:
        All fixes, the best first. Of those within 5 % of the best, the one with the least effort
        for you comes first. If fixes were tried, the best of these comes first.
    """
    with (
        tempfile.TemporaryDirectory(prefix="colab_utils-") as folder,
        show_progress("diagnose: fixes", unit="fix") as bar,
    ):
        model = _Model(now, Path(folder))
        plans = {plan.id: plan for plan in model.plan_fixes()}
        ranked = rank_fixes([model.forecast_fix(plan) for plan in plans.values()])
        count = len(ranked) if now.verify else int(ranked[0].is_gain)
        tried: list[Fix] = []
        for fix in ranked:
            if len(tried) == count:
                break
            bar.set_postfix_str(f"trying {fix.name}")
            tried.append(model.try_out(fix, plans[fix.id]))
            bar.update()
            if not tried[-1].is_confirmed:
                count = max(count, 1 + _MORE_TRIALS)
    return [*rank_fixes(tried), *rank_fixes(ranked[len(tried) :])]


def rank_fixes(fixes: Sequence[Fix]) -> list[Fix]:
    """Sort fixes, the best first. Of those that are within 5 % of the best, the one with the least
    effort for you comes first.
    """
    enough = (1 - LEAST_NOISE) * max((fix.images_per_second for fix in fixes), default=0.0)
    order = [*FIXES]
    # What is more than enough does not count.
    return sorted(fixes, key=lambda fix: (-min(enough, fix.images_per_second), order.index(fix.id)))


class _Model:
    """Your loop, and the loop of each fix, by what was measured.

    Attributes:
        now: What is known of your loop.
        step: The step of a trial: an emulated one, because a trial must not train your model. It
            takes as long as your step takes on batches in memory, and keeps as much of a core busy.
        loop: Your loop.
        own_rate: Its images per second: the larger of what was measured and what the model gives.
        forms: A few of your images on the local disk, in each form that a fix has. "streams" are
            your images where they are, for a reader with many streams.
        problem: Why a form is missing.
        own_form: The form of your images; empty for a dataset that is not of this package.
        is_remote: Whether your images come over a network.
    """

    def __init__(self, now: Situation, folder: Path) -> None:
        self.now = now
        loader = now.loader
        dataset = loader.dataset
        self.own_form = ""
        if isinstance(dataset, CocoFolder | ShardDataset):
            self.own_form = "loose" if isinstance(dataset, CocoFolder) else "shards"
        self.is_remote = bool(self.own_form) and is_remote(dataset.folder)
        self.forms: dict[str, Any] = {}
        self.problem = ""
        try:
            # A real Drive has cached the images by now, and would read them fast.
            with read_at_full_speed():
                self._copy_sample(dataset, folder)
        except Exception as error:
            self.problem = describe_error(error).removesuffix(".")
        self._costs: dict[Any, _Cost] = {}
        cores = measure_cores()
        # What an emulated step takes on a busy machine is no length of its own.
        if isinstance(now.step, EmulatedStep):
            self.step = now.step
        else:
            step_ms = max(1000 * fmean(now.cached.step_s), _NO_STEP_MS)
            busy = now.cached.step_cpu_s / max(sum(now.cached.step_s), 1e-9)
            self.step = EmulatedStep(step_ms, min(max(busy, _LEAST_BUSY), 1.0))
        epoch_batches = inf
        with suppress(TypeError):
            epoch_batches = max(1, len(loader))
        workers = count_workers(loader)
        self._base = Loop(
            workers,
            self.step.step_ms / 1000,
            prefetch=count_prefetch(loader),
            batch_size=now.loop.batch_size,
            cores=_ALL_BUSY * cores,
            in_order=getattr(loader, "in_order", True),
            busy=self.step.busy,
            read_ahead=0,
            epoch_batches=epoch_batches,
        )
        self._handoff = self._find_handoff()
        loop = self.make_loop(workers)
        # The wait for workers that start again ends with the loading of a batch.
        load_s = loop.batch_size * (fmean(loop.read_s) / loop.streams + loop.work_s)
        load_s += loop.handoff_s
        self._base = replace(self._base, start_s=max(0.0, now.restart_s - load_s))
        self._errors = np.array(
            [
                max((cost.error for cost in self._costs.values()), default=LEAST_NOISE),
                min(find_error(np.array(now.cached.step_s)), _UNKNOWN),
                # What other programs take of the cores now, they may leave later.
                max(0.0, 1 - cores / count_cores()),
            ]
        )
        rate = now.loop.images_per_second
        used = now.loop.cpu_s / now.loop.batch_s.sum()
        if workers > 1 and used > _FULL * cores:
            part = rate / self.forecast(self.make_loop(workers))[0]
            self._base = replace(self._base, cores=min(1.0, part) * self._base.cores)
        self.loop = self.make_loop(workers)
        self.own_rate = max(self.forecast(self.loop)[0], rate)

    def _copy_sample(self, dataset: Any, folder: Path) -> None:
        """Copy a few images to the local disk, as loose files and as shards. Of shards, the first
        one is copied.
        """
        if isinstance(dataset, ShardDataset):
            if self.is_remote:
                part = replace(dataset.index, shards=dataset.index.shards[:1], partial=True)
                Copying(dataset.folder, folder, overwrite=False).copy_shard(*part.shards)
                write_index(folder, part)
                dataset = ShardDataset(folder)
            self.forms["shards"] = dataset
        if isinstance(dataset, CocoFolder):
            self.forms["streams"] = copy(dataset)
            self.forms["streams"].streams = "auto"
            count = max(1, int(_SAMPLED_BYTES / max(self.now.timed.file_bytes, 1)))
            chosen = self.now.timed.indices[:count]
            loose = copy(dataset)
            loose.cache = FileCache(folder / "images")
            for index in chosen:
                loose.read(index)
            self.forms["loose"] = Subset(loose, chosen)
            annotations = write_subset(dataset.coco, chosen, folder / "sample.json")
            write = partial(write_shards, dataset.folder, annotations, workers=1, max_bad=1.0)
            write(shards=folder / "shards")
            shrunk = ShardDataset(folder / "shards")
            self.forms["shards"] = shrunk
            if shrunk.sizes.prod(1).sum() <= _SMALLER * dataset.sizes[chosen].prod(1).sum():
                write(shards=folder / "kept", storage="keep")
                self.forms["kept"] = ShardDataset(folder / "kept")

    def plan_fixes(self) -> Iterator[_Plan]:
        """Yield each fix that applies, the least effort for you first."""
        loader = self.now.loader
        loop = self.loop
        workers = loop.workers
        is_ours = isinstance(loader, Loader)
        is_loose = self.own_form == "loose"
        if self.now.restart_s:
            yield _Plan("persistent_workers", replace(loop, start_s=0.0))
        if workers > 1 and getattr(loader, "in_order", False):
            yield _Plan("any_order", replace(loop, in_order=False))
        if self.is_remote and is_loose and not (is_ours and loader.reads_ahead):
            yield _Plan("streams", self.make_loop(workers, packs=True), "streams", packs=True)
        count = self.choose_workers()
        more = f"={count}, not {workers}"
        if workers == 0 and isinstance(loader, DataLoader):
            more += ", and persistent_workers=True"
        yield _Plan("workers", self.make_loop(count), more=more)
        if workers:
            more = f": {2 * loop.prefetch}, not {loop.prefetch}"
            yield _Plan("prefetch", replace(loop, prefetch=2 * loop.prefetch), more=more)
        # The other fixes bring the images to the local disk, in their form or in another one.
        if self.is_remote and is_loose:
            yield _Plan("local_files", self.make_loop(workers, "loose"), "loose")
        if self.is_remote or is_loose:
            form = "kept" if "kept" in self.forms else "shards"
            yield _Plan("shards", self.make_loop(workers, form), form)
        if self.own_form and not is_ours:
            yield _Plan(
                "packed_masks", self.make_loop(workers, "shards", packs=True), "shards", packs=True
            )
        if "kept" in self.forms:
            yield _Plan("resize", self.make_loop(workers, "shards"), "shards")

    def forecast_fix(self, plan: _Plan) -> Fix:
        """Forecast a fix, and say what it wins."""
        name, sentence = FIXES[plan.id]
        rate, error = self.forecast(plan.loop)
        fix = Fix(plan.id, name, "", rate, None, error, rate / self.own_rate)
        gain = "" if fix.is_gain else "no sure gain, "
        gain += f"about {rate:.1f} images/s (give or take {error:.0%})"
        return replace(fix, sentence=f"{sentence}{plan.more}: {gain}.")

    def try_out(self, fix: Fix, plan: _Plan) -> Fix:
        """Try a fix. The trial has an emulated step, or your own one with ``now.verify``.

        A trial makes a new loader and begins at its first batch.
        """
        now = self.now
        try:
            dataset = self.forms.get(plan.form)
            if plan.form and dataset is None:
                raise ColabUtilsError(self.problem)
            with open_like(now.loader, plan.loop, dataset, packs=plan.packs) as loader:
                times = time_batches(
                    WatchedLoader(loader, TIMEOUT_S, "raise"),
                    now.step if now.verify else self.step,
                    batches=max(_TRIAL_BATCHES, 2 * count_workers(loader)),
                    warmup=count_warmup(loader),
                    max_s=_TRIAL_SHARE * now.seconds,
                    # A single round of slow workers says little.
                    least=2 * max(1, count_workers(loader)),
                )
        except Exception as error:
            # A trial that fails must not lose the results that the diagnosis has so far.
            why = describe_error(error).removesuffix(".")
            return replace(fix, sentence=f"{fix.sentence} It could not be tried: {why}.")
        rate = times.images_per_second
        return replace(fix, measured_images_per_second=rate, gain=rate / self.own_rate)

    def make_loop(self, workers: int, form: str = "", *, packs: bool = False) -> Loop:
        """Return your loop with so many workers, and with a local form of your images if one is
        given. ``packs`` says whether `make_loader` loads.
        """
        timed = self.now.timed
        packs = packs or isinstance(self.now.loader, Loader)
        cost = self._find_cost(form or self.own_form, packs)
        # The share is taken to be the same in every form.
        handoff_s = 0.0 if packs else self._handoff * cost.work_s
        loop = replace(
            self._base,
            workers=workers,
            work_s=cost.work_s - handoff_s,
            handoff_s=handoff_s * self._base.batch_size,
            take_s=cost.take_s if workers or packs else 0.0,
        )
        if not form:
            loop = replace(loop, read_s=timed.read_s, files_per_s=timed.files_per_s)
            if self.is_remote:
                # Reading from a network is some work, too.
                loop = replace(loop, work_s=loop.work_s + timed.stages["read"].cpu_ms / 1000)
                if packs:
                    held = int(AHEAD_BYTES / max(timed.file_bytes, 1))
                    loop = replace(loop, streams=_STREAMS, read_ahead=min(AHEAD_IMAGES, held))
                elif self.now.loader.dataset.streams != 1:
                    loop = replace(loop, streams=loop.batch_size)
        if packs and not workers:
            # Its streams read beside the step, and it works between two steps.
            take_s = loop.take_s + loop.work_s * loop.batch_size
            loop = replace(loop, work_s=0.0, take_s=take_s)
        return loop

    def _find_handoff(self) -> float:
        """Return the share of a worker's CPU time that no stage of loading explains. It counts as
        the hand-over by a ``DataLoader``. Reads of local files are in it, too.
        """
        stages = self.now.timed.stages
        is_seen = self.own_form or self._base.workers
        if not stages or not is_seen or isinstance(self.now.loader, Loader):
            return 0.0
        sample_ms = sum(stages[name].cpu_ms for name in stages if name != "read")
        own_ms = 1000 * self._find_cost(self.own_form, packs=False).work_s
        return max(0.0, 1 - sample_ms / max(own_ms, 1e-3))

    def _find_cost(self, form: str, packs: bool) -> "_Cost":
        """Return what an image in this form costs. A loader with one worker is timed. For a dataset
        that is not of this package, it is what your own loader took.
        """
        now = self.now
        key = (form, packs)
        if form in self.forms and key not in self._costs:
            images = self.forms[form]
            loop = replace(self._base, workers=1, start_s=0.0)
            with suppress(Exception), open_like(now.loader, loop, images, packs=packs) as like:
                sample = min(SAMPLED_IMAGES, len(images))
                self._costs[key] = _measure_cost(like, sample, loop.batch_size, now.seconds)
        return self._costs.get(key, _Cost(now.loop.cpu_ms_per_image / 1000))

    def choose_workers(self) -> int:
        """Choose how many workers to use: the fewest of 1, 2, 4 and 8 that are more than yours and
        have about the best rate. If you have 8 or more, twice as many are forecast.
        """
        workers = self.loop.workers
        counts = [count for count in (1, 2, 4, 8) if count > workers] or [2 * workers]
        rates = {count: self.forecast(self.make_loop(count))[0] for count in counts}
        enough = (1 - LEAST_NOISE) * max(rates.values())
        return next(count for count in counts if rates[count] >= enough)

    def forecast(self, loop: Loop) -> tuple[float, float]:
        """Return the images per second of a loop, and `Fix.error`. The model runs several times,
        with inputs that differ as those that were measured do.
        """
        rates = []
        for seed in range(_DRAWS):
            chance = np.random.default_rng(seed)
            work, step, cores = np.maximum(1 + self._errors * chance.standard_normal(3), 0.1)
            varied = replace(
                loop,
                read_s=tuple(chance.choice(loop.read_s, len(loop.read_s)).tolist()),
                work_s=loop.work_s * work,
                handoff_s=loop.handoff_s * work,
                take_s=loop.take_s * work,
                step_s=loop.step_s * step,
                cores=loop.cores * cores,
            )
            rates.append(min(forecast_rate(varied, seed=seed), self.now.ceiling))
        return fmean(rates), LEAST_NOISE + float(np.std(rates, ddof=1)) / fmean(rates)


@dataclass(frozen=True)
class _Cost:
    """CPU seconds of a form of images."""

    work_s: float
    """Of an image, with its share of the hand-over of its batch."""
    take_s: float = 0.0
    """Of a batch in the process that trains."""
    error: float = 0.0
    """Standard error, as a share."""


def _measure_cost(loader: Any, sample: int, batch_size: int, seconds: float) -> _Cost:
    """Measure the CPU time of a loader that has one worker, for whole rounds of the sample, because
    a few large images may have most of its work.
    """
    batches_a_round = ceil(sample / batch_size)
    with closing(fetch_batches(loader)) as batches:
        # The first batches load libraries.
        for _ in range(2):
            next(batches)
        cpu_began_s = measure_tree_cpu()
        own_began_s = process_time()
        began_s = perf_counter()
        count = 0
        while count == 0 or perf_counter() < began_s + _COST_SHARE * seconds:
            for _ in range(batches_a_round):
                next(batches)
            count += batches_a_round
        own_s = process_time() - own_began_s
        cpu_s = measure_tree_cpu() - cpu_began_s
    # A worker takes no more than the time. What is beyond it are threads beside the work.
    worker_s = min(max(_TICK_S, cpu_s - own_s), perf_counter() - began_s)
    error = min(LEAST_NOISE + _TICK_S / worker_s, _UNKNOWN)
    return _Cost(worker_s / count / batch_size, own_s / count, error)


def measure_cores(seconds: float = 0.2) -> float:
    """Return how many cores this process gets now if it asks for all.

    Example:
        >>> 0 < measure_cores(0.01) < 1000
        True
    """
    block = bytes(1 << 18)
    end_s = perf_counter() + seconds

    def burn(_: int) -> None:
        while perf_counter() < end_s:
            # Checksums release Python's lock.
            zlib.crc32(block)

    cores = range(count_cores())
    began_s = process_time()
    with ThreadPoolExecutor(len(cores)) as pool:
        list(pool.map(burn, cores))
    return max(0.1, (process_time() - began_s) / seconds)
