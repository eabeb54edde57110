"""Ways of working from a slow Drive, side by side: `python -m benchmarks.slow_drive MEASURE --json
FILE`.

- ``loading``: loaders on loose files, for some seconds.
- ``epoch``: the first epoch of `open_dataset`, beside reading the same files and nothing else.
- ``arrival``: two epochs of loose files, of shards that are copied first, and of arriving shards.
- ``writing``, ``copy``, ``images``: `write_shards`, `copy_shards` and `copy_images` with few
  streams, and with "auto".
- ``width``: the streams that "auto" finds on a mounted Drive whose limit changes.

Each run has a slowed folder of its own, so that it does not know which streams served the others.
"""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from benchmarks.command import Row, format_spread, make_parser, run_to_end
from benchmarks.systems.base import collate
from colab_utils.course.sample_data import make_dataset
from colab_utils.errors import ColabUtilsError
from colab_utils.files import open_store, read_file
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.emulated_step import EmulatedStep
from colab_utils.loading.image_copy import copy_images
from colab_utils.loading.loader import make_loader
from colab_utils.loading.opening import open_dataset
from colab_utils.reader import Reader
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.write import write_shards
from colab_utils.show.report import make_table
from colab_utils.slow_drive import DriveProfile, get_profile, read_at_full_speed, slow_down
from tests.drive_mount import can_mount, mount_drive

__all__ = ["MEASURES", "main"]

BATCH_SIZE = 4
WORKERS = 2
# What one file of the mounted Drive takes, and how many of them there are.
OPEN_S = 0.2
MOUNTED_FILES = 80_000
# So many files it serves at once, one limit after the other. It refuses more than twice as many.
LIMITS = (8, 64, 16)
# In these seconds "auto" may look for a new limit. After them files are counted.
SETTLING_S = 20.0


class Setting(NamedTuple):
    """What a run gets: ``drive`` is slow, and holds ``images`` and ``shards``; ``ssd`` is empty."""

    drive: Path
    annotations: Path
    ssd: Path
    options: Namespace


Figures = dict[str, float]


def open_stock(
    setting: Setting,
    *,
    streams: int | str = "auto",
    workers: int = WORKERS,
    batch_size: int = BATCH_SIZE,
) -> DataLoader[Any]:
    """Open torch's own loader on the loose files."""
    return DataLoader(
        CocoFolder(setting.drive / "images", setting.annotations, streams=streams),
        batch_size,
        shuffle=True,
        num_workers=workers,
        collate_fn=collate,
        persistent_workers=workers > 0,
    )


def make_own_loader(dataset: Any) -> Any:
    """Make the loader that reads ahead."""
    return make_loader(dataset, batch_size=BATCH_SIZE, workers=WORKERS)


def open_own(setting: Setting) -> Any:
    """Open it on the loose files."""
    return make_own_loader(CocoFolder(setting.drive / "images", setting.annotations))


def open_copied(setting: Setting) -> Any:
    """Copy all shards, then open them."""
    copy_shards(setting.drive / "shards", setting.ssd)
    return make_own_loader(ShardDataset(setting.ssd))


def open_arriving(setting: Setting) -> Any:
    """Open shards that are still to come."""
    return make_own_loader(ArrivingShards(setting.drive / "shards", setting.ssd))


def train(loader: Any, step_ms: float) -> Iterator[tuple[float, int]]:
    """Yield when each batch of an epoch came, and its images; between them is an emulated step."""
    step = EmulatedStep(step_ms) if step_ms else None
    for batch in loader:
        yield perf_counter(), len(batch[0])
        if step is not None:
            step(*batch)


def close(loader: Any) -> None:
    """End the workers of a loader of ours."""
    if hasattr(loader, "close"):
        loader.close()


def time_rate(open_loader: Callable[[Setting], Any], setting: Setting) -> Figures:
    """Return images a second from the first batch on, epoch after epoch."""
    loader = open_loader(setting)
    images = 0
    began_s = 0.0
    ended_s = 0.0
    while ended_s - began_s <= setting.options.seconds:
        for ended_s, size in train(loader, setting.options.step_ms):
            if not began_s:
                began_s = ended_s
                continue
            images += size
            if ended_s - began_s > setting.options.seconds:
                break
    close(loader)
    return {"images/s": images / (ended_s - began_s)}


def time_call(measure: Callable[[Setting], Figures], setting: Setting) -> Figures:
    """Let a way measure itself."""
    return measure(setting)


