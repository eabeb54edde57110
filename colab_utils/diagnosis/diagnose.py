"""What training waits for: headspace first, then each stage of loading alone, then what would cure it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from colab_utils.diagnosis.drive_doctor import DriveHealth, examine_drive
from colab_utils.diagnosis.fixes import Fix, Situation, find_fixes
from colab_utils.diagnosis.resources import Resources, summarise_readings, watch_resources
from colab_utils.diagnosis.stages import time_stages
from colab_utils.diagnosis.timing import BatchTimes, Stage, count_workers, describe_error, make_stage, time_batches
from colab_utils.diagnosis.watchdog import watch
from colab_utils.drive import is_on_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.loading.loader import Loader

__all__ = ["Diagnosis", "Fix", "Stage", "diagnose"]

_CACHED_BATCHES = 4


_SAMPLED = 16  # images that the fixes are forecast on


_SHOWN_FIXES = 3


_TIMEOUT_S = 60.0  # for a batch


_FINE_HEADSPACE = 1.1  # under this, nothing that speeds up loading can win 10 %


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found; its fields are the keys of the command's JSON.

    ``headspace`` is images per second on cached batches divided by those now; ``stall_share`` is wait / (wait + step),
    0 to 1; *collate and hand-off* is what the other ``stages`` leave of a `Loader`'s time; ``fixes`` are empty where
    the loader is fine; ``confidence`` begins with high, medium or low; ``step`` is "real", "none" or "emulated ...".
    ``reads`` tells *cold* and *warm* reads apart, for a `CocoFolder` or a `ShardDataset`; ``resources`` is what the
    loader used while it ran; ``drive`` is what `examine_drive` found, where the dataset lies on Google Drive.
    """

    verdict: str
    headspace: float
    images_per_second: float
    stall_share: float
    stages: tuple[Stage, ...]
    fixes: tuple[Fix, ...]
    confidence: str
    batches: int
    step: str
    reads: tuple[Stage, ...] = ()
    resources: Resources | None = None
    drive: DriveHealth | None = None

    def __str__(self) -> str:
        reads = (f"  of reading, {stage}" for stage in self.reads)
        used = str(self.resources).splitlines() if self.resources else []
        best = sorted(self.fixes, key=lambda fix: -fix.images_per_second)[:_SHOWN_FIXES]
        more = [f"  ({len(self.fixes) - len(best)} more that win less)"] if len(self.fixes) > len(best) else []
        parts = (*(f"  {stage}" for stage in self.stages), *reads, *(f"  {fix}" for fix in best), *more)
        drive = [f"  {line}" for line in str(self.drive).splitlines()] if self.drive else []
        return "\n".join([self.verdict, *parts, *(f"  {line}" for line in used), *drive])


