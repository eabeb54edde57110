"""`compare`: every strategy on the same images, checked to be equal first, then timed in turns."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from colab_utils.comparison import LEAST_NOISE, measure_spread
from colab_utils.comparison.loaders import Setting, deliver
from colab_utils.comparison.prepared import PreparedData, PreparedFiles
from colab_utils.comparison.strategies import Strategy, choose_strategies
from colab_utils.data.masks import nearest_indices
from colab_utils.diagnosis.diagnose import put_back
from colab_utils.diagnosis.timing import BatchTimes, time_batches
from colab_utils.errors import ColabUtilsError, describe_error
from colab_utils.files import drop_cached
from colab_utils.loading.dataset import CocoFolder
from colab_utils.loading.emulated_step import EmulatedStep, describe_busy
from colab_utils.machine import Machine, describe_machine
from colab_utils.progress import show_progress
from colab_utils.require import require_count, require_number
from colab_utils.slow_drive import DriveProfile, get_profile, read_at_full_speed

# A run ends by its seconds.
_MOST_BATCHES = 10_000
# So many images of an epoch are compared with the reference.
_CHECKED_IMAGES = 32
# Of 255, mean and 99.9th percentile: two JPEG decoders on the same bytes, and the same after one
# resize and JPEG at quality 95.
_KEPT_LEVELS = (1.0, 16.0)
_SHRUNK_LEVELS = (3.0, 48.0)
# A larger image is compared by every second row and column, or third.
_ALL_PIXELS = 2_000_000


@dataclass(frozen=True)
class StrategyTiming:
    """One strategy's row; figures are medians over the repeats, and None where it could not be
    timed.
    """

    name: str
    """Of the strategy."""
    title: str
    """How charts call it."""
    idea: str
    """What it does, in one sentence."""
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
    step_ms_median: float | None = None
    """The step of a batch alone, milliseconds: the median."""
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
    once_ms_per_image: float | None = None
    """Milliseconds to prepare an image, once: to read it from Drive, convert and write it."""
    session_ms_per_image: float | None = None
    """Milliseconds to copy an image to the local disk, in each session."""
    cold_ms_per_image: float | None = None
    """Milliseconds of an image in the first epoch of a session, step included; the start of the
    workers is not.
    """
    timeline: tuple[tuple[float, float], ...] = ()
    """When each step of the cold run began and ended, seconds since its first batch was asked
    for.
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
        if self.spread > LEAST_NOISE:
            text += f"; its repeats differ by {self.spread:.0%}"
        return text if self.comparable else f"{text}; NOT COMPARABLE: {self.difference}"


@dataclass(frozen=True)
class Comparison:
    """What `compare` found; its fields are the keys of the command's JSON."""

    machine: Machine
    """Where it ran."""
    dataset: dict[str, Any]
    """``name``, ``fingerprint`` and ``images`` (compared)."""
    strategies: tuple[StrategyTiming, ...]
    """One row each."""
    step: str
    """"real" or "emulated ..."."""
    drive: str
    """How slow Drive was made."""
    batch_size: int
    """Images in a batch."""
    batches: int
    """Timed batches of each repeat, at least, where they took no longer than three times its
    seconds.
    """
    repeats: int
    """How often each strategy was timed."""
    workers: int
    """Worker processes."""
    note: str
    """What is missing, and images that were left out."""
    busy: str = ""
    """That this machine was busy with other work, where the emulated step took too long."""

    def describe_steps(self) -> list[str]:
        """Return what each strategy wins over the one before it, as far as their repeats tell.

        What is within the spread of either's repeats, or within 5%, is called equal.
        """
        timed = [row for row in self.strategies if row.images_per_second is not None]
        return [_describe_step(before, after) for before, after in pairwise(timed)]

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
    restore: Sequence[Any] = (),
    on_run: Callable[[Comparison], object] | None = None,
) -> Comparison:
    """Time every strategy on the same images with the same step, after checking that their samples
    are equal.

    Charts compare the others with the first one that was timed and gives the reference's samples.

    Every strategy delivers ``(images, targets)`` as torchvision models take them, on the GPU if
    there is one; the way of a batch to the device is part of the step, as in `train`. First each
    gives an epoch, which must hold every image once, and samples equal to the reference's. Then
    each runs cold, with nothing of its files in the system's memory, and then warm. Further repeats
    run warm in turns, so that a machine that slows down slows all of them. Figures are medians over
    the repeats. A strategy that fails gets a row with the reason, and the others go on. Ctrl-C
    keeps the rows that are measured.

    Where ``drive_profile`` makes Drive slow, it is slow while a strategy is timed. Preparing data
    and checking samples read at full speed, also below a slowed folder; what they would take at
    Drive's speed is added to the costs.

    A cold run lasts for ``timeline_s`` seconds, and for three batches of each worker, where these
    take no longer than three times that. A warm run lasts for ``run_s`` seconds, and for
    ``batches`` batches where these take no longer than three times that, in whole rounds of the
    workers.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        folder: where data is prepared, and the copies lie; made if need be.
        strategies: names of `STRATEGIES`, or your own `Strategy`; None takes them all.
        drive_profile: how slow Drive is made (`DRIVE_PROFILES`); None or "none" reads ``images`` as
            they are.
        step: the training step, called as ``step(images, targets)``. It really trains its model,
            many times: name what it changes in ``restore``. None takes
            ``EmulatedStep(100)``, of 100 ms.
        batch_size: images in a batch.
        batches: timed batches of each repeat, at least, where they take no longer than three times
            ``run_s``.
        run_s: seconds that each repeat lasts, at least.
        repeats: how often each strategy is timed, each time with new workers.
        workers: worker processes of the strategies that have workers.
        max_images: the comparison takes the first so many images of the dataset.
        timeline_s: seconds that each strategy runs cold.
        restore: what your step changes, ``(model, optimizer)`` say: both are put back, as all
            random states are.
        on_run: called after each timed run with the comparison so far, so that a chart can grow;
            figures of what was not timed yet are None.

    Raises:
        ColabUtilsError: an unknown strategy, a missing dataset, or no strategy that could be timed.
    """
    chosen = choose_strategies(strategies)
    require_count("batch_size", batch_size)
    require_count("batches", batches)
    require_count("repeats", repeats)
    require_count("max_images", max_images)
    require_number("run_s", run_s, least=0, below=math.inf)
    require_count("workers", workers, least=0)
    profile = get_profile(drive_profile)
    if step is None:
        step = EmulatedStep(100)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with put_back(None, restore), read_at_full_speed():
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
            batches=batches,
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
            # A step that is slow beside one way alone lost its core to the workers of that way.
            busy = describe_busy(
                step.step_ms,
                min(row.step_ms_median for row in timings if row.step_ms_median),
            )
        return replace(empty, strategies=timings, busy=busy)


