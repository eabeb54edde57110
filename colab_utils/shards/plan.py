"""How should the images lie on disk? Every form is tried on a sample, on this machine, and one that fits is picked."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.parsing import read_bytes
from colab_utils.drive import DriveProfile, get_profile, is_on_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import count_cores, find_free_memory, format_bytes, is_colab
from colab_utils.shards.copy import COPY_STREAMS
from colab_utils.shards.format import explain_write
from colab_utils.shards.images import JPEG_QUALITY, Form, plan_size
from colab_utils.shards.jobs import READ_STREAMS
from colab_utils.shards.trial import MASK_FORMS, FormCost, ImageTrial, time_writing, try_forms
from colab_utils.shards.write import SAMPLE_IMAGES, check_numbers, find_recipe, open_dataset
from colab_utils.workspace import COLAB_ROOT

__all__ = ["MaskOption", "ShardPlan", "StorageOption", "plan_shards"]

QUALITIES = (JPEG_QUALITY, 90)
BUSY_CORES = 0.9  # what a training process takes to launch kernels


@dataclass(frozen=True)
class StorageOption:
    """One way to store the images and what it costs here; ``bytes`` and seconds are of the whole dataset."""

    name: str
    form: Form
    jpeg_quality: int
    bytes_per_image: float
    bytes: int
    """Of all shards and the arrays beside them."""
    write_cpu_ms: float
    """CPU time to make one image's record, with all cores busy."""
    read_cpu_ms: float
    """CPU time to decode one image, with all cores busy."""
    make_s: float
    copy_s: float
    images_per_second: float
    """What decoding feeds with the cores that a training step leaves free."""
    lacking: tuple[str, ...]
    """What cannot hold it: "Drive", "SSD", or "RAM", which only raw pixels need: a disk reads them too slowly."""


@dataclass(frozen=True)
class MaskOption:
    """One form of masks: the bytes of one image's, and the CPU time until they are dense."""

    name: str
    bytes_per_image: float
    dense_cpu_ms: float


@dataclass(frozen=True)
class ShardPlan:
    """What `plan_shards` measured and picked; as text, the table it decided from, the reason and the estimate."""

    picked: StorageOption
    reason: str
    options: tuple[StorageOption, ...]
    masks: tuple[MaskOption, ...]
    images: int
    sampled_images: int
    setting: str
    """What it was measured on: cores, room on the disks, Drive's speed, the step."""
    seconds: float
    """What planning took."""

    @property
    def rows(self) -> list[dict[str, str]]:
        """The options as rows for `colab_utils.show.table.make_table`."""
        return [
            {
                "stored as": option.name,
                "an image": format_bytes(option.bytes_per_image),
                "in all": format_bytes(option.bytes),
                "fits": "no: " + ", ".join(option.lacking) if option.lacking else "yes",
                "to make": _say_time(option.make_s),
                "to copy": _say_time(option.copy_s),
                "write CPU-ms": f"{option.write_cpu_ms:.1f}",
                "read CPU-ms": f"{option.read_cpu_ms:.1f}",
                "decoding feeds images/s": f"{option.images_per_second:.0f}",
            }
            for option in self.options
        ]

    @property
    def sentence(self) -> str:
        """What was picked, why, and what it will take, in one line."""
        made, copied = _say_time(self.picked.make_s), _say_time(self.picked.copy_s)
        return (
            f"{self.picked.name}: {self.reason}. About {format_bytes(self.picked.bytes)}, {made} to make, "
            f"{copied} to copy to the SSD."
        )

    def __str__(self) -> str:
        masks = [
            {"masks": m.name, "an image": format_bytes(m.bytes_per_image), "dense CPU-ms": f"{m.dense_cpu_ms:.1f}"}
            for m in self.masks
        ]
        return f"{_align(self.rows)}\n\n{_align(masks)}\n\n{self.setting}\n{self.sentence}"