def diagnose(
    loader: Iterable[Any], step: Callable[..., Any] | None = None, *, seconds: float = 20, verify: bool = False,
    min_size: int = 800, max_size: int = 1333,
) -> Diagnosis:  # fmt: skip
    """Find what training waits for, how much could be won at most, and what would win it.

    It times your loader with your step, then the step on batches kept in memory: less than 1.1 times as fast, and your
    loader is fine. It times the loader alone and each stage alone: *read*, *decode* and *masks* of a `CocoFolder` or a
    `ShardDataset`, *sample* and *transform* of any other map-style dataset, and what happens to whole batches. Where
    there is something to win, it forecasts what each fix would bring: by short trials, on a sample of the images where
    the fix changes these, beside a stand-in that takes as long and as much of a core as your step, so that your weights
    stay as they are. Method: headspace analysis (facebookresearch/spdl, optimization guide); `forecast_rate` simulates
    how many workers are worth a trial. A `Loader`'s order is put back to where it stood.

    Args:
        loader: a ``DataLoader``, a `Loader`, or anything iterable again and again over batches.
        step: your training step, called as ``step(images, targets)``, or an `EmulatedStep`; None times the loader
            alone, and a copy of each batch in memory: then ``headspace`` says nothing about training.
        seconds: about how long to measure; each forecast, where there is something to win, takes 0.15 of it (up to
            three times that with a slow loader), and ``verify`` 0.4 of it for each fix. Without ``verify``, what can be
            simulated is not tried any more after four times these seconds: the default takes three minutes at most.
        verify: also measure the fixes for longer with your own step, those for the data on a sample of the images.
        min_size: the shorter side that training needs, pixels.
        max_size: the longer side that training needs, pixels.

    Raises:
        ColabUtilsError: the loader yields nothing, raises, gives no batch for a minute (the message says which worker
            waits where), or is an iterator; or the step fails.

    Example:
        >>> from colab_utils.diagnosis.timing import EmulatedStep
        >>> batches = [(["first image"], [{}]), (["second image"], [{}])]
        >>> found = diagnose(batches, EmulatedStep(5), seconds=0.5)
        >>> found.step, [stage.name for stage in found.stages]
        ('emulated 5 ms', ['wait', 'step'])
    """
    if isinstance(loader, Iterator):
        raise ColabUtilsError("expected a loader that starts again, found an iterator: pass the DataLoader itself")
    if not seconds > 0:
        raise ColabUtilsError(f"expected seconds over 0, found {seconds!r}")
    state = loader.state_dict() if isinstance(loader, Loader) else {}
    try:
        with torch.random.fork_rng(devices=[]):  # measuring changes no training run
            return _diagnose(loader, step, seconds, verify, {"min_size": min_size, "max_size": max_size})
    finally:
        if isinstance(loader, Loader):
            loader.load_state_dict(state)


def _diagnose(loader: Any, step: Any, seconds: float, verify: bool, sizes: dict[str, int]) -> Diagnosis:
    began_s = perf_counter()
    kept: list[Any] = []
    count = 0

    def keep_batch(*batch: Any) -> None:
        nonlocal count
        count += 1
        if len(kept) < _CACHED_BATCHES:  # while it warms up; copied, for a loader may use the memory again
            kept.append(copy.deepcopy(batch if len(batch) > 1 else batch[0]))
        try:
            _ = step is None or step(*batch)
        except Exception as error:
            found = f"expected a step that takes batch {count}, found {describe_error(error)}"
            raise ColabUtilsError(f"{found}. Try it alone: step(*next(iter(loader)))") from error

    watched = watch(loader, timeout_s=_TIMEOUT_S, on_stall="raise")
    with watch_resources(lambda: count) as used:
        now = time_batches(watched, keep_batch, batches=500, warmup=_CACHED_BATCHES, max_s=0.4 * seconds)
    # without a step: the least that any step does, which is to touch every byte of the batch once
    replay = step or (lambda *batch: copy.deepcopy(batch))
    cached = time_batches(kept, replay, batches=len(now.wait_s), warmup=1, max_s=0.15 * seconds)
    alone = now if step is None else time_batches(watched, batches=500, max_s=0.15 * seconds)
    size = round(now.images / len(now.wait_s))
    parts = time_stages(loader, kept[0], images=size, seconds=0.25 * seconds)
    kept.clear()
    workers = count_workers(loader)
    headspace, fixes = cached.images_per_second / now.images_per_second, []
    if isinstance(loader, Loader | DataLoader) and (step is None or headspace >= _FINE_HEADSPACE):
        indices = parts.indices[:_SAMPLED]
        situation = Situation(
            loader, step, now, cached, alone, parts.sample, indices, workers, seconds, verify, began_s
        )  # fmt: skip
        fixes = find_fixes(situation, **sizes)
    images = now.images / len(now.wait_s)
    stages = [*parts.sample.values(), *parts.batch]
    if isinstance(loader, Loader) and parts.sample:
        stages.append(_estimate_handoff(alone, parts.sample, max(1, workers)))
    stages.append(make_stage("wait", np.array(now.wait_s) * 1000 / images, now.wait_cpu_s / now.images * 1000))
    if step is not None:
        stages.append(make_stage("step", np.array(now.step_s) * 1000 / images, now.step_cpu_s / now.images * 1000))
    name = "none" if step is None else str(step) if getattr(step, "emulated", False) else "real"
    confidence = _describe_confidence(now)
    resources = summarise_readings(used)
    verdict = " ".join((describe_verdict(now, cached, stages, fixes, name, confidence), *resources.dangers))
    return Diagnosis(
        verdict, headspace, now.images_per_second, now.wait_share, tuple(stages), tuple(fixes), confidence,
        len(now.wait_s), name, parts.reads, resources, _ask_doctor(loader, 0.25 * seconds),
    )  # fmt: skip


