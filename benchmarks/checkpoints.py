"""What a checkpoint costs a run: `python -m benchmarks.checkpoints --json FILE`.

The same training with a checkpoint after every step and with the last one alone, in turns. The
difference holds all that a checkpoint takes from the steps: copying the state, and the thread that
writes it, reads it back and compares it. Steps are short here, so that a checkpoint is often waited
for: in a run with minutes between two it costs less.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from benchmarks.command import Run, format_spread, make_parser, measure_in_turns, run_to_end
from colab_utils.sample_data import make_dataset
from colab_utils.shards.write import write_shards
from colab_utils.show.table import make_table
from colab_utils.training.train import train

__all__ = ["main", "tabulate_runs", "time_run"]

WAYS = ("last alone", "every step")
MODELS = ("maskrcnn_resnet50_fpn", "maskrcnn_mobilenet_v3_large_fpn")
# Seconds between two checkpoints, by default. The shorter pause is at the end of an epoch.
PAUSES_S = (60, 10)


def time_run(model: str, way: str, work: Path, folder: Path, steps: int) -> dict[str, float]:
    """Return seconds from the first step's end to that of the run, and the checkpoints in them."""
    with TemporaryDirectory(dir=folder) as run:
        marks_s: list[float] = []
        train(
            work / "shards",
            Path(run) / "run",
            steps=steps + 1,
            model=model,
            weights=None,
            min_size=64,
            batch_size=2,
            checkpoint_steps=1 if way == "every step" else None,
            log=lambda line: marks_s.append(perf_counter()),
        )
        # The plan was logged first.
        seconds = perf_counter() - marks_s[1]
        size = max(path.stat().st_size for path in (Path(run) / "run").glob("*.pt"))
    return {
        "seconds": seconds,
        "checkpoints": steps + 1 if way == "every step" else 1,
        "bytes": size,
    }


def tabulate_runs(rows: Sequence[dict[str, Any]]) -> str:
    """Tabulate the seconds that one more checkpoint adds, and their share of an interval."""
    table = []
    for model in dict.fromkeys(row["model"] for row in rows):
        runs = {
            way: [row for row in rows if row["model"] == model and row["way"] == way]
            for way in WAYS
        }
        every = runs["every step"]
        costs = []
        for less, more in zip(runs["last alone"], every, strict=False):
            seconds = more["seconds"] - less["seconds"]
            costs.append(seconds / (more["checkpoints"] - less["checkpoints"]))
        if costs:
            table.append(
                {
                    "model": model,
                    "checkpoint, MB": f"{every[0]['bytes'] / 1e6:.0f}",
                    "costs, s": format_spread(costs),
                    **{f"of {pause} s": f"{median(costs) / pause:.2%}" for pause in PAUSES_S},
                }
            )
    return str(make_table(table)) if table else "nothing was measured"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = make_parser("checkpoints", __doc__, builtin="checkpoints")
    parser.add_argument("--steps", type=int, default=6, help="of each run (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of each, in turns (%(default)s)")
    parser.add_argument(
        "--run", type=Path, help="where the checkpoints are written, a folder on Drive say (--work)"
    )
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []

    def measure() -> None:
        made = make_dataset(
            options.work / "images", n=2 * (options.steps + 1), width=320, height=240
        )
        write_shards(made.images, made.annotations, shards=options.work / "shards")
        folder = options.run or options.work
        runs: list[Run] = [
            (
                {"model": model, "way": way},
                partial(time_run, model, way, options.work, folder, options.steps),
            )
            for model in MODELS
            for way in WAYS
        ]
        about = {"steps": options.steps, "pauses_s": PAUSES_S}
        measure_in_turns(runs, rows, repeats=options.repeats, about=about, path=options.json)

    return run_to_end(measure, lambda: tabulate_runs(rows))


if __name__ == "__main__":
    sys.exit(main())
