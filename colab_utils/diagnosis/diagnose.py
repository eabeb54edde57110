"""What training waits for: headspace first, then each stage of loading alone, then what would cure
it.

How much a cure would bring is forecast by a short trial, and measured by a long one. And what
changed since an earlier diagnosis, or an earlier run under `watch`.
"""

import copy
import json
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset

from colab_utils.data.coco import write_subset
from colab_utils.data.sizes import plan_size
from colab_utils.diagnosis.summary import Cause, refine_causes
from colab_utils.diagnosis.timing import (
    BatchTimes,
    Stage,
    count_workers,
    find_tensors,
    time_batches,
    time_stages,
)
from colab_utils.diagnosis.watchdog import WatchedLoader, take_watched
from colab_utils.drive import find_profile, is_on_drive, read_at_full_speed, read_file
from colab_utils.errors import ColabUtilsError, describe_error
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.loading.emulated_step import EmulatedStep
from colab_utils.loading.loader import Loader, make_loader
from colab_utils.require import require_local_path, require_number
from colab_utils.runtime import count_cores, find_free_memory, quiet_fork
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.write import write_shards

FIXES = {  # the name of each fix, and what it is; those that cost you least come first
    "prefetch": ("more prefetch", "Keep more batches ahead for each worker"),
    "workers": ("more workers", "Use workers"),
    "local_files": ("image files on the local SSD", "Copy the files"),
    "shards": ("shards on the local SSD", "Run preprocess, then copy"),
    "packed_masks": ("packed masks", "Load those shards with make_loader: masks stay packed"),
    "resize": (
        "resize once offline",
        "Preprocess shrinks images that are larger than training needs",
    ),
    "data_and_workers": ("other data, with more workers", "Both together"),
}

_Prepare = partial[dict[str, Any]]  # gives the options of `open_like`
# in pixels: what training needs, as `write_shards` has it
_SIDES = {"min_size": 800, "max_size": 1333}
_SMALLER = 0.9  # of the pixels: shrinking to more is not worth it
_SAME = 0.95  # of the best rate: as good
_TIMEOUT_S = 60.0  # for a batch
_EPOCHS = 50  # of a sample in one: where an epoch ends, workers run dry
_MANY = 1_000_000
_LEAST_BUSY = 0.01  # of a core, of a step that does next to nothing
_LATE = 6.0  # times the seconds of a diagnosis: nothing more is tried
_LEAST_BATCHES = 20  # batches, or as many as three times its share of the seconds allow
_TRIAL_SHARE, _VERIFY_SHARE = 0.3, 0.5  # of the seconds of a diagnosis, for each fix
# batches, or of the seconds: until the memory of each process has grown
_WARMUP, _WARMUP_SHARE = 150, 0.15
_CACHED_BATCHES = 4
_CACHED_SHARE = 0.1  # of the free memory that copies of batches may take
_SAMPLED, _VERIFIED = 16, 64  # images that the fixes for the data are forecast on, and measured on
_FINE_HEADSPACE = 1.1  # under this, nothing that speeds up loading can win 10 %
_SURE = 2  # standard errors


@dataclass(frozen=True)
class Fix:
    """One cure and what it would bring."""

    id: str
    """A key of `FIXES`."""
    name: str
    sentence: str
    """What to do and what it brings; or why it was not tried."""
    forecast_images_per_second: float | None = None
    """By a short trial; None where it was not tried."""
    measured_images_per_second: float | None = None
    """By a longer one with your own step (``verify=True``); else None."""

    @property
    def images_per_second(self) -> float:
        """What was measured, else the forecast, else 0."""
        return self.measured_images_per_second or self.forecast_images_per_second or 0.0

    def __str__(self) -> str:
        measured = self.measured_images_per_second
        return f"{self.name}: {self.sentence}" + (
            "" if measured is None else f" Measured: {measured:.1f} images/s."
        )