@dataclass
class _Row:
    """A strategy while it is being measured."""

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
        """Run the strategy; one that failed keeps a note, and is not run again."""
        try:
            if not self.note:
                run(self)
        except Exception as error:
            self.note = describe_error(error)

    def prepare(self) -> PreparedFiles:
        """Make the data that the strategy reads, where it is missing."""
        return self.setting.prepared.get(self.strategy.reads)

    def check(self) -> None:
        """Compare an epoch with the reference, which is read at full speed."""
        with closing(self.strategy.open(self.setting)) as loader:
            batches = (deliver(batch, self.setting.device) for batch in islice(loader, self._epoch))
            self.difference = _find_difference(batches, self.setting.prepared.reference)

    def run_cold(self) -> None:
        """Time the first batches, with nothing of the strategy's files in the system's memory."""
        # Data that is not written to the disk yet would stay in memory.
        os.sync()
        for file in self.prepare().files:
            drop_cached(file)
        began_s = perf_counter()
        with self._open_slowly() as loader:
            self.opened_s = perf_counter() - began_s
            self.cold = time_batches(
                loader, self._train, batches=_MOST_BATCHES, warmup=0, max_s=self.timeline_s
            )

    def run_warm(self) -> None:
        """Time batches after a warm-up, which is an epoch where a strategy keeps what it reads."""
        with self._open_slowly() as loader:
            warmup = self._epoch if self.strategy.keeps else 1
            self.times.append(
                time_batches(
                    loader,
                    self._train,
                    batches=_MOST_BATCHES,
                    warmup=warmup,
                    max_s=self.run_s,
                    least=self.batches,
                )
            )

    @contextmanager
    def _open_slowly(self) -> Iterator[Any]:
        """Open what the strategy loads by, and read Drive at its own speed until it is closed."""
        with (
            self.setting.prepared.slow_drive(),
            closing(self.strategy.open(self.setting)) as loader,
        ):
            yield loader

    @property
    def _epoch(self) -> int:
        return -(-len(self.setting.prepared) // self.setting.batch_size)

    def _train(self, *batch: Any) -> None:
        self.step(*deliver(batch if len(batch) > 1 else batch[0], self.setting.device))

    def summarise(self) -> StrategyTiming:
        """Return what was measured so far."""
        strategy = self.strategy
        workers = self.setting.workers
        noun = "worker" if workers == 1 else "workers"
        timing = StrategyTiming(
            strategy.name,
            strategy.title.replace("{}", f"{workers} {noun}") or strategy.name,
            strategy.idea,
            not self.difference,
            self.difference,
            note=self.note,
            repeats_images_per_second=tuple(run.images_per_second for run in self.times),
        )
        cold = self.cold
        if cold is None or not self.times:
            return timing
        batch_ms = [np.percentile(1000 * run.batch_s, (50, 95)) for run in self.times]
        median_ms, p95_ms = np.median(batch_ms, axis=0).tolist()
        files = self.prepare()
        count = len(self.setting.prepared)
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
            cold_ms_per_image=1000 * self._find_cold_s(cold, count),
            timeline=tuple(zip(begins_s.tolist(), ends_s.tolist(), strict=True)),
        )

    def _find_cold_s(self, cold: BatchTimes, count: int) -> float:
        """Return the seconds that an image takes in the first epoch of a session."""
        # The first batch of each worker holds its start, which a larger dataset has once, too.
        epoch = round(count * len(cold.wait_s) / cold.images + 0.49)
        batch_s = cold.batch_s[:epoch][max(1, self.setting.workers) :]
        if len(batch_s):
            cold_s = float(batch_s.mean()) / self.setting.batch_size
        else:
            cold_s = 1 / median(run.images_per_second for run in self.times)
        # What keeps its samples reads all of them while it opens: more images take longer.
        return cold_s + self.opened_s / count if self.strategy.keeps else cold_s