def plan_shards(
    images: str | Path,
    annotations: str | Path,
    *,
    shards: str | Path | None = None,
    local: str | Path | None = None,
    form: Form | Literal["auto"] = "auto",
    jpeg_quality: int | None = None,
    shard_mb: float = 128,
    min_size: int = 800,
    max_size: int = 1333,
    step_ms: float | None = None,
    batch_size: int = 4,
    profile: str | DriveProfile | None = None,
    sample: int = 200,
    workers: int | Literal["auto"] = "auto",
) -> ShardPlan:
    """Try every form of storage on a sample of the images, and pick one for `write_shards`; nothing is written there.

    Larger images are shrunk at JPEG quality 95, and at 90 only where 95 does not fit. Where none is larger, every
    file keeps its bytes. Raw pixels are picked only where decoding cannot feed the given step, and all of them fit.
    Shards that were begun are continued as they are.

    Source: totals are ratio estimates over the pixels that the annotations give (Cochran, "Sampling Techniques",
    chapter 6).

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        shards: the folder to write to; None: its disk is not looked at.
        local: the folder to copy to; None: on Colab its local disk, elsewhere none is looked at.
        form: "auto" picks; any other is taken.
        jpeg_quality: of shrunk images, 1 to 100; None: 95 or 90.
        shard_mb: size of a shard, in MB.
        min_size: the shorter side that training needs, in pixels.
        max_size: the longer side that training needs, in pixels.
        step_ms: what a training step takes for one batch, in milliseconds.
        batch_size: images in that batch.
        profile: the speed at which the copy will read (see `colab_utils.drive`); None: as the sample was read.
        sample: images to try; fewer where they take more than about 20 seconds.
        workers: processes that will write; "auto" is one for each core.

    Raises:
        ColabUtilsError: if the input is missing or not COCO, no image is usable, a number is out of range, or no form
            fits.

    Example:
        >>> import tempfile
        >>> from colab_utils.data.builtin import make_dataset
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = make_dataset(folder, n=4, width=64, height=64, workers=1)
        ...     plan = plan_shards(made.images, made.annotations, workers=1)
        >>> plan.picked.form, plan.reason
        ('keep', 'no image is larger than training needs, every file keeps its bytes')
    """
    started = perf_counter()
    processes = count_cores() if workers == "auto" else workers
    check_numbers(shard_mb=shard_mb, min_size=min_size, max_size=max_size, batch_size=batch_size, sample=sample)
    given = {"workers": processes, "jpeg_quality": jpeg_quality, "step_ms": step_ms}
    check_numbers(**{name: value for name, value in given.items() if value is not None})
    if form not in ("auto", *get_args(Form)):
        raise ColabUtilsError(f"expected form as auto, {', '.join(get_args(Form))}, found {form!r}: choose another")
    wish = "you asked for it"
    begun = find_recipe(shards) if shards is not None and form == "auto" else None
    if begun is not None:
        form, jpeg_quality, wish = begun["form"], begun["jpeg_quality"], "shards like that were begun in the folder"
    speed, began = get_profile(profile), perf_counter()
    reads = [(len(read_bytes(Path(annotations))), perf_counter() - began)]  # large: shows how fast Drive reads
    opened = perf_counter()
    dataset = open_dataset(images, annotations)
    open_s = perf_counter() - opened
    qualities = (jpeg_quality,) if jpeg_quality else QUALITIES
    kinds: list[tuple[Form, int]] = [("keep", qualities[0]), *(("shrink", quality) for quality in qualities)]
    kinds.append(("pixels", qualities[0]))
    limits = {"min_size": min_size, "max_size": max_size}
    recipes = [{**limits, "form": kind, "jpeg_quality": quality} for kind, quality in kinds]
    trial = try_forms(dataset, Path(images), recipes, sample=sample, workers=processes)
    chosen, tried, count = list(trial.images), list(trial.images.values()), len(dataset)
    reads += [(one.file_bytes, one.read_s) for one in tried]
    speed, written, cores = speed or _describe_reads(reads), time_writing(), count_cores()
    room = _find_room(shards, local)
    original, stored = _count_pixels(dataset.sizes, **limits)
    options = []
    for row, (kind, quality) in enumerate(kinds):
        cost = FormCost(*np.mean([one.forms[row] for one in tried], axis=0).tolist())
        pixels = original if kind == "keep" else stored
        member_bytes = cost.image_bytes * pixels.mean() / pixels[chosen].mean() + cost.json_bytes
        size = count * (member_bytes + cost.table_bytes)
        per_shard = min(count, max(1, round(shard_mb * 1e6 / member_bytes)))
        wait_s = float(np.mean([one.read_s for one in tried])) / READ_STREAMS
        work_s = cost.write_s * original.mean() / original[chosen].mean()
        make_s = _estimate_making(count, per_shard, processes, wait_s=wait_s, work_s=work_s, slowdown=trial.slowdown)
        options.append(
            StorageOption(
                name=f"shrink, JPEG {quality}" if kind == "shrink" else kind,
                form=kind,
                jpeg_quality=quality,
                bytes_per_image=size / count,
                bytes=round(size),
                write_cpu_ms=cost.write_cpu_s * 1000,
                read_cpu_ms=cost.read_cpu_s * 1000,
                make_s=open_s + make_s + size / written,  # beside the work, but it takes cores and memory from it
                copy_s=_estimate_copying(size, math.ceil(count / per_shard), speed, written),
                images_per_second=max(cores - BUSY_CORES, 0.1) / cost.read_cpu_s,
                lacking=tuple(name for name in room if size > room[name] and (name != "RAM" or kind == "pixels")),
            )
        )
    need = None if step_ms is None else batch_size * 1000 / step_ms
    larger = np.mean(stored < original) if dataset.sizes.min() > 0 else np.mean([_is_larger(one) for one in tried])
    if form == "auto":
        picked, reason = _pick(options, f"{round(larger * count):,} of {count:,}" if larger else "", need, room)
    else:
        asked = [option for option in options if option.form == form]
        picked, reason = next((option for option in asked if not option.lacking), asked[0]), wish
    masks = np.mean([one.masks for one in tried], axis=0).tolist()
    spaces = ", ".join(f"{name} {format_bytes(free)}" for name, free in room.items() if free < math.inf)
    seconds = perf_counter() - started
    return ShardPlan(
        picked=picked,
        reason=reason,
        options=tuple(options),
        masks=tuple(MaskOption(name, m[0], m[1] * 1000) for name, m in zip(MASK_FORMS, masks, strict=True)),
        images=count,
        sampled_images=len(tried),
        setting=f"Measured on {len(tried):,} of {count:,} images in {seconds:.0f} s: {cores} cores, room for shards: "
        f"{spaces}; Drive {speed}{f', a step that takes {need:.0f} images/s' if need else ''}.",
        seconds=seconds,
    )