def time_reading(setting: Setting) -> Figures:
    """Read every file once; return files a second from the first batch's last file on."""
    reader = Reader(read_file, open_store(setting.drive / "images"))
    ends_s = []
    for reading in reader.read_all(sorted((setting.drive / "images").iterdir())):
        reading.take()
        ends_s.append(perf_counter())
    reader.close()
    files = len(ends_s) - BATCH_SIZE
    return {"images/s": files / (ends_s[-1] - ends_s[BATCH_SIZE - 1])}


def time_first_epoch(setting: Setting) -> Figures:
    """Train for an epoch of what nobody has converted yet."""
    began_s = perf_counter()
    dataset: Any = open_dataset(
        setting.drive / "images",
        setting.annotations,
        drive=setting.drive / "written",
        ssd=setting.ssd,
        shard_mb=setting.options.shard_mb,
    )
    opened_s = perf_counter()
    loader = make_own_loader(dataset)
    batches = [*train(loader, setting.options.step_ms)]
    loader.close()
    dataset.wait()
    first_s = batches[0][0]
    rate = sum(size for _, size in batches[1:]) / (batches[-1][0] - first_s)
    return {
        "images/s": rate,
        "of the step alone": rate * setting.options.step_ms / 1000 / BATCH_SIZE,
        "opened, s": opened_s - began_s,
        "first batch, s": first_s - began_s,
    }


def time_epochs(open_loader: Callable[[Setting], Any], setting: Setting) -> Figures:
    """Return the seconds to the first batch, of the first epoch, and of the second one."""
    began_s = perf_counter()
    loader = open_loader(setting)
    firsts_s = []
    ends_s = []
    for _ in range(2):
        came_s = [came_s for came_s, _ in train(loader, setting.options.step_ms)]
        firsts_s.append(came_s[0])
        ends_s.append(perf_counter())
    close(loader)
    return {
        "first batch, s": firsts_s[0] - began_s,
        "first epoch, s": ends_s[0] - began_s,
        "second epoch, s": ends_s[1] - ends_s[0],
    }


def time_writing(streams: int | str, setting: Setting) -> Figures:
    """Return images a second of writing shards, and the reads in flight that this takes."""
    report = write_shards(
        setting.drive / "images",
        setting.annotations,
        shards=setting.ssd,
        shard_mb=setting.options.shard_mb,
        streams=streams,
    )
    rate = report.images / report.seconds
    profile = get_profile(setting.options.profile)
    # By Little's law: reads a second times the seconds of a read.
    return {"images/s": rate, "reads in flight": rate * (profile.open_s if profile else 0.0)}


def time_copy(streams: int | str, setting: Setting) -> Figures:
    """Return the megabytes a second of a copy."""
    report = copy_shards(setting.drive / "shards", setting.ssd, streams=streams)
    return {"MB/s": report.bytes / 1e6 / report.seconds}


def time_images(streams: int | str, setting: Setting) -> Figures:
    """Return the files a second of a copy of loose files."""
    report = copy_images(setting.drive / "images", setting.ssd, streams=streams)
    return {"files/s": report.files / report.seconds}


class CountingReader:
    """A reader that counts files when they are read, which may be long before they are taken."""

    def __init__(self, folder: Path, names: Iterator[int], streams: int | str) -> None:
        self.store = open_store(folder)
        self.reader = Reader(self._read, self.store, streams=streams)
        self._ends_s: deque[float] = deque()
        self._readings = self.reader.read_all(folder / f"{number}.jpg" for number in names)

    def _read(self, path: Path) -> bytes:
        content = self.store.read(path)
        self._ends_s.append(perf_counter())
        return content

    def measure(self, seconds: float) -> float:
        """Return the files a second that were read after `SETTLING_S`."""
        begin_s = perf_counter() + SETTLING_S
        for reading in self._readings:
            reading.take()
            if perf_counter() > begin_s + seconds:
                break
        files = sum(begin_s < read_s <= begin_s + seconds for read_s in [*self._ends_s])
        self._ends_s.clear()
        return files / seconds

    def close(self) -> None:
        """Give up all files."""
        self._readings.close()
        self.reader.close()


def measure_width(is_fixed: bool, setting: Setting) -> Figures:
    """Return files a second at each of `LIMITS`: of "auto", or of as many streams as the limit."""
    backing = setting.ssd / "backing"
    backing.mkdir(parents=True)
    for number in range(MOUNTED_FILES):
        (backing / f"{number}.jpg").write_bytes(b"%d" % number)
    profile = DriveProfile("limited", OPEN_S, 1e9, "the benchmark", most_reads=2 * LIMITS[0])
    figures: Figures = {}
    names = count()
    with mount_drive(backing, setting.ssd / "mount", profile=profile) as mount:
        reader = CountingReader(mount.folder, names, "auto")
        for limit in LIMITS:
            mount.fail(served=limit)
            if is_fixed:
                reader.close()
                reader = CountingReader(mount.folder, names, limit)
            figures[f"{limit} at once: files/s"] = reader.measure(setting.options.seconds)
        reader.close()
    return figures