@dataclass(frozen=True)
class Change:
    """One run beside an earlier one."""

    ratio: float
    """Images per second, over those before."""
    noise: float
    """How far the ratio of two equal runs may be from 1: two standard errors."""
    fails: bool
    """Whether the ratio is below what was asked for."""
    sentence: str

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found; its fields are the keys of the command's JSON, where ``stages`` is
    called ``layers``.
    """

    verdict: str
    """A few sentences with their numbers."""
    headspace: float
    """Images per second on cached batches divided by those now."""
    images_per_second: float
    """Now."""
    stall_share: float
    """Wait / (wait + step), 0 to 1."""
    stages: tuple[Stage, ...]
    """Of loading an image, then *wait* (its CPU time is that of all loading) and *step*; *collate
    and hand-off* is what the others leave of a `Loader`'s time, where it is waited for."""
    fixes: tuple[Fix, ...]
    """What would help, forecast by trials: the best first, and of equally good ones that which
    costs you least; empty where the loader is fine."""
    confidence: str
    """It begins with high, medium or low."""
    batches: int
    """How many were timed."""
    step: str
    """real, none, or emulated ..."""
    error: float = 0.0
    """Standard error of the mean time of a batch, as a share of it."""
    change: Change | None = None
    """Beside an earlier one."""
    causes: tuple[Cause, ...] = ()
    """Why training waits, the largest share first; empty where the loader is fine."""

    def __str__(self) -> str:
        lines = [str(line) for line in (*self.stages, *self.fixes, self.change) if line]
        return "\n".join([self.verdict, *map(str, self.causes), *(f"  {line}" for line in lines)])


def diagnose(
    loader: Iterable[Any],
    step: Callable[..., Any] | None = None,
    *,
    seconds: float = 20,
    verify: bool = False,
    restore: Sequence[Any] = (),
) -> Diagnosis:
    """Find what training waits for, how much could be won at most, and what would win it.

    It times your loader with your step, then the step on copies of a few batches in memory: less
    than 1.1 times as fast, and your loader is fine. It times each stage alone, in a worker process
    of its own: *read*, *decode* and *masks* of a `CocoFolder` or a `ShardDataset`, *sample* and
    *transform* of any other map-style dataset, *collate*; and how batches are handed over. Where
    there is something to win, it tries each fix for a few seconds, on a sample of the images where
    the fix changes these, beside an emulated step that takes as long and as much of a core as
    yours. Method: headspace analysis (facebookresearch/spdl, optimization guide).

    **Your step really trains.** It runs on the loader's batches, then many times on the few copies.
    Pass ``restore=(model, optimizer)``, and both are put back to where they stood. The states of
    all random generators (Python, numpy, torch, CUDA) and the order of a `Loader` are put back in
    any case.

    Args:
        loader: a ``DataLoader``, a `Loader`, or anything iterable again and again over batches.
        step: your training step, called as ``step(images, targets)``, or an `EmulatedStep`; None
            times the loader alone: then ``headspace`` is 1 and says nothing.
        seconds: about how long to measure. Each fix, where there is something to win, takes 0.3 of
            it, half of that untimed, until the memory of each process has grown (up to three times
            0.3 with a slow loader); and ``verify`` 0.5 of it more. Without ``verify``, no fix is
            tried any more after six times these seconds.
        verify: also measure the fixes for longer with your own step, those for the data on a sample
            of the images.
        restore: what your step changes: a model, its optimizer, a scheduler; anything with
            ``state_dict`` and ``load_state_dict``.

    Raises:
        ColabUtilsError: the loader yields nothing, raises, gives no batch for a minute (the message
            says which worker waits where), or is an iterator; or the step fails.

    Example:
        >>> from colab_utils.loading.emulated_step import EmulatedStep
        >>> batches = [(["first image"], [{}]), (["second image"], [{}])]
        >>> found = diagnose(batches, EmulatedStep(5), seconds=0.5)
        >>> found.step, [stage.name for stage in found.stages]
        ('emulated 5 ms', ['wait', 'step'])
    """
    if isinstance(loader, Iterator | str) or not hasattr(loader, "__iter__"):
        found = "an iterator" if isinstance(loader, Iterator) else repr(loader)
        raise ColabUtilsError(
            f"expected a loader that starts again, found {found}: pass the DataLoader itself"
        )
    require_number("seconds", seconds, above=0)
    loader = take_watched(loader)
    with put_back(loader, restore):
        return _diagnose(loader, step, seconds, verify)


