"""The first epoch of loose files on a bad Drive, beside reading the same files and nothing else:
`python -m benchmarks.first_epoch`.

Nothing is converted at first: `open_dataset` writes shards while a loader with two workers feeds an
emulated step. Both ways take turns, each on a folder of its own, so that neither knows how many
streams served the other well. At the end the shards are compared with those of `write_shards`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from colab_utils.files import read_file
from colab_utils.loading.emulated_step import EmulatedStep
from colab_utils.loading.loader import make_loader
from colab_utils.loading.opening import open_dataset
from colab_utils.reader import Reader
from colab_utils.sample_data import make_dataset
from colab_utils.shards.write import write_shards
from colab_utils.show.table import make_table
from colab_utils.slow_drive import read_at_full_speed, slow_down

__all__ = ["compare_shards", "main", "time_epoch", "time_reading"]

BATCH_SIZE = 4
WORKERS = 2
COLUMNS = {
    "epoch 1, images/s": "images_per_s",
    "opened, s": "opened_s",
    "first batch, s": "first_s",
    "writing, CPU-ms/image": "writing_ms",
    "writing and workers": "children_ms",
}


def link_images(images: Path, work: Path, profile: str) -> Path:
    """Return a new slowed folder of the same files."""
    folder = work / "images"
    shutil.copytree(images, folder, copy_function=os.link)
    slow_down(folder, profile)
    return folder


def time_reading(images: Path, annotations: Path) -> dict[str, float]:
    """Read every file of the annotations once; return files a second from the first to the last."""
    entries = json.loads(annotations.read_bytes())["images"]
    paths = [images / entry["file_name"] for entry in entries]
    reader = Reader(read_file, place=images)
    ends_s = []
    for reading in reader.read_all(paths):
        reading.take()
        ends_s.append(perf_counter())
    reader.close()
    spent_s = ends_s[-1] - ends_s[BATCH_SIZE - 1]
    return {"images_per_s": (len(paths) - BATCH_SIZE) / spent_s}


def time_epoch(
    images: Path, annotations: Path, work: Path, *, step_ms: float, shard_mb: float
) -> dict[str, float]:
    """Train for an epoch while shards are written; return its speed from the first batch on."""
    step = EmulatedStep(step_ms) if step_ms else None
    children_s = measure_children_s()
    began_s = perf_counter()
    dataset: Any = open_dataset(
        images, annotations, drive=work / "drive", ssd=work / "ssd", shard_mb=shard_mb
    )
    opened_s = perf_counter() - began_s
    loader = make_loader(dataset, batch_size=BATCH_SIZE, workers=WORKERS)
    arrivals_s = []
    count = 0
    for batch in loader:
        arrivals_s.append(perf_counter())
        count += len(batch[0])
        if step is not None:
            step(*batch)
    loader.close()
    dataset.wait()
    # The writers' processes have ended, so their time counts as that of children.
    spent_s = arrivals_s[-1] - arrivals_s[0]
    return {
        "images_per_s": (count - BATCH_SIZE) / spent_s,
        "opened_s": opened_s,
        "first_s": arrivals_s[0] - began_s,
        "writing_ms": 1000 * dataset.arrival.cpu_s / count,
        "children_ms": 1000 * (measure_children_s() - children_s) / count,
    }


def measure_children_s() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    usage = getrusage(RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def compare_shards(images: Path, annotations: Path, work: Path, shard_mb: float) -> int:
    """Compare the shards on "drive" with those that `write_shards` makes; return their number.

    Raises:
        AssertionError: a file is missing, or differs.
    """
    write_shards(images, annotations, shards=work / "again", shard_mb=shard_mb, max_bad=0.01)
    names = sorted(path.name for path in (work / "again").glob("shard-*"))
    sent = sorted(path.name for path in (work / "drive").glob("shard-*"))
    if names != sent:
        raise AssertionError(f"The shards {sent} were sent, and {names} are right.")
    for name in names:
        if (work / "again" / name).read_bytes() != (work / "drive" / name).read_bytes():
            raise AssertionError(f"The bytes of {name} differ.")
    return len(names) // 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_epoch", description=__doc__)
    parser.add_argument("--images", type=Path, help="default: the built-in dataset")
    parser.add_argument("--annotations", type=Path)
    parser.add_argument("--samples", type=int, default=500, help="images of the built-in dataset")
    parser.add_argument("--profile", default="bad")
    parser.add_argument("--step-ms", type=float, default=100)
    parser.add_argument("--shard-mb", type=float, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    readings = []
    epochs = []
    with TemporaryDirectory() as folder, read_at_full_speed():
        images = options.images
        annotations = options.annotations
        if images is None:
            made = make_dataset(Path(folder) / "data", n=options.samples)
            images = made.images
            annotations = made.annotations
        for turn in range(options.repeats):
            work = Path(folder) / f"epoch-{turn}"
            slowed = link_images(images, work, options.profile)
            epochs.append(
                time_epoch(
                    slowed,
                    annotations,
                    work,
                    step_ms=options.step_ms,
                    shard_mb=options.shard_mb,
                )
            )
            print(epochs[-1], file=sys.stderr)
            slowed = link_images(images, Path(folder) / f"reading-{turn}", options.profile)
            readings.append(time_reading(slowed, annotations))
            print(readings[-1], file=sys.stderr)
        shards = compare_shards(images, annotations, work, options.shard_mb)
    print(make_table([describe_turns(epochs, readings, options.step_ms)]))
    print(f"\nThe {shards} shards have the bytes that write_shards makes.")
    return 0


def describe_turns(
    epochs: list[dict[str, float]], readings: list[dict[str, float]], step_ms: float
) -> dict[str, str]:
    """Return the row of medians, each with its spread.

    An epoch is compared with reading alone, or with the steps alone if these take longer.
    """
    shares = []
    for epoch, reading in zip(epochs, readings, strict=True):
        limit = reading["images_per_s"]
        if step_ms:
            limit = min(limit, 1000 * BATCH_SIZE / step_ms)
        shares.append(epoch["images_per_s"] / limit)
    row = {
        "reading alone, images/s": show_spread([turn["images_per_s"] for turn in readings]),
        "epoch 1 / the slower of reading and steps": show_spread(shares),
    }
    for title, name in COLUMNS.items():
        row[title] = show_spread([epoch[name] for epoch in epochs])
    return row


def show_spread(values: list[float]) -> str:
    """Return a median with the lowest and the highest value."""
    return f"{median(values):.3g} [{min(values):.3g}-{max(values):.3g}]"


if __name__ == "__main__":
    sys.exit(main())