MEASURES: dict[str, tuple[Callable[[Any, Setting], Figures], dict[str, Any]]] = {
    "loading": (
        time_rate,
        {
            "plain loop": partial(open_stock, streams=1, workers=0),
            "2 workers": partial(open_stock, streams=1),
            "2 workers, batch of 4 at once": open_stock,
            "2 workers, batch of 16 at once": partial(open_stock, batch_size=16),
            "make_loader, 2 workers": open_own,
        },
    ),
    "epoch": (
        time_call,
        {"open_dataset": time_first_epoch, "reading alone": time_reading},
    ),
    "arrival": (
        time_epochs,
        {
            "loose files on Drive": partial(open_stock, streams=1),
            "copy, then train": open_copied,
            "train while it is copied": open_arriving,
        },
    ),
    "writing": (time_writing, {"4 streams": 4, "auto": "auto"}),
    "copy": (time_copy, {"one stream": 1, "auto": "auto"}),
    "images": (time_images, {"one stream": 1, "auto": "auto"}),
    "width": (measure_width, {"as many streams": True, "auto": False}),
}
"""What measures, and the ways that are compared with the first of them."""


def run_way(way: str, data: Path, annotations: Path, options: Namespace) -> Figures:
    """Run a way once, on a copy of the data that is slow."""
    time_way, ways = MEASURES[options.measure]
    with TemporaryDirectory(dir=options.work) as folder, read_at_full_speed():
        drive = Path(folder) / "drive"
        shutil.copytree(data, drive)
        slow_down(drive, options.profile)
        return time_way(ways[way], Setting(drive, annotations, Path(folder) / "ssd", options))


def tabulate_runs(rows: Sequence[Row]) -> str:
    """Return medians [lowest-highest], and each way's first figure over that of the first way."""
    table = []
    for way in dict.fromkeys(row["way"] for row in rows):
        runs = [row for row in rows if row["way"] == way]
        names = [name for name in runs[0] if name not in ("way", "repeat")]
        line = {"way": way}
        line |= {name: format_spread([run[name] for run in runs], ".4g") for name in names}
        firsts = [row[names[0]] for row in rows if row["way"] == rows[0]["way"]]
        line["times the first"] = f"{median(run[names[0]] for run in runs) / median(firsts):.2f}"
        table.append(line)
    return str(make_table(table))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = make_parser("slow_drive", __doc__, builtin="slow_drive")
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("measure", choices=MEASURES)
    parser.add_argument("--images", type=Path, help="image folder (the built-in dataset)")
    parser.add_argument("--annotations", type=Path, help="its COCO JSON")
    parser.add_argument("--samples", type=int, default=500, help="built-in images (%(default)s)")
    parser.add_argument("--profile", default="bad", help="of Drive (%(default)s)")
    parser.add_argument(
        "--step-ms", type=float, default=0, help="emulated step of a batch, 0 for none (0)"
    )
    parser.add_argument("--seconds", type=float, default=20, help="of a rate (%(default)s)")
    parser.add_argument("--shard-mb", type=float, default=128, help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="in turns (%(default)s)")
    options = parser.parse_args(arguments)
    return run_to_end(measure(options), options.json, tabulate_runs, options=vars(options))


def measure(options: Namespace) -> Iterator[Row]:
    """Yield every way once, then each again."""
    if options.measure == "width" and can_mount():
        raise ColabUtilsError(f"Nothing can be mounted here: {can_mount()}.")
    options.work.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=options.work) as folder:
        annotations = make_data(Path(folder), options)
        for repeat, way in product(range(options.repeats), MEASURES[options.measure][1]):
            figures = run_way(way, Path(folder), annotations, options)
            yield {"way": way, "repeat": repeat, **figures}


def make_data(folder: Path, options: Namespace) -> Path:
    """Make ``images`` and, where they are needed, ``shards``; return the COCO JSON."""
    images = options.images
    annotations = options.annotations
    if images is None:
        made = make_dataset(options.work / "made", n=options.samples)
        images = made.images
        annotations = made.annotations
    shutil.copytree(images, folder / "images")
    if options.measure in ("arrival", "copy"):
        write_shards(images, annotations, shards=folder / "shards", shard_mb=options.shard_mb)
    return Path(annotations)


if __name__ == "__main__":
    sys.exit(main())
