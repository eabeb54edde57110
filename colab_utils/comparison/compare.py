"""Every strategy side by side, on the same images: checked to be equal first, then timed in turns."""

from __future__ import annotations

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
from torch.utils.data import DataLoader

from colab_utils.comparison.equality import find_difference
from colab_utils.comparison.prepared import PreparedData
from colab_utils.comparison.strategies import (
    DEFAULT_STRATEGIES,
    STRATEGIES,
    PillowFolder,
    Setting,
    Strategy,
    end_workers,
    find_strategy,
)
from colab_utils.data.coco import read_coco
from colab_utils.diagnosis.diagnose import diagnose
from colab_utils.diagnosis.resources import measure_memory
from colab_utils.diagnosis.stages import drop_cached
from colab_utils.diagnosis.timing import BatchTimes, EmulatedStep, describe_error, time_batches
from colab_utils.drive import DriveProfile, get_profile, is_on_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.dataset import CocoFolder
from colab_utils.runtime import Machine, describe_machine, quiet_fork, show_progress

__all__ = [
    "FORECASTS",
    "CheckedForecast",
    "Comparison",
    "StrategyTiming",
    "Trial",
    "TrialRunner",
    "compare",
    "find_pay_back",
    "forecast_fixes",
]

_MAX_RUN_S = 30.0  # for one repeat of one strategy


FORECASTS = {
    "image files on the local SSD": "dataloader_on_ssd", "shards on the local SSD": "shards_on_ssd",
    "packed masks": "packed", "samples in memory": "in_memory",
}  # fmt: skip


"""Fixes that `diagnose` forecasts, and the strategy that is each."""


@dataclass
class Trial:
    """A strategy while it is being measured."""

    strategy: Strategy
    place: str
    note: str = ""
    difference: str = "not checked"
    failed: bool = False
    cold: BatchTimes | None = None
    ram_bytes: int = 0
    times: list[BatchTimes] = field(default_factory=list)


class TrialRunner:
    """Runs one strategy at a time: to check it, cold, or warm."""

    def __init__(self, fast: Setting, slow: Setting, step: Any, *, batches: int, timeline_s: float) -> None:
        self._fast, self._slow, self._step, self._batches, self._timeline_s = fast, slow, step, batches, timeline_s
        self._reference = CocoFolder(fast.prepared.images, fast.prepared.annotations)
        self._epoch = -(-len(self._reference) // fast.batch_size)

    def try_to(self, run: Callable[[Trial], None], row: Trial) -> None:
        """Where a strategy fails, a note says why, and it is not run again."""
        try:
            if not row.failed:
                run(row)
        except Exception as error:
            row.note, row.failed = describe_error(error), True

    def check(self, row: Trial) -> None:
        """Hold an epoch against the reference."""
        with closing(row.strategy.open(self._fast)) as loader:
            row.difference = find_difference(islice(loader, self._epoch), self._reference)

    def run_cold(self, row: Trial) -> None:
        """The first batches, with nothing of the files in the system's memory, from the first one on."""
        path = self._slow.prepared.get(row.strategy.form).path
        for file in path.rglob("*") if path.is_dir() else (path,):
            drop_cached(file)
        began_s = perf_counter()
        with closing(row.strategy.open(self._slow)) as loader:
            opened_s = perf_counter() - began_s  # who reads everything at the start waits here
            cold = time_batches(loader, self._step, batches=10_000, warmup=0, max_s=self._timeline_s)
        waits = (cold.wait_s[0] + opened_s, *cold.wait_s[1:])
        row.cold = replace(cold, wait_s=waits, first_batch_s=cold.first_batch_s + opened_s)

    def run_warm(self, row: Trial) -> None:
        """Timed batches after a warm-up, which is an epoch where a strategy keeps what it reads."""
        before = measure_memory()
        with closing(row.strategy.open(self._slow)) as loader:
            warmup = self._epoch if row.strategy.keeps else 2
            times = time_batches(loader, self._step, batches=self._batches, warmup=warmup, max_s=_MAX_RUN_S)
            row.ram_bytes = max(row.ram_bytes, measure_memory() - before)
        row.times.append(times)


def forecast_fixes(setting: Setting, step: Any, *, seconds: float) -> dict[str, float]:
    """What `diagnose` forecasts of a plain ``DataLoader`` over the files on Drive; images a second, by fix."""
    dataset = PillowFolder(setting.prepared.images, setting.prepared.annotations, profile=setting.profile)

    def take(images: Any, targets: Any) -> None:
        step([image.to(setting.device).float().div_(255) for image in images], targets)

    taken = step if getattr(step, "emulated", False) else take
    with quiet_fork():
        loader: DataLoader[Any] = DataLoader(
            dataset, batch_size=setting.batch_size, shuffle=True, num_workers=setting.workers, collate_fn=_collate,
            persistent_workers=setting.workers > 0,
        )  # fmt: skip
    try:
        found = diagnose(loader, taken, seconds=seconds)
    except ColabUtilsError:
        return {}  # its row says why
    finally:
        end_workers(loader)
    return {fix.name: fix.forecast_images_per_second for fix in found.fixes if fix.name in FORECASTS}


def _collate(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*samples, strict=True))


