"""`compare`: every strategy on the same images, checked to be equal first, then timed in turns."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from colab_utils.comparison.equality import find_difference
from colab_utils.comparison.prepared import PreparedData
from colab_utils.comparison.strategies import Setting, Strategy, choose_strategies
from colab_utils.diagnosis.resources import measure_memory
from colab_utils.diagnosis.timing import BatchTimes, EmulatedStep, put_back, time_batches
from colab_utils.drive import DriveProfile, get_profile, is_on_drive
from colab_utils.errors import ColabUtilsError, describe_error
from colab_utils.runtime import Machine, describe_machine, drop_cached, show_progress

__all__ = ["Comparison", "StrategyTiming", "compare", "find_pay_back"]

_MAX_RUN_S = 30.0  # for one repeat of one strategy
_BASELINES = ("dataloader", "sequential")  # what the others are compared with: the first that was timed
_HELPS = 1.1  # times as fast as the baseline


@dataclass(frozen=True)
class StrategyTiming:
    """One strategy's row; figures are medians over the repeats, and None where it could not be timed."""

    name: str
    """Of the strategy."""
    idea: str
    """What it does, in one sentence."""
    place: str
    """Where it reads from while it trains."""
    comparable: bool
    """Whether its samples are the reference's."""
    difference: str
    """How they differ; empty where they do not."""
    images_per_second: float | None = None
    """Images trained in a second, warm."""
    batch_ms_median: float | None = None
    """Wait and step of a batch, milliseconds: the median."""
    batch_ms_p95: float | None = None
    """The same: the 95th percentile."""
    wait_share: float | None = None
    """Wait / (wait + step), 0 to 1."""
    first_batch_s: float | None = None
    """Seconds until the first batch came, cold, the start of the workers included."""
    cpu_ms_per_image: float | None = None
    """CPU milliseconds of loading an image, over all processes."""
    repeats_images_per_second: tuple[float, ...] = ()
    """``images_per_second`` of each repeat."""
    note: str = ""
    """Why it could not be timed."""
    cold_images_per_second: float | None = None
    """Images trained in a second of the first epoch, with nothing in the system's memory, start included."""
    ratio: float | None = None
    """Times as fast as the baseline, repeat by repeat: the median."""
    ratio_low: float | None = None
    """The lowest of the repeats."""
    ratio_high: float | None = None
    """The highest of the repeats."""
    ram_bytes: int | None = None
    """Memory that it took, workers included."""
    drive_bytes: int | None = None
    """What it needs on Drive."""
    ssd_bytes: int | None = None
    """What it needs on the local disk."""
    once_minutes: float | None = None
    """Minutes to prepare the complete dataset, once."""
    session_minutes: float | None = None
    """Minutes to copy the complete dataset, in each session."""
    first_epoch_minutes: float | None = None
    """Minutes of the first epoch of the complete dataset."""
    epoch_minutes: float | None = None
    """Minutes of each later epoch of the complete dataset."""
    paid_back_epochs: float | None = None
    """Epochs of one session after which it stays ahead of the baseline (see `find_pay_back`); None: never."""
    timeline: tuple[tuple[float, float, float], ...] = ()
    """For each batch of the cold run: when it was asked for, when its step began and when it ended, seconds."""

    def __str__(self) -> str:
        if self.images_per_second is None:
            return f"{self.name}: not timed, {self.note}"
        spread = f"{min(self.repeats_images_per_second):.1f} to {max(self.repeats_images_per_second):.1f}"
        warning = "" if self.comparable else f"; NOT COMPARABLE: {self.difference}"
        rate = f"{self.images_per_second:.1f} images/s ({spread}), waiting {self.wait_share:.0%}"
        return f"{self.name} ({self.place}): {rate}{warning}"