@contextmanager
def put_back(loader: Any, restore: Sequence[Any]) -> Iterator[None]:
    """Put back what measured batches and steps change: all random states, the loader's order, and
    these parts.

    Raises:
        ColabUtilsError: a part has no ``state_dict`` and ``load_state_dict``.

    Example:
        >>> before = random.getstate()
        >>> with put_back(None, restore=()):
        ...     _ = random.random()
        >>> random.getstate() == before
        True
    """
    for part in restore:
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise ColabUtilsError(
                f"expected restore=(model, optimizer), found {type(part).__name__} too: leave it "
                "out"
            )
    own = [
        getattr(owner, "generator", None) for owner in (getattr(loader, "sampler", None), loader)
    ]
    states: list[tuple[Callable[[Any], Any], Any]] = [
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),
    ]
    for generator in (torch.default_generator, *torch.cuda.default_generators, *own):
        if isinstance(generator, torch.Generator):
            states.append((generator.set_state, generator.get_state()))
    for part in (*restore, loader) if isinstance(loader, Loader) else restore:
        states.append((part.load_state_dict, copy.deepcopy(part.state_dict())))
    try:
        yield
    finally:
        for put, state in states:
            put(state)


def _keep_batch(kept: dict[int, Any], number: int, batch: Any) -> None:
    """Copy batches 1, 2, 4, 8, ... and keep the last four, or fewer where memory is short: early
    ones come while the step still warms up.
    """
    if (number + 1) & number:
        return
    tensors, room = find_tensors(batch), _CACHED_SHARE * find_free_memory()
    if tensors and tensors[0].is_cuda:
        room = _CACHED_SHARE * torch.cuda.mem_get_info(tensors[0].device)[0]
    most = min(_CACHED_BATCHES, int(room / max(1, sum(tensor.nbytes for tensor in tensors))))
    while kept and len(kept) >= most:
        del kept[min(kept)]
    kept[number] = copy.deepcopy(batch)  # a loader may use its memory again


def _diagnose(loader: Any, step: Any, seconds: float, verify: bool) -> Diagnosis:
    began_s, kept = perf_counter(), dict[int, Any]()
    watched = WatchedLoader(loader, _TIMEOUT_S, "raise")
    now = _time_loop(watched, step, seconds, 0.5, on_batch=partial(_keep_batch, kept))
    rate, size = now.images_per_second, round(now.images / len(now.wait_s))
    cached, slower, ceiling = now, 1.0, rate
    if step is not None:
        cached = time_batches(
            [*kept.values()], step, batches=len(now.wait_s), warmup=1, max_s=0.15 * seconds
        )
        slower = max(
            1.0, fmean(now.step_s[number] for number in kept) / max(fmean(cached.step_s), 1e-9)
        )
        ceiling = slower * now.images / sum(now.step_s)
    found = time_stages(loader, kept[max(kept)], images=size, seconds=0.25 * seconds)
    kept.clear()
    fixes, waits = [], step is None or ceiling >= _FINE_HEADSPACE * rate
    if waits and isinstance(loader, Loader | DataLoader):
        indices = found.indices[: _VERIFIED if verify else _SAMPLED]
        situation = Situation(
            loader, step, now, cached, found.stages, indices, seconds, verify, began_s
        )
        fixes = find_fixes(situation)
    loading = [*found.stages.values()]
    if isinstance(loader, Loader) and loading and waits:
        loading.append(_estimate_handoff(now, loading, count_workers(loader)))
    summary = watched.summary()
    causes = refine_causes(
        summary.causes, loading, slower=slower, step_share=1 - now.wait_share, waits=waits
    )
    stages = [
        *loading,
        Stage.from_calls("wait", np.array(now.wait_s) * 1000 / size, now.cpu_ms_per_image),
    ]
    if step is not None:
        stages.append(
            Stage.from_calls(
                "step", np.array(now.step_s) * 1000 / size, now.step_cpu_s / now.images * 1000
            )
        )
    name = "none" if step is None else str(step) if getattr(step, "emulated", False) else "real"
    verdict = [describe_verdict(now, ceiling, slower, loading, fixes, name)]
    verdict += [f"{cause.why} {cause.next}" for cause in causes if cause.id == "memory"]
    verdict += (
        [f"The stages of a sample could not be timed: {found.unseen}"] if found.unseen else []
    )
    return Diagnosis(
        " ".join(verdict),
        ceiling / rate,
        rate,
        now.wait_share,
        tuple(stages),
        tuple(fixes),
        _describe_confidence(now),
        len(now.wait_s),
        name,
        now.error,
        causes=tuple(causes),
    )


