"""Every strategy side by side, on the same images: checked to be equal first, then timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from colab_utils.data.coco import read_coco
from colab_utils.diagnosis.clocks import BatchTimes, EmulatedStep, describe_error, time_batches
from colab_utils.diagnosis.strategies import STRATEGIES, Strategy, prepare_places
from colab_utils.drive import DriveProfile, get_profile, is_on_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.folder import CocoFolder
from colab_utils.runtime import Machine, describe_machine, show_progress

__all__ = ["Comparison", "StrategyTiming", "compare", "describe_difference"]

_CHECKED_IMAGES = 8
_MAX_RUN_S = 30.0  # for one repeat of one strategy
_KEPT_LEVELS = (1.0, 16.0)  # of 255, mean and 99.9th percentile: two JPEG decoders on the same bytes
_SHRUNK_LEVELS = (3.0, 48.0)  # the same after one resize and JPEG at quality 95


@dataclass(frozen=True)
class StrategyTiming:
    """One strategy's row: medians over the repeats, None where it could not be timed (``note`` says why).

    ``comparable`` is False where its samples are not the reference's; ``difference`` then says how. ``wait_share`` is
    0 to 1; ``cpu_ms_per_image`` is loading alone, over all processes; ``first_batch_s`` includes the workers' start.
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

    def __str__(self) -> str:
        if self.images_per_second is None:
            return f"{self.name}: not timed, {self.note}"
        spread = f"{min(self.repeats_images_per_second):.1f} to {max(self.repeats_images_per_second):.1f}"
        warning = "" if self.comparable else f"; NOT COMPARABLE: {self.difference}"
        rate = f"{self.images_per_second:.1f} images/s ({spread}), waiting {self.wait_share:.0%}"
        return f"{self.name} ({self.place}): {rate}{warning}"


@dataclass(frozen=True)
class Comparison:
    """What `compare` found; its fields are the keys of the command's JSON. ``step`` is "real" or "emulated ..."."""

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

    def __str__(self) -> str:
        head = f"{self.dataset['images']} images of {self.dataset['name']}, step {self.step}, {self.machine}"
        return "\n  ".join([head, *map(str, self.strategies), *([self.note] if self.note else [])])


@dataclass
class _Row:
    """A strategy while it is being measured."""

    strategy: Strategy
    place: str
    note: str
    difference: str = "not checked"
    failed: bool = False
    times: list[BatchTimes] = field(default_factory=list)


