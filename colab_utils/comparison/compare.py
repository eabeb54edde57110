"""Compare strategies on the same images: check that their samples are equal, then time them."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from colab_utils.comparison.prepared import PreparedData, PreparedFiles
from colab_utils.comparison.strategies import Setting, Strategy, choose_strategies, deliver
from colab_utils.data.masks import nearest_indices
from colab_utils.diagnosis.diagnose import put_back
from colab_utils.diagnosis.timing import BatchTimes, measure_spread, time_batches
from colab_utils.errors import ColabUtilsError, describe_error
from colab_utils.files import drop_cached
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.emulated_step import EmulatedStep, describe_busy
from colab_utils.machine import Machine, describe_machine
from colab_utils.progress import show_progress
from colab_utils.require import require_count, require_number
from colab_utils.slow_drive import DriveProfile, get_profile, read_at_full_speed
from colab_utils.units import format_count

# A limit that no run should reach: a run ends by its time, ``timeline_s`` or ``run_s``.
_MOST_BATCHES = 10_000
# Number of images in an epoch that are compared with the reference.
_CHECKED_IMAGES = 32
# How much pixels may differ, in levels of 255: the mean, and the 99.9th percentile. An image that
# keeps its size may differ as much as the results of two JPEG decoders do. A shrunk image may
# differ more, because it was resized and stored as JPEG at quality 95.
_KEPT_LEVELS = (1.0, 16.0)
_SHRUNK_LEVELS = (3.0, 48.0)
# Of an image with more pixels, only every second (or third, and so on) row and column is compared.
_ALL_PIXELS = 2_000_000


@dataclass(frozen=True)
class StrategyTiming:
    """The figures of one strategy: medians over the repeats. A figure is None if the strategy could
    not be timed.
    """

    name: str
    """Name of the strategy."""
    title: str
    """Name of the strategy in charts."""
    idea: str
    """What the strategy does, in one sentence."""
    comparable: bool
    """Whether the samples are equal to those of the reference, a `CocoFolder`."""
    difference: str
    """How the samples differ from those of the reference; empty if they are equal."""
    images_per_second: float | None = None
    """Images trained in a second of a warm run."""
    batch_ms_median: float | None = None
    """Wait and step of a batch together, in milliseconds: the median of all repeats."""
    batch_ms_p95: float | None = None
    """Wait and step of a batch together, in milliseconds: the 95th percentile."""
    step_ms_median: float | None = None
    """The step of a batch alone, in milliseconds: the median."""
    wait_share: float | None = None
    """Wait / (wait + step), 0 to 1."""
    first_batch_s: float | None = None
    """Seconds until the first batch of the cold run came. The start of the workers is included."""
    cpu_ms_per_image: float | None = None
    """CPU time that loading an image takes in all processes, in milliseconds."""
    repeats_images_per_second: tuple[float, ...] = ()
    """``images_per_second`` of each repeat."""
    note: str = ""
    """Why the strategy could not be timed; empty if it could."""
    once_ms_per_image: float | None = None
    """Milliseconds to prepare an image once: to read it from Drive, convert it and write it."""
    session_ms_per_image: float | None = None
    """Milliseconds to copy an image to the local disk, in each session."""
    cold_ms_per_image: float | None = None
    """Milliseconds that an image takes in the first epoch of a session. The step is included, the
    start of the workers is not.
    """
    timeline: tuple[tuple[float, float], ...] = ()
    """When each step of the cold run began and ended, in seconds since the opening of the
    loader began.
    """

    @property
    def spread(self) -> float:
        """Return by how much the repeats differ, as a share of their median."""
        return measure_spread(self.repeats_images_per_second)

    def __str__(self) -> str:
        if self.images_per_second is None:
            return f"{self.title}: not timed, {self.note}"
        repeats = self.repeats_images_per_second
        text = (
            f"{self.title}: {self.images_per_second:.1f} images/s ({min(repeats):.1f} to "
            f"{max(repeats):.1f}), waiting {self.wait_share:.0%}"
        )
        return text if self.comparable else f"{text}; NOT COMPARABLE: {self.difference}"


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`. Its fields are the keys of the command's JSON."""

    machine: Machine
    """The machine that ran the comparison."""
    dataset: dict[str, Any]
    """``name`` and ``fingerprint`` of the dataset, and ``images``, the number that was compared."""
    strategies: tuple[StrategyTiming, ...]
    """The figures of each strategy."""
    step: str
    """"real" or "emulated ..."."""
    drive: str
    """How slow Drive was made."""
    batch_size: int
    """Images in a batch."""
    repeats: int
    """How often each strategy was timed."""
    workers: int
    """Number of worker processes."""
    note: str
    """What is missing in the result, and how many bad images were left out."""
    busy: str = ""
    """A warning that other work took the cores of this machine; empty if the step was on time."""

    def __str__(self) -> str:
        head = (
            f"{self.dataset['images']} images of {self.dataset['name']}, step {self.step}, "
            f"{self.machine}"
        )
        lines = [head, *map(str, self.strategies), self.note, self.busy]
        return "\n  ".join(filter(None, lines))


