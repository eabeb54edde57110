"""Two epochs from a slow Drive, three ways: `python -m benchmarks.arrival --images DIR
--annotations FILE`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.command import Run, make_parser, measure_in_turns, run_to_end
from benchmarks.data import make_data
from benchmarks.systems.base import BATCH_SIZE, collate
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.loading.emulated_step import EmulatedStep
from colab_utils.loading.loader import make_loader
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.write import write_shards
from colab_utils.show.table import make_table
from colab_utils.slow_drive import read_at_full_speed, slow_down

__all__ = ["main", "run_once", "tabulate_runs"]

PROFILES = ("fast", "typical", "bad")
WORKERS = 2


def run_once(way: str, data: Any, shards: Path, profile: str, step_ms: float) -> dict[str, float]:
    """Seconds to the first batch, to the end of the first epoch, and of the second one."""
    step = EmulatedStep(step_ms)
    began_s = perf_counter()
    with TemporaryDirectory(dir=shards.parent) as folder, read_at_full_speed():
        slow_down(data.images, profile)
        slow_down(shards, profile)
        close: Callable[[], Any] = int
        if way == "loose files on Drive":
            loose = CocoFolder(data.images, data.annotations)
            loader: Any = DataLoader(
                loose, BATCH_SIZE, shuffle=True, num_workers=WORKERS, collate_fn=collate
            )
        elif way == "copy, then train":
            copy_shards(shards, Path(folder) / "ssd")
            loader = make_loader(
                ShardDataset(Path(folder) / "ssd"), batch_size=BATCH_SIZE, workers=WORKERS
            )
            close = loader.close
        else:
            dataset = ArrivingShards(shards, Path(folder) / "ssd")
            loader = make_loader(dataset, batch_size=BATCH_SIZE, workers=WORKERS)
            close = loader.close
        times_s: list[float] = []
        ends_s = []
        try:
            for _ in range(2):
                for batch in loader:
                    times_s.append(perf_counter() - began_s)
                    step(*batch)
                ends_s.append(perf_counter() - began_s)
        finally:
            close()
    return {
        "first batch": times_s[0],
        "first epoch": ends_s[0],
        "second epoch": ends_s[1] - ends_s[0],
    }


WAYS = ("loose files on Drive", "copy, then train", "train while it is copied")


def tabulate_runs(rows: Sequence[dict[str, Any]]) -> str:
    """Medians [lowest-highest] in seconds, a row for each profile and way."""
    table = []
    for profile, way in dict.fromkeys((row["profile"], row["way"]) for row in rows):
        result: dict[str, Any] = {"Drive": profile, "way": way}
        for name in ("first batch", "first epoch", "second epoch"):
            times = [row[name] for row in rows if (row["profile"], row["way"]) == (profile, way)]
            result[f"{name}, s"] = f"{median(times):.1f} [{min(times):.1f}-{max(times):.1f}]"
        table.append(result)
    return str(make_table(table)) if table else "nothing was measured"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = make_parser("arrival", __doc__)
    parser.add_argument("--samples", type=int, default=320, help="images, about (%(default)s)")
    parser.add_argument("--shard-mb", type=float, default=4, help="size of a shard (%(default)s)")
    parser.add_argument(
        "--step-ms", type=float, default=100, help="emulated step of a batch of 4 (%(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="of each way, in turns (%(default)s)"
    )
    parser.add_argument(
        "--ways", nargs="+", default=WAYS, choices=WAYS, help="those to compare (all)"
    )
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []

    def measure() -> None:
        data = make_data(
            "kept", options.work, options.images, options.annotations, samples=options.samples
        )
        shards = options.work / "arriving"
        shutil.rmtree(shards, ignore_errors=True)
        write_shards(
            data.images, data.annotations, shards=shards, shard_mb=options.shard_mb, storage="keep"
        )
        runs: list[Run] = [
            (
                {"profile": profile, "way": way},
                partial(run_once, way, data, shards, profile, options.step_ms),
            )
            for profile, way in product(PROFILES, options.ways)
        ]
        about = {"samples": options.samples, "step_ms": options.step_ms}
        measure_in_turns(runs, rows, repeats=options.repeats, about=about, path=options.json)

    return run_to_end(measure, lambda: tabulate_runs(rows))


if __name__ == "__main__":
    sys.exit(main())