def _ask_doctor(loader: Any, seconds: float) -> DriveHealth | None:
    dataset = getattr(loader, "dataset", None)
    if not isinstance(dataset, CocoFolder | ShardDataset) or not is_on_drive(dataset.folder):
        return None
    return examine_drive(dataset.folder, images=dataset, seconds=max(1.0, seconds))


def describe_verdict(
    now: BatchTimes, cached: BatchTimes, stages: Sequence[Stage], fixes: Sequence[Fix], step: str, confidence: str
) -> str:
    """The verdict: a few short sentences with their numbers, and how sure it is."""
    sure = f"({confidence.partition(':')[0]} confidence, {len(now.wait_s)} batches)"
    rate, ceiling = now.images_per_second, cached.images_per_second
    loading = [stage for stage in stages if stage.name not in ("wait", "step")]
    largest = max(loading, key=lambda stage: stage.median_ms, default=None)
    part = f" In loading, the largest stage is {largest.name}: {largest.median_ms:.1f} ms an image." if largest else ""
    if step == "none":
        start = f"The loader alone gives {rate:.1f} images/s {sure}.{part}"
        return f"{start} Without a step nothing says whether training waits for it: pass your step, or an EmulatedStep."
    emulated = "" if step == "real" else f", step of {step.removeprefix('emulated ')} (emulated)"
    rates = (
        f"{rate:.1f} images/s now, {ceiling:.1f} with cached batches, headspace {ceiling / rate:.2f}{emulated} {sure}"
    )
    if ceiling / rate < _FINE_HEADSPACE:
        return f"Your loader is fine, stop here: {rates}."
    rates_with = {fix.name: fix.images_per_second for fix in fixes if fix.name != "a step twice as fast"}
    best = max(rates_with, key=lambda fix: rates_with[fix], default="")
    tried = "measured" if any(fix.measured_images_per_second for fix in fixes) else "forecast"
    gains = best and rates_with[best] > 1.05 * rate
    cure = f" Best fix: {best}, {rates_with[best]:.1f} images/s ({tried})." if gains else ""
    # loading that takes the cores which the step itself needs is no waiting, and costs the same
    slower = sum(now.step_s) / now.images / max(sum(cached.step_s) / cached.images, 1e-9)
    crowd = f" It lacks CPU: beside the loader the step itself takes {slower:.1f} times as long." * (slower > 1.2)
    return f"Training waits {now.wait_share:.0%} of its time: {rates}.{crowd}{part}{cure}"


def _estimate_handoff(alone: BatchTimes, parts: dict[str, Stage], lanes: int) -> Stage:
    """What is left of a worker's time for one image: collate, the way between processes, and waiting for a core."""
    # batches of several workers arrive in bursts: a round of one batch from each is one unit of work
    rounds = [sum(alone.wait_s[i : i + lanes]) for i in range(0, len(alone.wait_s) - lanes + 1, lanes)]
    images = alone.images / len(alone.wait_s)
    wall_ms = np.array(rounds or [sum(alone.wait_s)]) * 1000 / images - sum(times.mean_ms for times in parts.values())
    cpu_ms = alone.cpu_ms_per_image - sum(times.cpu_ms for times in parts.values())
    return make_stage("collate and hand-off", np.maximum(wall_ms, 0.0), max(cpu_ms, 0.0))


def _describe_confidence(now: BatchTimes) -> str:
    error = float(now.batch_s.std() / np.sqrt(len(now.batch_s)) / now.batch_s.mean())
    level = "low"
    if len(now.batch_s) >= 20 and error < 0.05:
        level = "high"
    elif len(now.batch_s) >= 8 and error < 0.15:
        level = "medium"
    return f"{level}: {len(now.batch_s)} batches, the mean batch time is sure to {error:.0%}"
