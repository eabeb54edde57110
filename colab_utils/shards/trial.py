"""Try the forms of storage on some images: what each costs on this machine, alone and with every process busy."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pycocotools import mask as coco_mask

from colab_utils.data.coco import CocoDataset
from colab_utils.data.decoding import decode_pixels
from colab_utils.data.masks import pack_masks, unpack_masks
from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import fork_pool, show_progress, write_file
from colab_utils.shards.arrays import ArraysBuilder, ShardArrays, decode_counts
from colab_utils.shards.format import hash_bytes, pad_member
from colab_utils.shards.images import StoredImage, dump_record, make_record
from colab_utils.shards.jobs import read_image, store_sample

__all__ = ["MASK_FORMS", "FormCost", "ImageTrial", "Trial", "time_writing", "try_forms"]

MASK_FORMS = ("packed crops (what the loader reads)", "RLE (in the tar)", "dense")
TOGETHER_S, ALONE_S = 10.0, 4.0  # seconds
FEWEST_IMAGES = 4
MOST_OBJECTS = 32  # of an image whose masks are made dense: a thousand dense ones take gigabytes
WRITTEN_BYTES = 32_000_000


class FormCost(NamedTuple):
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
    """One image tried in every form; of the masks, bytes and CPU seconds until they are dense, as `MASK_FORMS`."""

    file_bytes: int
    read_s: float
    forms: list[FormCost]
    masks: list[tuple[float, float]]


@dataclass(frozen=True)
class Trial:
    """The images that were tried, by their number in the dataset, while every process was busy."""

    images: dict[int, ImageTrial]
    slowdown: float
    """How much longer an image takes with every process busy than with one alone: 1 to the number of processes."""


def try_forms(
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
            busy_s += sum(form.write_s for form in together[few[i]].forms)
            calm_s += sum(form.write_s for form in calm.forms)
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
    forms, tables = [], {}
    for recipe in recipes:
        stored, store_s, store_cpu_s = _time(store_sample, data, part, 0, recipe)
        size = stored.height, stored.width
        if size not in tables:  # the same for every form of one size
            tables[size] = _time(_make_table, part, stored)
        (text, arrays), table_s, table_cpu_s = tables[size]
        _, _, read_cpu_s = _time(_decode_into, np.ones((*size, 3), np.uint8), stored.data)
        forms.append(
            FormCost(
                pixels=size[0] * size[1],
                image_bytes=len(pad_member("0", stored.data)),
                json_bytes=len(pad_member("0", text)),
                table_bytes=sum(array.nbytes for array in vars(arrays).values()),
                write_s=store_s + table_s,
                write_cpu_s=store_cpu_s + table_cpu_s,
                read_cpu_s=read_cpu_s,
            )
        )
    return ImageTrial(len(data), read_s, forms, _try_masks(json.loads(text)))


def _make_table(part: CocoDataset, stored: StoredImage) -> tuple[bytes, ShardArrays]:
    record = make_record(part.image(0), part.annotations(0), stored)
    text, builder = dump_record(record), ArraysBuilder()
    builder.add(record, stored.data, (0, 0), (0, 0))
    return text, builder.build()


def _try_masks(record: dict[str, Any]) -> list[tuple[float, float]]:
    rles = [decode_counts(row["segmentation"]) for row in record["annotations"] if not row["iscrowd"]]
    few, shape = rles[:MOST_OBJECTS], (record["height"], record["width"])
    if not few:
        return [(0, 0)] * len(MASK_FORMS)
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