def describe_verdict(
    now: BatchTimes,
    ceiling: float,
    slower: float,
    stages: Sequence[Stage],
    fixes: Sequence[Fix],
    step: str,
) -> str:
    """The verdict: a few short sentences with their numbers, and how sure it is.

    ``ceiling`` is the rate on cached batches, images per second; beside the loader the same step
    takes ``slower`` times as long. ``stages`` are those of loading.
    """
    rate, sure = now.images_per_second, f"(confidence {_describe_confidence(now)})"
    largest = max(stages, key=lambda stage: stage.mean_ms, default=None)
    part = (
        f" In loading, the largest stage is {largest.name}: {largest.mean_ms:.1f} ms an image."
        if largest
        else ""
    )
    if step == "none":
        start = f"The loader alone gives {rate:.1f} images/s {sure}.{part}"
        return (
            f"{start} Without a step nothing says whether training waits for it: pass your "
            "step, or an EmulatedStep."
        )
    head = f"headspace {ceiling / rate:.2f}, {step} step {sure}"
    rates = f"{rate:.1f} images/s now, {ceiling:.1f} with cached batches, {head}"
    if ceiling / rate < _FINE_HEADSPACE:
        return f"Your loader is fine, stop here: {rates}."
    cure = ""
    if fixes and fixes[0].images_per_second > 1.05 * rate:
        tried = "measured" if fixes[0].measured_images_per_second else "forecast"
        cure = f" Best fix: {fixes[0].name}, {fixes[0].images_per_second:.1f} images/s ({tried})."
    # loading that takes the cores which the step itself needs is no waiting, and costs the same
    contention = (
        f" It lacks CPU: beside the loader the step itself takes {slower:.1f} times as long."
        * (slower > 1.2)
    )
    return f"Training waits {now.wait_share:.0%} of its time: {rates}.{contention}{part}{cure}"


def _estimate_handoff(now: BatchTimes, stages: Sequence[Stage], workers: int) -> Stage:
    """What is left of a worker's time for one image: collate, the way between processes, and
    waiting for a core.
    """
    wall_ms = now.find_load_ms(workers) - sum(stage.mean_ms for stage in stages)
    cpu_ms = now.cpu_ms_per_image - sum(stage.cpu_ms for stage in stages)
    return Stage.from_calls("collate and hand-off", [max(wall_ms, 0.0)], max(cpu_ms, 0.0))


def _describe_confidence(now: BatchTimes) -> str:
    count, error = len(now.batch_s), now.error
    level = (
        "high"
        if count >= 20 and error < 0.05
        else "medium"
        if count >= 8 and error < 0.15
        else "low"
    )
    return f"{level}: {count} batches, the mean batch time is sure to {error:.0%}"


def compare_runs(
    before: Mapping[str, float], after: Mapping[str, float], *, fail_below: float = 0.0
) -> Change:
    """Compare two runs as `read_run` gives them; ``fail_below`` is a ratio.

    Example:
        >>> before = {"images_per_second": 12.0, "wait_share": 0.8, "error": 0.02}
        >>> print(compare_runs(before, {"images_per_second": 48.0, "wait_share": 0.1, "error": 0.02}))
        12.0 → 48.0 images/s, 4.00 times as many: more than the noise (6%). Waits 80% → 10%.
    """
    rates, waits = (
        [run[key] for run in (before, after)] for key in ("images_per_second", "wait_share")
    )
    ratio = rates[1] / max(rates[0], 1e-9)
    noise = _SURE * math.hypot(before["error"], after["error"])
    size = "more than the noise" if abs(ratio - 1) > noise else "within the noise"
    sentence = (
        f"{rates[0]:.1f} → {rates[1]:.1f} images/s, {ratio:.2f} times as many: {size} "
        f"({noise:.0%})."
    )
    return Change(
        ratio, noise, ratio < fail_below, f"{sentence} Waits {waits[0]:.0%} → {waits[1]:.0%}."
    )