_BASELINES = ("dataloader", "sequential")  # what the others are compared with: the first that was timed


_HELPS = 1.1  # times as fast as the baseline


@dataclass(frozen=True)
class StrategyTiming:
    """One strategy's row: medians over the repeats, None where it could not be timed (``note`` says why).

    ``comparable`` is False where its samples are not the reference's; ``difference`` then says how. ``wait_share`` is
    0 to 1; ``cpu_ms_per_image`` is loading alone, over all processes; ``first_batch_s`` includes the workers' start.
    ``cold_images_per_second`` is that of the first epoch, with nothing in the system's memory. ``ratio`` is to the
    baseline, repeat by repeat: median, lowest and highest. ``ram_bytes`` is what it held more than before, workers
    included. ``timeline`` has for each batch when it was asked for, when its step began, and when that ended, seconds.

    Minutes are of the whole dataset: what is made once, what each session copies, the first epoch, each later one.
    ``paid_back_epochs`` says after how many epochs of one session that has paid, against the baseline; None: never.
    """

    name: str
    idea: str
    place: str
    comparable: bool
    difference: str
    images_per_second: float | None
    batch_ms_median: float | None
    batch_ms_p95: float | None
    wait_share: float | None
    first_batch_s: float | None
    cpu_ms_per_image: float | None
    repeats_images_per_second: tuple[float, ...]
    note: str
    cold_images_per_second: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    ram_bytes: int | None = None
    drive_bytes: int | None = None
    ssd_bytes: int | None = None
    once_minutes: float | None = None
    session_minutes: float | None = None
    first_epoch_minutes: float | None = None
    epoch_minutes: float | None = None
    paid_back_epochs: float | None = None
    timeline: tuple[tuple[float, float, float], ...] = ()

    def __str__(self) -> str:
        if self.images_per_second is None:
            return f"{self.name}: not timed, {self.note}"
        spread = f"{min(self.repeats_images_per_second):.1f} to {max(self.repeats_images_per_second):.1f}"
        warning = "" if self.comparable else f"; NOT COMPARABLE: {self.difference}"
        rate = f"{self.images_per_second:.1f} images/s ({spread}), waiting {self.wait_share:.0%}"
        return f"{self.name} ({self.place}): {rate}{warning}"


@dataclass(frozen=True)
class CheckedForecast:
    """What `diagnose` said of a fix, looking at the baseline alone, and what that strategy then gave."""

    fix: str
    strategy: str
    forecast_images_per_second: float
    measured_images_per_second: float

    @property
    def error(self) -> float:
        """Forecast / measured - 1."""
        return self.forecast_images_per_second / self.measured_images_per_second - 1


@dataclass(frozen=True)
class Comparison:
    """What `compare` found; its fields are the keys of the command's JSON. ``step`` is "real" or "emulated ...".

    ``baseline`` is the strategy that the others are compared with; ``no_help`` are those less than 1.1 times as fast.
    """

    machine: Machine
    dataset: dict[str, Any]
    strategies: tuple[StrategyTiming, ...]
    step: str
    drive: str
    batch_size: int
    batches: int
    repeats: int
    workers: int
    note: str
    baseline: str = ""
    no_help: tuple[str, ...] = ()
    forecasts: tuple[CheckedForecast, ...] = ()

    def __str__(self) -> str:
        head = f"{self.dataset['images']} images of {self.dataset['name']}, step {self.step}, {self.machine}"
        return "\n  ".join([head, *map(str, self.strategies), *([self.note] if self.note else [])])


