"""How should the images lie on disk? Every form is tried on a sample, on this machine, and one that fits is picked."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from pycocotools import mask as coco_mask

from colab_utils.data.coco import CocoDataset, read_bytes
from colab_utils.data.decoding import decode_pixels
from colab_utils.data.masks import pack_masks, unpack_masks
from colab_utils.drive import DriveLostError, DriveProfile, get_profile, is_on_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import (
    COLAB_ROOT,
    count_cores,
    find_free_memory,
    fork_pool,
    format_bytes,
    is_colab,
    show_progress,
    write_file,
)
from colab_utils.shards.arrays import ArraysBuilder, ShardArrays, decode_counts
from colab_utils.shards.copy import COPY_STREAMS
from colab_utils.shards.format import explain_write, hash_bytes, pad_member
from colab_utils.shards.images import JPEG_QUALITY, Storage, StoredImage, dump_record, make_record, plan_size
from colab_utils.shards.write import (
    READ_STREAMS,
    SAMPLE_IMAGES,
    check_numbers,
    find_recipe,
    open_dataset,
    read_image,
    store_sample,
)

__all__ = [
    "MASK_STORAGES",
    "ImageTrial",
    "MaskOption",
    "ShardPlan",
    "StorageCost",
    "StorageOption",
    "Trial",
    "plan_shards",
    "time_writing",
    "try_storages",
]

MASK_STORAGES = ("packed crops (what the loader reads)", "RLE (in the tar)", "dense")


TOGETHER_S, ALONE_S = 10.0, 4.0  # seconds


FEWEST_IMAGES = 4


MOST_OBJECTS = 32  # of an image whose masks are made dense: a thousand dense ones take gigabytes


WRITTEN_BYTES = 32_000_000


class StorageCost(NamedTuple):
    """What one image costs in one form of storage."""

    pixels: float
    """Height times width, as stored."""
    image_bytes: float
    json_bytes: float
    """Both as members of the tar, header and padding included."""
    table_bytes: float
    """Of its rows in the arrays beside the tar."""
    write_s: float
    """Wall time to make the record, reading the file left out."""
    write_cpu_s: float
    read_cpu_s: float
    """CPU time to decode it into memory that is used again, as the loader does."""


class ImageTrial(NamedTuple):
    """One image tried in every form; of the masks, bytes and CPU seconds until they are dense, as `MASK_STORAGES`."""

    file_bytes: int
    read_s: float
    storages: list[StorageCost]
    masks: list[tuple[float, float]]


@dataclass(frozen=True)
class Trial:
    """The images that were tried, by their number in the dataset, while every process was busy."""

    images: dict[int, ImageTrial]
    slowdown: float
    """How much longer an image takes with every process busy than with one alone: 1 to the number of processes."""


def try_storages(
    dataset: CocoDataset, images: Path, recipes: Sequence[dict[str, Any]], *, sample: int, workers: int
) -> Trial:
    """Try each recipe on a seeded sample spread over the dataset, in about 20 seconds at most.

    Args:
        dataset: the annotations.
        images: the image folder.
        recipes: as in the index of a folder of shards.
        sample: images to try; a time limit may leave some out.
        workers: processes that will write the shards.

    Raises:
        ColabUtilsError: if none of the images is usable, or a process was ended.
        DriveLostError: if Drive went away.
    """
    rng, count = np.random.default_rng(0), min(sample, len(dataset))
    edges = np.linspace(0, len(dataset), count + 1)[:-1]
    places = np.unique((edges + rng.random(count) * (len(dataset) / count)).astype(int))
    order = rng.permutation(places).tolist()  # so that those a time limit leaves are spread too
    parts = [dataset.subset(i, i + 1) for i in order]
    with suppress(ColabUtilsError):  # the libraries are loaded before anything is timed; a fault is met again below
        _try_image(parts[-1], images, recipes)
    together = _try_images(parts, images, recipes, workers=workers, seconds=TOGETHER_S)
    slowdown = 1.0
    if workers > 1:
        few = list(together)[: max(FEWEST_IMAGES, len(together) // 3)]
        alone = _try_images([parts[i] for i in few], images, recipes, workers=1, seconds=ALONE_S)
        busy_s, calm_s = 0.0, 0.0
        for i, calm in alone.items():
            busy_s += sum(form.write_s for form in together[few[i]].storages)
            calm_s += sum(form.write_s for form in calm.storages)
        slowdown = min(max(busy_s / calm_s, 1.0), float(workers))
    return Trial({order[i]: found for i, found in together.items()}, slowdown)


def time_writing() -> float:
    """Bytes per second that one process hashes and writes to this machine's disk, in whole files."""
    with tempfile.TemporaryDirectory(prefix="colab_utils-") as folder:
        data, started = np.random.default_rng(0).bytes(WRITTEN_BYTES), perf_counter()
        hash_bytes(data)
        write_file(Path(folder) / "data", data)
        return WRITTEN_BYTES / (perf_counter() - started)