def read_run(path: str | Path) -> dict[str, float]:
    """``images_per_second``, ``wait_share`` and ``error`` of what `Summary.save` or ``diagnose
    --json`` wrote.

    Raises:
        ColabUtilsError: there is no such file, or it is something else.

    Example:
        >>> read_run("no/such/before.json")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected the JSON of an earlier run at ...
    """
    file = require_local_path(path)
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
        run.setdefault("wait_share", run.get("stall_share"))  # of a diagnosis
        return {key: float(run[key]) for key in ("images_per_second", "wait_share", "error")}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        found = f"expected the JSON of an earlier run at {path}, found none"
        raise ColabUtilsError(f"{found}: write one with --json or Summary.save") from None


@dataclass(frozen=True)
class Situation:
    """What was measured before any fix."""

    loader: Any
    step: Callable[..., Any] | None
    loop: BatchTimes
    """Your loader with your step."""
    cached: BatchTimes
    """Your step on batches that lie ready."""
    stages: dict[str, Stage]
    """Of loading, by name."""
    indices: Sequence[int]
    """Of the images that these were timed on."""
    seconds: float
    """Of the whole diagnosis."""
    verify: bool
    """Whether to measure each fix for longer, with your own step."""
    began_s: float
    """When the diagnosis began, by `time.perf_counter`."""

    @property
    def prefetch(self) -> int:
        """Batches ahead for each worker."""
        return (
            getattr(self.loader, "prefetch", None)
            or getattr(self.loader, "prefetch_factor", None)
            or 2
        )

    def make_placeholder(self) -> EmulatedStep | None:
        """A step as long and as busy as yours on batches that lie ready: trials train nothing."""
        if self.step is None or isinstance(self.step, EmulatedStep):
            return self.step
        wall_s, cpu_s = sum(self.cached.step_s), self.cached.step_cpu_s
        return EmulatedStep(
            1000 * wall_s / len(self.cached.step_s), min(max(cpu_s / wall_s, _LEAST_BUSY), 1.0)
        )

    def choose_workers(self, load_ms: float, cpu_ms: float) -> int:
        """How many workers to try where one takes so long for an image: the fewest, more than now,
        that keep the step busy, or all cores.
        """
        step_ms = 1000 * sum(self.cached.step_s) / self.cached.images if self.step else 0.0
        needed = 0.95 * load_ms / max(step_ms, cpu_ms / count_cores(), 1e-3)
        counts = [count for count in (1, 2, 4, 8) if count > count_workers(self.loader)]
        return next((count for count in counts if count >= needed), counts[-1] if counts else 16)


@contextmanager
def open_like(
    now: Situation,
    dataset: Any = None,
    *,
    workers: int | None = None,
    prefetch: int | None = None,
    packs: bool = False,
) -> Iterator[Any]:
    """A loader like yours, for a trial: over other data, with other workers, more batches ahead, or
    by `make_loader`.

    Raises:
        ColabUtilsError: your dataset deals its work to the workers itself.
    """
    loader, same = now.loader, dataset is None
    data = loader.dataset if same else dataset
    if same and isinstance(data, IterableDataset):
        raise ColabUtilsError("an iterable dataset deals its work to the workers itself")
    workers, prefetch = (
        count_workers(loader) if workers is None else workers,
        prefetch or now.prefetch,
    )
    batch_size = round(now.loop.images / len(now.loop.wait_s))
    if packs or isinstance(loader, Loader):
        # the masks of other people's loaders are expanded on the GPU, too, where there is one
        device = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
        endless = data if same else Subset(data, [*range(len(data))] * _EPOCHS)
        rebuilt: Any = make_loader(
            endless,
            batch_size=batch_size,
            workers=workers,
            prefetch=prefetch,
            device=getattr(loader, "device", device),
            deliver=getattr(loader, "deliver", "dense"),
        )
    else:
        names = ("collate_fn", "pin_memory", "worker_init_fn", "multiprocessing_context")
        settings = {name: getattr(loader, name) for name in names}
        if workers:
            settings |= {"prefetch_factor": prefetch, "persistent_workers": True}
        if same and loader.batch_sampler is not None:
            settings["batch_sampler"] = loader.batch_sampler
        else:
            settings["batch_size"] = None if loader.batch_sampler is None else batch_size
            # the same images in the same order in each pass, all of them before one comes again
            order = torch.Generator().manual_seed(0)
            settings["sampler"] = (
                loader.sampler if same else RandomSampler(data, num_samples=_MANY, generator=order)
            )
        with quiet_fork():
            rebuilt = DataLoader(data, num_workers=workers, **settings)
    try:
        yield rebuilt
    finally:
        getattr(rebuilt, "close", int)()