def compare(
    images: str | Path,
    annotations: str | Path,
    *,
    folder: str | Path,
    strategies: Sequence[str | Strategy] | None = None,
    drive_profile: str | DriveProfile | None = "typical",
    step: Callable[..., Any] | None = None,
    batch_size: int = 4,
    batches: int = 24,
    run_s: float = 5.0,
    repeats: int = 3,
    workers: int = 2,
    max_images: int = 240,
    timeline_s: float = 30.0,
    on_run: Callable[[Comparison], object] | None = None,
) -> Comparison:
    """Check that the samples of all strategies are equal, then time each with the same step.

    Every strategy delivers ``(images, targets)`` as torchvision models take them, on the GPU if
    there is one. The transfer of a batch to the device is part of the step, as in `train`.

    First, each strategy loads an epoch. The epoch must hold every image once, and its samples must
    equal those of the reference, a `CocoFolder` of the loose files. Then each strategy runs cold:
    none of its files are in the system's memory. After that it runs warm. The other repeats are
    warm, too, and run in turns, so that a machine that slows down slows all strategies. Figures are
    medians over the repeats.

    If a strategy fails, its row holds the reason, and the others go on. Ctrl-C keeps the rows that
    are measured. Charts have a baseline: the first strategy that was timed and whose samples equal
    those of the reference.

    If ``drive_profile`` makes Drive slow, it is slow while a strategy is timed. While data is
    prepared and samples are checked, files are read at full speed, even in a slowed folder. For a
    copy from Drive, the time that Drive would take is computed, and added to the measured time.

    A cold run lasts at least ``timeline_s`` seconds and three batches of each worker. A warm run
    lasts at least ``run_s`` seconds, three batches of each worker and ``batches`` batches. A run
    that takes three times its seconds ends in any case. In every run, all workers deliver the same
    number of batches.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        folder: the folder for prepared data and copies. It is made if it does not exist.
        strategies: names of `STRATEGIES`, or your own `Strategy`. None takes all `STRATEGIES`.
        drive_profile: how slow Drive is made (`DRIVE_PROFILES`). None or "none" does not slow it.
        step: the training step, called as ``step(images, targets)``. A real step trains its model
            many times, so pass a step of a copy. None takes an emulated step of 100 ms,
            ``EmulatedStep(100)``.
        batch_size: images in a batch.
        batches: least number of timed batches in a repeat, unless they take three times ``run_s``.
        run_s: seconds that each repeat lasts, at least.
        repeats: how often each strategy is timed, each time with new workers.
        workers: number of worker processes, for the strategies that have workers.
        max_images: number of images to compare, at most: the first ones of the dataset.
        timeline_s: seconds that each strategy runs cold.
        on_run: called after each timed run with the comparison so far, so that a chart can grow. A
            figure that was not measured yet is None.

    Raises:
        ColabUtilsError: if a strategy is unknown, the dataset is missing, or no strategy could be
            timed.
    """
    chosen = choose_strategies(strategies)
    require_count("batch_size", batch_size)
    require_count("batches", batches)
    require_count("repeats", repeats)
    require_count("max_images", max_images)
    require_number("run_s", run_s, minimum=0)
    require_count("workers", workers, minimum=0)
    profile = get_profile(drive_profile)
    if step is None:
        step = EmulatedStep(100)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with put_back(None, ()), read_at_full_speed():
        prepared = PreparedData(images, annotations, folder, profile=profile, count=max_images)
        setting = Setting(prepared, batch_size, workers, device)
        rows = [_Row(strategy, setting, step, batches, run_s, timeline_s) for strategy in chosen]
        note = ""
        if prepared.bad:
            note = f"{len(prepared.bad)} bad images are left out, such as: {prepared.bad[0]}"
        empty = Comparison(
            machine=describe_machine(),
            dataset={
                "name": prepared.images.name,
                "fingerprint": prepared.fingerprint,
                "images": len(prepared),
            },
            strategies=(),
            step=str(step) if getattr(step, "emulated", False) else "real",
            drive=f"{profile}. {profile.source}" if profile else "as it is, not slowed",
            batch_size=batch_size,
            repeats=repeats,
            workers=workers,
            note=note,
        )
        try:
            for _ in _run_in_turns(rows, repeats):
                if on_run is not None and any(row.times for row in rows):
                    on_run(replace(empty, strategies=tuple(map(_Row.summarise, rows))))
        except KeyboardInterrupt:
            rows = [row for row in rows if row.times]
            if not rows:
                raise
            note = f"Stopped by Ctrl-C: strategies or repeats are missing. {note}".strip()
            empty = replace(empty, note=note)
        if not any(row.times for row in rows):
            raise ColabUtilsError(f"No strategy could be timed. Mend this first: {rows[0].note}")
        timings = tuple(map(_Row.summarise, rows))
        busy = ""
        if isinstance(step, EmulatedStep):
            # The fastest step counts. The workers of a strategy can slow its own step, but not that
            # of the others. If even the fastest step is slow, other work took the cores.
            busy = describe_busy(
                step.step_ms,
                min(row.step_ms_median for row in timings if row.step_ms_median),
            )
        return replace(empty, strategies=timings, busy=busy)