@dataclass(frozen=True)
class Comparison:
    """What `compare` found; its fields are the keys of the command's JSON."""

    machine: Machine
    """Where it ran."""
    dataset: dict[str, Any]
    """``name``, ``fingerprint``, ``images`` (compared) and ``total`` (in the dataset)."""
    strategies: tuple[StrategyTiming, ...]
    """One row each."""
    step: str
    """"real" or "emulated ..."."""
    drive: str
    """How slow Drive was made."""
    batch_size: int
    """Images in a batch."""
    batches: int
    """Timed batches of each repeat."""
    repeats: int
    """How often each strategy was timed."""
    workers: int
    """Worker processes."""
    note: str
    """What is missing, and images that were left out."""
    baseline: str = ""
    """The strategy that the others are compared with."""
    no_help: tuple[str, ...] = ()
    """The strategies that are less than 1.1 times as fast as the baseline."""

    def __str__(self) -> str:
        head = f"{self.dataset['images']} images of {self.dataset['name']}, step {self.step}, {self.machine}"
        return "\n  ".join([head, *map(str, self.strategies), *([self.note] if self.note else [])])


def compare(
    images: str | Path, annotations: str | Path, *, folder: str | Path,
    strategies: Sequence[str | Strategy] | None = None, drive_profile: str | DriveProfile | None = "typical",
    step: Callable[..., Any] | None = None, step_ms: float = 100.0, batch_size: int = 4, batches: int = 24,
    repeats: int = 3, workers: int = 2, max_images: int = 240, min_size: int = 800, max_size: int = 1333,
    timeline_s: float = 30.0, restore: Sequence[Any] = (),
) -> Comparison:  # fmt: skip
    """Time every strategy on the same images with the same step, after checking that their samples are equal.

    Every strategy delivers ``(images, targets)`` as torchvision models take them, on the GPU if there is one. First
    each gives an epoch, which must hold every image once, and samples equal to the reference's. Then each runs cold,
    with nothing of its files in the system's memory. Then all are timed warm, in turns, so that a machine that slows
    down slows all of them. Figures are medians over the repeats. A strategy that fails gets a row with the reason, and
    the others go on. Ctrl-C keeps the rows that are measured.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        folder: where prepared data is kept for the next comparison; made if need be.
        strategies: names of `STRATEGIES`, or your own `Strategy`; None takes `DEFAULT_STRATEGIES`.
        drive_profile: how slow Drive is made (`DRIVE_PROFILES`); None or "none" reads ``images`` as they are.
        step: the training step, called as ``step(images, targets)``. It really trains its model, hundreds of times:
            name what it changes in ``restore``. None takes ``EmulatedStep(step_ms)``.
        step_ms: length of the emulated step, milliseconds.
        batch_size: images in a batch.
        batches: timed batches of each repeat.
        repeats: how often each strategy is timed, each time with new workers.
        workers: worker processes of the strategies that have workers.
        max_images: the comparison takes the first so many images of the dataset.
        min_size: the shorter side that training needs, pixels: larger images are stored smaller.
        max_size: the longer side that training needs, pixels.
        timeline_s: seconds that each strategy runs cold.
        restore: what your step changes, ``(model, optimizer)`` say: both are put back, as all random states are.

    Raises:
        ColabUtilsError: an unknown strategy, a missing dataset, or no strategy that could be timed.
    """
    chosen = choose_strategies(strategies)
    if min(batch_size, batches, repeats, max_images) < 1 or workers < 0:
        found = f"{batch_size=}, {batches=}, {repeats=}, {max_images=}, {workers=}"
        raise ColabUtilsError(f"expected 1 or more of each (of workers 0 or more), found {found}")
    profile = get_profile(drive_profile)
    with put_back(None, restore):
        prepared = PreparedData(
            images, annotations, folder, profile=profile, count=max_images, min_size=min_size, max_size=max_size
        )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        setting = Setting(prepared, profile, batch_size, workers, device)
        step = EmulatedStep(step_ms) if step is None else step
        runner = _Runner(setting, step, batches=batches, timeline_s=timeline_s)
        rows, note = _run_in_turns(runner, chosen, repeats=repeats)
    timings = _compare_with_baseline([_summarise(row, setting) for row in rows])
    baseline = _find_baseline(timings).name
    others = [row for row in timings if row.comparable and row.name != baseline]
    bad = f" {len(prepared.bad)} bad images are left out, such as: {prepared.bad[0]}" if prepared.bad else ""
    return Comparison(
        machine=describe_machine(folder),
        dataset={
            "name": prepared.images.name, "fingerprint": prepared.fingerprint, "images": len(prepared),
            "total": prepared.total,
        },
        strategies=timings,
        step=str(step) if getattr(step, "emulated", False) else "real",
        drive=f"{profile}. {profile.source}" if profile else "as it is, not slowed",
        batch_size=batch_size,
        batches=batches,
        repeats=repeats,
        workers=workers,
        note=f"{note}{bad}".strip(),
        baseline=baseline,
        no_help=tuple(row.name for row in others if row.ratio is not None and row.ratio < _HELPS),
    )  # fmt: skip