def compare(
    images: str | Path, annotations: str | Path, *, folder: str | Path,
    strategies: Sequence[str | Strategy] | None = None, drive_profile: str | DriveProfile | None = "typical",
    step: Callable[..., Any] | None = None, step_ms: float = 100.0, batch_size: int = 4, batches: int = 24,
    repeats: int = 3, workers: int = 2, max_images: int = 240, min_size: int = 800, max_size: int = 1333,
    timeline_s: float = 30.0, forecast_s: float = 20.0,
) -> Comparison:  # fmt: skip
    """Time every strategy on the same images with the same step, after checking that their samples are equal.

    Every strategy delivers ``(images, targets)`` as torchvision models take them, on the GPU if there is one. First
    each gives a whole epoch, which must hold every image once, and samples equal to the reference's; then each runs
    cold, with nothing of its files in the system's memory, which makes its timeline; then all are timed warm, in
    turns, so that a machine that slows down slows all of them. Figures are medians over the repeats. A strategy that
    fails gets a row that says why, and the others go on; Ctrl-C keeps the rows that are measured.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        folder: where shards and copies for the comparison are kept (and found again); made if need be.
        strategies: names of `STRATEGIES`, or your own `Strategy`; None takes `DEFAULT_STRATEGIES`.
        drive_profile: how slow Drive is made (`DRIVE_PROFILES`); None or "none" reads ``images`` as they are.
        step: the training step, called as ``step(images, targets)``; None takes ``EmulatedStep(step_ms)``.
        step_ms: length of the emulated step, milliseconds.
        batch_size: images in a batch.
        batches: timed batches of each repeat.
        repeats: how often each strategy is timed, each time with new workers.
        workers: worker processes of the strategies that have such.
        max_images: the comparison takes the first so many images of the dataset.
        min_size: the shorter side that training needs, pixels: shards are made for it.
        max_size: the longer side that training needs, pixels.
        timeline_s: seconds that each strategy runs cold, an epoch's batches at least where that is shorter.
        forecast_s: seconds for `diagnose`, whose forecasts from the baseline are held against what is measured; 0
            leaves that out.

    Raises:
        ColabUtilsError: an unknown strategy, a missing dataset, or no strategy that could be timed.
    """
    named = list(dict.fromkeys(DEFAULT_STRATEGIES if strategies is None else strategies))
    chosen = [one if isinstance(one, Strategy) else find_strategy(one.strip()) for one in named]
    if not chosen:
        raise ColabUtilsError(f"expected strategies among {', '.join(STRATEGIES)}; found none: choose some of them")
    if min(batch_size, batches, repeats, max_images) < 1 or workers < 0:
        found = f"{batch_size=}, {batches=}, {repeats=}, {max_images=}, {workers=}"
        raise ColabUtilsError(f"expected 1 or more of each (of workers 0 or more), found {found}")
    images, folder = Path(images), Path(folder)
    if not images.is_dir():
        raise ColabUtilsError(f"expected an image folder, found nothing at {images}. On Colab, mount Drive first.")
    profile, coco = get_profile(drive_profile), read_coco(annotations)
    if not len(coco):
        raise ColabUtilsError(f"expected images in {annotations}, found none: name the instances file of your dataset")
    step = EmulatedStep(step_ms) if step is None else step
    prepared = PreparedData(
        images, coco, folder, profile=profile, count=max_images, min_size=min_size, max_size=max_size
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fast, slow = (Setting(prepared, speed, batch_size, workers, device) for speed in (None, profile))
    runner = TrialRunner(fast, slow, step, batches=batches, timeline_s=timeline_s)
    rows = [Trial(strategy, _name_place(strategy, prepared, profile)) for strategy in chosen]
    note, found_forecasts = "", dict[str, float]()
    try:
        with show_progress("comparing", total=(repeats + 2) * len(rows), unit="run") as bar:
            for row in rows:
                runner.try_to(runner.check, row)
                bar.update(1)
            if forecast_s and any(row.strategy.name == _BASELINES[0] for row in rows):
                found_forecasts = forecast_fixes(slow, step, seconds=forecast_s)
            for row in rows:
                runner.try_to(runner.run_cold, row)
                bar.update(1)
            for repeat in range(repeats):
                for row in rows[repeat % len(rows) :] + rows[: repeat % len(rows)]:
                    runner.try_to(runner.run_warm, row)
                    bar.update(1)
    except KeyboardInterrupt:
        rows = [row for row in rows if row.times]
        if not rows:
            raise
        note = "Stopped by Ctrl-C: strategies or repeats are missing."
    if not any(row.times for row in rows):
        raise ColabUtilsError(f"expected a strategy that can be timed, found that none could: {rows[0].note}")
    if prepared.bad:
        note = f"{note} {len(prepared.bad)} bad images are left out, such as: {prepared.bad[0]}".strip()
    timings = _summarise(rows, prepared, total=len(coco))
    baseline = _find_baseline(timings)
    rates = {timing.name: timing.images_per_second for timing in timings if timing.comparable}
    return Comparison(
        machine=describe_machine(folder),
        dataset={"name": images.name, "fingerprint": coco.fingerprint, "images": len(prepared), "total": len(coco)},
        strategies=timings,
        step=str(step) if getattr(step, "emulated", False) else "real",
        drive=f"{profile}. {profile.source}" if profile else "as it is, not slowed",
        batch_size=batch_size,
        batches=batches,
        repeats=repeats,
        workers=workers,
        note=note,
        baseline=baseline,
        no_help=tuple(
            timing.name for timing in timings
            if timing.comparable and timing.ratio is not None and timing.ratio < _HELPS and timing.name != baseline
        ),
        forecasts=tuple(
            CheckedForecast(fix, FORECASTS[fix], forecast, rate)
            for fix, forecast in found_forecasts.items()
            if (rate := rates.get(FORECASTS[fix])) is not None
        ),
    )  # fmt: skip


def _name_place(strategy: Strategy, prepared: PreparedData, profile: DriveProfile | None) -> str:
    if not strategy.on_drive:
        return "local disk"
    if profile:
        return f"slowed Drive folder, profile {profile.name}"
    return "Google Drive" if is_on_drive(prepared.images) else "local disk"


def _find_baseline(timings: Sequence[StrategyTiming]) -> str:
    """What people run today, else the first strategy that was timed."""
    timed = [timing.name for timing in timings if timing.images_per_second and timing.comparable]
    timed += [timing.name for timing in timings if timing.images_per_second]
    return next((name for name in _BASELINES if name in timed), timed[0])


def _summarise(rows: Sequence[Trial], prepared: PreparedData, *, total: int) -> tuple[StrategyTiming, ...]:
    bare = [_describe_row(row, prepared, total=total) for row in rows]
    base = next(timing for timing in bare if timing.name == _find_baseline(bare))
    timings = []
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


def _describe_row(row: Trial, prepared: PreparedData, *, total: int) -> StrategyTiming:
    names = ("images_per_second", "batch_ms_median", "batch_ms_p95", "wait_share", "cpu_ms_per_image")
    runs, way, cold = row.times, row.strategy, row.cold
    figures: Any = {name: median(getattr(run, name) for run in runs) if runs else None for name in names}
    if runs:
        form, scale = prepared.get(way.form), total / len(prepared) / 60
        figures |= {
            "ram_bytes": row.ram_bytes, "drive_bytes": form.drive_bytes, "ssd_bytes": form.ssd_bytes,
            "once_minutes": form.once_s * scale, "session_minutes": form.session_s * scale,
            "epoch_minutes": total / figures["images_per_second"] / 60,
        }  # fmt: skip
    if cold is not None:
        first = min(len(cold.wait_s), -(-len(prepared) * len(cold.wait_s) // cold.images))  # batches of the first epoch
        rate = min(cold.images, len(prepared)) / float(cold.batch_s[:first].sum())
        figures |= {"cold_images_per_second": rate, "first_epoch_minutes": total / rate / 60}
        figures["timeline"] = _make_timeline(cold)
    return StrategyTiming(
        way.name, way.idea, row.place, not row.difference, row.difference, **figures,
        first_batch_s=cold.first_batch_s if cold is not None and runs else None,
        repeats_images_per_second=tuple(run.images_per_second for run in runs), note=row.note,
    )  # fmt: skip


def _make_timeline(cold: BatchTimes) -> tuple[tuple[float, float, float], ...]:
    ends = np.cumsum(cold.batch_s)
    begins = ends - cold.batch_s
    steps = begins + np.array(cold.wait_s)
    return tuple(zip(begins.round(4).tolist(), steps.round(4).tolist(), ends.round(4).tolist(), strict=True))


def find_pay_back(timing: StrategyTiming, base: StrategyTiming) -> float | None:
    """Epochs after which what a strategy costs beforehand has paid, against another; None where it never does.

    Within one session: what is made once, what the session copies, a first epoch, and any number of later ones.
    """
    values = [
        getattr(row, name) or 0.0
        for row in (timing, base)
        for name in ("once_minutes", "session_minutes", "first_epoch_minutes", "epoch_minutes")
    ]
    own, other = values[:4], values[4:]
    ahead = sum(own[:2]) - sum(other[:2])  # minutes behind at the start
    first, later = other[2] - own[2], other[3] - own[3]  # minutes won in the first epoch, and in each later one
    if ahead <= 0 and first >= 0:
        return 0.0
    if first > 0 and ahead <= first:
        return ahead / first
    return 1 + (ahead - first) / later if later > 0 else None