def find_fixes(now: Situation) -> list[Fix]:
    """Every fix that applies: its forecast by a short trial and, where that is wanted, its measured
    rate.

    Those of the data are tried first, on a sample of it in a temporary folder. A fix that cannot be
    tried, or for which there is no time left, has no forecast: its sentence says why.

    Returns:
        The best first; of those within 5 %, the one that costs you least.
    """
    workers, prefetch = count_workers(now.loader), 2 * now.prefetch
    count = now.choose_workers(now.loop.find_load_ms(workers), now.loop.cpu_ms_per_image)
    with tempfile.TemporaryDirectory(prefix="colab_utils-") as folder:
        plans = _plan_data(now, Path(folder))
        plans.append(
            (_make_fix("workers", f"={count}, not {workers}"), partial(dict, workers=count))
        )
        if workers:
            plans.append(
                (
                    _make_fix("prefetch", f": {prefetch}, not {now.prefetch}"),
                    partial(dict, prefetch=prefetch),
                )
            )
        return rank_fixes([_try_out(now, *plan) for plan in plans])


def _make_fix(id: str, more: str = "") -> Fix:
    """A fix that was not tried yet."""
    name, sentence = FIXES[id]
    return Fix(id, name, f"{sentence}{more}")


def rank_fixes(fixes: Sequence[Fix]) -> list[Fix]:
    """The best first; those within 5 % are one group, in the order of what they cost you."""
    rest = sorted(fixes, key=lambda fix: -fix.images_per_second)
    ranked: list[Fix] = []
    while rest:
        group = [fix for fix in rest if fix.images_per_second >= _SAME * rest[0].images_per_second]
        ranked += sorted(group, key=lambda fix: [*FIXES].index(fix.id))
        rest = rest[len(group) :]
    return ranked


def _try_out(now: Situation, fix: Fix, prepare: _Prepare) -> Fix:
    """Forecast a fix by a short trial beside a placeholder for the step; measure it for longer, if
    that is wanted.
    """
    why = "there is no time left, raise seconds"
    if now.verify or perf_counter() - now.began_s < _LATE * now.seconds:
        try:
            with read_at_full_speed():  # what was timed lies in Drive's cache
                options = prepare()
            rate = _time(now, options, now.make_placeholder(), _TRIAL_SHARE)
            measured = _time(now, options, now.step, _VERIFY_SHARE) if now.verify else None
            gain = (
                f"about {rate:.1f} images/s"
                if rate > 1.05 * now.loop.images_per_second
                else "wins nothing"
            )
            return Fix(fix.id, fix.name, f"{fix.sentence}: {gain}.", rate, measured)
        except Exception as error:  # what was found out so far is worth more
            why = describe_error(error).removesuffix(".")
    return replace(fix, sentence=f"{fix.sentence}. Not tried: {why}.")


def _time(
    now: Situation, options: dict[str, Any], step: Callable[..., Any] | None, share: float
) -> float:
    """Images a second; each time from the same batch on, because images of a slow Drive differ in
    their times.
    """
    with open_like(now, **options) as loader:
        watched = WatchedLoader(loader, _TIMEOUT_S, "raise")
        return _time_loop(watched, step, now.seconds, share, least=_LEAST_BATCHES).images_per_second