def _describe_step(before: StrategyTiming, after: StrategyTiming) -> str:
    gain = (after.images_per_second or 0) / (before.images_per_second or 1)
    noise = max(LEAST_NOISE, before.spread, after.spread)
    if gain >= 1 + noise:
        words = f"trains {gain:.1f} times as many images/s as"
    elif gain <= 1 - noise:
        words = f"trains {1 - gain:.0%} fewer images/s than"
    else:
        words = f"is as fast as, within {noise:.0%},"
    return f"{after.title} {words} {before.title}"


def _run_in_turns(rows: Sequence[_Row], repeats: int) -> Iterator[None]:
    """Prepare and check every strategy, then time them in turns; stops after each run."""
    runs = [(_Row.check, row) for row in rows]
    for row in rows:
        runs += [(_Row.run_cold, row), (_Row.run_warm, row)]
    for repeat in range(1, repeats):
        first = repeat % len(rows)
        runs += [(_Row.run_warm, row) for row in (*rows[first:], *rows[:first])]
    # Preparing has progress bars of its own.
    for row in rows:
        row.attempt(_Row.prepare)
    for run, row in show_progress("comparing", runs, total=len(runs), unit="run"):
        row.attempt(run)
        yield


def describe_difference(sample: tuple[Any, Any], reference: tuple[Any, Any]) -> str:
    """Describe how a sample differs from the reference sample of the same image.

    The text is empty where the samples agree.

    Samples are ``(image, target)``, images uint8 or float32 in 0 to 1, [3, h, w]. Boxes may differ
    by 1 pixel, masks must overlap by an IoU of 0.99, pixels may differ by what a JPEG codec
    changes. A sample stored smaller is compared at its own size.

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
    each = 1
    if size == full:
        each += math.isqrt(math.prod(size) // _ALL_PIXELS)
    difference = _compare_pixels(image[:, ::each, ::each], wanted_image[:, ::each, ::each])
    if difference:
        return difference
    if target["labels"].tolist() != wanted["labels"].tolist():
        return f"labels are {target['labels'].tolist()}, not {wanted['labels'].tolist()}"
    scale = torch.tensor([size[1] / full[1], size[0] / full[0]] * 2)
    boxes = (target["boxes"].cpu() - wanted["boxes"] * scale).abs()
    if boxes.numel() and float(boxes.max()) > 1:
        return f"a box differs by {float(boxes.max()):.1f} pixels"
    # As torchvision's own transform shrinks masks.
    rows, columns = map(nearest_indices, full, size)
    wanted_masks = wanted["masks"][:, rows[::each]][..., columns[::each]]
    return _compare_masks(target["masks"][:, ::each, ::each].cpu() > 0, wanted_masks > 0)


def _compare_masks(masks: Tensor, wanted_masks: Tensor) -> str:
    union = (masks | wanted_masks).count_nonzero((1, 2))
    ious = ((masks & wanted_masks).count_nonzero((1, 2)) / union)[union > 0].tolist()
    if min(ious, default=1) < 0.99:
        return f"a mask overlaps the reference by an IoU of {min(ious):.2f}"
    return ""


def _compare_pixels(image: Tensor, wanted_image: Tensor) -> str:
    pixels = _to_levels(image)
    wanted = _to_levels(wanted_image)
    mean, peak = _KEPT_LEVELS
    if pixels.shape != wanted.shape:
        mean, peak = _SHRUNK_LEVELS
        size = pixels.shape[1:]
        wanted = functional.interpolate(wanted[None], size=size, mode="bilinear", antialias=True)[0]
    difference = (pixels - wanted).abs().numpy()
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
    """Describe how an epoch differs from the reference: in an image that is missing or came twice,
    or in one of the first samples. The text is empty where nothing differs.
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
