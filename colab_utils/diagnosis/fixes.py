"""Fixes for a stall. A short trial forecasts each one; a longer trial measures it, if you ask."""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from math import hypot, inf
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

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
from colab_utils.data.sizes import plan_sizes
from colab_utils.diagnosis.noise import LEAST_NOISE, find_noise, is_faster
from colab_utils.diagnosis.timing import (
    BatchTimes,
    count_prefetch,
    count_workers,
    time_batches,
)
from colab_utils.diagnosis.watch import WatchedLoader
from colab_utils.drive import Retries
from colab_utils.errors import ColabUtilsError, describe_error
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.emulated_step import EmulatedStep
from colab_utils.loading.loader import Loader, make_loader
from colab_utils.machine import count_cores
from colab_utils.shards.copy import Copying
from colab_utils.shards.index import write_index
from colab_utils.shards.write import write_shards
from colab_utils.slow_drive import read_at_full_speed
from colab_utils.streams import is_remote

# Each fix has a name and a sentence that says what to do. The least effort for you comes first.
FIXES = {
    "persistent_workers": ("persistent workers", "Use persistent_workers=True"),
    "streams": (
        "more streams",
        "Load the files by make_loader(CocoFolder(...)), whose workers read many at once",
    ),
    "workers": ("more workers", "Use workers"),
    "prefetch": ("more prefetch", "Let each worker load more batches ahead"),
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
# Prepares the data of a trial, and returns the options of `open_like`.
_Prepare = partial[dict[str, Any]]
# The image sizes that training needs, in pixels: the defaults of `write_shards`.
_SIDES = {"min_size": 800, "max_size": 1333}
# Bytes of the shards that are copied for a trial.
_SAMPLE_BYTES = 2e8
# Resizing is a fix only if it leaves at most this share of the pixels.
_SMALLER = 0.9
# A trial goes on until the standard error of its rate is at most this share.
_SURE = 0.07
# A diagnosis ends with an error if one batch takes longer than this.
TIMEOUT_S = 60.0
# The emulated step of a trial keeps at least this share of a core busy.
_LEAST_BUSY = 0.01
# Without ``verify``, a diagnosis tries no more fixes when it has taken this many times its
# ``seconds``.
_LATE = 12.0
# A trial times at least this many batches. It stops earlier only if these batches take three times
# the trial's share of the ``seconds``.
_LEAST_BATCHES = 20
# Stands for the number of batches in an endless epoch.
_MANY = 10_000
# The short and the long trial of a fix take these shares of the ``seconds`` of a diagnosis.
_TRIAL_SHARE = 0.3
_VERIFY_SHARE = 0.5
# The warm-up ends after this many batches, or after this share of the ``seconds``. By then, the
# memory of each process has reached its usual size.
_WARMUP = 150
_WARMUP_SHARE = 0.15


@dataclass(frozen=True)
class Fix:
    """One fix, and the rate that it would bring."""

    id: str
    """A key of `FIXES`."""
    name: str
    sentence: str
    """What to do, and either what that brings or why it was not tried."""
    forecast_images_per_second: float | None = None
    """Rate of a short trial; None if the fix was not tried."""
    measured_images_per_second: float | None = None
    """Rate of a longer trial with your own step (``verify=True``); else None."""
    error: float = 0.0
    """Standard error of ``images_per_second``, as a share of it: 0.1 is 10 %."""

    @property
    def images_per_second(self) -> float:
        """Return the measured rate; without one, the forecast; without either, 0."""
        return self.measured_images_per_second or self.forecast_images_per_second or 0.0

    def __str__(self) -> str:
        text = f"{self.name}: {self.sentence}"
        if self.measured_images_per_second is not None:
            text += f" Measured: {describe_rate(self.measured_images_per_second, self.error)}."
        return text


def describe_rate(rate: float, error: float) -> str:
    """Return a rate as text, with its standard error if this is 5 % or more.

    Example:
        >>> describe_rate(7.21, 0.3), describe_rate(7.21, 0.04)
        ('7.2 images/s (give or take 30%)', '7.2 images/s')
    """
    text = f"{rate:.1f} images/s"
    if error >= LEAST_NOISE:
        text += f" (give or take {error:.0%})"
    return text


@dataclass(frozen=True)
class Situation:
    """What is known before any fix is tried."""

    loader: Any
    step: Callable[..., Any] | None
    loop: BatchTimes
    """Times of your loader with your step."""
    cached: BatchTimes
    """Times of your step on copies of batches in memory."""
    indices: Sequence[int]
    """Indices of the images with which the stages of loading were timed. Trials of shards use the
    same images.
    """
    seconds: float
    """About how long the diagnosis measures, in seconds. The trials take more time."""
    verify: bool
    """Whether to measure each fix for longer, with your own step."""
    began_s: float
    """When the diagnosis began, by `time.perf_counter`."""
    ceiling: float = inf
    """Images per second if loading took no time. No fix can give more."""
    has_restarts: bool = False
    """Whether workers were started again while the loop was timed."""

    @property
    def epoch_batches(self) -> int:
        """Return the number of batches in an epoch; a large number if the epoch is endless."""
        with suppress(TypeError):
            return max(1, len(self.loader))
        return _MANY

    @cached_property
    def repeated(self) -> BatchTimes:
        """Return the times of your loader when it is timed again as in a trial.

        Its rate may change without any fix: because files are in the page cache by now, because
        other programs have begun or ended, or by chance.
        """
        return _time(self, {}, self.make_placeholder(), _TRIAL_SHARE)

    def discount(self, rate: float, error: float) -> tuple[float, float]:
        """Return the rate of a fix and its standard error, less what your loader gains without the
        fix when it is timed again. If no gain is left, return the first rate of your loader.
        """
        again = self.repeated
        own_rate = self.loop.images_per_second
        ratio = again.images_per_second / own_rate
        if not is_faster(rate, own_rate * max(ratio, 1 / ratio)):
            return own_rate, self.loop.error
        if not is_gain(again.images_per_second, self.loop, again.error):
            return rate, error
        return rate / ratio, hypot(error, again.error, self.loop.error)

    def make_placeholder(self) -> EmulatedStep | None:
        """Return the step of a trial: an emulated one, because a trial must not train your model.

        It takes as long as your step takes on batches in memory, and keeps as much of a core busy.
        """
        if self.step is None or isinstance(self.step, EmulatedStep):
            return self.step
        step_s = self.cached.step_s
        busy = self.cached.step_cpu_s / sum(step_s)
        return EmulatedStep(1000 * fmean(step_s), min(max(busy, _LEAST_BUSY), 1.0))

    def choose_workers(self, load_ms: float, cpu_ms: float) -> int:
        """Choose how many workers to try.

        The number is the smallest of 1, 2, 4 and 8 that is larger than yours, and that is enough to
        keep either the step or all cores busy. If none is enough, 8 are tried. If your loader has 8
        or more already, 16 are tried.

        Args:
            load_ms: Time that one worker takes for an image.
            cpu_ms: CPU time that loading an image takes.
        """
        step_ms = 1000 * sum(self.cached.step_s) / self.cached.images if self.step else 0.0
        needed = 0.95 * load_ms / max(step_ms, cpu_ms / count_cores(), 1e-3)
        workers = count_workers(self.loader)
        for count in (1, 2, 4, 8):
            if count > workers and count >= needed:
                return count
        return 8 if workers < 8 else 16


@contextmanager
def open_like(
    now: Situation,
    dataset: Any = None,
    *,
    workers: int | None = None,
    prefetch: int | None = None,
    persistent: bool = False,
    packs: bool = False,
) -> Iterator[Any]:
    """Open a loader like yours for a trial, with one change.

    Args:
        now: What is known of your loader.
        dataset: Other data, repeated until an epoch has as many images as yours; None keeps yours.
        workers: Number of workers; None keeps yours.
        prefetch: Batches that each worker loads ahead; None keeps yours.
        persistent: Whether workers stay after an epoch. With False, they still stay if those of
            your loader do, or if it has no workers.
        packs: Whether to use `make_loader` even if your loader is a ``DataLoader``.

    Raises:
        ColabUtilsError: your dataset is iterable, and no other is given. It shares out its samples
            to the workers itself.
    """
    loader = now.loader
    same = dataset is None
    data = loader.dataset
    if not same:
        # Each image comes once before any comes again.
        images = now.epoch_batches * now.loop.batch_size
        data = Subset(dataset, np.resize(range(len(dataset)), images).tolist())
    if same and isinstance(data, IterableDataset):
        raise ColabUtilsError("an iterable dataset divides its samples among the workers itself")
    workers = count_workers(loader) if workers is None else workers
    prefetch = prefetch or count_prefetch(loader)
    batch_size = now.loop.batch_size
    if packs or isinstance(loader, Loader):
        # The GPU expands packed masks, but only if the program uses it already.
        device = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
        rebuilt: Any = make_loader(
            data,
            batch_size=batch_size,
            workers=workers,
            prefetch=prefetch,
            device=getattr(loader, "device", device),
            deliver=getattr(loader, "deliver", "dense"),
        )
    else:
        # A copy keeps all attributes of your loader. A new DataLoader would have only those that
        # are passed to it.
        rebuilt = copy(loader)
        changes: dict[str, Any] = {"num_workers": workers, "dataset": data, "_iterator": None}
        if workers:
            keeps = persistent or loader.persistent_workers or not loader.num_workers
            changes |= {"prefetch_factor": prefetch, "persistent_workers": keeps}
        if not same:
            changes["sampler"] = SequentialSampler(data)
        if not same and loader.batch_sampler is not None:
            changes["batch_size"] = batch_size
            changes["batch_sampler"] = BatchSampler(changes["sampler"], batch_size, False)
        vars(rebuilt).update(changes)
    try:
        yield rebuilt
    finally:
        if isinstance(rebuilt, Loader):
            rebuilt.close()


def find_fixes(now: Situation) -> list[Fix]:
    """Find every fix that applies, and forecast its rate by a short trial. With ``now.verify``,
    also measure the rate by a longer one.

    Fixes with less effort for you are tried first. Each trial changes one thing. Shards are tried
    with a few images in a temporary folder. A fix that fails, or for which no time is left, has no
    forecast, and its sentence says why.

    Returns:
        All fixes, the best first. Of those within 5 % of the best, the one with the least effort
        for you comes first.
    """
    with tempfile.TemporaryDirectory(prefix="colab_utils-") as folder:
        return rank_fixes([_try_out(now, *plan) for plan in _plan_fixes(now, Path(folder))])


def _plan_fixes(now: Situation, folder: Path) -> Iterator[tuple[str, str, _Prepare]]:
    """Yield each fix that applies, the least effort for you first: its id, what is added to its
    sentence, and what prepares its trial. Prepared data lie in ``folder``.
    """
    loader = now.loader
    dataset = loader.dataset
    workers = count_workers(loader)
    if now.has_restarts:
        yield "persistent_workers", "", partial(dict, persistent=True)
    if _reads_one_by_one(loader):
        yield "streams", "", partial(_widen, dataset)
    count = now.choose_workers(now.loop.find_load_ms(workers), now.loop.cpu_ms_per_image)
    more = f"={count}, not {workers}"
    if workers == 0 and isinstance(loader, DataLoader):
        more += ", and persistent_workers=True"
    yield "workers", more, partial(dict, workers=count)
    if workers:
        prefetch = 2 * count_prefetch(loader)
        yield "prefetch", f": {prefetch}, not {prefetch // 2}", partial(dict, prefetch=prefetch)
    if not isinstance(dataset, CocoFolder | ShardDataset):
        return
    # This is asked now, because no folder is slowed while a fix is prepared.
    is_slow = is_remote(dataset.folder)
    make = partial(_prepare_shards, now, folder, is_slow=is_slow)
    if isinstance(dataset, CocoFolder) or is_slow:
        yield "shards", "", partial(make, "shards")
    if not isinstance(loader, Loader):
        yield "packed_masks", "", partial(make, "packed_masks")
    if isinstance(dataset, CocoFolder):
        sizes = dataset.coco.sizes[[*now.indices]]
        share = plan_sizes(sizes, **_SIDES).prod(1).sum() / max(sizes.prod(1).sum(), 1)
        if share <= _SMALLER:
            yield "resize", f", which leaves {share:.0%} of the pixels", partial(make, "resize")


def _reads_one_by_one(loader: Any) -> bool:
    """Return whether a loader reads the image files of a remote folder one after the other."""
    dataset = loader.dataset
    if not isinstance(dataset, CocoFolder) or not is_remote(dataset.folder):
        return False
    return not isinstance(loader, Loader) or not loader.reads_ahead


def _widen(dataset: CocoFolder) -> dict[str, Any]:
    """Return the options of a loader that reads many files of this dataset at once."""
    wide = copy(dataset)
    wide.streams = "auto"
    return {"dataset": wide, "packs": True}


def is_gain(rate: float, loop: BatchTimes, error: float = 0.0) -> bool:
    """Return whether a rate is more than 5 % above that of your loop, and by more than two standard
    errors. ``error`` is the standard error of the rate, as a share of it.

    Example:
        >>> loop = BatchTimes((0.1,) * 9, (0.1,) * 9, 9, 1.0, 1.0)
        >>> is_gain(5.2, loop), is_gain(5.3, loop), is_gain(5.3, loop, error=0.1)
        (False, True, False)
    """
    noise = LEAST_NOISE + 2 * hypot(loop.error, error)
    return is_faster(rate, loop.images_per_second, noise)


def _describe_gain(rate: float, loop: BatchTimes, error: float) -> str:
    """Describe what a fix wins. That it wins nothing is said only if it is known: if a gain that
    counts is more than two standard errors away.
    """
    if is_gain(rate, loop, error):
        return f"about {describe_rate(rate, error)}"
    least = 1 + LEAST_NOISE - 2 * hypot(loop.error, error)
    if rate < least * loop.images_per_second:
        return "wins nothing"
    return "not known yet, because the times of batches differ too much. Raise seconds"


def rank_fixes(fixes: Sequence[Fix]) -> list[Fix]:
    """Sort fixes, the best first. Of those that are as good as the best, the one with the least
    effort for you comes first.

    A fix is as good as the best one if its rate is lower by at most 5 %, or by at most the standard
    error of the difference of the two rates.
    """
    best = max(fixes, key=lambda fix: fix.images_per_second)
    costs = [*FIXES]

    def order(fix: Fix) -> tuple[float, int]:
        margin = find_noise(hypot(fix.error, best.error))
        rate = fix.images_per_second
        if rate > max(0.0, 1 - margin) * best.images_per_second:
            rate = best.images_per_second
        return -rate, costs.index(fix.id)

    return sorted(fixes, key=order)


def _try_out(now: Situation, id: str, more: str, prepare: _Prepare) -> Fix:
    """Forecast a fix by a short trial with an emulated step. With ``now.verify``, also measure it
    by a longer trial with your step. ``more`` is added to its sentence.
    """
    name, sentence = FIXES[id]
    sentence += more
    least_s = (_WARMUP_SHARE + _TRIAL_SHARE) * now.seconds
    why = f"no time is left. The trial takes {max(1, least_s):.0f} s or more. Raise seconds"
    if now.verify or perf_counter() - now.began_s < _LATE * now.seconds:
        try:
            # A real Drive has cached the images by now, and would read them fast.
            with read_at_full_speed():
                options = prepare()
            forecast = _time(now, options, now.make_placeholder(), _TRIAL_SHARE)
            rate = min(forecast.images_per_second, now.ceiling)
            error = forecast.error
            # Your data may be in the page cache by now, which makes any trial faster. Data in
            # another form or place was not read before, so its rate is not corrected.
            if is_gain(rate, now.loop, error) and "dataset" not in options:
                rate, error = now.discount(rate, error)
            gain = _describe_gain(rate, now.loop, error)
            measured_rate = None
            if now.verify:
                measured = _time(now, options, now.step, _VERIFY_SHARE)
                measured_rate = measured.images_per_second
                error = measured.error
            return Fix(id, name, f"{sentence}: {gain}.", rate, measured_rate, error)
        except Exception as failure:
            # A trial that fails must not lose the results that the diagnosis has so far.
            why = describe_error(failure).removesuffix(".")
    return Fix(id, name, f"{sentence}. Not tried: {why}.")


def _time(
    now: Situation, options: dict[str, Any], step: Callable[..., Any] | None, share: float
) -> BatchTimes:
    """Time the loop of a trial.

    Each trial makes a new loader and begins at its first batch. So trials with the same order of
    images read the same images. Otherwise, their rates could not be compared on a slow Drive, where
    some images take longer than others.
    """
    with open_like(now, **options) as loader:
        watched = WatchedLoader(loader, TIMEOUT_S, "raise")
        return time_loop(watched, step, now.seconds, share, least=_LEAST_BATCHES)


def time_loop(
    watched: WatchedLoader, step: Any, seconds: float, share: float, **options: Any
) -> BatchTimes:
    """Time a loop for a share of the seconds of a diagnosis. Your loader warms up here in the same
    way as the loaders of the trials.
    """
    return time_batches(
        watched,
        step,
        batches=500,
        warmup=_WARMUP,
        warmup_s=_WARMUP_SHARE * seconds,
        max_s=share * seconds,
        most_error=_SURE,
        **options,
    )


def _prepare_shards(now: Situation, folder: Path, id: str, *, is_slow: bool) -> dict[str, Any]:
    """Put shards of some images on the local disk, and return the options of a loader for them.

    For a `CocoFolder`, shards are written with the images that were timed. If ``id`` is "resize",
    these are shrunk. For a `ShardDataset` in a slow folder (``is_slow``), the first shards are
    copied: up to 0.2 GB, but at least one. A `ShardDataset` in a fast folder is used where it is.
    """
    dataset = now.loader.dataset
    shards = folder / ("resized" if id == "resize" else "shards")
    if isinstance(dataset, CocoFolder):
        annotations = write_subset(dataset.coco, now.indices, folder / "sample.json")
        limits = _SIDES if id == "resize" else {"storage": "keep"}
        write_shards(dataset.folder, annotations, shards=shards, workers=1, max_bad=1.0, **limits)
        # Otherwise the disk would still be writing the shards during the trial.
        os.sync()
    elif is_slow:
        ends = accumulate(shard.bytes + shard.arrays_bytes for shard in dataset.index.shards)
        count = max(1, sum(end <= _SAMPLE_BYTES for end in ends))
        index = replace(dataset.index, shards=dataset.index.shards[:count], partial=True)
        Copying(dataset.folder, shards, Retries(), overwrite=False).run([*index.files()])
        write_index(shards, index)
    sample = ShardDataset(shards if shards.exists() else dataset.folder)
    return {"dataset": sample, "packs": id == "packed_masks"}