def compare(
    images: str | Path, annotations: str | Path, *, folder: str | Path, strategies: Sequence[str] | None = None,
    drive_profile: str | DriveProfile | None = "typical", step: Callable[..., Any] | None = None,
    step_ms: float = 100.0, batch_size: int = 4, batches: int = 24, repeats: int = 3, workers: int = 2,
    max_images: int = 400, min_size: int = 800, max_size: int = 1333,
) -> Comparison:  # fmt: skip
    """Time every strategy on the same images with the same step, after checking that their samples are equal.

    Every strategy delivers ``(images, targets)`` as torchvision models take them, on the GPU if there is one. Repeats
    are interleaved, warm-up is left out, figures are medians over the repeats. A strategy that fails gets a row that
    says why, and the others go on; Ctrl-C keeps the rows that are measured.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        folder: where shards and copies for the comparison are kept (and found again); made if need be.
        strategies: names of `STRATEGIES`; None takes all.
        drive_profile: how slow Drive is made (`DRIVE_PROFILES`); None or "none" reads ``images`` as they are.
        step: the training step, called as ``step(images, targets)``; None takes ``EmulatedStep(step_ms)``.
        step_ms: length of the emulated step, milliseconds.
        batch_size: images in a batch.
        batches: timed batches of each repeat.
        repeats: how often each strategy is timed, each time with new workers.
        workers: worker processes of every strategy but ``sequential``.
        max_images: the comparison takes the first so many images of the dataset.
        min_size: the shorter side that training needs, pixels: shards are made for it.
        max_size: the longer side that training needs, pixels.

    Raises:
        ColabUtilsError: an unknown strategy, a missing dataset, or no strategy that could be timed.
    """
    names = list(STRATEGIES) if strategies is None else list(dict.fromkeys(name.strip() for name in strategies))
    unknown = [name for name in names if name not in STRATEGIES]
    if unknown or not names:
        found = ", ".join(map(repr, unknown)) or "none"
        raise ColabUtilsError(f"expected strategies among {', '.join(STRATEGIES)}; found {found}: choose some of them")
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
    chosen, sizes = [STRATEGIES[name] for name in names], {"min_size": min_size, "max_size": max_size}
    places = prepare_places(images, coco, folder, chosen, profile=profile, max_images=max_images, **sizes)
    reference = CocoFolder(places.images_on_ssd, places.annotations)
    rows = []
    for strategy in chosen:
        place = "Google Drive" if is_on_drive(places.find(strategy)) else "local disk"
        place = f"slowed Drive folder, profile {profile.name}" if profile and strategy.on_drive else place
        rows.append(_Row(strategy, place, places.copied if strategy.shards and not strategy.on_drive else ""))

    def run(row: _Row, *, timed: bool) -> None:
        """Check a strategy, or time it once; where it fails, a note says why, and the others go on."""
        speed, crew = (profile, workers) if timed else (None, 0)
        try:
            loader = places.build_loader(row.strategy, profile=speed, batch_size=batch_size, workers=crew)
            try:
                if timed:
                    row.times.append(time_batches(loader, step, batches=batches, max_s=_MAX_RUN_S))
                else:
                    few = islice(loader, -(-_CHECKED_IMAGES // batch_size))
                    row.difference = _find_difference(few, reference)
            finally:
                loader.close()
        except Exception as error:
            row.note, row.failed = describe_error(error), True

    note = ""
    try:
        for row in rows:
            run(row, timed=False)
        with show_progress("comparing", total=repeats * len(rows), unit="run") as bar:
            for repeat in range(repeats):  # in turns, so that a machine that slows down slows all of them
                for row in rows[repeat % len(rows) :] + rows[: repeat % len(rows)]:
                    if not row.failed:
                        run(row, timed=True)
                    bar.update(1)
    except KeyboardInterrupt:
        rows = [row for row in rows if row.times]
        if not rows:
            raise
        note = "Stopped by Ctrl-C: strategies or repeats are missing."
    if not any(row.times for row in rows):
        raise ColabUtilsError(f"expected a strategy that can be timed, found that none could: {rows[0].note}")
    dataset = {"name": images.name, "fingerprint": coco.fingerprint, "images": len(reference)}
    step_name = str(step) if getattr(step, "emulated", False) else "real"
    drive = f"{profile}. {profile.source}" if profile else "as it is, not slowed"
    timings = tuple(_summarise(row) for row in rows)
    return Comparison(
        describe_machine(folder), dataset, timings, step_name, drive, batch_size, batches, repeats, workers, note
    )


def describe_difference(sample: tuple[Any, Any], reference: tuple[Any, Any]) -> str:
    """How a sample differs from the reference sample of the same image; empty where it does not.

    Samples are ``(image, target)``, images uint8 or float32 in 0 to 1, [3, h, w]. Boxes may differ by 1 pixel, masks
    must overlap by an IoU of 0.99, pixels may differ by what a JPEG codec changes. A sample stored smaller is compared
    at its own size.

    Example:
        >>> target = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0), "masks": torch.zeros(0, 8, 8)}
        >>> grey, white = torch.full((3, 8, 8), 128, dtype=torch.uint8), torch.ones(3, 8, 8)
        >>> describe_difference((white, target), (grey, target))
        'pixels differ by 127.0 of 255 on average'
    """
    (image, target), (wanted_image, wanted) = sample, reference
    size, full = tuple(image.shape[-2:]), tuple(wanted_image.shape[-2:])
    mean, peak = _KEPT_LEVELS if size == full else _SHRUNK_LEVELS
    pixels, wanted_pixels = (i.cpu().float() * (255 if i.is_floating_point() else 1) for i in (image, wanted_image))
    if size != full:
        wanted_pixels = functional.interpolate(wanted_pixels[None], size=size, mode="bilinear", antialias=True)[0]
    difference = (pixels - wanted_pixels).abs()
    if float(difference.mean()) > mean:
        return f"pixels differ by {float(difference.mean()):.1f} of 255 on average"
    if float(np.percentile(difference.numpy(), 99.9)) > peak:
        return f"some pixels differ by {float(difference.max()):.0f} of 255"
    if target["labels"].tolist() != wanted["labels"].tolist():
        return f"labels are {target['labels'].tolist()}, not {wanted['labels'].tolist()}"
    boxes = target["boxes"].cpu() - wanted["boxes"] * torch.tensor([size[1] / full[1], size[0] / full[0]] * 2)
    if boxes.numel() and float(boxes.abs().max()) > 1:
        return f"a box differs by {float(boxes.abs().max()):.1f} pixels"
    for mask, wanted_mask in zip(target["masks"].cpu() > 0, wanted["masks"], strict=True):
        # a smaller mask is its nearest neighbours, as in torchvision's own transform
        there = functional.interpolate(wanted_mask[None, None].float(), size=size)[0, 0] > 0
        iou = int((mask & there).sum()) / max(int((mask | there).sum()), 1)
        if iou < 0.99 and (mask | there).any():
            return f"a mask overlaps the reference by an IoU of {iou:.2f}"
    return ""


def _find_difference(batches: Iterable[Any], reference: CocoFolder) -> str:
    row_of = {int(image_id): row for row, image_id in enumerate(reference.image_ids)}
    for images, targets in batches:
        for image, target in zip(images, targets, strict=True):
            image_id = int(target["image_id"])
            if image_id not in row_of:
                return f"image {image_id} came unasked, or twice"
            difference = describe_difference((image, target), reference[row_of.pop(image_id)])
            if difference:
                return f"image {image_id}: {difference}"
    return ""


def _summarise(row: _Row) -> StrategyTiming:
    names = ("images_per_second", "batch_ms_median", "batch_ms_p95", "wait_share", "first_batch_s", "cpu_ms_per_image")
    runs, way = row.times, row.strategy
    figures: Any = {name: median(getattr(run, name) for run in runs) if runs else None for name in names}
    rates = tuple(run.images_per_second for run in runs)
    return StrategyTiming(
        way.name, way.idea, row.place, not row.difference, row.difference, **figures,
        repeats_images_per_second=rates, note=row.note,
    )  # fmt: skip