def _try_images(
    parts: Sequence[CocoDataset], images: Path, recipes: Sequence[dict[str, Any]], *, workers: int, seconds: float
) -> dict[int, ImageTrial]:
    """Try datasets of one image each, until the time is over; {position: what was found} of the good ones."""
    found: dict[int, ImageTrial] = {}
    reason, started = "", perf_counter()
    with (
        show_progress("trial", total=len(parts), unit="image") as bar,
        fork_pool(workers) as pool,
    ):
        futures: list[Future[ImageTrial]] = []
        try:
            for position in range(len(parts)):
                if len(found) < FEWEST_IMAGES or perf_counter() - started < seconds:
                    following = parts[len(futures) : position + 2 * workers + 1]  # so that none is idle
                    futures += [pool.submit(_try_image, part, images, recipes) for part in following]
                if position == len(futures):
                    break
                try:
                    found[position] = futures[position].result()
                except DriveLostError:
                    raise
                except ColabUtilsError as error:
                    reason = f"{parts[position].file_name(0)}: {error}"
                bar.update(1)
        except BrokenExecutor:
            raise ColabUtilsError(
                "expected every process to try its images, found one that the system ended, most often for want of "
                "memory. Run the same with fewer workers (--workers 1)."
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    if not found:
        raise ColabUtilsError(
            f"expected usable images in {images}, found every one that was looked at bad, such as {reason}. Name the "
            "right image folder, or see `check`."
        )
    return found


def _try_image(part: CocoDataset, images: Path, recipes: Sequence[dict[str, Any]]) -> ImageTrial:
    data, read_s, _ = _time(read_image, images, part, 0)
    storages, tables = [], {}
    for recipe in recipes:
        stored, store_s, store_cpu_s = _time(store_sample, data, part, 0, recipe)
        size = stored.height, stored.width
        if size not in tables:  # the same for every form of one size
            tables[size] = _time(_make_table, part, stored)
        (text, arrays), table_s, table_cpu_s = tables[size]
        _, _, read_cpu_s = _time(_decode_into, np.ones((*size, 3), np.uint8), stored.data)
        storages.append(
            StorageCost(
                pixels=size[0] * size[1],
                image_bytes=len(pad_member("0", stored.data)),
                json_bytes=len(pad_member("0", text)),
                table_bytes=sum(array.nbytes for array in vars(arrays).values()),
                write_s=store_s + table_s,
                write_cpu_s=store_cpu_s + table_cpu_s,
                read_cpu_s=read_cpu_s,
            )
        )
    return ImageTrial(len(data), read_s, storages, _try_masks(json.loads(text)))


def _make_table(part: CocoDataset, stored: StoredImage) -> tuple[bytes, ShardArrays]:
    record = make_record(part.image(0), part.annotations(0), stored)
    text, builder = dump_record(record), ArraysBuilder()
    builder.add(record, stored.data, (0, 0), (0, 0))
    return text, builder.build()


def _try_masks(record: dict[str, Any]) -> list[tuple[float, float]]:
    rles = [decode_counts(row["segmentation"]) for row in record["annotations"] if not row["iscrowd"]]
    few, shape = rles[:MOST_OBJECTS], (record["height"], record["width"])
    if not few:
        return [(0, 0)] * len(MASK_STORAGES)
    packed = pack_masks(few)
    dense, scale = unpack_masks(packed, *shape), len(rles) / len(few)
    sizes = packed.bits.nbytes + packed.crops.nbytes, sum(len(rle["counts"]) for rle in few), dense.nbytes
    times = _time(unpack_masks, packed, *shape), _time(coco_mask.decode, few), _time(np.copy, dense)
    return [(size * scale, cpu_s * scale) for size, (_, _, cpu_s) in zip(sizes, times, strict=True)]


def _decode_into(pixels: NDArray[np.uint8], data: bytes) -> None:
    np.copyto(pixels, decode_pixels(data))


def _time(call: Callable[..., Any], *arguments: Any) -> tuple[Any, float, float]:
    """What a call gives, and the wall and CPU seconds that it took."""
    started, cpu_started = perf_counter(), process_time()
    result = call(*arguments)
    return result, perf_counter() - started, process_time() - cpu_started


QUALITIES = (JPEG_QUALITY, 90)


BUSY_CORES = 0.9  # what a training process takes to launch kernels


@dataclass(frozen=True)
class StorageOption:
    """One way to store the images and what it costs here; ``bytes`` and seconds are of the whole dataset."""

    name: str
    form: Storage
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
    form: Storage | Literal["auto"] = "auto",
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
        >>> from colab_utils.sample_data import make_dataset
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
    if form not in ("auto", *get_args(Storage)):
        raise ColabUtilsError(f"expected form as auto, {', '.join(get_args(Storage))}, found {form!r}: choose another")
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
    kinds: list[tuple[Storage, int]] = [("keep", qualities[0]), *(("shrink", quality) for quality in qualities)]
    kinds.append(("pixels", qualities[0]))
    limits = {"min_size": min_size, "max_size": max_size}
    recipes = [{**limits, "form": kind, "jpeg_quality": quality} for kind, quality in kinds]
    trial = try_storages(dataset, Path(images), recipes, sample=sample, workers=processes)
    chosen, tried, count = list(trial.images), list(trial.images.values()), len(dataset)
    reads += [(one.file_bytes, one.read_s) for one in tried]
    speed, written, cores = speed or _describe_reads(reads), time_writing(), count_cores()
    room = _find_room(shards, local)
    original, stored = _count_pixels(dataset.sizes, **limits)
    options = []
    for row, (kind, quality) in enumerate(kinds):
        cost = StorageCost(*np.mean([one.storages[row] for one in tried], axis=0).tolist())
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
        masks=tuple(MaskOption(name, m[0], m[1] * 1000) for name, m in zip(MASK_STORAGES, masks, strict=True)),
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
    return tried.storages[-1].pixels < tried.storages[0].pixels


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