def _time_loop(
    watched: WatchedLoader, step: Any, seconds: float, share: float, **options: Any
) -> BatchTimes:
    """Time a loop for its share of the seconds of a diagnosis: today's loader warms up as those of
    the trials do.
    """
    return time_batches(
        watched,
        step,
        batches=500,
        warmup=_WARMUP,
        warmup_s=_WARMUP_SHARE * seconds,
        max_s=share * seconds,
        **options,
    )


def _plan_data(now: Situation, folder: Path) -> list[tuple[Fix, _Prepare]]:
    """Other forms and places of the data; what costs you most is tried first."""
    dataset, by_shards = now.loader.dataset, dict[str, str]()  # id to what else is to be told
    if not isinstance(dataset, CocoFolder | ShardDataset):
        return []
    if isinstance(dataset, CocoFolder):
        had = dataset.coco.sizes[[*now.indices]]
        planned = [plan_size(*size, **_SIDES) for size in had.tolist()]
        share = np.prod(planned, axis=-1).sum() / max(had.prod(axis=-1).sum(), 1)
        if share <= _SMALLER:
            by_shards["resize"] = f" to {share:.0%} of the pixels"
    if not isinstance(now.loader, Loader):
        by_shards["packed_masks"] = ""
    if isinstance(dataset, CocoFolder) or _is_slow(dataset):
        by_shards["shards"] = ""
    # No folder is slowed any more while a fix is prepared.
    make = partial(_prepare_shards, now, folder, is_slow=_is_slow(dataset))
    plans = [(_make_fix(id, more), partial(make, id)) for id, more in by_shards.items()]
    if plans:
        cpu_ms = sum(
            stage.cpu_ms
            for stage in now.stages.values()
            if stage.name in ("read", "decode", "masks")
        )
        workers = now.choose_workers(cpu_ms, cpu_ms)  # near the GPU, no file is waited for
        first, prepare = plans[0]
        both = replace(first, id="data_and_workers", name=f"{first.name}, and workers={workers}")
        plans.insert(0, (both, partial(prepare, workers=workers)))
    if isinstance(dataset, CocoFolder) and _is_slow(dataset):
        plans.append((_make_fix("local_files"), partial(_copy_files, now, folder / "files")))
    return plans


def _is_slow(dataset: CocoFolder | ShardDataset) -> bool:
    return find_profile(dataset.folder) is not None or is_on_drive(dataset.folder)


def _prepare_shards(
    now: Situation, folder: Path, id: str, *, is_slow: bool, **options: Any
) -> dict[str, Any]:
    """Return a loader's options for shards of the images that were timed, as they are or resized.

    They lie on the local disk; shards are copied to it where they lie on a slow one (``is_slow``).
    """
    dataset, shards = now.loader.dataset, folder / ("resized" if id == "resize" else "shards")
    if isinstance(dataset, CocoFolder):
        annotations = write_subset(dataset.coco, now.indices, folder / "sample.json")
        limits = _SIDES if id == "resize" else {"storage": "keep"}
        write_shards(dataset.folder, annotations, shards=shards, workers=1, max_bad=1.0, **limits)
        os.sync()  # it is written now, and not during the trial
    elif is_slow:
        first = dataset.index.shards[0]
        copy_shards(
            dataset.folder, shards, limit_gb=max(0.2, (first.bytes + first.arrays_bytes) / 1e9)
        )
    sample = ShardDataset(shards if shards.exists() else dataset.folder)
    return {"dataset": sample, "packs": id == "packed_masks", **options}


def _copy_files(now: Situation, folder: Path) -> dict[str, Any]:
    """The image files as they are, on the local disk."""
    dataset: CocoFolder = now.loader.dataset
    for index in now.indices:
        path = folder / dataset.find_path(index).relative_to(dataset.folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read_file(dataset.find_path(index)))
    local = CocoFolder(folder, write_subset(dataset.coco, now.indices, folder / "annotations.json"))
    os.sync()  # what was copied is written now, and not during the trial
    return {"dataset": local}