def _find_room(shards: str | Path | None, local: str | Path | None) -> dict[str, float]:
    """Bytes of shards that Drive, the SSD and RAM can hold; infinite where it is not known which disk that is."""
    disks = []
    for folder in (shards, local or (COLAB_ROOT if is_colab() else None)):
        path = Path(folder or "/").absolute()
        with explain_write(path):
            there = next(place for place in (path, *path.parents) if place.exists())
            disks.append((there.stat().st_dev, shutil.disk_usage(there).free if folder else math.inf))
    # Drive's cache keeps all that is read, on the local disk; a folder that stands in for Drive lies there itself
    twice = shards and (disks[0][0] == disks[1][0] or is_on_drive(shards))
    return {"Drive": disks[0][1], "SSD": disks[1][1] / (2 if twice else 1), "RAM": find_free_memory()}


def _pick(
    options: Sequence[StorageOption], larger: str, need: float | None, room: dict[str, float]
) -> tuple[StorageOption, str]:
    """The option to take, and why; ``larger`` says how many images are larger than training needs, if any are."""
    keep, *shrunk, pixels = options
    encoded = [*shrunk, keep] if larger else [keep]
    best, feeds = encoded[0], ""
    if need is not None and best.images_per_second < min(need, pixels.images_per_second):
        feeds = f"decoding feeds {best.images_per_second:.0f} of the {need:.0f} images/s that the step takes"
        if not pixels.lacking:
            return pixels, f"{feeds}, raw pixels {pixels.images_per_second:.0f}"
        feeds = f"; {feeds}, and raw pixels do not fit ({', '.join(pixels.lacking)})"
    picked = next((option for option in encoded if not option.lacking), None)
    if picked is None:
        least = min(encoded, key=lambda option: option.bytes)
        found = " and ".join(f"{format_bytes(room[name])} on {name}" for name in least.lacking)
        raise ColabUtilsError(
            f"expected room for {format_bytes(least.bytes)} of shards ({least.name}), found room for {found} (where a "
            "copy shares the disk with Drive's cache, it lies there twice). Free some, name folders on other disks, or "
            "store smaller images (--min-size)."
        )
    reason = "no image is larger than training needs, every file keeps its bytes"
    if larger:
        reason = f"{larger} images are larger than training needs and are shrunk once"
    if picked is not best:
        reason = f"{best.name} needs {format_bytes(best.bytes)} and does not fit ({', '.join(best.lacking)}), this does"
    return picked, reason + feeds