@dataclass
class _Row:
    """A strategy, and what was measured of it so far."""

    strategy: Strategy
    setting: Setting
    step: Callable[..., Any]
    batches: int
    run_s: float
    timeline_s: float
    note: str = ""
    difference: str = "not checked"
    opened_s: float = 0.0
    cold: BatchTimes | None = None
    times: list[BatchTimes] = field(default_factory=list)

    def attempt(self, run: "Callable[[_Row], object]") -> None:
        """Run the strategy. If it fails, note why, and do not run it again."""
        try:
            if not self.note:
                run(self)
        except Exception as error:
            self.note = describe_error(error)

    def prepare(self) -> PreparedFiles:
        """Return the data that the strategy reads. It is made if it is missing."""
        return self.setting.prepared.get(self.strategy.reads)

    def check(self) -> None:
        """Compare an epoch of the strategy with the reference. Both are read at full speed."""
        with closing(self.strategy.open(self.setting)) as loader:
            batches = (deliver(batch, self.setting.device) for batch in islice(loader, self._epoch))
            self.difference = _find_difference(batches, self.setting.prepared.reference)

    def run_cold(self) -> None:
        """Time the first batches, while none of the strategy's files are in the system's memory."""
        # The system can only drop data that is written to the disk.
        os.sync()
        for file in self.prepare().files:
            drop_cached(file)
        self.cold, self.opened_s = self._time(warmup=0, max_s=self.timeline_s)

    def run_warm(self) -> None:
        """Time batches after a warm-up, which is an epoch if the strategy keeps what it reads."""
        warmup = self._epoch if self.strategy.keeps else 1
        times, _ = self._time(warmup=warmup, max_s=self.run_s, least=self.batches)
        self.times.append(times)

    def _time(self, **limits: Any) -> tuple[BatchTimes, float]:
        """Open the loader of the strategy while Drive is slow, and time its batches.

        The second value is the seconds that opening took.
        """
        began_s = perf_counter()
        with (
            self.setting.prepared.slow_drive(),
            closing(self.strategy.open(self.setting)) as loader,
        ):
            opened_s = perf_counter() - began_s
            return time_batches(loader, self._train, batches=_MOST_BATCHES, **limits), opened_s

    @property
    def _epoch(self) -> int:
        return -(-len(self.setting.prepared) // self.setting.batch_size)

    def _train(self, *batch: Any) -> None:
        self.step(*deliver(batch if len(batch) > 1 else batch[0], self.setting.device))

    def summarise(self) -> StrategyTiming:
        """Return the figures that were measured so far."""
        strategy = self.strategy
        workers = self.setting.workers
        count = len(self.setting.prepared)
        timing = StrategyTiming(
            strategy.name,
            strategy.title.replace("{}", format_count(workers, "worker")) or strategy.name,
            strategy.idea,
            not self.difference,
            self.difference,
            note=self.note,
            repeats_images_per_second=tuple(run.images_per_second for run in self.times),
        )
        cold = self.cold
        if cold is None or not self.times:
            return timing
        batch_s = np.concatenate([run.batch_s for run in self.times])
        median_ms, p95_ms = (1000 * np.percentile(batch_s, (50, 95))).tolist()
        # The first batch of each worker holds the start of the worker, which takes no longer for a
        # larger dataset.
        later_s = cold.batch_s[max(1, workers) :]
        if not len(later_s):
            later_s = cold.batch_s
        files = self.prepare()
        ends_s = (self.opened_s + np.cumsum(cold.batch_s)).round(4)
        begins_s = (ends_s - cold.step_s).round(4)
        return replace(
            timing,
            images_per_second=median(timing.repeats_images_per_second),
            batch_ms_median=median_ms,
            batch_ms_p95=p95_ms,
            step_ms_median=1000 * median(np.median(run.step_s) for run in self.times),
            wait_share=median(run.wait_share for run in self.times),
            cpu_ms_per_image=median(run.cpu_ms_per_image for run in self.times),
            first_batch_s=cold.wait_s[0] + self.opened_s,
            once_ms_per_image=1000 * files.once_s / count,
            session_ms_per_image=1000 * files.session_s / count,
            cold_ms_per_image=1000 * float(later_s.mean()) / self.setting.batch_size,
            timeline=tuple(zip(begins_s.tolist(), ends_s.tolist(), strict=True)),
        )


def _run_in_turns(rows: Sequence[_Row], repeats: int) -> Iterator[None]:
    """Prepare and check every strategy, then time them in turns. Yield after each run."""
    runs = [(_Row.check, row) for row in rows]
    for row in rows:
        runs += [(_Row.run_cold, row), (_Row.run_warm, row)]
    runs += (repeats - 1) * [(_Row.run_warm, row) for row in rows]
    # This is not part of the runs, because preparing shows its own progress bars.
    for row in rows:
        row.attempt(_Row.prepare)
    for run, row in show_progress("comparing", runs, total=len(runs), unit="run"):
        row.attempt(run)
        yield


def describe_difference(sample: tuple[Any, Any], reference: tuple[Any, Any]) -> str:
    """Describe how a sample differs from the reference sample of the same image.

    The text is empty if the samples agree. Boxes may differ by 1 pixel. Masks must overlap by an
    IoU of 0.99. Pixels may differ by what a JPEG codec changes. A sample that was stored smaller is
    compared at its own size.

    Args:
        sample: ``(image, target)``. The image is uint8, or float32 in 0 to 1, [3, H, W].
        reference: the reference sample, in the same form.

    Example:
        >>> target = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0)}
        >>> target["masks"] = torch.zeros(0, 8, 8)
        >>> grey, white = torch.full((3, 8, 8), 128, dtype=torch.uint8), torch.ones(3, 8, 8)
        >>> describe_difference((white, target), (grey, target))
        'pixels differ by 127.0 of 255 on average, 127 at most'
    """
    image, target = sample
    wanted_image, wanted = reference
    size = tuple(image.shape[-2:])
    full = tuple(wanted_image.shape[-2:])
    each = 1 + math.isqrt(math.prod(size) // _ALL_PIXELS)
    difference = _compare_pixels(_to_levels(image), _to_levels(wanted_image), each)
    if difference:
        return difference
    if target["labels"].tolist() != wanted["labels"].tolist():
        return "labels differ"
    scale = torch.tensor([size[1] / full[1], size[0] / full[0]] * 2)
    shift = (target["boxes"].cpu() - wanted["boxes"] * scale).abs()
    if (shift > 1).any():
        return f"a box differs by {float(shift.max()):.1f} pixels"
    # torchvision's transform shrinks masks in the same way.
    rows, columns = map(nearest_indices, full, size)
    wanted_masks = wanted["masks"][:, rows[::each]][..., columns[::each]] > 0
    masks = target["masks"][:, ::each, ::each].cpu() > 0
    differing = (masks ^ wanted_masks).count_nonzero((1, 2))
    if (differing > 0.01 * (masks | wanted_masks).count_nonzero((1, 2))).any():
        return "a mask overlaps that of the reference by an IoU below 0.99"
    return ""


def _compare_pixels(levels: Tensor, expected: Tensor, each: int) -> str:
    mean, peak = _KEPT_LEVELS
    if levels.shape != expected.shape:
        mean, peak = _SHRUNK_LEVELS
        size = levels.shape[1:]
        batch = expected[None]
        expected = functional.interpolate(batch, size=size, mode="bilinear", antialias=True)[0]
    difference = (levels - expected)[:, ::each, ::each].abs().numpy()
    if difference.mean() <= mean and np.percentile(difference, 99.9) <= peak:
        return ""
    return (
        f"pixels differ by {difference.mean():.1f} of 255 on average, "
        f"{difference.max():.0f} at most"
    )


def _to_levels(image: Tensor) -> Tensor:
    levels = image.cpu().float()
    return levels * 255 if image.is_floating_point() else levels


def _find_difference(batches: Iterable[Any], reference: CocoFolder) -> str:
    """Describe how an epoch differs from the reference; return "" if it does not differ.

    Every image must come once, and the first samples must equal those of the reference.
    """
    rows = {image_id: row for row, image_id in enumerate(reference.image_ids.tolist())}
    checked = 0
    for images, targets in batches:
        for image, target in zip(images, targets, strict=True):
            image_id = int(target["image_id"])
            row = rows.pop(image_id, None)
            if row is None:
                return f"image {image_id} is unknown, or came twice"
            if checked < _CHECKED_IMAGES:
                checked += 1
                difference = describe_difference((image, target), reference[row])
                if difference:
                    return f"image {image_id}: {difference}"
    return f"{len(rows)} images did not come, such as {min(rows)}" if rows else ""
