"""What `watch` costs: `python -m benchmarks.overhead --json FILE` runs the same loop bare and
watched, in turns.

A step trains a tiny model and keeps its core busy until ``--step-ms`` are over: what the watch adds
cannot hide. A pair is an epoch of each, in changing order. The wall time of a pair differs by some
percent by itself, so the cost is also counted: the time of the loop outside of its steps and of the
loader's own calls, and the CPU time of other threads.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time, thread_time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.causes.loop import Photos
from benchmarks.command import Row, make_parser, run_to_end
from colab_utils.diagnosis.watch import WatchedLoader
from colab_utils.show.report import make_table

__all__ = ["ClockedLoader", "main", "tabulate", "time_loop"]

WORKERS = (0, 2)


class ClockedLoader(DataLoader[Any]):
    """A ``DataLoader`` that adds up how long its own calls take."""

    inside_s = 0.0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        began_s = perf_counter()
        for batch in super().__iter__():
            self.inside_s += perf_counter() - began_s
            yield batch
            began_s = perf_counter()
        self.inside_s += perf_counter() - began_s


def time_loop(loader: Iterable[Any], clocked: ClockedLoader, *, step_ms: float) -> dict[str, float]:
    """An epoch: its wall seconds, those outside of steps and of the loader, and the CPU seconds of
    other threads.
    """
    model = nn.Linear(3 * 32 * 32, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    clocked.inside_s = 0.0
    stepped_s = 0.0
    threads_s = process_time() - thread_time()
    began_s = perf_counter()
    for images, labels in loader:
        step_began_s = perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images.flatten(1)), labels).backward()
        optimizer.step()
        while perf_counter() < step_began_s + step_ms / 1000:
            pass
        stepped_s += perf_counter() - step_began_s
    wall_s = perf_counter() - began_s
    threads_s = process_time() - thread_time() - threads_s
    return {
        "wall_s": wall_s,
        "outside_s": wall_s - stepped_s - clocked.inside_s,
        "threads_s": threads_s,
    }


def make_pair(
    folder: Path, *, workers: int, batches: int
) -> dict[str, tuple[Iterable[Any], ClockedLoader]]:
    """A bare loader and a watched one, whose workers live already."""
    photos = Photos(folder, count=4 * batches)
    settings: dict[str, Any] = {
        "batch_size": 4,
        "num_workers": workers,
        "persistent_workers": workers > 0,
    }
    bare = ClockedLoader(photos, **settings)
    inner = ClockedLoader(photos, **settings)
    loaders: dict[str, tuple[Iterable[Any], ClockedLoader]] = {
        "bare": (bare, bare),
        "watched": (WatchedLoader(inner, 60, "report"), inner),
    }
    for loader, _ in loaders.values():
        for _ in loader:
            break
    return loaders


def find_costs(row: Row) -> tuple[float, float]:
    """What a watched epoch takes more, as shares of the bare one: by the count, and by the wall."""
    bare = row["bare"]
    watched = row["watched"]
    counted = sum(watched[name] - bare[name] for name in ("outside_s", "threads_s"))
    return counted / bare["wall_s"], watched["wall_s"] / bare["wall_s"] - 1


def tabulate(rows: Sequence[Row]) -> str:
    """Tabulate medians, each with the range of the middle half of the pairs."""
    table = []
    for workers in dict.fromkeys(row["workers"] for row in rows):
        costs = [find_costs(row) for row in rows if row["workers"] == workers]
        counted = _format_range([counted for counted, _ in costs])
        wall = _format_range([wall for _, wall in costs])
        table.append({"workers": workers, "pairs": len(costs), "counted": counted, "wall": wall})
    return str(make_table(table))


def _format_range(shares: Sequence[float]) -> str:
    ordered = sorted(shares)
    quarter = len(ordered) // 4
    return f"{median(ordered):+.2%} ({ordered[quarter]:+.2%} to {ordered[-1 - quarter]:+.2%})"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = make_parser("overhead", __doc__, builtin="overhead")
    parser.add_argument(
        "--pairs", type=int, default=8, help="of epochs, for each number of workers (%(default)s)"
    )
    parser.add_argument("--batches", type=int, default=500, help="of an epoch (%(default)s)")
    parser.add_argument("--step-ms", type=float, default=20, help="of a step (%(default)s)")
    options = parser.parse_args(arguments)
    return run_to_end(measure(options), options.json, tabulate, step_ms=options.step_ms)


def measure(options: Namespace) -> Iterator[Row]:
    """Yield a pair of epochs after the other."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        for workers in WORKERS:
            # Workers of another pair would be measured, too, so only these live.
            loaders = make_pair(Path(folder), workers=workers, batches=options.batches)
            for number in range(options.pairs):
                order = sorted(loaders, reverse=bool(number % 2))
                times = {name: time_loop(*loaders[name], step_ms=options.step_ms) for name in order}
                yield {"workers": workers, **times}


if __name__ == "__main__":
    sys.exit(main())