@dataclass
class _Row:
    """A strategy while it is being measured."""

    strategy: Strategy
    note: str = ""
    difference: str = "not checked"
    opened_s: float = 0.0
    cold: BatchTimes | None = None
    times: list[BatchTimes] = field(default_factory=list)
    ram_bytes: int = 0


class _Runner:
    """Runs one strategy at a time: to check it, cold, or warm."""

    def __init__(self, setting: Setting, step: Any, *, batches: int, timeline_s: float) -> None:
        self._setting, self._step, self._batches, self._timeline_s = setting, step, batches, timeline_s
        self._epoch = -(-len(setting.prepared) // setting.batch_size)

    def check(self, row: _Row) -> None:
        """Compare an epoch with the reference; Drive is read as fast as it goes."""
        with closing(row.strategy.open(replace(self._setting, profile=None))) as loader:
            row.difference = find_difference(islice(loader, self._epoch), self._setting.prepared.reference)

    def run_cold(self, row: _Row) -> None:
        """Time the first batches, with nothing of the strategy's files in the system's memory."""
        os.sync()  # what is not written yet stays in memory
        for file in self._setting.prepared.get(row.strategy.reads).files:
            drop_cached(file)
        began_s = perf_counter()
        with closing(row.strategy.open(self._setting)) as loader:
            row.opened_s = perf_counter() - began_s
            row.cold = time_batches(loader, self._step, batches=10_000, warmup=0, max_s=self._timeline_s)

    def run_warm(self, row: _Row) -> None:
        """Time batches after a warm-up, which is an epoch where a strategy keeps what it reads."""
        before = measure_memory()
        with closing(row.strategy.open(self._setting)) as loader:
            warmup = self._epoch if row.strategy.keeps else 2
            row.times.append(time_batches(loader, self._step, batches=self._batches, warmup=warmup, max_s=_MAX_RUN_S))
            row.ram_bytes = max(row.ram_bytes, measure_memory() - before)


def _run_in_turns(runner: _Runner, chosen: Sequence[Strategy], *, repeats: int) -> tuple[list[_Row], str]:
    """Run every strategy in each round; Ctrl-C keeps those that were timed, and the note tells it.

    Raises:
        ColabUtilsError: no strategy could be timed.
    """
    rows, note = [_Row(strategy) for strategy in chosen], ""
    rounds: list[tuple[Callable[[_Row], None], int]] = [(runner.check, 0), (runner.run_cold, 0)]
    rounds += [(runner.run_warm, repeat % len(rows)) for repeat in range(repeats)]
    try:
        with show_progress("comparing", total=len(rounds) * len(rows), unit="run") as bar:
            for run, first in rounds:
                for row in rows[first:] + rows[:first]:
                    try:
                        if not row.note:  # what failed is not run again
                            run(row)
                    except Exception as error:
                        row.note = describe_error(error)
                    bar.update(1)
    except KeyboardInterrupt:
        rows, note = [row for row in rows if row.times], "Stopped by Ctrl-C: strategies or repeats are missing."
        if not rows:
            raise
    if not any(row.times for row in rows):
        raise ColabUtilsError(f"expected a strategy that can be timed, found that none could: {rows[0].note}")
    return rows, note


def _summarise(row: _Row, setting: Setting) -> StrategyTiming:
    strategy, prepared, runs, cold = row.strategy, setting.prepared, row.times, row.cold
    place = "Google Drive" if strategy.on_drive and is_on_drive(prepared.images) else "local disk"
    if strategy.on_drive and setting.profile:
        place = f"slowed Drive folder, profile {setting.profile.name}"
    timing = StrategyTiming(
        strategy.name, strategy.idea, place, not row.difference, row.difference, note=row.note,
        repeats_images_per_second=tuple(run.images_per_second for run in runs),
    )  # fmt: skip
    if cold is None or not runs:
        return timing
    names = ("images_per_second", "batch_ms_median", "batch_ms_p95", "wait_share", "cpu_ms_per_image")
    figures: dict[str, Any] = {name: median(getattr(run, name) for run in runs) for name in names}
    rate, files, scale = figures["images_per_second"], prepared.get(strategy.reads), prepared.total / len(prepared)
    batches = len(prepared) * len(cold.wait_s) / cold.images  # of the first epoch
    first = cold.batch_s[: round(batches + 0.49)]
    # what keeps its samples reads all of them while it opens: more images take longer
    opened_s = row.opened_s * (scale if strategy.keeps else 1)
    epoch_s = scale_epoch(
        first, batches=batches * scale, start=max(1, setting.workers), warm_s=setting.batch_size / rate
    )
    ends = row.opened_s + np.cumsum(cold.batch_s)
    times = np.stack([np.append(0.0, ends[:-1]), ends - cold.step_s, ends], 1)
    return replace(
        timing, **figures, ram_bytes=row.ram_bytes, drive_bytes=files.drive_bytes, ssd_bytes=files.ssd_bytes,
        first_batch_s=cold.first_batch_s + row.opened_s,
        cold_images_per_second=min(cold.images, len(prepared)) / (row.opened_s + float(first.sum())),
        once_minutes=(files.once_start_s + (files.once_s - files.once_start_s) * scale) / 60,
        session_minutes=files.session_s * scale / 60,
        first_epoch_minutes=(opened_s + epoch_s) / 60,
        epoch_minutes=prepared.total / rate / 60,
        timeline=tuple(map(tuple, times.round(4).tolist())),
    )  # fmt: skip


def scale_epoch(batch_s: NDArray[np.float64], *, batches: float, start: int, warm_s: float) -> float:
    """Seconds that an epoch of so many ``batches`` takes, by the times of its first ones.

    The first ``start`` batches hold the start of the workers and count once. The others give the seconds of a batch;
    where there are none, ``warm_s`` does.

    Example:
        >>> scale_epoch(np.array([1.6, 0.1, 0.1]), batches=1001, start=1, warm_s=0.05)
        101.6
        >>> scale_epoch(np.array([1.6]), batches=1001, start=1, warm_s=0.1)
        101.6
    """
    first, later = batch_s[:start], batch_s[start:]
    each_s = later.mean() if len(later) else warm_s
    return float(first.sum() + each_s * max(0.0, batches - len(first)))


def _find_baseline(timings: Sequence[StrategyTiming]) -> StrategyTiming:
    """What people run today, else the first strategy that was timed."""
    timed = [timing for timing in timings if timing.images_per_second]
    fair = {timing.name: timing for timing in timed if timing.comparable} or {timed[0].name: timed[0]}
    return next((fair[name] for name in _BASELINES if name in fair), next(iter(fair.values())))


def _compare_with_baseline(bare: Sequence[StrategyTiming]) -> tuple[StrategyTiming, ...]:
    base, timings = _find_baseline(bare), []
    for timing in bare:
        if timing.images_per_second:
            pairs = zip(timing.repeats_images_per_second, base.repeats_images_per_second, strict=False)
            ratios = [rate / other for rate, other in pairs]
            timing = replace(
                timing, ratio=median(ratios), ratio_low=min(ratios), ratio_high=max(ratios),
                paid_back_epochs=find_pay_back(timing, base),
            )  # fmt: skip
        timings.append(timing)
    return tuple(timings)


def find_pay_back(timing: StrategyTiming, base: StrategyTiming) -> float | None:
    """Epochs after which a strategy stays ahead of another, preparation included; None where it never does.

    All in one session: preparing, copying, a first epoch, and any number of later epochs.
    """
    parts = ("once_minutes", "session_minutes", "first_epoch_minutes", "epoch_minutes")
    once, session, first, later = ((getattr(timing, part) or 0.0) - (getattr(base, part) or 0.0) for part in parts)
    before = once + session  # minutes behind before the first epoch
    after = before + first  # and after it
    if later > 0:
        return None  # falls behind in the end
    if after > 0:
        return 1 - after / later if later else None
    return before / (before - after) if before > 0 else 0.0