def _is_larger(tried: ImageTrial) -> bool:
    return tried.forms[-1].pixels < tried.forms[0].pixels


def _count_pixels(sizes: NDArray[np.int32], *, min_size: int, max_size: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Pixels of each image as it is and as shrunk; ones where the annotations do not give every size."""
    if sizes.min() < 1:
        return np.ones(len(sizes)), np.ones(len(sizes))
    stored = [plan_size(height, width, min_size=min_size, max_size=max_size) for height, width in sizes.tolist()]
    return sizes.prod(1, dtype=np.float64), np.prod(stored, axis=1, dtype=np.float64)


def _estimate_making(
    count: int, per_shard: int, processes: int, *, wait_s: float, work_s: float, slowdown: float
) -> float:
    """Seconds until the last shard is whole: rounds of one shard for each process; the last may leave some idle.

    An image takes ``work_s`` of work with every process busy; meanwhile others are read, one every ``wait_s``.
    """

    def cost_s(busy: int) -> float:
        return max(wait_s, work_s * (1 + (slowdown - 1) * (busy - 1) / max(processes - 1, 1)) / slowdown)

    jobs = math.ceil(count / per_shard)
    busy = min(processes, jobs)
    rounds = (jobs - 1) // busy
    rest, last = jobs - rounds * busy, count - (jobs - 1) * per_shard  # shards of the last round, images of the last
    making_s = rounds * per_shard * cost_s(busy) + last * cost_s(rest)
    if rest > 1:
        making_s += (per_shard - last) * cost_s(rest - 1)
    return making_s + min(SAMPLE_IMAGES, count) * cost_s(1)  # write_shards looks at some first, alone


def _estimate_copying(size: float, shards: int, speed: DriveProfile, written: float) -> float:
    """Seconds of `copy_shards`: two files for each shard, some at the same time, and the last ones end one by one."""
    file_s = speed.open_s + size / shards * (1 / speed.bytes_per_s + 1 / written)
    total_s = shards * (file_s + speed.open_s)
    return max(total_s / COPY_STREAMS + file_s / 2, file_s)


def _describe_reads(reads: Sequence[tuple[int, float]]) -> DriveProfile:
    """Reads of whole files as a profile: the best rate, and what a file waited beyond it."""
    sizes, seconds = np.array(reads, np.float64).T
    rate = float((sizes / seconds).max())
    wait_s = max(0.0, float(np.median(seconds - sizes / rate)))
    return DriveProfile("as measured", wait_s, rate, "the annotations and the sample, as they were read")


def _say_time(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def _align(rows: Sequence[dict[str, str]]) -> str:
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)
