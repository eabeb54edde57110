"""Loose files on a bad Drive, read one by one and many at once: `python -m benchmarks.streams
--images DIR --annotations FILE`.

Each way runs for some seconds, in turns with the others, on the slowed folder of profile "bad".
A step of 0 ms shows what reading and work alone allow.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.systems.base import collate
from colab_utils.loading.dataset import CocoFolder
from colab_utils.loading.emulated_step import EmulatedStep
from colab_utils.loading.loader import make_loader
from colab_utils.shards.write import write_shards
from colab_utils.show.table import make_table
from colab_utils.slow_drive import read_at_full_speed, slow_down

__all__ = ["main", "time_loader", "time_writing"]

WORKERS = 2
# The first way is the rival of the others.
PLAIN = "plain loop"


def open_plain(images: Path, annotations: Path) -> Any:
    """Open what reads one file after the other, in this process."""
    dataset = CocoFolder(images, annotations, streams=1)
    return DataLoader(dataset, 4, shuffle=True, collate_fn=collate)


def open_stock(images: Path, annotations: Path, streams: int | str, batch_size: int) -> Any:
    """Open torch's own loader with two workers."""
    dataset = CocoFolder(images, annotations, streams=streams)
    return DataLoader(
        dataset,
        batch_size,
        shuffle=True,
        num_workers=WORKERS,
        collate_fn=collate,
        persistent_workers=True,
    )


def open_own(images: Path, annotations: Path) -> Any:
    """Open `make_loader`, which reads ahead."""
    return make_loader(CocoFolder(images, annotations), batch_size=4, workers=WORKERS)


WAYS: dict[str, Callable[[Path, Path], Any]] = {
    PLAIN: open_plain,
    "2 workers": lambda images, annotations: open_stock(images, annotations, 1, 4),
    "2 workers, batch of 4 at once": lambda images, annotations: open_stock(
        images, annotations, "auto", 4
    ),
    "2 workers, batch of 16 at once": lambda images, annotations: open_stock(
        images, annotations, "auto", 16
    ),
    "make_loader, 2 workers": open_own,
}


def time_loader(loader: Any, step: Callable[..., Any] | None, seconds: float) -> float:
    """Return images a second, counted from the first batch on."""
    images = 0
    started_s = 0.0
    for batch in _repeat(loader):
        now_s = perf_counter()
        if not started_s:
            started_s = now_s
        elif now_s - started_s > seconds:
            break
        else:
            images += len(batch[0])
        if step is not None:
            step(*batch)
    return images / (perf_counter() - started_s)


def _repeat(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def time_writing(images: Path, annotations: Path, streams: int | str) -> float:
    """Return images a second of writing shards."""
    with TemporaryDirectory() as folder:
        started_s = perf_counter()
        report = write_shards(
            images, annotations, shards=Path(folder) / "shards", streams=streams, max_bad=0
        )
        return report.images / (perf_counter() - started_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streams", description=__doc__)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--annotations", type=Path, required=True)
    parser.add_argument("--profile", default="bad")
    parser.add_argument("--step-ms", type=float, default=0)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--writing", action="store_true", help="time write_shards in place")
    options = parser.parse_args(arguments)
    rates: dict[str, list[float]] = {}
    with TemporaryDirectory() as folder, read_at_full_speed():
        # A folder of its own is slowed, so that the annotations are read at full speed.
        images = Path(folder) / "images"
        shutil.copytree(options.images, images)
        slow_down(images, options.profile)
        for _ in range(options.repeats):
            if options.writing:
                for streams in (4, "auto"):
                    rate = time_writing(images, options.annotations, streams)
                    rates.setdefault(f"write_shards, streams={streams}", []).append(rate)
                continue
            for name, open_way in WAYS.items():
                step = EmulatedStep(options.step_ms) if options.step_ms else None
                loader = open_way(images, options.annotations)
                rate = time_loader(loader, step, options.seconds)
                rates.setdefault(name, []).append(rate)
                if hasattr(loader, "close"):
                    loader.close()
                print(f"{name}: {rate:.1f} images/s", file=sys.stderr)
    print(tabulate_rates(rates))
    return 0


def tabulate_rates(rates: dict[str, list[float]]) -> str:
    """Return a table of medians, each with its spread and its ratio to the first."""
    rival = median(next(iter(rates.values())))
    rows = []
    for name, values in rates.items():
        spread = f"[{min(values):.1f}-{max(values):.1f}]"
        rows.append(
            {
                "way": name,
                "images/s": f"{median(values):.1f} {spread}",
                "times the first": f"{median(values) / rival:.1f}",
            }
        )
    return make_table(rows)


if __name__ == "__main__":
    sys.exit(main())
